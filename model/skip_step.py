"""Skip-step AdamW, exactly as OLMo-core's: sheet section 3.

A step is skipped when its CE or its pre-clip gradient norm lies more than `sigma` standard deviations above the
mean of the last 128 calls; the first call that can skip is 64. A skipped step leaves weights, moments and Adam's
counter bit-identical, while the learning rate moves on. The surprising thing: skipped values stay in the window and
widen it, so a second spike right after the first may pass.

NaN: with `reference` a NaN enters the window and every call skips until it leaves (129 calls); with `safe` it skips
one call and never enters. In both the update is selected, never multiplied by zero, so a NaN cannot reach a weight.
Source: `allenai/OLMo-core` 3.0.0, `optim/skip_step_optimizer.py` and `optim/adamw.py`.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from model import layout
from model.config import OptimizerConfig, SkipStepConfig

State = dict[str, Any]


class StepInfo(NamedTuple):
    """What one call did: grad_norm float32 before clipping, skipped float32 in {0,1}."""

    grad_norm: jax.Array
    skipped: jax.Array


def empty_window(cfg: SkipStepConfig) -> State:
    """Window of CE and gradient norms, newest last; the last `seen` of `window + 1` entries count."""
    return {
        "losses": jnp.zeros(cfg.window + 1, jnp.float32),
        "norms": jnp.zeros(cfg.window + 1, jnp.float32),
        "seen": jnp.zeros((), jnp.int32),
    }


def seen_values(window: State) -> dict[str, list[float | None]]:
    """What the skip rule has seen, newest last: {"losses", "norms"} on the host; None for what is not finite."""
    arrays = jax.device_get(window)
    seen = int(arrays["seen"])
    return {
        name: [float(x) if math.isfinite(x) else None for x in arrays[name][len(arrays[name]) - seen :]]
        for name in ("losses", "norms")
    }


def init(cfg: OptimizerConfig, params: Any, adam_count_at_start: int = 0) -> State:
    """Fresh optimizer state for `params` (arrays or ShapeDtypeStructs under eval_shape)."""
    dtype = jnp.dtype(cfg.moments_dtype)
    return {
        "m": jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), params),
        "v": jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), params),
        "count": jnp.full((), adam_count_at_start, jnp.float32),
        "window": empty_window(cfg.skip_step),
    }


def _within(
    history: jax.Array, counted: jax.Array, n: jax.Array, latest: jax.Array, sigma: float
) -> jax.Array:
    """latest - mean <= sigma * std (unbiased) over the counted entries.

    Everything is taken relative to the newest history entry, so that a constant history has mean exactly itself and
    std exactly 0: an equal value passes, one ulp more does not.
    """
    origin = history[-1]
    d = jnp.where(counted, history - origin, 0.0)
    mean = jnp.sum(d) / n
    std = jnp.sqrt(jnp.sum(jnp.where(counted, (d - mean) ** 2, 0.0)) / (n - 1))
    return (latest - origin) - mean <= sigma * std


def decide(cfg: SkipStepConfig, window: State, loss: jax.Array, norm: jax.Array) -> tuple[jax.Array, State]:
    """(bool: take this step, the window after this call)."""
    pushed = {
        "losses": jnp.roll(window["losses"], -1).at[-1].set(loss),
        "norms": jnp.roll(window["norms"], -1).at[-1].set(norm),
        "seen": jnp.minimum(window["seen"] + 1, cfg.window + 1),
    }
    seen = pushed["seen"]
    n = (seen - 1).astype(jnp.float32)
    counted = jnp.arange(cfg.window) >= cfg.window - (seen - 1)
    calm = _within(pushed["losses"][:-1], counted, n, loss, cfg.sigma)
    calm &= _within(pushed["norms"][:-1], counted, n, norm, cfg.sigma)
    take = (seen < max(2, cfg.window // 2)) | calm
    if not cfg.enabled:
        take = jnp.ones((), bool)
    if cfg.nan_policy == "safe":
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        take &= finite
        pushed = jax.tree.map(lambda new, old: jnp.where(finite, new, old), pushed, window)
    return take, pushed


def global_norm(grads: Any) -> jax.Array:
    """float32 L2 norm over all gradients; rows are summed first, which keeps float32 sums accurate."""
    squares = []
    for g in jax.tree.leaves(grads):
        g = g.astype(jnp.float32)
        squares.append(jnp.sum(jnp.sum(g * g, axis=-1)))
    return jnp.sqrt(jnp.sum(jnp.stack(squares)))


def apply(
    cfg: OptimizerConfig,
    grads: Any,
    state: State,
    params: Any,
    *,
    loss: jax.Array,
    lr: jax.Array,
    lr_decay: jax.Array,
    cold: jax.Array | bool = False,
) -> tuple[Any, State, StepInfo]:
    """One call of the optimizer: (parameters, state, info).

    `loss` is CE only, without z-loss. `lr` float32 and `lr_decay` = lr * weight_decay, rounded from float64 on the
    host. `cold` forgets the window first, as a restart of the reference did.
    """
    window = jax.tree.map(
        lambda old, new: jnp.where(cold, new, old), state["window"], empty_window(cfg.skip_step)
    )
    norm = global_norm(grads)
    scale = jnp.minimum(1.0, cfg.max_grad_norm / (norm + 1e-6))
    take, window = decide(cfg.skip_step, window, loss, norm)
    b1, b2 = cfg.betas
    t = state["count"] + 1
    bias1 = 1 - jnp.power(jnp.float32(b1), t)
    root_bias2 = jnp.sqrt(1 - jnp.power(jnp.float32(b2), t))
    step_size = lr / bias1

    def leaf(path: Any, p: jax.Array, g: jax.Array, m: jax.Array, v: jax.Array) -> tuple[Any, Any, Any]:
        g = g.astype(jnp.float32) * scale
        decay = jnp.float32(0.0) if _name(path) in layout.NO_DECAY else lr_decay
        m32 = m.astype(jnp.float32) * jnp.float32(1 - (1 - b1)) + g * jnp.float32(1 - b1)
        v32 = v.astype(jnp.float32) * jnp.float32(1 - (1 - b2)) + (g * g) * jnp.float32(1 - b2)
        new = p * (1 - decay) - step_size * (m32 / (jnp.sqrt(v32) / root_bias2 + cfg.eps))
        return (
            jnp.where(take, new.astype(p.dtype), p),
            jnp.where(take, m32.astype(m.dtype), m),
            jnp.where(take, v32.astype(v.dtype), v),
        )

    done = jax.tree_util.tree_map_with_path(leaf, params, grads, state["m"], state["v"])
    params, m, v = (
        jax.tree.map(lambda x, i=i: x[i], done, is_leaf=lambda x: isinstance(x, tuple)) for i in range(3)
    )
    count = state["count"] + take.astype(jnp.float32)
    info = StepInfo(norm, 1 - take.astype(jnp.float32))
    return params, {"m": m, "v": v, "count": count, "window": window}, info


def _name(path: Any) -> str:
    return path[0].key if path and hasattr(path[0], "key") else ""


def skip_step_adamw(
    cfg: OptimizerConfig, adam_count_at_start: int = 0
) -> optax.GradientTransformationExtraArgs:
    """The same optimizer in optax's form: `update(grads, state, params, loss=, lr=)` gives additive updates.

    A skipped call gives zeros. The trainer uses `apply`, which writes the new weights without a subtraction.
    """

    def update(
        grads: Any, state: State, params: Any, *, loss: Any, lr: Any, cold: Any = False, **_: Any
    ) -> Any:
        lr32 = jnp.asarray(lr, jnp.float32)
        new, state, _info = apply(
            cfg, grads, state, params,
            loss=jnp.asarray(loss, jnp.float32), lr=lr32, lr_decay=lr32 * cfg.weight_decay, cold=cold,
        )  # fmt: skip
        return jax.tree.map(lambda a, b: a - b, new, params), state

    return optax.GradientTransformationExtraArgs(
        lambda params: init(cfg, params, adam_count_at_start), update
    )
