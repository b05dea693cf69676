"""Our scorer and our lm-eval model against transformers and lm-eval's own HF model on the same weights."""

import numpy as np
import pytest

from evals.config import EIGHT_TASKS
from evals.downstream import Suite
from evals.lm_eval_model import JaxLM
from evals.scoring import Request
from evals.tasks import choose_items, quiet

CONTEXT = 96
ITEMS = 4


@pytest.fixture(scope="module")
def suite(task_cache):
    return Suite.load(EIGHT_TASKS, items_per_task=ITEMS, cache=task_cache, max_cut_share=1.0)


@pytest.fixture(scope="module")
def lm(scorer, text, params):
    return JaxLM(scorer, text).use(params)


@pytest.fixture(scope="module")
def ours(suite, lm):
    return suite.run(lm)


@pytest.fixture(scope="module")
def hf_lm(hf_model, text):
    """lm-eval's HF model with the tokenizer made as OLMo-core makes it."""
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(text.inner.path), eos_token="<|endoftext|>", pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    with quiet():
        return HFLM(pretrained=hf_model, tokenizer=tokenizer, batch_size=8, max_length=CONTEXT, device="cpu")


def test_log_probabilities_equal_transformers(scorer, params, hf_model):
    import torch

    rng = np.random.default_rng(4)
    requests = [
        Request(rng.integers(0, 100278, n).astype(np.int32), f)
        for n, f in ((97, 1), (80, 40), (33, 5), (12, 11), (97, 60))
    ]
    worst = 0.0
    for request, scored in zip(requests, scorer.score(params, requests), strict=True):
        with torch.no_grad():
            logits = hf_model(torch.tensor(request.tokens[None, :-1].astype(np.int64))).logits[0].double()
        logp = torch.log_softmax(logits, -1)
        at = np.arange(request.first, len(request.tokens))
        want = logp[torch.tensor(at - 1), torch.tensor(request.tokens[at].astype(np.int64))].numpy()
        worst = max(worst, float(np.abs(scored.logprob - want).max()))
        assert (scored.greedy == (logits.argmax(-1).numpy()[at - 1] == request.tokens[at])).all()
    assert worst < 2e-5, f"largest difference {worst:.2e} nat"  # fp32 logits of two implementations


def test_items_and_accuracies_equal_lm_evals_hf_model(suite, ours, hf_lm):
    with quiet():
        answers = iter(hf_lm.loglikelihood(suite._instances))
    worst, seen = 0.0, 0
    for item in suite.items:
        theirs = [next(answers) for _ in item.instances]
        row = next(r for r in ours["tasks"][item.task]["items"] if r["id"] == item.number)
        worst = max(worst, *(abs(a - b) for a, (b, _) in zip(row["loglikelihoods"], theirs, strict=True)))
        metrics = suite.tasks[item.task].process_results(item.document, theirs)
        assert row["correct"] == metrics["acc"]
        assert row.get("correct_norm", metrics.get("acc_norm")) == metrics.get("acc_norm")
        seen += 1
    assert seen == ITEMS * len(EIGHT_TASKS)
    assert worst < 1e-4, f"largest difference {worst:.2e} nat"


def test_any_lm_eval_run_gives_what_the_suite_gives(suite, ours, lm, task_cache):
    """lm-eval's own evaluator with our model: same items, same answers."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    from evals.tasks import load_tasks

    names = ["arc_easy", "winogrande", "hellaswag"]
    chosen = {n: choose_items(n, ours["digests"][n]["available"], ITEMS) for n in names}
    with quiet():
        out = lm_eval.simple_evaluate(
            lm,
            tasks=list(load_tasks(names, task_cache).values()),
            samples=chosen,
            task_manager=TaskManager(include_path=str(task_cache / "tasks"), include_defaults=False),
            bootstrap_iters=0,
            num_fewshot=0,
        )
    for n in names:
        assert out["results"][n]["acc,none"] == ours["tasks"][n]["acc"]
        rows = {s["doc_id"]: s for s in out["samples"][n]}
        assert sorted(rows) == chosen[n]
        for r in ours["tasks"][n]["items"]:
            assert [x[0] for x in rows[r["id"]]["filtered_resps"]] == pytest.approx(
                r["loglikelihoods"], abs=1e-5
            )


def test_rolling_equals_lm_evals_hf_model(lm, hf_lm):
    """Texts of one, two and five windows; prefix EOS on the first window only, each token predicted once.

    One text at a time: lm-eval 0.4.13 looks logits up by a window's tokens alone, so that two texts whose windows hold the same
    tokens with another split get one another's sum (here it would be 2.8 nat off).
    """
    from lm_eval.api.instance import Instance

    base = "The quick brown fox jumps over the lazy dog, and then naps beneath an old oak tree. "
    texts = [base, base * 6, base * 20]
    requests = [Instance("loglikelihood_rolling", {}, (t,), i) for i, t in enumerate(texts)]
    with quiet():
        theirs = [hf_lm.loglikelihood_rolling([r])[0] for r in requests]
    ours = lm.loglikelihood_rolling(requests)
    assert [len(lm.text.encode(t)) // CONTEXT for t in texts] == [0, 1, 4]
    assert np.abs(np.array(ours) - np.array(theirs)).max() < 5e-4  # sums over up to 400 tokens


def test_generation_equals_transformers(lm, hf_lm):
    from lm_eval.api.instance import Instance

    options = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}
    requests = [
        Instance("generate_until", {}, (c, dict(options)), i)
        for i, c in enumerate(("Once upon a time", "def f(x):"))
    ]
    with quiet():
        theirs = hf_lm.generate_until(requests)
    assert lm.generate_until(requests) == theirs


def test_evaluating_twice_gives_the_same_bits(suite, ours, lm):
    """A14: repeated evaluation must not drift."""
    assert suite.run(lm) == ours
