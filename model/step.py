"""The training step: loss, gradient (accumulated if asked), skip-step AdamW. One jitted function, state donated.

State is a tree of plain dicts {"params", "opt": {"m","v","count","window"}, "step"}. What changes from step to step
without being data (learning rate, cold window) comes in as numbers with the batch, so nothing ever recompiles.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from infra.errors import RecipeError
from model import sharding, skip_step
from model.config import (
    HistoryConfig,
    LossConfig,
    ModelConfig,
    NumericsConfig,
    OptimizerConfig,
    ScheduleConfig,
)
from model.loss import token_weights, train_loss
from model.olmo3 import HOST_MEMORY, Params, abstract_params
from model.schedule import learning_rate

State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """Everything the compiled step depends on."""

    model: ModelConfig
    optimizer: OptimizerConfig
    loss: LossConfig
    numerics: NumericsConfig
    mesh: Mesh
    micro_batch_instances: int = 0


def new_state(spec: StepSpec, params: Params, history: HistoryConfig) -> State:
    """State before step 1, sharded over the mesh. `params`: float32 arrays on the host or devices."""
    other = sorted({str(p.dtype) for p in jax.tree.leaves(params)} - {"float32"})
    if other:
        raise RecipeError(
            f"weights given as {', '.join(other)}: master weights are float32 whatever the compute dtype",
            "start from the fp32 originals, not from a rounded export",
        )
    shardings = state_shardings(spec)
    params = sharding.place(params, shardings["params"])
    make = jax.jit(
        lambda p: {
            "opt": skip_step.init(spec.optimizer, p, history.adam_count_at_start),
            "step": jnp.int32(0),
        },
        out_shardings={"opt": shardings["opt"], "step": shardings["step"]},
    )
    return {"params": params, **make(params)}


def abstract_state(spec: StepSpec) -> State:
    """ShapeDtypeStructs with shardings of the whole state: what a checkpoint is restored to."""
    params = abstract_params(spec.model)
    tree = {
        "params": params,
        "opt": jax.eval_shape(lambda p: skip_step.init(spec.optimizer, p), params),
        "step": jax.ShapeDtypeStruct((), jnp.int32),
    }
    place = lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where)  # noqa: E731
    return jax.tree.map(place, tree, state_shardings(spec))


def state_shardings(spec: StepSpec) -> State:
    """NamedSharding of every leaf of the state; moments lie like their parameters."""
    params = sharding.param_shardings(spec.model, spec.mesh)
    one = sharding.replicated(spec.mesh)
    window = {"losses": one, "norms": one, "seen": one}
    return {"params": params, "opt": {"m": params, "v": params, "count": one, "window": window}, "step": one}


def batch_shardings(spec: StepSpec, with_documents: bool = False) -> dict[str, NamedSharding]:
    """NamedSharding of every part of a batch."""

    def place(ndim: int) -> NamedSharding:
        return NamedSharding(spec.mesh, sharding.batch_spec(ndim))

    out = {"tokens": place(2), "instance_mask": place(1), "position": place(1)}
    if with_documents:
        out["doc_ids"] = place(2)
    return {**out, "control": sharding.replicated(spec.mesh)}


def control(
    schedule: ScheduleConfig, optimizer: OptimizerConfig, history: HistoryConfig, step: int
) -> np.ndarray:
    """float32[3] of step `step`: learning rate, rate * weight decay, 1 if the skip window is forgotten first."""
    rate = learning_rate(schedule, step)
    cold = float((step - 1) in history.cold_window_at)
    return np.array([rate, rate * optimizer.weight_decay, cold], dtype=np.float32)


def host_batch(tokens: np.ndarray, instance_mask: np.ndarray, numbers: np.ndarray) -> dict[str, np.ndarray]:
    """A batch on the host: tokens int32[B,S], instance_mask bool[B], numbers = control(...)."""
    return {
        "tokens": np.asarray(tokens, np.int32),
        "instance_mask": np.asarray(instance_mask, bool),
        "position": np.arange(len(tokens), dtype=np.int32),
        "control": numbers,
    }


def gradients(
    spec: StepSpec, params: Params, batch: dict[str, jax.Array]
) -> tuple[Params, dict[str, jax.Array]]:
    """(float32 gradients, {"ce", "z"}) of a global batch, over micro-batches if the spec asks for them.

    Micro-batch k holds rows k, k+n, k+2n, ... so that every device works on each of them.
    """
    tokens = batch["tokens"]
    labels, weights = token_weights(
        tokens, batch["instance_mask"], batch["position"], spec.loss.reference_ranks, batch.get("label_mask")
    )
    mesh = None if spec.mesh.size == 1 else spec.mesh

    def grad(tokens: jax.Array, labels: jax.Array, weights: jax.Array, docs: jax.Array | None) -> Any:
        def f(p: Params) -> Any:
            return train_loss(p, spec.model, spec.numerics, spec.loss, tokens, labels, weights, docs, mesh)

        (_, parts), g = jax.value_and_grad(f, has_aux=True)(params)
        return g, parts

    docs = batch.get("doc_ids")
    size = spec.micro_batch_instances or tokens.shape[0]
    if size == tokens.shape[0]:
        return grad(tokens, labels, weights, docs)
    if tokens.shape[0] % size:
        raise RecipeError(
            f"train.micro_batch_instances {size} does not divide the global batch of {tokens.shape[0]}"
        )
    n = tokens.shape[0] // size

    def split(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else jnp.moveaxis(x.reshape(size, n, *x.shape[1:]), 1, 0)

    def body(total: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, grad(*part)), None

    zero = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    start = (zero, {"ce": jnp.float32(0), "z": jnp.float32(0)})
    total, _ = jax.lax.scan(body, start, (split(tokens), split(labels), split(weights), split(docs)))
    return total


def train_step(
    spec: StepSpec, state: State, batch: dict[str, jax.Array]
) -> tuple[State, dict[str, jax.Array]]:
    """One update. metrics: ce, z_loss, grad_norm (before clipping), skipped; float32 scalars."""
    grads, parts = gradients(spec, state["params"], batch)
    lr, lr_decay, cold = batch["control"]
    params, opt, info = skip_step.apply(
        spec.optimizer, grads, state["opt"], state["params"],
        loss=parts["ce"], lr=lr, lr_decay=lr_decay, cold=cold > 0,
    )  # fmt: skip
    metrics = {"ce": parts["ce"], "z_loss": parts["z"], "grad_norm": info.grad_norm, "skipped": info.skipped}
    return {"params": params, "opt": opt, "step": state["step"] + 1}, metrics


def check_remat(spec: StepSpec) -> None:
    """Raise RecipeError when remat `offload` is asked of devices that have no pinned host memory."""
    device = spec.mesh.devices.flat[0]
    known = {memory.kind for memory in device.addressable_memories()}
    if spec.numerics.remat == "offload" and HOST_MEMORY not in known:
        raise RecipeError(
            f"numerics.remat=offload needs {HOST_MEMORY} memory, and {device.device_kind} has only "
            + ", ".join(sorted(known)),
            "numerics.remat=block recomputes the same and keeps the inputs of layers on the device",
        )


def jit_step(spec: StepSpec, with_documents: bool = False) -> Any:
    """The jitted step with explicit shardings and donated state; `.lower(...).compile()` gives the fixed program."""
    check_remat(spec)
    shardings = state_shardings(spec)

    def step(state: State, batch: dict[str, jax.Array]) -> tuple[State, dict[str, jax.Array]]:
        return train_step(spec, state, batch)

    return jax.jit(
        step,
        in_shardings=(shardings, batch_shardings(spec, with_documents)),
        out_shardings=(shardings, sharding.replicated(spec.mesh)),
        donate_argnums=0,
    )


def abstract_batch(spec: StepSpec, instances: int, sequence: int) -> dict[str, jax.ShapeDtypeStruct]:
    """ShapeDtypeStructs of a batch."""
    shapes = {
        "tokens": ((instances, sequence), jnp.int32),
        "instance_mask": ((instances,), jnp.bool_),
        "position": ((instances,), jnp.int32),
        "control": ((3,), jnp.float32),
    }
    where = batch_shardings(spec)
    return {k: jax.ShapeDtypeStruct(shape, dtype, sharding=where[k]) for k, (shape, dtype) in shapes.items()}
