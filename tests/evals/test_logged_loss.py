"""Weights against the log of their run: the loss of the next batch, by transformers and the sheet's denominator."""

import json
import os
from types import SimpleNamespace

import numpy as np
import pytest

from evals.logged_loss import Side, measure, of_log
from model.config import LossConfig, NumericsConfig

LENGTH, ROWS, STEPS, LIMIT = 64, 4, 4, 2e-5


def batch(step: int) -> SimpleNamespace:
    """Batch of `step` + 1; the second one has a masked instance."""
    tokens = np.random.default_rng(step).integers(0, 100278, (ROWS, LENGTH)).astype(np.int32)
    mask = np.array([True, step != 2, True, True])
    return SimpleNamespace(tokens=tokens, instance_mask=mask, label_mask=None)


def by_transformers(model, at: SimpleNamespace) -> float:
    """Sheet, section 2: sum of -log p over the labels of unmasked rows / (their number + S per masked row), one rank."""
    import torch

    rows = torch.from_numpy(at.tokens[at.instance_mask].astype(np.int64))
    with torch.inference_mode():
        logp = torch.log_softmax(model(input_ids=rows, use_cache=False).logits.double(), -1)[:, :-1]
    total = -logp.gather(-1, rows[:, 1:, None]).sum().item()
    return total / (rows[:, 1:].numel() + LENGTH * int((~at.instance_mask).sum()))


@pytest.fixture(scope="module")
def run(tmp_path_factory, hf_dir, hf_model):
    """Landmarks 1, 2 and 4 of a run of 4 steps, all with the same weights, and the log that transformers would write."""
    root = tmp_path_factory.mktemp("run")
    for step in (1, 2, STEPS):
        os.symlink(hf_dir, root / f"step{step}")
    rows = [{"step": s, "ce": by_transformers(hf_model, batch(s - 1))} for s in range(1, STEPS + 1)]
    (root / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return root


def found(run, model_cfg, log=None, rows=0):
    side = Side(run, model_cfg, LossConfig(reference_ranks=1), of_log(log or run / "metrics.jsonl"))
    source = {s: batch(s) for s in range(STEPS)}
    return measure({"reproduced": side}, source, (1, 2, STEPS), NumericsConfig(), LIMIT, rows)


def test_weights_give_the_logged_loss_of_the_next_step(run, model_cfg):
    whole = found(run, model_cfg)
    assert whole["ok"] and [r["step"] for r in whole["rows"]] == [1, 2]  # behind step 4 nothing is logged
    assert max(abs(r["measured"] - r["logged"]) for r in whole["rows"]) <= LIMIT
    parts = found(run, model_cfg, rows=2)
    assert [r["measured"] for r in parts["rows"]] == pytest.approx([r["measured"] for r in whole["rows"]])


def test_weights_of_another_step_are_named(run, model_cfg, tmp_path):
    """A log moved by one step is what a checkpoint of another moment looks like."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    moved = [{"step": r["step"], "ce": b["ce"]} for r, b in zip(rows, [rows[-1], *rows])]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in moved))
    wrong = found(run, model_cfg, tmp_path / "metrics.jsonl")
    assert not wrong["ok"] and len(wrong["failures"]) == 2
    assert "reproduced weights of step 1" in wrong["failures"][0] and "step 2" in wrong["failures"][0]
