"""Sizes by abstract evaluation: parameter counts of the sheet, layer kinds, shapes. No array is made."""

import time

import jax
import jax.numpy as jnp
import pytest

from model import layout, olmo3
from model.config import SIZES, LayerKind, ModelConfig, NumericsConfig, olmo3_size
from model.convert.names import entries

COUNTS = {
    "190M": (267_424_512, 190_354_176), "1B": (1_484_916_736, 1_279_395_840), "7B": (7_298_617_344, 6_887_575_552),
    "13B": (13_716_198_400, 13_202_396_160), "32B": (32_234_279_936, 31_720_477_696),
}  # fmt: skip


@pytest.mark.parametrize("size", COUNTS)
def test_parameter_counts(size):
    cfg = olmo3_size(size)
    begun = time.perf_counter()
    total = layout.count_params(cfg)
    assert time.perf_counter() - begun < 0.1
    assert (total, total - cfg.padded_vocab_size * cfg.d_model) == COUNTS[size]


@pytest.mark.parametrize("size", SIZES)
def test_same_counts_as_olmo_core(size):
    from olmo_core.nn.transformer import TransformerConfig

    theirs = getattr(TransformerConfig, f"olmo3_{size}")(vocab_size=100352)
    assert layout.count_params(olmo3_size(size)) == theirs.num_params


def test_linen_makes_the_same_tree():
    cfg = olmo3_size("1B")
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    made = jax.eval_shape(olmo3.Olmo3(cfg, NumericsConfig()).init, jax.random.key(0), tokens)["params"]
    assert jax.tree.map(lambda s: (s.shape, s.dtype), made) == jax.tree.map(
        lambda s: (s.shape, s.dtype), olmo3.abstract_params(cfg)
    )


def products_with(jaxpr, shape):
    """How often a weight of `shape` is multiplied in the text of a program, a loop's body once."""
    found = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            found += eqn.invars[1].aval.shape == shape
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                found += products_with(inner, shape) if hasattr(inner, "eqns") else 0
    return found


@pytest.mark.parametrize("size", ["7B", "32B"])
def test_full_size_forward_is_two_layers_to_compile(size):
    """One sliding and one full layer, each with W1 and W3: 4 products with a [d_ff, d_model] weight, not 64 or 128."""
    cfg = olmo3_size(size)
    tokens = jax.ShapeDtypeStruct((1, 8192), jnp.int32)
    f = lambda p, t: olmo3.apply_hidden(p, cfg, NumericsConfig(mode="mixed"), t)  # noqa: E731
    program, out = jax.make_jaxpr(f, return_shape=True)(olmo3.abstract_params(cfg), tokens)
    assert out.shape == (1, 8192, cfg.d_model) and out.dtype == jnp.bfloat16
    assert products_with(program.jaxpr, (cfg.d_ff, cfg.d_model)) == 4


@pytest.mark.parametrize("layers,full", [(4, {3}), (6, {3, 5}), (5, {3, 4}), (3, {2}), (8, {3, 7}), (1, {0})])
def test_layer_kinds(layers, full):  # A2, M16
    cfg = ModelConfig(d_model=8, n_layers=layers, n_heads=1, n_kv_heads=1, head_dim=8, d_ff=8)
    assert {i for i, k in enumerate(cfg.layer_kinds) if k == LayerKind.FULL} == full
    kinds, repeats, tail = layout.pattern(cfg)
    assert kinds * repeats + tail == cfg.layer_kinds
    places = [layout.layer_place(cfg, i) for i in range(layers)]
    assert len({(p, i) for p, i in places}) == layers


@pytest.mark.parametrize("size", ["190M", "7B", "32B"])
def test_full_layers_of_the_presets(size):
    cfg = olmo3_size(size)
    assert [i for i, k in enumerate(cfg.layer_kinds) if k == LayerKind.FULL] == list(
        range(3, cfg.n_layers, 4)
    )


def test_names_are_a_bijection():
    for size in ("1M", "7B"):
        es = entries(olmo3_size(size))
        assert (
            len({e.hf for e in es})
            == len({e.olmo_core for e in es})
            == len({(e.path, e.index) for e in es})
            == len(es)
        )
    assert len(entries(olmo3_size("1M"))) == 47  # sheet section 7.1


def test_unknown_size_lists_the_known():
    with pytest.raises(KeyError, match="7B"):
        olmo3_size("8B")
