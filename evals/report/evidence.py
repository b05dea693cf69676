"""The parts of the report that are evidence about the run itself: 2x2, drift, receipts, alarms, history, data, plan, lineage.

`evals.report.content` puts them in order. The surprising thing: a plan for a slice is shown beside what this machine did,
and the two may be compared only where the run was trained on that slice; the section says which case it is.
"""

import statistics
from typing import Any

from evals.report import drawings, graph
from evals.report.blocks import STATE_CLASS, VERDICT_CLASS, Bullets, Figure, Folded, Section, Table, Text
from evals.report.words import number, signed
from evals.verdict import Verdict
from infra.progress import clock

Facts = dict[str, Any]

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


def gaps(facts: Facts) -> Section:
    """The 2x2: implementation gap against training gap; logit parity; drift by layer."""
    blocks: list[Any] = [
        Text("Implementation gap: the same weights in PyTorch and in JAX, which must be rounding. Training gap: two sets of weights in the same "
             "implementation, which is what the surfaces judge. A difference is never blamed on the wrong one."),
    ]  # fmt: skip
    square = {s: r["two_by_two"] for s, r in facts["results"].items() if "two_by_two" in r}
    if square:
        step = list(square)[-1]
        blocks.append(the_square(step, square[step]))
        blocks.append(
            Folded("The 2x2 at every landmark", [
                Table("Held-out loss of the same documents, nat per prediction.",
                      ["step", "reference, PyTorch", "reference, JAX", "reproduced, PyTorch", "reproduced, JAX",
                       "implementation gap", "training gap"],
                      [two_by_two(s, r) for s, r in square.items()], numeric=range(7))])
        )  # fmt: skip
    else:
        blocks.append(
            Text("The loss was not measured in PyTorch for this run, so the square of four losses is absent.")
        )
    rows = []
    for g in facts["gates"]:
        f = g["facts"] or {}
        figures = [number(f.get(k)) for k in ("max", "mean", "kl_max", "kl_mean")]
        rows.append([g["name"], g["state"], *figures])
    columns = [
        "what",
        "state",
        "largest |difference|",
        "mean |difference|",
        "largest KL (nat)",
        "mean KL (nat)",
    ]
    caption = "Logit parity, same weights in two implementations."
    blocks.append(Table(caption, columns, rows, numeric=(2, 3, 4, 5)))
    return Section("gaps", "Implementation gap and training gap", [*blocks, *drift(facts)])


def the_square(step: str, r: dict[str, Any]) -> Table:
    """The four losses of one landmark as the 2x2 itself, with its gaps on the margins."""
    x = r["loss"]
    rows = [
        [name, number(x[f"{w}.T"], 6), number(x[f"{w}.J"], 6), signed(x[f"{w}.J"] - x[f"{w}.T"])]
        for w, name in (("R", "reference weights"), ("P", "reproduced weights"))
    ]
    rows.append(["training gap", signed(x["P.T"] - x["R.T"]), signed(x["P.J"] - x["R.J"]), ""])
    return Table(
        f"Held-out loss at step {step} (nat per prediction) of the same documents, {r['predictions']:,} predictions.",
        ["", "PyTorch", "JAX", "implementation gap"], rows, numeric=(1, 2, 3),
    )  # fmt: skip


def drift(facts: Facts) -> list[Any]:
    """Where the two implementations begin to differ, and the names of the causes."""
    found = facts["localise"]
    causes = found["causes"] if found else []
    blocks: list[Any] = []
    if found and found.get("rows"):
        blocks.append(
            Figure("drift", drawings.drift(found),
                   "Step-0 weights, each sub-block fed with the reference's own input: largest difference over what fp32 rounding "
                   "explains. Above the dashed line a sub-block computes something else. Grey lines are the sub-blocks that agree, at the very bottom bit for bit.")
        )  # fmt: skip
        first = found["first"]
        blocks.append(
            Text("No sub-block drifts." if first is None else
                 f"First to drift: {place(first)}, by {first['drift']:.2g} where rounding explains {first['expected']:.2g}.")
        )  # fmt: skip
    if causes:
        blocks.append(Bullets([f"cause: {c}" for c in causes]))
    return blocks


def place(row: dict[str, Any]) -> str:
    """Layer and part of a localise row in words."""
    return row["part"] if row["layer"] < 0 else f"{row['part']} of layer {row['layer']}"


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
    h, skip, entered = r["history"], r["optimizer"]["skip_step"], facts.get("entered")
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
        ["AdamW moments", r["optimizer"]["moments_dtype"]],
        [
            "begins with",
            f"step {entered['step']} of {entered['run']}, optimizer state included; the checkpoint's values stay: "
            + (", ".join(entered["overruled"]) or "none differs")
            if entered
            else "the step-0 weights of the reference",
        ],
        ["trained on", trained_on(facts["seams"])],
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


