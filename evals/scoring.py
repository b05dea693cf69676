"""Token log-probabilities of our JAX models, only where they are asked for.

    scorer = Scorer.for_model(cfg, numerics, context=256)
    scored = scorer.score(params, [Request(tokens, first)])      # log p(tokens[first:] | tokens[:first])

Three things make it quick on a model whose head is most of the work (d_model 64, 100,352 classes):

* the head runs only at positions that predict a wanted token, and over blocks of the vocabulary with a
  running logsumexp, so that neither `[B, S, V]` nor `[rows, V]` is ever held;
* requests that share a prefix share its work: a head row is computed once per distinct prefix, inputs that are wholly
  contained in another input never run, and short inputs that begin alike run as one trie (`evals.prefix_trie`);
* requests are sorted by length into a few fixed shapes, so that a second set of weights compiles nothing.

The surprising thing: padding never changes a score, because attention is causal and padding stands to the
right, and because a row is looked up by its own position. The result of a row depends on its bucket's
compiled shape, and on the trie that it stands in, by fp32 rounding only.

Legend: B rows of a batch, S tokens of a bucket, D width, V classes, R rows of a head slice, P wanted pairs.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from evals.prefix_trie import Row, common, pack, sharers
from infra.errors import DataError
from model.attention import Trie
from model.config import ModelConfig, NumericsConfig

VOCAB_BLOCK = 2048
SLICE_ROWS = 256
PAIRS_PER_ROW = 2
SHARE_WIDTH = 512  # in narrower models tries cost more than they save (bench_evals.py --width shows both)

Params = Any
Hidden = Callable[[Params, jax.Array], jax.Array]
TrieHidden = Callable[[Params, jax.Array, Trie], jax.Array]
Head = Callable[[Params], jax.Array]


@dataclass(frozen=True)
class Request:
    """Score `tokens[first:]` given `tokens[:first]`; `first` >= 1. `tokens`: int32[L], L <= context + 1."""

    tokens: np.ndarray
    first: int


@dataclass(frozen=True)
class Scored:
    """`logprob` float32[L - first] in nat; `greedy` bool[L - first]: no other token was more likely."""

    logprob: np.ndarray
    greedy: np.ndarray

    @property
    def total(self) -> float:
        """Sum of the log-probabilities, added in float64."""
        return float(self.logprob.astype(np.float64).sum())


def buckets_for(context: int, smallest: int = 64) -> tuple[int, ...]:
    """Input lengths that are compiled: powers of two from `smallest`, then `context` itself."""
    sizes = []
    size = smallest
    while size < context:
        sizes.append(size)
        size *= 2
    return (*sizes, context)


def vocabulary_blocks(head: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """`head` [V, D] as ([n, block, D], first id of each block int32[n]); the last block is zero-padded."""
    vocab, width = head.shape
    block = min(block, vocab)
    n = -(-vocab // block)
    padded = jnp.pad(head, ((0, n * block - vocab), (0, 0)))
    return padded.reshape(n, block, width), jnp.arange(n, dtype=jnp.int32) * block


def block_logits(rows: jax.Array, block: jax.Array, start: jax.Array, vocab: int, low: bool) -> jax.Array:
    """float32 logits [R, block] of one vocabulary block; classes beyond `vocab` are -inf.

    `low`: what the reference did on GPUs, bf16 operands and bf16-rounded logits (sheet section 1.7).
    """
    if low:
        out = jnp.dot(rows.astype(jnp.bfloat16), block.astype(jnp.bfloat16).T).astype(jnp.float32)
    else:
        out = jnp.dot(rows, block.T, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    if vocab % block.shape[0]:
        ids = start + jnp.arange(block.shape[0], dtype=jnp.int32)
        out = jnp.where(ids < vocab, out, -jnp.inf)
    return out


def pick(logits: jax.Array, start: jax.Array, row: jax.Array, token: jax.Array, old: jax.Array) -> jax.Array:
    """`logits[row, token]` where `token` lies in the block that begins at `start`, else `old`. float32[P]."""
    at = token - start
    inside = (at >= 0) & (at < logits.shape[1])
    return jnp.where(inside, logits[row, jnp.clip(at, 0, logits.shape[1] - 1)], old)


def _head_slice(
    head: jax.Array,
    flat: jax.Array,
    rows: jax.Array,
    row: jax.Array,
    token: jax.Array,
    *,
    block: int,
    low: bool,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability and greedy flag of P (row, token) pairs.

    head [V, D], flat [N, D] hidden states, rows int32[R] into flat, row int32[P] into rows, token int32[P].
    """
    vocab = head.shape[0]
    hidden = flat[rows]
    blocks, starts = vocabulary_blocks(head, block)

    def step(carry, xs):
        top, total, wanted = carry
        weights, start = xs
        logits = block_logits(hidden, weights, start, vocab, low)
        new_top = jnp.maximum(top, logits.max(axis=1))
        total = total * jnp.exp(top - new_top) + jnp.exp(logits - new_top[:, None]).sum(axis=1)
        return (new_top, total, pick(logits, start, row, token, wanted)), None

    n = hidden.shape[0]
    zero = (jnp.full(n, -jnp.inf), jnp.zeros(n), jnp.full(token.shape[0], -jnp.inf))
    (top, total, wanted), _ = jax.lax.scan(step, zero, (blocks, starts))
    return wanted - (top + jnp.log(total))[row], wanted >= top[row]


