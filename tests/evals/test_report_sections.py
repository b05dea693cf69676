"""Parts of the report that stand only when their evidence does: graph, drift, plan, published curve, 2x2, in-loop tasks.

Facts are small and made by hand; oracles are the counts and words that must appear.
"""

import itertools
import json
import re

import pytest

from evals.report import drawings, evidence, graph, html, plots
from evals.report.blocks import Report, Table
from evals.report.content import inloop
from evals.report.gather import localise_facts, plan_facts, published_curve, unchecked_exports
from evals.verdict import Verdict
from infra.artifacts import write_json_atomic

VERDICT = Verdict("INCONCLUSIVE", ["nothing"], [])


def row(layer, part, drift, expected=1e-6):
    return {
        "layer": layer,
        "part": part,
        "drift": drift,
        "expected": expected,
        "weight": "",
        "drifts": drift > expected,
    }


FOUND = {
    "ok": False,
    "first": row(1, "q norm", 0.5),
    "causes": ["layer 1: k_norm and q_norm are swapped"],
    "rows": [
        row(i, p, 0.5 if (i, p) == (1, "q norm") else 1e-8) for i in range(3) for p in ("q norm", "core")
    ],
    "blocks": [row(i, "layer", 1e-8) for i in range(3)],
}


@pytest.fixture
def facts():
    """What the sections under test read, of a run at its first landmark."""
    stage = {"seconds": 3.0, "files": 1, "key": "k" * 64, "digest": "d" * 64}
    return {
        "recipe": {
            "name": "x", "launch": {"target": "local", "topology": ""}, "train": {"steps": 100},
            "reference": {"kind": "olmo_core_local"}, "data": {"sequence_length": 16, "global_batch_instances": 4},
        },
        "rounded_reference": [], "results": {}, "gates": [{"name": "gate", "step": 0, "state": "failed", "facts": {"max": 1.0}}], "localise": FOUND,
        "outside_curve": None, "plan": None, "unchecked_exports": [], "missing": [], "versions": {"ai2-olmo-core": "3.0.0"},
        "curves": {"reference": [], "reproduced": [{"tokens_per_second": 32.0}] * 3},
        "tokens": {"train": {"domains": {"a": {"documents": 7}}}},
        "stages": [{"stage": "tokenize", "inputs": {}, **stage}, {"stage": "gate", "inputs": {"tokenize": "a" * 64, "init": "b" * 64}, **stage}],
    }  # fmt: skip


def page(*sections):
    return html.render(Report("t", "INCONCLUSIVE", ["r"], sections))


def test_arrows_that_follow_from_others_are_left_out():
    edges = [("a", "b"), ("b", "c"), ("a", "c"), ("a", "d"), ("d", "c"), ("b", "c")]
    assert graph.reduced(edges) == [("a", "b"), ("b", "c"), ("a", "d"), ("d", "c")]
    assert graph.layers(list("abcd"), edges) == {"a": 0, "b": 1, "c": 2, "d": 1}


def test_no_arrow_runs_upwards_and_no_boxes_touch():
    names = ["a", "b", "c", "d", "e", "f"]
    edges = [("a", "b"), ("b", "c"), ("c", "f"), ("a", "e"), ("d", "f"), ("e", "f")]
    svg = graph.draw({n: graph.Node(n, n) for n in names}, edges, "label <1>")
    boxes = [
        tuple(map(int, m))
        for m in re.findall(r'<rect x="(-?\d+)" y="(\d+)" width="(\d+)" height="(\d+)"', svg)
    ]
    assert (
        len(boxes) == 6 and svg.count("marker-end") == len(graph.reduced(edges)) and "label &lt;1&gt;" in svg
    )
    for (x, y, w, h), (x2, y2, w2, h2) in itertools.combinations(boxes, 2):
        assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y
    for d in re.findall(r'<path d="M([^"]*)" style="fill:none', svg):
        heights = [float(v.split()[-1]) for v in re.split(r"[MC]", d)]
        assert heights == sorted(heights)


