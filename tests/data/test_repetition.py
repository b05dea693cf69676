"""The repetition filter against the ten-line rule of the sheet (section 5.6) and OLMo-core's own function."""

import numpy as np
import pytest

from data.config import FilterConfig
from data.repetition import accepted, rejections

CFG = FilterConfig(enabled=True)


def oracle(x, max_count=32, max_period=13, min_period=1):
    """True when x passes: no run of (max_count - 1) * p positions with x[i] == x[i - p]."""
    for p in range(min_period, min(max_period, len(x) // 3) + 1):
        run = 0
        for i in range(p, len(x)):
            run = run + 1 if x[i] == x[i - p] else 0
            if run >= (max_count - 1) * p:
                return False
    return True


def olmo_core(x, max_count=32, max_period=13, min_period=1):
    """The first tuple by which OLMo-core rejects x, or None."""
    from olmo_core.data.utils import find_periodic_sequences

    for found in find_periodic_sequences(x.astype(np.int64), max_period=max_period, min_period=min_period):
        if found.times >= max_count:
            return found
    return None


def copies(period, length, S=8192, at=100, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.integers(1000, 90000, S).astype(np.uint32)
    x[at : at + length] = np.resize(np.arange(1, period + 1, dtype=np.uint32), length)
    return x


@pytest.mark.parametrize("period", range(1, 14))
def test_thirty_two_copies_fail_and_one_position_less_passes(period):
    passing, failing = 32 * period - 1, 32 * period
    assert accepted(copies(period, passing)[None], CFG)[0]
    assert not accepted(copies(period, failing)[None], CFG)[0]
    assert accepted(copies(14, 14 * 40)[None], CFG)[0]


@pytest.mark.parametrize("period", [1, 2, 4, 8, 3, 13])
def test_a_run_at_the_start_and_the_same_last_token_passes(period):
    """MaxText's port wraps around where the period divides the length, and rejects this (sheet M4)."""
    x = copies(period, 32 * period - 1, at=0)
    x[-1] = x[period - 1]
    assert olmo_core(x) is None
    assert accepted(x[None], CFG)[0]


def adversarial(rng, S):
    """Few symbols, with a planted run near the threshold, near an edge or broken by one token."""
    x = rng.integers(0, int(rng.integers(2, 6)), S).astype(np.uint32)
    count = int(rng.integers(3, 12))
    p = int(rng.integers(1, 15))
    length = max(0, count * p + int(rng.integers(-2, 3)))
    at = int(rng.choice([0, max(0, S - length), rng.integers(0, S)]))
    segment = np.resize(rng.integers(0, 6, p), length)[: S - at]
    x[at : at + len(segment)] = segment
    if rng.random() < 0.3:
        x[int(rng.integers(0, S))] = 9
    return x, count


def test_verdicts_equal_both_oracles_on_adversarial_instances():
    rng = np.random.Generator(np.random.PCG64(1))
    rejected = 0
    for _ in range(4000):
        x, count = adversarial(rng, int(rng.integers(1, 200)))
        cfg = FilterConfig(enabled=True, max_count=count)
        period, times = rejections(x[None], cfg)[0]
        found = olmo_core(x, count)
        assert (period == 0) == oracle(x, count) == (found is None), x.tolist()
        if found is not None:
            rejected += 1
            assert (period, times) == (found.period, found.times), (x.tolist(), found)
    assert 500 < rejected < 3500


def test_verdicts_at_full_length_equal_olmo_core():
    rng = np.random.Generator(np.random.PCG64(2))
    rows = []
    for k in range(150):
        period = int(rng.integers(1, 15))
        length = int(rng.integers(30 * period, 34 * period))
        at = int(rng.integers(0, 8192 - length))
        rows.append(copies(period, length, at=at, seed=k))
    rows.append(np.zeros(8192, dtype=np.uint32))
    rows = np.stack(rows)
    verdicts = accepted(rows, CFG)
    assert 20 < verdicts.sum() < 131
    for row, verdict in zip(rows, verdicts):
        assert verdict == (olmo_core(row) is None)


def test_examples_of_the_sheet():
    for x, count, first in (
        ([9, 1, 2, 1, 2, 1, 2, 1, 8], 3, (2, 3)),
        ([5, 7, 7, 7, 7, 6, 3], 4, (1, 4)),
        ([1] * 8, 8, (1, 8)),
        ([1, 2, 3, 1, 2, 3, 9, 9, 8], 3, (0, 0)),
        ([9, 9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 5, 5, 5, 8], 3, (1, 3)),
    ):
        got = rejections(np.array([x], dtype=np.uint32), FilterConfig(enabled=True, max_count=count))[0]
        assert tuple(got.tolist()) == first


def test_padding_at_the_end_of_packed_rows_rejects_from_32_pads():
    for pads, passes in ((31, True), (32, False)):
        x = np.arange(512, dtype=np.uint32)
        x[-pads:] = 100277
        assert accepted(x[None], CFG)[0] == passes


def test_nothing_and_short_rows():
    assert rejections(np.zeros((0, 64), dtype=np.uint32), CFG).shape == (0, 2)
    assert accepted(np.zeros((2, 2), dtype=np.uint32), CFG).all()
