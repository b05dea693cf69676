"""The plan of a run before anything is paid for: the recipe's very step, compiled by XLA:TPU on this machine.

    made = make_plan(request, parse("v5p:4x4x4"))        # `repro plan RECIPE --topology v5p:4x4x4`

`libtpu` holds the TPU compiler and needs no TPU. The compiled program gives bytes per device; FLOPs are counted
twice, by formula and by walking the traced program (`model.flops`); time is a roofline over compute, HBM and
links, and so a lower bound. The surprising thing: XLA's own cost analysis counts a loop body once and its
`optimal_seconds` can be negative, so neither is used for time.
"""

import contextlib
import dataclasses
import math
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infra.artifacts import fingerprint, read_json, sealed, versions, write_json_atomic
from infra.code import code_digest
from infra.errors import IdentityError, RecipeError
from infra.progress import Progress
from infra.topology import Slice
from model.config import (
    LossConfig,
    MeshConfig,
    ModelConfig,
    NumericsConfig,
    OptimizerConfig,
    TrainConfig,
)
from model.flops import forwards_again, largest_arrays, step_flops, traced_matmul_flops

# Without these libtpu looks for a TPU host and complains at length that there is none; with the last one two plans
# may run at once (it otherwise locks the machine for one process).
QUIET_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}
SPLASH_MARK = "tpu_custom_call"
STATE_BYTES_PER_PARAM = 12  # fp32 weights and two fp32 moments
UNREADABLE_MARK = "async-update"  # jaxlib 0.10.2 cannot read back large programs
OVERSIZE_MARKS = ("RESOURCE_EXHAUSTED", "exceeds", "Ran out of memory")


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """The parts of a recipe that a plan depends on. Lengths in tokens, batch in instances."""

    model: ModelConfig
    optimizer: OptimizerConfig
    loss: LossConfig
    numerics: NumericsConfig
    mesh: MeshConfig
    train: TrainConfig
    sequence_length: int
    global_batch_instances: int

    def with_choice(self, mesh: MeshConfig, remat: str, micro: int) -> "PlanRequest":
        """The same step on another mesh, with another rematerialisation policy and micro-batch."""
        return dataclasses.replace(
            self,
            mesh=mesh,
            numerics=self.numerics.model_copy(update={"remat": remat}),
            train=self.train.model_copy(update={"micro_batch_instances": micro}),
        )


def make_plan(
    request: PlanRequest,
    slice_: Slice,
    *,
    price_per_chip_hour: float | None = None,
    cache: Path | None = None,
) -> dict[str, Any]:
    """Compile the step for `slice_` and describe it; a plan with the same fingerprint is read from `cache`.

    Raises RecipeError when the mesh or the batch does not divide. A step that does not fit is no error: its
    plan says `"fits": False`, and `largest_arrays` names where its memory goes.
    """
    from model.sharding import check_batch, mesh_shape

    data, fsdp, _ = mesh_shape(request.mesh, slice_.devices)
    micro = request.train.micro_batch_instances
    check_batch(request.global_batch_instances, micro, data * fsdp)  # before the compiler is even loaded
    numerics = request.numerics.model_copy(update={"attention": "splash"})
    request = dataclasses.replace(request, numerics=numerics)
    identity = {
        "request": {f.name: getattr(request, f.name) for f in dataclasses.fields(request)},
        "slice": slice_.name,
        "code": code_digest("model.plan", "model.step"),
        "versions": versions("jax", "jaxlib", "libtpu", "flax", "optax"),
    }
    path = cache / f"{fingerprint(identity)[:32]}.json" if cache else None
    compiled = read_compiled(path) if path is not None else None
    if compiled is None:
        compiled = compile_step(request, slice_)
        if path is not None:
            write_json_atomic(path, sealed(compiled))
    return {**describe(request, slice_, compiled, price_per_chip_hour), "versions": identity["versions"]}


def read_compiled(path: Path) -> dict[str, Any] | None:
    """A result of `compile_step` from the cache. None when there is none, or (said on stderr) when it is damaged."""
    if not path.exists():
        return None
    try:
        found = read_json(path)
        if isinstance(found, dict) and "seal" in found and sealed(found) == found:
            return {k: v for k, v in found.items() if k != "seal"}
    except (IdentityError, OSError):
        pass
    print(f"the cached plan {path} is damaged: the step is compiled again", file=sys.stderr)
    return None


