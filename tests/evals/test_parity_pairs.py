"""`parity A B` over the three forms and three implementations, the noise floor, and the gate of exports."""

import dataclasses
import hashlib
import json
import shutil

import numpy as np
import pytest

from evals import pairs
from evals.config import ParityConfig
from infra.errors import IdentityError, ParityError, RecipeError
from model import checkpoint
from model.config import ModelConfig
from model.convert import stream
from model.convert.hf import export_hf, import_hf

torch = pytest.importorskip("torch")
pytest.importorskip("olmo_core")

S, W = 40, 8
CFG = ModelConfig(
    d_model=64, n_layers=4, n_heads=8, n_kv_heads=2, head_dim=8, d_ff=96, vocab_size=120, padded_vocab_size=128, window=W
)  # fmt: skip
LIMITS = ParityConfig()
PROMPTS = np.random.default_rng(3).integers(0, 120, (2, S)).astype(np.int32)


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """The same weights as HF, as one of our checkpoints, and as an OLMo-core checkpoint."""
    from olmo_core.distributed.checkpoint import save_model_and_optim_state

    from evals.reference.olmo_core_model import build_initialised, olmo_core_config
    from evals.reference.olmo_core_model import export_hf as core_export

    root = tmp_path_factory.mktemp("forms")
    model = build_initialised(CFG, S)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(1 + 0.2 * torch.randn(p.shape, generator=generator)) if p.ndim == 1 else p.mul_(5)
    core_export(model, CFG, root / "hf", context_length=S, eos_id=0, pad_id=1)
    save_model_and_optim_state(str(root / "core/step1/model_and_optim"), model)
    config = {"model": olmo_core_config(CFG).as_config_dict()}
    (root / "core/step1/config.json").write_text(json.dumps(config))
    params = import_hf(root / "hf", CFG)
    meta = {"format": 1, "step": 1, "model": CFG.model_dump(mode="json")}
    ours = checkpoint.write_checkpoint(root / "ours", 1, {"params": params, "step": np.int32(1)}, meta)
    return {"hf": root / "hf", "core": root / "core/step1", "ours": ours}


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (("core", "olmo-core"), ("ours", "jax")),
        (("hf", "transformers"), ("core", "jax")),
        (("core", "transformers"), ("hf", "olmo-core")),
        (("ours", "olmo-core"), ("ours", "transformers")),
    ],
)
def test_any_two_agree_in_fp32(forms, a, b):
    result = pairs.compare(pairs.side(forms[a[0]], a[1]), pairs.side(forms[b[0]], b[1]), PROMPTS, LIMITS)
    assert result["ok"] and result["top1"] == result["top5"] == 1.0, result["where"]
    assert a[1] in result["first"] and b[1] in result["second"]


def test_bf16_is_bounded_by_the_measured_noise(forms):
    result = pairs.compare(
        pairs.side(forms["hf"], "transformers"),
        pairs.side(forms["ours"], "jax"),
        PROMPTS,
        LIMITS,
        mode="bf16",
    )
    assert result["ok"], (result["max"], result["limits"])
    assert 1e-3 < result["max"] <= result["limits"]["max_logit_difference"]


def test_noise_floor_is_measured(forms):
    floor = pairs.noise_floor(forms["hf"], PROMPTS)
    fused, rounded = floor["transformers fp32: eager against sdpa"], floor["transformers: bf16 against fp32"]
    assert fused["max"] <= LIMITS.max_logit_difference < 1e-3 < rounded["max"]


def test_the_floor_of_any_form(forms):
    ours, theirs = (pairs.noise_floor(forms[f], PROMPTS) for f in ("ours", "hf"))
    for name in ours:
        assert ours[name]["max"] == theirs[name]["max"]


def test_unknown_implementation_is_refused(forms):
    with pytest.raises(RecipeError, match="known: jax, transformers, olmo-core"):
        pairs.side(forms["hf"], "mlx")


@pytest.mark.parametrize(("dtype", "keep"), [("float32", True), ("bfloat16", False)])
def test_export_passes_its_gate(forms, tmp_path, dtype, keep):
    lineage = pairs.export_checked(
        forms["core"], tmp_path / "out", PROMPTS, LIMITS, dtype=dtype, keep_padding=keep, context_length=S, eos_id=0, pad_id=1
    )  # fmt: skip
    assert lineage["parity"]["checked"] and lineage["parity"]["max"] <= LIMITS.max_logit_difference
    assert json.loads((tmp_path / "out/conversion.json").read_text()) == lineage
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_export_with_a_fault_leaves_nothing(forms, tmp_path, monkeypatch):
    """A layout fault inside the converter (gate and up exchanged on the way out, user issue A6)."""
    real, other = stream.write_file, {"w1": "w3", "w3": "w1"}

    def faulty(target, header, group, rows, dtype, read, report):
        def exchanged(e):
            name = e.path[-1]
            if name in other:
                e = dataclasses.replace(e, olmo_core=e.olmo_core.replace(name, other[name]))
            return read(e)

        real(target, header, group, rows, dtype, exchanged, report)

    monkeypatch.setattr(stream, "write_file", faulty)
    named = {"dtype": "float32", "context_length": S, "eos_id": 0, "pad_id": 1}
    with pytest.raises(ParityError, match=r"the export of .* fails parity"):
        pairs.export_checked(forms["core"], tmp_path / "out", PROMPTS, LIMITS, **named)
    assert not list(tmp_path.iterdir())
    lineage = pairs.export_checked(forms["core"], tmp_path / "out", PROMPTS, LIMITS, **named, no_parity=True)
    assert lineage["parity"] == {"checked": False, "why": "exported with --no-parity"}


