"""Intervals and equivalence: closed forms, exact tables and small simulations as oracles."""

import numpy as np
import pytest
from scipy import stats

from evals.config import BoundsConfig
from evals.statistics import (
    accuracy_difference,
    bootstrap_ratio,
    discordance_interval,
    exact_share,
    judge_interval,
    kl_level,
    loss_difference,
    sign_pattern,
    student_half_width,
    units_needed,
)

BOUNDS = BoundsConfig(bootstrap=1000)


def losses(shift: float, n: int = 40, noise: float = 0.002, seed: int = 0):
    rng = np.random.default_rng(seed)
    predictions = rng.integers(50, 256, n)
    p = rng.normal(3.0, 0.5, n) * predictions
    q = p + (shift + rng.normal(0, noise, n)) * predictions
    return p.tolist(), q.tolist(), predictions.tolist(), ["ab"[i % 2] for i in range(n)]


@pytest.mark.parametrize(
    ("shift", "noise", "outcome"),
    [
        (0.0, 0.002, "equivalent"),
        (0.02, 0.002, "different"),
        (-0.02, 0.002, "different"),
        (0.0095, 0.01, "inconclusive"),
    ],
)
def test_losses_inside_outside_and_across_the_bound(shift, noise, outcome):
    found = loss_difference(*losses(shift, noise=noise), bound=0.01, bounds=BOUNDS, landmarks=6)
    assert found.outcome == outcome
    assert (
        found.low < found.difference < found.high
        and found.wide_low <= found.low
        and found.wide_high >= found.high
    )
    assert found.reproduced - found.reference == pytest.approx(found.difference, abs=1e-12)


def test_the_same_inputs_give_the_same_interval_and_another_seed_nearly():
    a, b = (loss_difference(*losses(0.001), bound=0.01, bounds=BOUNDS, landmarks=6) for _ in range(2))
    assert a == b
    c = loss_difference(*losses(0.001), bound=0.01, bounds=BOUNDS.model_copy(update={"seed": 7}), landmarks=6)
    assert c.high == pytest.approx(a.high, abs=2e-4)


def test_documents_are_the_units_and_tokens_weigh():
    """The estimate is the token-weighted mean, against a plain computation."""
    p, q, n, domains = losses(0.003)
    found = loss_difference(p, q, n, domains, bound=0.01, bounds=BOUNDS, landmarks=1)
    assert found.difference == pytest.approx((sum(q) - sum(p)) / sum(n), rel=1e-12)
    assert found.units == 40


def test_bootstrap_spread_matches_the_closed_form():
    """Equal denominators, one stratum: the bootstrap's spread is that of a mean."""
    x = np.random.default_rng(2).normal(size=200)
    samples = bootstrap_ratio(x, np.ones(200), ["a"] * 200, samples=4000, seed=1, macro=False)
    assert samples.mean() == pytest.approx(x.mean(), abs=0.01)
    assert samples.std() == pytest.approx(x.std() / np.sqrt(200), rel=0.05)


def test_student_half_width_is_the_textbook_one():
    x = np.random.default_rng(3).normal(size=30)
    want = stats.t.ppf(0.95, 29) * x.std(ddof=1) / np.sqrt(30)
    assert student_half_width(x, np.ones(30), ["a"] * 30, 0.9) == pytest.approx(want, rel=1e-12)
    assert student_half_width(np.ones(1), np.ones(1), ["a"], 0.9) == float("inf")


def test_identical_answers_leave_the_rule_of_three_open():
    """n identical pairs do not prove equality: about 3/n stays open."""
    right = [i % 2 for i in range(800)]
    tasks = [f"t{i // 100}" for i in range(800)]
    found = accuracy_difference(right, right, tasks, bound=0.005, bounds=BOUNDS, landmarks=6)
    assert found.difference == 0 and found.outcome == "equivalent"
    assert found.high == pytest.approx(1 - 0.05 ** (1 / 800), rel=1e-9)
    assert found.high == pytest.approx(3 / 800, rel=0.01)
    few = accuracy_difference(right[:100], right[:100], tasks[:100], bound=0.005, bounds=BOUNDS, landmarks=6)
    assert few.outcome == "inconclusive"
    assert few.needed > 600  # 3/n < 0.005 needs about 600 items; the square-root rule asks for more


def test_one_changed_answer_is_wider_than_its_bootstrap():
    right = [1] * 800
    other = [0] + [1] * 799
    tasks = ["t"] * 800
    found = accuracy_difference(right, other, tasks, bound=0.005, bounds=BOUNDS, landmarks=1)
    assert found.difference == pytest.approx(-1 / 800)
    assert found.low == pytest.approx(-exact_share(1, 800, 0.9)[1], rel=1e-6)


def test_exact_share_against_tables():
    """Clopper-Pearson: 0 of 10 and 5 of 10 at 95% (standard table values)."""
    assert exact_share(0, 10, 0.95) == (0.0, pytest.approx(0.3085, abs=1e-4))
    assert exact_share(5, 10, 0.95) == (pytest.approx(0.1871, abs=1e-4), pytest.approx(0.8129, abs=1e-4))


def test_unequal_tasks_count_equally():
    difference = np.array([1.0] * 2 + [0.0] * 8 + [0.0] * 90)
    low, high = discordance_interval(difference, ["a"] * 10 + ["b"] * 90, 0.9)
    assert low < 0.1 < high  # (0.2 + 0) / 2


def test_kl_is_held_against_its_upper_end_only():
    n = [100] * 40
    small = kl_level([1e-7 * 100] * 40, n, ["a"] * 40, bound=1.5e-3, bounds=BOUNDS, landmarks=6)
    large = kl_level(
        [3e-3 * (100 + i % 3) for i in range(40)], n, ["a"] * 40, bound=1.5e-3, bounds=BOUNDS, landmarks=6
    )
    assert small.outcome == "equivalent" and small.low >= 0
    assert large.outcome == "different"


def test_identical_losses_say_so():
    p, _, n, d = losses(0.0)
    found = loss_difference(p, p, n, d, bound=0.01, bounds=BOUNDS, landmarks=6)
    assert found.outcome == "equivalent" and found.high > 0 and "score the same" in found.note


def test_bound_edges():
    assert judge_interval(-0.01, 0.009, -0.02, 0.02, 0.01) == "inconclusive"
    assert judge_interval(-0.0099, 0.0099, -0.02, 0.02, 0.01) == "equivalent"
    assert judge_interval(0.011, 0.02, 0.0101, 0.03, 0.01) == "different"
    assert judge_interval(0.011, 0.02, 0.0099, 0.03, 0.01) == "inconclusive"


def test_units_needed_grow_with_the_square():
    assert units_needed(100, 0.0, -0.02, 0.02, 0.01) == 400
    assert units_needed(100, 0.02, 0.0, 0.04, 0.01) is None


def test_sign_pattern():
    found = sign_pattern([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert found["pattern"] == "++++++" and found["size_trend"] == pytest.approx(1.0)
    assert found["sign_test_p"] == pytest.approx(2 / 2**6)
    assert sign_pattern([0.0, -0.1, 0.1])["pattern"] == "0-+" and sign_pattern([])["sign_test_p"] == 1.0
