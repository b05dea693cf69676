"""docs/traps.md: every trap of the fact sheet has a row, and every test a row names exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The ids of the sheet's section 8.
TRAPS = {
    *(f"A{i}" for i in range(1, 11)), *(f"L{i}" for i in range(1, 6)), *(f"O{i}" for i in range(1, 12)),
    *(f"D{i}" for i in range(1, 11)), *(f"E{i}" for i in range(1, 4)), *(f"S{i}" for i in range(1, 5)),
    *(f"M{i}" for i in range(1, 17)), "M7b",
}  # fmt: skip


def rows():
    for line in (ROOT / "docs/traps.md").read_text().splitlines():
        if re.match(r"\| [A-Z]\d+b? \|", line):
            cells = [c.strip() for c in line.strip("|").split("|")]
            yield cells[0], re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", cells[-1]), cells[-1]


def test_every_trap_has_a_row_and_a_test():
    seen = {name: tests for name, tests, _ in rows()}
    assert seen.keys() == TRAPS, seen.keys() ^ TRAPS
    assert not [name for name, tests in seen.items() if not tests]


def test_every_named_test_exists():
    for name, tests, text in rows():
        assert text.count("::") == len(tests), f"{name}: a test is not named as file::function"
        for file, function in tests:
            tree = ast.parse((ROOT / file).read_text())
            assert function in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, (
                f"{name}: {function}"
            )
