"""OLMo 3 in flax: reordered norm, QK-norm over the whole width, sliding and full layers, untied head.

Layers are scanned in blocks of one pattern (3 sliding + 1 full), the sliding ones in a loop of their own, so that 7B
compiles like two layers. Weights are torch's `[out, in]`. The surprising thing: the input of attention and MLP is NOT
normalised; their outputs are.
Forward pass: sheet section 1.2; precision: 1.7. Source: `allenai/OLMo-core` @ fa6c5014c, `nn/transformer/block.py`.

Axis letters: B batch, S sequence, D d_model, H heads, N key heads, K head width, F d_ff, V padded vocabulary.
"""

import functools
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from model import layout, rope
from model.attention import Trie, attention, choose_backend, trie_attention
from model.config import LayerKind, ModelConfig, NumericsConfig
from model.sharding import constrain_batch

Params = dict[str, Any]
LAYER_INPUT = "layer_input"  # what `offload` sends to the host
HOST_MEMORY = "pinned_host"


def compute_dtype(numerics: NumericsConfig) -> Any:
    """dtype of parameters and activations inside the forward pass."""
    return jnp.float32 if numerics.mode == "fp32" else jnp.bfloat16


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., in] @ weight [out, in]^T -> [..., out] in x's dtype; float32 stays float32 on every platform."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x, weight.astype(x.dtype), (((x.ndim - 1,), (1,)), ((), ())), precision=precision
    )


def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """RMSNorm over the last axis: float32 inside, times the gain in float32, cast back last.

    The gain is first rounded to x's dtype, as the reference's bf16 copy of the parameters does.
    """
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * gain.astype(x.dtype).astype(jnp.float32)).astype(x.dtype)


def rotate(x: jax.Array, cos: Any, sin: Any) -> jax.Array:
    """RoPE in float32 with half-split pairs (j, j+K/2). x [B,S,H,K], cos and sin [S,K/2] or [B,S,K/2]."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _normal(std: float) -> Any:
    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return std * jax.random.truncated_normal(key, -3.0, 3.0, shape, dtype)

    return init


def layer_params(module: nn.Module, cfg: ModelConfig) -> dict[str, jax.Array]:
    """The float32 weights of one layer, by name, as parameters of `module`."""
    sizes = layout.axis_sizes(cfg)
    out = {}
    for name, axes in layout.LAYER_PARAMS.items():
        init = nn.initializers.ones if len(axes) == 1 else _normal(cfg.init_std)
        out[name] = module.param(name, init, tuple(sizes[a] for a in axes), jnp.float32)
    return out


class LayerParams(nn.Module):
    """The weights of one layer and nothing else."""

    cfg: ModelConfig

    @nn.compact
    def __call__(self) -> dict[str, jax.Array]:
        return layer_params(self, self.cfg)


class Layer(nn.Module):
    """One transformer block of `kind`, on its own (parity by block)."""

    cfg: ModelConfig
    numerics: NumericsConfig
    kind: LayerKind
    mesh: Mesh | None = None

    @nn.compact
    def __call__(self, x: jax.Array, docs: jax.Array | Trie | None) -> jax.Array:
        weights = layer_params(self, self.cfg)
        return layer(x, weights, docs, cfg=self.cfg, numerics=self.numerics, kind=self.kind, mesh=self.mesh)


def layer(
    x: jax.Array,
    weights: dict[str, jax.Array],
    docs: jax.Array | Trie | None,
    *,
    cfg: ModelConfig,
    numerics: NumericsConfig,
    kind: LayerKind,
    mesh: Mesh | None = None,
) -> jax.Array:
    """One transformer block of `kind`. x [B,S,D] -> [B,S,D]."""
    p = {k: v.astype(x.dtype) for k, v in weights.items()}
    x = constrain_batch(x, mesh)
    branch = attention_branch(x, p, cfg, kind, docs, numerics.attention, mesh)
    x = x + rms_norm(branch, p["attention_norm"], cfg.norm_eps)
    x = x + rms_norm(mlp(x, p), p["feed_forward_norm"], cfg.norm_eps)
    return constrain_batch(x, mesh)


def attention_branch(
    x: jax.Array,
    p: Params,
    cfg: ModelConfig,
    kind: LayerKind,
    docs: jax.Array | Trie | None = None,
    backend: str = "auto",
    mesh: Mesh | None = None,
) -> jax.Array:
    """Projections, QK-norm over the whole width, RoPE, attention, output projection. x [B,S,D] -> [B,S,D]."""
    B, S, _ = x.shape
    q = rms_norm(linear(x, p["w_q"]), p["q_norm"], cfg.norm_eps).reshape(B, S, cfg.n_heads, cfg.head_dim)
    k = rms_norm(linear(x, p["w_k"]), p["k_norm"], cfg.norm_eps).reshape(B, S, cfg.n_kv_heads, cfg.head_dim)
    v = linear(x, p["w_v"]).reshape(B, S, cfg.n_kv_heads, cfg.head_dim)
    cos, sin = rope.tables(cfg, kind, S)
    window = cfg.window if kind == LayerKind.SLIDING else None
    if isinstance(docs, Trie):
        at = (jnp.asarray(cos)[docs.position], jnp.asarray(sin)[docs.position])
        out = trie_attention(rotate(q, *at), rotate(k, *at), v, window=window, trie=docs)
    else:
        platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
        chosen = choose_backend(backend, platform, docs is not None)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = attention(q, k, v, window=window, doc_ids=docs, backend=chosen, mesh=mesh)
    return linear(out.reshape(B, S, -1), p["w_out"])


def mlp(x: jax.Array, p: Params) -> jax.Array:
    """W2(silu(W1 x) * W3 x); silu is computed in float32 and rounded once, as torch's kernel does."""
    gate = jax.nn.silu(linear(x, p["w1"]).astype(jnp.float32)).astype(x.dtype)
    return linear(gate * linear(x, p["w3"]), p["w2"])


