"""What the `repro parity` and `repro convert` commands decide themselves: the model of an undescribed checkpoint, where a
source came from, what counts as PARITY, and which places they refuse. The commands end to end: `tests/end_to_end/test_chain.py`."""

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


@pytest.fixture
def exported(tmp_path, monkeypatch):
    """An HF directory of a small model, and a run directory that gives its prompts."""
    import jax

    from model.convert.hf import export_hf
    from model.init import init_params

    params = jax.tree.map(np.asarray, init_params(CFG))
    export_hf(params, CFG, tmp_path / "hf", context_length=64, keep_padding=True, eos_id=0, pad_id=1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/recipe.json").write_text(json.dumps(load_recipe("tiny").model_dump(mode="json")))
    monkeypatch.setattr("pipelines.work.parity_prompts", lambda recipe, run: np.zeros((1, 64), np.int32))
    return tmp_path / "hf"


def test_convert_writes_where_the_source_came_from(exported, tmp_path):
    """`origin` in conversion.json: here a local path; the parser, the resolver and the export are the real ones."""
    from pipelines.cli import main

    arguments = [
        "convert",
        str(exported),
        str(tmp_path / "out"),
        "--run-dir",
        str(tmp_path / "run"),
        "--no-parity",
    ]
    assert main(arguments) == 0
    lineage = json.loads((tmp_path / "out/conversion.json").read_text())
    assert lineage["origin"] == {"kind": "local", "path": str(exported.resolve())}
    assert lineage["parity"] == {"checked": False, "why": "exported with --no-parity"}


def test_parity_is_answered_only_if_the_sub_blocks_agree_too(exported, monkeypatch, capsys):
    from evals import localise
    from pipelines.cli import main

    out = exported.parent / "new/result.json"
    command = ["parity", str(exported), str(exported), "--localise", "--floor", "--out", str(out)]
    command += ["--run-dir", str(exported.parent / "run")]
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "PARITY"
    written = json.loads(out.read_text())
    assert written["ok"] and written["localise"]["ok"] and len(written["floor"]) == 2
    real = localise.localise
    monkeypatch.setattr(localise, "localise", lambda *a: {**real(*a), "ok": False})
    assert main(command) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "NO PARITY"
    assert json.loads(out.read_text())["ok"] is False


@pytest.mark.parametrize("place", ["{hf}", "{hf}/config.json/x.json"])
def test_a_place_that_cannot_hold_the_result_is_refused_first(exported, place, monkeypatch, capsys):
    from evals import pairs
    from pipelines.cli import main

    monkeypatch.setattr(
        pairs, "compare", lambda *a, **k: pytest.fail("computed before the place was checked")
    )
    place = place.format(hf=exported)
    command = [
        "parity",
        str(exported),
        str(exported),
        "--out",
        place,
        "--run-dir",
        str(exported.parent / "run"),
    ]
    assert main(command) == 2
    assert f"--out {place} is no place for a file" in capsys.readouterr().err


def test_an_out_that_is_taken_is_refused_before_anything_is_fetched(exported, monkeypatch, capsys):
    from model.convert import sources
    from pipelines.cli import main

    monkeypatch.setattr(sources, "resolve", lambda *a: pytest.fail("fetched before the place was checked"))
    assert main(["convert", "allenai/x@y", str(exported)]) == 2
    assert "is not empty" in capsys.readouterr().err
