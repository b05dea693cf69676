"""The catalogue of the fault campaign: complete against the sheet's traps, and every entry names something real."""

import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def catalogue():
    """The catalogue, whose package lies beside this file."""
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(ROOT / "tests" / "campaigns"))
    yield importlib.import_module("faults.catalogue")
    patch.undo()


def traps():
    """Every trap of the sheet's section 8, from the rows of docs/traps.md (checked against the sheet in test_traps)."""
    lines = (ROOT / "docs" / "traps.md").read_text().splitlines()
    return {m.group(1) for m in (re.match(r"\| ([A-Z]\d+b?) \|", line) for line in lines) if m}


def test_every_trap_is_injected_or_said_why_not(catalogue):
    injected = {trap for fault in catalogue.FAULTS for trap in fault.traps}
    assert injected | catalogue.NOT_INJECTED.keys() == traps()
    assert not injected & catalogue.NOT_INJECTED.keys()


def test_every_section_has_its_faults(catalogue):
    assert len(catalogue.FAULTS) >= 50 and len(catalogue.BY_NAME) == len(catalogue.FAULTS)
    assert {f.section for f in catalogue.FAULTS} == set(catalogue.SECTIONS)
    assert all(f.sets or f.patch for f in catalogue.FAULTS)


def test_every_patch_has_a_target_and_every_override_a_field(catalogue):
    from faults.chain import MICRO

    from pipelines.recipe import load_recipe
    from pipelines.stages import BY_NAME

    for fault in catalogue.FAULTS:
        assert fault.redo in BY_NAME and (not fault.during or fault.during in BY_NAME), fault.name
        if fault.patch:
            module, _, dotted = fault.patch[0].partition(":")
            owner = importlib.import_module(module)
            for part in dotted.split("."):
                owner = getattr(owner, part)
        if fault.sets and not fault.patch:
            changed = load_recipe("tiny", [*MICRO, *fault.sets]).declared_differences()
            assert changed, fault.name


def test_the_control_differs_from_its_reference_in_nothing(catalogue):
    from faults.chain import control_recipe

    assert control_recipe().declared_differences() == []


def test_a_patch_is_undone(catalogue):
    from faults.inject import applied

    from data import loader

    before = loader.StepSource.__dict__["ids"]
    with applied(catalogue.BY_NAME["double_sharding"], "train"):
        assert loader.StepSource.__dict__["ids"] is not before
    assert loader.StepSource.__dict__["ids"] is before


def trial(**change):
    base = {
        "name": "double_sharding",
        "checks": [],
        "broke": "",
        "alike": "",
        "surfaces": {"token_kl": "FAITHFUL"},
        "verdict": "FAITHFUL",
    }
    return {**base, **change}


def check(where):
    return {"where": where, "check": where, "step": 1, "message": ""}


def test_classes_are_honest(catalogue):
    from faults import page

    assert page.classed(trial()) == page.NOT_CAUGHT
    assert page.classed(trial(broke="gate: AttributeError", checks=[check("gate")])) == page.BROKEN
    assert page.classed(trial(checks=[check("surface")])) == page.NOT_CAUGHT  # heard, and still FAITHFUL
    assert page.classed(trial(checks=[check("surface")], verdict="NOT FAITHFUL")) == page.CAUGHT
    assert page.classed(trial(checks=[check("gate")], verdict="NOT FAITHFUL")) == page.STOPPED
    assert page.classed(trial(checks=[check("surface")], verdict="INCONCLUSIVE")) == page.OTHER_VERDICT
    unclear = trial(name="bos_added", checks=[check("alarm")], verdict="INCONCLUSIVE")
    assert page.classed(unclear) == page.CAUGHT
    assert page.classed({**unclear, "verdict": "NOT FAITHFUL"}) == page.OTHER_VERDICT
    bits = {"checks": [check("receipts")], "alike": "why", "verdict": "NOT FAITHFUL"}
    assert page.classed(trial(**bits)) == page.BITS_ONLY
    assert (
        page.classed(trial(**{**bits, "alike": ""})) == page.CAUGHT
    )  # nobody said why it should be harmless
    assert page.classed(trial(**bits, surfaces={"token_kl": "NOT FAITHFUL"})) == page.CAUGHT


def test_every_recorded_verdict_is_the_expected_one(catalogue):
    recorded = json.loads((ROOT / "docs" / "faults.json").read_text())["trials"]
    assert {t["name"]: t["verdict"] for t in recorded} == {
        f.name: catalogue.expected(f.name) for f in catalogue.FAULTS
    }
    named = [n for names in catalogue.INCONCLUSIVE.values() for n in names] + list(catalogue.BITS_FAITHFUL)
    assert set(named) <= catalogue.BY_NAME.keys() and len(named) == len(set(named))