def remat(f: Any, policy: str) -> Any:
    """A layer's function under the named rematerialisation policy.

    none: keep everything. dots: keep matrix products. block: keep each layer's input. full: keep only the input of
    each pattern block (its layers are recomputed one by one). offload: as block, with the inputs in pinned host memory
    until the backward pass fetches them; `model.step.check_remat` refuses it where there is no such memory.
    """
    if policy == "none":
        return f
    if policy == "offload":
        to_host = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src="device",
            offload_dst=HOST_MEMORY,
        )
        return jax.checkpoint(functools.partial(_named_input, f), policy=to_host, prevent_cse=False)
    keep = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if policy == "dots" else None
    return jax.checkpoint(f, policy=keep, prevent_cse=False)


def _named_input(f: Any, x: jax.Array, weights: Any, docs: jax.Array | Trie | None) -> jax.Array:
    return f(checkpoint_name(x, LAYER_INPUT), weights, docs)


def _one_of_many(f: Any, docs: jax.Array | Trie | None, x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
    return f(x, weights, docs), None


class Block(nn.Module):
    """One repeat of the layer pattern, or the tail after the last whole repeat.

    Layers of one kind that follow each other are a loop: the compiler sees one of them, and needs a third less time and the
    program less memory (docs/plan.md). Stacking their weights copies this repeat's, split as they are.
    """

    cfg: ModelConfig
    numerics: NumericsConfig
    kinds: tuple[LayerKind, ...]
    mesh: Mesh | None = None

    @nn.compact
    def __call__(self, x: jax.Array, docs: jax.Array | Trie | None) -> tuple[jax.Array, None]:
        weights = [LayerParams(self.cfg, name=f"layer_{j}")() for j in range(len(self.kinds))]
        at = 0
        for kind, alike in itertools.groupby(self.kinds):
            n = len(list(alike))
            fixed = functools.partial(layer, cfg=self.cfg, numerics=self.numerics, kind=kind, mesh=self.mesh)
            f = remat(fixed, self.numerics.remat)
            if n == 1:
                x = f(x, weights[at], docs)
            else:
                stacked = jax.tree.map(lambda *w: jnp.stack(w), *weights[at : at + n])
                x, _ = jax.lax.scan(functools.partial(_one_of_many, f, docs), x, stacked)
            at += n
        return x, None


class Olmo3(nn.Module):
    """tokens int32[B,S] -> final-normed hidden states [B,S,D] in the compute dtype. The head is applied elsewhere."""

    cfg: ModelConfig
    numerics: NumericsConfig
    mesh: Mesh | None = None

    @nn.compact
    def __call__(self, tokens: jax.Array, docs: jax.Array | Trie | None = None) -> jax.Array:
        cfg, dtype = self.cfg, compute_dtype(self.numerics)
        kinds, repeats, tail = layout.pattern(cfg)
        shape = (cfg.padded_vocab_size, cfg.d_model)
        table = self.param("embeddings", _normal(cfg.init_std), shape, jnp.float32)
        self.param("lm_head", _normal(cfg.init_std), shape, jnp.float32)
        gain = self.param("final_norm", nn.initializers.ones, (cfg.d_model,), jnp.float32)
        x = constrain_batch(table[tokens].astype(dtype), self.mesh)
        block = nn.remat(Block, prevent_cse=False) if self.numerics.remat == "full" else Block
        if repeats:
            scanned = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=repeats,
            )
            x, _ = scanned(cfg, self.numerics, kinds, self.mesh, name="blocks")(x, docs)
        if tail:
            x, _ = block(cfg, self.numerics, tail, self.mesh, name="tail")(x, docs)
        return rms_norm(x, gain, cfg.norm_eps)


def abstract_params(cfg: ModelConfig) -> Params:
    """Tree of float32 ShapeDtypeStructs, from the layout table alone (milliseconds for 32B)."""
    return layout.map_axes(lambda path, axes, shape: jax.ShapeDtypeStruct(shape, jnp.float32), cfg)


def apply_hidden(
    params: Params,
    cfg: ModelConfig,
    numerics: NumericsConfig,
    tokens: jax.Array,
    doc_ids: jax.Array | Trie | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Final-normed hidden states [B,S,D] of tokens int32[B,S]; doc_ids int32[B,S] or a Trie restricts attention."""
    out: Any = Olmo3(cfg, numerics, mesh).apply({"params": params}, tokens, doc_ids)
    return out


def logits(
    params: Params,
    cfg: ModelConfig,
    numerics: NumericsConfig,
    tokens: jax.Array,
    doc_ids: jax.Array | None = None,
) -> jax.Array:
    """float32[B,S,V] over the padded vocabulary; in `mixed` they are rounded to bf16 first, as the reference's are."""
    hidden = apply_hidden(params, cfg, numerics, tokens, doc_ids)
    return linear(hidden, params["lm_head"]).astype(jnp.float32)
