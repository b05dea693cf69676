"""Two real processes on this machine with two devices each, against one process with four: minutes, so behind `make proofs`.

A fifth of the instances is masked and the reference has four ranks, so the loss depends on the place of every row in the
global batch. Tolerance of losses: fp32 rounding, 1e-5, over the first 20 steps (later Adam magnifies the rounding).
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from infra.errors import LeaseError, RecipeError
from infra.lease import Lease
from model import checkpoint, hosts
from model.config import LayerKind, MeshConfig, ModelConfig
from model.metrics import read_metrics
from model.train import TrainSpec, train

STEPS, EVERY, BATCH, SEQUENCE = 32, 8, 8, 16
# One repeat of two layers, as small as a mesh of four devices allows: processes wait for each other at every weight.
SMALL = ModelConfig(d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=16, vocab_size=64, padded_vocab_size=64,
                    window=4, layer_pattern=(LayerKind.SLIDING, LayerKind.FULL))  # fmt: skip
STABLE = ("step", "ce", "z_loss", "grad_norm", "skipped", "lr", "receipt", "tokens_seen")


def start(run, devices, *flags):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
           "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "model.train", "--run", str(run), *flags],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


STARTED = []  # killed at the end of the module, should a test have left any


def start_two(run):
    """Processes 0 and 1 of one run, two devices each."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{s.getsockname()[1]}"
    flags = ("--distributed", "--coordinator", where, "--processes", "2", "--process")
    pair = [start(run, 2, *flags, str(k)) for k in range(2)]
    STARTED.extend(pair)
    return pair


def log_of(run):
    return read_metrics(run / "train" / "metrics.jsonl")


def wait_for_step(run, step, processes):
    for _ in range(24_000):
        if len(log_of(run)) >= step:
            return
        assert all(p.poll() is None for p in processes), [p.communicate()[1][-3000:] for p in processes]
        time.sleep(0.005)
    raise AssertionError("the run did not get going")


def ends(processes):
    """Exit status, output and messages of each."""
    said = [p.communicate(timeout=120) for p in processes]
    return [(p.returncode, *text) for p, text in zip(processes, said)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, write_run_at, request):
    """(run of one process, straight run of two, broken run of two, what the processes said)."""
    from data.config import FilterConfig
    from data.index import InstanceIndex
    from data.masks import write_mask

    made = []
    for name in ("one", "two", "broken"):
        run = write_run_at(
            tmp_path_factory.mktemp("hosts") / name, model=SMALL, steps=STEPS, batch=BATCH, sequence=SEQUENCE, instances=500,
            data={"filter": {"enabled": True}}, loss={"reference_ranks": 4},
            train={"checkpoint_every": EVERY, "landmarks": [STEPS]},
        )  # fmt: skip
        index = InstanceIndex.from_manifest(run / "tokens" / "train", SEQUENCE, 1, verify="size")
        mask = np.random.default_rng(7).random(index.n_instances) > 0.2
        write_mask(run / "order", mask, FilterConfig(enabled=True), index)
        made.append(run)
    one, two, broken = made
    request.addfinalizer(lambda: [p.kill() for p in STARTED if p.poll() is None])
    said = {"one": ends([start(one, 4)]), "two": ends(start_two(two))}
    pair = start_two(broken)
    wait_for_step(broken, EVERY + 3, pair)
    for p in pair:
        p.kill()
    ends(pair)
    said["killed at"] = checkpoint.latest_committed(broken / "checkpoints")[0]
    pair = start_two(broken)
    wait_for_step(broken, 2 * EVERY + 3, pair)
    pair[1].send_signal(signal.SIGTERM)  # only this one is told
    said["told"] = ends(pair)
    said["stopped at"] = checkpoint.latest_committed(broken / "checkpoints")[0]
    said["broken"] = ends(start_two(broken))
    return one, two, broken, said


@pytest.mark.slow_proof
def test_all_end_well_and_only_the_first_process_speaks(runs):
    said = runs[-1]
    for name in ("one", "two", "broken"):
        assert [code for code, _, _ in said[name]] == [0] * len(said[name]), said[name][0][2][-3000:]
    (_, out, err), (_, other_out, other_err) = said["two"]
    assert "receipt" in out and f"train        {STEPS}/{STEPS}" in err
    assert [
        line for line in other_out.splitlines() if "Gloo" not in line
    ] == [] and "train  " not in other_err
    assert [m["step"] for m in log_of(runs[1])] == list(range(1, STEPS + 1))


@pytest.mark.slow_proof
def test_two_processes_lose_what_one_loses(runs):
    """Loss, z-loss and gradient norm; the masked rows must be found at their places in the global batch."""
    one, two = (log_of(run)[:20] for run in runs[:2])
    for name in ("ce", "z_loss", "grad_norm"):
        a, b = (np.array([m[name] for m in log]) for log in (one, two))
        gap = np.abs(a - b) / np.abs(b)
        assert gap.max() <= 1e-5, f"{name}: max {gap.max():.2e}, mean {gap.mean():.2e}"


@pytest.mark.slow_proof
def test_receipts_are_those_of_one_process_and_of_the_order(runs):
    from data.index import InstanceIndex
    from data.order import open_order
    from data.receipt import expected

    one, two, broken, _ = runs
    index = InstanceIndex.from_manifest(one / "tokens" / "train", SEQUENCE, 1, verify="size")
    want = expected(index, open_order(one / "order"), BATCH, STEPS)
    for run in (one, two, broken):
        assert {m["step"]: m["receipt"] for m in log_of(run)} == want


