"""Recipes: every shipped one resolves, every wrong override is named, 7B and 32B are the published history."""

import math

import pytest

from infra.errors import RecipeError
from model.config import LayerKind
from pipelines.recipe import field_lines, load_recipe, recipe_names


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipes_resolve_and_declare_no_difference(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.declared_differences() == []
    assert len(recipe.train.landmark_steps) == 6


def test_unknown_recipe_lists_the_known():
    with pytest.raises(RecipeError, match=r"unknown recipe 'tinny'(.|\n)*olmo3_7b_stage1"):
        load_recipe("tinny")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.rope_thta=1", r"unknown field 'model.rope_thta'(.|\n)*rope_theta"),
        ("nothing=1", r"unknown field 'nothing'(.|\n)*tokenizer"),
        ("train.steps.x=1", "single value"),
        ("schedule.parts.7.peak=1", "has no '7'"),
        ("train.steps", "not of the form"),
        ("train.steps=0", "train.steps"),
        ("train.steps=many", "train.steps"),
        ("train.landmarks=[200]", r"\[200\] lie beyond the last step, train.steps = 96"),
        ("train.landmarks=[8,4]", "increasing"),
        ("model=" + "[" * 100_000, "nested too deeply"),
        ("optimizer.betas=[0.9,1]", "optimizer.betas.1"),
        ("data.seed=-1", "data.seed"),
        ("history.cold_window_at=[-3]", "history.cold_window_at.0"),
        ("tokenizer.eos_id=-5", "tokenizer.eos_id"),
        ("tokenizer.pad_id=100278", "tokenizer.pad_id 100278 lies outside the vocabulary of 100278"),
        ("evals.loss_domain=nosuch", "none of the corpus's: stdlib-code"),
        ('evals.tasks=["piqa","piqa"]', "names a task twice"),
        ("model.n_kv_heads=3", "multiple"),
        ("model.head_dim=15", "even"),
        ("train.micro_batch_instances=3", "does not divide"),
        ("loss.reference_ranks=3", "does not divide"),
        ("parity.prompt_tokens=64", "never leave the reference's window"),
        ("data.max_sequence_length=300", "multiple"),
        ("optimizer.skip_step.nan_policy=ignore", "nan_policy"),
        ("corpus.kind=files", "corpus.sources"),
    ],
)
def test_wrong_overrides_are_named(override, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe("tiny", [override])


def test_override_touches_our_side_only():
    recipe = load_recipe("tiny", ["model.rope_theta=10000", "train.steps=40"])
    assert recipe.model.rope_theta == 10000.0
    assert recipe.reference.model.rope_theta == 500000.0
    assert recipe.declared_differences() == ["model.rope_theta (500000.0 -> 10000.0)"]
    assert recipe.train.landmark_steps == (7, 13, 20, 27, 33, 40)


def test_recipes_print_every_field():
    lines = field_lines(load_recipe("tiny"))
    assert "model.rope_theta = 500000.0" in lines
    assert "schedule.parts.0.until = 24" in lines


def test_7b_is_the_published_history():
    """Sheet sections 4.2 and 1.1; tokens from the checkpoint list."""
    recipe = load_recipe("olmo3_7b_stage1")
    assert recipe.data.global_batch_tokens == 4_194_304
    assert recipe.train.steps * recipe.data.global_batch_tokens == 5_929_965_715_456
    first, second = recipe.schedule.parts
    assert (first.horizon, second.horizon) == (-(-5 * 10**12 // 2**22), -(-7 * 10**12 // 2**22))
    assert second.warmup == 1192092 // 2 + 1000
    assert not recipe.data.filter.enabled
    full = [i for i, kind in enumerate(recipe.model.layer_kinds) if kind is LayerKind.FULL]
    assert full == list(range(3, 32, 4))


def test_190m_filters_and_stops_at_one_chinchilla():
    recipe = load_recipe("olmo3_190m")
    assert recipe.data.filter.enabled
    assert recipe.data.global_batch_tokens == 2**19
    assert recipe.train.steps == -(-20 * 190_354_176 // 2**19)


def test_32b_is_the_published_history():
    """Sheet sections 1.1, 4.3, 5.6; tokens from the checkpoint that midtraining starts from."""
    recipe = load_recipe("olmo3_32b_stage1")
    assert recipe.data.global_batch_tokens == 2**23
    assert recipe.train.steps * recipe.data.global_batch_tokens == 5_502_926_848_000
    (part,) = recipe.schedule.parts
    assert (part.kind, part.peak, part.warmup, part.alpha_f) == ("cosine", 6e-4, 2000, 0.1)
    assert part.horizon == pytest.approx(724.0e6 / 1024, rel=1e-4) and part.horizon > recipe.train.steps
    filtered = recipe.data.filter
    assert (filtered.enabled, filtered.min_period, filtered.max_period, filtered.max_count) == (
        True,
        1,
        13,
        32,
    )
    model = recipe.model
    assert (model.n_heads, model.n_kv_heads, model.n_layers, model.d_ff) == (40, 8, 64, 27648)
    full = [i for i, kind in enumerate(model.layer_kinds) if kind is LayerKind.FULL]
    assert full == list(range(3, 64, 4))


def test_32b_step_by_abstract_evaluation():
    """The whole update at full size: 32,234,279,936 weights come out in the shapes they went in; no array is made.

    On 512 devices every matrix is split, so a device holds 1/512 of the state but for the gains.
    """
    import jax
    from jax.sharding import AbstractMesh

    from model import sharding
    from model.config import MeshConfig
    from model.step import StepSpec, abstract_batch, abstract_state, train_step

    recipe = load_recipe("olmo3_32b_stage1")
    mesh = sharding.make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
    spec = StepSpec(recipe.model, recipe.optimizer, recipe.loss, recipe.numerics, mesh)
    state = abstract_state(spec)
    batch = abstract_batch(spec, recipe.data.global_batch_instances, recipe.data.sequence_length)
    after, metrics = jax.eval_shape(lambda s, b: train_step(spec, s, b), state, batch)
    shapes = [jax.tree.map(lambda a: (a.shape, str(a.dtype)), tree) for tree in (state, after)]
    assert shapes[0] == shapes[1] and metrics["ce"].shape == ()
    assert sum(p.size for p in jax.tree.leaves(after["params"])) == 32_234_279_936
    many = sharding.param_shardings(recipe.model, AbstractMesh((1, 512, 1), sharding.AXES))
    for weight, where in zip(jax.tree.leaves(after["params"]), jax.tree.leaves(many)):
        part = where.shard_shape(weight.shape)
        share = 512 if len([n for n in weight.shape if n > 64]) > 1 else 1
        assert weight.size == share * math.prod(part)
