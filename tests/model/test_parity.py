"""Block parity, then model parity, against OLMo-core (torch) and HF transformers, fp32 on CPU.

Tolerance: fp32 rounding. 2e-6 absolute on values of order 1 for a block, 2e-5 on logits. Prompts exceed the window.
"""

import jax
import numpy as np
import pytest
import torch

from model import olmo3
from model.config import LayerKind, ModelConfig, NumericsConfig, YarnConfig
from model.convert.hf import export_hf
from model.olmo3 import linear, mlp, rms_norm

FP32 = NumericsConfig()
SHAPES = {"mha": (4, 4), "gqa": (8, 2)}
YARN = YarnConfig(factor=8.0, original_context=16)


def config(shape="mha", yarn=None, layers=4, window=12):
    heads, kv = SHAPES[shape]
    return ModelConfig(
        d_model=64, n_layers=layers, n_heads=heads, n_kv_heads=kv, head_dim=64 // heads, d_ff=96, vocab_size=320,
        padded_vocab_size=320, window=window, rope_scaling=yarn,
    )  # fmt: skip


def compare(ours, theirs, atol, what):
    difference = np.abs(np.asarray(ours) - np.asarray(theirs))
    assert difference.max() <= atol, f"{what}: max {difference.max():.3e}, mean {difference.mean():.3e}"
    return difference.max()


def tokens(rows=2, length=40, seed=0):
    return np.random.default_rng(seed).integers(0, 320, (rows, length)).astype(np.int32)


@pytest.mark.parametrize(("shape", "yarn"), [("mha", None), ("gqa", YARN)])
def test_every_sub_block(ref, shape, yarn):
    cfg = config(shape, yarn)
    params = ref.random_params(cfg)
    core = ref.core_model(cfg, params)
    x = np.random.default_rng(1).standard_normal((2, 40, 64)).astype(np.float32)
    tx = torch.tensor(x)
    with torch.no_grad():
        for layer in (0, 3):  # one of each kind
            kind = cfg.layer_kinds[layer]
            p = jax.tree.map(lambda a: a[0], params["blocks"][f"layer_{layer}"])
            block = core.blocks[str(layer)]
            a, f = block.attention, block.feed_forward
            name = f"layer {layer} ({kind})"
            compare(
                rms_norm(linear(x, p["w_q"]), p["q_norm"], 1e-6),
                a.q_norm(a.w_q(tx)),
                5e-6,
                f"{name} QK-norm q",
            )
            compare(
                rms_norm(linear(x, p["w_k"]), p["k_norm"], 1e-6),
                a.k_norm(a.w_k(tx)),
                5e-6,
                f"{name} QK-norm k",
            )
            compare(rms_norm(x, p["attention_norm"], 1e-6), block.attention_norm(tx), 2e-6, f"{name} norm")
            compare(mlp(x, p), f(tx), 2e-6, f"{name} MLP")
            compare(olmo3.attention_branch(x, p, cfg, kind), a(tx), 2e-6, f"{name} attention")
            layer_module = olmo3.Layer(cfg, FP32, kind)
            compare(layer_module.apply({"params": p}, x, None), block(tx), 5e-6, name)
        hidden = rms_norm(x, params["final_norm"], 1e-6)
        compare(linear(hidden, params["lm_head"]), core.lm_head(tx), 5e-6, "head")


@pytest.mark.parametrize("yarn", [None, YARN])
def test_rope_against_olmo_core(ref, yarn):
    cfg = config("gqa", yarn)
    core = ref.core_model(cfg, ref.random_params(cfg))
    rng = np.random.default_rng(2)
    q, k = (
        rng.standard_normal((2, 40, 8, 8)).astype(np.float32),
        rng.standard_normal((2, 40, 2, 8)).astype(np.float32),
    )
    for layer, kind in enumerate(cfg.layer_kinds):
        cos, sin = olmo3.rope.tables(cfg, kind, 40)
        tq, tk = core.blocks[str(layer)].attention.rope(torch.tensor(q), torch.tensor(k), head_first=False)
        compare(olmo3.rotate(q, cos, sin), tq, 2e-6, f"RoPE q, {kind}")
        compare(olmo3.rotate(k, cos, sin), tk, 2e-6, f"RoPE k, {kind}")


