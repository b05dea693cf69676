"""ONE table of weight names: ours, HF `Olmo3ForCausalLM`, OLMo-core. Both directions derive from it.

All three keep `[out, in]`, so conversion is renaming and stacking, never a transpose (sheet section 7.2).
The surprising thing: HF calls w2 `down_proj` and w3 `up_proj`, and the norms on branch outputs
`post_attention_layernorm` and `post_feedforward_layernorm`; there is no `input_layernorm`.
"""

import dataclasses

from model import layout
from model.config import ModelConfig

TOP = {
    "embeddings": ("model.embed_tokens.weight", "embeddings.weight"),
    "final_norm": ("model.norm.weight", "lm_head.norm.weight"),
    "lm_head": ("lm_head.weight", "lm_head.w_out.weight"),
}
LAYER = {
    "w_q": ("model.layers.{i}.self_attn.q_proj.weight", "blocks.{i}.attention.w_q.weight"),
    "w_k": ("model.layers.{i}.self_attn.k_proj.weight", "blocks.{i}.attention.w_k.weight"),
    "w_v": ("model.layers.{i}.self_attn.v_proj.weight", "blocks.{i}.attention.w_v.weight"),
    "w_out": ("model.layers.{i}.self_attn.o_proj.weight", "blocks.{i}.attention.w_out.weight"),
    "q_norm": ("model.layers.{i}.self_attn.q_norm.weight", "blocks.{i}.attention.q_norm.weight"),
    "k_norm": ("model.layers.{i}.self_attn.k_norm.weight", "blocks.{i}.attention.k_norm.weight"),
    "attention_norm": (
        "model.layers.{i}.post_attention_layernorm.weight",
        "blocks.{i}.attention_norm.weight",
    ),
    "w1": ("model.layers.{i}.mlp.gate_proj.weight", "blocks.{i}.feed_forward.w1.weight"),
    "w2": ("model.layers.{i}.mlp.down_proj.weight", "blocks.{i}.feed_forward.w2.weight"),
    "w3": ("model.layers.{i}.mlp.up_proj.weight", "blocks.{i}.feed_forward.w3.weight"),
    "feed_forward_norm": (
        "model.layers.{i}.post_feedforward_layernorm.weight",
        "blocks.{i}.feed_forward_norm.weight",
    ),
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor under its three names. `index`: its place on our stacked axis 0 (None: not stacked)."""

    path: layout.Path
    index: int | None
    hf: str
    olmo_core: str
    shape: tuple[int, ...]
    vocab_rows: bool


def entries(cfg: ModelConfig) -> list[Entry]:
    """Every tensor of the model, in OLMo-core's parameter order; shapes are padded (training) shapes."""
    sizes = layout.axis_sizes(cfg)

    def top(name: str) -> Entry:
        axes = layout.TOP_PARAMS[name]
        return Entry((name,), None, *TOP[name], tuple(sizes[a] for a in axes), axes[0].startswith("vocab"))

    out = [top("embeddings")]
    order = (
        "w_q",
        "w_k",
        "w_v",
        "w_out",
        "q_norm",
        "k_norm",
        "attention_norm",
        "w1",
        "w2",
        "w3",
        "feed_forward_norm",
    )
    for i in range(cfg.n_layers):
        path, index = layout.layer_place(cfg, i)
        for name in order:
            hf, core = (text.format(i=i) for text in LAYER[name])
            shape = tuple(sizes[a] for a in layout.LAYER_PARAMS[name])
            out.append(Entry((*path, name), index, hf, core, shape, False))
    return [*out, top("final_norm"), top("lm_head")]
