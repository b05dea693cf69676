"""The audit: finds the first wrong step by itself, exactly where every step is stored, and says what was read."""

import json

import numpy as np
import pytest

from data.audit import audit, audit_run, describe, stored_receipts
from data.index import InstanceIndex
from data.order import global_order
from data.receipt import Receipt
from infra.artifacts import write_json_atomic
from infra.errors import IdentityError

B, S, LAST = 4, 8, 40


@pytest.fixture
def data(token_dir):
    rng = np.random.default_rng(2)
    root = token_dir([rng.integers(0, 100, 1400).astype("<u4")])
    index = InstanceIndex.from_manifest(root, S)
    return index, global_order(index.n_instances, 3)


def consumed(data, batch_of):
    """Receipts {step: hex} of a run that reads the batch of step `batch_of(step)` at `step`."""
    index, order = data
    receipt, found = Receipt(), {}
    for step in range(1, LAST + 1):
        other = batch_of(step)
        ids = order[(other - 1) * B : other * B]
        receipt.update(step, ids, index.read(ids))
        found[step] = receipt.hexdigest()
    return found


def test_a_faithful_run_passes(data):
    found = audit(consumed(data, lambda s: s), *data, B)
    assert found.ok and (found.checked, found.last_step) == (LAST, LAST)
    assert describe("reproduced", found) == "reproduced: 40 stored receipts up to step 40 agree"


@pytest.mark.parametrize("seam", [1, 2, 17, 40])
def test_a_seam_repeated_after_resume_is_named(data, seam):
    found = audit(consumed(data, lambda s: s if s < seam else max(1, s - 1)), *data, B)
    if seam == 1:
        assert found.first == 2
        return
    assert (found.ok, found.exact, found.first, found.after) == (False, True, seam, seam - 1)
    assert found.cause == f"step {seam} read the batch of step {seam - 1}"


def test_a_double_sharded_loader_is_named(data):
    found = audit(consumed(data, lambda s: (s - 1) // 2 + 1), *data, B)
    assert found.first == 2 and found.cause == "step 2 read the batch of step 1"


def test_between_landmarks_the_interval_is_named(data):
    receipts = consumed(data, lambda s: s if s != 13 else 30)
    found = audit({s: receipts[s] for s in (5, 10, 20, 40)}, *data, B)
    assert (found.ok, found.exact, found.after, found.first) == (False, False, 10, 11)
    assert "step 10 agrees" in describe("x", found)
    every = audit(receipts, *data, B)
    assert (every.exact, every.first) == (True, 13)
    assert "no batch within 8 steps" in every.cause


def test_changed_token_bytes_are_found(data, token_dir):
    index, order = data
    good = consumed(data, lambda s: s)
    changed = np.fromfile(index.shards[0].path, dtype="<u4")
    row = int(order[B * 8])
    changed[row * S] ^= 1
    other = InstanceIndex.from_manifest(token_dir([changed], "other"), S)
    found = audit(good, other, order, B)
    assert (found.exact, found.first) == (True, 9)


def test_more_steps_than_the_order_has(data):
    found = audit({10_000: "00"}, *data, B)
    assert not found.ok and "the order has" in found.cause
    assert not audit({}, *data, B).ok


def write_run(run, data, reproduced, reference):
    for side, receipts in (("train", reproduced), ("reference", reference)):
        (run / side).mkdir(parents=True)
        rows = [{"step": s, "receipt": r} for s, r in receipts.items()]
        (run / side / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    meta = {"receipt": {"algorithm": "blake2b-sum-sha256-v1", "step": 20, "digest": reproduced[20]}}
    write_json_atomic(run / "checkpoints/step20/meta.json", meta)
    write_json_atomic(run / "reference/receipts.json", {"0": "00" * 32, "40": reference[40]})


def test_a_run_directory(data, tmp_path):
    good = consumed(data, lambda s: s)
    write_run(tmp_path / "a", data, good, good)
    result = audit_run(tmp_path / "a", *data, B)
    assert result["ok"] and result["reproduced"]["checked"] == 40
    bad = consumed(data, lambda s: s if s < 30 else s + 1)
    write_run(tmp_path / "b", data, bad, good)
    result = audit_run(tmp_path / "b", *data, B)
    assert not result["ok"] and result["reference"]["ok"]
    assert result["reproduced"]["text"].endswith("step 30 read the batch of step 31")
    write_json_atomic(tmp_path / "b/reference/receipts.json", {"40": "11" * 32})
    with pytest.raises(IdentityError, match="another receipt for step 40"):
        stored_receipts(tmp_path / "b")
    with pytest.raises(IdentityError, match="holds no receipt"):
        audit_run(tmp_path, *data, B)
