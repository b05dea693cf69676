"""The spot check: silent on our scores, firing on mistakes that both sides share and paired differences hide."""

import dataclasses
import os

import numpy as np
import pytest

from data.config import TokenizerConfig
from evals.config import EvalConfig
from evals.downstream import Suite
from evals.evaluate import EvaluateSpec, Evaluator, find_weights
from evals.heldout import evaluate, read_documents, summary
from evals.lm_eval_model import JaxLM
from evals.spot_check import document_tokens, measure
from infra.artifacts import read_json, write_json_atomic
from model.config import NumericsConfig

CONTEXT = 96


@pytest.fixture(scope="module")
def heldout_dir(text, tmp_path_factory):
    """Seven documents in one token file."""
    root = tmp_path_factory.mktemp("spot")
    rng = np.random.default_rng(1)
    ids = [i for n in range(4, 11) for i in [*rng.integers(0, 100257, 3 * n).tolist(), text.eos_id]]
    (root / "prose").mkdir()
    np.array(ids, "<u4").tofile(root / "prose" / "00000.npy")
    entry = {
        "path": "prose/00000.npy", "label": "prose", "tokens": len(ids), "sha256": "", "sample_sha256": "",
    }  # fmt: skip
    write_json_atomic(
        root / "manifest.json",
        {"format": "olmo3-tokens-v1", "shards": [entry], "tokenizer": {"vocab_size": 100278}},
    )
    return root


@pytest.fixture(scope="module")
def scored(scorer, params, text, heldout_dir, task_cache):
    """A function: our results with a changed tokenizer, request or set of documents."""
    suite = Suite.load(("arc_easy", "piqa"), items_per_task=3, cache=task_cache, max_cut_share=1.0)

    def results(lm=None, documents=lambda found: found):
        found = documents(
            read_documents(
                heldout_dir,
                context=CONTEXT,
                per_domain=5,
                eos_id=text.eos_id,
                byte_lengths=np.ones(100352, int),
            )
        )
        lm = lm or JaxLM(scorer, text)
        return {
            "downstream": suite.run(lm.use(params)),
            "heldout": summary(found, evaluate(scorer, params, found)),
        }

    return suite, results


def check(scored, hf_dir, heldout_dir, **change):
    suite, results = scored
    return measure(
        {"reference": hf_dir}, {"reference": results(**change)}, suite, heldout_dir, TokenizerConfig(),
        context=CONTEXT, items=2,
    )  # fmt: skip


def test_our_scores_are_lm_evals_and_transformers(scored, hf_dir, heldout_dir):
    found = check(scored, hf_dir, heldout_dir)
    assert found["ok"] and found["failures"] == []
    side = found["sides"]["reference"]
    assert side["downstream"]["items"] == 4 and side["heldout"]["documents"] == 2
    assert 0 < side["downstream"]["largest_difference"] < 1e-4
    assert 0 < side["heldout"]["largest_difference"] < 2e-5


class WithBos(JaxLM):
    """A BOS in front of every prompt."""

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return [self.eot_token_id, *super().tok_encode(string)]


class Late(JaxLM):
    """The first token of every answer is not scored."""

    def request_of(self, item):
        found = super().request_of(item)
        return dataclasses.replace(found, first=min(found.first + 1, len(found.tokens) - 1))


@pytest.mark.parametrize("kind", [WithBos, Late])
def test_a_shared_mistake_in_the_prompts_is_noticed(scored, hf_dir, heldout_dir, scorer, text, kind):
    found = check(scored, hf_dir, heldout_dir, lm=kind(scorer, text))
    assert not found["ok"] and "lm-eval's" in found["failures"][0]


def test_scored_padding_is_noticed(scored, hf_dir, heldout_dir):
    def padded(found):
        rows = [
            dataclasses.replace(d, tokens=np.pad(d.tokens, (0, 9), constant_values=100277))
            for d in found.documents
        ]
        return dataclasses.replace(found, documents=rows)

    found = check(scored, hf_dir, heldout_dir, documents=padded)
    assert not found["ok"] and "its tokens allow" in found["failures"][0]


def test_another_weight_is_noticed(scored, hf_dir, heldout_dir, scorer, params):
    suite, results = scored
    ours = results()
    row = ours["heldout"]["documents"][0]
    row["nll"] += 1e-3 * row["predictions"]
    found = measure(
        {"reference": hf_dir},
        {"reference": ours},
        suite,
        heldout_dir,
        TokenizerConfig(),
        context=CONTEXT,
        items=2,
    )
    assert [f for f in found["failures"] if row["id"] in f]


def test_mixed_scores_are_asked_again_in_fp32(hf_dir, model_cfg, heldout_dir, task_cache, tmp_path):
    """bf16 scores cannot be held to 1e-4 nat, so the same programs answer a few questions in fp32."""
    for side in ("reference/hf", "hf"):
        (tmp_path / side).mkdir(parents=True)
        os.symlink(hf_dir, tmp_path / side / "step2")
    (tmp_path / "tokens").mkdir()
    os.symlink(heldout_dir, tmp_path / "tokens" / "heldout")
    few = EvalConfig(
        tasks=("arc_easy",), items_per_task=3, heldout_documents=3, spot_items=1, torch_documents=0
    )
    mixed = NumericsConfig(mode="mixed")
    spec = EvaluateSpec(model_cfg, model_cfg, mixed, TokenizerConfig(), few, CONTEXT, (2,))
    Evaluator(tmp_path, spec, cache=task_cache).landmark(2)
    found = read_json(tmp_path / "evals" / "step2" / "spot_check.json")
    assert found["ok"] and found["numerics"] == "fp32" and set(found["sides"]) == {"reference", "reproduced"}
    ours = read_json(tmp_path / "evals" / "step2" / "reference.heldout.json")
    exact = Evaluator(tmp_path, dataclasses.replace(spec, numerics=NumericsConfig()), cache=task_cache)
    theirs = exact.scores_of(find_weights(tmp_path, "reference", 2, model_cfg))["heldout"]
    gaps = [abs(a["nll"] - b["nll"]) for a, b in zip(ours["documents"], theirs["documents"], strict=True)]
    assert max(gaps) > 1e-3  # what was evaluated really is bf16


def test_documents_are_cut_at_eos(heldout_dir, text):
    tokens = document_tokens(heldout_dir, "prose/00000.npy#1", text.eos_id)
    assert len(tokens) == 16 and tokens[-1] == text.eos_id and (tokens[:-1] != text.eos_id).all()
