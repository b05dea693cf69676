"""One attention function, three back-ends: `xla` (CPU and fall-back), `splash` (TPU), `cudnn` (GPU).

A query at position i sees keys j with 0 <= i-j <= window-1 (itself included), or all j <= i in full layers, and
with `doc_ids` only keys of its own document. The surprising thing: libraries disagree on whether a window counts
the query itself (OLMo-core's fix ca2c2a712; MaxText passes W+1 keys to cuDNN), so each back-end is converted here.

The `xla` back-end works on slices of queries and on the keys these can see. It never holds S x S scores: a sliding
layer costs S*(window+slice), a long full layer is recomputed in the backward pass, slice by slice.

Axis letters: B batch, S sequence, H query heads, N key heads, G = H/N, K head width, C query slice, T keys of a slice.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from infra.errors import RecipeError

SLICE = 512  # queries per slice
UNROLL = 8  # at most so many slices or segments are unrolled in the program
STORE_LIMIT = 1024  # up to this length scores are kept for the backward pass; above they are recomputed
MASKED = -0.7 * 3.4028235e38  # finite, so that a row of padding gives numbers and not NaN


class Trie(NamedTuple):
    """Sequences that begin alike in one row, depth first: int32[B,S] each.

    `position` of a token in its own sequence; `reach`, the last column that continues it.
    """

    position: jax.Array
    reach: jax.Array


def choose_backend(name: str, platform: str, has_documents: bool) -> str:
    """`auto` resolved for a platform. cuDNN has no document mask, so packed data on a GPU goes through `xla`."""
    if name == "auto":
        name = {"tpu": "splash", "gpu": "cudnn", "cuda": "cudnn", "rocm": "xla"}.get(platform, "xla")
        if name == "cudnn" and has_documents:
            name = "xla"
    if name == "cudnn" and has_documents:
        raise RecipeError(
            "numerics.attention 'cudnn' has no document mask", "use 'xla' or 'auto' for packed data"
        )
    return name


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int | None,
    doc_ids: jax.Array | None = None,
    backend: str = "xla",
    mesh: Mesh | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention. q [B,S,H,K], k and v [B,S,N,K], doc_ids int32[B,S] -> [B,S,H,K] in q's dtype.

    Scores are scaled by K^-0.5; softmax is float32; its exponentials are cast to v's dtype. Query head h uses key
    head h // (H/N). `interpret` runs the splash kernel in Pallas' interpreter (tests on CPU).
    """
    if window is not None and window >= q.shape[1]:
        window = None
    if backend == "xla":
        return _xla(q, k, v, window, doc_ids)
    if backend == "splash":
        return _splash(q, k, v, window, doc_ids, mesh, interpret)
    if backend == "cudnn":
        return _cudnn(q, k, v, window)
    raise RecipeError(f"unknown attention back-end {backend!r}", "known: xla, splash, cudnn")


def _scores_part(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_docs: jax.Array | None,
    k_docs: jax.Array | None,
    q_start: Any,
    k_start: Any,
    window: int | None,
) -> jax.Array:
    """Attention of C queries from position q_start on over T keys from k_start on. q [B,C,N,G,K] -> same."""
    i = q_start + jnp.arange(q.shape[1])[:, None]
    j = k_start + jnp.arange(k.shape[1])[None, :]
    visible = (j <= i) & (j >= 0)
    if window is not None:
        visible &= i - j < window
    visible = visible[None]
    if q_docs is not None and k_docs is not None:
        visible = visible & (q_docs[:, :, None] == k_docs[:, None, :])
    return _weighted(q, k, v, visible)


