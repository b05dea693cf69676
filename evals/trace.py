"""What happens inside the reference: every intermediate of transformers' `Olmo3ForCausalLM`, as NumPy arrays.

One forward pass with hooks, one prompt. The surprising thing: RoPE and the attention core are plain functions
without a module, so the rotated q and k are made here from the reference's own cos and sin, and the core's
result is what enters `o_proj`. Source: transformers 5.24, `models/olmo3/modeling_olmo3.py`.

Axis letters: S sequence, D model width, Q heads x head width, K key heads x head width, F hidden, V vocabulary.
"""

from pathlib import Path
from typing import Any, Literal

import numpy as np

LAYER_OUTPUTS = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.q_norm": "q_normed",
    "self_attn.k_norm": "k_normed",
    "self_attn.o_proj": "attention",
    "post_attention_layernorm": "attention_normed",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "mlp",
    "post_feedforward_layernorm": "mlp_normed",
}
LAYER_INPUTS = {"self_attn.o_proj": "core", "mlp.gate_proj": "middle", "mlp.down_proj": "activated"}


def trace_hf(
    hf_dir: str | Path, tokens: np.ndarray, *, attention: Literal["sdpa", "eager"] = "sdpa"
) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """(top, layers): intermediates of one prompt, tokens int32[S].

    top: embedded [S,D], final_in [S,D], final [S,D], logits [S,V]. Each layer: x, out, middle, attention,
    attention_normed, mlp, mlp_normed [S,D]; q, q_normed, core [S,Q]; k, v, k_normed [S,K]; gate, up,
    activated [S,F]; cos, sin [S,head width].
    """
    import torch
    from transformers import Olmo3ForCausalLM

    model = Olmo3ForCausalLM.from_pretrained(
        str(hf_dir),
        attn_implementation=attention,
        dtype=torch.float32,
        local_files_only=True,
        use_safetensors=True,
    ).eval()
    top: dict[str, np.ndarray] = {}
    layers: list[dict[str, np.ndarray]] = [{} for _ in model.model.layers]

    def keep(into: dict[str, np.ndarray], name: str, value: Any) -> None:
        tensor = value[0] if isinstance(value, tuple) else value
        into[name] = tensor.detach()[0].float().numpy().copy()

    def on_output(into: dict[str, np.ndarray], name: str) -> Any:
        return lambda module, inputs, output: keep(into, name, output)

    def on_input(into: dict[str, np.ndarray], name: str) -> Any:
        return lambda module, inputs: keep(into, name, inputs[0])

    def on_attention(into: dict[str, np.ndarray]) -> Any:
        def hook(module: Any, inputs: Any, named: dict[str, Any]) -> None:
            for name, value in zip(("cos", "sin"), named["position_embeddings"]):
                keep(into, name, value)

        return hook

    model.model.embed_tokens.register_forward_hook(on_output(top, "embedded"))
    model.model.norm.register_forward_pre_hook(on_input(top, "final_in"))
    model.model.norm.register_forward_hook(on_output(top, "final"))
    for layer, into in zip(model.model.layers, layers):
        layer.register_forward_pre_hook(on_input(into, "x"))
        layer.register_forward_hook(on_output(into, "out"))
        layer.self_attn.register_forward_pre_hook(on_attention(into), with_kwargs=True)
        for path, name in LAYER_OUTPUTS.items():
            layer.get_submodule(path).register_forward_hook(on_output(into, name))
        for path, name in LAYER_INPUTS.items():
            layer.get_submodule(path).register_forward_pre_hook(on_input(into, name))
    with torch.inference_mode():
        ids = torch.from_numpy(np.asarray(tokens, np.int64)[None])
        top["logits"] = model(ids, use_cache=False).logits[0].float().numpy()
    return top, layers


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """x [S,H*hd] turned by full-width cos and sin [S,hd], half-split pairs, float32: [S,H,hd]."""
    width = cos.shape[-1]
    heads = x.reshape(len(x), -1, width)
    half = np.concatenate([-heads[..., width // 2 :], heads[..., : width // 2]], axis=-1)
    return heads * cos[:, None] + half * sin[:, None]
