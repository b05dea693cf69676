"""Sliced loss against the direct form, OLMo-core's function, and the reference's denominators."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infra.errors import RecipeError
from model.loss import head_loss, slice_length, token_weights

B, S, D, V, Z = 4, 16, 8, 100, 1e-3


def data(seed=0):
    r = np.random.default_rng(seed)
    x, head = r.standard_normal((B, S, D)).astype(np.float32), r.standard_normal((V, D)).astype(np.float32)
    return x, head, r.integers(0, V, (B, S)).astype(np.int32)


def direct(x, head, labels, weights):
    logit = jnp.einsum("bsd,vd->bsv", x, head, precision="highest")
    lse = jax.nn.logsumexp(logit, axis=-1)
    at = jnp.take_along_axis(logit, labels[..., None], -1)[..., 0]
    return jnp.sum(weights * (lse - at)) + Z * jnp.sum(weights * lse**2)


@pytest.mark.parametrize("slice_tokens", [1, 8, 24, 64, 10**6])
def test_value_and_gradient_equal_the_direct_form(slice_tokens):
    x, head, tokens = data()
    mask = np.array([True, False, True, True])
    labels, weights = token_weights(tokens, mask, np.arange(B), 2)
    want, (wx, wh) = jax.value_and_grad(direct, (0, 1))(x, head, labels, weights)

    def f(x, head):
        return 3.0 * head_loss(x, head, labels, weights, Z, slice_tokens, None)[0]

    got, (gx, gh) = jax.jit(jax.value_and_grad(f, (0, 1)))(x, head)
    np.testing.assert_allclose(got, 3 * want, rtol=1e-6)
    np.testing.assert_allclose(gx, 3 * wx, atol=2e-7)
    np.testing.assert_allclose(gh, 3 * wh, atol=2e-7)


def test_large_logits_do_not_overflow():
    x, head, tokens = data()
    labels, weights = token_weights(tokens, np.ones(B, bool), np.arange(B), 1)
    got = head_loss(100 * x, 10 * head, labels, weights, 0.0, 16, None)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[1], direct(100 * x, 10 * head, labels, weights) - Z * jnp.sum(
        weights * jax.nn.logsumexp(jnp.einsum("bsd,vd->bsv", 100 * x, 10 * head), -1) ** 2), rtol=1e-5)  # fmt: skip


def test_golden_of_the_reference_function():  # sheet section 2: logits [[1,2,3],[0,0,0]], labels [2,-100]
    head = np.eye(3, dtype=np.float32)
    x = np.array([[[1, 2, 3], [0, 0, 0]]], np.float32)
    labels, weights = np.array([[2, 0]], np.int32), np.array([[1.0, 0.0]], np.float32)
    _, ce, z = head_loss(x, head, labels, weights, 1e-5, 512, None)
    np.testing.assert_allclose(ce, 0.40760594606399536, rtol=1e-6)
    np.testing.assert_allclose(z, 0.0001161177788162604, rtol=1e-6)


def test_labels_against_olmo_core():  # L2
    import torch
    from olmo_core.data.utils import get_labels

    tokens = np.arange(10, 26).reshape(2, 8).astype(np.int32)
    mask, rows = np.ones((2, 8), bool), np.array([True, False])
    mask[0, 2] = False
    labels, weights = token_weights(tokens, rows, np.arange(2), 1, mask)
    batch = {"input_ids": torch.tensor(tokens, dtype=torch.long), "label_mask": torch.tensor(mask),
             "instance_mask": torch.tensor(rows)}  # fmt: skip
    theirs = get_labels(batch).numpy()
    np.testing.assert_array_equal(np.where(np.asarray(weights) > 0, labels, -100), theirs)
    np.testing.assert_allclose(np.asarray(weights)[weights > 0], 1 / ((theirs != -100).sum() + 8), rtol=1e-6)


def test_denominators():  # L1: one masked of four rows of 16 -> 61; two ranks with 21 and 60 labels
    tokens = np.zeros((4, 16), np.int32)
    _, w = token_weights(tokens, np.array([True, False, True, True]), np.arange(4), 1)
    np.testing.assert_allclose(np.unique(np.asarray(w)), [0, 1 / 61], rtol=1e-6)
    _, w = token_weights(tokens, np.ones(4, bool), np.arange(4), 1)
    np.testing.assert_allclose(np.asarray(w).max(), 1 / 60, rtol=1e-6)
    label_mask = np.ones((8, 16), bool)
    for row in (0, 2, 4, 6):  # rank 0 of 2: 21 labels left
        label_mask[row, 1 + 5 + (row == 6) :] = False
    label_mask[0, 6] = True
    _, w = token_weights(np.zeros((8, 16), np.int32), np.ones(8, bool), np.arange(8), 2, label_mask)
    w = np.asarray(w)
    n0, n1 = (w[0::2] > 0).sum(), (w[1::2] > 0).sum()
    np.testing.assert_allclose(w[0::2].max(), 1 / (2 * n0), rtol=1e-6)
    np.testing.assert_allclose(w[1::2].max(), 1 / (2 * n1), rtol=1e-6)
    np.testing.assert_allclose(w.sum(), 1.0, rtol=1e-5)


def test_row_order_follows_positions_not_layout():
    """A host that holds rows in another order gives them the same weights."""
    tokens = np.zeros((4, 8), np.int32)
    mask = np.array([True, False, True, True])
    _, a = token_weights(tokens, mask, np.arange(4), 2)
    perm = np.array([2, 0, 3, 1])
    _, b = token_weights(tokens, mask[perm], perm, 2)
    np.testing.assert_array_equal(np.asarray(a)[perm], b)


def test_ranks_must_divide_the_batch():
    with pytest.raises(RecipeError, match="reference_ranks 3"):
        token_weights(np.zeros((4, 8), np.int32), np.ones(4, bool), np.arange(4), 3)


def test_slice_length():
    assert (
        slice_length(8, 256, 512) == 64 and slice_length(1, 17, 4) == 1 and slice_length(64, 8192, 512) == 8
    )


def test_logits_of_a_batch_are_never_held():
    """Temporaries of forward and backward stay below a quarter of B*S*V floats."""
    x = jax.ShapeDtypeStruct((8, 256, 16), jnp.float32)
    head = jax.ShapeDtypeStruct((20480, 16), jnp.float32)
    i, w = jax.ShapeDtypeStruct((8, 256), jnp.int32), jax.ShapeDtypeStruct((8, 256), jnp.float32)
    f = jax.jit(jax.grad(lambda x, h, i, w: head_loss(x, h, i, w, Z, 128, None)[0], (0, 1)))
    temp = f.lower(x, head, i, w).compile().memory_analysis().temp_size_in_bytes
    assert temp < 8 * 256 * 20480 * 4 / 4
