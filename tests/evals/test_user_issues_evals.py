"""docs/user-issues-evals.md has a row with a test for every complaint of the survey about evaluation and conversion."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs/user-issues-evals.md"
# Section F; A5-A7, A14 and A19 of the reference; B1-B4 and B14 of a neighbour; I (X-rows).
ROWS = {
    *(f"F{i}" for i in (1, 2, 3, 4, 5, 7, 8, 9)), "A5", "A6", "A7", "A14, drift", "A14, peak FLOPs", "A14, init", "A14, size",
    "A19", "B1", "B2", "B3", "B4", "B14", "X2", "X3", "X4", "X5",
}  # fmt: skip


def test_every_complaint_has_a_row_that_names_a_test():
    """That the named tests exist is checked for all pages in `tests/model/test_user_issues.py`."""
    rows = {}
    for line in PAGE.read_text().splitlines():
        cells = [c.strip() for c in line.strip().strip("|").split("|")]
        if len(cells) == 3:
            rows[cells[0]] = re.findall(r"tests/[\w/]+\.py", cells[2])
    assert rows.keys() >= ROWS, sorted(ROWS - rows.keys())
    assert all(rows[r] for r in ROWS), [r for r in ROWS if not rows[r]]
