"""How far two sets of logits are apart, and where. NumPy in float64, bounded memory, no framework.

Reported: max and mean |difference|, KL both ways, top-1 and top-5 agreement, all of it again per bucket of
positions (in units of the sliding window) and per prompt, and the single worst place by name. The surprising
thing: on a young model KL and top-1 hardly move when the window is off by one (measured: 4e-7 and 1.0000),
while the maximum jumps by a factor 10,000. So the maximum is what gates.

Axis letters: P prompts, S positions, V vocabulary.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from infra.errors import ParityError

ROWS = 16  # positions handled at once: 16 x 100352 float64 is 13 MB, about the size of a cache


class Place(NamedTuple):
    """The place of the largest difference."""

    difference: float
    prompt: int
    position: int
    token: int
    first: float
    second: float


class Tally:
    """Sums and maxima over positions; `add` takes per-position figures."""

    def __init__(self) -> None:
        self.positions = 0
        self.max = self.sum = self.kl_max = self.kl_sum = self.reverse_max = self.reverse_sum = 0.0
        self.top1 = self.top5 = 0

    def add(self, rows: "Rows") -> None:
        self.positions += len(rows.max)
        self.max = max(self.max, float(rows.max.max()))
        self.sum += float(rows.mean.sum())
        self.kl_max = max(self.kl_max, float(rows.kl.max()))
        self.kl_sum += float(rows.kl.sum())
        self.reverse_max = max(self.reverse_max, float(rows.reverse.max()))
        self.reverse_sum += float(rows.reverse.sum())
        self.top1 += int(rows.top1.sum())
        self.top5 += int(rows.top5.sum())

    def report(self) -> dict[str, Any]:
        n = max(1, self.positions)
        return {
            "positions": self.positions,
            "max": self.max,
            "mean": self.sum / n,
            "kl_max": self.kl_max,
            "kl_mean": self.kl_sum / n,
            "reverse_kl_max": self.reverse_max,
            "reverse_kl_mean": self.reverse_sum / n,
            "top1": self.top1 / n,
            "top5": self.top5 / n,
        }


class Rows(NamedTuple):
    """Per-position figures, each [r]: max and mean |a-b|, KL(a||b), KL(b||a), same top-1, same top-5 set."""

    max: np.ndarray
    mean: np.ndarray
    kl: np.ndarray
    reverse: np.ndarray
    top1: np.ndarray
    top5: np.ndarray


def row_figures(a: np.ndarray, b: np.ndarray) -> Rows:
    """Figures of logits a and b, both [r, V]."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    difference = np.abs(a - b)
    log_a, log_b = log_softmax(a), log_softmax(b)
    p_a, p_b = np.exp(log_a), np.exp(log_b)
    gap = log_a - log_b
    k = min(5, a.shape[1])
    five_a = np.sort(np.argpartition(a, -k, axis=1)[:, -k:], axis=1)
    five_b = np.sort(np.argpartition(b, -k, axis=1)[:, -k:], axis=1)
    return Rows(
        difference.max(axis=1),
        difference.mean(axis=1),
        kl_terms(p_a, gap),
        kl_terms(p_b, -gap),
        a.argmax(axis=1) == b.argmax(axis=1),
        (five_a == five_b).all(axis=1),
    )


def kl_terms(p: np.ndarray, gap: np.ndarray) -> np.ndarray:
    """Sum of p*(e^-gap - 1 + gap) over the last axis: KL without the cancellation of sum(p*gap), never negative."""
    return np.sum(p * (np.expm1(-gap) + gap), axis=-1)


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis, float64."""
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def buckets(length: int, window: int) -> list[tuple[int, int]]:
    """Position ranges [0,W), [W,2W), [2W,4W), ... up to `length`."""
    edges = [0, *(e for e in (window * 2**i for i in range(32)) if e < length), length]
    return list(itertools.pairwise(edges))


def compare_logits(pairs: Iterable[tuple[np.ndarray, np.ndarray]], window: int) -> dict[str, Any]:
    """Agreement of pairs of logits [S, V], one pair per prompt (lazily, so one pair is in memory).

    Where one side has fewer columns (a trimmed vocabulary) only the common ones are compared. Raises
    ParityError on a shape mismatch and on any value that is not finite.
    """
    total, per_prompt = Tally(), []
    ranges: dict[tuple[int, int], Tally] = {}
    worst = Place(-1.0, 0, 0, 0, 0.0, 0.0)
    columns = (0, 0)
    for prompt, (a, b) in enumerate(pairs):
        if a.ndim != 2 or len(a) != len(b):
            raise ParityError(f"prompt {prompt}: logits of shape {a.shape} against {b.shape}")
        columns = (a.shape[1], b.shape[1])
        common = min(columns)
        tally = Tally()
        for low, high in buckets(len(a), window):
            bucket = ranges.setdefault((low, high), Tally())
            for start in range(low, high, ROWS):
                stop = min(high, start + ROWS)
                x, y = np.asarray(a[start:stop, :common]), np.asarray(b[start:stop, :common])
                refuse_nonfinite(x, y, prompt, start)
                figures = row_figures(x, y)
                for t in (total, tally, bucket):
                    t.add(figures)
                worst = max(worst, worst_place(x, y, figures, prompt, start), key=lambda p: p.difference)
        per_prompt.append(tally.report())
    if not per_prompt:
        raise ParityError("no prompt was compared", "give at least one prompt")
    return {
        **total.report(),
        "columns": list(columns),
        "buckets": [{"from": low, "to": high, **t.report()} for (low, high), t in sorted(ranges.items())],
        "prompts": per_prompt,
        "worst": worst._asdict(),
    }


def refuse_nonfinite(x: np.ndarray, y: np.ndarray, prompt: int, start: int) -> None:
    """Raise ParityError that names the first value that is not finite."""
    for side, values in (("first", x), ("second", y)):
        bad = np.argwhere(~np.isfinite(values))
        if len(bad):
            row, column = bad[0]
            raise ParityError(
                f"the {side} side gives {values[row, column]} at prompt {prompt}, position {start + row}, "
                f"token {column} ({len(bad)} such values in these rows)",
                "the weights are broken, or the arithmetic overflows: fetch or export them again",
            )


def worst_place(x: np.ndarray, y: np.ndarray, figures: Rows, prompt: int, start: int) -> Place:
    """The place of the largest difference within these rows."""
    row = int(figures.max.argmax())
    token = int(np.abs(x[row].astype(np.float64) - y[row]).argmax())
    return Place(
        float(figures.max[row]), prompt, start + row, token, float(x[row, token]), float(y[row, token])
    )


LogitFunction = Callable[[np.ndarray], np.ndarray]
"""tokens int32[1, S] -> logits float32[S, V]."""
