"""OLMo-core's trainer against ours: 96 steps, two schedule parts, a cold skip window, real skips. Small model.

The same files, order, step-0 weights and history on both sides; every step, receipt and landmark is compared by
`evals.parity` at the recipe's own limits. A wrong history on our side must fail it.

The peak is 3e-4 on purpose. At 3e-3 with batches of 128 tokens this toy amplifies rounding: OLMo-core against
itself, started from weights moved by one ulp, was 6e-5 apart in CE at step 28 and made other skip decisions by
step 91. Such a run can prove nothing about an implementation.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from data.config import DataConfig, TokenizerConfig
from evals import parity
from evals.config import ParityConfig, ReferenceConfig
from evals.reference import trainer
from evals.reference.init_weights import write_init
from evals.reference.runner import write_spec
from evals.reference.spec import ReferenceSpec
from model.checkpoint import restore_params
from model.config import (
    HistoryConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    NumericsConfig,
    OptimizerConfig,
    ScheduleConfig,
    SchedulePart,
    SkipStepConfig,
    TrainConfig,
)
from model.convert.hf import export_hf

pytest.importorskip("olmo_core")

V, S, B, STEPS = 256, 32, 8, 96
LANDMARKS = (16, 32, 48, 64, 80, 96)
MODEL = ModelConfig(
    d_model=32, n_layers=4, n_heads=2, n_kv_heads=2, head_dim=16, d_ff=64, window=8, vocab_size=250, padded_vocab_size=V
)  # fmt: skip
OPTIMIZER = OptimizerConfig(skip_step=SkipStepConfig(window=16, sigma=1.5))
SCHEDULE = ScheduleConfig(
    parts=(
        SchedulePart(kind="cosine", peak=3e-4, warmup=6, horizon=48, until=24),
        SchedulePart(kind="half_cosine", peak=3e-4, warmup=24, horizon=113),
    )
)
HISTORY = HistoryConfig(adam_count_at_start=1, cold_window_at=(24,))
DATA = DataConfig(sequence_length=S, global_batch_instances=B, seed=11)
TRAIN = TrainConfig(steps=STEPS, landmarks=LANDMARKS)


def write_order_of(run: Path, seed: int) -> None:
    from data.index import InstanceIndex
    from data.order import write_order

    index = InstanceIndex.from_manifest(run / "tokens/train", S)
    write_order(run / "order", index.n_instances, seed=seed, index_digest=index.digest)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run directory with text-like tokens, order, step-0 weights, and the finished reference."""
    from data.token_files import full_digest, sample_digest

    run = tmp_path_factory.mktemp("run")
    path = run / "tokens/train/synthetic/00000.npy"
    path.parent.mkdir(parents=True)
    rng = np.random.default_rng(0)
    n = S * B * (STEPS + 4) + 5
    base = np.resize(rng.integers(0, 250, 300), n)
    np.where(rng.random(n) < 0.3, rng.integers(0, 250, n), base).astype("<u4").tofile(path)
    shard = {
        "path": "synthetic/00000.npy", "label": "synthetic", "tokens": n, "sha256": full_digest(path),
        "sample_sha256": sample_digest(path), "min_id": 0, "max_id": 249,
    }  # fmt: skip
    (run / "tokens/train/manifest.json").write_text(
        json.dumps({"format": "olmo3-tokens-v1", "shards": [shard], "tokenizer": {"vocab_size": 100278}})
    )
    write_order_of(run, 11)
    write_init(MODEL, run / "init/hf", context_length=S, eos_id=0, pad_id=1)
    reference = ReferenceConfig(
        model=MODEL, optimizer=OPTIMIZER, schedule=SCHEDULE, loss=LossConfig(), history=HISTORY, threads=1,
        micro_batch_instances=8,
    )  # fmt: skip
    spec = ReferenceSpec.from_sections(
        reference=reference, data=DATA, tokenizer=TokenizerConfig(vocab_size=250, eos_id=0, pad_id=1),
        train=TRAIN, token_files=[path], out=run / "reference",
    )  # fmt: skip
    assert trainer.main(["--spec", str(write_spec(spec))]) == 0
    return run


def reproduce(run: Path, **changes) -> None:
    """Our trainer in `run`, with fields of its spec changed."""
    from model.train import Trainer, TrainSpec

    spec = TrainSpec(
        run, DATA, MODEL, OPTIMIZER, SCHEDULE, LossConfig(), HISTORY, NumericsConfig(), MeshConfig(), TRAIN
    )  # fmt: skip
    (run / "train").mkdir(exist_ok=True)
    Trainer(dataclasses.replace(spec, **changes)).run()


def test_ninety_six_steps_agree(run):
    reproduce(run)
    result = parity.training_parity(
        run / "reference/metrics.jsonl",
        run / "train/metrics.jsonl",
        ParityConfig(),
        LANDMARKS,
        out=run / "parity.json",
    )
    print({k: v for k, v in result.items() if k not in ("receipts", "limits")})
    assert result["ok"], result["failures"]
    skipped = result["skipped_steps"]
    assert any(s < 24 for s in skipped) and any(s > 40 for s in skipped), skipped
    assert not any(25 <= s <= 31 for s in skipped), "the window is cold for seven calls after the hand-over"
    params, cfg = restore_params(run / "checkpoints", 96)
    export_hf(params, cfg, run / "hf/step96", context_length=S, keep_padding=True, eos_id=0, pad_id=1)
    gap = parity.weights_difference(run / "reference/hf/step96", run / "hf/step96", base=run / "init/hf")
    print(gap["worst"], gap["worst_of_way"])
    assert gap["worst_of_way"]["of_way"] <= 1e-3, gap["worst_of_way"]


@pytest.mark.parametrize(
    ("change", "steps", "said"),
    [
        ({"history": HistoryConfig(adam_count_at_start=0, cold_window_at=(24,))}, 16, "ce is"),
        (
            {"history": HistoryConfig(adam_count_at_start=1, cold_window_at=(24, 45))},
            56,
            "skip decisions differ at steps [50",
        ),
        ({"data": DATA.model_copy(update={"seed": 12})}, 16, "receipts differ at landmarks 16"),
    ],
)
def test_each_wrong_history_is_caught(run, tmp_path, change, steps, said):
    """Wrong Adam counter, a restart the reference did not make (it skips step 50), another order. Each run stops once it shows."""
    for name in ("tokens", "init", *(() if "data" in change else ("order",))):
        (tmp_path / name).symlink_to(run / name)
    if "data" in change:
        write_order_of(tmp_path, 12)
    reproduce(tmp_path, train=TrainConfig(steps=steps, landmarks=(16,)), **change)
    result = parity.training_parity(
        run / "reference/metrics.jsonl", tmp_path / "train/metrics.jsonl", ParityConfig(), LANDMARKS
    )
    assert not result["ok"] and any(said in f for f in result["failures"]), result["failures"]