def test_the_graph_shows_every_stage_and_dashes_what_has_no_record(facts):
    svg = evidence.lineage_graph(facts, VERDICT)
    assert svg.count("<rect") == 12 and svg.count("stroke-dasharray") == 7  # 9 stages, 2 of them recorded
    assert "dddddddd, 3.0s" in svg and "INCONCLUSIVE" in svg and "var(--bad)" in svg  # the failed gate
    assert 'class="graph"' in page(evidence.lineage(facts, VERDICT))


def test_drift_is_drawn_and_the_cause_is_said(facts):
    text = page(evidence.gaps(facts))
    assert "q norm of layer 1" in text and "k_norm and q_norm are swapped" in text and 'id="drift-' in text
    svg = drawings.drift(FOUND)
    assert ">q norm<" in svg and ">core<" not in svg  # only what drifts has a name
    facts["localise"] = None
    assert 'id="drift-' not in page(evidence.gaps(facts))


def test_exact_and_infinite_drift_have_a_place_on_the_axis():
    assert drawings.ratio(row(0, "x", 0.0)) == drawings.FLOOR == drawings.ratio(row(0, "x", 0.0, 0.0))
    assert drawings.ratio(row(0, "x", 1.0, 0.0)) == 1e9 == drawings.ratio({**row(0, "x", 1.0), "drift": None})


def test_the_square_has_its_gaps_on_the_margins(facts):
    loss = {"R.T": 3.0, "R.J": 3.25, "P.T": 3.5, "P.J": 3.875}
    facts["results"] = {
        "8": {
            "two_by_two": {"loss": loss, "predictions": 9, "implementation_gap": 0.375, "training_gap": 0.625}
        }
    }
    square = next(b for b in evidence.gaps(facts).blocks if isinstance(b, Table))
    assert [r[3] for r in square.rows] == ["+0.2500", "+0.3750", ""]
    assert square.rows[2] == ["training gap", "+0.5000", "+0.6250", ""]
    assert "not measured" not in page(evidence.not_proven(facts))


def test_a_run_that_moved_shows_where(facts):
    one = {"first_step": 1, "mesh": {"data": 1, "fsdp": 8, "tensor": 1}, "devices": 8, "kind": "TPU v5p"}
    two = {**one, "first_step": 41, "devices": 2, "mesh": {"data": 1, "fsdp": 2, "tensor": 1}}
    assert evidence.trained_on([one]) == "from step 1 on 8 x TPU v5p (data=1, fsdp=8, tensor=1)"
    said = evidence.trained_on([one, two])
    assert "from step 41 on 2 x TPU v5p (data=1, fsdp=2, tensor=1)" in said and "not bit for bit" in said
    assert evidence.trained_on([]) == "not recorded"
    rows = [{"step": k, "ce": 5.0} for k in range(1, 81)]
    curves = {"reference": rows, "reproduced": rows}
    paired = [(k, 5.0, 5.0) for k in range(1, 81)]
    assert plots.training_loss(curves, paired, [80], 1e-5, [41]).count("other mesh") > 0
    assert "other mesh" not in plots.training_loss(curves, paired, [80], 1e-5)


def test_what_is_not_proven_follows_the_run(facts):
    assert "were not measured" in page(evidence.not_proven(facts))
    assert "rounded to bf16" not in page(evidence.not_proven(facts))
    facts["unchecked_exports"], facts["plan"], facts["rounded_reference"] = [8, 16], {"x": 1}, [8]
    facts["recipe"]["reference"]["kind"] = "published"
    text = page(evidence.not_proven(facts))
    assert (
        "steps 8, 16" in text
        and "no-parity" in text
        and "no step of this run" in text
        and "not trained here" in text
        and "rounded to bf16" in text
    )


def test_exports_without_a_gate_are_found(tmp_path):
    for step, checked in ((1, True), (2, False)):
        write_json_atomic(tmp_path / f"hf/step{step}/conversion.json", {"parity": {"checked": checked}})
    assert unchecked_exports(tmp_path, (1, 2, 3)) == [2]


