"""The reference runner drives OLMo-core's own trainer: order, receipts, schedule, restart, golden run.

Expected values: the sheet's golden table (9.1) and formulas (4.1), the standing `data.order`, and OLMo-core
against itself (straight run against killed run).
"""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data.order import batch_ids, global_order
from data.receipt import Receipt
from evals.reference import trainer
from evals.reference.runner import child_environment, run_reference, write_spec
from evals.reference.spec import ReferenceSpec, segments
from infra.errors import IdentityError, LaunchError, RecipeError
from model.config import (
    HistoryConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    SchedulePart,
    SkipStepConfig,
)

torch = pytest.importorskip("torch")
pytest.importorskip("olmo_core")

V, S, B = 512, 32, 4
TINY = ModelConfig(
    d_model=32, n_layers=4, n_heads=2, n_kv_heads=2, head_dim=16, d_ff=64, window=8, vocab_size=V, padded_vocab_size=V
)  # fmt: skip
PARTS = ScheduleConfig(
    parts=(
        SchedulePart(kind="cosine", peak=1e-3, warmup=2, horizon=8, until=4),
        SchedulePart(kind="half_cosine", peak=2e-3, warmup=5, horizon=12),
    )
)


def token_files(folder: Path) -> list[np.ndarray]:
    """Two headerless uint32 files whose tails must be dropped; returns their tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(5)
    arrays = [rng.integers(0, V, n, dtype=np.uint32) for n in (S * 20 + 7, S * 25 + 31)]
    for i, tokens in enumerate(arrays):
        tokens.astype("<u4").tofile(folder / f"{i}.npy")
    return arrays


def spec_in(folder: Path, **changes) -> ReferenceSpec:
    token_files(folder / "tokens")
    fields = {
        "model": TINY,
        # a window of 6 lets skip-step act from call 3; a narrow sigma makes it act often
        "optimizer": OptimizerConfig(skip_step=SkipStepConfig(window=6, sigma=0.5)),
        "schedule": PARTS,
        "loss": LossConfig(),
        "history": HistoryConfig(adam_count_at_start=1, cold_window_at=(4,)),
        "token_files": (str(folder / "tokens/0.npy"), str(folder / "tokens/1.npy")),
        "vocab_size": V,
        "eos_id": 0,
        "pad_id": 1,
        "sequence_length": S,
        "global_batch_instances": B,
        "seed": 7,
        "steps": 10,
        "landmarks": (3, 6, 10),
        "threads": 1,
        "micro_batch_instances": 2,
        "out": str(folder / "reference"),
    }
    return ReferenceSpec(**{**fields, **changes})


def run_here(spec: ReferenceSpec) -> list[dict]:
    """Run the trainer in this process; returns its metric rows."""
    assert trainer.main(["--spec", str(write_spec(spec))]) == 0
    return [json.loads(line) for line in (Path(spec.out) / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> tuple[ReferenceSpec, list[dict]]:
    """One uninterrupted run of ten steps in two parts."""
    spec = spec_in(tmp_path_factory.mktemp("straight"))
    return spec, run_here(spec)


def test_batches_and_receipts_are_those_of_the_order(straight):
    spec, rows = straight
    arrays = [np.fromfile(f, "<u4") for f in spec.token_files]
    instances = np.concatenate([a[: len(a) // S * S].reshape(-1, S) for a in arrays])
    order = global_order(len(instances), seed=7)
    receipt = Receipt()
    for row in rows:
        ids = batch_ids(order, row["step"], B)
        receipt.update(row["step"], ids, instances[ids])
        assert row["ids"] == ids.tolist()
        assert row["receipt"] == receipt.hexdigest()
    stored = json.loads((Path(spec.out) / "receipts.json").read_text())
    assert stored == {str(s): rows[s - 1]["receipt"] for s in (3, 6, 10)}


def test_learning_rate_follows_the_sheet_across_the_hand_over(straight):
    def cosine(s: int) -> float:
        return 1e-3 * s / 2 if s < 2 else 1e-4 + 9e-4 * (1 + math.cos(math.pi * (s - 2) / 6)) / 2

    def half_cosine(s: int) -> float:
        return 2e-4 + 1.8e-3 * (1 + math.cos(math.pi * ((s - 5) + 7) / 14)) / 2 if s >= 5 else math.nan

    _, rows = straight
    for row in rows:
        s = row["step"]
        assert row["lr"] == pytest.approx(cosine(s) if s <= 4 else half_cosine(s), rel=1e-12), s


def test_skip_window_is_lost_at_the_hand_over_only(straight):
    """The rule of the sheet (3.3) over the logged losses and norms, with a cold window after step 4."""
    _, rows = straight
    for start, stop in ((0, 4), (4, 10)):
        for s in range(start, stop):
            losses = np.array([r["ce"] for r in rows[max(start, s - 6) : s]])
            norms = np.array([r["grad_norm"] for r in rows[max(start, s - 6) : s]])
            skipped = len(losses) + 1 >= 3 and not (
                rows[s]["ce"] - losses.mean() <= 0.5 * losses.std(ddof=1)
                and rows[s]["grad_norm"] - norms.mean() <= 0.5 * norms.std(ddof=1)
            )
            assert rows[s]["skipped"] == float(skipped), s + 1
    assert 0 < sum(r["skipped"] for r in rows) < 10
    assert rows[4]["skipped"] == rows[5]["skipped"] == 0.0


def test_killed_run_continues_as_if_nothing_had_happened(straight, tmp_path):
    """kill -9 inside step 9: checkpoint 6 is newest, rows 7 and 8 are dropped, the skip window comes back."""
    expected, rows = straight
    spec = spec_in(tmp_path)
    path = write_spec(spec)
    program = (
        "import os, signal\n"
        "from evals.reference import listener, trainer\n"
        "before = listener.Listener.pre_optim_step\n"
        "def die(self):\n"
        "    before(self)\n"
        "    if self.step == 9: os.kill(os.getpid(), signal.SIGKILL)\n"
        "listener.Listener.pre_optim_step = die\n"
        f"trainer.main(['--spec', {str(path)!r}])\n"
    )
    killed = subprocess.run(
        [sys.executable, "-c", program], env=child_environment(1), capture_output=True, text=True, timeout=300
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert len((Path(spec.out) / "metrics.jsonl").read_text().splitlines()) == 8
    (Path(spec.out) / "metrics.jsonl").open("a").write('{"step": 9, "ce": 1')  # a torn line
    assert run_here(spec) == rows
    for step in (3, 6, 10):
        name = f"hf/step{step}/model.safetensors"
        assert (Path(spec.out) / name).read_bytes() == (Path(expected.out) / name).read_bytes()


def test_finished_run_returns_without_training(straight):
    spec, _ = straight
    before = {p: p.stat().st_mtime_ns for p in Path(spec.out).rglob("*") if p.name != ".lease"}
    assert trainer.main(["--spec", str(Path(spec.out) / "spec.json")]) == 0
    assert {p: p.stat().st_mtime_ns for p in Path(spec.out).rglob("*") if p.name != ".lease"} == before


@pytest.mark.parametrize("count", [0, 1])
def test_first_update_shows_the_adam_counter(tmp_path, count):
    """With a step-0 checkpoint Adam starts at 1, so the first update is 0.735 of the learning rate."""
    schedule = ScheduleConfig(parts=(SchedulePart(kind="cosine", peak=1e-3, warmup=0, horizon=8),))
    spec = spec_in(
        tmp_path, steps=1, landmarks=(1,), schedule=schedule, history=HistoryConfig(adam_count_at_start=count)
    )
    run_here(spec)
    from safetensors.torch import load_file

    a, b = (load_file(Path(spec.out) / f"hf/step{s}/model.safetensors")["lm_head.weight"] for s in (0, 1))
    lr = 1e-4 + 9e-4 * (1 + math.cos(math.pi / 8)) / 2
    moved = (b - a * (1 - lr * 0.1)).abs().median().item() / lr
    bias = (0.1 / (1 - 0.9**2)) / math.sqrt(0.05 / (1 - 0.95**2)) if count else 1.0
    assert moved == pytest.approx(bias, rel=2e-3)
    assert (Path(spec.out) / "checkpoints/step0").exists() == bool(count)


def test_step0_export_equals_write_init(straight, tmp_path):
    from evals.reference.init_weights import weights_digest, write_init

    spec, _ = straight
    digest = write_init(TINY, tmp_path / "init", context_length=S, eos_id=0, pad_id=1)
    assert digest == weights_digest(Path(spec.out) / "hf/step0")
    config = json.loads((tmp_path / "init/config.json").read_text())
    assert config == json.loads((Path(spec.out) / "hf/step0/config.json").read_text())
    assert config["vocab_size"] == V and config["dtype"] == "float32"


@pytest.mark.slow_proof
def test_init_goldens_of_the_sheet():
    """Builds 190M weights, so a long proof; `tests/model/test_init.py` holds our draws to the same goldens. olmo3_190M, seed 0, CPU (sheet 1.6): the draw order reaches from the embeddings to the head."""
    from evals.reference.olmo_core_model import build_initialised
    from model.config import olmo3_size

    state = build_initialised(olmo3_size("190M").model_copy(update={"init_seed": 0}), 64).state_dict()
    golden = {
        "embeddings.weight": (-0.022516796365380287, -0.023047203198075294, -0.005011571571230888),
        "blocks.0.attention.w_q.weight": (
            -0.0028571118600666523,
            0.011026166379451752,
            -0.004354082979261875,
        ),
        "blocks.0.feed_forward.w2.weight": (0.0456354133784771, 0.03544745221734047, -0.025438779965043068),
        "lm_head.w_out.weight": (-0.009284182451665401, -0.0005625541671179235, -0.025684095919132233),
    }
    for name, values in golden.items():
        assert tuple(state[name].flatten()[:3].tolist()) == values, name


def test_golden_run_of_the_sheet(tmp_path):
    """Sheet 9.1 through the trainer module: eight steps from given weights, rtol 1e-5."""
    from safetensors.torch import load_file

    t = np.arange(16 * 64 + 5, dtype=np.int64)
    ((31 * t * t + 7 * t + 3) % 250).astype("<u4").tofile(tmp_path / "tokens.npy")
    model = ModelConfig(
        d_model=64, n_layers=4, n_heads=4, n_kv_heads=4, head_dim=16, d_ff=256, window=4,
        vocab_size=256, padded_vocab_size=256,
    )  # fmt: skip
    golden_weights(model, tmp_path / "init")
    spec = spec_in(
        tmp_path,
        model=model,
        optimizer=OptimizerConfig(),
        schedule=ScheduleConfig(parts=(SchedulePart(kind="cosine", peak=1e-3, warmup=2, horizon=8),)),
        history=HistoryConfig(adam_count_at_start=0),
        token_files=(str(tmp_path / "tokens.npy"),),
        vocab_size=256, eos_id=0, pad_id=255, sequence_length=16, seed=34521, steps=8, landmarks=(8,),
        initial_weights=str(tmp_path / "init"),
    )  # fmt: skip
    rows = run_here(spec)
    ids = [i for row in rows for i in row["ids"]]
    assert ids[:24] == [
        45,
        23,
        33,
        60,
        4,
        54,
        31,
        3,
        34,
        26,
        50,
        61,
        63,
        11,
        6,
        28,
        43,
        56,
        2,
        12,
        17,
        9,
        29,
        44,
    ]
    golden = [
        (5.0e-4, 5.560113906860352, 3.0893011717e-4, 5.233689308166504),
        (1.0e-3, 5.466424942016602, 3.0903291190e-4, 4.941889762878418),
        (9.397114317e-4, 5.435764312744141, 3.0771264574e-4, 5.2968573570251465),
        (7.75e-4, 5.3542280197143555, 3.0637154123e-4, 3.198786497116089),
        (5.5e-4, 5.250004768371582, 3.0405877624e-4, 2.562354564666748),
        (3.25e-4, 5.284604072570801, 3.0279692146e-4, 3.0407638549804688),
        (1.602885683e-4, 5.225644588470459, 3.0065391911e-4, 2.016326427459717),
        (1.0e-4, 5.220999717712402, 3.0002454878e-4, 2.0598855018615723),
    ]
    measured = np.array([[r["lr"], r["ce"], r["z_loss"], r["grad_norm"]] for r in rows])
    worst = np.abs(measured / np.array(golden) - 1).max(axis=0)
    assert (worst <= [1e-9, 1e-5, 1e-5, 1e-5]).all(), f"worst relative (lr, ce, z, norm): {worst}"
    norms = np.array([[r["grad_norm"], r["grad_norm_f64"]] for r in rows])
    assert np.abs(norms[:, 0] / norms[:, 1] - 1).max() <= 1e-3
    state = load_file(Path(spec.out) / "hf/step8/model.safetensors")
    for name, values in {
        "model.embed_tokens.weight": (0.002514604479074478, -0.002642097184434533, 0.012808453291654587),
        "model.layers.0.self_attn.q_proj.weight": (0.009267223067581654, 0.01563996821641922, 0.009656623005867004),
        "lm_head.weight": (-0.0099740419536829, 0.020447291433811188, -0.002877764403820038),
        "model.layers.3.post_feedforward_layernorm.weight": (1.0006870031356812, 1.0000633001327515, 0.9986286163330078),
    }.items():  # fmt: skip
        np.testing.assert_allclose(state[name].flatten()[:3], values, rtol=1e-5, err_msg=name)


def golden_weights(model: ModelConfig, out: Path) -> None:
    """The weights of sheet 9.1 as an HF directory: tensor k is 0.02 * N(0,1) of PCG64(k), norms are 1."""
    from evals.reference.olmo_core_model import build_initialised, export_hf

    built = build_initialised(model, 16)
    parts = ["attention.w_q", "attention.w_k", "attention.w_v", "attention.w_out", "attention.q_norm",
             "attention.k_norm", "attention_norm", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3",
             "feed_forward_norm"]  # fmt: skip
    names = [
        "embeddings",
        *(f"blocks.{i}.{p}" for i in range(4) for p in parts),
        "lm_head.norm",
        "lm_head.w_out",
    ]
    state = built.state_dict()
    assert set(state) == {f"{n}.weight" for n in names}
    for k, name in enumerate(names):
        shape = tuple(state[f"{name}.weight"].shape)
        values = np.ones(shape, np.float32)
        if not name.endswith("norm"):
            draw = np.random.Generator(np.random.PCG64(k)).standard_normal(math.prod(shape))
            values = (0.02 * draw).astype(np.float32).reshape(shape)
        state[f"{name}.weight"] = torch.from_numpy(values)
    built.load_state_dict(state)
    export_hf(built, model, out, context_length=16, eos_id=0, pad_id=255)


def test_runner_reports_a_failing_child(tmp_path):
    """A corpus of 45 instances holds 11 batches of 4, so 12 steps cannot be had; the reason reaches the caller."""
    spec = spec_in(tmp_path, steps=12, landmarks=(12,))
    with pytest.raises(LaunchError, match="exit code 2") as caught:
        run_reference(spec)
    assert "11 batches of 4" in str(caught.value)


def test_another_reference_in_the_directory_is_refused(tmp_path):
    write_spec(spec_in(tmp_path))
    with pytest.raises(IdentityError, match=r"seed \(7 -> 8\)"):
        write_spec(spec_in(tmp_path, seed=8))


def test_hand_over_without_declared_restart_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="cold_window_at"):
        segments(spec_in(tmp_path, history=HistoryConfig()))
    cuts = segments(spec_in(tmp_path, history=HistoryConfig(cold_window_at=(4, 8))))
    assert [(c.start, c.stop, c.part.kind) for c in cuts] == [
        (0, 4, "cosine"), (4, 8, "half_cosine"), (8, 10, "half_cosine"),
    ]  # fmt: skip


def test_cancelled_runner_leaves_no_process(tmp_path, monkeypatch):
    from evals.reference import runner

    children = []

    def interrupt(child, metrics, progress):
        children.append(child)
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "watch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_reference(spec_in(tmp_path))
    assert children[0].poll() is not None
    with pytest.raises(ProcessLookupError):
        os.killpg(children[0].pid, 0)
