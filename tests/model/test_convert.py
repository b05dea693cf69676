"""Conversion: round trips, strictness, the published form, streaming files. Against safetensors and transformers."""

import json

import jax
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from infra.errors import IdentityError
from model import layout
from model.config import ModelConfig, YarnConfig
from model.convert.hf import export_hf, hf_config, import_hf
from model.convert.names import entries

CFG = ModelConfig(d_model=32, n_layers=6, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, vocab_size=90,
                  padded_vocab_size=128, window=8)  # fmt: skip


def same(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(x, y) and x.dtype == y.dtype, a, b))


@pytest.fixture
def exported(ref, tmp_path):
    params = ref.random_params(CFG)
    export_hf(params, CFG, tmp_path / "hf", context_length=64, keep_padding=True, eos_id=1, pad_id=2)
    return params, tmp_path / "hf"


def test_round_trip_is_bit_equal(exported):
    params, path = exported
    assert same(params, import_hf(path, CFG))


def test_round_trip_in_many_files(ref, tmp_path):
    params = ref.random_params(CFG)
    export_hf(params, CFG, tmp_path / "hf", context_length=64, keep_padding=True, max_file_bytes=20_000)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3 and set(index["weight_map"]) == {
        e.hf for e in entries(CFG)
    }
    assert same(params, import_hf(tmp_path / "hf", CFG))


def test_the_library_reads_what_we_write(exported):
    params, path = exported
    tensors = load_file(path / "model.safetensors")
    assert set(tensors) == {e.hf for e in entries(CFG)}
    for e in entries(CFG):
        leaf = layout.get(params, e.path)
        assert np.array_equal(tensors[e.hf], leaf if e.index is None else leaf[e.index])
    with safe_open(path / "model.safetensors", framework="pt") as f:
        assert f.metadata() == {"format": "pt"}


def test_published_form_is_trimmed_and_rounded(ref, tmp_path):  # A19, section 7.2
    params = ref.random_params(CFG)
    config = export_hf(params, CFG, tmp_path / "hf", context_length=64, dtype="bfloat16", eos_id=1, pad_id=2)
    assert config["vocab_size"] == 90
    with safe_open(tmp_path / "hf" / "model.safetensors", framework="pt") as f:
        head = f.get_tensor("lm_head.weight")
    assert head.dtype == torch.bfloat16 and head.shape == (90, 32)
    assert torch.equal(head, torch.tensor(params["lm_head"][:90]).bfloat16())
    with pytest.raises(IdentityError, match=r"embed_tokens.*\(90, 32\)"):
        import_hf(tmp_path / "hf", CFG)
    with pytest.raises(IdentityError, match="rounded"):  # A10
        import_hf(tmp_path / "hf", CFG, missing_vocab_rows="zeros")
    back = import_hf(tmp_path / "hf", CFG, missing_vocab_rows="zeros", allow_rounded=True)
    assert (back["lm_head"][90:] == 0).all()
    np.testing.assert_allclose(back["lm_head"][:90], params["lm_head"][:90], rtol=2**-8)


def test_any_wrong_key_is_an_error(exported):  # A7, B2
    _, path = exported
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.q_proj.weight2"] = tensors.pop("model.layers.0.self_attn.q_proj.weight")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:, :-1].copy()
    save_file(tensors, file)
    with pytest.raises(IdentityError) as e:
        import_hf(path, CFG)
    text = str(e.value)
    assert "missing model.layers.0.self_attn.q_proj.weight" in text
    assert "unexpected model.layers.0.self_attn.q_proj.weight2" in text
    assert "lm_head.weight has shape (128, 31), expected (128, 32)" in text


def test_other_architecture_is_refused(exported):
    _, path = exported
    with pytest.raises(IdentityError, match="window is 8, ours 16"):
        import_hf(path, CFG.model_copy(update={"window": 16}))
    with pytest.raises(IdentityError, match="rope_theta"):
        import_hf(path, CFG.model_copy(update={"rope_theta": 10000.0}))


def test_cut_short_or_missing_file(exported):
    _, path = exported
    file = path / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[:-100])
    with pytest.raises(IdentityError, match="cut short"):
        import_hf(path, CFG)
    file.write_bytes(b"xx")
    with pytest.raises(IdentityError, match="not a safetensors file"):
        import_hf(path, CFG)
    file.unlink()
    with pytest.raises(IdentityError, match="does not exist"):
        import_hf(path, CFG)


def test_config_is_complete():
    from transformers import Olmo3Config

    cfg = CFG.model_copy(update={"rope_theta": 12345.0})
    made = Olmo3Config(**hf_config(cfg, context_length=64, eos_id=1, pad_id=2))
    assert (
        made.rope_parameters["sliding_attention"]["rope_theta"] == 12345.0
    )  # sheet 7.3: top-level theta is not enough
    assert made.rope_parameters["full_attention"]["rope_theta"] == 12345.0
    assert made.rms_norm_eps == 1e-6 and made.sliding_window == 8 and not made.tie_word_embeddings
    assert made.layer_types == ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] + [
        "full_attention"
    ]
    yarn = hf_config(cfg.model_copy(update={"rope_scaling": YarnConfig()}), context_length=65536)
    assert yarn["rope_scaling"]["attention_factor"] == pytest.approx(1.2079441541679836, rel=1e-15)
    assert yarn["rope_parameters"]["sliding_attention"]["rope_type"] == "default"


def test_transformers_loads_every_weight(exported):
    from transformers import AutoModelForCausalLM

    _, path = exported
    _, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]


def test_names_of_olmo_core(ref):
    """The table's OLMo-core names and shapes are exactly those of its model."""
    state = ref.core_config(CFG).build(init_device="meta").state_dict()
    assert {e.olmo_core: e.shape for e in entries(CFG)} == {k: tuple(v.shape) for k, v in state.items()}


def test_converter_of_olmo_core_agrees(exported, tmp_path, ref):
    """OLMo-core's own HF export of the same weights has the same tensors under the same names."""
    from olmo_core.nn.hf import save_hf_model

    params, path = exported
    model = ref.core_model(CFG, params)
    save_hf_model(tmp_path / "theirs", model.state_dict(), model)
    theirs, ours = load_file(tmp_path / "theirs" / "model.safetensors"), load_file(path / "model.safetensors")
    assert theirs.keys() == ours.keys()
    assert all(np.array_equal(theirs[k], ours[k]) for k in ours)