@pytest.mark.slow_proof
def test_kill_and_a_signal_to_one_process_end_bit_equal(runs):
    """kill -9 of both, then SIGTERM to the second only: both save the same step and end with 75; the end is the straight one.

    The state is restored here, in one process on one device.
    """
    _, two, broken, said = runs
    assert said["killed at"] == EVERY
    assert [code for code, _, _ in said["told"]] == [75, 75], said["told"][0][2][-3000:]
    assert 2 * EVERY + 3 <= said["stopped at"] < STEPS and said["stopped at"] % EVERY
    assert said["told"][0][2].count(f"saved step {said['stopped at']}") == 1
    found = []
    for run in (two, broken):
        state, meta = restored(run)
        log = [{k: m[k] for k in STABLE} for m in log_of(run)]
        found.append((checkpoint.state_digest(state), meta["receipt"], meta["mesh"], log))
    assert found[0] == found[1]
    assert found[0][2] == {"data": 1, "fsdp": 4, "tensor": 1}


def restored(run):
    from model.step import abstract_state

    spec = TrainSpec.from_run(run)
    return checkpoint.restore(run / "checkpoints", STEPS, abstract_state(spec.step_spec()))


@pytest.mark.slow_proof
def test_their_checkpoint_is_one_that_one_process_goes_on_from(runs, tmp_path):
    """The weights are those of the one-process run up to rounding, and training goes on with the right batches."""
    import shutil

    from data.index import InstanceIndex
    from data.order import open_order
    from data.receipt import expected

    one, two, _, _ = runs
    a, b = (restored(run)[0]["params"] for run in (one, two))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert float(np.linalg.norm(np.asarray(x - y)) / np.linalg.norm(np.asarray(y))) <= 1e-3
    run = tmp_path / "alone"
    shutil.copytree(two, run)
    recipe = json.loads((run / "recipe.json").read_text())
    recipe["train"] |= {"steps": STEPS + 3, "landmarks": [STEPS + 3]}
    (run / "recipe.json").write_text(json.dumps(recipe))
    summary = train(TrainSpec.from_run(run))
    index = InstanceIndex.from_manifest(run / "tokens" / "train", SEQUENCE, 1, verify="size")
    assert summary["resumed_from"] == STEPS
    assert summary["receipt"] == expected(index, open_order(run / "order"), BATCH, STEPS + 3)[STEPS + 3]


@pytest.mark.slow_proof
def test_two_processes_enter_a_stage_as_one_does(runs, write_run_at, tmp_path):
    """Weights, moments and count of the stage before, on two hosts and on one: the same losses from the first step on."""
    entered = []
    for name, begin in (("one", lambda run: [start(run, 4)]), ("two", start_two)):
        run = write_run_at(
            tmp_path / name, model=SMALL, steps=4, batch=BATCH, sequence=SEQUENCE, instances=500, loss={"reference_ranks": 4},
            train={"landmarks": [4], "enter_from": {"run": str(runs[1]), "step": STEPS}},
        )  # fmt: skip
        said = ends(begin(run))
        assert [code for code, _, _ in said] == [0] * len(said), [err[-3000:] for _, _, err in said]
        assert (run / "train" / "entered.json").exists()
        entered.append([(m["ce"], m["grad_norm"], m["receipt"]) for m in log_of(run)])
    one, two = entered
    assert [r for *_, r in one] == [r for *_, r in two]
    np.testing.assert_allclose([x[:2] for x in one], [x[:2] for x in two], rtol=1e-5)
    assert one[0][0] < log_of(runs[0])[0]["ce"]  # it did not start afresh


@pytest.mark.parametrize(
    ("owners", "groups"),
    [
        ([[0], [0], [1], [1]], {0: 0, 1: 1}),  # fsdp 4 over two hosts
        ([[0, 0], [1, 1]], {0: 0, 1: 1}),  # a tensor axis inside each host
        ([[0, 1]], {0: 0, 1: 0}),  # a tensor axis over both hosts: both read every row
        ([[0, 1], [2, 3]], {0: 0, 1: 0, 2: 1, 3: 1}),
        ([[1], [0]], {1: 0, 0: 1}),  # rows follow the mesh, not the numbers of the processes
    ],
)
def test_who_reads_which_rows(owners, groups):
    assert hosts.row_groups(np.array(owners)) == groups


def test_a_mesh_that_would_read_rows_twice_is_refused():
    with pytest.raises(RecipeError, match="unequal or overlapping"):
        hosts.row_groups(np.array([[0, 0], [0, 1], [1, 1]]))


def test_alone_everything_is_free():
    """One process: the digest passes through, and the lease is held and given back."""
    from model.sharding import make_mesh

    alone = hosts.Hosts(make_mesh(MeshConfig(), jax.devices()[:1]))
    assert alone.heard(alone.tell(2**255 + 1, True)) == (2**255 + 1, True)
    assert (alone.group, alone.groups) == (0, 1) and alone.positions(3).tolist() == [0, 1, 2]


def test_a_lease_that_is_taken_is_refused(tmp_path):
    again = hosts.leading(Lease(tmp_path / "lease", "again"))
    with hosts.leading(Lease(tmp_path / "lease", "training")), pytest.raises(LeaseError, match="training"):
        again.__enter__()
    with hosts.leading(Lease(tmp_path / "lease", "again")):
        pass
