"""Mixed mode against OLMo-core in bf16 on CPU: where it rounds the same, and how far both are from fp32.

Every sub-block but attention is bit-equal to torch's. Attention rounds at the same places (`test_attention.py`), and
about 3% of its last bits differ, since torch's kernel uses another `exp`. So a result of a whole model cannot be equal; the
question is whether ours is further from fp32. Two equally good roundings are each further in half of the draws, so the
criterion is a one-sided sign test over independent draws of weights and tokens, at the 1% level: no slack is chosen.

What it found: the first form of our attention rounded normalised probabilities, and was further in 11 of 12 draws.
Measured after the fix, 40 draws, ratio ours/theirs of the distance from fp32: logits median 1.002, mean 1.000 (ours
further in 24 of 40 at scale 0.03), gradients median 0.988.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from scipy.stats import binom

from model import layout, olmo3, rope
from model import step as step_lib
from model.config import (
    LayerKind,
    LossConfig,
    MeshConfig,
    ModelConfig,
    NumericsConfig,
    OptimizerConfig,
)  # fmt: skip
from model.convert.names import entries
from model.olmo3 import linear, mlp, rms_norm, rotate
from model.sharding import make_mesh

CFG = ModelConfig(d_model=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, d_ff=256, vocab_size=500,
                  padded_vocab_size=512, window=8)  # fmt: skip
DRAWS, LEVEL = 16, 0.01


def to_numpy(t):
    return t.detach().float().numpy()


def to_bf16(t):
    return jnp.asarray(to_numpy(t), jnp.bfloat16)


@pytest.mark.parametrize("layer", [0, 3])
def test_sub_blocks_are_bit_equal(ref, layer):
    """Gains differ from 1, so a gain kept in fp32 or applied after the cast shows (A5); RoPE in bf16 shows (M11)."""
    kind = CFG.layer_kinds[layer]
    params = ref.random_params(CFG, scale=0.06)
    p = jax.tree.map(lambda a: jnp.asarray(a[0], jnp.bfloat16), params["blocks"][f"layer_{layer}"])
    head = jnp.asarray(params["lm_head"], jnp.bfloat16)
    model = ref.core_model(CFG, params).bfloat16()
    block = model.blocks[str(layer)]
    a, f = block.attention, block.feed_forward
    x = torch.tensor(np.random.default_rng(1).standard_normal((2, 48, 128)).astype(np.float32)).bfloat16()
    cos, sin = rope.tables(CFG, kind, 48)
    with torch.no_grad():
        q = a.w_q(x)
        qn, kn = a.q_norm(q), a.k_norm(a.w_k(x))
        rq, _ = a.rope(qn.view(2, 48, 4, 32), kn.view(2, 48, 2, 32), head_first=False)
        branch = block.attention_norm(x)
        theirs = {
            "projection": q,
            "QK-norm": qn,
            "RoPE": rq,
            "MLP": f(x),
            "residual": x + branch,
            "head": model.lm_head.w_out(x),
        }
    ours = jax.jit(lambda x, q, qn, branch: {
        "projection": linear(x, p["w_q"]),
        "QK-norm": rms_norm(q, p["q_norm"], 1e-6),
        "RoPE": rotate(qn, cos, sin),
        "MLP": mlp(x, p),
        "residual": x + branch,
        "head": linear(x, head),
    })(to_bf16(x), to_bf16(q), to_bf16(qn.view(2, 48, 4, 32)), to_bf16(branch))  # fmt: skip
    for name, want in theirs.items():
        same = np.asarray(ours[name].astype(jnp.float32)) == to_numpy(want)
        assert same.mean() >= 0.999, (
            name,
            same.mean(),
        )  # sin and cos tables differ in a last bit here and there


def theirs(ref, params, dtype, tokens):
    from olmo_core.data.utils import get_labels

    model = ref.core_model(CFG, params).to(dtype)
    ids = torch.tensor(tokens, dtype=torch.long)
    labels = get_labels({"input_ids": ids})
    out = model(ids, labels=labels, ignore_index=-100, loss_reduction="sum", z_loss_multiplier=1e-5,
                loss_div_factor=(labels != -100).sum(), return_logits=True)  # fmt: skip
    out.loss.backward()
    grads = {n: p.grad.float().numpy() for n, p in model.named_parameters()}
    return {"CE": float(out.ce_loss), "logits": to_numpy(out.logits), "gradients": grads}


def distance(a, b):
    """RMS over all entries of a number, an array or a dict of arrays."""
    if isinstance(a, dict):
        return float(np.sqrt(sum(((a[n] - b[n]) ** 2).sum() for n in b)))
    return float(np.sqrt(np.mean((np.asarray(a) - b) ** 2)))


def test_no_further_from_fp32_than_olmo_core_in_bf16(ref):
    """Logits, loss and gradients of the whole model, 16 draws of weights and tokens; sign test at 1%."""
    torch.set_num_threads(1)
    spec = step_lib.StepSpec(
        CFG,
        OptimizerConfig(),
        LossConfig(),
        NumericsConfig(mode="mixed", loss_slice_tokens=64),
        make_mesh(MeshConfig(), jax.devices()[:1]),
    )
    run = jax.jit(
        lambda p, b: (step_lib.gradients(spec, p, b), olmo3.logits(p, CFG, spec.numerics, b["tokens"]))
    )
    ratios = {"logits": [], "CE": [], "gradients": []}
    for seed in range(DRAWS):
        params = ref.random_params(CFG, seed=seed, scale=0.06)
        tokens = np.random.default_rng(seed).integers(0, 500, (4, 48)).astype(np.int32)
        batch = step_lib.host_batch(tokens, np.ones(4, bool), np.zeros(3, np.float32))
        (g, parts), logits = jax.device_get(run(params, batch))
        grads = {
            e.olmo_core: layout.get(g, e.path) if e.index is None else layout.get(g, e.path)[e.index]
            for e in entries(CFG)
        }
        ours = {"CE": float(parts["ce"]), "logits": logits, "gradients": grads}
        exact, rounded = (
            theirs(ref, params, torch.float32, tokens),
            theirs(ref, params, torch.bfloat16, tokens),
        )
        for name in ratios:
            ratios[name].append(distance(ours[name], exact[name]) / distance(rounded[name], exact[name]))
    allowed = int(binom.isf(LEVEL, DRAWS, 0.5))  # further more often than this: p < 1%
    for name, r in ratios.items():
        further = int(np.sum(np.array(r) > 1))
        print(f"mixed: {name}: further in {further} of {DRAWS} draws, median ratio {np.median(r):.4f}")
        assert further <= allowed, (name, np.round(r, 3))


def test_layer_kinds_cover_both(ref):
    assert [CFG.layer_kinds[i] for i in (0, 3)] == [LayerKind.SLIDING, LayerKind.FULL]
