"""Metrics: MFU against its table, TensorBoard and W&B files read back by independent readers, a trace of one step."""

import json
import struct

import pytest

from infra.topology import parse, peak_flops
from model.config import LogConfig
from model.metrics import read_metrics
from model.train import Trainer, TrainSpec, train


def events(directory):
    """(step, {tag: value}) from TensorBoard event files, read as TFRecords."""
    from tensorboardX.proto import event_pb2

    found = []
    for path in sorted(directory.glob("events.out.tfevents.*")):
        raw, at = path.read_bytes(), 0
        while at < len(raw):
            (size,) = struct.unpack("<Q", raw[at : at + 8])
            event = event_pb2.Event.FromString(raw[at + 12 : at + 12 + size])
            at += 12 + size + 4
            if event.HasField("summary"):
                found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
    return found


def test_views_hold_what_the_log_holds(make_run):
    run = make_run(steps=4, train={"log": {"tensorboard": True, "wandb": "offline", "trace_steps": [2, 3]}})
    train(TrainSpec.from_run(run))
    log = read_metrics(run / "train" / "metrics.jsonl")
    assert [m["mfu"] for m in log] == [None] * 4  # a CPU has no entry in the table
    seen = {(step, tag): value for step, tag, value in events(run / "train" / "tensorboard")}
    for line in log:
        for name in ("ce", "grad_norm", "lr", "tokens_per_second"):
            assert seen[line["step"], f"train/{name}"] == pytest.approx(line[name], rel=1e-6)
    assert not [tag for _, tag in seen if "mfu" in tag or "receipt" in tag]
    stored = list((run / "train" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(stored) == 1 and b"train/grad_norm" in stored[0].read_bytes()
    assert list((run / "train" / "trace").rglob("*.xplane.pb"))


def test_mfu_is_model_flops_over_peak(make_run, monkeypatch):
    """With a made-up peak of 1 GFLOP/s: MFU x peak x seconds is 6 FLOPs per weight and token plus attention.

    All views are off by default, and the log is not.
    """
    run = make_run(steps=3)
    monkeypatch.setattr(Trainer, "peak_flops", lambda self: 1e9)
    train(TrainSpec.from_run(run))
    assert sorted(p.name for p in (run / "train").iterdir()) == ["metrics.jsonl", "seams.json"]
    weights = 4 * (4 * 64 * 64 + 3 * 64 * 256) + 64 * 256
    seen = (
        3 * (1 + 2 + 3 + 4 * 13) / 16 + 17 / 2
    )  # three layers with a window of 4 and a full one, 16 positions
    per_token = 6 * weights + 3 * 4 * 64 * seen
    for line in read_metrics(run / "train" / "metrics.jsonl"):
        assert line["mfu"] * 1e9 == pytest.approx(per_token * line["tokens_per_second"], rel=1e-9)


@pytest.mark.parametrize(
    ("kind", "flops"),
    [("TPU v4", 275e12), ("TPU v5 lite", 197e12), ("TPU v5", 459e12), ("TPU v6 lite", 918e12), ("TPU7x", 1153.5e12),
     ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA H100 80GB HBM3", 989.4e12), ("NVIDIA H200", 989.4e12), ("cpu", None)],
)  # fmt: skip
def test_peak_of_a_device(kind, flops):
    assert peak_flops(kind) == flops


def test_peak_of_a_slice_is_that_of_its_devices():
    assert parse("tpu7x:4x4x4").flops_per_device == peak_flops("TPU7x")


def test_a_trace_that_ends_before_it_begins_is_refused():
    with pytest.raises(ValueError, match="trace_steps"):
        LogConfig(trace_steps=(5, 4))
    assert json.loads(LogConfig(trace_steps=(4, 5)).model_dump_json())["trace_steps"] == [4, 5]