def _weighted(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """Attention over the keys that are visible, bool[B or 1,C,T]. q [B,C,N,G,K], k and v [B,T,N,K] -> q's shape.

    As flash kernels do (and torch's CPU one), exp(score - max) is rounded to v's dtype and the sum divides afterwards:
    the largest weight is then exactly 1. Rounding normalised probabilities instead is 30% further from the exact result.
    """
    exact = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    dot = functools.partial(jnp.einsum, precision=exact, preferred_element_type=jnp.float32)
    scores = dot("bqngd,bknd->bngqk", q, k) * (q.shape[-1] ** -0.5)
    scores = jnp.where(visible[:, None, None], scores, MASKED)
    e = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    total = jnp.moveaxis(jnp.sum(e, axis=-1), 3, 1)[..., None]
    return (dot("bngqk,bknd->bqngd", e.astype(v.dtype), v) / total).astype(v.dtype)


def trie_attention(q: jax.Array, k: jax.Array, v: jax.Array, *, window: int | None, trie: Trie) -> jax.Array:
    """Causal attention of rows that are tries: each token sees the tokens that lead to it, the window counted in positions.

    Shapes as in `attention`. For short rows (evaluation prompts): S x S scores are held.
    """
    B, S, H, K = q.shape
    at = jnp.arange(S)
    visible = (at[None, :] <= at[:, None])[None] & (at[None, :, None] <= trie.reach[:, None, :])
    if window is not None:
        visible &= trie.position[:, :, None] - trie.position[:, None, :] < window
    return _weighted(q.reshape(B, S, k.shape[2], H // k.shape[2], K), k, v, visible).reshape(B, S, H, K)


def _xla(q: jax.Array, k: jax.Array, v: jax.Array, window: int | None, docs: jax.Array | None) -> jax.Array:
    B, S, H, K = q.shape
    q5 = q.reshape(B, S, k.shape[2], H // k.shape[2], K)
    keep = S <= STORE_LIMIT
    size = min(SLICE, S if window is None else max(window, 64))
    if window is not None and -(-S // size) > UNROLL:
        out = _sliding_scan(q5, k, v, docs, window, size)
    else:
        share = -(-S // UNROLL)  # each of UNROLL segments gets so many queries, rounded up to whole slices
        segment = size if -(-S // size) <= UNROLL else -(-share // size) * size
        parts = []
        for a in range(0, S, segment):
            f = functools.partial(_segment, a=a, b=min(S, a + segment), size=size, window=window)
            parts.append((f if keep else jax.checkpoint(f))(q5, k, v, docs))
        out = jnp.concatenate(parts, axis=1)
    return out.reshape(B, S, H, K)


def _segment(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    docs: jax.Array | None,
    *,
    a: int,
    b: int,
    size: int,
    window: int | None,
) -> jax.Array:
    """Queries a..b over the keys they can see; more than `size` queries go slice by slice."""
    lo = 0 if window is None else max(0, a - window + 1)
    k, v, k_docs = k[:, lo:b], v[:, lo:b], None if docs is None else docs[:, lo:b]
    if b - a <= size:
        return _scores_part(q[:, a:b], k, v, None if docs is None else docs[:, a:b], k_docs, a, lo, window)
    n = -(-(b - a) // size)
    pad = n * size - (b - a)
    rows = jnp.pad(q[:, a:b], ((0, 0), (0, pad), (0, 0), (0, 0), (0, 0)))
    rows = jnp.moveaxis(rows.reshape(q.shape[0], n, size, *q.shape[2:]), 1, 0)
    row_docs = None
    if docs is not None:
        row_docs = jnp.moveaxis(jnp.pad(docs[:, a:b], ((0, 0), (0, pad))).reshape(q.shape[0], n, size), 1, 0)

    @jax.checkpoint
    def body(carry: None, x: Any) -> tuple[None, jax.Array]:
        index, qc, dc = x
        return carry, _scores_part(qc, k, v, dc, k_docs, a + index * size, lo, window)

    _, out = jax.lax.scan(body, None, (jnp.arange(n), rows, row_docs))
    return jnp.moveaxis(out, 0, 1).reshape(q.shape[0], n * size, *q.shape[2:])[:, : b - a]


def _sliding_scan(
    q: jax.Array, k: jax.Array, v: jax.Array, docs: jax.Array | None, window: int, size: int
) -> jax.Array:
    """Sliding attention of a long sequence: each slice reads `size + window - 1` keys, whatever S is."""
    B, S = q.shape[:2]
    n = -(-S // size)
    tail, front = n * size - S, window - 1
    q = jnp.pad(q, ((0, 0), (0, tail), (0, 0), (0, 0), (0, 0)))
    k, v = (jnp.pad(x, ((0, 0), (front, tail), (0, 0), (0, 0))) for x in (k, v))
    k_docs = None if docs is None else jnp.pad(docs, ((0, 0), (front, tail)))

    @jax.checkpoint
    def part(k: jax.Array, v: jax.Array, qc: jax.Array, start: jax.Array) -> jax.Array:
        def cut(x: jax.Array, offset: int, length: int) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, start + offset, length, axis=1)

        kd = None if k_docs is None else cut(k_docs, 0, size + front)
        qd = None if k_docs is None else cut(k_docs, front, size)
        return _scores_part(
            qc, cut(k, 0, size + front), cut(v, 0, size + front), qd, kd, start, start - front, window
        )

    def body(carry: None, x: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        return carry, part(k, v, x[1], x[0])

    rows = jnp.moveaxis(q.reshape(B, n, size, *q.shape[2:]), 1, 0)
    _, out = jax.lax.scan(body, None, (jnp.arange(n) * size, rows))
    return jnp.moveaxis(out, 0, 1).reshape(B, n * size, *q.shape[2:])[:, :S]


def _splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    window: int | None,
    docs: jax.Array | None,
    mesh: Mesh | None,
    interpret: bool,
) -> jax.Array:
    """Pallas splash attention. LocalMask's window is (keys before, keys after), hence window-1."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    S, K = q.shape[1], q.shape[-1]
    heads = q.shape[2] // (mesh.shape["tensor"] if mesh is not None else 1)
    one = masks.CausalMask((S, S)) if window is None else masks.LocalMask((S, S), (window - 1, 0), offset=0)
    block = min(1024, S)
    sizes = kernel.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=min(512, S), block_q_dkv=block, block_kv_dkv=block,
        block_kv_dkv_compute=min(512, S), use_fused_bwd_kernel=True,
    )  # fmt: skip
    run = kernel.make_splash_mha_single_device(
        mask=masks.MultiHeadMask([one] * heads), block_sizes=sizes, interpret=interpret
    )

    def local(q: jax.Array, k: jax.Array, v: jax.Array, docs: jax.Array | None) -> jax.Array:
        def row(q: jax.Array, k: jax.Array, v: jax.Array, d: jax.Array | None) -> jax.Array:
            ids = None if d is None else kernel.SegmentIds(q=d, kv=d)
            return run(q, k, v, segment_ids=ids)

        q, k, v = (x.swapaxes(1, 2) for x in (q * K**-0.5, k, v))
        return jax.vmap(row, in_axes=(0, 0, 0, None if docs is None else 0))(q, k, v, docs).swapaxes(1, 2)

    if mesh is None:
        return local(q, k, v, docs)
    spec = PartitionSpec(("data", "fsdp"), None, "tensor", None)
    doc_spec = None if docs is None else PartitionSpec(("data", "fsdp"), None)
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(spec, spec, spec, doc_spec), out_specs=spec, check_vma=False
    )
    return mapped(q, k, v, docs)


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array, window: int | None) -> jax.Array:
    """cuDNN flash attention. jax adds the query itself to the left window, hence window-1."""
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=True, implementation="cudnn",
        local_window_size=None if window is None else (window - 1, 0),
    )  # fmt: skip
