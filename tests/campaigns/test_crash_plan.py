"""The crash campaign's list of trials: every stage killed, every kind of artifact spoiled, the same list for the same seed."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def crash():
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(Path(__file__).parent))
    yield importlib.import_module("crash")
    patch.undo()


def test_every_stage_is_killed_and_every_disturbance_is_tried(crash):
    from pipelines.stages import BY_NAME

    made = crash.plans(20261)
    assert {p.target for p in made if p.kind == "kill"} == set(BY_NAME)
    assert {p.target for p in made if p.kind == "byte changed"} == set(crash.KINDS_OF_FILES)
    assert {p.kind for p in made} == {
        "kill", "kill flow", "kill server", "disk full", "read-only", "clock jumps", "two flows", "byte changed",
    }  # fmt: skip
    from resume import KINDS

    assert len(made) + 6 * len(KINDS) >= 60  # with the 36 interruptions of training


def test_a_trial_is_a_function_of_seed_and_number(crash):
    assert crash.plans(1) == crash.plans(1) != crash.plans(2)
    assert [p.number for p in crash.plans(1)] == list(range(1, len(crash.plans(1)) + 1))


def test_one_byte_and_only_one_is_changed(crash, tmp_path):
    import random

    path = tmp_path / "tokens" / "a.npy"
    path.parent.mkdir()
    path.write_bytes(bytes(range(200)))
    assert crash.change_one_byte(tmp_path, "tokens/*.npy", random.Random(3)) == path
    assert sum(a != b for a, b in zip(path.read_bytes(), range(200), strict=True)) == 1


def test_a_changed_file_must_be_named_and_nothing_made_from_it(crash):
    said = "repro: RUN/stages/train.json is damaged"
    assert crash.judged("convert", "stages/train.json", 2, said, {}, {}) == "named"
    for file, code, text, after in (
        ("stages/tokenize.json", 2, said, {}),  # another file of the same folder is accused
        ("stages/train.json", 1, said, {}),
        ("stages/train.json", 2, f"Traceback {said}", {}),
        ("stages/train.json", 2, said, {"hf/step16/model.safetensors": "0"}),
    ):
        assert crash.judged("convert", file, code, text, {}, after).startswith("FAILED")
    assert (
        crash.judged("report", "evals/a.json", 3, "evals/a.json changed", {}, {"report/x": "0"}) == "reported"
    )
    assert crash.judged("report", "evals/a.json", 0, "evals/a.json changed", {}, {}).startswith("FAILED")


def test_a_disturbance_that_does_not_happen_is_no_success(crash, monkeypatch, tmp_path):
    moments = []

    def late(base, where, seed, plan, seconds, control):
        moments.append(plan.fraction)
        return {"outcome": crash.DID_NOT_LAND, "moment": plan.fraction}

    monkeypatch.setattr(crash, "attempt", late)
    found = crash.trial(tmp_path, tmp_path, 1, crash.Plan(1, "kill", "train", 0.4), {}, {})
    assert moments == [0.4, 0.2, 0.1] and found["outcome"] == crash.DID_NOT_LAND
    assert crash.starved(0, "", ("disk full",)) == {"landed": False}
    assert crash.starved(1, "Traceback: disk full", ("disk full",)) == {"landed": True, "named": False}
