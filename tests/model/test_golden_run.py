"""The 8-step golden run of the sheet, section 9.1: OLMo-core's own trainer, fp32, CPU. rtol 1e-5."""

import functools

import jax
import numpy as np
import pytest

from model import olmo3
from model import step as step_lib
from model.config import (
    HistoryConfig,
    LossConfig,
    MeshConfig,
    NumericsConfig,
    OptimizerConfig,
    ScheduleConfig,
    SchedulePart,
)  # fmt: skip
from model.sharding import make_mesh

RUN = [  # LR, CE, Z, grad norm
    (5.0e-4, 5.560113906860352, 3.0893011717e-4, 5.233689308166504),
    (1.0e-3, 5.466424942016602, 3.0903291190e-4, 4.941889762878418),
    (9.397114317e-4, 5.435764312744141, 3.0771264574e-4, 5.2968573570251465),
    (7.75e-4, 5.3542280197143555, 3.0637154123e-4, 3.198786497116089),
    (5.5e-4, 5.250004768371582, 3.0405877624e-4, 2.562354564666748),
    (3.25e-4, 5.284604072570801, 3.0279692146e-4, 3.0407638549804688),
    (1.602885683e-4, 5.225644588470459, 3.0065391911e-4, 2.016326427459717),
    (1.0e-4, 5.220999717712402, 3.0002454878e-4, 2.0598855018615723),
]
OPT = OptimizerConfig()
SCHEDULE = ScheduleConfig(parts=(SchedulePart(kind="cosine", peak=1e-3, warmup=2, horizon=8),))


def instances():
    i = np.arange(16 * 64 + 5, dtype=np.int64)
    return ((31 * i * i + 7 * i + 3) % 250).astype(np.uint32)[: 16 * 64].reshape(64, 16)


def order():
    ids = np.arange(64, dtype=np.uint32)
    np.random.Generator(np.random.PCG64(34521 + 1)).shuffle(ids)
    return ids


@functools.lru_cache
def program(spec):
    return step_lib.jit_step(spec)


def run(cfg, params, rows, mask_of, micro=0, devices=1):
    mesh = make_mesh(MeshConfig(), jax.devices()[:devices])
    spec = step_lib.StepSpec(cfg, OPT, LossConfig(), NumericsConfig(), mesh, micro)
    state = step_lib.new_state(spec, params, HistoryConfig())
    step, out, ids = program(spec), [], order()
    for s in range(1, 9):
        batch_ids = ids[(s - 1) * 4 : s * 4]
        numbers = step_lib.control(SCHEDULE, OPT, HistoryConfig(), s)
        batch = step_lib.host_batch(rows[batch_ids], np.array([mask_of(i) for i in batch_ids]), numbers)
        state, m = step(state, jax.device_put(batch, step_lib.batch_shardings(spec)))
        out.append([float(numbers[0])] + [float(m[k]) for k in ("ce", "z_loss", "grad_norm")])
    return state, np.array(out)


@pytest.mark.parametrize("micro", [0, 2])
def test_eight_steps(golden_cfg, golden_params, micro):
    logits = jax.jit(olmo3.logits, static_argnums=(1, 2))(
        golden_params, golden_cfg, NumericsConfig(), instances()[order()[:4]].astype(np.int32)
    )
    first = [0.07347547262907028, -0.180484339594841, 0.29364001750946045]
    last = [-0.08411171287298203, -0.21804165840148926, 0.15110325813293457]
    np.testing.assert_allclose(logits[0, 0, :3], first, rtol=1e-5)
    np.testing.assert_allclose(logits[3, 15, :3], last, rtol=1e-5)
    state, got = run(golden_cfg, golden_params, instances(), lambda i: True, micro)
    np.testing.assert_allclose(got, np.array(RUN), rtol=1e-5)
    p = state["params"]
    embed = [0.002514604479074478, -0.002642097184434533, 0.012808453291654587]
    np.testing.assert_allclose(
        p["embeddings"][0, :3], embed, rtol=1e-6
    )  # never an input: neither decay nor update
    w_q = p["blocks"]["layer_0"]["w_q"][0]
    np.testing.assert_allclose(
        w_q.ravel()[:3], [0.009267223067581654, 0.01563996821641922, 0.009656623005867004], rtol=1e-5
    )
    np.testing.assert_allclose(np.linalg.norm(w_q), 1.289770723319184, rtol=1e-5)
    np.testing.assert_allclose(
        p["lm_head"].ravel()[:3],
        [-0.0099740419536829, 0.020447291433811188, -0.002877764403820038],
        rtol=1e-5,
    )
    np.testing.assert_allclose(np.linalg.norm(p["lm_head"]), 2.569344037479551, rtol=1e-5)
    gain = p["blocks"]["layer_3"]["feed_forward_norm"][0, :3]
    np.testing.assert_allclose(gain, [1.0006870031356812, 1.0000633001327515, 0.9986286163330078], rtol=1e-5)


def test_repeated_instance_without_filter(golden_cfg, golden_params):
    rows = instances()
    rows[23] = 7
    _, got = run(golden_cfg, golden_params, rows, lambda i: True)
    np.testing.assert_allclose(got[0, [1, 3]], [5.576083183288574, 10.444375991821289], rtol=1e-5)


def test_repeated_instance_with_filter(golden_cfg, golden_params):
    rows = instances()
    rows[23] = 7
    _, got = run(golden_cfg, golden_params, rows, lambda i: i != 23)
    np.testing.assert_allclose(got[0, 1:], [4.09060001373291, 2.2793523e-4, 4.487119674682617], rtol=1e-5)
    np.testing.assert_allclose(got[7, 1], 5.242976188659668, rtol=1e-5)
