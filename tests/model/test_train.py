"""The loop: resume is bit-equal, SIGTERM saves, the log is cut back, wrong recipes are refused."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from infra.errors import IdentityError
from model import checkpoint
from model.metrics import read_metrics
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
