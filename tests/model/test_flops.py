"""Two independent FLOP counts agree; goldens by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.config import SIZES, LayerKind, LossConfig, ModelConfig, NumericsConfig, OptimizerConfig
from model.flops import largest_arrays, step_flops, traced_matmul_flops, visible_keys


@pytest.mark.parametrize(("window", "sequence"), [(4, 10), (10, 10), (64, 10), (1, 7)])
def test_visible_keys_is_the_mean_over_queries(window, sequence):
    seen = [min(i + 1, window) for i in range(sequence)]
    assert visible_keys(LayerKind.SLIDING, window, sequence) == pytest.approx(np.mean(seen), rel=1e-15)
    assert visible_keys(LayerKind.FULL, window, sequence) == (sequence + 1) / 2


def test_7b_is_six_flops_per_weight_and_token_plus_attention():
    """Non-embedding weights of the sheet (6,887,575,552) less the norm gains, times 6 per token."""
    cfg = SIZES["7B"]
    gains = 32 * 4 * 4096 + 4096
    found = step_flops(cfg, 8192, 512)
    assert found.matmul == 6 * (6_887_575_552 - gains) * 8192 * 512
    assert 0.05 < found.attention / found.matmul < 0.15


def test_walking_a_program_multiplies_loops():
    def program(x):
        def body(c, _):
            return c @ c, None

        return jax.lax.scan(body, x, None, length=5)[0]

    assert traced_matmul_flops(jax.make_jaxpr(program)(jnp.ones((8, 8)))) == 5 * 2 * 8**3


def test_walking_a_program_counts_every_device_of_a_shard_map():
    """Inside a shard_map shapes are of one device: 4 devices, each multiplying [2,8] x [8,8]."""
    mesh, spec = jax.sharding.AbstractMesh((4,), ("x",)), jax.sharding.PartitionSpec("x")
    whole = jax.sharding.PartitionSpec()
    program = jax.shard_map(lambda a, b: a @ b, mesh=mesh, in_specs=(spec, whole), out_specs=spec)
    jaxpr = jax.make_jaxpr(program)(jnp.ones((8, 8)), jnp.ones((8, 8)))
    assert traced_matmul_flops(jaxpr) == 2 * 8**3
    (product,) = [a for a in largest_arrays(jaxpr, 4) if a["made_by"] == "dot_general"]
    assert (
        product["bytes"] == 2 * 8 * 4
        and product["array"].startswith("float32[2,8]")
        and "test_flops.py" in product["where"]
    )


@pytest.mark.parametrize("remat", ["none", "block", "full", "offload"])
def test_traced_step_equals_the_formula(remat):
    """The real step on one device; attention's products are what the xla back-end computes, so they are left out
    by comparing two widths of window through their difference from the formula's matmul part."""
    from model import sharding
    from model.config import MeshConfig
    from model.step import StepSpec, abstract_batch, abstract_state, train_step

    cfg = ModelConfig(
        d_model=64, n_layers=8, n_heads=1, n_kv_heads=1, head_dim=2, d_ff=128, window=32, vocab_size=512, padded_vocab_size=512
    )  # fmt: skip
    mesh = sharding.make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
    spec = StepSpec(cfg, OptimizerConfig(), LossConfig(), NumericsConfig(remat=remat), mesh)
    traced = traced_matmul_flops(
        jax.make_jaxpr(lambda s, b: train_step(spec, s, b))(abstract_state(spec), abstract_batch(spec, 2, 64))
    )
    formula = step_flops(cfg, 64, 2, remat)
    # Head width 2 makes attention a small part; the xla back-end computes masked scores too, at most S/visible more.
    layers_again = formula.recomputed
    assert traced == pytest.approx(formula.matmul + layers_again, rel=0.06)
    assert traced > formula.matmul