def test_a_config_that_we_misread_is_seen_by_transformers(forms, tmp_path, monkeypatch):
    """Whatever the reader of config.json overlooks, the export is also held against its source in transformers."""
    from model.convert import described

    source = tmp_path / "gelu"
    shutil.copytree(forms["hf"], source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    with pytest.raises(IdentityError, match="hidden_act is 'gelu', not 'silu'"):
        pairs.export_checked(source, tmp_path / "out", PROMPTS, LIMITS, context_length=S)
    monkeypatch.setattr(described, "HF_HELD", {})
    with pytest.raises(ParityError, match=r"the export of .* \(against it in transformers\) fails parity"):
        pairs.export_checked(source, tmp_path / "out", PROMPTS, LIMITS, context_length=S, eos_id=0, pad_id=1)
    assert [p.name for p in tmp_path.iterdir()] == ["gelu"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_hf_source_is_held_against_itself(forms, tmp_path, dtype):
    lineage = pairs.export_checked(
        forms["hf"], tmp_path / "out", PROMPTS, LIMITS, dtype=dtype, context_length=S, eos_id=0, pad_id=1
    )
    assert lineage["parity"]["against"] == ["ours", "source"]
    digest = hashlib.sha256((forms["hf"] / "model.safetensors").read_bytes()).hexdigest()
    assert lineage["source"]["sha256"] == {"model.safetensors": digest}


def test_a_killed_gate_is_continued_without_converting_again(forms, tmp_path, monkeypatch):
    """What stands after a kill in the gate is `OUT.partial`; the same command goes on from it."""
    named = {"context_length": S, "eos_id": 0, "pad_id": 1}
    real = pairs.gate
    monkeypatch.setattr(pairs, "gate", lambda *args, **named: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        pairs.export_checked(forms["core"], tmp_path / "out", PROMPTS, LIMITS, **named)
    assert [p.name for p in tmp_path.iterdir()] == ["out.partial"]
    monkeypatch.setattr(pairs, "gate", real)
    monkeypatch.setattr(stream, "write_file", lambda *args: pytest.fail("a whole file was written again"))
    pairs.export_checked(forms["core"], tmp_path / "out", PROMPTS, LIMITS, **named)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_export_loads_in_transformers_without_a_word(forms, tmp_path, caplog):
    """No missing or unexpected key, no warning, stage 1-2 and stage 3 forms (user issues A7, B4)."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from model.config import YarnConfig

    stage3 = CFG.model_copy(update={"rope_scaling": YarnConfig(factor=8.0, original_context=16)})
    params = import_hf(forms["hf"], CFG)
    logging.enable_propagation()
    for name, cfg, context in (("one", CFG, S), ("three", stage3, 128)):
        export_hf(params, cfg, tmp_path / name, context_length=context, keep_padding=True, eos_id=0, pad_id=1)
        caplog.clear()
        model, info = AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(info.values()), info
        assert not [r for r in caplog.records if r.levelname in ("WARNING", "ERROR")], caplog.text
        assert model.config.rms_norm_eps == 1e-6 and model.config.sliding_window == W
        kinds = model.config.rope_parameters
        assert kinds["sliding_attention"]["rope_type"] == "default"
        assert kinds["full_attention"]["rope_type"] == ("default" if name == "one" else "yarn")
        assert all(k["rope_theta"] == 500_000.0 for k in kinds.values())
    logging.disable_propagation()


def test_every_row_of_the_name_table(forms):
    """Sheet 7.2, row by row, against OLMo-core's own mapping (grouped heads)."""
    from olmo_core.nn.hf.convert import convert_state_to_hf
    from transformers import AutoConfig

    from evals.reference.olmo_core_model import olmo_core_config
    from model.convert.names import entries

    state = olmo_core_config(CFG).build(init_device="cpu").state_dict()
    marked = {name: torch.full_like(t, float(i)) for i, (name, t) in enumerate(state.items())}
    theirs = convert_state_to_hf(AutoConfig.from_pretrained(forms["hf"]), marked)
    table = {e.olmo_core: e for e in entries(CFG)}
    assert set(table) == set(state) and {e.hf for e in table.values()} == set(theirs)
    for i, name in enumerate(state):
        e = table[name]
        assert float(theirs[e.hf].flatten()[0]) == i and tuple(theirs[e.hf].shape) == e.shape, name
