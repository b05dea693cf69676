"""Alarms that run beside the verdict: each a pure function over the facts of a run.

    alarms = ring(facts)     # [Alarm(name, state, detail)], state: clear | fired | unknown

An alarm whose facts are missing is `unknown`, and an unknown alarm forbids FAITHFUL as a fired one does: an alarm that
nobody connected is not a quiet alarm. The surprising one is `memorised data`: MaxText's double-sharded loader made the
training loss look better than the reference for most of a run, so a loss *below* the reference is suspect.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

CLEAR, FIRED, UNKNOWN = "clear", "fired", "unknown"
FP32_NAMES = ("float32", "<f4", "torch.float32")


@dataclass(frozen=True)
class Alarm:
    """`state` is clear, fired or unknown; `detail` says why in plain words."""

    name: str
    state: str
    detail: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)


Facts = Mapping[str, Any]


def ring(facts: Facts) -> list[Alarm]:
    """Every alarm over the facts of one run (see each alarm for the facts it needs)."""
    return [_guarded(name, alarm, facts) for name, alarm in ALARMS.items()]


def _guarded(name: str, alarm: Callable[[Facts], tuple[str, str]], facts: Facts) -> Alarm:
    try:
        return Alarm(name, *alarm(facts))
    except KeyError as missing:
        return Alarm(name, UNKNOWN, f"the run does not say {missing.args[0]}")


def memorised(facts: Facts) -> tuple[str, str]:
    """Training loss clearly below the reference while the held-out loss is not.

    Facts: `training_difference` [reproduced - reference CE per step], `heldout_difference` at the last landmark,
    `loss_bound` (nat). Judged over the last quarter of the steps.
    """
    rows = [float(x) for x in facts["training_difference"]]
    heldout, bound = float(facts["heldout_difference"]), float(facts["loss_bound"])
    if not rows:
        raise KeyError("training_difference")
    tail = rows[-max(1, len(rows) // 4) :]
    mean = sum(tail) / len(tail)
    if mean < -bound and heldout > mean / 2:
        return FIRED, (
            f"training loss is {-mean:.4f} nat below the reference over the last {len(tail)} steps, "
            f"held-out loss is {heldout:+.4f}: the run may be seeing data again"
        )
    return CLEAR, f"training loss {mean:+.2g} nat against the reference at the end, held-out {heldout:+.2g}"


def optimizer_dtype(facts: Facts) -> tuple[str, str]:
    """Optimizer state that is not fp32. Facts: `optimizer_dtypes` {name: dtype}."""
    dtypes = facts["optimizer_dtypes"]
    if not dtypes:
        raise KeyError("optimizer_dtypes")
    wrong = {n: d for n, d in dtypes.items() if d not in FP32_NAMES}
    if wrong:
        return (
            FIRED,
            f"optimizer state is not float32: {', '.join(f'{n} is {d}' for n, d in sorted(wrong.items())[:4])}",
        )
    return CLEAR, f"{len(dtypes)} optimizer arrays, all float32"


def receipts(facts: Facts) -> tuple[str, str]:
    """A receipt that is not equal on both sides. Facts: `receipts` {step: state}, `landmarks`."""
    states, steps = facts["receipts"], [str(s) for s in facts["landmarks"]]
    broken = [s for s in steps if states.get(s) == "broken"]
    if broken:
        return FIRED, f"the two sides saw other batches up to steps {', '.join(broken)}"
    missing = [s for s in steps if states.get(s) != "equal"]
    if missing:
        return UNKNOWN, f"no receipt of both sides at steps {', '.join(missing)}"
    return CLEAR, f"equal at all {len(steps)} landmarks"


def _manifests(facts: Facts) -> Mapping[str, Facts]:
    manifests: Mapping[str, Facts] = facts["token_manifests"]
    if not manifests:
        raise KeyError("token_manifests")
    return manifests


def eos_count(facts: Facts) -> tuple[str, str]:
    """EOS tokens that are not as many as documents.

    Facts: `token_manifests` {split: {documents, eos, literal_eos}}; a literal EOS inside a document is counted apart.
    """
    wrong, total = [], 0
    for split, m in _manifests(facts).items():
        documents, eos, literal = int(m["documents"]), int(m["eos"]), int(m.get("literal_eos", 0))
        total += documents
        if documents != eos - literal:
            wrong.append(f"{split} has {documents} documents and {eos - literal} EOS tokens that end one")
    return (FIRED, "; ".join(wrong)) if wrong else (CLEAR, f"one EOS for each of {total} documents")


def token_range(facts: Facts) -> tuple[str, str]:
    """Token ids outside the vocabulary. Facts: `token_manifests` {split: {min_id, max_id}}, `vocab_size`."""
    vocab, wrong, top = int(facts["vocab_size"]), [], 0
    for split, m in _manifests(facts).items():
        low, high = int(m["min_id"]), int(m["max_id"])
        top = max(top, high)
        if low < 0 or high >= vocab:
            wrong.append(f"{split} holds ids from {low} to {high}")
    if wrong:
        return FIRED, f"{'; '.join(wrong)}; the vocabulary ends at {vocab - 1}"
    return CLEAR, f"all ids lie below {vocab} (largest {top})"


def disjoint(facts: Facts) -> tuple[str, str]:
    """Documents that are both trained on and held out. Facts: `train_documents`, `heldout_documents`: digests."""
    train, heldout = set(facts["train_documents"]), set(facts["heldout_documents"])
    if not train or not heldout:
        raise KeyError("train_documents and heldout_documents")
    both = train & heldout
    if both:
        return FIRED, f"{len(both)} held-out documents are in the training set, for instance {min(both)[:16]}"
    return CLEAR, f"{len(train)} different training and {len(heldout)} held-out documents, none in both"


def scores(facts: Facts) -> tuple[str, str]:
    """Our scores that lm-eval and transformers do not give. Facts: `spot_check` {ok, failures, sides}.

    Both sides are scored by one program, so a mistake of it cancels in every paired difference.
    """
    found = facts["spot_check"]
    if not found or not found.get("sides"):
        raise KeyError("spot_check")
    if found["failures"]:
        return FIRED, f"{len(found['failures'])} scores differ, first {found['failures'][0]}"
    parts = [(p, side[p]) for side in found["sides"].values() for p in ("downstream", "heldout")]
    worst = {p: max(x["largest_difference"] for q, x in parts if q == p) for p in ("downstream", "heldout")}
    counts = sum(x.get("items", 0) for _, x in parts), sum(x.get("documents", 0) for _, x in parts)
    return CLEAR, (
        f"{counts[0]} items within {worst['downstream']:.1g} nat of lm-eval's own model, "
        f"{counts[1]} documents within {worst['heldout']:.1g} nat per prediction of transformers' loss"
    )


def judged_weights(facts: Facts) -> tuple[str, str]:
    """Weights that were judged in another's place: a side compared with itself, or another landmark's weights.

    Facts: `judged_weights` {step: {side: digest}} as the results say, `made_weights` the same as the stages say that made
    them (left out where no stage has a record), `landmarks`. Two runs of ours may be equal: then `may_be_equal` is true.
    """
    judged, made = facts["judged_weights"], facts.get("made_weights", {})
    if not judged:
        raise KeyError("judged_weights")
    seen: dict[str, str] = {}
    for step in map(str, facts["landmarks"]):
        sides = judged.get(step, {})
        if not facts.get("may_be_equal") and len(sides) == 2 and len(set(sides.values())) == 1:
            return FIRED, f"at step {step} both sides are the same files: a side was compared with itself"
        for side, digest in sides.items():
            due = made.get(step, {}).get(side)
            if due and due != digest:
                return FIRED, f"the {side} weights judged at step {step} are not the ones its stage made"
            place = f"{side} {step}"
            if seen.setdefault(f"{side} {digest}", place) != place:
                return FIRED, f"the {side} weights of step {step} are those of another landmark"
    return CLEAR, f"each of {len(seen)} sets of weights judged once, none in another's place"


def logged_loss(facts: Facts) -> tuple[str, str]:
    """Weights that do not give the loss which the log of their run says.

    Facts: `logged_loss` {failures, limit, rows: [{side, step, logged, measured}]}, `landmarks`, `logged_steps` (the last
    step that our run logged), `reference_published`. Behind the last step nothing is logged, so a landmark there is not
    asked. A published reference must be measured too: only its own loss shows that it saw the same batches.
    """
    found, last = facts["logged_loss"], int(facts["logged_steps"])
    if not found:
        raise KeyError("logged_loss")
    if found["failures"]:
        return FIRED, str(found["failures"][0])
    seen = {(r["side"], r["step"]) for r in found["rows"]}
    for side in ("reproduced", "reference") if facts.get("reference_published") else ("reproduced",):
        missing = [str(s) for s in facts["landmarks"] if s < last and (side, s) not in seen]
        if missing:
            return (
                UNKNOWN,
                f"the {side} loss of the next batch was not measured at steps {', '.join(missing)}",
            )
    worst = max((abs(r["measured"] - r["logged"]) for r in found["rows"]), default=0.0)
    return CLEAR, (
        f"{len(found['rows'])} sets of weights give the logged CE of the next step within {worst:.2g} nat "
        f"(allowed {found['limit']:g})"
    )


def changed(facts: Facts) -> tuple[str, str]:
    """What the report reads and is not as its stage made it. Facts: `changed_files` {checked, changed, unrecorded}."""
    found = facts["changed_files"]
    if found["changed"]:
        more = f" and {len(found['changed']) - 1} more" if len(found["changed"]) > 1 else ""
        return FIRED, f"{found['changed'][0]}{more} changed since a stage made it: run that stage with --redo"
    if found["unrecorded"]:
        return (
            UNKNOWN,
            f"stage {found['unrecorded'][0]} has no record: nobody knows whether its results are as it made them",
        )
    return CLEAR, f"{found['checked']} files are as their stages made them"


ALARMS: dict[str, Callable[[Facts], tuple[str, str]]] = {
    "memorised data": memorised,
    "optimizer state not fp32": optimizer_dtype,
    "receipt broken": receipts,
    "EOS count is not document count": eos_count,
    "token id out of range": token_range,
    "training and held-out documents overlap": disjoint,
    "scores are not lm-eval's": scores,
    "other weights were judged": judged_weights,
    "weights are not those of the log": logged_loss,
    "a result was changed": changed,
}


def fired(alarms: Sequence[Alarm]) -> list[Alarm]:
    """The alarms that rang."""
    return [a for a in alarms if a.state == FIRED]
