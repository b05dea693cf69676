"""A `Report` as one HTML file that asks for nothing outside itself. Light, dark, phone and paper by CSS alone."""

import re
from html import escape
from typing import Any

from evals.report.blocks import (
    VERDICT_CLASS,
    Bullets,
    Figure,
    Folded,
    Report,
    Section,
    Table,
    Text,
    word_class,
)

# The browser itself enforces that nothing outside is asked for; a breach is an error on its console.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
STYLE = """
:root{--paper:#fdfdfc;--ink:#1c1d20;--soft:#5b5f66;--line:#cfd2d6;--card:#f3f4f5;--good:#0b6b4f;--bad:#b3261e;
--open:#8a5a00;--reference:#0072b2;--reproduced:#d55e00;--bound:#77797d;--s0:#0072b2;--s1:#d55e00;--s2:#008a63;
--s3:#b5578f;--s4:#a97400;--s5:#2b8cc4;--s6:#6d4c97;--s7:#555}
@media (prefers-color-scheme:dark){:root{--paper:#17181b;--ink:#e8e8e6;--soft:#a5a9b0;--line:#43474d;--card:#212327;
--good:#4cc9a0;--bad:#ff8a80;--open:#f0b84a;--reference:#5ab4ee;--reproduced:#ff9a4d;--bound:#9a9da3;--s0:#5ab4ee;
--s1:#ff9a4d;--s2:#3fcf9f;--s3:#e49ac6;--s4:#f0c24b;--s5:#9ad4ff;--s6:#b79be0;--s7:#bbb}}
*{box-sizing:border-box}
html{background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
body{max-width:62rem;margin:0 auto;padding:1.5rem 1rem 4rem}
h1{font-size:1.25rem;font-weight:600;color:var(--soft);margin:0 0 1rem}
h2{font-size:1.2rem;margin:2.6rem 0 .6rem;padding-top:.6rem;border-top:1px solid var(--line)}
p,ul{margin:.5rem 0;max-width:46rem}
ul{padding-left:1.2rem}
.verdict{border-left:.5rem solid var(--tone);background:var(--card);padding:1rem 1.2rem;border-radius:.3rem}
.verdict strong{display:block;font-size:2rem;line-height:1.2;color:var(--tone);letter-spacing:.01em}
.good{--tone:var(--good)}.bad{--tone:var(--bad)}.open{--tone:var(--open)}
td.good,td.bad,td.open{color:var(--tone);font-weight:600;white-space:nowrap}
nav{margin:1rem 0 0;font-size:.9rem;line-height:1.9}nav a{margin-right:.9rem;color:var(--soft)}
.scroll{overflow-x:auto;margin:.8rem 0}
table{border-collapse:collapse;font-size:.9rem;min-width:60%}
.caption{color:var(--soft);margin:.9rem 0 0;font-size:.85rem}.scroll{margin-top:.3rem}
th,td{text-align:left;padding:.32rem .8rem .32rem 0;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600;vertical-align:bottom;min-width:3.5rem}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}th.n{white-space:normal}
td code{white-space:nowrap}
code{font:.85em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
figure{margin:1rem 0;max-width:50rem}figure svg{width:100%;height:auto;display:block}
figcaption{color:var(--soft);font-size:.85rem;margin-top:.3rem}
details{margin:.6rem 0}summary{cursor:pointer;color:var(--soft)}
@media (max-width:40rem){html{font-size:15px}figure{overflow-x:auto}figure svg{min-width:32rem}figure svg.graph{min-width:0}td:first-child,th:first-child{position:sticky;left:0;background:var(--paper)}.verdict strong{font-size:1.6rem}table{font-size:.82rem}}
@media print{:root{--paper:#fff;--ink:#000;--soft:#444;--line:#bbb;--card:#f4f4f4;--good:#064;--bad:#900;--open:#750;
--reference:#0072b2;--reproduced:#d55e00}body{max-width:none;padding:0}nav{display:none}h2{break-after:avoid}
figure,tr{break-inside:avoid}.scroll{overflow:visible}table{font-size:.66rem;width:100%}td code{white-space:normal}th,td{padding-right:.5rem}th{min-width:0;hyphens:auto}td:first-child,th:first-child{position:static}figure svg{min-width:0;max-width:100%}details::details-content{content-visibility:visible;display:block;height:auto}}
"""


def render(report: Report) -> str:
    """The page."""
    tone = VERDICT_CLASS.get(report.verdict, "open")
    reasons = "".join(f"<li>{inline(r)}</li>" for r in report.reasons)
    links = "".join(f'<a href="#{s.id}">{escape(s.title)}</a>' for s in report.sections)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(report.verdict)}: {escape(report.title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(report.title)}</h1>"
        f'<div class="verdict {tone}"><strong>{escape(report.verdict)}</strong><ul>{reasons}</ul></div>'
        f"<nav>{links}</nav>" + "".join(section(s) for s in report.sections) + "</body></html>\n"
    )


def section(s: Section) -> str:
    return f'<section id="{s.id}"><h2>{escape(s.title)}</h2>{"".join(block(b) for b in s.blocks)}</section>'


def inline(text: str) -> str:
    """Escaped text; `words` between backticks become code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def block(b: Any) -> str:
    """One block as HTML."""
    match b:
        case Text():
            return f"<p>{inline(b.text)}</p>"
        case Bullets():
            return "<ul>" + "".join(f"<li>{inline(i)}</li>" for i in b.items) + "</ul>"
        case Table():
            return table(b)
        case Figure():
            return f"<figure>{b.svg}<figcaption>{inline(b.caption)}</figcaption></figure>"
        case Folded():
            return f"<details><summary>{inline(b.title)}</summary>{''.join(block(x) for x in b.blocks)}</details>"
    raise TypeError(f"no HTML form for {type(b).__name__}")


def table(t: Table) -> str:
    def cell(i: int, text: str) -> str:
        css = " ".join(c for c in ("n" if i in t.numeric else "", word_class(text)) if c)
        return f'<td class="{css}">{inline(text)}</td>' if css else f"<td>{inline(text)}</td>"

    head = "".join(
        f'<th scope="col"{" class=n" if i in t.numeric else ""}>{inline(c)}</th>'
        for i, c in enumerate(t.columns)
    )
    body = "".join("<tr>" + "".join(cell(i, c) for i, c in enumerate(row)) + "</tr>" for row in t.rows)
    return (
        f'<p class="caption">{inline(t.caption)}</p><div class="scroll"><table aria-label="{escape(t.caption, quote=True)}">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