def compile_step(request: PlanRequest, slice_: Slice) -> dict[str, Any]:
    """Compile and read off what only the compiler knows. Seconds are CPU seconds of this process.

    Raises RecipeError when libtpu's devices are not those of the slice, or the step holds no attention kernel.
    """
    for name, value in QUIET_LIBTPU.items():
        os.environ.setdefault(name, value)
    import jax
    from jax.experimental import topologies

    from model import sharding
    from model.step import StepSpec, abstract_batch, abstract_state, jit_step, train_step

    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=slice_.name, **slice_.compiler_options
    ).devices
    if len(devices) != slice_.devices:
        raise RecipeError(
            f"libtpu gives {slice_.name} {len(devices)} devices, the table {slice_.devices}",
            "correct the chip in infra/topology.py: memory and FLOP/s per device depend on it",
        )
    mesh = sharding.make_mesh(request.mesh, devices)
    spec = StepSpec(
        request.model,
        request.optimizer,
        request.loss,
        request.numerics,
        mesh,
        request.train.micro_batch_instances,
    )
    state = abstract_state(spec)
    batch = abstract_batch(spec, request.global_batch_instances, request.sequence_length)
    traced = jax.make_jaxpr(lambda s, b: train_step(spec, s, b))(state, batch)
    found: dict[str, Any] = {
        "mesh": dict(mesh.shape),
        "device_kind": str(getattr(devices[0], "device_kind", "unknown")),
        "traced_matmul_flops": traced_matmul_flops(traced),
        "largest_arrays": largest_arrays(traced, mesh.size),
    }
    start, wall = time.process_time(), time.monotonic()
    try:
        lowered = jit_step(spec).lower(state, batch)
        found["lower_cpu_seconds"] = round(time.process_time() - start, 1)
        kernels = kernels_given(lowered)
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as e:
        if not any(mark in str(e) for mark in OVERSIZE_MARKS):
            raise
        return {**found, "compiled": False, "why": str(e).partition("\n")[0], **_took(start, wall)}
    memory, cost = program.memory_analysis(), program.cost_analysis() or {}
    return {
        **found,
        "compiled": True,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "host_temporary_bytes": memory.host_temp_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "program_bytes": memory.generated_code_size_in_bytes,
        "splash_calls": kernels,
        "splash_calls_compiled": splash_calls(program),
        "xla_flops_loop_bodies_once": cost.get("flops"),
        **_took(start, wall),
    }


def kernels_given(lowered: Any) -> int:
    """Attention kernels in the program given to the compiler, a loop's body once. Raises RecipeError when there is none."""
    found = int(lowered.as_text().count(SPLASH_MARK))
    if found == 0:
        raise RecipeError(
            "the step for the TPU holds no splash attention kernel, so its plan would be of another program",
            "see model/attention.py: numerics.attention is `splash` in every plan",
        )
    return found


@contextlib.contextmanager
def stderr_without(mark: str) -> Iterator[None]:
    """Hold back what this process writes to descriptor 2, native code included, while the block runs.

    All of it is written afterwards, unless the block fails with a JaxRuntimeError that holds `mark`: what was said about
    that one is dropped. The error itself is passed on.
    """
    import jax

    sys.stderr.flush()
    real, known = os.dup(2), False
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except jax.errors.JaxRuntimeError as e:
            known = mark in str(e)
            raise
        finally:
            sys.stderr.flush()
            os.dup2(real, 2)
            os.close(real)
            if not known:
                held.seek(0)
                with open(2, "wb", closefd=False) as shown:
                    shown.write(held.read())


def splash_calls(program: Any) -> int | None:
    """Attention kernels (Pallas custom calls) in the compiled program; a loop's body counts once.

    None where jaxlib cannot read its own program back: 0.10.2 fails on the asynchronous updates of large ones. The stack
    trace that XLA writes about that is kept off the screen.
    """
    import jax

    try:
        with stderr_without(UNREADABLE_MARK):
            modules = program.runtime_executable().hlo_modules()
    except jax.errors.JaxRuntimeError as e:
        if UNREADABLE_MARK not in str(e):
            raise
        return None
    return sum(m.as_serialized_hlo_module_proto().count(SPLASH_MARK.encode()) for m in modules)