def _argmax(head: jax.Array, row: jax.Array, *, block: int, low: bool) -> jax.Array:
    """Id of the largest logit of one hidden state [1, D]."""
    blocks, starts = vocabulary_blocks(head, block)

    def step(carry, xs):
        logits = block_logits(row, xs[0], xs[1], head.shape[0], low)[0]
        better = logits.max() > carry[0]
        return (
            jnp.maximum(carry[0], logits.max()),
            jnp.where(better, xs[1] + logits.argmax(), carry[1]),
        ), None

    (_, best), _ = jax.lax.scan(step, (jnp.float32(-jnp.inf), jnp.int32(0)), (blocks, starts))
    return best


@dataclass(frozen=True)
class _Plan:
    """Which inputs run in which bucket, and which rows answer which pairs."""

    order: dict[int, list[int]]  # bucket -> request indices whose input runs there
    tries: list[Row]  # the other inputs, all of one length
    slot: list[tuple[int, int]]  # per owned row: (request index, position)
    pair_row: np.ndarray  # int64[n pairs] -> slot
    pair_token: np.ndarray  # int32[n pairs]
    spans: list[tuple[int, int]]  # per request: its pairs


class Scorer:
    """Scores requests with any weights of one model. Compiled once per shape; weights are arguments.

    `hidden(params, tokens int32[B, S]) -> float [B, S, D]` is the model without its head, `head(params)`
    its output matrix [V, D]. `context` is the longest input the model may see. `trie_hidden(params, tokens, trie)` is
    the same for rows that are tries; without it every input has a row of its own.
    """

    def __init__(
        self, hidden: Hidden, head: Head, *, context: int, batch_tokens: int = 8192, low: bool = False,
        buckets: Sequence[int] | None = None, vocab_block: int = VOCAB_BLOCK, trie_hidden: TrieHidden | None = None,
    ):  # fmt: skip
        self.context = context
        self.batch_tokens = max(batch_tokens, context)
        self.buckets = tuple(sorted(buckets)) if buckets else buckets_for(context)
        if self.buckets[-1] != context:
            raise ValueError(f"the largest bucket {self.buckets[-1]} must be the context {context}")
        self.head = head
        self.low = low
        self.vocab_block = vocab_block
        self._body = jax.jit(lambda params, tokens: _flat(hidden(params, tokens)))
        self.shares = trie_hidden is not None
        if trie_hidden is not None:
            self._trie_body = jax.jit(lambda params, *a: _flat(trie_hidden(params, *a)))
        self._slice = jax.jit(lambda params, *a: _head_slice(head(params), *a, block=vocab_block, low=low))

        self._best = jax.jit(
            lambda params, flat, at: _argmax(head(params), flat[at][None], block=vocab_block, low=low)
        )

    @classmethod
    def for_model(
        cls, cfg: ModelConfig, numerics: NumericsConfig, *, context: int, batch_tokens: int = 8192,
        buckets: Sequence[int] | None = None, share: bool | None = None,
    ) -> "Scorer":  # fmt: skip
        """A scorer of our own OLMo 3. `share`: inputs that begin alike run as tries; None: from `SHARE_WIDTH` on."""
        from model.olmo3 import apply_hidden

        if share is None:
            share = cfg.d_model >= SHARE_WIDTH

        return cls(
            lambda params, tokens: apply_hidden(params, cfg, numerics, tokens), lambda params: params["lm_head"],
            context=context, batch_tokens=batch_tokens, low=numerics.mode == "mixed", buckets=buckets,
            trie_hidden=(lambda params, tokens, trie: apply_hidden(params, cfg, numerics, tokens, trie)) if share else None,
        )  # fmt: skip

    def rows_per_batch(self, bucket: int) -> int:
        """B of a bucket: as many inputs as `batch_tokens` holds, at least one."""
        return max(1, self.batch_tokens // bucket)

    def bucket_of(self, length: int) -> int:
        """The smallest compiled length that holds `length` tokens."""
        for size in self.buckets:
            if length <= size:
                return size
        raise DataError(
            f"a request of {length} input tokens does not fit the context of {self.context} tokens",
            "cut the request before scoring (evals.requests counts and records each cut)",
        )

    def hidden(self, params: Params, inputs: Sequence[np.ndarray], bucket: int) -> jax.Array:
        """Hidden states [B * bucket, D] of up to B inputs of one bucket, right-padded with token 0."""
        tokens = np.zeros((self.rows_per_batch(bucket), bucket), np.int32)
        for i, x in enumerate(inputs):
            tokens[i, : len(x)] = x
        return self._body(params, tokens)

    def next_token(self, params: Params, tokens: np.ndarray) -> int:
        """The most likely token after `tokens` int32[L]; the smallest id of equals."""
        flat = self.hidden(params, [tokens], self.bucket_of(len(tokens)))
        return int(self._best(params, flat, len(tokens) - 1))

    def score(self, params: Params, requests: Sequence[Request]) -> list[Scored]:
        """One `Scored` per request, in their order. The answer does not depend on that order."""
        plan = _plan(self, requests)
        logprob = np.empty(len(plan.pair_row), np.float32)
        greedy = np.empty(len(plan.pair_row), bool)
        by_request: dict[int, list[int]] = {}
        for s, (r, _) in enumerate(plan.slot):
            by_request.setdefault(r, []).append(s)
        pairs_of = _group(plan.pair_row, len(plan.slot))
        pending = []
        for flat, places in self.batches(params, requests, plan):
            slots = [(at + column(plan.slot[s][1]), s) for r, at, column in places for s in by_request[r]]
            for rows, row, pairs in _slices(slots, pairs_of):
                out = self._slice(params, flat, rows, row, _take(plan.pair_token, pairs, len(row)))
                pending.append((pairs, out))
            del flat
        for pairs, (values, flags) in pending:
            logprob[pairs] = np.asarray(values)[: len(pairs)]
            greedy[pairs] = np.asarray(flags)[: len(pairs)]
        return [Scored(logprob[a:b].copy(), greedy[a:b].copy()) for a, b in plan.spans]

    def batches(
        self, params: Params, requests: Sequence[Request], plan: _Plan
    ) -> Iterator[tuple[jax.Array, list[tuple[int, int, Callable[[int], int]]]]]:
        """Run the inputs of a plan: hidden states [N, D], and for each input its request, row start, and column of a position."""
        for bucket, members in plan.order.items():
            size = self.rows_per_batch(bucket)
            for at in range(0, len(members), size):
                batch = members[at : at + size]
                flat = self.hidden(params, [requests[r].tokens[:-1] for r in batch], bucket)
                yield flat, [(r, i * bucket, lambda position: position) for i, r in enumerate(batch)]
        if not plan.tries:
            return
        length = len(plan.tries[0].tokens)
        size = self.rows_per_batch(length)
        for at in range(0, len(plan.tries), size):
            batch_rows = plan.tries[at : at + size]
            filled = min(size, 1 << (len(batch_rows) - 1).bit_length())  # few shapes, little padding
            blank = pack([(-1, np.zeros(1, np.int32))], length)
            tokens, position, reach = (
                np.stack([getattr(row, name) for row in (batch_rows + blank * filled)[:filled]])
                for name in ("tokens", "position", "reach")
            )
            flat = self._trie_body(params, tokens, Trie(jnp.asarray(position), jnp.asarray(reach)))
            yield (
                flat,
                [
                    (r, i * length, functools.partial(row.column, r))
                    for i, row in enumerate(batch_rows)
                    for r in row.begins
                ],
            )


def _flat(hidden: jax.Array) -> jax.Array:
    return hidden.reshape(-1, hidden.shape[-1])


def _take(values: np.ndarray, at: np.ndarray, size: int) -> np.ndarray:
    out = np.zeros(size, np.int32)
    out[: len(at)] = values[at]
    return out


def _group(keys: np.ndarray, n: int) -> list[np.ndarray]:
    """For each of n keys the indices that hold it, increasing."""
    order = np.argsort(keys, kind="stable")
    return np.split(order, np.searchsorted(keys[order], np.arange(1, n))) if n else []


def _slices(slots: list[tuple[int, int]], pairs_of: list[np.ndarray]):
    """Cut the rows of one batch into head slices of one fixed shape: yields (rows[R], row[P], pairs)."""
    at = 0
    while at < len(slots):
        size, limit = SLICE_ROWS, SLICE_ROWS * PAIRS_PER_ROW
        rows = np.zeros(size, np.int32)
        row: list[int] = []
        pairs: list[int] = []
        n = 0
        while n < size and at + n < len(slots):
            wanted = pairs_of[slots[at + n][1]]
            if len(wanted) > limit:
                raise DataError(
                    f"{len(wanted)} different next tokens are asked for after one prefix; a slice holds {limit}",
                    "split the requests",
                )
            if len(pairs) + len(wanted) > limit:
                break
            rows[n] = slots[at + n][0]
            row += [n] * len(wanted)
            pairs += wanted.tolist()
            n += 1
        at += n
        yield rows, _padded(row, limit), np.asarray(pairs, np.int64)


def _padded(values: list[int], size: int) -> np.ndarray:
    out = np.zeros(size, np.int32)
    out[: len(values)] = values
    return out


def _plan(scorer: Scorer, requests: Sequence[Request]) -> _Plan:
    """Share rows between requests with a common prefix, and choose the inputs that must run."""
    spans: list[tuple[int, int]] = []
    total = 0
    for i, request in enumerate(requests):
        wanted = len(request.tokens) - request.first
        if request.first < 1 or wanted < 1:
            raise DataError(
                f"request {i} has {len(request.tokens)} tokens and first = {request.first}: nothing to score",
                "a request needs at least one context token and one token to score",
            )
        spans.append((total, total + wanted))
        total += wanted
    pair_row = np.empty(total, np.int64)
    pair_token = np.empty(total, np.int32)
    slot: list[tuple[int, int]] = []
    owner: dict[tuple[int, int], int] = {}
    # Longer inputs first, so that an input contained in another one is never the owner of a row.
    order = sorted(range(len(requests)), key=lambda i: (requests[i].tokens[:-1].tolist(), -i), reverse=True)
    previous: np.ndarray | None = None
    lineage: np.ndarray | None = None  # lineage[p]: request that owns position p of the current input
    for i in order:
        tokens = np.asarray(requests[i].tokens, np.int32)
        inputs = tokens[:-1]
        mine = np.full(len(inputs), i, np.int64)
        if previous is not None and lineage is not None:
            shared = common(inputs, previous)
            mine[:shared] = lineage[:shared]
        begin = spans[i][0]
        for k, p in enumerate(range(requests[i].first - 1, len(inputs))):
            key = (int(mine[p]), p)
            if key not in owner:
                owner[key] = len(slot)
                slot.append(key)
            pair_row[begin + k] = owner[key]
            pair_token[begin + k] = tokens[p + 1]
        previous, lineage = inputs, mine
    owners = {r for r, _ in slot}
    running = [r for r in order if r in owners]
    inputs_of = {r: np.asarray(requests[r].tokens[:-1], np.int32) for r in running}
    together = sharers(list(inputs_of.values())) if scorer.shares else [False] * len(running)
    shared_by = [r for r, yes in zip(running, together) if yes]
    longest = max((len(inputs_of[r]) for r in shared_by), default=1)
    tries = pack([(r, inputs_of[r]) for r in shared_by], scorer.bucket_of(longest))
    run: dict[int, list[int]] = {}
    alone = set(running) - set(shared_by)
    for r in sorted(alone, key=lambda r: (-len(requests[r].tokens), requests[r].tokens.tolist())):
        run.setdefault(scorer.bucket_of(len(requests[r].tokens) - 1), []).append(r)
    return _Plan(run, tries, slot, pair_row, pair_token, spans)
