"""Enter a new training stage with the optimizer state of the one before: OLMo-core's `load_optim_state=True`.

    state, optimizer, overruled = enter(state, saved_optimizer, new_optimizer)          # pure
    state, optimizer, overruled = load(root, step, spec)                                # from a checkpoint directory

Weights, moments m and v and Adam's counter t carry over, the global step starts again at 0, the skip window is empty.
The surprising thing: betas, eps and weight decay of the *checkpoint* win over those of the new configuration; only
the initial learning rate is the new one, so the new schedule counts. Changing the decay at a stage switch does nothing.
What OLMo-core does not keep per parameter group is the new configuration's: clipping and the skip-step guard.
Sheet section 3.4; `allenai/OLMo-core` 3.0.0, `optim/config.py` (`fixed_fields`).
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp

from infra.errors import IdentityError, RecipeError
from model import checkpoint, skip_step
from model import step as step_lib
from model.config import OptimizerConfig

FROM_CHECKPOINT = ("betas", "eps", "weight_decay")  # stored per parameter group, so the checkpoint's win


def optimizer_in_force(
    saved: OptimizerConfig, new: OptimizerConfig
) -> tuple[OptimizerConfig, tuple[str, ...]]:
    """(the optimizer the new stage really has, fields of `new` that have no effect, as `name: asked -> in force`)."""
    if saved.moments_dtype != new.moments_dtype:
        raise RecipeError(
            f"the checkpoint's moments are {saved.moments_dtype}, optimizer.moments_dtype is {new.moments_dtype}",
            f"set optimizer.moments_dtype={saved.moments_dtype}",
        )
    kept = {name: getattr(saved, name) for name in FROM_CHECKPOINT}
    overruled = tuple(
        f"{name}: {getattr(new, name)} -> {kept[name]}"
        for name in FROM_CHECKPOINT
        if getattr(new, name) != kept[name]
    )
    return new.model_copy(update=kept), overruled


def enter(
    state: step_lib.State, saved: OptimizerConfig, new: OptimizerConfig
) -> tuple[step_lib.State, OptimizerConfig, tuple[str, ...]]:
    """State before step 1 of the new stage, its optimizer, and what was overruled (see `optimizer_in_force`)."""
    optimizer, overruled = optimizer_in_force(saved, new)
    opt = {**state["opt"], "window": skip_step.empty_window(optimizer.skip_step)}
    return {**state, "opt": opt, "step": jnp.zeros_like(state["step"])}, optimizer, overruled


def load(
    root: str | Path, step: int, spec: step_lib.StepSpec
) -> tuple[step_lib.State, OptimizerConfig, tuple[str, ...]]:
    """`enter` with checkpoint `step` of the stage before, placed on the mesh of `spec`.

    The new stage may change RoPE scaling, window or sequence length; weights of another shape are an error.
    """
    meta = checkpoint.read_meta(root, step)
    if "optimizer" not in meta.get("identity", {}):
        raise IdentityError(
            f"checkpoint step{step} in {root} does not say which optimizer made it",
            "use a checkpoint that the trainer wrote",
        )
    saved = OptimizerConfig.model_validate(meta["identity"]["optimizer"])
    old = step_lib.abstract_state(dataclasses.replace(spec, optimizer=saved))
    state, _ = checkpoint.restore(root, step, old)
    state, optimizer, overruled = enter(state, saved, spec.optimizer)
    where = step_lib.state_shardings(dataclasses.replace(spec, optimizer=optimizer))
    return jax.device_put(state, where), optimizer, overruled
