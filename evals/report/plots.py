"""The plots as inline SVG whose colours follow the page, so that one file serves light, dark and paper.

matplotlib draws with placeholder colours that are replaced by CSS variables afterwards. Colours are Okabe and
Ito's, told apart also by dash and marker. The surprising thing: every id inside an SVG gets the figure's
name in front, because ids of several inline SVGs share one page.
"""

import io
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

INK, LINE, REFERENCE, REPRODUCED, BOUND = "#101010", "#101011", "#101012", "#101013", "#101014"
SERIES = tuple(f"#1010{20 + i}" for i in range(8))
MARKERS = "osD^vPX*"
VARIABLES = {
    INK: "currentColor", LINE: "var(--line)", REFERENCE: "var(--reference)", REPRODUCED: "var(--reproduced)",
    BOUND: "var(--bound)", **{c: f"var(--s{i})" for i, c in enumerate(SERIES)},
}  # fmt: skip
PAPER = {
    INK: "#555555", LINE: "#bbbbbb", REFERENCE: "#0072b2", REPRODUCED: "#d55e00", BOUND: "#888888",
    **dict(zip(SERIES, ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#666666"))),
}  # fmt: skip
# Colours of the page itself that the drawn graph uses.
PAGE_ON_PAPER = {
    "var(--card)": "#f3f4f5", "var(--soft)": "#5b5f66", "var(--good)": "#0b6b4f", "var(--bad)": "#b3261e", "var(--open)": "#8a5a00",
}  # fmt: skip
WIDTH = 7.2

Curves = dict[str, list[dict[str, Any]]]


def figure(rows: int, height: float, ratios: Sequence[float] | None = None) -> tuple[Any, Any]:
    """A figure of stacked panels with a shared x axis, on a transparent ground, sans text kept as text."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    fig = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasSVG(fig)
    fig.patch.set_alpha(0)
    axes = fig.subplots(rows, 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": ratios})[:, 0]
    for ax in axes:
        ax.patch.set_alpha(0)
        ax.grid(True, color=LINE, linewidth=0.6)
        ax.set_axisbelow(True)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            ax.spines[side].set_color(LINE)
        ax.tick_params(colors=INK, which="both", labelsize=10)
        ax.yaxis.label.set_color(INK)
        ax.xaxis.label.set_color(INK)
    return fig, axes


def to_svg(fig: Any, name: str, title: str) -> str:
    """The figure as one `<svg>` element for a page."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        fig.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = out.getvalue()[out.getvalue().index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{name}-", svg)
    svg = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', f'role="img" aria-label="{title}"', svg, count=1)
    svg = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1; font-family: inherit", svg)
    for placeholder, variable in VARIABLES.items():
        svg = svg.replace(placeholder, variable)
    return svg.strip()


def for_file(svg: str) -> str:
    """The same SVG with fixed colours, to stand alone beside report.md."""
    for placeholder, variable in VARIABLES.items():
        svg = svg.replace(variable, PAPER[placeholder])
    for variable, colour in PAGE_ON_PAPER.items():
        svg = svg.replace(variable, colour)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + svg.replace(
        "font-family: inherit", "font-family: sans-serif"
    )


def legend(ax: Any, **options: Any) -> None:
    """A frameless legend in the page's ink."""
    ax.legend(frameon=False, labelcolor=INK, fontsize=10, **options)


def mark_landmarks(axes: Sequence[Any], landmarks: Sequence[int]) -> None:
    """A thin dotted line at every landmark."""
    for ax in axes:
        for step in landmarks:
            ax.axvline(step, color=BOUND, linewidth=0.8, linestyle=":")


def training_loss(
    curves: Curves,
    paired: Sequence[tuple[int, float, float]],
    landmarks: Sequence[int],
    limit: float,
    seams: Sequence[int] = (),
) -> str:
    """Both loss curves and, below, their difference in nat. `seams`: steps from which on another mesh trained."""
    fig, (top, bottom) = figure(2, 4.8, (2.2, 1))
    for side, colour, width, dash in (
        ("reference", REFERENCE, 3.4, "-"),
        ("reproduced", REPRODUCED, 1.3, "-"),
    ):
        rows = [(r["step"], r["ce"]) for r in curves[side] if r.get("ce") is not None]
        if rows:
            top.plot(*zip(*rows), color=colour, linewidth=width, linestyle=dash, label=side)
    skipped = [
        (r["step"], r["ce"]) for r in curves["reproduced"] if r.get("skipped") and r.get("ce") is not None
    ]
    if skipped:
        top.plot(*zip(*skipped), color=BOUND, marker="x", linestyle="", label="skipped step")
    top.set_ylabel("training CE (nat)")
    legend(top)
    if paired:
        steps = [p[0] for p in paired]
        gap = np.array([p[2] - p[1] for p in paired])
        bottom.plot(steps, gap, color=REPRODUCED, linewidth=1.2)
        if np.abs(gap).max() < 20 * limit:
            for sign in (-1, 1):
                bottom.axhline(sign * limit, color=BOUND, linewidth=1, linestyle="--")
        bottom.axhline(0, color=INK, linewidth=0.6)
        bottom.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
        bottom.yaxis.get_offset_text().set_color(INK)
    bottom.set_ylabel("difference (nat)")
    bottom.set_xlabel("step")
    mark_landmarks((top, bottom), landmarks)
    for step in seams:
        bottom.axvline(step - 0.5, color=INK, linewidth=1)
        bottom.annotate("other mesh", (step - 0.5, 1), (2, -2), xycoords=("data", "axes fraction"), textcoords="offset points",
                        va="top", fontsize=9, color=INK)  # fmt: skip
    return to_svg(fig, "loss", "Training loss of both sides and their difference")


def error_bars(
    ax: Any, x: Any, cells: Sequence[dict[str, Any]], colour: str, marker: str, label: str
) -> None:
    """Differences with their intervals."""
    d = np.array([c["difference"] for c in cells])
    arms = np.array([[c["difference"] - c["low"], c["high"] - c["difference"]] for c in cells]).T
    ax.errorbar(
        x,
        d,
        yerr=np.maximum(arms, 0),
        color=colour,
        marker=marker,
        markersize=5,
        linestyle="",
        elinewidth=1,
        capsize=3,
        label=label,
    )


def domain_differences(comparisons: dict[str, dict[str, Any]], bound: float) -> str:
    """Per-domain loss difference with interval at every landmark, and the bound."""
    fig, (ax,) = figure(1, 3.4)
    steps = [s for s, c in comparisons.items() if "domain_loss" in c]
    names = list(comparisons[steps[0]]["domain_loss"]["parts"])
    places = np.arange(len(steps))
    for i, name in enumerate(names):
        cells = [comparisons[s]["domain_loss"]["parts"][name] for s in steps]
        error_bars(ax, places + (i - (len(names) - 1) / 2) * 0.12, cells, SERIES[i % 8], MARKERS[i % 8], name)
    _bound_lines(ax, bound)
    _landmark_axis(ax, steps)
    ax.set_ylabel("loss difference (nat)")
    legend(
        ax,
        ncols=5,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0,
        handletextpad=0.3,
        columnspacing=1.2,
    )
    return to_svg(fig, "domains", "Difference of the held-out loss by domain and landmark")


def perplexity(results: dict[str, dict[str, Any]], domains: Sequence[str]) -> str:
    """Perplexity by domain over landmarks: reference as open markers, reproduced as filled ones."""
    fig, (ax,) = figure(1, 3.4)
    steps = [s for s, r in results.items() if "reference.heldout" in r and "reproduced.heldout" in r]
    for i, name in enumerate(domains):
        for side, fill, dash in (("reference", "none", "-"), ("reproduced", SERIES[i % 8], "")):
            values = [results[s][f"{side}.heldout"]["domains"][name]["perplexity"] for s in steps]
            size = 9 if fill == "none" else 4.5
            ax.plot([int(s) for s in steps], values, color=SERIES[i % 8], marker=MARKERS[i % 8], markersize=size,
                    markerfacecolor=fill, linestyle=dash, linewidth=1, label=name if fill == "none" else None)  # fmt: skip
    ax.set_yscale("log")
    for set_formatter in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
        set_formatter(lambda value, _: f"{value:,.0f}")
    ax.set_ylabel("perplexity")
    ax.set_xlabel("step")
    ax.set_xticks([int(s) for s in steps], steps)
    legend(ax, ncols=2)
    return to_svg(fig, "perplexity", "Perplexity by domain over landmarks, both sides")


def token_kl(comparisons: dict[str, dict[str, Any]], bound: float, floor: dict[str, float]) -> str:
    """Both directions of the token KL over landmarks, the bound, and the floor of two implementations."""
    fig, (ax,) = figure(1, 3.2)
    steps = [s for s, c in comparisons.items() if "token_kl" in c]
    places = np.arange(len(steps))
    for i, (name, label) in enumerate(
        (("kl_forward", "KL(reference, reproduced)"), ("kl_backward", "KL(reproduced, reference)"))
    ):
        cells = [comparisons[s]["token_kl"]["parts"][name] for s in steps]
        values = np.maximum([c["difference"] for c in cells], 1e-12)
        tops = np.maximum([c["high"] - c["difference"] for c in cells], 0)
        ax.errorbar(places + (i - 0.5) * 0.12, values, yerr=[np.zeros(len(tops)), tops], color=SERIES[i],
                    marker=MARKERS[i], capsize=3, linewidth=1, label=label)  # fmt: skip
    known = [(i, floor[s]) for i, s in enumerate(steps) if s in floor]
    if known:
        ax.plot(
            *zip(*known),
            color=SERIES[2],
            marker="_",
            linestyle=":",
            label="same weights, two implementations",
        )
    ax.axhline(bound, color=BOUND, linestyle="--", linewidth=1.2, label="bound")
    ax.set_yscale("log")
    _landmark_axis(ax, steps)
    ax.set_ylabel("KL (nat per token)")
    legend(ax, ncols=2, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0)
    return to_svg(fig, "kl", "Token KL over landmarks with the bound")


def kl_by_position(positions: Sequence[dict[str, Any]]) -> str:
    """KL against the length of the context, at one landmark."""
    fig, (ax,) = figure(1, 2.8)
    x = np.arange(len(positions))
    for i, name in enumerate(("kl_forward", "kl_backward")):
        ax.plot(x, [max(p[name], 1e-12) for p in positions], color=SERIES[i], marker=MARKERS[i], linewidth=1,
                label=("forward", "backward")[i])  # fmt: skip
    ax.set_xticks(x, [f"{p['from']} to {p['to'] - 1}" for p in positions])
    ax.set_yscale("log")
    ax.set_xlabel("tokens of context")
    ax.set_ylabel("KL (nat per token)")
    legend(ax)
    return to_svg(fig, "positions", "Token KL by length of context")


def accuracies(parts: dict[str, dict[str, Any]], macro: dict[str, Any]) -> str:
    """Accuracy by task at one landmark, both sides."""
    names = [*parts, "macro average"]
    rows = [*parts.values(), macro]
    fig, (ax,) = figure(1, 0.9 + 0.3 * len(names))
    y = np.arange(len(names))[::-1]
    ax.plot([r["reference"] for r in rows], y, color=REFERENCE, marker="o", markersize=10, markerfacecolor="none",
            linestyle="", label="reference", clip_on=False)  # fmt: skip
    ax.plot(
        [r["reproduced"] for r in rows],
        y,
        color=REPRODUCED,
        marker="o",
        markersize=5,
        linestyle="",
        label="reproduced",
        clip_on=False,
    )
    ax.set_yticks(y, names)
    ax.set_xlim(0, 1)
    ax.set_xlabel("accuracy")
    legend(ax, loc="lower right")
    return to_svg(fig, "accuracy", "Accuracy by task at the last landmark, both sides")


def _bound_lines(ax: Any, bound: float) -> None:
    for sign in (-1, 1):
        ax.axhline(
            sign * bound, color=BOUND, linestyle="--", linewidth=1.2, label="bound" if sign > 0 else None
        )
    ax.axhline(0, color=INK, linewidth=0.6)


def _landmark_axis(ax: Any, steps: Sequence[str]) -> None:
    ax.set_xticks(np.arange(len(steps)), steps)
    ax.set_xlabel("landmark (step)")
