"""Step-0 weights: OLMo-core's distribution and draw order, on jax's threefry generator.

Every matrix: normal with std 0.02 cut at three of it (so the realised std is 0.01973), no depth scaling, the head like
the rest; gains 1. Matrix number n of the draw order uses `fold_in(key(seed), n)`, so the result does not depend on
devices. The surprising thing: these are not AI2's weights, which come from torch's generator on one GPU; for parity
start from the reference's own step-0 weights (`evals.reference`). Sheet section 1.6.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model import layout
from model.config import ModelConfig


def draw_order(cfg: ModelConfig) -> list[tuple[layout.Path, int | None, tuple[int, ...]]]:
    """(path, index on the stacked axis or None, shape) of every matrix in OLMo-core's order of drawing."""
    sizes = layout.axis_sizes(cfg)

    def shape(axes: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(sizes[a] for a in axes)

    out: list[Any] = [(("embeddings",), None, shape(layout.TOP_PARAMS["embeddings"]))]
    for layer in range(cfg.n_layers):
        path, index = layout.layer_place(cfg, layer)
        out += [((*path, name), index, shape(layout.LAYER_PARAMS[name])) for name in layout.DRAW_ORDER]
    return [*out, (("lm_head",), None, shape(layout.TOP_PARAMS["lm_head"]))]


def init_params(cfg: ModelConfig, seed: int | None = None) -> dict[str, Any]:
    """Tree of float32 numpy arrays; `seed` defaults to `cfg.init_seed`."""
    key = jax.random.key(cfg.init_seed if seed is None else seed, impl="threefry2x32")
    params = layout.map_axes(lambda path, axes, shape: np.ones(shape, np.float32), cfg)
    for n, (path, index, shape) in enumerate(draw_order(cfg)):
        draw = jax.random.truncated_normal(jax.random.fold_in(key, n), -3.0, 3.0, shape, jnp.float32)
        target = layout.get(params, path)
        if index is not None:
            target = target[index]
        target[...] = np.asarray(np.float32(cfg.init_std) * draw)
    return params
