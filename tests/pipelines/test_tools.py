"""Two things the `repro parity` and `repro convert` commands decide themselves: the model of an undescribed checkpoint, and
where a source came from. The commands end to end: `tests/end_to_end/test_chain.py`."""

import json

import numpy as np
import pytest

from model.config import ModelConfig
from pipelines import tools
from pipelines.recipe import load_recipe

CFG = ModelConfig(d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, vocab_size=120, padded_vocab_size=128, window=8)  # fmt: skip


@pytest.mark.parametrize("nested", [False, True])
def test_only_an_olmo_core_step_without_its_config_takes_the_recipes_reference(tmp_path, nested):
    """The local reference writes no config.json beside its steps; every other form describes itself."""
    recipe = load_recipe(
        "tiny", ["model.rope_theta=10000"]
    )  # our side differs; the reference's model is wanted
    step = tmp_path / "step3"
    table = step / "model_and_optim/.metadata" if nested else step / ".metadata"
    table.parent.mkdir(parents=True)
    table.write_bytes(b"")
    assert tools.undescribed(step, recipe) == recipe.reference.model != recipe.model
    (step / "config.json").write_text("{}")
    assert tools.undescribed(step, recipe) is None
    for name in ("config.json", "MANIFEST.json"):  # HF, ours
        other = tmp_path / name.split(".")[0]
        other.mkdir()
        (other / name).write_text("{}")
        assert tools.undescribed(other, recipe) is None
    assert tools.undescribed(tmp_path / "nothing", recipe) is None


def test_convert_writes_where_the_source_came_from(tmp_path, monkeypatch):
    """`origin` in conversion.json: here a local path; the parser, the resolver and the export are the real ones."""
    import jax

    from model.convert.hf import export_hf
    from model.init import init_params
    from pipelines.cli import main

    params = jax.tree.map(np.asarray, init_params(CFG))
    export_hf(params, CFG, tmp_path / "hf", context_length=64, keep_padding=True, eos_id=0, pad_id=1)
    run = tmp_path / "run"
    run.mkdir()
    recipe = load_recipe("tiny")
    (run / "recipe.json").write_text(json.dumps(recipe.model_dump(mode="json")))
    monkeypatch.setattr("pipelines.work.parity_prompts", lambda recipe, run: np.zeros((1, 64), np.int32))
    arguments = ["convert", str(tmp_path / "hf"), str(tmp_path / "out"), "--run-dir", str(run), "--no-parity"]
    assert main(arguments) == 0
    lineage = json.loads((tmp_path / "out/conversion.json").read_text())
    assert lineage["origin"] == {"kind": "local", "path": str((tmp_path / "hf").resolve())}
    assert lineage["parity"] == {"checked": False, "why": "exported with --no-parity"}
