"""Tries of inputs that begin alike: what each token sees, and that no score depends on it."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evals.prefix_trie import LONGEST, pack, sharers
from evals.scoring import SHARE_WIDTH, Request, Scorer, _plan
from model.config import ModelConfig, NumericsConfig, YarnConfig
from model.olmo3 import abstract_params

WORDS = st.lists(st.integers(1, 3), min_size=1, max_size=12).map(tuple)


@settings(max_examples=200, deadline=None)
@given(st.sets(WORDS, min_size=1, max_size=12), st.booleans(), st.integers(12, 30))
def test_each_token_sees_exactly_the_beginning_of_its_own_input(inputs, backwards, length):
    ordered = [np.array(x, np.int32) for x in sorted(inputs, reverse=backwards)]
    rows = pack(list(enumerate(ordered)), length)
    found = set()
    for row in rows:
        for number in row.begins:
            x = ordered[number]
            last = row.begins[number][0] + len(x) - 1 - row.begins[number][1]
            if last < row.begins[number][0]:
                continue  # wholly inside another input: no token of its own
            seen = [j for j in range(length) if j <= last <= row.reach[j]]
            assert row.tokens[seen].tolist() == x.tolist()
            assert row.position[seen].tolist() == list(range(len(x)))
            assert row.column(number, len(x) - 1) == last
            found.add(number)
    assert all(
        k in found or any(x == tuple(o[: len(x)]) for o in ordered) for k, x in enumerate(map(tuple, ordered))
    )
    in_one = pack(list(enumerate(ordered)), 12 * 12)
    start, shared = in_one[0].begins[len(ordered) - 1]
    distinct = {x[: k + 1] for x in inputs for k in range(len(x))}
    assert len(in_one) == 1 and start + len(ordered[-1]) - shared == len(
        distinct
    )  # each beginning stands once


def test_only_short_inputs_that_begin_alike_share_a_row():
    stem = np.arange(20, dtype=np.int32)
    alike, other = [np.append(stem, k).astype(np.int32) for k in (1, 2)], np.full(20, 7, np.int32)
    assert sharers([*alike, other]) == [True, True, False]
    assert sharers([stem[:7], np.append(stem[:7], 90)]) == [False, False]
    long = np.arange(LONGEST, dtype=np.int32)
    assert sharers([np.append(long, 1), np.append(long, 2)]) == [False, False]
    assert pack([(0, alike[0]), (1, alike[1])], 32)[0].begins == {0: (0, 0), 1: (21, 20)}
    assert [sorted(r.begins) for r in pack([(0, alike[0]), (1, alike[1])], 21)] == [[0], [1]]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("yarn", [False, True])
def test_scores_are_those_of_inputs_that_stand_alone(kv_heads, yarn):
    """Contexts longer than the window, each with several answers, beside inputs that share nothing."""
    cfg = ModelConfig(
        d_model=32, n_layers=4, n_heads=4, n_kv_heads=kv_heads, head_dim=8, d_ff=48, window=16, vocab_size=500, padded_vocab_size=512,
        rope_scaling=YarnConfig(factor=2.0, original_context=32, beta_fast=32, beta_slow=1) if yarn else None,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    leaves, tree = jax.tree.flatten(abstract_params(cfg))
    params = jax.tree.unflatten(tree, [(0.3 * rng.normal(size=s.shape)).astype(np.float32) for s in leaves])
    requests = [Request(rng.integers(0, 500, 30).astype(np.int32), 3)]
    for n in (9, 25, 40):
        stem = rng.integers(0, 500, n)
        for k in range(4):
            answer = rng.integers(0, 500, 3 + 5 * k)
            requests.append(Request(np.concatenate([stem, answer]).astype(np.int32), n))
    together = Scorer.for_model(cfg, NumericsConfig(), context=64, batch_tokens=128, share=True)
    apart = Scorer.for_model(cfg, NumericsConfig(), context=64, batch_tokens=128, share=False)
    wide = cfg.model_copy(update={"d_model": SHARE_WIDTH})
    chosen = [Scorer.for_model(c, NumericsConfig(), context=64).shares for c in (cfg, wide)]
    assert chosen == [False, True]
    plan = _plan(together, requests)
    assert plan.tries and sum(map(len, plan.order.values())) == 1
    assert len(plan.tries) < 12 == len(requests) - 1
    for request, a, b in zip(
        requests, together.score(params, requests), apart.score(params, requests), strict=True
    ):
        assert np.abs(a.logprob - b.logprob).max() < 2e-6
        assert (a.greedy == b.greedy).all()
        alone = together.score(params, [request])[0]
        assert np.abs(a.logprob - alone.logprob).max() < 2e-6
