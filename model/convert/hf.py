"""Our weights to and from HF `Olmo3ForCausalLM` safetensors. Strict: no key is ever missed, extra or misshaped.

The surprising thing: exports for parity keep all 100,352 rows (`keep_padding=True`), because the 74 padding rows take
part in the softmax; the published form keeps 100,278. Configuration fields: sheet section 7.3. RoPE parameters are
written both in the old form (`rope_theta`, `rope_scaling`) and per layer type, since transformers 5 reads the
top-level theta for full-attention layers only.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from infra.artifacts import atomic_dir, write_json_atomic
from infra.errors import IdentityError
from model import layout
from model.config import LayerKind, ModelConfig
from model.convert.described import hf_model
from model.convert.names import entries
from model.convert.safetensors_io import Tensors, write
from model.rope import attention_factor

EOS_ID, PAD_ID, IM_END_ID = 100257, 100277, 100265
KIND_NAMES = {LayerKind.SLIDING: "sliding_attention", LayerKind.FULL: "full_attention"}


def hf_config(
    cfg: ModelConfig,
    *,
    context_length: int,
    dtype: str = "float32",
    keep_padding: bool = False,
    eos_id: int | None = EOS_ID,
    pad_id: int | None = PAD_ID,
) -> dict[str, Any]:
    """`config.json` of the export; every field whose class default is wrong for OLMo 3 is set."""
    plain: dict[str, Any] = {"rope_type": "default", "rope_theta": cfg.rope_theta}
    scaling = None
    if cfg.rope_scaling is not None:
        y = cfg.rope_scaling
        scaling = {
            "rope_type": "yarn",
            "factor": y.factor,
            "original_max_position_embeddings": y.original_context,
            "beta_fast": y.beta_fast,
            "beta_slow": y.beta_slow,
            "attention_factor": attention_factor(y),
        }
    full = plain if scaling is None else {**scaling, "rope_theta": cfg.rope_theta}
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "vocab_size": cfg.padded_vocab_size if keep_padding else cfg.vocab_size,
        "hidden_size": cfg.d_model,
        "intermediate_size": cfg.d_ff,
        "num_hidden_layers": cfg.n_layers,
        "num_attention_heads": cfg.n_heads,
        "num_key_value_heads": cfg.n_kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context_length,
        "initializer_range": cfg.init_std,
        "rms_norm_eps": cfg.norm_eps,
        "use_cache": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "pad_token_id": pad_id,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "sliding_window": cfg.window,
        "layer_types": [KIND_NAMES[kind] for kind in cfg.layer_kinds],
        "rope_theta": cfg.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"sliding_attention": plain, "full_attention": full},
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def generation_config(rows: int, eos_id: int | None, pad_id: int | None) -> dict[str, Any]:
    """`generation_config.json`: stops are the end of a turn and of a document, where the vocabulary has them."""
    stops = [i for i in (IM_END_ID, eos_id) if i is not None and i < rows]
    return {"eos_token_id": stops, "pad_token_id": pad_id}


def export_hf(
    params: Any,
    cfg: ModelConfig,
    out_dir: str | Path,
    *,
    context_length: int,
    dtype: Literal["float32", "bfloat16"] = "float32",
    keep_padding: bool = False,
    eos_id: int | None = EOS_ID,
    pad_id: int | None = PAD_ID,
    max_file_bytes: int = 5 * 10**9,
) -> dict[str, Any]:
    """Write `out_dir` (config.json, generation_config.json, safetensors) and return the config.

    `params`: our tree of float32 arrays (numpy or jax). Tensors are written one by one; the directory appears whole.
    """
    if cfg.n_heads * cfg.head_dim != cfg.d_model:
        raise IdentityError(
            f"HF's Olmo3 derives head_dim as hidden_size/heads = {cfg.d_model / cfg.n_heads:g}, ours is {cfg.head_dim}",
            "such a model has no HF form",
        )
    config = hf_config(
        cfg,
        context_length=context_length,
        dtype=dtype,
        keep_padding=keep_padding,
        eos_id=eos_id,
        pad_id=pad_id,
    )
    rows = config["vocab_size"]
    tensors: list[tuple[str, tuple[int, ...], Callable[[], np.ndarray]]] = []
    for e in entries(cfg):
        leaf = layout.get(params, e.path)
        source = leaf if e.index is None else leaf[e.index]
        if tuple(source.shape) != e.shape:
            raise IdentityError(
                f"parameter {'/'.join(e.path)} has shape {tuple(source.shape)}, expected {e.shape}"
            )
        shape = (rows, *e.shape[1:]) if e.vocab_rows else e.shape

        tensors.append((e.hf, shape, functools.partial(_rows, source, shape[0])))
    with atomic_dir(out_dir) as tmp:
        write(tmp, tensors, dtype, max_file_bytes)
        write_json_atomic(tmp / "config.json", config)
        write_json_atomic(tmp / "generation_config.json", generation_config(rows, eos_id, pad_id))
    return config


def _rows(source: Any, rows: int) -> np.ndarray:
    return np.asarray(jax.device_get(source))[:rows]


def import_hf(
    directory: str | Path,
    cfg: ModelConfig,
    *,
    allow_rounded: bool = False,
    missing_vocab_rows: Literal["error", "zeros"] = "error",
    same_architecture: bool = True,
) -> dict[str, Any]:
    """Our tree of float32 numpy arrays from an HF directory.

    Raises IdentityError that names every missing, unexpected or misshaped tensor, and any tensor that is not float32
    unless `allow_rounded`. A file with the published 100,278 rows is refused unless `missing_vocab_rows='zeros'`.
    With `same_architecture` its config.json must describe `cfg`; without, only names and shapes must fit.
    """
    directory = Path(directory)
    tensors = Tensors(directory)
    if same_architecture:
        check_config(directory, cfg)
    table = {e.hf: e for e in entries(cfg)}
    problems = [f"missing {n}" for n in sorted(table.keys() - tensors.names())]
    problems += [f"unexpected {n}" for n in sorted(tensors.names() - table.keys())]
    for name in sorted(table.keys() & tensors.names()):
        e, shape = table[name], tensors.shape(name)
        short = e.vocab_rows and missing_vocab_rows == "zeros" and shape == (cfg.vocab_size, *e.shape[1:])
        if shape != e.shape and not short:
            problems.append(f"{name} has shape {shape}, expected {e.shape}")
        elif tensors.dtype(name) != "F32" and not allow_rounded:
            problems.append(f"{name} is {tensors.dtype(name)}, not F32: its weights are rounded")
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise IdentityError(
            f"{directory} does not fit the model: {shown}", "check the model section against its config.json"
        )
    out = layout.map_axes(lambda path, axes, shape: np.zeros(shape, np.float32), cfg)
    for name, e in table.items():
        source = tensors.read(name)
        target = layout.get(out, e.path) if e.index is None else layout.get(out, e.path)[e.index]
        target[: len(source)] = source
    return out


def check_config(directory: Path, cfg: ModelConfig) -> None:
    """Refuse a directory whose config.json describes another architecture than `cfg`."""
    if not (directory / "config.json").is_file():
        return
    theirs, ours = (architecture(c) for c in (hf_model(directory), cfg))
    wrong = [f"{k} is {theirs[k]}, ours {ours[k]}" for k in ours if theirs[k] != ours[k]]
    if wrong:
        raise IdentityError(
            f"{directory}/config.json describes another model: {'; '.join(wrong)}",
            "use the model section it was made with",
        )


def architecture(cfg: ModelConfig) -> dict[str, Any]:
    """What of a model its config.json must agree with: all but vocabulary (its rows are checked) and initialisation."""
    free = {"vocab_size", "padded_vocab_size", "init_std", "init_seed", "layer_pattern", "last_layer_full"}
    kinds = [KIND_NAMES[kind] for kind in cfg.layer_kinds]
    return {**cfg.model_dump(mode="json", exclude=free), "layer_types": kinds}
