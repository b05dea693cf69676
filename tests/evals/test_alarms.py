"""Each alarm once fired, once not, once without its facts."""

import copy

import pytest

from evals.alarms import ALARMS, CLEAR, FIRED, UNKNOWN, fired, ring

CALM = {
    "training_difference": [1e-6] * 40,
    "heldout_difference": 1e-6,
    "loss_bound": 0.01,
    "optimizer_dtypes": {"m": "float32", "v": "float32"},
    "receipts": {"16": "equal", "96": "equal"},
    "landmarks": [16, 96],
    "token_manifests": {
        "train": {"documents": 10, "eos": 12, "literal_eos": 2, "min_id": 0, "max_id": 100277},
        "heldout": {"documents": 4, "eos": 4, "literal_eos": 0, "min_id": 3, "max_id": 100257},
    },
    "vocab_size": 100278,
    "train_documents": ["aa", "bb"],
    "heldout_documents": ["cc"],
    "spot_check": {
        "failures": [],
        "sides": {
            "reference": {
                "downstream": {"items": 2, "largest_difference": 1e-6},
                "heldout": {"documents": 2, "largest_difference": 1e-7},
            }
        },
    },
    "logged_loss": {
        "failures": [],
        "limit": 2e-5,
        "rows": [{"side": "reproduced", "step": 16, "logged": 5.0, "measured": 5.000001}],
    },
    "logged_steps": 96,
    "changed_files": {"checked": 4, "changed": [], "unrecorded": []},
    "judged_weights": {
        "16": {"reference": "r16", "reproduced": "p16"},
        "96": {"reference": "r96", "reproduced": "p96"},
    },
    "made_weights": {
        "16": {"reference": "r16", "reproduced": "p16"},
        "96": {"reference": "r96", "reproduced": "p96"},
    },
}


def state(name, **change):
    facts = copy.deepcopy(CALM) | change
    return next(a for a in ring(facts) if a.name == name)


def test_a_calm_run_rings_nothing():
    assert [a.state for a in ring(CALM)] == [CLEAR] * len(ALARMS)
    assert fired(ring(CALM)) == []


def weights(**change):
    return copy.deepcopy(CALM["judged_weights"]) | change


def manifests(**change):
    out = copy.deepcopy(CALM["token_manifests"])
    out["train"] |= change
    return out


@pytest.mark.parametrize(
    ("name", "change", "word"),
    [
        (
            "memorised data",
            {"training_difference": [0.0] * 20 + [-0.2] * 20, "heldout_difference": 0.05},
            "seeing data again",
        ),
        (
            "optimizer state not fp32",
            {"optimizer_dtypes": {"m": "bfloat16", "v": "float32"}},
            "m is bfloat16",
        ),
        ("receipt broken", {"receipts": {"16": "equal", "96": "broken"}}, "96"),
        ("EOS count is not document count", {"token_manifests": manifests(eos=11)}, "10 documents and 9 EOS"),
        ("token id out of range", {"token_manifests": manifests(max_id=100278)}, "100278"),
        ("token id out of range", {"token_manifests": manifests(min_id=-1)}, "-1"),
        ("training and held-out documents overlap", {"heldout_documents": ["cc", "aa"]}, "1 held-out"),
        (
            "scores are not lm-eval's",
            {"spot_check": CALM["spot_check"] | {"failures": ["piqa item 3: ours"]}},
            "piqa item 3",
        ),
        (
            "other weights were judged",
            {"judged_weights": weights(**{"96": {"reference": "r96", "reproduced": "r96"}})},
            "compared with itself",
        ),
        (
            "other weights were judged",
            {
                "judged_weights": weights(**{"96": {"reference": "r96", "reproduced": "p16"}}),
                "made_weights": {},
            },
            "of another landmark",
        ),
        (
            "other weights were judged",
            {"judged_weights": weights(**{"96": {"reference": "r96", "reproduced": "p95"}})},
            "not the ones its stage made",
        ),
        (
            "weights are not those of the log",
            {"logged_loss": CALM["logged_loss"] | {"failures": ["the reproduced weights of step 16 give"]}},
            "step 16",
        ),
        (
            "a result was changed",
            {
                "changed_files": {
                    "checked": 4,
                    "changed": ["evals/step16/token_kl.json", "b"],
                    "unrecorded": [],
                }
            },
            "token_kl.json and 1 more",
        ),
    ],
)
def test_each_alarm_fires(name, change, word):
    alarm = state(name, **change)
    assert alarm.state == FIRED and word in alarm.detail


def test_a_better_model_is_not_memorised_data():
    """Lower training loss with an equally lower held-out loss is no alarm; neither is a higher training loss."""
    assert state("memorised data", training_difference=[-0.2] * 40, heldout_difference=-0.2).state == CLEAR
    assert state("memorised data", training_difference=[0.2] * 40, heldout_difference=0.2).state == CLEAR


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("memorised data", "heldout_difference"), ("memorised data", "training_difference"),
        ("optimizer state not fp32", "optimizer_dtypes"), ("receipt broken", "receipts"),
        ("EOS count is not document count", "token_manifests"), ("token id out of range", "vocab_size"),
        ("training and held-out documents overlap", "train_documents"),
        ("scores are not lm-eval's", "spot_check"),
        ("other weights were judged", "judged_weights"),
        ("weights are not those of the log", "logged_loss"),
        ("a result was changed", "changed_files"),
    ],
)  # fmt: skip
def test_an_alarm_without_facts_is_unknown(name, missing):
    facts = {k: v for k, v in CALM.items() if k != missing}
    alarm = next(a for a in ring(facts) if a.name == name)
    assert alarm.state == UNKNOWN and missing in alarm.detail


def test_two_runs_of_ours_may_be_equal():
    same = weights(**{"96": {"reference": "p96", "reproduced": "p96"}})
    assert state("other weights were judged", judged_weights=same, made_weights={}).state == FIRED
    change = {"judged_weights": same, "made_weights": {}, "may_be_equal": True}
    assert state("other weights were judged", **change).state == CLEAR


def test_a_landmark_without_a_measured_loss_is_unknown_but_the_last_step_has_none_to_give():
    name, nothing = "weights are not those of the log", CALM["logged_loss"] | {"rows": []}
    assert state(name, logged_loss=nothing).state == UNKNOWN
    assert state(name, logged_loss=nothing, landmarks=[96]).state == CLEAR


def test_results_without_a_record_are_unknown():
    found = {"checked": 0, "changed": [], "unrecorded": ["evaluate"]}
    assert state("a result was changed", changed_files=found).state == UNKNOWN


def test_empty_facts_are_unknown_too():
    for name, change in (("optimizer state not fp32", {"optimizer_dtypes": {}}), ("receipt broken", {"receipts": {}}),
                         ("memorised data", {"training_difference": []}), ("EOS count is not document count", {"token_manifests": {}}),
                         ("training and held-out documents overlap", {"heldout_documents": []})):  # fmt: skip
        assert state(name, **change).state == UNKNOWN


def test_no_alarm_is_without_a_case():
    """Each alarm once fired and once without its facts; not fired: `test_a_calm_run_rings_nothing`."""
    for test in (test_each_alarm_fires, test_an_alarm_without_facts_is_unknown):
        (cases,) = [m.args[1] for m in test.pytestmark if m.name == "parametrize"]
        assert {case[0] for case in cases} == set(ALARMS), test.__name__
