"""The loop: resume is bit-equal, SIGTERM saves, the log is cut back, wrong recipes are refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from infra.artifacts import digest_tree, write_json_atomic
from infra.errors import IdentityError, ReproError
from model import checkpoint
from model.metrics import read_metrics
from model.seams import note, seams
from model.train import TrainSpec, train

STABLE = ("step", "ce", "z_loss", "grad_norm", "skipped", "lr", "receipt", "tokens_seen")


def outcome(run, step):
    """Everything that must be bit-equal: digest of all files' content as restored, and the log."""
    from model.step import abstract_state

    spec = TrainSpec.from_run(run)
    state, meta = checkpoint.restore(run / "checkpoints", step, abstract_state(spec.step_spec()))
    log = [{k: m[k] for k in STABLE} for m in read_metrics(run / "train" / "metrics.jsonl")]
    return checkpoint.state_digest(state), meta["receipt"], log


def edit(run, section, **fields):
    path = run / "recipe.json"
    recipe = json.loads(path.read_text())
    recipe[section] = {**recipe[section], **fields}
    path.write_text(json.dumps(recipe))


def start(run, **env):
    return subprocess.Popen(
        [sys.executable, "-m", "model.train", "--run", str(run)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **env}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for_step(run, step, process):
    for _ in range(600):
        if len(read_metrics(run / "train" / "metrics.jsonl")) >= step:
            return
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    raise AssertionError("the run did not get going")


def test_a_batch_that_does_not_divide_is_refused_before_anything_is_compiled(make_run, monkeypatch):
    from model import sharding

    run = make_run()
    edit(run, "data", global_batch_instances=6)
    monkeypatch.setattr(sharding, "batch_shards", lambda mesh: 8)
    with pytest.raises(ReproError, match=r"6 instances .* 8 batch shards"):
        TrainSpec.from_run(run).step_spec()


def test_straight_run_and_resume_are_bit_equal(make_run):
    a, b = make_run(), make_run()
    train(TrainSpec.from_run(a))
    edit(b, "train", steps=7, landmarks=[7])
    train(TrainSpec.from_run(b))
    edit(b, "train", steps=12, landmarks="auto")
    with open(b / "train" / "metrics.jsonl", "a") as f:
        f.write('{"step": 8, "ce": 1.0}\n{"step": 9, "half')  # what a killed run leaves behind
    assert train(TrainSpec.from_run(b))["resumed_from"] == 7
    assert outcome(a, 12) == outcome(b, 12)
    assert [m["step"] for m in read_metrics(a / "train" / "metrics.jsonl")] == list(range(1, 13))
    assert set(checkpoint.committed(a / "checkpoints").steps) == {2, 4, 6, 8, 10, 12}


def test_receipts_equal_the_independent_ones(make_run):
    from data.index import InstanceIndex
    from data.order import open_order
    from data.receipt import expected

    run = make_run(steps=5)
    train(TrainSpec.from_run(run))
    index = InstanceIndex.from_manifest(run / "tokens" / "train", 16, 1, verify="size")
    want = expected(index, open_order(run / "order"), 4, 5)
    assert {m["step"]: m["receipt"] for m in read_metrics(run / "train" / "metrics.jsonl")} == want


def test_sigterm_saves_and_kill_resumes(make_run):
    straight, run = (make_run(steps=400, instances=1700, train={"checkpoint_every": 50}) for _ in range(2))
    train(TrainSpec.from_run(straight))
    p = start(run)
    wait_for_step(run, 60, p)
    p.send_signal(signal.SIGTERM)
    assert p.wait(60) == 75, p.stderr.read()
    step, _ = checkpoint.latest_committed(run / "checkpoints")
    assert step is not None and step >= 60
    p = start(run)
    wait_for_step(run, step + 40, p)
    p.kill()
    p.wait()
    train(TrainSpec.from_run(run))
    assert outcome(straight, 400) == outcome(run, 400)


def test_every_logged_step_is_on_disk_before_its_checkpoint_is_committed(make_run, monkeypatch):
    """The order of what reaches the disk: at each rename to step<k>, an fsync has covered exactly k lines of the log."""
    run, seen = make_run(steps=8), []
    log, fsync, replace = run / "train" / "metrics.jsonl", os.fsync, os.replace

    def watch_fsync(fd):
        fsync(fd)
        if os.readlink(f"/proc/self/fd/{fd}") == str(log):
            seen.append(("log", log.read_bytes().count(b"\n")))

    def watch_replace(source, target):
        if str(target).startswith(str(run / "checkpoints" / "step")):
            seen.append(("commit", int(str(target).rpartition("step")[2])))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watch_fsync)
    monkeypatch.setattr(os, "replace", watch_replace)
    train(TrainSpec.from_run(run))
    commits = [k for what, k in seen if what == "commit"]
    assert commits == [1, 3, 4, 5, 7, 8]  # six landmarks of eight steps, and every fourth
    for at, (what, k) in enumerate(seen):
        synced = [lines for kind, lines in seen[:at] if kind == "log"]
        assert what == "log" or k in synced, (k, synced)