def _took(start: float, wall: float) -> dict[str, float]:
    """CPU and wall seconds since `start` and `wall`, and the highest memory of this process so far in bytes."""
    return {
        "compile_cpu_seconds": round(time.process_time() - start, 1),
        "compile_seconds": round(time.monotonic() - wall, 1),
        "compile_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def describe(
    request: PlanRequest, slice_: Slice, compiled: dict[str, Any], price_per_chip_hour: float | None
) -> dict[str, Any]:
    """Figures of the plan. Bytes and FLOPs are per device where they say so; times are lower bounds in seconds."""
    from model.layout import count_params

    flops = step_flops(
        request.model, request.sequence_length, request.global_batch_instances, request.numerics.remat
    )
    params = count_params(request.model)
    tokens = request.sequence_length * request.global_batch_instances
    fits = bool(compiled["compiled"])
    total = 0
    if fits:
        total = (
            compiled["argument_bytes"]
            + compiled["temporary_bytes"]
            + compiled["output_bytes"]
            - compiled["alias_bytes"]
            + compiled["program_bytes"]
        )
        fits = total <= slice_.memory_per_device
    times = roofline(request, slice_, compiled["mesh"], flops.hardware, params)
    seconds = max(times.values())
    days = seconds * request.train.steps / 86400
    return {
        "topology": slice_.name,
        "chips": slice_.chips,
        "hosts": slice_.hosts,
        "devices": slice_.devices,
        "remat": request.numerics.remat,
        "micro_batch_instances": request.train.micro_batch_instances or request.global_batch_instances,
        "fits": fits,
        "bytes_per_device": total,
        "memory_per_device": slice_.memory_per_device,
        "parameters": params,
        "tokens_per_step": tokens,
        "model_flops": flops.model,
        "hardware_flops": flops.hardware,
        "traced_over_formula": compiled["traced_matmul_flops"] / (flops.matmul + flops.recomputed_matmul),
        "roofline": times,
        "bytes_moved": {
            "hbm": times["hbm"] * slice_.type.memory_bandwidth / slice_.type.devices_per_chip,
            "links": times["links"] * slice_.type.link_bandwidth / slice_.type.devices_per_chip,
        },
        "step_seconds": seconds,
        "bound_by": max(times, key=lambda k: times[k]),
        "mfu_bound": flops.model / (seconds * slice_.flops_per_device * slice_.devices),
        "tokens_per_second": tokens / seconds,
        "days": days,
        "price": None if price_per_chip_hour is None else days * 24 * slice_.chips * price_per_chip_hour,
        "checkpoint_bytes": params * STATE_BYTES_PER_PARAM,
        "checkpoint_bytes_per_second": params
        * STATE_BYTES_PER_PARAM
        / (seconds * request.train.checkpoint_every),
        **compiled,
    }


def roofline(
    request: PlanRequest, slice_: Slice, mesh: dict[str, int], hardware_flops: float, params: int
) -> dict[str, float]:
    """Seconds that compute, HBM and links each need at least for one step, perfectly overlapped otherwise.

    HBM: per micro-batch the bf16 weights are read in the forward, the backward and, with rematerialisation, the
    repeated forward pass; the optimizer reads and writes 12 bytes of state and reads the gradient once.

    Links, bytes sent by one device per micro-batch, with rings and P parameters, b bytes per weight and activation:
    - fsdp: P / tensor * (fsdp - 1) / fsdp * (passes * b + 4): weights gathered as often as read, fp32 gradients scattered.
    - data: 2 (data - 1) / data * 4 P / (fsdp tensor): all-reduce of the scattered fp32 gradients.
    - tensor: 2 (tensor - 1) / tensor * tokens * d_model * b per all-reduce of activations, `tokens` those of one batch
      shard; a layer has two of them (attention, MLP) forward, two backward, two per repeated forward pass.
    Assumed: nothing is sent twice, the axes share all links of the chip one after another, and the head and (with offload)
    the way to host memory cost nothing. So it stays a lower bound.
    """
    micro = request.train.micro_batch_instances or request.global_batch_instances
    rounds = request.global_batch_instances // micro
    again = sum(forwards_again(request.model, request.numerics.remat))
    passes = 2 + again / request.model.n_layers
    weight_bytes = 2 if request.numerics.mode == "mixed" else 4
    data, fsdp, tensor = mesh["data"], mesh["fsdp"], mesh["tensor"]
    local = params / tensor
    hbm = rounds * passes * local * weight_bytes + (2 * STATE_BYTES_PER_PARAM + 4) * params / (fsdp * tensor)
    ring = (fsdp - 1) / fsdp
    by_fsdp = ring * local * (passes * weight_bytes + 4)
    by_data = 2 * (data - 1) / data * 4 * local / fsdp
    activations = micro * request.sequence_length / (data * fsdp) * request.model.d_model * weight_bytes
    by_tensor = 2 * (tensor - 1) / tensor * activations * (4 * request.model.n_layers + 2 * again)
    links = rounds * (by_fsdp + by_data + by_tensor)
    per_device = slice_.type.devices_per_chip
    return {
        "compute": hardware_flops / (slice_.flops_per_device * slice_.devices),
        "hbm": hbm / (slice_.type.memory_bandwidth / per_device),
        "links": links / (slice_.type.link_bandwidth / per_device),
    }


@dataclasses.dataclass(frozen=True)
class Range:
    """What `--sweep` tries: tensor axes (fsdp takes the rest), rematerialisation policies, micro-batches per step."""

    tensors: tuple[int, ...] = (1, 2, 4)
    remats: tuple[str, ...] = ("none", "dots", "block", "full")
    splits: tuple[int, ...] = (1, 4)


