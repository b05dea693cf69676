"""RoPE tables: bits and goldens of sheet section 1.4."""

import numpy as np

from model.config import LayerKind, ModelConfig, YarnConfig, olmo3_size
from model.rope import attention_factor, inv_freq, inv_freq_hash, layer_scaling, tables

YARN = YarnConfig()


def test_bits_of_the_frequencies():  # A6
    assert inv_freq_hash(inv_freq(128, 5e5)) == "dde15c3172417735"
    assert inv_freq_hash(inv_freq(64, 5e5)) == "74e0a468b5f62fef"
    assert inv_freq_hash(inv_freq(128, 5e5, YARN)) == "5a9c67822afb0535"


def test_goldens():
    f = inv_freq(128, 5e5)
    want = {1: 0.8146172165870667, 2: 0.663601279258728, 32: 0.001414213445968926, 63: 2.4551407022954663e-06}
    assert {k: float(f[k]) for k in want} == want
    y = inv_freq(128, 5e5, YARN)  # X2: frequencies are scaled by a ramp, not positions
    np.testing.assert_allclose(
        y[[20, 30, 63]], [0.01485569030046463, 0.000814839790109545, 3.068925877869333e-07], rtol=1e-7
    )
    np.testing.assert_array_equal(y[:18], f[:18])
    np.testing.assert_array_equal(y[36:], f[36:] / np.float32(8))


def test_position_8191():
    cos, _ = tables(olmo3_size("7B"), LayerKind.FULL, 8192)
    want = [-0.6463904976844788, 0.9773988127708435, 0.5549043416976929, 0.9997978210449219]
    np.testing.assert_allclose(cos[8191, [0, 1, 32, 63]], want, rtol=2e-7)


def test_yarn_is_on_full_layers_only():  # A7, M9
    cfg = olmo3_size("7B").model_copy(update={"rope_scaling": YARN})
    assert layer_scaling(cfg, LayerKind.SLIDING) is None and layer_scaling(cfg, LayerKind.FULL) == YARN
    plain, scaled = tables(cfg, LayerKind.SLIDING, 4), tables(cfg, LayerKind.FULL, 4)
    np.testing.assert_allclose(scaled[0][0], plain[0][0] * 1.2079441541679836, rtol=1e-7)
    assert abs(attention_factor(YARN) ** 2 - 1.45913) < 1e-5


def test_tables_equal_torch():
    import torch

    f = torch.tensor(inv_freq(64, 5e5))
    angle = torch.outer(torch.arange(8192, dtype=torch.float32), f)
    cfg = ModelConfig(d_model=64, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=64, d_ff=8)
    cos, sin = tables(cfg, LayerKind.SLIDING, 8192)
    for ours, theirs in ((cos, angle.cos()), (sin, angle.sin())):
        assert np.abs(ours - theirs.numpy()).max() <= 1.2e-7
