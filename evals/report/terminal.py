"""The verdict as plain text for the end of `make reproduce`."""

from collections.abc import Mapping
from typing import Any

from evals.report.words import interval, number, signed
from evals.verdict import SURFACE_NAMES

COLUMNS = ("surface", "step", "reference", "reproduced", "difference", "interval", "bound", "verdict")


def terminal_table(verdict: Mapping[str, Any]) -> str:
    """The table of `report/verdict.json`: landmark x surface, then the overall verdict with its reasons."""
    rows = [COLUMNS]
    order = {name: i for i, name in enumerate(SURFACE_NAMES)}
    for cell in sorted(verdict["cells"], key=lambda c: (order.get(c["surface"], 99), c["step"])):
        c = verdict["comparisons"].get(str(cell["step"]), {}).get(cell["surface"])
        name = SURFACE_NAMES.get(cell["surface"], cell["surface"])
        if c is None:
            rows.append((name, str(cell["step"]), "", "", "", "", "", f"{cell['verdict']} (not evaluated)"))
        else:
            rows.append(
                (name, str(cell["step"]), number(c["reference"], 5), number(c["reproduced"], 5),
                 signed(c["difference"]), interval(c), f"{c['bound']:g}", cell["verdict"])
            )  # fmt: skip
    widths = [max(len(r[i]) for r in rows) for i in range(len(COLUMNS))]
    text = [
        "  ".join(x.rjust(w) if 0 < i < 7 else x.ljust(w) for i, (x, w) in enumerate(zip(r, widths))).rstrip()
        for r in rows
    ]
    text.insert(1, "-" * max(map(len, text)))
    reasons = [f"  - {r}" for r in verdict["reasons"]]
    return "\n".join([*text, "", f"verdict: {verdict['overall']}", *reasons])
