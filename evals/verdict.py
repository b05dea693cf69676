"""FAITHFUL, NOT FAITHFUL or INCONCLUSIVE, per landmark and surface and overall, with reasons in plain words.

    verdict = judge(inputs)          # inputs: plain JSON, see `judge`

A pure function. It starts from what the recipe asked for, not from what it finds, so that a thing that is missing
cannot pass: FAITHFUL needs every surface at every landmark, every gate, every receipt and every alarm, each present
and good. NOT FAITHFUL needs proof of a difference: a surface beyond its bound, a failed logit gate, or a broken receipt.
Everything else is INCONCLUSIVE. The surprising thing: a training-loss mismatch is not proof (training loss is never
evidence on its own), so it forbids FAITHFUL and does not make NOT FAITHFUL.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

FAITHFUL, NOT_FAITHFUL, INCONCLUSIVE = "FAITHFUL", "NOT FAITHFUL", "INCONCLUSIVE"
OF_OUTCOME = {"equivalent": FAITHFUL, "different": NOT_FAITHFUL, "inconclusive": INCONCLUSIVE}
SURFACE_NAMES = {
    "heldout_loss": "held-out loss",
    "downstream": "downstream accuracy",
    "domain_loss": "per-domain loss",
    "token_kl": "token KL",
}


@dataclass(frozen=True)
class Cell:
    """One surface at one landmark."""

    step: int
    surface: str
    verdict: str
    reason: str


@dataclass(frozen=True)
class Verdict:
    """`overall` with its `reasons`, most serious first; one cell per landmark and surface."""

    overall: str
    reasons: list[str]
    cells: list[Cell]
    landmarks: dict[str, str] = field(default_factory=dict)
    surfaces: dict[str, str] = field(default_factory=dict)

    @property
    def faithful(self) -> bool:
        return self.overall == FAITHFUL

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def worst(verdicts: Sequence[str]) -> str:
    """NOT FAITHFUL over INCONCLUSIVE over FAITHFUL; nothing at all is INCONCLUSIVE."""
    for v in (NOT_FAITHFUL, INCONCLUSIVE):
        if v in verdicts:
            return v
    return FAITHFUL if verdicts else INCONCLUSIVE


def judge(inputs: Mapping[str, Any]) -> Verdict:
    """The verdict on a run.

    `inputs`:
      landmarks    steps the recipe judges, `surfaces` the surfaces it asks for
      comparisons  {step: {surface: comparison of evals.comparison}}
      gates        [{"name", "state": passed | failed | missing, "detail"}] logit parity
      training     {"state": passed | failed | missing | not applicable, "detail"}
      receipts     {step: {"state": equal | broken | missing, "detail"}}
      alarms       [{"name", "state": clear | fired | unknown, "detail"}]
    A state that is not one of these counts as missing.
    """
    landmarks = [int(s) for s in inputs.get("landmarks", [])]
    surfaces = [str(s) for s in inputs.get("surfaces", [])]
    comparisons = inputs.get("comparisons", {})
    cells = [cell(s, f, comparisons.get(str(s), {}).get(f)) for s in landmarks for f in surfaces]
    found: list[tuple[str, str]] = []
    if not landmarks or not surfaces:
        found.append((INCONCLUSIVE, "the recipe names no landmark or no surface, so nothing was judged"))
    found += _cells(cells)
    found += _gates(inputs.get("gates", []))
    found += _receipts(landmarks, inputs.get("receipts", {}))
    found += _training(inputs.get("training", {}))
    found += _alarms(inputs.get("alarms", []))
    overall = worst([v for v, _ in found] + [c.verdict for c in cells])
    reasons = [text for v in (NOT_FAITHFUL, INCONCLUSIVE) for u, text in found if u == v]
    if overall == FAITHFUL:
        reasons = [
            f"all {len(surfaces)} surfaces agree within their bounds at all {len(landmarks)} landmarks; "
            "logit parity, receipts and alarms are in order"
        ]
    return Verdict(
        overall, reasons, cells,
        {str(s): worst([c.verdict for c in cells if c.step == s]) for s in landmarks},
        {f: worst([c.verdict for c in cells if c.surface == f]) for f in surfaces},
    )  # fmt: skip


def cell(step: int, surface: str, comparison: Mapping[str, Any] | None) -> Cell:
    """The verdict on one surface at one landmark."""
    if comparison is None or comparison.get("outcome") not in OF_OUTCOME:
        return Cell(step, surface, INCONCLUSIVE, "not evaluated")
    name = f"{comparison['worst']}: " if comparison.get("worst") else ""
    d, low, high, bound = (comparison[k] for k in ("difference", "low", "high", "bound"))
    span = f"{name}{d:+.3g} (between {low:+.3g} and {high:+.3g})"
    verdict = OF_OUTCOME[comparison["outcome"]]
    if verdict == FAITHFUL:
        reason = f"{span} lies inside the bound {bound:g}"
    elif verdict == NOT_FAITHFUL:
        reason = f"{span} lies outside the bound {bound:g}, also after correction over landmarks"
    else:
        needed = comparison.get("needed")
        more = f"; about {needed} {comparison.get('unit', 'units')} would be needed to tell" if needed else ""
        reason = f"{span} crosses the bound {bound:g}{more}"
    return Cell(step, surface, verdict, reason)


def _cells(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """One reason per surface that is not faithful everywhere, naming its landmarks."""
    out = []
    for surface in dict.fromkeys(c.surface for c in cells):
        name = SURFACE_NAMES.get(surface, surface)
        mine = [c for c in cells if c.surface == surface]
        missing = [c for c in mine if c.reason == "not evaluated"]
        if missing:
            out.append((INCONCLUSIVE, f"{name}: not evaluated at {_steps(missing)}"))
        for verdict, words in (
            (NOT_FAITHFUL, "differs"),
            (INCONCLUSIVE, "cannot be told apart from a difference"),
        ):
            bad = [c for c in mine if c.verdict == verdict and c not in missing]
            if bad:
                out.append((verdict, f"{name} {words} at {_steps(bad)}: {bad[-1].reason}"))
    return out


def _steps(cells: Sequence[Cell]) -> str:
    steps = [str(c.step) for c in cells]
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {', '.join(steps)}"


def _gates(gates: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    if not gates:
        return [(INCONCLUSIVE, "no logit parity was measured")]
    out = [
        (NOT_FAITHFUL, f"{g['name']} failed: {g.get('detail') or 'no detail'}")
        for g in gates
        if g.get("state") == "failed"
    ]
    missing = [g.get("name", "a parity gate") for g in gates if g.get("state") not in ("passed", "failed")]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        out.append((INCONCLUSIVE, f"not measured: {missing[0]}{more}"))
    return out


def _receipts(landmarks: Sequence[int], receipts: Mapping[str, Any]) -> list[tuple[str, str]]:
    out = []
    for step in landmarks:
        r = receipts.get(str(step), {})
        if r.get("state") == "broken":
            detail = r.get("detail") or "the two sides did not see the same batches"
            out.append((NOT_FAITHFUL, f"the data receipt is broken at step {step}: {detail}"))
    missing = [s for s in landmarks if receipts.get(str(s), {}).get("state") not in ("equal", "broken")]
    if missing:
        out.append((INCONCLUSIVE, f"no data receipt at steps {', '.join(map(str, missing))}"))
    return out


def _training(training: Mapping[str, Any]) -> list[tuple[str, str]]:
    state = training.get("state")
    if state in ("passed", "not applicable"):
        return []
    detail = training.get("detail")
    if state == "failed":
        return [
            (INCONCLUSIVE, f"training does not follow the reference step by step: {detail or 'no detail'}")
        ]
    return [(INCONCLUSIVE, "training was not compared with the reference step by step")]


def _alarms(alarms: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    if not alarms:
        return [(INCONCLUSIVE, "the alarms were not run")]
    out = []
    for a in alarms:
        if a.get("state") == "fired":
            out.append((INCONCLUSIVE, f"alarm, {a['name']}: {a.get('detail') or 'no detail'}"))
        elif a.get("state") != "clear":
            why = a.get("detail") or "its facts are missing"
            out.append((INCONCLUSIVE, f"alarm not checked, {a.get('name', 'unnamed')}: {why}"))
    return out
