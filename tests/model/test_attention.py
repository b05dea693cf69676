"""Attention back-ends against a ten-line oracle: windows, GQA, documents, long sequences, gradients, memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infra.errors import RecipeError
from model import attention as lib
from model.attention import attention, choose_backend

W = 8


def oracle(q, k, v, window, docs=None):
    """float64, one row at a time."""
    B, S, H, K = q.shape
    out = np.zeros((B, S, H, K))
    for b, h, i in np.ndindex(B, H, S):
        n = h // (H // k.shape[2])
        j = np.arange(max(0, i - window + 1) if window else 0, i + 1)
        if docs is not None:
            j = j[docs[b, j] == docs[b, i]]
        s = k[b, j, n].astype(np.float64) @ q[b, i, h].astype(np.float64) / np.sqrt(K)
        p = np.exp(s - s.max())
        out[b, i, h] = (p / p.sum()) @ v[b, j, n]
    return out


def inputs(S, H, N, K=8, B=2, seed=0):
    r = np.random.default_rng(seed)
    return tuple(r.standard_normal((B, S, n, K)).astype(np.float32) for n in (H, N, N))


def documents(S, B=2):
    return (np.cumsum(np.random.default_rng(3).random((B, S)) < 0.2, axis=1)).astype(np.int32)


CASES = [(window, packed) for window in (W, None) for packed in (False, True)]


def every_case(q, k, v, docs, windows):
    """One program with all windows, unpacked and packed."""
    return [attention(q, k, v, window=w, doc_ids=d) for w in windows for d in (None, docs)]


@pytest.mark.parametrize("S", [W - 1, W, W + 1, 2 * W + 3])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_xla_against_oracle(S, heads):
    """Sliding and full, unpacked and packed."""
    q, k, v = inputs(S, *heads)
    docs = documents(S)
    got = jax.jit(lambda *a: every_case(*a, windows=(W, None)))(q, k, v, docs)
    for (window, packed), out in zip(CASES, got, strict=True):
        want = oracle(q, k, v, window, docs if packed else None)
        np.testing.assert_allclose(out, want, atol=2e-6, err_msg=f"window {window}, packed {packed}")


@pytest.mark.parametrize("window", [W, 20, None])  # below the slice, above it, full
def test_long_paths_against_short_one(monkeypatch, window):
    """Slices, segments and the scan over slices give the same values and gradients as the plain form."""
    S = 53  # no multiple of anything
    q, k, v = inputs(S, 4, 2, B=1)
    docs = documents(S, 1)

    def loss(q, k, v, docs):
        out = every_case(q, k, v, docs, (window,))
        return sum(jnp.sum(jnp.sin(x) * (1 + n)) for n, x in enumerate(out)), out

    run = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    (_, _), plain = jax.jit(run)(q, k, v, docs)
    monkeypatch.setattr(lib, "SLICE", 8)
    monkeypatch.setattr(lib, "UNROLL", 3)
    monkeypatch.setattr(lib, "STORE_LIMIT", 1)
    (_, out), sliced = jax.jit(lambda *a: run(*a))(q, k, v, docs)  # another function: traced again
    for x, d in zip(out, (None, docs), strict=True):
        np.testing.assert_allclose(x, oracle(q, k, v, window, d), atol=3e-6)
    for a, b in zip(sliced, plain, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6)


def test_bf16_rounds_like_a_flash_kernel():
    """exp(score - max) is rounded, the sum divides afterwards: torch's own CPU kernel, to 4% of the last bits."""
    import torch

    S, K = 48, 32
    r = np.random.default_rng(0)
    q, k, v = (torch.tensor(r.standard_normal((2, 4, S, K)) * s).bfloat16() for s in (2, 1, 1))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).float().numpy()
    ours = (jnp.asarray(x.transpose(1, 2).float().numpy(), jnp.bfloat16) for x in (q, k, v))
    got = np.asarray(attention(*ours, window=None).astype(jnp.float32)).swapaxes(1, 2)
    assert (got == want).mean() > 0.96, (got == want).mean()  # normalising before rounding: 0.61
    assert np.abs(got - want).max() <= 2**-7 * np.abs(want).max()


def test_rows_see_exactly_the_window():  # user-issues A12: W=4, T=10, one-hot values
    q = k = np.zeros((1, 10, 1, 10), np.float32)
    v = np.eye(10, dtype=np.float32)[None, :, None, :]
    got = np.asarray(attention(q, k, v, window=4))[0, :, 0]
    for i in range(10):
        assert list(np.nonzero(got[i])[0]) == list(range(max(0, i - 3), i + 1))


@pytest.mark.parametrize(
    ("heads", "window", "packed"), [((2, 2), 130, True), ((2, 1), None, False), ((2, 1), 130, False)]
)
def test_splash_in_the_interpreter(heads, window, packed):
    """The TPU kernel with our masks, run by Pallas' interpreter on CPU."""
    q, k, v = inputs(256, *heads, K=128, B=1)
    docs = documents(256, 1) if packed else None
    got = attention(q, k, v, window=window, doc_ids=docs, backend="splash", interpret=True)
    np.testing.assert_allclose(got, attention(q, k, v, window=window, doc_ids=docs), atol=1e-5)


def test_choice_of_backend():
    assert choose_backend("auto", "cpu", False) == "xla"
    assert choose_backend("auto", "tpu", True) == "splash"
    assert choose_backend("auto", "gpu", False) == "cudnn"
    assert choose_backend("auto", "gpu", True) == "xla"
    with pytest.raises(RecipeError, match="document"):
        choose_backend("cudnn", "gpu", True)


@pytest.mark.parametrize("window", [64, 4096, None])
def test_long_sequence_never_holds_square_scores(window):
    """Forward and backward at S = 8192: temporaries stay far below S*S*heads*4 bytes = 1 GiB."""
    shape = jax.ShapeDtypeStruct((1, 8192, 4, 16), jnp.float32)

    def loss(q, k, v):
        return jnp.sum(attention(q, k, v, window=window))

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.4 * 8192 * 8192 * 4 * 4


def test_sliding_cost_is_linear():
    """FLOPs of a sliding layer grow with S, not with S*S, and lie well below full attention."""

    def flops(S, window):
        s = jax.ShapeDtypeStruct((1, S, 1, 16), jnp.float32)
        f = jax.jit(lambda q, k, v: attention(q, k, v, window=window))
        return f.lower(s, s, s).compile().cost_analysis()["flops"]

    assert flops(256, 64) < 0.6 * flops(256, None)
    assert flops(512, 64) < 2.2 * flops(256, 64)
