"""Learning rates against the sheet's goldens (to 1e-15 relative) and OLMo-core's scheduler classes."""

import pytest

from infra.errors import RecipeError
from model.config import ScheduleConfig, SchedulePart
from model.schedule import learning_rate, rates

P1 = SchedulePart(kind="cosine", peak=3e-4, warmup=2000, horizon=1192093, until=597046)
P2 = SchedulePart(kind="half_cosine", peak=3e-4, warmup=597046, horizon=1668931)
MID = SchedulePart(kind="linear", peak=0.00020712352850360292, warmup=0, horizon=47684, alpha_f=0.0)
LONG = SchedulePart(kind="linear", peak=0.00020712352850360292, warmup=200, horizon=11921, alpha_f=0.0)
S190 = SchedulePart(kind="cosine", peak=3e-4, warmup=2000, horizon=7262)


def one(part):
    return ScheduleConfig(parts=(part.model_copy(update={"until": None}),))


GOLDENS = [
    (P1, 1, 1.5e-07), (P1, 2, 3e-07), (P1, 1999, 2.9985e-04), (P1, 2000, 3e-4), (P1, 2001, 2.999999999995296e-04),
    (P1, 100000, 2.955076828431117e-04), (P1, 596047, 1.6535619271678472e-04), (P1, 597046, 1.6500017818565782e-04),
    (P1, 1192093, 3e-5), (P1, 1300000, 3e-5),
    (P2, 596047, 1.6472391574518544e-04), (P2, 596048, 1.6472419210580088e-04), (P2, 597045, 1.6499972363938454e-04),
    (P2, 597046, 1.65e-4), (P2, 597047, 1.6499980216394097e-04), (P2, 800000, 1.2543772515527762e-04),
    (P2, 1000000, 8.98340769244571e-05), (P2, 1413814, 3.93252716718148e-05),
    (MID, 1, 2.071191848342693e-04), (MID, 2, 2.0711484116493572e-04), (MID, 23842, 1.0356176425180146e-04),
    (MID, 47683, 4.34366933361411e-09), (MID, 47684, 0.0),
    (LONG, 1, 1.0356176425180146e-06), (LONG, 199, 2.060879108610849e-04), (LONG, 200, 2.0712352850360292e-04),
    (LONG, 201, 2.071058573553644e-04), (LONG, 11920, 1.767114823851665e-08), (LONG, 11921, 0.0),
    (S190, 7262, 3e-5),
]  # fmt: skip


@pytest.mark.parametrize("part,step,want", GOLDENS)
def test_goldens(part, step, want):
    # Rates next to the end of a linear decay are differences of nearly equal numbers: one ulp of the peak is allowed.
    tolerance = max(1e-15 * want, 2**-53 * part.peak if part.kind == "linear" else 0)
    assert abs(learning_rate(one(part), step) - want) <= tolerance


def test_history_of_the_7b_run():
    """Part 2 takes over after 597046; where it took over at 596047 the rate drops 0.38 % and then rises."""
    cfg = ScheduleConfig(parts=(P1, P2))
    assert learning_rate(cfg, 597046) == learning_rate(one(P1), 597046)
    assert learning_rate(cfg, 597047) == learning_rate(one(P2), 597047)
    early = ScheduleConfig(parts=(P1.model_copy(update={"until": 596047}), P2))
    assert learning_rate(early, 596048) / learning_rate(early, 596047) == pytest.approx(1 - 0.0038, abs=1e-4)
    assert learning_rate(early, 597000) > learning_rate(early, 596048)


@pytest.mark.parametrize("part", [P1, P2, MID, LONG, S190])
def test_against_olmo_core(part):
    from olmo_core.optim.scheduler import CosWithWarmup, HalfCosWithWarmup, LinearWithWarmup

    kind = {"cosine": CosWithWarmup, "half_cosine": HalfCosWithWarmup, "linear": LinearWithWarmup}[part.kind]
    theirs = kind(warmup=part.warmup, alpha_f=part.alpha_f)
    for step in sorted(
        {1, 2, part.warmup + 1, max(1, part.warmup), *range(1, part.horizon + 10, part.horizon // 97)}
    ):
        assert learning_rate(one(part), step) == theirs.get_lr(part.peak, step, part.horizon), step


def test_first_rate_is_not_zero():  # O1
    assert learning_rate(one(P1), 1) == P1.peak / 2000


def test_errors():
    with pytest.raises(RecipeError, match="from 1"):
        learning_rate(one(P1), 0)
    ended = ScheduleConfig(parts=(P1,))
    with pytest.raises(RecipeError, match="last schedule part"):
        learning_rate(ended, 597047)
    assert len(rates(one(P1), 1, 10)) == 10
