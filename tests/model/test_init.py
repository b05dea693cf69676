"""Step-0 weights: distribution and draw order of OLMo-core; its own CPU draw against the sheet's goldens (A8)."""

import jax
import numpy as np
import pytest

from model import layout
from model.config import ModelConfig
from model.init import draw_order, init_params

CFG = ModelConfig(d_model=64, n_layers=5, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=256, vocab_size=4096,
                  padded_vocab_size=4096, window=4)  # fmt: skip


def test_distribution():
    params = init_params(CFG)
    for path, leaf in layout.leaves(params):
        if path[-1].endswith("norm"):
            assert (leaf == 1).all()
            continue
        n = leaf.size
        assert abs(leaf.std() - 0.0197316) < 4 * 0.02 / np.sqrt(2 * n), (
            path
        )  # no depth scaling, no correction
        assert abs(leaf.mean()) < 4 * 0.02 / np.sqrt(n), path
        assert np.abs(leaf).max() <= 0.06
    assert not np.array_equal(params["embeddings"], params["lm_head"])


def test_draws_are_numbered():
    """Matrix n depends on (seed, n) only; another seed gives other weights; the same seed the same bits."""
    order = draw_order(CFG)
    assert [p[-1] for p, _, _ in order[1:8]] == ["w_q", "w_k", "w_v", "w_out", "w1", "w3", "w2"]
    assert order[0][0] == ("embeddings",) and order[-1][0] == ("lm_head",)
    a, b = init_params(CFG), init_params(CFG)
    assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))
    assert not np.array_equal(a["lm_head"], init_params(CFG, 1)["lm_head"])


def test_draw_order_is_the_reference_order(ref):
    """OLMo-core's own init, its generator replayed in our draw order, gives its weights: same matrices, same order."""
    import torch

    model = ref.core_config(CFG).build(init_device="cpu")
    model.init_weights(device=torch.device("cpu"), max_seq_len=16)
    theirs = ref.core_weights(CFG, model)
    g = torch.Generator("cpu").manual_seed(CFG.init_seed)
    for path, index, shape in draw_order(CFG):
        drawn = torch.nn.init.trunc_normal_(
            torch.empty(shape), mean=0.0, std=0.02, a=-0.06, b=0.06, generator=g
        ).numpy()
        have = layout.get(theirs, path)
        assert np.array_equal(have if index is None else have[index], drawn), path


@pytest.mark.slow_proof
def test_goldens_of_the_190m():
    import torch
    from olmo_core.nn.attention import AttentionBackendName
    from olmo_core.nn.transformer import TransformerConfig

    config = TransformerConfig.olmo3_190M(vocab_size=100352, attn_backend=AttentionBackendName.torch)
    model = config.build(init_device="cpu")
    model.init_weights(device=torch.device("cpu"), max_seq_len=16)
    state = model.state_dict()
    goldens = {
        "embeddings.weight": [-0.022516796365380287, -0.023047203198075294, -0.005011571571230888],
        "blocks.0.attention.w_q.weight": [
            -0.0028571118600666523,
            0.011026166379451752,
            -0.004354082979261875,
        ],
        "blocks.0.feed_forward.w2.weight": [0.0456354133784771, 0.03544745221734047, -0.025438779965043068],
        "lm_head.w_out.weight": [-0.009284182451665401, -0.0005625541671179235, -0.025684095919132233],
    }
    for name, want in goldens.items():
        np.testing.assert_allclose(state[name][0, :3].numpy(), want, rtol=1e-7)