# Six layers: a tail after the scan, and a last layer that is forced to full.
@pytest.mark.parametrize(
    ("shape", "yarn", "layers"), [("mha", None, 4), ("gqa", None, 6), ("mha", YARN, 6), ("gqa", YARN, 4)]
)
def test_logits_against_olmo_core(ref, shape, yarn, layers):
    cfg = config(shape, yarn, layers)
    params = ref.random_params(cfg)
    ids = tokens()
    ours = jax.jit(olmo3.logits, static_argnums=(1, 2))(params, cfg, FP32, ids)
    with torch.no_grad():
        theirs = ref.core_model(cfg, params)(torch.tensor(ids, dtype=torch.long))
    compare(ours, theirs, 2e-5, f"logits {shape} {layers} layers")


@pytest.mark.parametrize(
    ("shape", "yarn", "backend"),
    [("mha", None, "eager"), ("gqa", None, "sdpa"), ("mha", YARN, "sdpa"), ("gqa", YARN, "eager")],
)
def test_logits_against_transformers(ref, tmp_path, shape, yarn, backend):
    from transformers import AutoModelForCausalLM

    two = (LayerKind.SLIDING, LayerKind.FULL)
    cfg = config(shape, yarn, 2).model_copy(update={"rope_theta": 20000.0, "layer_pattern": two})
    params = ref.random_params(cfg)
    export_hf(params, cfg, tmp_path / "hf", context_length=128, keep_padding=True, eos_id=1, pad_id=2)
    hf = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", attn_implementation=backend, dtype=torch.float32
    )
    sliding_rope_of(hf, cfg)
    ids = tokens()
    ours = jax.jit(olmo3.logits, static_argnums=(1, 2))(params, cfg, FP32, ids)
    with torch.no_grad():
        theirs = hf(torch.tensor(ids, dtype=torch.long)).logits
    compare(ours, theirs, 2e-5, f"logits {shape} {backend}")


def sliding_rope_of(hf, cfg):
    """Which RoPE the installed transformers gives sliding layers; it must be the plain one at our theta."""
    from model.rope import inv_freq

    for name, scaling in (("sliding_attention", None), ("full_attention", cfg.rope_scaling)):
        got = getattr(hf.model.rotary_emb, f"{name}_inv_freq").numpy()
        want = inv_freq(cfg.head_dim, cfg.rope_theta, scaling)
        assert np.allclose(got, want, rtol=1e-6), (
            f"transformers gives {name} {got[:3]}, expected {want[:3]}: no parity"
        )


def test_layer_zero_sees_the_raw_embedding(ref):  # A4
    cfg = config(layers=1)
    params = ref.random_params(cfg)
    p = dict(params["tail"]["layer_0"])
    ids = tokens()

    @jax.jit  # compiled like the model: eager rounding alone differs by 2e-6 from compiled rounding
    def by_hand(params, p, ids):
        x = params["embeddings"][ids]
        h = x + rms_norm(olmo3.attention_branch(x, p, cfg, LayerKind.FULL), p["attention_norm"], 1e-6)
        h = h + rms_norm(mlp(h, p), p["feed_forward_norm"], 1e-6)
        return rms_norm(h, params["final_norm"], 1e-6)

    want = by_hand(params, p, ids)
    got = jax.jit(olmo3.apply_hidden, static_argnums=(1, 2))(params, cfg, FP32, ids)
    compare(got, want, 1e-6, "one block by hand")


def test_qk_norm_is_over_the_whole_width():  # A3
    shapes = olmo3.abstract_params(config("gqa"))["blocks"]["layer_0"]
    assert shapes["q_norm"].shape == (1, 64) and shapes["k_norm"].shape == (1, 16)


def test_window_counts_the_query(ref):  # A1: W=12, one sliding layer, 13 tokens
    cfg = config(layers=1, window=12).model_copy(
        update={"layer_pattern": (LayerKind.SLIDING,), "last_layer_full": False}
    )
    params = ref.random_params(cfg)
    a = tokens(1, 13)
    b = a.copy()
    b[0, 0] = (a[0, 0] + 1) % 320
    f = jax.jit(olmo3.logits, static_argnums=(1, 2))
    changed = np.abs(np.asarray(f(params, cfg, FP32, a) - f(params, cfg, FP32, b)))[0].max(-1) > 0
    assert changed[:12].all() and not changed[12]
