"""Cross entropy plus z-loss over 100,352 classes, in slices of tokens, gradient made in the forward pass.

The logits of a batch are never held: each slice's logits are made, turned into loss and gradient, and dropped.
The surprising thing: the denominator is the reference's. It is per data-parallel rank of the *reference* (row b
belongs to rank b mod R), a filtered instance adds S back to it, and the loss is the mean of the rank means.
Specification: sheet section 2; `allenai/OLMo-core` @ fa6c5014c, `train/train_module/transformer/train_module.py`.

Axis letters: B batch, S sequence, D d_model, V padded vocabulary (of this tensor shard inside `_local`), T tokens
of a slice, R reference ranks.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from infra.errors import RecipeError
from model.config import LossConfig, ModelConfig, NumericsConfig
from model.olmo3 import Params, apply_hidden, linear
from model.sharding import BATCH_AXES, batch_shards, batch_spec

HEAD_SPEC = PartitionSpec("tensor", "fsdp")


def token_weights(
    tokens: jax.Array,
    instance_mask: jax.Array,
    positions: jax.Array,
    reference_ranks: int,
    label_mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(labels int32[B,S], weights float32[B,S]) of a whole global batch.

    positions int32[B]: place of each row in the global batch. instance_mask bool[B]: False = no labels in this row.
    label_mask bool[B,S]: False = do not predict that token. A weight is 1/(R * denominator of the row's rank), so
    that CE = sum(weights * nll) is the mean of the rank means.
    """
    B, S = tokens.shape
    if B % reference_ranks:
        raise RecipeError(
            f"loss.reference_ranks {reference_ranks} does not divide the global batch of {B} instances",
            "set it to the number of data-parallel ranks the reference ran on",
        )
    labels = jnp.concatenate([tokens[:, 1:], jnp.zeros_like(tokens[:, :1])], axis=1)
    valid = jnp.broadcast_to((jnp.arange(S) < S - 1)[None, :] & instance_mask[:, None], (B, S))
    if label_mask is not None:
        valid &= jnp.concatenate([label_mask[:, 1:], jnp.zeros_like(label_mask[:, :1])], axis=1)
    rank = jnp.mod(positions, reference_ranks)
    per_row = valid.sum(axis=1, dtype=jnp.float32) + S * (~instance_mask)
    member = rank[:, None] == jnp.arange(reference_ranks)[None, :]
    denominator = jnp.sum(jnp.where(member, per_row[:, None], 0.0), axis=0)
    weight = 1.0 / (denominator * reference_ranks)
    row_weight = jnp.sum(jnp.where(member, weight[None, :], 0.0), axis=1)
    return labels, jnp.where(valid, row_weight[:, None], 0.0)


