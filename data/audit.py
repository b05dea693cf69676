"""Audit of a run's data: recompute the receipts from index and order, and find the first step that differs.

    audit_run(run, index, order, batch)  ->  {"reproduced": {...}, "reference": {...}, "ok": bool}

A receipt rolls over all earlier steps: once it differs it stays different. So the first differing stored
receipt is found by bisection over the steps at which one is stored (every step of metrics.jsonl, the
checkpoints, the reference's landmarks); a receipt that was computed on the way is never computed again. Where
the step before is stored too, the step is exact, and the audit says which other batch was read in its place,
if one of its neighbours was. Nothing of the training code takes part.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.order import batch_ids
from data.receipt import Receipt, step_digest
from infra.artifacts import read_json
from infra.errors import IdentityError

NEIGHBOURS = 8


@dataclass(frozen=True)
class Finding:
    """Result for one side. `first` is the first step that differs, `after` the last stored step that agrees."""

    checked: int
    last_step: int
    ok: bool
    first: int | None = None
    after: int | None = None
    exact: bool = False
    cause: str = ""


class _Expected:
    """Receipts from index and order alone; those at the stored steps are kept."""

    def __init__(self, index: Any, order: np.ndarray, batch: int, keep: set[int]):
        self.index, self.order, self.batch, self.keep = index, order, batch, keep
        self.known: dict[int, Receipt] = {0: Receipt()}

    def rows(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        ids = batch_ids(self.order, step, self.batch)
        return ids, self.index.read(ids)

    def at(self, step: int) -> Receipt:
        """The receipt after `step`, continued from the nearest earlier one that is known."""
        start = max(s for s in self.known if s <= step)
        receipt = copy(self.known[start])
        for s in range(start + 1, step + 1):
            receipt.update(s, *self.rows(s))
            if s in self.keep or s == step:
                self.known[s] = copy(receipt)
        return receipt


def copy(receipt: Receipt) -> Receipt:
    return Receipt(receipt.step, bytes.fromhex(receipt.hexdigest()))


def audit(recorded: Mapping[int, str], index: Any, order: np.ndarray, batch: int) -> Finding:
    """Compare stored receipts {step: hex} with those computed from `index` and `order`."""
    steps = sorted(recorded)
    if not steps:
        return Finding(0, 0, False, cause="no receipt is stored")
    usable = len(order) // batch
    if steps[-1] > usable or steps[0] < 1:
        return Finding(
            0, steps[-1], False, cause=f"receipts up to step {steps[-1]} are stored, the order has {usable}"
        )
    expected = _Expected(index, order, batch, set(steps))
    low, high = 0, len(steps)
    while low < high:  # the first stored step whose receipt differs is in steps[low:high]
        middle = (low + high) // 2
        if recorded[steps[middle]] == expected.at(steps[middle]).hexdigest():
            low = middle + 1
        else:
            high = middle
    if low == len(steps):
        return Finding(len(steps), steps[-1], True)
    after = steps[low - 1] if low else 0
    first = steps[low]
    exact = after == first - 1
    cause = _cause(recorded[first], first, expected) if exact else ""
    return Finding(len(steps), steps[-1], False, after + 1 if not exact else first, after, exact, cause)


def _cause(stored: str, step: int, expected: _Expected) -> str:
    """Which other batch explains the stored receipt of `step`, if a neighbouring one does."""
    before = expected.at(step - 1)
    last = len(expected.order) // expected.batch
    for other in range(max(1, step - NEIGHBOURS), min(last, step + NEIGHBOURS) + 1):
        trial = copy(before)
        trial.push(step, step_digest(step, *expected.rows(other)))
        if trial.hexdigest() == stored:
            return f"step {step} read the batch of step {other}"
    return f"step {step} read rows that are no batch within {NEIGHBOURS} steps of it, or other token bytes"


def describe(side: str, finding: Finding) -> str:
    """One sentence for a person."""
    if finding.ok:
        return f"{side}: {finding.checked} stored receipts up to step {finding.last_step} agree"
    if finding.first is None:
        return f"{side}: {finding.cause}"
    if finding.exact:
        return f"{side}: the first step that differs is {finding.first}: {finding.cause}"
    return (
        f"{side}: step {finding.after} agrees, a later one does not: the first differing step is between "
        f"{finding.first} and the next stored receipt"
    )


def stored_receipts(run: str | Path) -> dict[str, dict[int, str]]:
    """Every receipt that a run directory holds: {side: {step: hex}}."""
    run = Path(run)
    found = {
        "reproduced": _metrics(run / "train" / "metrics.jsonl"),
        "reference": _metrics(run / "reference" / "metrics.jsonl"),
    }
    for meta in sorted(run.glob("checkpoints/step*/meta.json")):
        receipt = Receipt.from_json(read_json(meta)["receipt"])
        _add(found["reproduced"], receipt.step, receipt.hexdigest(), meta)
    landmarks = run / "reference" / "receipts.json"
    if landmarks.exists():
        for step, digest in read_json(landmarks).items():
            _add(found["reference"], int(step), digest, landmarks)
    return found


def _add(found: dict[int, str], step: int, digest: str, where: Path) -> None:
    if step == 0:
        return
    if found.setdefault(step, digest) != digest:
        raise IdentityError(
            f"{where} has another receipt for step {step} than metrics.jsonl",
            "the two come from different runs: make the stage again",
        )


def _metrics(path: Path) -> dict[int, str]:
    """Receipts of a metrics file; of a step that was trained twice (after a resume) the last line counts."""
    found: dict[int, str] = {}
    if path.exists():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                row = json.loads(line)
            except ValueError:
                raise IdentityError(
                    f"{path} breaks off in line {number}",
                    "start that run again: it rewrites its log from the last checkpoint",
                ) from None
            if row.get("receipt"):
                found[int(row["step"])] = row["receipt"]
    return found


def audit_run(run: str | Path, index: Any, order: np.ndarray, batch: int) -> dict[str, Any]:
    """Audit both sides of a run directory. `ok` only when every side that has receipts agrees with the order."""
    sides = {
        side: audit(stored, index, order, batch) for side, stored in stored_receipts(run).items() if stored
    }
    if not sides:
        raise IdentityError(f"{run} holds no receipt", "train first")
    return {
        **{side: {**asdict(finding), "text": describe(side, finding)} for side, finding in sides.items()},
        "ok": all(finding.ok for finding in sides.values()),
    }
