"""What the checks of the product say about a run, as one list in the order in which a user would meet them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Where a check stands in the chain: a stage that refuses, the gate before training, and so on to the report.
ORDER = ("tokenize", "order", "gate", "train", "convert", "export", "step by step", "receipts", "parity", "evaluate", "scores",
         "surface", "alarm", "test")  # fmt: skip


@dataclass(frozen=True)
class Check:
    """A check that fired: where in the chain, its name, the training step it points at, and its words."""

    where: str
    check: str
    step: int | None
    message: str


def rank(check: Check) -> tuple[int, float]:
    """Sort key: the place in the chain, then the step; a check that names none comes last in its place."""
    return ORDER.index(check.where), np.inf if check.step is None else check.step


def hear(run: Path, facts: dict[str, Any], verdict: Any) -> list[Check]:
    """Every check that fired, from the facts of the report and from `repro audit`."""
    return [*gates(facts), *training(run, facts), *audited(run), *surfaces(verdict), *alarms(facts)]


def gates(facts: dict[str, Any]) -> list[Check]:
    """Logit gates that failed."""
    out = []
    for gate in facts["gates"]:
        if gate["state"] == "failed":
            name = "step-0 logit gate" if gate["step"] == 0 else "export parity"
            out.append(Check("gate" if gate["step"] == 0 else "export", name, gate["step"], gate["detail"]))
    return out


def training(run: Path, facts: dict[str, Any]) -> list[Check]:
    """The comparison step by step, one check per quantity, with the first step over its limit."""
    from evals.parity import read_metrics

    found = facts["training"].get("facts")
    if facts["training"]["state"] != "failed" or not found:
        return []
    sides = [read_metrics(run / side / "metrics.jsonl") for side in ("reference", "train")]
    out = []
    for text in found["failures"]:
        quantity = "window" if text.startswith("skip window") else text.split()[0]
        names = {"ce": "CE", "z_loss_relative": "z-loss", "grad_norm_relative": "gradient norm", "grad_norm_f64_relative_step1": "gradient norm of step 1",
                 "lr_relative": "learning rate", "skip": "skip decisions", "window": "skip window", "receipts": "receipts"}  # fmt: skip
        where = "receipts" if quantity == "receipts" else "step by step"
        step = first_step(quantity, sides[0], sides[1], found["limits"])
        out.append(Check(where, names.get(quantity, quantity), step, text))
    return out


def first_step(quantity: str, theirs: list[Any], ours: list[Any], limits: dict[str, float]) -> int | None:
    """The first step at which two logs differ in a quantity by more than its limit."""
    key = {"skip": "skipped", "receipts": "receipt"}.get(quantity, quantity.split("_relative")[0])
    if quantity == "grad_norm_f64_relative_step1":
        return 1
    if quantity == "window":  # the words say which landmark and which step
        return None
    for a, b in zip(theirs, ours):
        if quantity in ("skip", "receipts"):
            differs = a[key] != b[key]
        elif b[key] is None:
            differs = True
        else:
            size = 1.0 if quantity == "ce" else max(abs(a[key]), 1e-300)
            differs = abs(a[key] - b[key]) / size > limits.get(quantity, np.inf)
        if differs:
            return int(a["step"])
    return None


def audited(run: Path) -> list[Check]:
    """`repro audit`: receipts recomputed from index and order."""
    from data.audit import audit_run
    from data.order import open_order
    from infra.errors import ReproError
    from pipelines.stages import read_recipe
    from pipelines.work import train_index

    recipe = read_recipe(run)
    try:
        index = train_index(recipe, run, verify="full")
        order = open_order(run / "order", n_instances=index.n_instances, index_digest=index.digest)
        found = audit_run(run, index, order, recipe.data.global_batch_instances)
    except ReproError as error:
        return [Check("receipts", "audit", None, error.what)]
    return [
        Check("receipts", f"audit of the {side} side", found[side]["first"], found[side]["text"])
        for side in ("reproduced", "reference")
        if side in found and not found[side]["ok"]
    ]


def surfaces(verdict: Any) -> list[Check]:
    """The first landmark at which each surface is not FAITHFUL."""
    out: dict[str, Check] = {}
    for cell in verdict.cells:
        if cell.verdict != "FAITHFUL" and cell.reason != "not evaluated":
            words = f"{cell.verdict}: {cell.reason}"
            out.setdefault(cell.surface, Check("surface", cell.surface, cell.step, words))
    return list(out.values())


def alarms(facts: dict[str, Any]) -> list[Check]:
    """Alarms that fired; the one about scores stands with the evaluation."""
    return [
        Check(
            "scores" if a["name"].startswith("scores") else "alarm", f"alarm: {a['name']}", None, a["detail"]
        )
        for a in facts["alarms"]
        if a["state"] == "fired"
    ]


def effect(run: Path, facts: dict[str, Any], base: Path | None) -> dict[str, Any]:
    """How much the fault matters: largest |dCE|, held-out difference, KL, and our last weights against the control's."""
    from evals.parity import weights_difference
    from evals.report.records import paired_steps

    last = facts["comparisons"].get(str(facts["landmarks"][-1]), {})
    gaps = [abs(b - a) for _, a, b in paired_steps(facts["curves"], "ce")]
    out: dict[str, Any] = {
        "ce": max(gaps, default=None),
        "heldout": last.get("heldout_loss", {}).get("difference"),
        "kl": last.get("token_kl", {}).get("difference"),
    }
    name = f"step{facts['landmarks'][-1]}"
    if base is not None and (run / "hf" / name / "config.json").exists():
        out["weights"] = weights_difference(base / "hf" / name, run / "hf" / name)["worst"]["relative"]
    return out
