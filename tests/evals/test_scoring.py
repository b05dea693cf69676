"""The scorer against a bigram oracle in NumPy: the model's next-token law is a plain table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evals.scoring import Request, Scorer, buckets_for
from infra.errors import DataError

V = 37


def oracle(table: np.ndarray, request: Request) -> tuple[np.ndarray, np.ndarray]:
    logits = table.astype(np.float64)
    logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    t = request.tokens
    at = range(request.first, len(t))
    return np.array([logp[t[p - 1], t[p]] for p in at]), np.array(
        [logp[t[p - 1]].argmax() == t[p] for p in at]
    )


def requests_of(n: int = 60, seed: int = 1) -> list[Request]:
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(n):
        length = int(rng.integers(2, 26))
        tokens = rng.integers(0, V, length).astype(np.int32)
        out.append(Request(tokens, int(rng.integers(1, length))))
        if len(out) % 3 == 0:  # a second continuation of the same context, and an exact repetition
            out.append(Request(np.append(tokens[:-1], (tokens[-1] + 1) % V).astype(np.int32), out[-1].first))
            out.append(out[-2])
    return out


def test_log_probabilities_and_greedy_flags_match_the_table(bigram):
    (make, table), requests = bigram, requests_of()
    for request, scored in zip(requests, make().score(jnp.asarray(table), requests), strict=True):
        logp, greedy = oracle(table, request)
        assert np.abs(scored.logprob - logp).max() < 2e-6  # fp32 logsumexp of 37 classes
        assert (scored.greedy == greedy).all()
        assert scored.total == pytest.approx(logp.sum(), abs=1e-5)


def test_scores_do_not_depend_on_batch_size_order_or_vocabulary_block(bigram):
    """F4: exactly equal within the same bucket, whatever the batch."""
    make, table = bigram
    table, requests = jnp.asarray(table), requests_of()
    base = make().score(table, requests)
    shuffled = np.random.default_rng(3).permutation(len(requests))
    again = make().score(table, [requests[i] for i in shuffled])
    for i, scored in zip(shuffled, again, strict=True):
        assert (scored.logprob == base[i].logprob).all()
    for other in (make(batch_tokens=24), make(batch_tokens=512)):
        assert all(
            (a.logprob == b.logprob).all() for a, b in zip(base, other.score(table, requests), strict=True)
        )
    wide = make(vocab_block=64).score(table, requests)
    assert max(np.abs(a.logprob - b.logprob).max() for a, b in zip(base, wide, strict=True)) < 2e-6


def test_one_request_alone_scores_as_in_a_crowd(bigram):
    make, table = bigram
    table, requests = jnp.asarray(table), requests_of()
    crowd = make().score(table, requests)
    for i in (0, 7, 31):
        alone = make().score(table, [requests[i]])[0]
        assert np.abs(alone.logprob - crowd[i].logprob).max() < 2e-6


def test_shared_prefixes_are_computed_once(bigram):
    seen = []

    def hidden(params, tokens):
        jax.debug.callback(lambda t: seen.append(np.array(t)), tokens)
        return params[tokens]

    scorer = Scorer(hidden, lambda params: jnp.eye(V), context=8, batch_tokens=8, buckets=(8,))
    context = np.array([1, 2, 3, 4], np.int32)
    choices = [np.append(context, c).astype(np.int32) for c in (5, 6, 7)]
    scorer.score(jnp.asarray(bigram[1]), [Request(c, 4) for c in choices])
    jax.effects_barrier()
    assert len(seen) == 1  # three answers, one input: the context


def test_bad_requests_are_named_errors(bigram):
    make, table = bigram
    scorer, table = make(), jnp.asarray(table)
    with pytest.raises(DataError, match="does not fit the context of 24"):
        scorer.score(table, [Request(np.arange(26, dtype=np.int32), 3)])
    with pytest.raises(DataError, match="nothing to score"):
        scorer.score(table, [Request(np.arange(4, dtype=np.int32), 4)])
    with pytest.raises(DataError, match="nothing to score"):
        scorer.score(table, [Request(np.arange(4, dtype=np.int32), 0)])


def test_padding_is_never_scored_and_never_seen(scorer, params):
    """F4 on the real model: a request scores the same alone in its bucket and beside longer ones."""
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 100278, 40).astype(np.int32)
    others = [Request(rng.integers(0, 100278, 60).astype(np.int32), 1) for _ in range(9)]
    alone = scorer.score(params, [Request(tokens, 1)])[0]
    crowd = scorer.score(params, [*others, Request(tokens, 1)])[-1]
    assert (alone.logprob == crowd.logprob).all()  # same bucket: the same bits


def test_next_token_is_the_argmax(bigram):
    make, table = bigram
    for token in (0, 5, 36):
        assert make().next_token(jnp.asarray(table), np.array([1, token], np.int32)) == table[token].argmax()


def test_buckets_end_at_the_context():
    assert buckets_for(256) == (64, 128, 256)
    assert buckets_for(300) == (64, 128, 256, 300)
    assert buckets_for(32) == (32,)
