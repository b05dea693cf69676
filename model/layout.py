"""The parameter tree: names, shapes, logical axes, and where each layer lies. One table for all of it.

Everything else derives from here: abstract shapes (7B and 32B in milliseconds), shardings, conversion, init.

Layers are stored for a scan. The pattern (3 sliding + 1 full) repeats G times; `blocks/layer_j/<name>` holds
position j of all G repeats, stacked on axis 0. Layers after the last whole repeat lie in `tail/layer_j`, unstacked.
Weights keep torch's `[out, in]` layout, so that conversion renames and stacks and never transposes.

Axis letters: G repeats, D d_model, Q n_heads*head_dim, K n_kv_heads*head_dim, F d_ff, V padded vocabulary.
"""

from collections.abc import Iterator
from typing import Any

from model.config import LayerKind, ModelConfig

# name -> logical axes, torch layout [out, in]; one axis = an RMSNorm gain.
LAYER_PARAMS: dict[str, tuple[str, ...]] = {
    "w_q": ("heads", "embed"),
    "w_k": ("kv_heads", "embed"),
    "w_v": ("kv_heads", "embed"),
    "w_out": ("embed", "heads"),
    "q_norm": ("heads",),
    "k_norm": ("kv_heads",),
    "attention_norm": ("embed",),
    "w1": ("mlp", "embed"),
    "w2": ("embed", "mlp"),
    "w3": ("mlp", "embed"),
    "feed_forward_norm": ("embed",),
}
TOP_PARAMS: dict[str, tuple[str, ...]] = {
    "embeddings": ("vocab_rows", "embed"),
    "final_norm": ("embed",),
    "lm_head": ("vocab", "embed"),
}
NO_DECAY = ("embeddings",)
# OLMo-core draws its initial weights in this order: embeddings, per block these, lm_head.
DRAW_ORDER = ("w_q", "w_k", "w_v", "w_out", "w1", "w3", "w2")

Path = tuple[str, ...]


def axis_sizes(cfg: ModelConfig) -> dict[str, int]:
    """Logical axis -> length."""
    return {
        "embed": cfg.d_model,
        "heads": cfg.n_heads * cfg.head_dim,
        "kv_heads": cfg.n_kv_heads * cfg.head_dim,
        "mlp": cfg.d_ff,
        "vocab": cfg.padded_vocab_size,
        "vocab_rows": cfg.padded_vocab_size,
    }


def pattern(cfg: ModelConfig) -> tuple[tuple[LayerKind, ...], int, tuple[LayerKind, ...]]:
    """(kinds of one repeat, number of repeats G, kinds of the tail)."""
    kinds, period = cfg.layer_kinds, len(cfg.layer_pattern)
    repeats = 0
    while kinds[repeats * period : (repeats + 1) * period] == tuple(cfg.layer_pattern):
        repeats += 1
    return tuple(cfg.layer_pattern), repeats, kinds[repeats * period :]


def layer_place(cfg: ModelConfig, layer: int) -> tuple[Path, int | None]:
    """Tree path of layer `layer`'s dict and its index on axis 0 (None: not stacked)."""
    kinds, repeats, _ = pattern(cfg)
    if layer < repeats * len(kinds):
        return ("blocks", f"layer_{layer % len(kinds)}"), layer // len(kinds)
    return ("tail", f"layer_{layer - repeats * len(kinds)}"), None


def param_axes(cfg: ModelConfig) -> dict[str, Any]:
    """The parameter tree with a tuple of logical axes at each leaf; `repeats` is the scanned axis."""
    kinds, repeats, tail = pattern(cfg)
    tree: dict[str, Any] = dict(TOP_PARAMS)
    if repeats:
        stacked = {name: ("repeats", *axes) for name, axes in LAYER_PARAMS.items()}
        tree["blocks"] = {f"layer_{j}": dict(stacked) for j in range(len(kinds))}
    if tail:
        tree["tail"] = {f"layer_{j}": dict(LAYER_PARAMS) for j in range(len(tail))}
    return tree


def leaves(tree: dict[str, Any], prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """(path, leaf) of a tree of dicts in sorted key order, the order jax uses."""
    for key in sorted(tree):
        value = tree[key]
        if isinstance(value, dict):
            yield from leaves(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def get(tree: dict[str, Any], path: Path) -> Any:
    """The entry of a tree of dicts at `path`."""
    for key in path:
        tree = tree[key]
    return tree


def put(tree: dict[str, Any], path: Path, value: Any) -> None:
    """Set the entry at `path`, making the dicts on the way."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def map_axes(fn: Any, cfg: ModelConfig) -> dict[str, Any]:
    """Apply `fn(path, logical axes, shape)` to every parameter; returns a tree of the results."""
    _, repeats, _ = pattern(cfg)
    sizes = {**axis_sizes(cfg), "repeats": repeats}
    out: dict[str, Any] = {}
    for path, axes in leaves(param_axes(cfg)):
        put(out, path, fn(path, axes, tuple(sizes[a] for a in axes)))
    return out


def count_params(cfg: ModelConfig) -> int:
    """Number of parameters, from shapes alone."""
    total = 0

    def add(path: Path, axes: tuple[str, ...], shape: tuple[int, ...]) -> None:
        nonlocal total
        n = 1
        for size in shape:
            n *= size
        total += n

    map_axes(add, cfg)
    return total