def trained_on(seams: list[Facts]) -> str:
    """The devices of every step, from `train/seams.json`; a run that moved says what that means for its numbers."""
    parts = [
        f"from step {s['first_step']} on {s['devices']} x {s['kind']} ("
        + ", ".join(f"{axis}={size}" for axis, size in s["mesh"].items())
        + ")"
        for s in seams
    ]
    moved = (
        "; the receipt runs on across each seam, numbers agree within rounding and not bit for bit"
        if len(parts) > 1
        else ""
    )
    return "; ".join(parts) + moved if parts else "not recorded"


def data(facts: Facts) -> Section:
    """Documents and tokens, and what was set aside."""
    blocks: list[Any] = []
    rows = []
    for split, m in facts["tokens"].items():
        for name, d in token_domains(m).items():
            counts = (d.get(k) for k in ("documents", "tokens", "eos", "masked"))
            rows.append([split, name, *("-" if n is None else str(n) for n in counts)])
    if rows:
        blocks.append(
            Table(
                "Tokens by domain.",
                ["split", "domain", "documents", "tokens", "EOS", "masked instances"],
                rows,
                numeric=range(2, 6),
            )
        )
    if facts["corpus"] and "rejected" in facts["corpus"]:
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


def token_domains(manifest: Facts) -> dict[str, dict[str, int]]:
    """Counts by domain as the tokenize job took them; of published token files only their tokens are known."""
    if "domains" in manifest:
        return dict(manifest["domains"])
    out: dict[str, dict[str, int]] = {}
    for shard in manifest["shards"]:
        domain = out.setdefault(shard["label"], {"tokens": 0})
        domain["tokens"] += shard["tokens"]
    return out


def outside_curve(facts: Facts) -> Section:
    """The reference's own logged curve, from a W&B export, against our log."""
    c = facts["outside_curve"]
    if not c:
        return Section("published-curve", "Published training curve", [])
    caption = (
        f"Cross entropy of `{c['name']}` as exported from W&B and ours, both smoothed over +-{c['half_width']:g} steps, at the "
        f"{len(c['steps'])} steps that both logged. Above: the shade is the scatter of the reference's single steps. Below: "
        "reproduced minus reference; the shade is what chance leaves after smoothing, two standard deviations of both sides."
    )
    told = (
        f"Mean difference {signed(c['mean_difference'])} nat; scatter of one step {number(c['band'])} nat; outside the shade at "
        f"{c['outside']:.1%} of the steps. Other data order or another part of the schedule shows here; agreement here proves nothing "
        "on its own."
    )
    return Section(
        "published-curve", "Published training curve",
        [Figure("published", drawings.outside_curve(c), caption), Text(told)],
    )  # fmt: skip


def plan(facts: Facts) -> Section:
    """The ahead-of-time plan beside what the run did."""
    p = facts["plan"]
    if not p:
        return Section("plan", "Plan and actual", [])
    rows = [r for r in facts["curves"]["reproduced"] if r.get("tokens_per_second")]
    rate = statistics.median(r["tokens_per_second"] for r in rows) if rows else None
    data, target = facts["recipe"]["data"], facts["recipe"]["launch"]["target"]
    tokens = data["sequence_length"] * data["global_batch_instances"]
    steps = int(facts["recipe"]["train"]["steps"])
    actual_step = tokens / rate if rate else None
    same = target != "local" and tokens == p["tokens_per_step"]
    gib = 2.0**30
    table = [
        ["where", p["topology"], "this machine" if target == "local" else facts["recipe"]["launch"]["topology"] or target],
        ["tokens per step", f"{p['tokens_per_step']:,}", f"{tokens:,}"],
        ["seconds per step (median of the log)", f"{p['step_seconds']:.3g} at best", number(actual_step, 3)],
        ["tokens per second (median of the log)", f"{p['tokens_per_second']:,.0f} at most", f"{rate:,.0f}" if rate else ""],
        [f"time for {steps:,} steps", clock(p["step_seconds"] * steps), clock(actual_step * steps) if actual_step else ""],
        ["model FLOP utilisation", f"{p['mfu_bound']:.1%} at most", f"{p['step_seconds'] * p['mfu_bound'] / actual_step:.1%}" if same and actual_step else ""],
        ["memory per device (GiB)", f"{p['bytes_per_device'] / gib:.2f} of {p['memory_per_device'] / gib:.0f}" if p["bytes_per_device"] else "", ""],
        ["price (USD)", "no price given" if p["price"] is None else f"{p['price']:,.0f}", ""],
    ]  # fmt: skip
    why = (
        "Both columns speak of the same step on the same slice; the plan is a roofline bound, so the actual is slower."
        if same
        else f"The plan is for a {p['topology']} slice and this run trained elsewhere or with another batch: the columns stand side by side "
        "for their size, not as a prediction and its outcome."
    )
    return Section("plan", "Plan and actual", [
        Table("`repro plan` compiled the step ahead of time; actual figures are from train/metrics.jsonl. An empty cell was not measured.",
              ["figure", "plan", "actual"], table, numeric=(1, 2)),
        Text(why),
    ])  # fmt: skip


