"""The verdict: only a complete and clean run is FAITHFUL, whatever single thing is broken."""

import copy
import json

import pytest

from evals.verdict import FAITHFUL, INCONCLUSIVE, NOT_FAITHFUL, SURFACE_NAMES, judge

STEPS = [16, 32, 48, 64, 80, 96]
SURFACES = list(SURFACE_NAMES)


def comparison(outcome: str = "equivalent", **more):
    values = {
        "equivalent": (0.0, -0.001, 0.001),
        "different": (0.05, 0.04, 0.06),
        "inconclusive": (0.008, -0.02, 0.03),
    }
    d, low, high = values[outcome]
    return {"difference": d, "low": low, "high": high, "bound": 0.01, "outcome": outcome, "unit": "documents",
            "needed": 400 if outcome == "inconclusive" else None, **more}  # fmt: skip


@pytest.fixture
def clean():
    return {
        "landmarks": STEPS,
        "surfaces": SURFACES,
        "comparisons": {str(s): {f: comparison() for f in SURFACES} for s in STEPS},
        "gates": [{"name": f"logit parity at {s}", "state": "passed", "detail": ""} for s in (0, *STEPS)],
        "training": {"state": "passed", "detail": ""},
        "receipts": {str(s): {"state": "equal"} for s in STEPS},
        "alarms": [{"name": "memorised data", "state": "clear", "detail": ""}],
    }


def test_a_complete_and_clean_run_is_faithful(clean):
    verdict = judge(clean)
    assert verdict.overall == FAITHFUL and verdict.faithful and len(verdict.cells) == 24
    assert set(verdict.landmarks.values()) == set(verdict.surfaces.values()) == {FAITHFUL}
    assert "all 4 surfaces" in verdict.reasons[0]


@pytest.mark.parametrize("step", STEPS)
def test_a_missing_landmark_is_never_faithful(clean, step):
    del clean["comparisons"][str(step)]
    verdict = judge(clean)
    assert verdict.overall == INCONCLUSIVE and verdict.landmarks[str(step)] == INCONCLUSIVE
    assert any(f"not evaluated at step {step}" in r for r in verdict.reasons)


@pytest.mark.parametrize("surface", SURFACES)
def test_a_missing_surface_is_never_faithful(clean, surface):
    for found in clean["comparisons"].values():
        del found[surface]
    assert judge(clean).overall == INCONCLUSIVE
    assert judge(clean).surfaces[surface] == INCONCLUSIVE


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize(
    ("outcome", "overall"), [("different", NOT_FAITHFUL), ("inconclusive", INCONCLUSIVE)]
)
def test_one_cell_decides(clean, surface, outcome, overall):
    clean["comparisons"]["48"][surface] = comparison(outcome)
    verdict = judge(clean)
    assert (
        verdict.overall == overall
        and verdict.landmarks["48"] == overall
        and verdict.landmarks["32"] == FAITHFUL
    )
    assert any(SURFACE_NAMES[surface] in r and "step 48" in r for r in verdict.reasons)


def test_an_inconclusive_cell_says_how_much_more_is_needed(clean):
    clean["comparisons"]["48"]["heldout_loss"] = comparison("inconclusive")
    assert any("about 400 documents" in r for r in judge(clean).reasons)


@pytest.mark.parametrize(
    ("where", "value", "overall"),
    [
        (("gates", 0, "state"), "failed", NOT_FAITHFUL),
        (("gates", 3, "state"), "missing", INCONCLUSIVE),
        (("gates", 3, "state"), "who knows", INCONCLUSIVE),
        (("gates",), [], INCONCLUSIVE),
        (("receipts", "64", "state"), "broken", NOT_FAITHFUL),
        (("receipts", "64", "state"), "missing", INCONCLUSIVE),
        (("receipts",), {}, INCONCLUSIVE),
        (("training", "state"), "failed", INCONCLUSIVE),
        (("training", "state"), "missing", INCONCLUSIVE),
        (("training",), {}, INCONCLUSIVE),
        (("alarms", 0, "state"), "fired", INCONCLUSIVE),
        (("alarms", 0, "state"), "unknown", INCONCLUSIVE),
        (("alarms",), [], INCONCLUSIVE),
        (("landmarks",), [], INCONCLUSIVE),
        (("surfaces",), [], INCONCLUSIVE),
        (("comparisons", "16", "token_kl", "outcome"), "fine", INCONCLUSIVE),
    ],
)
def test_no_single_defect_is_faithful(clean, where, value, overall):
    node = clean
    for key in where[:-1]:
        node = node[key]
    node[where[-1]] = value
    verdict = judge(clean)
    assert verdict.overall == overall and verdict.reasons


def test_removing_any_leaf_is_never_faithful(clean):
    """Delete each list entry and each dict entry in turn, one at a time."""

    def leaves(node, path=()):
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in items:
            yield (*path, key)
            yield from leaves(value, (*path, key))

    harmless = {"detail", "name", "unit", "needed"}
    # The recipe decides which landmarks, surfaces and gates there are; fewer of them is another question, not a defect.
    asked = {"landmarks", "surfaces", "gates"}
    seen = 0
    for path in list(leaves(clean)):
        if (
            path[-1] in harmless
            or path[-1] in {"difference", "low", "high", "bound"}
            or (path[0] in asked and len(path) == 2)
        ):
            continue
        broken = copy.deepcopy(clean)
        node = broken
        for key in path[:-1]:
            node = node[key]
        del node[path[-1]]
        assert judge(broken).overall != FAITHFUL, path
        seen += 1
    assert seen > 50


def test_training_that_is_not_comparable_does_not_forbid(clean):
    clean["training"] = {"state": "not applicable"}
    assert judge(clean).overall == FAITHFUL


def test_the_worst_reason_comes_first_and_the_verdict_is_json(clean):
    clean["alarms"][0]["state"] = "fired"
    clean["receipts"]["96"]["state"] = "broken"
    verdict = judge(clean)
    assert "receipt is broken at step 96" in verdict.reasons[0]
    assert json.loads(json.dumps(verdict.to_json()))["overall"] == NOT_FAITHFUL
