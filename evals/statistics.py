"""Paired differences, their intervals, and what an equivalence bound says about them.

    loss_difference(reference_rows, reproduced_rows, bound=0.01, bounds=cfg, landmarks=6)

Units are documents or items, never tokens: tokens of one document are not independent. Intervals are seeded, so that
the same inputs give the same figures. Two tests stand side by side:

* EQUIVALENT: the 1 - 2*alpha interval lies inside the bound (two one-sided tests). FAITHFUL asks this of every
  landmark and surface at once, which is an intersection of tests, so no correction is needed for it.
* DIFFERENT: an interval widened by Bonferroni over the landmarks lies outside the bound. NOT FAITHFUL may come from any
  one of them, so this one is corrected.

The surprising thing: a bootstrap of identical pairs has width zero, which proves nothing. Accuracies therefore take
the wider of bootstrap and an exact interval (n identical pairs leave 3/n open: the rule of three), losses the wider
of bootstrap and Student's t, and never less than fp32 resolution.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from scipy import stats

from evals.config import BoundsConfig

Outcome = Literal["equivalent", "different", "inconclusive"]
FP32 = 2.0**-23
MAX_KEPT = 4_000_000  # draws kept in memory for reuse: 32 MB
KL_RESOLUTION = 1e-9


@dataclass(frozen=True)
class Comparison:
    """One surface at one landmark. `low`..`high` is the 1 - 2*alpha interval of `difference`; `wide_*` the
    corrected one. `units` documents or items; `needed`: how many would be enough, if that can be said."""

    reference: float | None
    reproduced: float | None
    difference: float
    low: float
    high: float
    wide_low: float
    wide_high: float
    bound: float
    outcome: Outcome
    units: int
    unit: str
    identical_units: int
    needed: int | None = None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def resamples(sizes: tuple[int, ...], samples: int, seed: int) -> Iterable[np.ndarray]:
    """How often each unit is drawn, float64[samples, n] for each stratum of n units. The same for the same arguments."""
    rng = np.random.Generator(np.random.PCG64(seed))
    for n in sizes:
        yield rng.multinomial(n, np.full(n, 1 / n), size=samples).astype(np.float64)


@lru_cache(maxsize=6)
def kept_resamples(sizes: tuple[int, ...], samples: int, seed: int) -> tuple[np.ndarray, ...]:
    """`resamples`, kept for the next surface or landmark with as many units."""
    return tuple(resamples(sizes, samples, seed))


def bootstrap_ratio(
    numerator: np.ndarray,
    denominator: np.ndarray,
    strata: Sequence[str],
    *,
    samples: int,
    seed: int,
    macro: bool,
) -> np.ndarray:
    """float64[samples] of sum(numerator)/sum(denominator), units drawn with replacement within each stratum.

    `macro`: the mean over strata of the stratum's own ratio instead of the pooled ratio.
    """
    names = np.asarray(strata)
    places = [np.flatnonzero(names == name) for name in dict.fromkeys(strata)]
    sizes = tuple(len(at) for at in places)
    small = sum(sizes) * samples <= MAX_KEPT
    draws = (kept_resamples if small else resamples)(sizes, samples, seed)
    tops, bottoms = [], []
    for at, counts in zip(places, draws):
        tops.append(counts @ numerator[at])
        bottoms.append(counts @ denominator[at])
    if macro:
        return np.mean([t / b for t, b in zip(tops, bottoms)], axis=0)
    return np.sum(tops, axis=0) / np.sum(bottoms, axis=0)


def student_half_width(
    numerator: np.ndarray, denominator: np.ndarray, strata: Sequence[str], level: float
) -> float:
    """Half-width of the two-sided `level` interval of a pooled ratio, linearised, by Student's t.

    With one unit in every stratum the spread cannot be estimated: infinite.
    """
    names = np.asarray(strata)
    ratio = numerator.sum() / denominator.sum()
    spread, freedom = 0.0, 0
    for name in dict.fromkeys(strata):
        at = np.flatnonzero(names == name)
        if len(at) < 2:
            continue
        residual = numerator[at] - ratio * denominator[at]
        spread += len(at) * residual.var(ddof=1)
        freedom += len(at) - 1
    if freedom == 0:
        return float("inf")
    error = np.sqrt(spread) / denominator.sum()
    return float(stats.t.ppf(0.5 + level / 2, freedom) * error)


def percentile(samples: np.ndarray, level: float) -> tuple[float, float]:
    """The two-sided `level` percentile interval."""
    low, high = np.quantile(samples, [0.5 - level / 2, 0.5 + level / 2])
    return float(low), float(high)


def exact_share(count: float, n: float, level: float) -> tuple[float, float]:
    """Clopper-Pearson interval of a share: with count 0 and level 0.9 the upper end is 1 - 0.05**(1/n)."""
    tail = (1 - level) / 2
    low = float(stats.beta.ppf(tail, count, n - count + 1)) if count > 0 else 0.0
    high = float(stats.beta.ppf(1 - tail, count + 1, n - count)) if count < n else 1.0
    return low, high


def discordance_interval(difference: np.ndarray, strata: Sequence[str], level: float) -> tuple[float, float]:
    """Interval of a macro difference of paired 0/1 answers from its discordant pairs alone.

    Gains and losses are shares with exact intervals, joined by the method of variance estimates recovery
    (Zou and Donner 2008). Strata of unequal size count with the effective number of items.
    """
    names = np.asarray(strata)
    distinct = list(dict.fromkeys(strata))
    gain = loss = inverse = 0.0
    for name in distinct:
        part = difference[names == name]
        gain += (part > 0).mean() / len(distinct)
        loss += (part < 0).mean() / len(distinct)
        inverse += 1 / (len(distinct) ** 2 * len(part))
    n = 1 / inverse
    gain_low, gain_high = exact_share(gain * n, n, level)
    loss_low, loss_high = exact_share(loss * n, n, level)
    d = gain - loss
    low = d - np.hypot(gain - gain_low, loss_high - loss)
    high = d + np.hypot(gain_high - gain, loss - loss_low)
    return float(low), float(high)


def levels(bounds: BoundsConfig, landmarks: int) -> tuple[float, float]:
    """(level of the equivalence interval, level of the corrected one)."""
    return 1 - 2 * bounds.alpha, 1 - bounds.alpha / max(1, landmarks)


def judge_interval(
    low: float, high: float, wide_low: float, wide_high: float, bound: float, *, one_sided: bool = False
) -> Outcome:
    """EQUIVALENT inside the bound, DIFFERENT outside it after correction, else INCONCLUSIVE."""
    if high < bound and (one_sided or low > -bound):
        return "equivalent"
    if wide_low > bound or (not one_sided and wide_high < -bound):
        return "different"
    return "inconclusive"


def units_needed(units: int, difference: float, low: float, high: float, bound: float) -> int | None:
    """Units with which the interval would fit, if the difference stays and the width shrinks as 1/sqrt(n)."""
    room, reach = bound - abs(difference), max(high - difference, difference - low)
    if room <= 0 or not np.isfinite(reach):
        return None
    return int(np.ceil(units * (reach / room) ** 2))


def _comparison(
    reference: float | None, reproduced: float | None, difference: float,
    interval: tuple[float, float], wide: tuple[float, float], bound: float, units: int, unit: str,
    identical: int, *, one_sided: bool = False, note: str = "",
) -> Comparison:  # fmt: skip
    outcome = judge_interval(*interval, *wide, bound, one_sided=one_sided)
    needed = units_needed(units, difference, *interval, bound) if outcome == "inconclusive" else None
    return Comparison(
        reference,
        reproduced,
        difference,
        *interval,
        *wide,
        bound,
        outcome,
        units,
        unit,
        identical,
        needed,
        note,
    )


def _widest(*parts: tuple[float, float]) -> tuple[float, float]:
    return min(p[0] for p in parts), max(p[1] for p in parts)


def _ratio_intervals(
    numerator: np.ndarray, denominator: np.ndarray, strata: Sequence[str], bounds: BoundsConfig, landmarks: int,
    floor: float,
) -> tuple[float, tuple[float, float], tuple[float, float]]:  # fmt: skip
    estimate = float(numerator.sum() / denominator.sum())
    samples = bootstrap_ratio(
        numerator, denominator, strata, samples=bounds.bootstrap, seed=bounds.seed, macro=False
    )
    out = []
    for level in levels(bounds, landmarks):
        half = max(student_half_width(numerator, denominator, strata, level), floor)
        out.append(_widest(percentile(samples, level), (estimate - half, estimate + half)))
    return estimate, out[0], out[1]


def loss_difference(
    reference: Sequence[float], reproduced: Sequence[float], predictions: Sequence[int], domains: Sequence[str],
    *, bound: float, bounds: BoundsConfig, landmarks: int,
) -> Comparison:  # fmt: skip
    """Reproduced minus reference, nat per prediction, from summed losses of the same documents."""
    p, q = np.asarray(reference, np.float64), np.asarray(reproduced, np.float64)
    n = np.asarray(predictions, np.float64)
    floor = FP32 * float(p.sum() / n.sum())
    estimate, interval, wide = _ratio_intervals(q - p, n, domains, bounds, landmarks, floor)
    identical = int((p == q).sum())
    note = (
        f"all {len(p)} documents score the same; the interval is fp32 resolution"
        if identical == len(p)
        else ""
    )
    return _comparison(
        float(p.sum() / n.sum()), float(q.sum() / n.sum()), estimate, interval, wide, bound, len(p), "documents",
        identical, note=note,
    )  # fmt: skip


def kl_level(
    sums: Sequence[float], predictions: Sequence[int], domains: Sequence[str],
    *, bound: float, bounds: BoundsConfig, landmarks: int,
) -> Comparison:  # fmt: skip
    """Mean KL, nat per prediction. KL has no other side: only its upper end is held against the bound.

    Each tail gets alpha / 2: KL is skewed to the right, where a percentile interval of few documents is too short
    (measured by `evals.calibration`: 6 to 7% false FAITHFUL at one bound with alpha in the tail).
    """
    bounds = bounds.model_copy(update={"alpha": bounds.alpha / 2})
    k, n = np.asarray(sums, np.float64), np.asarray(predictions, np.float64)
    estimate, interval, wide = _ratio_intervals(k, n, domains, bounds, landmarks, KL_RESOLUTION)
    interval, wide = ((max(low, 0.0), high) for low, high in (interval, wide))
    return _comparison(
        None, None, estimate, interval, wide, bound, len(k), "documents", int((k == 0).sum()), one_sided=True
    )


def accuracy_difference(
    reference: Sequence[int], reproduced: Sequence[int], tasks: Sequence[str],
    *, bound: float, bounds: BoundsConfig, landmarks: int,
) -> Comparison:  # fmt: skip
    """Macro accuracy, reproduced minus reference, from 0/1 answers to the same items."""
    p, q = np.asarray(reference, np.float64), np.asarray(reproduced, np.float64)
    d = q - p
    names = np.asarray(tasks)
    macro = [float(np.mean([x[names == t].mean() for t in dict.fromkeys(tasks)])) for x in (p, q, d)]
    samples = bootstrap_ratio(
        d, np.ones_like(d), tasks, samples=bounds.bootstrap, seed=bounds.seed, macro=True
    )
    interval, wide = (
        _widest(percentile(samples, level), discordance_interval(d, tasks, level))
        for level in levels(bounds, landmarks)
    )
    changed = int((d != 0).sum())
    note = (
        f"no answer of {len(d)} changed; that many identical pairs leave {interval[1]:.4f} open"
        if changed == 0
        else f"{changed} of {len(d)} answers changed, {int((d > 0).sum())} to right, {int((d < 0).sum())} to wrong"
    )
    return _comparison(
        macro[0], macro[1], macro[2], interval, wide, bound, len(d), "items", len(d) - changed, note=note
    )


def sign_pattern(differences: Sequence[float]) -> dict[str, Any]:
    """Signs of a surface's differences over landmarks, with a two-sided sign test and the trend of their size.

    Landmarks of one run are not independent, so `p` is a hint for the reader and never decides a verdict.
    """
    d = np.asarray(differences, np.float64)
    up, down = int((d > 0).sum()), int((d < 0).sum())
    p = float(stats.binomtest(min(up, down), up + down, 0.5).pvalue) if up + down else 1.0
    grows = None
    if len(d) >= 3 and np.ptp(np.abs(d)) > 0:
        grows = float(stats.spearmanr(np.arange(len(d)), np.abs(d)).statistic)
    return {
        "above": up,
        "below": down,
        "equal": len(d) - up - down,
        "sign_test_p": p,
        "size_trend": grows,
        "pattern": "".join("+" if x > 0 else "-" if x < 0 else "0" for x in d),
    }
