"""Further plots of the report: drift by layer, and a published training curve against ours. Same rules as `plots`."""

from typing import Any

import numpy as np

from evals.report.plots import (
    BOUND,
    INK,
    LINE,
    MARKERS,
    REFERENCE,
    REPRODUCED,
    SERIES,
    figure,
    legend,
    to_svg,
)

FLOOR = 1e-4  # of what rounding explains; exact agreement has no place on a logarithmic axis


def drift(found: dict[str, Any]) -> str:
    """Drift of each sub-block over what rounding explains for it, by layer; the dashed line is 1."""
    fig, (ax,) = figure(1, 3.6)
    rows = [r for r in found["rows"] if r["layer"] >= 0]
    parts = list(dict.fromkeys(r["part"] for r in rows))
    bad = [p for p in parts if any(r["drifts"] for r in rows if r["part"] == p)]
    for part in [p for p in parts if p not in bad] + bad:
        mine = [r for r in rows if r["part"] == part]
        x, y = [r["layer"] for r in mine], [ratio(r) for r in mine]
        if part not in bad:
            ax.plot(x, y, color=LINE, linewidth=1.2, marker="o", markersize=2.5)
            continue
        i = bad.index(part)
        ax.plot(x, y, color=SERIES[i % 8], marker=MARKERS[i % 8], markersize=5, linewidth=1, label=part)
    blocks = found["blocks"]
    ax.plot([b["layer"] for b in blocks], [ratio(b) for b in blocks], color=INK, linewidth=1.2, linestyle="-.",
            label="whole layer")  # fmt: skip
    ax.axhline(1, color=BOUND, linestyle="--", linewidth=1.2, label="what rounding explains")
    ax.set_yscale("log")
    ax.set_ylim(bottom=FLOOR / 2)
    ax.set_xlabel("layer")
    ax.set_ylabel("drift / expected rounding")
    layers = sorted({b["layer"] for b in blocks})
    ax.set_xticks(layers if len(layers) <= 16 else layers[:: -(-len(layers) // 16)])
    legend(ax, ncols=3, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0)
    return to_svg(fig, "drift", "Drift of each sub-block by layer, relative to what rounding explains")


def ratio(row: dict[str, Any]) -> float:
    """Drift in units of what is expected, at least FLOOR."""
    value = row["drift"]
    if not row["expected"] or value is None:
        return FLOOR if value == 0 else 1e9
    return max(FLOOR, min(1e9, value / row["expected"]))


def outside_curve(c: dict[str, Any]) -> str:
    """Both smoothed curves with the reference's scatter; below, their difference with what chance leaves."""
    fig, (top, bottom) = figure(2, 4.8, (2.2, 1))
    steps = np.array(c["steps"])
    reference, ours, difference = (
        np.array(c[k], np.float64) for k in ("reference", "reproduced", "difference")
    )
    top.fill_between(
        steps, reference - c["band"], reference + c["band"], color=REFERENCE, alpha=0.2, linewidth=0
    )
    top.plot(steps, reference, color=REFERENCE, linewidth=3, label="reference, published")
    top.plot(steps, ours, color=REPRODUCED, linewidth=1.3, label="reproduced")
    top.set_ylabel("training CE, smoothed (nat)")
    legend(top)
    shade = 2 * np.sqrt(2) * np.array(c["smooth_band"])
    bottom.fill_between(steps, -shade, shade, color=BOUND, alpha=0.25, linewidth=0)
    bottom.plot(steps, difference, color=REPRODUCED, linewidth=1.2)
    bottom.axhline(0, color=INK, linewidth=0.6)
    bottom.set_ylabel("difference (nat)")
    bottom.set_xlabel("step")
    return to_svg(fig, "published", "Published training curve of the reference and ours, smoothed alike")