# What each stage is made from, for stages whose record is not there.
CHAIN = {
    "tokenize": ("documents",), "order": ("tokenize",), "init": ("olmo-core",), "gate": ("tokenize", "init"),
    "reference": ("order", "init"), "train": ("order", "init", "gate"), "convert": ("train",),
    "parity": ("tokenize", "reference", "convert"), "evaluate": ("tokenize", "reference", "convert"),
}  # fmt: skip
TITLES = {
    "tokenize": "token files", "order": "global order", "init": "step-0 weights", "gate": "logit gate", "reference": "reference run",
    "train": "our run", "convert": "HF exports", "parity": "parity", "evaluate": "four surfaces",
}  # fmt: skip


def lineage_graph(facts: Facts, verdict: Verdict) -> str:
    """Documents to verdict: one box per stage with its digest, dashed where a stage has no record."""
    made = {s["stage"]: s for s in facts["stages"]}
    splits = facts["tokens"].values()
    documents = sum(d.get("documents", 0) for m in splits for d in token_domains(m).values())
    core = facts["versions"].get("ai2-olmo-core", "")
    gates = [STATE_CLASS.get(g["state"], "open") for g in facts["gates"]]
    worst = next((c for c in ("bad", "open") if c in gates[1:]), "good")
    tones = {"gate": gates[0] if gates else "open", "parity": worst}
    nodes = {
        "documents": graph.Node("documents", f"{documents:,}" if documents else "", absent=not documents),
        "olmo-core": graph.Node("OLMo-core", core),
    }
    edges = []
    for name, needed in CHAIN.items():
        s = made.get(name)
        note = f"{s['digest'][:8]}, {clock(s['seconds'])}" if s and s["seconds"] is not None else "no record"
        nodes[name] = graph.Node(TITLES[name], note, tones.get(name, "") if s else "", absent=s is None)
        inputs = list(s["inputs"]) if s else []
        sources = inputs or needed
        edges += [(a, name) for a in sources]
    edges.append(("olmo-core", "reference"))
    nodes["verdict"] = graph.Node("verdict", verdict.overall, VERDICT_CLASS.get(verdict.overall, "open"))
    edges += [(name, "verdict") for name in ("gate", "parity", "evaluate")]
    return graph.draw(nodes, edges, "Lineage of the run from documents to verdict")


def lineage(facts: Facts, verdict: Verdict) -> Section:
    """Stages with their keys and inputs, times, and versions."""
    rows = [
        [s["stage"], clock(s["seconds"]) if s["seconds"] is not None else "", str(s["files"]), f"`{s['key'][:12]}`",
         ", ".join(f"{n} `{d[:8]}`" for n, d in s["inputs"].items()) or ", ".join(CHAIN.get(s["stage"], ())), f"`{s['digest'][:12]}`"]
        for s in facts["stages"]
    ]  # fmt: skip
    total = sum(s["seconds"] or 0 for s in facts["stages"])
    blocks: list[Any] = []
    if facts["stages"]:
        blocks.append(
            Figure("lineage", lineage_graph(facts, verdict),
                   "From documents to verdict: each box is a stage with the digest of what it made and the time it took. Arrows that "
                   "follow from others are left out; a dashed box has no record.")
        )  # fmt: skip
    blocks += [
        Table(f"From documents to verdict, {clock(total)} in all. The key names what made a stage, the digest what it made.",
              ["stage", "time", "files", "key", "made from", "digest"], rows, numeric=(1, 2)),
        Folded("Library versions", [Table("As installed when this report was written.", ["library", "version"], sorted(facts["versions"].items()))]),
    ]  # fmt: skip
    if facts["missing"]:
        blocks.append(Folded(f"{len(facts['missing'])} parts that are missing", [Bullets(facts["missing"])]))
    return Section("lineage", "Lineage, times and versions", blocks)


def not_proven(facts: Facts) -> Section:
    """What the verdict does not rest on, in plain words: always true, by the kind of reference, and of this very run."""
    items = list(NOT_PROVEN)
    recipe = facts["recipe"]
    if recipe["reference"]["kind"] == "olmo_core_local":
        items += TINY_NOT_PROVEN
    else:
        items.append(
            "The reference was not trained here: that it saw the same batches rests on the losses it logged, not on a receipt."
        )
    if facts["rounded_reference"]:
        items.append(
            "The reference's weights were published rounded to bf16 or without its padding rows, which were filled with "
            "zeros: part of every difference is theirs."
        )
    if not any("two_by_two" in r for r in facts["results"].values()):
        items.append(
            "The four losses of the 2x2 were not measured; the implementation gap rests on logit parity alone."
        )
    if facts["unchecked_exports"]:
        steps = ", ".join(map(str, facts["unchecked_exports"]))
        items.append(
            f"The exports of steps {steps} were written with `--no-parity`: nothing showed that they hold our weights."
        )
    if facts["plan"] and recipe["launch"]["target"] == "local":
        items.append("The plan for a TPU slice was compiled, and no step of this run was executed on one.")
    return Section("not-proven", "What is not proven", [Bullets(items)])
