"""A published reference: originals come bit for bit, what AI2's hub lacks is filled and said, and is no place to start from."""

import numpy as np
import pytest

from evals.reference.published import bring
from infra.artifacts import read_json
from infra.errors import IdentityError, RecipeError
from model.convert.safetensors_io import Tensors
from model.convert.stream import convert


@pytest.fixture(scope="module")
def original(hf_dir, tmp_path_factory):
    """`…/original/step7`: fp32, all rows; the pattern that names it."""
    root = tmp_path_factory.mktemp("original")
    (root / "step7").symlink_to(hf_dir)
    return f"{root}/step{{step}}"


@pytest.fixture(scope="module")
def hub(hf_dir, model_cfg, tmp_path_factory):
    """The same weights as AI2's hub has them: bf16, 100,278 rows."""
    root = tmp_path_factory.mktemp("hub")
    convert(hf_dir, root / "step7", model=model_cfg, context_length=96)
    return f"{root}/step{{step}}"


def test_originals_come_bit_for_bit(original, hf_dir, model_cfg, tmp_path):
    found = bring(original, 7, tmp_path / "w", model_cfg, context_length=96, to_start=True)
    assert (found["rounded"], found["filled_rows"]) == (False, 0)
    there, here = Tensors(hf_dir), Tensors(tmp_path / "w")
    assert there.names() == here.names()
    assert all(np.array_equal(there.read(n), here.read(n)) for n in there.names())


def test_hub_weights_are_filled_and_said_to_be_rounded(hub, hf_dir, model_cfg, tmp_path):
    found = bring(hub, 7, tmp_path / "w", model_cfg, context_length=96)
    assert (found["rounded"], found["filled_rows"]) == (True, 74)
    assert read_json(tmp_path / "w" / "conversion.json")["published"] == found
    head = Tensors(tmp_path / "w").read("lm_head.weight")
    exact = Tensors(hf_dir).read("lm_head.weight")
    assert head.dtype == np.float32 and head.shape == (100352, 16) and not head[100278:].any()
    # bf16 keeps 8 bits of the significand: rounding moves a value by at most 2**-9 of itself
    assert 0 < np.max(np.abs(head[:100278] - exact[:100278]) / np.abs(exact[:100278])) <= 2**-8


def test_training_does_not_start_from_the_hub(hub, model_cfg, tmp_path):
    with pytest.raises(IdentityError, match="rounded to bf16 and lack 74 vocabulary rows"):
        bring(hub, 7, tmp_path / "w", model_cfg, context_length=96, to_start=True)
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"pattern": ""}, RecipeError, "must name the checkpoints"),
        ({"pattern": "/nowhere/step7"}, RecipeError, "must name the checkpoints"),
        ({"step": 8}, IdentityError, "step8 is no directory"),
        ({"model": {"d_ff": 64}}, IdentityError, "describes another model: d_ff is 32, ours 64"),
    ],
)
def test_what_is_not_there_is_named(original, model_cfg, tmp_path, change, error, word):
    model = model_cfg.model_copy(update=change.get("model", {}))
    with pytest.raises(error, match=word):
        bring(
            change.get("pattern", original), change.get("step", 7), tmp_path / "w", model, context_length=96
        )
    assert not (tmp_path / "w").exists()
