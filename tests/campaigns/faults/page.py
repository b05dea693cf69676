"""The record of a campaign for a person: a line per trial, docs/faults.md, and a page that needs nothing else."""

import html
from pathlib import Path
from typing import Any

from faults.catalogue import expected

STOPPED = "stopped before training"
CAUGHT = "caught, verdict right"
BITS_ONLY = "bit-level only"
NOT_CAUGHT = "NOT CAUGHT"
OTHER_VERDICT = "caught, ANOTHER VERDICT than expected"
BROKEN = "BROKEN"  # an exception that is no check of ours: nothing is shown by such a trial
BIT_LEVEL = ("receipts", "test")  # places of checks that compare bits

Record = dict[str, Any]


def classed(trial: Record) -> str:
    """What became of a fault. The right verdict is the one the catalogue expects; FAITHFUL only where the outcome is the same."""
    checks = trial["checks"]
    same = all(v == "FAITHFUL" for v in trial["surfaces"].values()) and trial["surfaces"]
    if trial["broke"]:
        return BROKEN
    if not checks:
        return NOT_CAUGHT
    if trial["alike"] and same and all(c["where"] in (*BIT_LEVEL, "alarm") for c in checks):
        return BITS_ONLY
    if trial["verdict"] == "FAITHFUL":
        return NOT_CAUGHT
    if trial["verdict"] != expected(trial["name"]):
        return OTHER_VERDICT
    return STOPPED if checks[0]["where"] in ("tokenize", "order", "gate") else CAUGHT


def first(trial: Record) -> str:
    """The first check that fired, with the step it points at."""
    if not trial["checks"]:
        return "nothing"
    check = trial["checks"][0]
    return check["check"] + (f", step {check['step']}" if check["step"] is not None else "")


def line(number: int, total: int, trial: Record) -> str:
    """One line on the terminal."""
    more = max(0, len(trial["checks"]) - 1)
    return (
        f"{number:>2}/{total} {trial['name']:<28} {trial['seconds']:>6.1f}s  {trial['verdict']:<13} "
        f"{trial.get('broke') or first(trial)}" + (f" (+{more})" if more else "")
    )


def number(value: float | None) -> str:
    """A figure of the effect."""
    return "-" if value is None else f"{value:.1e}"


def cells(trial: Record) -> list[str]:
    """The columns of a trial."""
    e, checks = trial["effect"], trial["checks"]
    words = checks[0]["message"].split("\n")[0] if checks else ""
    others = ", ".join(dict.fromkeys(c["check"] for c in checks[1:] if c["check"] != checks[0]["check"]))
    return [
        f"{trial['name']}: {trial['words']}" + (f" ({', '.join(trial['traps'])})" if trial["traps"] else ""),
        first(trial), words[:200] + ("…" if len(words) > 200 else ""), others or "-", trial["verdict"], trial["class"],
        number(e.get("ce")), number(e.get("heldout")), number(e.get("kl")), number(e.get("weights")),
    ]  # fmt: skip


HEADS = ["fault (trap of the sheet)", "first check that fired", "its words", "others", "verdict", "class", "max dCE",
         "held-out", "KL", "weights"]  # fmt: skip


def sections(record: Record) -> dict[str, list[Record]]:
    """Trials by section, in the order of the catalogue."""
    out: dict[str, list[Record]] = {}
    for trial in record["trials"]:
        out.setdefault(trial["section"], []).append(trial)
    return out


def summary(record: Record) -> list[str]:
    """What the campaign says, in a few sentences."""
    trials, control = record["trials"], record["control"]
    count = {
        c: sum(t["class"] == c for t in trials)
        for c in (STOPPED, CAUGHT, BITS_ONLY, OTHER_VERDICT, NOT_CAUGHT, BROKEN)
    }
    alike = sum(bool(t["surfaces"]) and set(t["surfaces"].values()) == {"FAITHFUL"} for t in trials)
    clean = "nothing fired" if not control["checks"] else f"FIRED: {first(control)}"
    return [
        f"{len(trials)} of the {record['catalogue']} faults of the catalogue ({record['made']} of them and the control in "
        f"{record['seconds'] / 60:.1f} minutes on {record['cpus']} CPUs, {record['jobs']} at a time): "
        + ", ".join(f"{n} {c}" for c, n in count.items() if n) + ".",
        f"With {alike} of them all four surfaces alone would have said FAITHFUL: training this short, or a mistake this small, does "
        "not move them beyond their bounds. They were caught by the gates, the comparison step by step, receipts and alarms.",
        f"The control: verdict {control['verdict']}, {clean}. It trains {control['steps']} steps in which the reference skips "
        f"{len(control['skipped_steps'])} and masks {control['masked_instances']} instances, with YaRN, a hand-over between two "
        f"schedules and one interruption of our run; largest |dCE| {number(control['effect']['ce'])} nat, held-out "
        f"{number(control['effect']['heldout'])}, KL {number(control['effect']['kl'])}.",
    ]  # fmt: skip


