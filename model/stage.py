"""Enter a new training stage with the optimizer state of the one before: OLMo-core's `load_optim_state=True`.

    state, optimizer, overruled = enter(state, saved_optimizer, new_optimizer)          # pure
    entry = find(previous, new_optimizer, record)                                       # what the new stage will have
    state = load(entry, spec)                                                           # from the checkpoint

Weights, moments m and v and Adam's counter t carry over, the global step starts again at 0, the skip window is empty.
The surprising thing: betas, eps and weight decay of the *checkpoint* win over those of the new configuration; only
the initial learning rate is the new one, so the new schedule counts. Changing the decay at a stage switch does nothing.
What OLMo-core does not keep per parameter group is the new configuration's: clipping and the skip-step guard.
Sheet section 3.4; `allenai/OLMo-core` 3.0.0, `optim/config.py` (`fixed_fields`).
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from infra.artifacts import canonical, fingerprint, read_json
from infra.errors import IdentityError, RecipeError
from model import checkpoint, skip_step
from model import step as step_lib
from model.config import OptimizerConfig, PreviousStage

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


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where a stage begins: a checkpoint of the stage before, and the optimizer that results."""

    run: str
    step: int
    fingerprint: str  # of the checkpoint's record: its recipe, receipt and content digests
    saved: OptimizerConfig
    optimizer: OptimizerConfig
    overruled: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As RUN/train/entered.json holds it."""
        plain = dataclasses.asdict(self)
        return {
            **plain,
            **{name: getattr(self, name).model_dump(mode="json") for name in ("saved", "optimizer")},
        }


def find(previous: PreviousStage, new: OptimizerConfig, record: Path) -> Entry:
    """The entry of `previous`, from its record if the stage was entered before, else from the checkpoint.

    So a stage goes on after its predecessor is gone. Raises IdentityError for a checkpoint that is not whole or does
    not name its optimizer, RecipeError if the record speaks of another stage or optimizer.
    """
    if record.exists():
        known = read_json(record)
        entry = Entry(
            known["run"], known["step"], known["fingerprint"], OptimizerConfig.model_validate(known["saved"]),
            OptimizerConfig.model_validate(known["optimizer"]), tuple(known["overruled"]),
        )  # fmt: skip
        if (entry.run, entry.step) != (previous.run, previous.step) or (
            optimizer_in_force(entry.saved, new)[0] != entry.optimizer
        ):
            raise RecipeError(
                f"this run entered from step{entry.step} of {entry.run}; train.enter_from or optimizer has changed",
                "FRESH=1 starts over; RUN_DIR=... keeps both",
            )
        return entry
    root = Path(previous.run) / "checkpoints"
    meta = checkpoint.read_meta(root, previous.step)
    if "optimizer" not in meta.get("identity", {}):
        raise IdentityError(
            f"checkpoint step{previous.step} in {root} does not say which optimizer made it",
            "use a checkpoint that the trainer wrote",
        )
    saved = OptimizerConfig.model_validate(meta["identity"]["optimizer"])
    optimizer, overruled = optimizer_in_force(saved, new)
    return Entry(previous.run, previous.step, fingerprint(canonical(meta)), saved, optimizer, overruled)


def load(entry: Entry, spec: step_lib.StepSpec) -> step_lib.State:
    """State before step 1 of the new stage, placed on the mesh of `spec`, whose optimizer is the entry's.

    The new stage may change RoPE scaling, window or sequence length; weights of another shape are an error.
    """
    old = step_lib.abstract_state(dataclasses.replace(spec, optimizer=entry.saved))
    state, _ = checkpoint.restore(Path(entry.run) / "checkpoints", entry.step, old)
    state, _, _ = enter(state, entry.saved, entry.optimizer)
    return jax.device_put(state, step_lib.state_shardings(spec))