def test_sigterm_before_the_first_step_and_a_second_one_end_with_75(make_run):
    run = make_run(steps=400, instances=1700, train={"checkpoint_every": 50})
    begins = start(run)
    while not catches(begins.pid, signal.SIGTERM):
        assert begins.poll() is None
        time.sleep(0.02)
    begins.send_signal(signal.SIGTERM)
    assert begins.wait(60) == 75, begins.stderr.read()
    told = start(run)
    wait_for_step(run, 3, told)
    told.send_signal(signal.SIGTERM)
    while told.poll() is None:  # again and again, until it is gone
        told.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    assert told.returncode == 75, told.stderr.read()
    assert checkpoint.latest_committed(run / "checkpoints")[0] >= 3


def catches(pid: int, signum: int) -> bool:
    """Whether a process has a handler of its own for the signal."""
    with open(f"/proc/{pid}/status") as f:
        caught = next(line for line in f if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signum - 1) & 1)


def test_a_rolled_back_run_keeps_what_it_saves_and_notes_where_it_moved(make_run):
    """The newest two checkpoints are corrupt: the run goes on from the one before, and its saves stay."""
    run = make_run()
    edit(run, "train", steps=8, landmarks=[8], checkpoint_every=2, keep_last=2)
    train(TrainSpec.from_run(run))
    edit(run, "train", steps=10, landmarks=[4, 10])
    for step in (6, 8):
        big = max((run / "checkpoints" / f"step{step}").rglob("*"), key=lambda p: p.stat().st_size)
        raw = bytearray(big.read_bytes())
        raw[len(raw) // 2] ^= 1
        big.write_bytes(bytes(raw))
    shutil.copytree(run / "checkpoints" / "step8", run / "checkpoints" / ".writing-step12")
    assert checkpoint.latest_committed(run / "checkpoints")[0] == 4
    train(TrainSpec.from_run(run))
    names = {p.name for p in (run / "checkpoints").iterdir()}
    assert names == {"step4", "step6", "step8", "step10", "set-aside-step6", "set-aside-step8"}
    assert checkpoint.latest_committed(run / "checkpoints") == (10, ())
    assert [s["first_step"] for s in seams(run / "train" / "seams.json")] == [1]


@pytest.mark.parametrize("line", [b"\xff\xfe\n", b"[]\n", b"{}\n", b"{\n", b'{"step": "one"}\n'])
def test_a_damaged_log_is_named_with_its_line(make_run, line):
    run = make_run()
    edit(run, "train", steps=2, landmarks=[2])
    train(TrainSpec.from_run(run))
    log = run / "train" / "metrics.jsonl"
    log.write_bytes(log.read_bytes().splitlines(True)[0] + line)
    edit(run, "train", steps=3, landmarks=[3])
    with pytest.raises(IdentityError, match=r"line 2 of .*metrics.jsonl"):
        train(TrainSpec.from_run(run))


@pytest.mark.parametrize("gone", ["identity", "receipt", "position"])
def test_a_checkpoint_record_without_what_training_needs_is_named(make_run, gone):
    run = make_run()
    edit(run, "train", steps=2, landmarks=[2])
    train(TrainSpec.from_run(run))
    place = run / "checkpoints" / "step2"
    meta = json.loads((place / "meta.json").read_text())
    meta[gone] = None
    (place / "meta.json").write_text(json.dumps(meta))
    (place / "MANIFEST.json").unlink()
    write_json_atomic(place / "MANIFEST.json", {"format": 1, "step": 2, "files": digest_tree(place)})
    edit(run, "train", steps=3, landmarks=[3])
    with pytest.raises(IdentityError, match=rf"step2/meta.json lacks .*{gone}"):
        train(TrainSpec.from_run(run))


@pytest.mark.parametrize("text", ["3", "null", "[]"])
def test_a_recipe_that_is_no_object(tmp_path, text):
    (tmp_path / "recipe.json").write_text(text)
    with pytest.raises(ReproError, match="is no object"):
        TrainSpec.from_run(tmp_path)


@pytest.mark.slow_proof
def test_a_run_moves_from_8_to_2_to_4_devices(make_run):
    """Elastic: the same recipe on whatever is there. Batches and receipts are equal, losses within fp32 rounding."""
    straight, run = (make_run(steps=9, batch=8, train={"landmarks": [3, 6, 9]}) for _ in range(2))
    train(TrainSpec.from_run(straight))
    for devices, last in ((8, 3), (2, 6), (4, 9)):
        edit(run, "train", steps=last, landmarks=[last])
        flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
        p = start(run, XLA_FLAGS=flags)
        assert p.wait(120) == 0, p.stderr.read()
    one, other = (read_metrics(r / "train" / "metrics.jsonl") for r in (straight, run))
    assert [m["receipt"] for m in one] == [m["receipt"] for m in other]
    np.testing.assert_allclose([m["ce"] for m in other], [m["ce"] for m in one], rtol=2e-6)
    np.testing.assert_allclose([m["grad_norm"] for m in other], [m["grad_norm"] for m in one], rtol=2e-5)
    assert [(s["first_step"], s["devices"]) for s in seams(run / "train" / "seams.json")] == [
        (1, 8),
        (4, 2),
        (7, 4),
    ]


def test_seams_say_from_which_step_on_which_mesh(tmp_path):
    from model.config import MeshConfig
    from model.sharding import make_mesh

    path, one = tmp_path / "seams.json", make_mesh(MeshConfig())
    note(path, 1, one)
    first = path.read_bytes()
    note(path, 7, one)  # went on where it was: nothing to say
    assert path.read_bytes() == first
    moved = [
        *seams(path),
        {"first_step": 9, "mesh": {"data": 1, "fsdp": 2, "tensor": 1}, "devices": 2, "kind": "cpu"},
    ]
    write_json_atomic(path, moved)
    note(path, 13, one)
    assert [(s["first_step"], s["devices"]) for s in seams(path)] == [(1, 1), (9, 2), (13, 1)]
    note(path, 9, one)  # rolled back to step 8: steps 9.. are trained again, here
    assert path.read_bytes() == first
    path.write_text('[{"first_step": "x"}]')
    with pytest.raises(IdentityError, match=r"seams.json"):
        seams(path)


def test_a_save_that_fails_stops_the_run_and_names_its_path(make_run):  # D1
    run = make_run(steps=12)
    (run / "checkpoints").write_text("a file where the directory should be")
    with pytest.raises(ReproError, match=rf"{run}/checkpoints/step2 failed"):
        train(TrainSpec.from_run(run))
    assert len(read_metrics(run / "train" / "metrics.jsonl")) < 12


def test_changed_data_is_refused_and_named(make_run):  # E3
    """The same position in other tokens: the run does not go on, and says that the index differs."""
    run, other = make_run(steps=2), make_run(steps=2, seed=1)
    train(TrainSpec.from_run(run))
    for part in ("tokens", "order"):
        shutil.rmtree(run / part)
        shutil.copytree(other / part, run / part)
    edit(run, "train", steps=4, landmarks=[4])
    with pytest.raises(IdentityError, match=r"step2 .* was made by another recipe; different: index"):
        train(TrainSpec.from_run(run))


def test_other_recipe_is_refused(make_run):
    run = make_run(steps=1)
    train(TrainSpec.from_run(run))
    edit(run, "model", rope_theta=10000.0)
    with pytest.raises(IdentityError, match="rope_theta"):
        train(TrainSpec.from_run(run))


def test_cold_window_and_data_mask_run(make_run):
    run = make_run(steps=6, history={"cold_window_at": [3]})
    train(TrainSpec.from_run(run))
    from model.step import abstract_state

    state, _ = checkpoint.restore(run / "checkpoints", 6, abstract_state(TrainSpec.from_run(run).step_spec()))
    assert int(state["opt"]["window"]["seen"]) == 3
    assert np.isfinite(np.asarray(state["params"]["lm_head"])).all()