def choices(request: PlanRequest, slice_: Slice, over: Range = Range()) -> list[PlanRequest]:
    """The choices of `over` whose batch and heads divide over the slice."""
    found = []
    for tensor in over.tensors:
        if slice_.devices % tensor or request.model.n_kv_heads % tensor:
            continue
        mesh = MeshConfig(data=1, fsdp=0, tensor=tensor)
        shards = slice_.devices // tensor
        if request.global_batch_instances % shards:
            continue
        for remat in over.remats:
            for parts in over.splits:
                micro = request.global_batch_instances // parts
                if request.global_batch_instances % parts == 0 and micro % shards == 0:
                    found.append(request.with_choice(mesh, remat, 0 if parts == 1 else micro))
    return found


def sweep(
    request: PlanRequest,
    slice_: Slice,
    over: Range = Range(),
    **options: Any,
) -> tuple[list[dict[str, Any]], list[tuple[PlanRequest, str]]]:
    """(ranked plans of all choices, what the model refuses and why). `options`: those of `make_plan`."""
    plans, refused = [], []
    wanted = choices(request, slice_, over)
    if not wanted:
        raise RecipeError(
            f"no mesh of {slice_.devices} devices divides a global batch of {request.global_batch_instances} instances",
            "choose a smaller slice or a larger data.global_batch_instances",
        )
    progress = Progress("plan", len(wanted), "choices")
    for done, choice in enumerate(wanted, 1):
        try:
            plans.append(make_plan(choice, slice_, **options))
        except RecipeError as e:
            refused.append((choice, str(e)))
        progress.update(done)
    progress.finish(f"{sum(p['fits'] for p in plans)} of {len(wanted)} fit")
    return rank(plans), refused


def rank(plans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Plans that fit, fastest first, then those that do not, nearest to fitting first."""
    return sorted(
        plans,
        key=lambda p: (not p["fits"], p["step_seconds"] if p["fits"] else p["bytes_per_device"] or math.inf),
    )


def text(plan: dict[str, Any], steps: int) -> str:
    """The plan for a person."""
    gib = 2**30
    lines = [
        f"{plan['topology']}: {plan['chips']} chips, {plan['hosts']} hosts, {plan['devices']} devices; mesh "
        + " x ".join(f"{k}={v}" for k, v in plan["mesh"].items()),
        f"remat {plan['remat']}, micro-batch {plan['micro_batch_instances']} instances, {plan['parameters']:,} parameters",
    ]
    if plan["compiled"]:
        lines += [
            f"memory per device  {plan['bytes_per_device'] / gib:.2f} of {plan['memory_per_device'] / gib:.0f} GiB "
            f"(arguments {plan['argument_bytes'] / gib:.2f}, temporaries {plan['temporary_bytes'] / gib:.2f}): "
            + ("fits" if plan["fits"] else "NOT FIT"),
            f"attention kernels  {plan['splash_calls']} Pallas calls given to the compiler, "
            + ("not counted" if plan["splash_calls_compiled"] is None else str(plan["splash_calls_compiled"]))
            + " in the compiled program",
        ]
    else:
        lines += [
            f"memory per device  NOT FIT in {plan['memory_per_device'] / gib:.0f} GiB: {plan['why']}",
        ]
    if not plan["fits"]:
        lines += [
            "largest arrays     per device, if split evenly:",
            *(
                f"  {a['bytes'] / gib:8.2f} GiB  {a['array']}  {a['made_by']} at {a['where']}"
                for a in plan["largest_arrays"]
            ),
        ]
    r = plan["roofline"]
    lines += [
        f"FLOPs per step     {plan['model_flops']:.4g} (with recomputation {plan['hardware_flops']:.4g}; "
        f"traced / formula {plan['traced_over_formula']:.4f})",
        f"roofline           {plan['step_seconds']:.2f} s per step, bound by {plan['bound_by']} "
        f"(compute {r['compute']:.2f}, HBM {r['hbm']:.2f}, links {r['links']:.2f} s)",
        f"bytes moved        per device and step at least {plan['bytes_moved']['hbm'] / gib:.2f} GiB of HBM, "
        f"{plan['bytes_moved']['links'] / gib:.2f} GiB over links",
        f"at that bound      MFU {plan['mfu_bound']:.1%}, {plan['tokens_per_second']:,.0f} tokens/s, "
        f"{plan['days']:.1f} days for {steps:,} steps",
        f"price              {'unknown' if plan['price'] is None else format(plan['price'], ',.0f') + ' USD'}",
        f"checkpoint         {plan['checkpoint_bytes'] / gib:.1f} GiB each, {plan['checkpoint_bytes_per_second'] / 2**20:.1f} MiB/s on average",
        f"compiled in        {plan['compile_seconds']:.0f} s ({plan['compile_cpu_seconds']:.0f} CPU s)",
    ]
    return "\n".join(lines)
