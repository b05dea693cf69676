"""A reference curve from outside: a W&B CSV export, aligned with our log, smoothed alike, with its noise band.

    curve = read_wandb(Path("olmo3-7b.csv"), run_name="OLMo-3-1025-7B")
    band = compare_curves(curve, ours, half_width=200)

The export's first column is `Step` (or the chosen x axis), then per run `<name> - <metric>` with `__MIN` and `__MAX` columns, at most 10,000
sampled rows, empty cells where a run has no value. The surprising thing: the band is the scatter of the reference around its
own smooth curve, so it says what one step's loss may differ by chance, and not what two runs may differ by.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from infra.errors import DataError

NAMES = {
    "ce": ("train/CE loss", "CE loss"),
    "z_loss": ("train/Z loss", "Z loss"),
    "lr": ("optim/LR (group 0)", "optim/learning_rate_group0", "LR"),
    "grad_norm": ("optim/total grad norm", "total grad norm"),
    "skipped": ("optim/step skipped", "step skipped"),
    "tokens_seen": ("throughput/total tokens", "total tokens"),
}
MAX_BYTES, MAX_STEP = 256 << 20, 1e15


@dataclass(frozen=True)
class Curve:
    """One logged run: increasing `steps` int64[n] and float64[n] per quantity, NaN where not logged."""

    name: str
    steps: np.ndarray
    values: dict[str, np.ndarray]


def read_wandb(path: Path, *, run_name: str = "", tokens_per_step: int = 0) -> Curve:
    """The curve of one run of a W&B CSV export.

    With `tokens_per_step` an x axis of tokens (first column not named `Step`) becomes steps. Raises DataError that names the runs
    of the file when `run_name` is needed or unknown.
    """
    rows = read_rows(path)
    if len(rows) < 2 or not rows[0]:
        raise DataError(f"{path} holds no row of a W&B export", "export the panel as CSV again")
    head = rows[0]
    columns: dict[str, dict[str, int]] = {}
    for i, title in enumerate(head[1:], 1):
        name, dash, metric = title.rpartition(" - ")
        if dash and not metric.endswith(("__MIN", "__MAX")):
            columns.setdefault(name, {})[metric] = i
    if not run_name and len(columns) == 1:
        run_name = next(iter(columns))
    if run_name not in columns:
        raise DataError(f"{path} has no run {run_name!r}", f"its runs: {', '.join(columns) or 'none'}")
    mine = columns[run_name]
    table = {k: next((mine[n] for n in names if n in mine), None) for k, names in NAMES.items()}
    if table["ce"] is None:
        raise DataError(f"run {run_name!r} in {path} has no CE loss", f"its metrics: {', '.join(mine)}")
    by_tokens = head[0].strip().lower() not in ("step", "global_step", "_step")
    if by_tokens and not tokens_per_step:
        raise DataError(f"the x axis of {path} is {head[0]!r}, not Step", "say tokens_per_step")
    x = np.array([number(r[0]) for r in rows[1:]])
    if not np.isfinite(x).all() or np.abs(x).max() > MAX_STEP:
        raise DataError(f"{path} has a row whose {head[0]!r} is no step", "export the panel as CSV again")
    steps = np.rint(x / tokens_per_step if by_tokens else x).astype(np.int64)
    values = {
        k: np.array([number(r[i]) if i < len(r) else math.nan for r in rows[1:]])
        for k, i in table.items()
        if i is not None
    }
    keep = np.isfinite(values["ce"])
    order = np.argsort(steps[keep], kind="stable")
    steps = steps[keep][order]
    if len(steps) != len(np.unique(steps)):
        raise DataError(f"{path} holds a step twice for run {run_name!r}", "export one run, or one x axis")
    return Curve(run_name, steps, {k: v[keep][order] for k, v in values.items()})


def read_rows(path: Path) -> list[list[str]]:
    """The rows of a CSV export that are not blank; too large or damaged is a named error."""
    if path.stat().st_size > MAX_BYTES:
        raise DataError(f"{path} is larger than {MAX_BYTES >> 20} MB: no W&B export is", "export one panel")
    try:
        with open(path, newline="", encoding="utf-8-sig") as f:
            return [row for row in csv.reader(f) if row]
    except (UnicodeDecodeError, csv.Error) as e:
        raise DataError(f"{path} is not a CSV file: {e}", "export the panel as CSV again") from None


def number(cell: str) -> float:
    """A cell as float; empty and `NaN` are NaN, anything else that is no number is an error."""
    cell = cell.strip()
    if not cell or cell.lower() == "nan":
        return math.nan
    try:
        return float(cell)
    except ValueError:
        raise DataError(f"the cell {cell!r} is not a number", "export the panel as CSV again") from None


def from_metrics(rows: Sequence[Mapping[str, Any]], name: str = "reproduced") -> Curve:
    """Our own metrics.jsonl as a curve."""
    kept = [r for r in rows if r.get("ce") is not None]
    return Curve(
        name,
        np.array([r["step"] for r in kept], np.int64),
        {
            k: np.array([float(r[k]) if r.get(k) is not None else math.nan for r in kept])
            for k in NAMES
            if any(k in r for r in kept)
        },
    )


def smooth(steps: np.ndarray, values: np.ndarray, at: np.ndarray, half_width: float) -> np.ndarray:
    """Mean of `values` with weights that fall linearly to 0 at `half_width` steps, at the steps `at`.

    The window is in steps and not in samples, so that a sampled export and a full log are smoothed alike. NaN where
    no sample lies inside.
    """
    out = np.full(len(at), math.nan)
    for i, s in enumerate(at):
        lo, hi = np.searchsorted(steps, [s - half_width, s + half_width])
        weights = 1 - np.abs(steps[lo:hi] - s) / half_width
        good = np.isfinite(values[lo:hi]) & (weights > 0)
        if good.any():
            out[i] = np.average(values[lo:hi][good], weights=weights[good])
    return out


def compare_curves(reference: Curve, ours: Curve, *, half_width: float, key: str = "ce") -> dict[str, Any]:
    """Both curves at the steps both logged, smoothed alike, their difference and the reference's noise band.

    `band` is the standard deviation of the reference around its smooth curve; `smooth_band` the part of it that survives smoothing
    (independent steps assumed). `outside`: share of steps where the smoothed difference exceeds 2 smooth bands of both sides.
    """
    for side in (reference, ours):
        if key not in side.values:
            raise DataError(f"{side.name} has no {key}", f"it has: {', '.join(side.values)}")
    common, at_r, at_o = np.intersect1d(reference.steps, ours.steps, return_indices=True)
    if len(common) < 3:
        raise DataError(
            f"{reference.name} and {ours.name} have {len(common)} steps in common",
            "compare runs of the same length, or export more rows",
        )
    r, o = reference.values[key][at_r], ours.values[key][at_o]
    sr, so = (smooth(common, v, common, half_width) for v in (r, o))
    band = float(np.nanstd(r - sr, ddof=1))
    inside = np.array([np.sum(np.abs(common - s) < half_width) for s in common])
    smooth_band = band / np.sqrt(np.maximum(1.0, inside * 0.75))
    difference = so - sr
    return {
        "steps": common.tolist(),
        "reference": sr.tolist(),
        "reproduced": so.tolist(),
        "difference": difference.tolist(),
        "band": band,
        "smooth_band": smooth_band.tolist(),
        "outside": float(np.mean(np.abs(difference) > 2 * np.sqrt(2) * smooth_band)),
        "mean_difference": float(np.nanmean(o - r)),
        "half_width": half_width,
    }
