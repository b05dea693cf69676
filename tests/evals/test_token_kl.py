"""Token KL against a float64 oracle, its noise floor, and its direction."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evals.heldout import Document, HeldoutSet
from evals.token_kl import PairScorer, by_position, evaluate
from model.config import NumericsConfig


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x - x.max(1, keepdims=True) - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True))


def documents(n: int = 4, vocab: int = 37) -> HeldoutSet:
    rng = np.random.default_rng(5)
    return HeldoutSet(
        [Document(str(i), "ab"[i % 2], rng.integers(0, vocab, 5 + 5 * i).astype(np.int32), 9, False) for i in range(n)], 24, {}
    )  # fmt: skip


@pytest.mark.parametrize("shift", [1.0, 1e-3])
def test_both_directions_match_float64(bigram, shift):
    make, table = bigram
    other = (table + shift * np.random.default_rng(1).normal(size=table.shape)).astype(np.float32)
    heldout = documents()
    nll_p, nll_q, found = evaluate(
        PairScorer(make(), make()), jnp.asarray(table), jnp.asarray(other), heldout
    )
    p, q = log_softmax(table), log_softmax(other)
    forward, backward = (np.exp(p) * (p - q)).sum(1), (np.exp(q) * (q - p)).sum(1)
    agree = p.argmax(1) == q.argmax(1)
    for d, row, a, b in zip(heldout.documents, found["documents"], nll_p, nll_q, strict=True):
        ctx, nxt = d.tokens[:-1], d.tokens[1:]
        assert row["kl_forward"] == pytest.approx(forward[ctx].sum(), rel=1e-3)
        assert row["kl_backward"] == pytest.approx(backward[ctx].sum(), rel=1e-3)
        assert row["agree"] == agree[ctx].sum()
        assert a == pytest.approx(-p[ctx, nxt].sum(), rel=1e-5) and b == pytest.approx(
            -q[ctx, nxt].sum(), rel=1e-5
        )
    total = sum(len(d.tokens) - 1 for d in heldout.documents)
    want = sum(forward[d.tokens[:-1]].sum() for d in heldout.documents) / total
    assert found["pooled"]["kl_forward"] == pytest.approx(want, rel=1e-4)
    assert set(found["domains"]) == {"a", "b"}


def test_the_noise_floor_of_equal_and_of_nearly_equal_weights(scorer, model_cfg, params):
    """Equal weights give exactly 0; weights moved by 1e-6 give what float64 gives, far below any bound."""
    heldout = documents(2, 100278)
    pair = PairScorer(scorer, scorer)
    _, _, same = evaluate(pair, params, params, heldout)
    assert same["pooled"]["kl_forward"] == same["pooled"]["kl_backward"] == 0.0
    assert same["pooled"]["top1_agreement"] == 1.0
    moved = jax.tree.map(lambda x: x * np.float32(1 + 1e-6), params)
    _, _, near = evaluate(pair, params, moved, heldout)
    from model.olmo3 import logits

    want = []
    for d in heldout.documents:
        p, q = (
            np.asarray(logits(w, model_cfg, NumericsConfig(), d.tokens[None, :-1]), np.float64)[0]
            for w in (params, moved)
        )
        p, q = log_softmax(p), log_softmax(q)
        want.append((np.exp(p) * (p - q)).sum(1))
    want = np.concatenate(want).mean()
    assert abs(near["pooled"]["kl_forward"] - want) < 1e-11, (near["pooled"]["kl_forward"], want)


def test_the_pair_pass_gives_the_same_losses_as_the_single_pass(scorer, params, nearby_params):
    from evals.heldout import evaluate as single

    heldout = documents(4, 100278)
    p, q, found = evaluate(PairScorer(scorer, scorer), params, nearby_params, heldout)
    assert np.abs(np.array(p) - single(scorer, params, heldout)).max() < 2e-4  # sums of 20 tokens, fp32
    assert np.abs(np.array(q) - single(scorer, nearby_params, heldout)).max() < 2e-4
    assert found["pooled"]["kl_forward"] > 1e-6


def test_positions_cover_every_prediction_once(bigram):
    make, table = bigram
    heldout = documents()
    compared = PairScorer(make(), make()).compare(
        jnp.asarray(table), jnp.asarray(table + 1), [d.tokens for d in heldout.documents]
    )
    bins = by_position(compared)
    assert sum(b["predictions"] for b in bins) == sum(d.predictions for d in heldout.documents)
    assert bins[0]["from"] == 1 and all(a["to"] == b["from"] for a, b in pairwise(bins))


def test_models_of_different_vocabulary_are_refused(bigram):
    make, table = bigram
    other = make()
    other.head = lambda params: jnp.eye(38)
    with pytest.raises(ValueError, match="37 and 38 classes"):
        PairScorer(make(), other).compare(jnp.asarray(table), jnp.asarray(table), [np.array([1, 2, 3])])
