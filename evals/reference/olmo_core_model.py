"""Our `ModelConfig` as OLMo-core's model, and OLMo-core's own HF export of it.

The surprising thing: OLMo-core's export states `rope_theta` once, and transformers 5.24 then applies it to
full-attention layers only (sliding layers silently get 500000). `export_hf` therefore rewrites the
configuration with one entry per layer type, and fills in the context length and the token ids.
Source: ai2-olmo-core 3.0.0, `nn/transformer/config.py`, `nn/hf/checkpoint.py`.
"""

import json
import math
from pathlib import Path
from typing import Any

from olmo_core.nn.attention import AttentionBackendName, SlidingWindowAttentionConfig
from olmo_core.nn.feed_forward import FeedForwardConfig
from olmo_core.nn.hf import save_hf_model
from olmo_core.nn.rope import YaRNRoPEScalingConfig
from olmo_core.nn.transformer import Transformer, TransformerBlockType, TransformerConfig

from infra.artifacts import atomic_dir
from model.config import LayerKind, ModelConfig


def olmo_core_config(cfg: ModelConfig) -> TransformerConfig:
    """OLMo-core's configuration of `cfg`: reordered norm, full-width QK norm, fp32, torch attention."""
    theta = int(cfg.rope_theta) if float(cfg.rope_theta).is_integer() else cfg.rope_theta
    built = TransformerConfig.llama_like(
        d_model=cfg.d_model,
        vocab_size=cfg.padded_vocab_size,
        n_layers=cfg.n_layers,
        n_heads=cfg.n_heads,
        n_kv_heads=None if cfg.n_kv_heads == cfg.n_heads else cfg.n_kv_heads,
        head_dim=cfg.head_dim,
        block_name=TransformerBlockType.reordered_norm,
        qk_norm=True,
        rope_theta=theta,  # type: ignore[arg-type]
        layer_norm_eps=cfg.norm_eps,
        feed_forward=FeedForwardConfig(hidden_size=cfg.d_ff, bias=False),
        attn_backend=AttentionBackendName.torch,
        sliding_window=SlidingWindowAttentionConfig(
            pattern=[cfg.window if kind is LayerKind.SLIDING else -1 for kind in cfg.layer_pattern],
            force_full_attention_on_first_layer=False,
            force_full_attention_on_last_layer=cfg.last_layer_full,
        ),
        init_seed=cfg.init_seed,
        init_std=cfg.init_std,
    )
    if cfg.rope_scaling is None:
        return built
    return built.with_rope_scaling(
        YaRNRoPEScalingConfig(
            factor=cfg.rope_scaling.factor,
            beta_fast=int(cfg.rope_scaling.beta_fast),
            beta_slow=int(cfg.rope_scaling.beta_slow),
            old_context_len=cfg.rope_scaling.original_context,
        ),
        full_attn_layers_only=True,
    )


def build_initialised(cfg: ModelConfig, max_sequence_length: int) -> Transformer:
    """The model with OLMo-core's own initial weights: CPU draw, seed `init_seed`, fp32."""
    import torch

    model = olmo_core_config(cfg).build(init_device="cpu")
    model.init_weights(max_seq_len=max_sequence_length, device=torch.device("cpu"))
    return model


def export_hf(
    model: Transformer, cfg: ModelConfig, out: Path, *, context_length: int, eos_id: int, pad_id: int
) -> None:
    """Write `model` to directory `out` as fp32 HF safetensors with every padded vocabulary row, atomically."""
    with atomic_dir(out) as staging:
        save_hf_model(staging, model.state_dict(), model, save_overwrite=True)
        path = staging / "config.json"
        config = json.loads(path.read_text())
        config.update(hf_config_facts(cfg, context_length=context_length, eos_id=eos_id, pad_id=pad_id))
        config.pop("rope_theta", None)
        config.pop("rope_scaling", None)
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        (staging / "generation_config.json").unlink(missing_ok=True)
        for written in staging.iterdir():
            written.chmod(0o644)


def hf_config_facts(cfg: ModelConfig, *, context_length: int, eos_id: int, pad_id: int) -> dict[str, Any]:
    """The fields OLMo-core's export leaves open or that transformers would read wrongly."""
    plain = {"rope_type": "default", "rope_theta": cfg.rope_theta}
    full: dict[str, Any] = dict(plain)
    if cfg.rope_scaling is not None:
        full = {
            "rope_type": "yarn",
            "rope_theta": cfg.rope_theta,
            "factor": cfg.rope_scaling.factor,
            "beta_fast": cfg.rope_scaling.beta_fast,
            "beta_slow": cfg.rope_scaling.beta_slow,
            "original_max_position_embeddings": cfg.rope_scaling.original_context,
            "attention_factor": 0.1 * math.log(cfg.rope_scaling.factor) + 1.0,
        }
    return {
        "max_position_embeddings": context_length,
        "rope_parameters": {"sliding_attention": plain, "full_attention": full},
        "eos_token_id": eos_id,
        "pad_token_id": pad_id,
        "bos_token_id": None,
        "dtype": "float32",
    }
