"""What a foreign config.json may say: each field that changes the logits is read or refused. Against transformers and OLMo-core."""

import json

import numpy as np
import pytest
import torch

from infra.errors import IdentityError
from model.config import LayerKind, ModelConfig, YarnConfig
from model.convert.described import hf_model, olmo_core_model
from model.convert.hf import hf_config

CFG = ModelConfig(
    d_model=32, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, vocab_size=120, padded_vocab_size=120, window=8
)  # fmt: skip
SCALED = CFG.model_copy(update={"rope_scaling": YarnConfig(factor=8.0, original_context=16)})
PLAIN = {"rope_type": "default", "rope_theta": 5e5}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "rope_theta": 5e5}


def kinds(full, sliding=PLAIN):
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}, "rope_scaling": None}


# Each changes the logits of transformers (checked below) or is read differently by its versions.
OTHER_MODELS = {
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu', not 'silu'"),
    "linear": (kinds({**PLAIN, "rope_type": "linear", "factor": 2.0}), "rope_type of full attention is 'linear'"),
    "llama3": (
        kinds({**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        "rope_type of full attention is 'llama3'",
    ),
    "old linear": ({"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "'linear'"),
    "attention factor": (kinds({**YARN, "attention_factor": 1.0}), "attention_factor is 1; YaRN by 8 has 1.20794"),
    "sliding theta": (kinds(PLAIN, {**PLAIN, "rope_theta": 1e4}), "500000 in full attention and 10000 in sliding"),
    "sliding scaling": (
        kinds(PLAIN, {**PLAIN, "rope_type": "linear", "factor": 2.0}),
        "sliding_attention.rope_type is 'linear', not 'default'",
    ),
}  # fmt: skip
UNREADABLE = {
    "bias": ({"attention_bias": True}, "attention_bias is True, not False"),
    "tied": ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
    "top theta": ({"rope_parameters": None, "rope_theta": 1e4}, "at the top level only: transformers 5"),
    "flat": ({"rope_parameters": PLAIN}, "rope_parameters.rope_theta stands under no kind of layer"),
    "chunked": ({"layer_types": ["sliding_attention"] * 3 + ["chunked_attention"]}, "names 'chunked_attention'"),
    "short": ({"layer_types": ["sliding_attention"]}, "layer_types is 1 entries, for 4 layers"),
    "string": ({"layer_types": "full_attention"}, "layer_types is 'full_attention', for 4 layers"),
    "unhashable": ({"layer_types": [["full_attention"]] * 4}, r"names \['full_attention'\]"),
    "yarn key": (kinds({**YARN, "mscale": 2.0}), "mscale is 2.0, a field that is not known here"),
    "yarn context": (kinds({"rope_type": "yarn", "factor": 8.0}), "original_max_position_embeddings is missing"),
    "yarn factor": (kinds({**YARN, "factor": 0.5}), "factor: Input should be greater than 1"),
    "text": ({"hidden_size": "64"}, "hidden_size is '64', not a count"),
    "negative": ({"hidden_size": -4}, "hidden_size is -4, not a count"),
    "huge": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, not a count"),
    "many": ({"num_hidden_layers": 5000, "layer_types": None}, "n_layers: Input should be less than or equal to 1024"),
    "heads": ({"num_attention_heads": 3}, "n_heads 3 is not a multiple"),
    "no window": ({"sliding_window": None}, "sliding_window is missing"),
    "nan": ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, not a positive number"),
    "list": ({"rope_parameters": [1]}, r"rope_parameters is \[1\], not an object"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "another family": ({"model_type": "olmo2"}, "is of type 'olmo2', not olmo3"),
}  # fmt: skip


def written(folder, changes, cfg=CFG):
    folder.mkdir(exist_ok=True)
    config = {**hf_config(cfg, context_length=64, eos_id=0, pad_id=1), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", [*OTHER_MODELS, *UNREADABLE])
def test_what_ours_cannot_be_is_refused(tmp_path, name):
    changes, said = {**OTHER_MODELS, **UNREADABLE}[name]
    with pytest.raises(IdentityError, match=said):
        hf_model(written(tmp_path, changes))


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_what_is_refused_is_another_model(tmp_path, name):
    """transformers gives other logits than those of the config that a reader of the known fields would see."""
    from transformers import AutoConfig, Olmo3ForCausalLM

    changes, _ = OTHER_MODELS[name]
    seen = kinds(YARN) if name == "attention factor" else {}
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 120, (1, 40)))
    logits = []
    for config in (written(tmp_path / "a", seen), written(tmp_path / "b", changes)):
        torch.manual_seed(0)
        model = Olmo3ForCausalLM(AutoConfig.from_pretrained(config)).eval()
        for p in model.parameters():
            p.data *= 5 if p.ndim > 1 else 1
        with torch.inference_mode():
            logits.append(model(tokens).logits)
    assert float((logits[0] - logits[1]).abs().max()) > 1e-3


@pytest.mark.parametrize(
    "missing",
    ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size", "sliding_window",
     "rms_norm_eps"],
)  # fmt: skip
def test_a_missing_field_is_named(tmp_path, missing):
    config = json.loads((written(tmp_path, {}) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != missing}))
    with pytest.raises(IdentityError, match=f"{missing} is missing"):
        hf_model(tmp_path)


@pytest.mark.parametrize("text", ["[]", "null", "{", "", '{"model_type": "olmo3"}'])
def test_a_broken_file_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(IdentityError, match=r"config\.json"):
        hf_model(tmp_path)
    with pytest.raises(IdentityError, match=r"config\.json"):
        olmo_core_model(tmp_path)


@pytest.mark.parametrize("cfg", [CFG, SCALED])
@pytest.mark.parametrize("form", ["ours", "transformers 5", "as published"])
def test_every_form_of_the_same_model_is_read(tmp_path, cfg, form):
    """Ours has both spellings; transformers 5 writes rope_parameters only, the published files the older fields only."""
    from transformers import AutoConfig

    folder = written(tmp_path, {}, cfg)
    config = json.loads((folder / "config.json").read_text())
    if form == "transformers 5":
        config = json.loads(AutoConfig.from_pretrained(folder).to_json_string(use_diff=False))
    elif form == "as published":
        del config["rope_parameters"], config["head_dim"]
    (folder / "config.json").write_text(json.dumps(config))
    found = hf_model(folder)
    assert found.layer_kinds == cfg.layer_kinds and found.model_dump(
        exclude={"layer_pattern"}
    ) == cfg.model_dump(exclude={"layer_pattern"})


def test_layer_types_may_be_left_to_the_class(tmp_path):
    found = hf_model(written(tmp_path, {"layer_types": None}))
    assert found.layer_kinds == (LayerKind.SLIDING,) * 3 + (LayerKind.FULL,)


# ---------------------------------------------------------------- OLMo-core


def attention(**changes):
    return lambda m: m["block"]["sequence_mixer"].update(changes)


def block(part, **changes):
    return lambda m: m["block"][part].update(changes)


def override(layer, **changes):
    return lambda m: m["block_overrides"][layer]["sequence_mixer"]["rope"].update(changes)


CORE = {
    "activation": (block("feed_forward", activation="gelu_tanh"), "activation is 'gelu_tanh', not 'silu'"),
    "sinks": (attention(attention_sinks=True), "attention_sinks is True"),
    "scalable softmax": (attention(scalable_softmax=True), "scalable_softmax is True"),
    "clip": (attention(clip_qkv=8.0), "clip_qkv is 8.0"),
    "head norm": (attention(use_head_qk_norm=True), "use_head_qk_norm is True"),
    "no norm": (attention(qk_norm=None), "attention.qk_norm is absent"),
    "fused": (attention(name="fused"), "attention.name is 'fused'"),
    "gate": (attention(gate={"name": "x"}), "gate is"),
    "l2": (block("layer_norm", name="l2_norm"), "layer_norm.name is 'l2_norm', not 'rms'"),
    "norm bias": (block("layer_norm", bias=True), "layer_norm.bias is True"),
    "head eps": (lambda m: m["lm_head"]["layer_norm"].update(eps=1e-5), "several eps: 1e-06, 1e-05"),
    "embedding scale": (lambda m: m.update(embed_scale=8.0), "embed_scale is 8.0"),
    "tied": (lambda m: m.update(tie_word_embeddings=True), "tie_word_embeddings is True"),
    "alpha": (lambda m: m["block"].update(attention_residual_alpha=0.5), "attention_residual_alpha is 0.5"),
    "experts": (lambda m: m["block"].update(feed_forward_moe={"num_experts": 8}), "feed_forward_moe is"),
    "unknown": (lambda m: m["block"].update(soft_cap=30.0), "block.soft_cap is 30.0, a field that is not known here"),
    "global rope": (lambda m: m["block"]["sequence_mixer"]["rope"].update(no_global_rope=True), "no_global_rope"),
    "theta of a layer": (override("3", theta=10_000), "block_overrides.3 changes more than the RoPE scaling"),
    "another scaling": (
        override("3", scaling={"factor": 2.0, "_CLASS_": "olmo_core.nn.rope.PIRoPEScalingConfig"}),
        "scalings other than one YaRN",
    ),
    "scaling everywhere": (lambda m: m["block"]["sequence_mixer"]["rope"].update(scaling={"factor": 2}), "every layer"),
    "wrong layer": (
        lambda m: m.update(block_overrides={"1": m["block_overrides"]["3"]}), "change layers 1, full attention has 3",
    ),
    "no rope": (attention(rope=None), "attention has no rope"),
    "no window": (attention(sliding_window=None), "sliding_window.pattern is None"),
    "two windows": (lambda m: m["block"]["sequence_mixer"]["sliding_window"].update(pattern=[4, 8, -1]), "several sizes"),
    "text": (lambda m: m.update(d_model="q"), "d_model is 'q', not a count"),
    "no layers": (lambda m: m.update(n_layers=0), "n_layers is 0, not a count"),
    "no block": (lambda m: m.pop("block"), "block.name is None, not 'reordered_norm'"),
}  # fmt: skip


@pytest.mark.parametrize("name", CORE)
def test_another_olmo_core_model_is_refused(tmp_path, name):
    from evals.reference.olmo_core_model import olmo_core_config

    change, said = CORE[name]
    config = json.loads(json.dumps({"model": olmo_core_config(SCALED).as_config_dict()}))
    change(config["model"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(IdentityError, match=said):
        olmo_core_model(tmp_path)


def test_the_class_default_of_eps_is_olmo_cores_own(tmp_path):
    from olmo_core.nn.layer_norm import LayerNormConfig, LayerNormType

    from evals.reference.olmo_core_model import olmo_core_config

    config = json.loads(json.dumps({"model": olmo_core_config(CFG).as_config_dict()}))
    for norm in (config["model"]["block"]["layer_norm"], config["model"]["block"]["sequence_mixer"]["qk_norm"],
                 config["model"]["lm_head"]["layer_norm"]):  # fmt: skip
        del norm["eps"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert olmo_core_model(tmp_path).norm_eps == LayerNormConfig(name=LayerNormType.rms).build(size=4).eps
