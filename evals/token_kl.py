"""Token-level KL divergence between two sets of weights on the same held-out tokens, both directions.

    pair = PairScorer(scorer_of_reference, scorer_of_reproduced)
    tokens = pair.compare(reference_params, reproduced_params, sequences)

The two may be two models (their configs may differ); their vocabularies must not. Both heads run over the same blocks
of the vocabulary; nothing of size V is kept. The surprising thing is the arithmetic: KL is a small difference of large sums, and two logsumexps in fp32
leave 1e-6. With P_i, Q_i unnormalised under one shift, g = log P_i - log Q_i and x = sum(P_i - Q_i)/Q, each term is summed in its
second-order form P_i (g + expm1(-g)) >= 0, and KL = sum/P + x/(1 + x) - log1p(x): good to 1e-10 between near-equal models.
The held-out loss of both sides falls out of the same pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from evals.heldout import HeldoutSet
from evals.scoring import Params, Scorer, block_logits, pick, vocabulary_blocks

SLICE_ROWS = 256
POSITION_EDGES = (0, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
FIELDS = ("nll_reference", "nll_reproduced", "kl_forward", "kl_backward", "agree")


@dataclass(frozen=True)
class TokenComparison:
    """Per prediction of one document, float32[L-1] each, in nat. `forward` is KL(reference || reproduced)."""

    nll_reference: np.ndarray
    nll_reproduced: np.ndarray
    kl_forward: np.ndarray
    kl_backward: np.ndarray
    agree: np.ndarray


def _pair_slice(head_p, head_q, flat_p, flat_q, rows, token, *, block: int, low_p: bool, low_q: bool):
    """Five float32[R] arrays for rows int32[R] of flat [N, D]; token int32[R] is the observed next token."""
    vocab = head_p.shape[0]
    hp, hq = flat_p[rows], flat_q[rows]
    blocks_p, starts = vocabulary_blocks(head_p, block)
    blocks_q, _ = vocabulary_blocks(head_q, block)
    n = rows.shape[0]
    at = jnp.arange(n, dtype=jnp.int32)

    def best(logits, start, top, index):
        here = logits.max(axis=1)
        ids = start + jnp.arange(logits.shape[1], dtype=jnp.int32)
        first = jnp.where(logits == here[:, None], ids[None], jnp.iinfo(jnp.int32).max).min(axis=1)
        return jnp.maximum(top, here), jnp.where(here > top, first, index)

    def step(carry, xs):
        shift, p, q, diff, a, b, top_p, top_q, arg_p, arg_q, want_p, want_q = carry
        wp, wq, start = xs
        lp = block_logits(hp, wp, start, vocab, low_p)
        lq = block_logits(hq, wq, start, vocab, low_q)
        top_p, arg_p = best(lp, start, top_p, arg_p)
        top_q, arg_q = best(lq, start, top_q, arg_q)
        new = jnp.maximum(top_p, top_q)
        scale = jnp.exp(shift - new)
        ep, eq = jnp.exp(lp - new[:, None]), jnp.exp(lq - new[:, None])
        gap = jnp.where(jnp.isfinite(lp), lp - lq, 0.0)
        near = jnp.abs(gap) < 0.5
        em = jnp.expm1(jnp.where(near, -gap, 0.0))  # Q_i / P_i - 1
        less = jnp.where(near, -ep * em, ep - eq)
        p, q = p * scale + ep.sum(axis=1), q * scale + eq.sum(axis=1)
        diff = diff * scale + less.sum(axis=1)
        a = a * scale + jnp.where(near, ep * (gap + em), ep * gap - less).sum(axis=1)
        b = b * scale + jnp.where(near, -ep * (em + gap * (1 + em)), less - eq * gap).sum(axis=1)
        want_p, want_q = pick(lp, start, at, token, want_p), pick(lq, start, at, token, want_q)
        return (new, p, q, diff, a, b, top_p, top_q, arg_p, arg_q, want_p, want_q), None

    zero, low = jnp.zeros(n), jnp.full(n, -jnp.inf)
    none = jnp.zeros(n, jnp.int32)
    start = (low, zero, zero, zero, zero, zero, low, low, none, none, low, low)
    end, _ = jax.lax.scan(step, start, (blocks_p, blocks_q, starts))
    shift, p, q, diff, a, b, _, _, arg_p, arg_q, want_p, want_q = end
    x = diff / q
    return (
        shift + jnp.log(p) - want_p,
        shift + jnp.log(q) - want_q,
        a / p + x / (1 + x) - jnp.log1p(x),
        b / q - x + jnp.log1p(x),
        (arg_p == arg_q).astype(jnp.float32),
    )


class PairScorer:
    """Compares two weight sets token by token. `reference` and `reproduced` score with their own model config."""

    def __init__(self, reference: Scorer, reproduced: Scorer):
        if (reference.buckets, reference.batch_tokens) != (reproduced.buckets, reproduced.batch_tokens):
            raise ValueError("both scorers of a pair need the same buckets and batch_tokens")
        self.p, self.q = reference, reproduced
        fixed: dict[str, Any] = {
            "block": reference.vocab_block,
            "low_p": reference.low,
            "low_q": reproduced.low,
        }
        self._slice = jax.jit(lambda pp, pq, *a: _pair_slice(self.p.head(pp), self.q.head(pq), *a, **fixed))

    def compare(
        self, params_p: Params, params_q: Params, sequences: Sequence[np.ndarray]
    ) -> list[TokenComparison]:
        """One comparison per sequence int32[L], over its L - 1 predictions."""
        vocab = self.p.head(params_p).shape[0], self.q.head(params_q).shape[0]
        if vocab[0] != vocab[1]:
            raise ValueError(f"the two models have {vocab[0]} and {vocab[1]} classes: KL is not defined")
        order: dict[int, list[int]] = {}
        for i in sorted(range(len(sequences)), key=lambda i: (-len(sequences[i]), i)):
            order.setdefault(self.p.bucket_of(len(sequences[i]) - 1), []).append(i)
        out = [np.empty((len(FIELDS), len(s) - 1), np.float32) for s in sequences]
        for bucket, members in order.items():
            size = self.p.rows_per_batch(bucket)
            for at in range(0, len(members), size):
                batch = members[at : at + size]
                inputs = [sequences[i][:-1] for i in batch]
                flat_p = self.p.hidden(params_p, inputs, bucket)
                flat_q = self.q.hidden(params_q, inputs, bucket)
                rows = np.concatenate([np.arange(len(x)) + k * bucket for k, x in enumerate(inputs)]).astype(
                    np.int32
                )
                targets = np.concatenate([sequences[i][1:] for i in batch]).astype(np.int32)
                got = self._rows(params_p, params_q, flat_p, flat_q, rows, targets)
                ends = np.cumsum([len(x) for x in inputs])
                for i, part in zip(batch, np.split(got, ends[:-1], axis=1)):
                    out[i][:] = part
        return [TokenComparison(*x) for x in out]

    def _rows(self, params_p, params_q, flat_p, flat_q, rows: np.ndarray, targets: np.ndarray) -> np.ndarray:
        n = len(rows)
        padded = -(-n // SLICE_ROWS) * SLICE_ROWS
        rows, targets = np.resize(rows, padded), np.resize(targets, padded)
        parts = [
            self._slice(
                params_p, params_q, flat_p, flat_q, rows[s : s + SLICE_ROWS], targets[s : s + SLICE_ROWS]
            )
            for s in range(0, padded, SLICE_ROWS)
        ]
        return np.concatenate([np.stack([np.asarray(x) for x in part]) for part in parts], axis=1)[:, :n]


def evaluate(
    pair: PairScorer, params_p: Params, params_q: Params, heldout: HeldoutSet
) -> tuple[list[float], list[float], dict[str, Any]]:
    """(document losses of the reference, of the reproduced side, the KL result as JSON)."""
    compared = pair.compare(params_p, params_q, [d.tokens for d in heldout.documents])
    losses = [[float(getattr(c, f).astype(np.float64).sum()) for c in compared] for f in FIELDS[:2]]
    return losses[0], losses[1], summary(heldout, compared)


def summary(heldout: HeldoutSet, compared: Sequence[TokenComparison]) -> dict[str, Any]:
    """Sums per document, means per domain, per position and pooled."""
    rows = []
    for d, c in zip(heldout.documents, compared, strict=True):
        rows.append(
            {
                "id": d.id,
                "domain": d.domain,
                "predictions": d.predictions,
                **{f: float(getattr(c, f).astype(np.float64).sum()) for f in FIELDS[2:]},
                "kl_max": float(max(c.kl_forward.max(), c.kl_backward.max())),
            }
        )
    domains = {name: means([r for r in rows if r["domain"] == name]) for name in heldout.domains}
    return {
        "documents": rows,
        "domains": domains,
        "pooled": means(rows),
        "positions": by_position(compared),
        "rules": {
            "units": "nat per prediction",
            "forward": "KL(reference || reproduced)",
            "classes": "all trained",
        },
    }


def means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Token-weighted means over documents."""
    n = sum(r["predictions"] for r in rows)
    mean = {f: sum(r[f] for r in rows) / n for f in FIELDS[2:]}
    return {
        "kl_forward": mean["kl_forward"],
        "kl_backward": mean["kl_backward"],
        "top1_agreement": mean["agree"],
        "kl_max": max(r["kl_max"] for r in rows),
        "predictions": n,
        "documents": len(rows),
    }


def by_position(compared: Sequence[TokenComparison]) -> list[dict[str, float]]:
    """Mean KL over predictions whose context length lies in [from, to)."""
    out = []
    for low, high in pairwise(POSITION_EDGES):
        parts = [(c.kl_forward[low:high], c.kl_backward[low:high], c.agree[low:high]) for c in compared]
        forward, backward, agree = (np.concatenate(x).astype(np.float64) for x in zip(*parts))
        if len(forward):
            out.append(
                {"from": low + 1, "to": high + 1, "kl_forward": float(forward.mean()),
                 "kl_backward": float(backward.mean()), "top1_agreement": float(agree.mean()),
                 "predictions": len(forward)}
            )  # fmt: skip
    return out
