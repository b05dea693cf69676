"""Run by test_mesh.py in a process with 8 host devices: every mesh case, results as JSON on stdout."""

import functools
import json
import sys
from pathlib import Path

import jax
import numpy as np

from model import checkpoint, sharding
from model import step as step_lib
from model.config import (
    HistoryConfig,
    LayerKind,
    LossConfig,
    MeshConfig,
    ModelConfig,
    NumericsConfig,
    OptimizerConfig,
    ScheduleConfig,
    SchedulePart,
)  # fmt: skip
from model.layout import count_params, map_axes

# Two scanned sliding layers and a full one as tail: every way a parameter can be stacked, in few operations.
CFG = ModelConfig(d_model=32, n_layers=3, n_heads=4, n_kv_heads=4, head_dim=8, d_ff=64, vocab_size=250,
                  padded_vocab_size=256, window=8, layer_pattern=(LayerKind.SLIDING,))  # fmt: skip
MESHES = {"2": (1, 2, 1), "4": (1, 4, 1), "8": (1, 8, 1), "2x2x2": (2, 2, 2)}
SCHEDULE = ScheduleConfig(parts=(SchedulePart(kind="cosine", peak=1e-3, warmup=2, horizon=8),))
B, S = 16, 16


def spec_for(shape):
    """Four devices also accumulate over micro-batches of 4 rows."""
    data, fsdp, tensor = shape
    devices = jax.devices()[: data * fsdp * tensor]
    mesh = sharding.make_mesh(MeshConfig(data=data, fsdp=fsdp, tensor=tensor), devices)
    return step_lib.StepSpec(CFG, OptimizerConfig(), LossConfig(reference_ranks=2),
                             NumericsConfig(loss_slice_tokens=64), mesh,
                             micro_batch_instances=4 if mesh.size == 4 else 0)  # fmt: skip


def batch_of(spec, s):
    rng = np.random.default_rng(s)
    mask = np.ones(B, bool)
    mask[[1, 6, 7]] = False  # ranks with different denominators
    numbers = step_lib.control(SCHEDULE, spec.optimizer, HistoryConfig(), s)
    batch = step_lib.host_batch(rng.integers(0, 250, (B, S)), mask, numbers)
    return jax.device_put(batch, step_lib.batch_shardings(spec))


@functools.lru_cache
def program(spec):
    step = step_lib.jit_step(spec)
    return step.lower(step_lib.abstract_state(spec), step_lib.abstract_batch(spec, B, S)).compile()


def run(spec, state, first, last):
    """(state, log, Adam's first moment after the first step: the clipped gradient times 0.1)."""
    log, moment = [], None
    for s in range(first, last + 1):
        state, m = program(spec)(state, batch_of(spec, s))
        log.append([float(m[k]) for k in ("ce", "z_loss", "grad_norm")])
        moment = jax.tree.map(np.array, state["opt"]["m"]) if moment is None else moment
    return state, log, moment


def save(root, step, state):
    meta = {"model": CFG.model_dump(mode="json"), "receipt": {"step": step, "digest": "ab" * 32}}
    with checkpoint.Saver(root) as saver:
        saver.save(step, state, meta)


def moved(root, shape, params):
    """The whole state from 8 devices to `shape` and back: digests on the way, and bytes of the fullest device."""
    eight, there = spec_for((1, 8, 1)), spec_for(shape)
    state = step_lib.new_state(eight, params, HistoryConfig(adam_count_at_start=1))
    state, _, _ = run(eight, state, 1, 2)  # moments, count and window are no longer empty
    save(root, 2, state)
    other, meta = checkpoint.restore(root, 2, step_lib.abstract_state(there))
    save(root / "there", 2, other)
    back, again = checkpoint.restore(root / "there", 2, step_lib.abstract_state(eight))
    held = sharding.bytes_per_device(other)
    return {"digests": [checkpoint.state_digest(tree) for tree in (state, other, back)],
            "receipts": [m["receipt"]["digest"] for m in (meta, again)], "devices": len(held),
            "held": [min(held.values()), max(held.values())], "shards": [shape[1], shape[2]],
            "window": int(other["opt"]["window"]["seen"]), "moment": float(np.abs(other["opt"]["v"]["lm_head"]).max()),
            "small": sum(x.nbytes for x in jax.tree.leaves([other["opt"]["window"], other["opt"]["count"], other["step"]]))}  # fmt: skip


def worst(a, b):
    pairs = zip(jax.tree.leaves(jax.device_get(a)), jax.tree.leaves(jax.device_get(b)))
    return max(float(np.abs(x - y).max() / (np.abs(y).max() + 1e-30)) for x, y in pairs)


def main(root):
    rng = np.random.default_rng(0)
    params = map_axes(
        lambda path, axes, shape: np.float32(0.02 * rng.standard_normal(shape) + ("norm" in path[-1])), CFG
    )
    out = {"cases": {}, "variants": {}}
    one = spec_for((1, 1, 1))
    straight, out["straight"], base = run(one, step_lib.new_state(one, params, HistoryConfig()), 1, 3)
    for name, shape in MESHES.items():
        spec = spec_for(shape)
        state = step_lib.new_state(spec, params, HistoryConfig())
        held = sharding.bytes_per_device(state["params"])
        state, log, moment = run(spec, state, 1, 2)
        out["cases"][name] = {"gradient": worst(moment, base), "log": log, "held": max(held.values()),
                              "parameters": 4 * count_params(CFG), "shards": [shape[1], shape[2]],
                              "table": 4 * CFG.padded_vocab_size * CFG.d_model,
                              "gains": 4 * CFG.d_model * (4 * CFG.n_layers + 1)}  # fmt: skip
    # Elastic: 8 -> 2 -> 4 devices in one run, through checkpoints.
    state, step, log = None, 0, []
    for shape in ((1, 8, 1), (1, 2, 1), (1, 4, 1)):
        spec = spec_for(shape)
        if state is None:
            state = step_lib.new_state(spec, params, HistoryConfig())
        else:
            state, _ = checkpoint.restore(root, step, step_lib.abstract_state(spec))
        state, part, _ = run(spec, state, step + 1, step + 1)
        step, log = step + 1, log + part
        save(root, step, state)
    out["elastic"] = log
    out["moved"] = {
        name: moved(root / name, shape, params) for name, shape in {"1": (1, 1, 1), **MESHES}.items()
    }
    out["elastic weights"] = worst(state["params"], straight["params"])
    print(json.dumps(out))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
