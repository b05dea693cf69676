"""The step itself: rematerialisation and accumulation change nothing, nothing recompiles, state is donated."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from infra.errors import RecipeError
from model import olmo3
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
from model.sharding import make_mesh

# Two scanned sliding layers and a full one after the scan.
CFG = ModelConfig(d_model=32, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=64, vocab_size=250,
                  padded_vocab_size=256, window=8, layer_pattern=(LayerKind.SLIDING,))  # fmt: skip
SCHEDULE = ScheduleConfig(parts=(SchedulePart(kind="cosine", peak=1e-3, warmup=2, horizon=8),))


def spec_for(**numerics):
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    return step_lib.StepSpec(CFG, OptimizerConfig(), LossConfig(reference_ranks=2),
                             NumericsConfig(loss_slice_tokens=64, **numerics), mesh)  # fmt: skip


def batch_of(spec, s=1):
    mask = np.ones(8, bool)
    mask[[1, 6]] = False
    tokens = np.random.default_rng(s).integers(0, 250, (8, 16))
    return step_lib.host_batch(tokens, mask, step_lib.control(SCHEDULE, spec.optimizer, HistoryConfig(), s))


QUICK = {"xla_backend_optimization_level": 0}  # the same operations, in machine code that is not optimised


def gradients(spec, params):
    batch = batch_of(spec)
    program = jax.jit(lambda p, b: step_lib.gradients(spec, p, b)).lower(params, batch).compile(QUICK)
    return jax.device_get(program(params, batch))


@functools.lru_cache
def program(spec):
    return step_lib.jit_step(spec)


def gap(a, b):
    """Largest relative L2 distance over the tensors."""
    return max(
        np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b))
    )


def test_remat_and_accumulation_change_nothing(ref):
    params = ref.random_params(CFG)
    want, parts = gradients(spec_for(), params)
    for remat in ("dots", "block", "full", "offload"):
        got, _ = gradients(spec_for(remat=remat), params)
        assert gap(got, want) <= 2e-6, remat
    # L1: denominators of the whole batch, also with masked instances
    got, split = gradients(dataclasses.replace(spec_for(), micro_batch_instances=2), params)
    assert gap(got, want) <= 2e-6
    assert float(split["ce"]) == pytest.approx(float(parts["ce"]), rel=1e-6)


def test_remat_saves_memory():
    """Temporaries shrink from `none` over `block` to `full`; read from the compiled program, nothing is run."""
    deep = CFG.model_copy(update={"n_layers": 13, "layer_pattern": (LayerKind.SLIDING,) * 2})
    temps = {}
    for remat in ("none", "block", "full"):
        spec = dataclasses.replace(spec_for(remat=remat), model=deep)
        f = jax.jit(lambda p, b, spec=spec: step_lib.gradients(spec, p, b)[0])
        lowered = f.lower(olmo3.abstract_params(deep), step_lib.abstract_batch(spec, 8, 128))
        temps[remat] = lowered.compile(QUICK).memory_analysis().temp_size_in_bytes
    assert temps["full"] < temps["block"] < 0.7 * temps["none"], temps


def test_offload_without_host_memory_is_refused():
    from types import SimpleNamespace

    device = SimpleNamespace(device_kind="x", addressable_memories=lambda: [SimpleNamespace(kind="device")])
    mesh = SimpleNamespace(devices=np.array([device]))
    with pytest.raises(RecipeError, match=r"pinned_host(.|\n)*remat=block"):
        step_lib.check_remat(dataclasses.replace(spec_for(remat="offload"), mesh=mesh))


def test_no_compilation_after_the_first_step(ref):
    from jax._src import monitoring

    spec = spec_for()
    state = step_lib.new_state(spec, ref.random_params(CFG), HistoryConfig())
    step, events = program(spec), []
    state, _ = step(state, jax.device_put(batch_of(spec, 1), step_lib.batch_shardings(spec)))
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_a, **_k: events.append(name))
    try:
        with jax.transfer_guard("disallow"):
            for s in range(2, 8):
                state, m = step(state, jax.device_put(batch_of(spec, s), step_lib.batch_shardings(spec)))
                jax.device_get(m)
        assert not [e for e in events if "compile" in e], events
    finally:
        monitoring.unregister_event_duration_listener(monitoring.get_event_duration_listeners()[-1])


def test_donated_state_is_reused(ref):
    spec = spec_for()
    state = step_lib.new_state(spec, ref.random_params(CFG), HistoryConfig())
    program(spec)(state, jax.device_put(batch_of(spec), step_lib.batch_shardings(spec)))
    assert state["params"]["lm_head"].is_deleted()


def test_master_weights_and_moments_are_float32_in_mixed():
    spec = spec_for(mode="mixed")
    out = jax.eval_shape(lambda s, b: step_lib.train_step(spec, s, b), step_lib.abstract_state(spec),
                         step_lib.abstract_batch(spec, 8, 16))  # fmt: skip
    kinds = {
        str(leaf.dtype)
        for leaf in jax.tree.leaves((out[0]["params"], out[0]["opt"]["m"], out[0]["opt"]["v"]))
    }
    assert kinds == {"float32"}
