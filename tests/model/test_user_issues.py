"""docs/user-issues*.md: every complaint of the survey's sections has a row, and every test a row names exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The ids of the survey's sections B (a neighbour on our stack), D (checkpoints) and E (resuming).
ROWS = {
    *(f"B{i}" for i in (1, 2, 3, 4, 5, 7, 9, 11, 12, 13, 14)), *(f"D{i}" for i in range(1, 8)),
    *(f"E{i}" for i in (1, 3, 4, 5, 6)),
}  # fmt: skip


def named_tests(path):
    """(row, file, function) of every test named in a page; `::name` alone means the file named before it."""
    for line in path.read_text().splitlines():
        row, file = line.strip("| ").partition(" |")[0], ""
        for given, function in re.findall(r"`(tests/[\w/]+\.py)?::(\w+)`", line):
            file = given or file
            yield row, file, function


def test_every_complaint_has_a_row_with_a_test():
    seen = {row for row, _, _ in named_tests(ROOT / "docs/user-issues.md")}
    assert seen >= ROWS, sorted(ROWS - seen)


@pytest.mark.parametrize("page", ["user-issues.md", "user-issues-evals.md"])
def test_every_named_test_exists(page):
    found = list(named_tests(ROOT / "docs" / page))
    assert found
    for row, file, function in found:
        tree = ast.parse((ROOT / file).read_text())
        assert function in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}, (
            row,
            file,
            function,
        )
