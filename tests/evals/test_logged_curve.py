"""W&B exports: columns, empty cells, alignment, smoothing and the noise band."""

import math

import numpy as np
import pytest

from evals.logged_curve import Curve, compare_curves, from_metrics, read_wandb, smooth
from infra.errors import DataError

HEAD = '"Step","A - train/CE loss","A - train/CE loss__MIN","A - train/CE loss__MAX","A - optim/step skipped","B - train/CE loss"\n'


def write(path, text):
    path.write_text(text)
    return path


def test_one_run_of_an_export(tmp_path):
    path = write(
        tmp_path / "w.csv",
        HEAD + '"3","2.5","2.4","2.6","0",""\n"1","3.5","3","4","1","9"\n"2","","","","","8"\n',
    )
    a = read_wandb(path, run_name="A")
    assert (
        a.steps.tolist() == [1, 3]
        and a.values["ce"].tolist() == [3.5, 2.5]
        and a.values["skipped"].tolist() == [1, 0]
    )
    assert read_wandb(path, run_name="B").steps.tolist() == [1, 2]


def test_an_axis_of_tokens_becomes_steps(tmp_path):
    path = write(tmp_path / "w.csv", "total tokens,A - train/CE loss\n4096,3\n8192,2\n")
    assert read_wandb(path, tokens_per_step=2048).steps.tolist() == [2, 4]
    with pytest.raises(DataError, match="not Step"):
        read_wandb(path)


@pytest.mark.parametrize(
    ("text", "run", "word"),
    [
        (HEAD + "1,2,2,2,0,2\n", "", "no run ''"),
        (HEAD + "1,2,2,2,0,2\n", "C", "no run 'C'"),
        ("Step,A - loss\n1,2\n", "A", "no CE loss"),
        ("Step\n", "", "no row"),
        ("Step,A - train/CE loss\n1,x\n", "A", "not a number"),
        ("Step,A - train/CE loss\n1,2\n1,3\n", "A", "a step twice"),
    ],
)
def test_bad_exports_are_named(tmp_path, text, run, word):
    with pytest.raises(DataError, match=word):
        read_wandb(write(tmp_path / "w.csv", text), run_name=run)


def test_smoothing_against_a_plain_loop():
    steps, values = np.array([1, 2, 4, 9]), np.array([1.0, 2.0, math.nan, 5.0])
    got = smooth(steps, values, np.array([2, 20]), 3)
    assert got[0] == pytest.approx((1 * (1 - 1 / 3) + 2 * 1) / ((1 - 1 / 3) + 1)) and math.isnan(got[1])


def test_a_shift_is_found_and_the_band_is_the_scatter():
    rng = np.random.default_rng(0)
    steps = np.arange(1, 2001)
    trend = 3 + np.exp(-steps / 300)
    reference = Curve("r", steps, {"ce": trend + 0.02 * rng.normal(size=2000)})
    same = Curve("o", steps[::2], {"ce": (trend + 0.02 * rng.normal(size=2000))[::2]})
    shifted = Curve("s", steps, {"ce": trend + 0.03 + 0.02 * rng.normal(size=2000)})
    a, b = (compare_curves(reference, c, half_width=50) for c in (same, shifted))
    assert a["steps"] == steps[::2].tolist() and a["band"] == pytest.approx(0.02, rel=0.1)
    assert a["outside"] < 0.15 and b["outside"] > 0.95
    assert b["mean_difference"] == pytest.approx(0.03, abs=0.003)


def test_our_log_as_a_curve_and_too_little_in_common():
    ours = from_metrics(
        [{"step": 1, "ce": 2.0, "lr": 1e-3}, {"step": 2, "ce": None}, {"step": 3, "ce": 1.0, "lr": None}]
    )
    assert ours.steps.tolist() == [1, 3] and math.isnan(ours.values["lr"][1])
    with pytest.raises(DataError, match="2 steps in common"):
        compare_curves(ours, ours, half_width=5)
    with pytest.raises(DataError, match="no grad_norm"):
        compare_curves(ours, ours, half_width=5, key="grad_norm")
