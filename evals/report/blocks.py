"""What a report is made of, apart from how it is written: sections of text, lists, tables and figures."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

VERDICT_CLASS = {"FAITHFUL": "good", "NOT FAITHFUL": "bad", "INCONCLUSIVE": "open"}
STATE_CLASS = {
    "passed": "good", "equal": "good", "clear": "good", "failed": "bad", "broken": "bad", "fired": "bad",
    "missing": "open", "unknown": "open",
}  # fmt: skip


@dataclass(frozen=True)
class Text:
    """One paragraph."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list of sentences."""

    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """A table of strings. `numeric` are the columns to align by number; `caption` says what it is."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Sequence[int] = ()


@dataclass(frozen=True)
class Figure:
    """An SVG with colours as CSS variables; `caption` says in words what it shows."""

    name: str
    svg: str
    caption: str


@dataclass(frozen=True)
class Folded:
    """Blocks that a reader opens when wanted."""

    title: str
    blocks: Sequence[Any]


@dataclass(frozen=True)
class Section:
    """A titled part of the report."""

    id: str
    title: str
    blocks: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """The whole: the verdict on top, its reasons, then sections."""

    title: str
    verdict: str
    reasons: Sequence[str]
    sections: Sequence[Section]


def word_class(text: str) -> str:
    """Colour class of a cell that is exactly a verdict or a state, else ''."""
    return VERDICT_CLASS.get(text) or STATE_CLASS.get(text, "")
