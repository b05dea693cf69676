"""Mesh and logical axis rules: one table says which mesh axis each logical axis of a parameter lies on.

Mesh axes: `data` (copies of the parameters), `fsdp` (parameters and batch split), `tensor` (heads, MLP, vocabulary).
The batch is split over data x fsdp. A dimension that does not divide is an error: nothing is replicated in silence.
"""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from infra.errors import RecipeError
from model import layout
from model.config import MeshConfig, ModelConfig

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")
# `embed` is the d_model side of every matrix, the other side goes to `tensor`. The embedding table is split along
# d_model only, so that looking a row up stays local. Norm gains are small and kept whole on every device.
RULES: dict[str, str | tuple[str, ...] | None] = {
    "repeats": None,
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "vocab_rows": None,
}


def mesh_shape(cfg: MeshConfig, devices: int) -> tuple[int, int, int]:
    """(data, fsdp, tensor) sizes for `devices` devices; one `auto` (0) in the config takes what is left."""
    sizes = [cfg.data, cfg.fsdp, cfg.tensor]
    if sizes.count(0) > 1:
        raise RecipeError(
            "mesh has two sizes 0 (auto: what is left)", "set all but one of data, fsdp, tensor"
        )
    known = math.prod(s for s in sizes if s)
    if devices % known or (0 not in sizes and known != devices):
        text = f"mesh data={cfg.data} fsdp={cfg.fsdp} tensor={cfg.tensor} does not match {devices} devices"
        raise RecipeError(
            text, "the product of the mesh sizes must be the device count; 0 or auto takes what is left"
        )
    shape = [s or devices // known for s in sizes]
    return shape[0], shape[1], shape[2]


def make_mesh(cfg: MeshConfig, devices: Any = None) -> Mesh:
    """The device mesh of the recipe over `devices` (default: all of this run)."""
    devices = np.asarray(jax.devices() if devices is None else devices).reshape(-1)
    return Mesh(devices.reshape(mesh_shape(cfg, devices.size)), AXES)


def batch_shards(mesh: Mesh) -> int:
    """Number of pieces the batch is split into."""
    return int(np.prod([mesh.shape[a] for a in BATCH_AXES]))


def check_batch(global_batch: int, micro_batch: int, shards: int) -> None:
    """Raise RecipeError unless every micro-batch splits over the batch shards. Instances; micro_batch 0: all at once."""
    micro = micro_batch or global_batch
    if global_batch % micro or micro % shards:
        raise RecipeError(
            f"a micro-batch of {micro} instances (global batch {global_batch}) does not divide over "
            f"{shards} batch shards",
            "choose a mesh with fewer data x fsdp devices, or another train.micro_batch_instances",
        )


def batch_spec(ndim: int) -> PartitionSpec:
    """Split axis 0 over the batch axes."""
    return PartitionSpec(BATCH_AXES, *([None] * (ndim - 1)))


def param_specs(cfg: ModelConfig) -> dict[str, Any]:
    """PartitionSpec of every parameter."""

    def spec(path: layout.Path, axes: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
        if len([a for a in axes if a != "repeats"]) == 1:
            return PartitionSpec(*([None] * len(axes)))
        return PartitionSpec(*(RULES[a] for a in axes))

    return layout.map_axes(spec, cfg)


def param_shardings(cfg: ModelConfig, mesh: Mesh) -> dict[str, Any]:
    """NamedSharding of every parameter. Raises RecipeError when a dimension does not divide."""
    specs = param_specs(cfg)

    def check(path: layout.Path, axes: tuple[str, ...], shape: tuple[int, ...]) -> NamedSharding:
        spec = layout.get(specs, path)
        for size, axis, entry in zip(shape, axes, spec):
            names = (entry,) if isinstance(entry, str) else (entry or ())
            parts = math.prod(mesh.shape[n] for n in names)
            if size % parts:
                raise RecipeError(
                    f"{'/'.join(path)}: {axis} = {size} does not divide over {parts} devices (mesh axis {entry})",
                    "choose mesh sizes that divide d_model, heads, d_ff and the vocabulary",
                )
        return NamedSharding(mesh, spec)

    return layout.map_axes(check, cfg)


def replicated(mesh: Mesh) -> NamedSharding:
    """One copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def place(tree: Any, shardings: Any) -> Any:
    """Host arrays, whole on every process, on the devices of the mesh. Each process sends only its own parts."""
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)
    return jax.tree.map(
        lambda x, where: jax.make_array_from_callback(x.shape, where, lambda part: x[part]), tree, shardings
    )


def constrain_batch(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Keep activations split over the batch axes and nothing else."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, batch_spec(x.ndim)))


def bytes_per_device(tree: Any) -> dict[int, int]:
    """Device id -> bytes of `tree`'s arrays that lie there (test: nothing silently replicated)."""
    total: dict[int, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            total[shard.device.id] = total.get(shard.device.id, 0) + shard.data.nbytes
    return total