def test_plan_beside_actual(facts, tmp_path):
    plan = {
        "topology": "v5p:2x2x1", "tokens_per_step": 64, "step_seconds": 0.5, "tokens_per_second": 128.0, "mfu_bound": 0.4,
        "bytes_per_device": 2**30, "memory_per_device": 95 * 2**30, "price": None,
    }  # fmt: skip
    write_json_atomic(tmp_path / "plan.json", [plan, {}])
    facts["plan"] = plan_facts(tmp_path)
    rows = {r[0]: r[1:] for r in evidence.plan(facts).blocks[0].rows}
    assert rows["tokens per step"] == ["64", "64"]
    assert rows["seconds per step (median of the log)"] == [
        "0.5 at best",
        "2.000",
    ]  # 64 tokens at 32 a second
    assert rows["time for 100 steps"] == ["50.0s", "3m20s"] and rows["model FLOP utilisation"][1] == ""
    facts["recipe"]["launch"] = {"target": "gke", "topology": "v5p:2x2x1"}
    rows = {r[0]: r[1:] for r in evidence.plan(facts).blocks[0].rows}
    assert rows["model FLOP utilisation"] == ["40.0% at most", "10.0%"]
    facts["plan"] = None
    assert evidence.plan(facts).blocks == [] and plan_facts(tmp_path / "none") is None


def recipe_with_curve(name):
    return {
        "reference": {"kind": "published", "curve_csv": name}, "train": {"steps": 40},
        "data": {"sequence_length": 16, "global_batch_instances": 4},
    }  # fmt: skip


def test_a_published_curve_is_shown_beside_ours(facts, tmp_path):
    lines = [f"{s * 64},{4 - 0.01 * s + 0.001 * (-1) ** s}" for s in range(1, 41)]
    (tmp_path / "w.csv").write_text("total tokens,A - train/CE loss\n" + "\n".join(lines))
    ours = [{"step": s, "ce": 4.02 - 0.01 * s} for s in range(1, 41)]
    missing: list[str] = []
    found = published_curve(tmp_path, recipe_with_curve("w.csv"), {"reproduced": ours}, missing)
    assert found and not missing and found["steps"] == list(range(1, 41))
    assert found["mean_difference"] == pytest.approx(0.02, abs=1e-9) and found["outside"] > 0.9
    json.dumps(found)
    facts["outside_curve"] = found
    text = page(evidence.outside_curve(facts))
    assert 'id="published-' in text and "+0.0200 nat" in text


@pytest.mark.parametrize(("name", "word"), [("absent.csv", "No such file"), ("bad.csv", "no row")])
def test_a_curve_that_cannot_be_read_is_named(tmp_path, name, word):
    (tmp_path / "bad.csv").write_text("Step\n")
    missing: list[str] = []
    assert published_curve(tmp_path, recipe_with_curve(name), {"reproduced": []}, missing) is None
    assert len(missing) == 1 and word in missing[0]
    assert (
        published_curve(tmp_path, recipe_with_curve(""), {"reproduced": []}, missing) is None
        and len(missing) == 1
    )


def test_inloop_tasks_stand_where_they_were_run(facts):
    assert inloop(facts).blocks == []

    def side(value):
        task = {
            "metric": "acc",
            "metrics": {"acc_v1": value, "bpb_v2": 1.5},
            "documents": 3,
            "available": 9,
            "cut_requests": 1,
        }
        return {"tasks": {"copy": task}, "rules": {"bos": "none", "join": "apart", "truncation": "left"}}

    facts["results"] = {"4": {"reference.inloop": side(0.5), "reproduced.inloop": side(0.25)}}
    assert inloop(facts).blocks[0].rows == [
        ["`copy`", "acc_v1", "0.5000", "0.2500", "-0.2500", "1.5000", "1.5000", "3 of 9", "1"]
    ]


def test_the_gates_record_of_drift_is_used_and_not_repeated(tmp_path):
    gates = [{"facts": {"ok": False, "causes": ["c"], "localise": FOUND}}]
    assert localise_facts(tmp_path, gates) == FOUND and "localise" not in gates[0]["facts"]
    only = localise_facts(tmp_path, [{"facts": {"ok": False, "causes": ["c"]}}])
    assert only["causes"] == ["c"] and only["rows"] == []
    write_json_atomic(tmp_path / "parity/localise.json", {**FOUND, "causes": ["other"]})
    assert localise_facts(tmp_path, gates)["causes"] == ["other"]