def slice_length(rows: int, sequence: int, slice_tokens: int) -> int:
    """Positions per slice: the largest divisor of `sequence` with rows * length <= slice_tokens (at least 1)."""
    want = max(1, slice_tokens // max(rows, 1))
    return max(d for d in range(1, min(want, sequence) + 1) if sequence % d == 0)


def _local(
    x: jax.Array,
    head: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    *,
    z: float,
    slice_tokens: int,
    with_grad: bool,
    vocab_axis: str | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Sums of this shard: (sum w*nll, z * sum w*lse^2, d/dx [B,S,D] in x's dtype, d/dhead float32[V,D]).

    With p = e/s the gradient of the logits is c*e - w*onehot, c = w(1 + 2 z lse)/s. The one-hot part is a gather and
    a scatter of T rows; c is folded into x and into the result; so `e` is the only [T,V] array besides the logits.
    """
    B, S, D = x.shape
    V = head.shape[0]
    c = slice_length(B, S, slice_tokens)
    head_c = head.astype(x.dtype)
    first = jax.lax.axis_index(vocab_axis) * V if vocab_axis else 0
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dot = functools.partial(jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32)

    def cut(a: jax.Array) -> jax.Array:
        return jnp.moveaxis(a.reshape(B, S // c, c, *a.shape[2:]), 1, 0).reshape(S // c, B * c, *a.shape[2:])

    def over_vocab(value: jax.Array, op: Any) -> jax.Array:
        return op(value, vocab_axis) if vocab_axis else value

    def body(carry: Any, part: tuple[jax.Array, jax.Array, jax.Array]) -> Any:
        ce, zz, d_head = carry
        xc, label, w = part
        logit = linear(xc, head_c).astype(jnp.float32)
        top = over_vocab(jnp.max(logit, axis=-1), jax.lax.pmax)
        e = jnp.exp(logit - top[:, None])
        s = over_vocab(jnp.sum(e, axis=-1), jax.lax.psum)
        lse = top + jnp.log(s)
        local = label - first
        mine = (local >= 0) & (local < V)
        local = jnp.clip(local, 0, V - 1)
        at_label = jnp.take_along_axis(logit, local[:, None], axis=-1)[:, 0]
        at_label = over_vocab(jnp.where(mine, at_label, 0.0), jax.lax.psum)
        ce = ce + jnp.sum(w * (lse - at_label))
        zz = zz + z * jnp.sum(w * lse * lse)
        if not with_grad:
            return (ce, zz, d_head), None
        coefficient = (w * (1 + 2 * z * lse) / s)[:, None]
        hit = jnp.where(mine, w, 0.0)[:, None]
        ec = e.astype(x.dtype)
        dx = coefficient * dot(ec, head_c, (((1,), (0,)), ((), ())))
        dx = dx - hit * head_c[local].astype(jnp.float32)
        xf = xc.astype(jnp.float32)
        d_head = d_head + dot(ec, (coefficient * xf).astype(x.dtype), (((0,), (0,)), ((), ())))
        d_head = d_head.at[local].add(-hit * xf)
        return (ce, zz, d_head), over_vocab(dx, jax.lax.psum).astype(x.dtype)

    zero = jnp.zeros((), jnp.float32)
    start = (zero, zero, jnp.zeros((V, D), jnp.float32) if with_grad else None)
    (ce, zz, d_head), dx = jax.lax.scan(body, start, (cut(x), cut(labels), cut(weights)))
    if with_grad:
        dx = jnp.moveaxis(dx.reshape(S // c, B, c, D), 0, 1).reshape(B, S, D)
    return ce, zz, dx, d_head


def _sums(
    x: jax.Array, head: jax.Array, labels: jax.Array, weights: jax.Array,
    z: float, slice_tokens: int, mesh: Mesh | None, with_grad: bool,
) -> tuple[jax.Array, jax.Array, Any, Any]:  # fmt: skip
    local = functools.partial(_local, z=z, slice_tokens=slice_tokens, with_grad=with_grad)
    if mesh is None:
        return local(x, head, labels, weights, vocab_axis=None)

    def shard(x: jax.Array, head: jax.Array, labels: jax.Array, weights: jax.Array) -> Any:
        whole = jax.lax.all_gather(head.astype(x.dtype), "fsdp", axis=1, tiled=True)
        ce, zz, dx, d_head = local(x, whole, labels, weights, vocab_axis="tensor")
        ce, zz = jax.lax.psum((ce, zz), BATCH_AXES)
        if with_grad:
            d_head = jax.lax.psum_scatter(
                jax.lax.psum(d_head, "data"), "fsdp", scatter_dimension=1, tiled=True
            )
        return ce, zz, dx, d_head

    rows, flat = batch_spec(3), batch_spec(2)
    out = (PartitionSpec(), PartitionSpec(), rows if with_grad else None, HEAD_SPEC if with_grad else None)
    mapped = jax.shard_map(
        shard, mesh=mesh, in_specs=(rows, HEAD_SPEC, flat, flat), out_specs=out, check_vma=False
    )
    return mapped(x, head, labels, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def head_loss(
    x: jax.Array, head: jax.Array, labels: jax.Array, weights: jax.Array,
    z: float, slice_tokens: int, mesh: Mesh | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """(loss, ce, z term) of hidden states x [B,S,D] and head [V,D]. Only `loss` carries a gradient."""
    ce, zz, _, _ = _sums(x, head, labels, weights, z, slice_tokens, mesh, False)
    return ce + zz, ce, zz


def _forward(
    x: jax.Array, head: jax.Array, labels: jax.Array, weights: jax.Array,
    z: float, slice_tokens: int, mesh: Mesh | None,
) -> Any:  # fmt: skip
    ce, zz, dx, d_head = _sums(x, head, labels, weights, z, slice_tokens, mesh, True)
    return (ce + zz, ce, zz), (dx, d_head)


def _backward(z: float, slice_tokens: int, mesh: Mesh | None, saved: Any, cotangents: Any) -> Any:
    dx, d_head = saved
    g = cotangents[0]
    return (dx * g).astype(dx.dtype), d_head * g, None, None


head_loss.defvjp(_forward, _backward)


def train_loss(
    params: Params,
    cfg: ModelConfig,
    numerics: NumericsConfig,
    loss_cfg: LossConfig,
    tokens: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    doc_ids: jax.Array | None = None,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(loss, {"ce", "z"}), float32 scalars, for rows `tokens` with labels and weights from `token_weights`.

    The sums are over the rows given; weights come from the whole global batch, so micro-batches simply add up.
    """
    hidden = apply_hidden(params, cfg, numerics, tokens, doc_ids, mesh)
    shards = batch_shards(mesh) if mesh is not None else 1
    if tokens.shape[0] % shards:
        raise RecipeError(f"{tokens.shape[0]} rows do not divide over {shards} batch shards of the mesh")
    loss, ce, z = head_loss(
        hidden,
        params["lm_head"],
        labels,
        weights,
        loss_cfg.z_loss_multiplier,
        numerics.loss_slice_tokens,
        mesh,
    )
    return loss, {"ce": ce, "z": z}
