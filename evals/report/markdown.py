"""A `Report` as Markdown, with figures as SVG files in `figures/` beside it."""

from typing import Any

from evals.report.blocks import Bullets, Figure, Folded, Report, Table, Text


def render(report: Report) -> str:
    """The document."""
    parts = [f"# {report.verdict}: {report.title}", "\n".join(f"- {r}" for r in report.reasons)]
    for s in report.sections:
        parts.append(f"## {s.title}")
        parts += [block(b) for b in s.blocks]
    return "\n\n".join(p for p in parts if p) + "\n"


def block(b: Any) -> str:
    """One block as Markdown."""
    match b:
        case Text():
            return b.text
        case Bullets():
            return "\n".join(f"- {i}" for i in b.items)
        case Table():
            return table(b)
        case Figure():
            return f"![{b.caption}](figures/{b.name}.svg)"
        case Folded():
            return "\n\n".join([f"**{b.title}**", *(block(x) for x in b.blocks)])
    raise TypeError(f"no Markdown form for {type(b).__name__}")


def table(t: Table) -> str:
    def row(cells: Any) -> str:
        return "| " + " | ".join(str(c).replace("|", "\\|") for c in cells) + " |"

    rule = row("---:" if i in t.numeric else "---" for i in range(len(t.columns)))
    return "\n".join([t.caption, "", row(t.columns), rule, *(row(r) for r in t.rows)])


def figures(report: Report) -> list[Figure]:
    """Every figure of a report."""
    found: list[Figure] = []

    def walk(blocks: Any) -> None:
        for b in blocks:
            if isinstance(b, Figure):
                found.append(b)
            elif isinstance(b, Folded):
                walk(b.blocks)

    for s in report.sections:
        walk(s.blocks)
    return found