def markdown(record: Record) -> str:
    """docs/faults.md."""
    out = [
        "# Fault campaign", "",
        "`make faults` puts one known mistake at a time into our side of a small run and records which check notices. The list "
        "is `tests/campaigns/faults/catalogue.py`.", "", *(f"{s}\n" for s in summary(record)),
        "A check that fires is written down and the chain goes on, so that the verdict is heard too. **Stopped before training**: "
        "the user meets the fault before anything is trained. **Bit-level only**: the outcome is the same, and only a comparison "
        "of bits sees it. `max dCE` is the largest difference of a training step's cross entropy from the reference's (nat), "
        "`held-out` and `KL` those of the last landmark, `weights` the relative difference of our last weights from the control's.",
        "",
    ]  # fmt: skip
    for name, trials in sections(record).items():
        out += [f"## {name.capitalize()}", "", "| " + " | ".join(HEADS) + " |", "|" + "---|" * len(HEADS)]
        out += ["| " + " | ".join(c.replace("|", "\\|") for c in cells(t)) + " |" for t in trials] + [""]
    out += [
        "One fault again: `make faults ONLY=name`. "
        + ", ".join(f"{k} {v}" for k, v in record["versions"].items())
        + ".",
        "",
    ]
    return "\n".join(out)


STYLE = """body{font:14px/1.45 system-ui,sans-serif;margin:2rem;max-width:110rem;color:#222}table{border-collapse:collapse;width:100%}
td,th{border:1px solid #ccc;padding:.3rem .5rem;text-align:left;vertical-align:top}th{background:#f3f3f3;position:sticky;top:0}
td:nth-child(3){font:12px/1.4 ui-monospace,monospace;max-width:34rem;overflow-wrap:anywhere}.bad{background:#fbdcdc}.bits{background:#fdf3d0}
details{margin:.2rem 0}"""


def page(record: Record) -> str:
    """A page that needs no other file."""
    text = html.escape
    rows = [
        f"<!doctype html><meta charset=utf-8><title>Fault campaign</title><style>{STYLE}</style><h1>Fault campaign</h1>"
    ]
    rows += [f"<p>{text(s)}</p>" for s in summary(record)]
    marks = {NOT_CAUGHT: "bad", OTHER_VERDICT: "bad", BROKEN: "bad", BITS_ONLY: "bits"}
    for name, trials in sections(record).items():
        rows.append(
            f"<h2>{text(name.capitalize())}</h2><table><tr>"
            + "".join(f"<th>{h}</th>" for h in HEADS)
            + "</tr>"
        )
        for trial in trials:
            columns = [text(c) for c in cells(trial)]
            heard = "".join(f"<li>{text(c['check'])}: {text(c['message'])}</li>" for c in trial["checks"])
            columns[3] += f"<details><summary>all {len(trial['checks'])}</summary><ul>{heard}</ul></details>"
            rows.append(
                f"<tr class='{marks.get(trial['class'], '')}'>"
                + "".join(f"<td>{c}</td>" for c in columns)
                + "</tr>"
            )
        rows.append("</table>")
    return "\n".join(rows)


def write(record: Record, out: Path, docs: str) -> None:
    """OUT/report/faults.html always; STEM.json and STEM.md where asked for."""
    from infra.artifacts import write_bytes_atomic, write_json_atomic

    write_bytes_atomic(out / "report" / "faults.html", page(record).encode())
    print("\n".join(summary(record)))
    print(f"page: {out / 'report' / 'faults.html'}")
    if docs:
        write_json_atomic(f"{docs}.json", record)
        write_bytes_atomic(f"{docs}.md", markdown(record).encode())
