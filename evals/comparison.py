"""The four surfaces of one landmark from the results of the two sides.

    surfaces = compare(reference, reproduced, token_kl, cfg, landmarks=6)

Pairing is by document id and by item number; two sides that did not see the same things are refused. `domain_loss` is as good
as its worst domain, and every domain stands in `parts`. Token KL takes the larger of its two directions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from evals.config import EvalConfig
from evals.statistics import Comparison, accuracy_difference, kl_level, loss_difference
from infra.errors import DataError, IdentityError

SURFACES = ("heldout_loss", "downstream", "domain_loss", "token_kl")
RANK = {"equivalent": 0, "inconclusive": 1, "different": 2}

Result = Mapping[str, Any]


def compare(
    reference: Mapping[str, Result | None], reproduced: Mapping[str, Result | None], token_kl: Result | None,
    cfg: EvalConfig, *, landmarks: int,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Surface name -> comparison as JSON. A surface whose results are missing is left out, and so never passes."""
    out: dict[str, dict[str, Any]] = {}
    p, q = reference.get("heldout"), reproduced.get("heldout")
    if p is not None and q is not None:
        out["heldout_loss"] = heldout_loss(p, q, cfg, landmarks).to_json()
        out["domain_loss"] = domain_loss(p, q, cfg, landmarks)
    p, q = reference.get("downstream"), reproduced.get("downstream")
    if p is not None and q is not None:
        out["downstream"] = downstream(p, q, cfg, landmarks)
    if token_kl is not None:
        out["token_kl"] = kl(token_kl, cfg, landmarks)
    return {name: out[name] for name in SURFACES if name in out}


def paired(p: Sequence[Result], q: Sequence[Result], keys: tuple[str, ...], what: str) -> None:
    """Refuse two lists that are not about the same units in the same order."""
    left, right = ([tuple(r[k] for k in keys) for r in rows] for rows in (p, q))
    if left != right:
        first = next((i for i, (a, b) in enumerate(zip(left, right)) if a != b), min(len(left), len(right)))
        raise IdentityError(
            f"the two sides did not score the same {what}: they part at number {first} "
            f"({len(left)} against {len(right)})",
            "evaluate both sides again with the same recipe and the same held-out tokens",
        )


def _losses(
    p: Sequence[Result], q: Sequence[Result], bound: float, cfg: EvalConfig, landmarks: int
) -> Comparison:
    paired(p, q, ("id", "domain", "predictions"), "documents")
    return loss_difference(
        [r["nll"] for r in p], [r["nll"] for r in q], [r["predictions"] for r in p], [r["domain"] for r in p],
        bound=bound, bounds=cfg.bounds, landmarks=landmarks,
    )  # fmt: skip


def heldout_loss(p: Result, q: Result, cfg: EvalConfig, landmarks: int) -> Comparison:
    """Surface 1: the loss domain of the recipe, or all documents pooled."""
    rows = [list(r["documents"]) for r in (p, q)]
    if cfg.loss_domain:
        if cfg.loss_domain not in p["domains"]:
            raise DataError(
                f"evals.loss_domain {cfg.loss_domain!r} is not a held-out domain",
                f"known domains: {', '.join(p['domains'])}",
            )
        rows = [[r for r in side if r["domain"] == cfg.loss_domain] for side in rows]
    return _losses(rows[0], rows[1], cfg.bounds.heldout_loss, cfg, landmarks)


def domain_loss(p: Result, q: Result, cfg: EvalConfig, landmarks: int) -> dict[str, Any]:
    """Surface 3: every domain on its own; the surface is as good as the worst of them."""
    parts = {}
    for name in p["domains"]:
        rows = [[r for r in side["documents"] if r["domain"] == name] for side in (p, q)]
        parts[name] = _losses(rows[0], rows[1], cfg.bounds.domain_loss, cfg, landmarks).to_json()
    return worst(parts)


def worst(parts: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The part with the worst outcome, among equals the one that comes closest to the bound."""

    def closeness(item: tuple[str, dict[str, Any]]) -> tuple[int, float]:
        c = item[1]
        return RANK[c["outcome"]], max(abs(c["low"]), abs(c["high"]))

    name, chosen = max(parts.items(), key=closeness)
    return {**chosen, "worst": name, "parts": dict(parts)}


def downstream(p: Result, q: Result, cfg: EvalConfig, landmarks: int) -> dict[str, Any]:
    """Surface 2: macro accuracy over the tasks, each task in `parts` without a verdict of its own."""
    if list(p["tasks"]) != list(q["tasks"]):
        raise IdentityError(
            f"the two sides ran different tasks: {', '.join(p['tasks'])} against {', '.join(q['tasks'])}",
            "evaluate both sides again with the same recipe",
        )
    if p.get("digests") != q.get("digests"):
        raise IdentityError("the two sides were asked different prompts", "evaluate both sides again")
    tasks, left, right = [], [], []
    parts = {}
    for name in p["tasks"]:
        rows = p["tasks"][name]["items"], q["tasks"][name]["items"]
        paired(*rows, ("id", "gold"), f"items of {name}")
        tasks += [name] * len(rows[0])
        left += [r["correct"] for r in rows[0]]
        right += [r["correct"] for r in rows[1]]
        parts[name] = {
            "reference": p["tasks"][name]["acc"],
            "reproduced": q["tasks"][name]["acc"],
            "changed": sum(a["correct"] != b["correct"] for a, b in zip(*rows)),
            "items": len(rows[0]),
            "largest_loglikelihood_difference": max(
                abs(x - y) for a, b in zip(*rows) for x, y in zip(a["loglikelihoods"], b["loglikelihoods"])
            ),
        }
    found = accuracy_difference(
        left, right, tasks, bound=cfg.bounds.macro_accuracy, bounds=cfg.bounds, landmarks=landmarks
    )
    return {**found.to_json(), "parts": parts}


def kl(result: Result, cfg: EvalConfig, landmarks: int) -> dict[str, Any]:
    """Surface 4: the larger of KL(reference || reproduced) and KL(reproduced || reference)."""
    rows = result["documents"]
    both = {
        name: kl_level(
            [r[name] for r in rows], [r["predictions"] for r in rows], [r["domain"] for r in rows],
            bound=cfg.bounds.token_kl, bounds=cfg.bounds, landmarks=landmarks,
        ).to_json()
        for name in ("kl_forward", "kl_backward")
    }  # fmt: skip
    return {**worst(both), "top1_agreement": result["pooled"]["top1_agreement"]}
