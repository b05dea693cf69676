"""The model that a foreign `config.json` describes, refused wherever ours would be another one.

    hf_model(directory)        # Hugging Face, as transformers 4 and 5 write it
    olmo_core_model(step_dir)  # what OLMo-core's scripts write beside a checkpoint

Every tensor of a model with another activation, scaling or norm fits ours, and an export of it would be compared with
our own reading of the same config. So each field is read, or held to the one value that ours has, or (OLMo-core's)
listed as without influence on the logits. HF's files carry dozens of fields that say nothing of the model; there the
unknown ones are left to the gate, which runs the source in transformers. The surprising thing: transformers 5 takes a top-level `rope_theta` for full-attention layers
only, where transformers 4 took it for all; a config that the two read differently is refused.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from infra.artifacts import read_json
from infra.errors import IdentityError
from model.config import LARGEST, LayerKind, ModelConfig, YarnConfig
from model.rope import attention_factor

OFF = (None, False)
TRIMMED, PADDED = 100278, 100352  # vocabulary rows of OLMo 3 as published and as trained
THETA = 500_000.0  # of both formats, where they say nothing
KINDS = {"sliding_attention": LayerKind.SLIDING, "full_attention": LayerKind.FULL}

HF_HELD = {
    "hidden_act": ("silu",),
    "attention_bias": OFF,
    "tie_word_embeddings": (False,),
    "partial_rotary_factor": (None, 1),
    "quantization_config": (None,),
}
PLAIN_FIELDS = {"rope_type", "rope_theta"}
YARN_FIELDS = {"factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "attention_factor"}

# OLMo-core: per section, what it must be; what is read; what does not change the logits. Anything else must be off.
NORM_HELD = {"name": ("rms", "fused_rms"), "elementwise_affine": (None, True), "bias": OFF}
NORM_READ = {"eps", "dtype", "full_precision"}
MODEL_HELD = {
    "name": ("default",), "embedding_norm": OFF, "block_pattern": OFF, "embed_scale": (None, 1), "tie_word_embeddings": OFF,
}  # fmt: skip
MODEL_READ = {
    "d_model", "vocab_size", "n_layers", "block", "lm_head", "block_overrides", "dtype", "init_method", "init_seed", "init_std",
    "init_device", "embedding_init_std", "freeze_params", "compile", "dp_config", "ac_config", "float8_config",
}  # fmt: skip
BLOCK_HELD = {
    "name": ("reordered_norm",), "dropout": (None, 0), "attention_residual_alpha": (None, 1),
    "feed_forward_residual_alpha": (None, 1), "feed_forward_moe": OFF,
}  # fmt: skip
BLOCK_READ = {"sequence_mixer", "attention", "layer_norm", "feed_forward"}
MIXER_HELD = {
    "type": ("attention",), "name": ("default",), "bias": OFF, "dropout": (None, 0), "use_head_qk_norm": OFF, "clip_qkv": OFF,
    "gate": OFF, "scalable_softmax": OFF, "attention_sinks": OFF, "qk_norm_per_head_gains": OFF,
}  # fmt: skip
MIXER_READ = {
    "n_heads", "n_kv_heads", "head_dim", "rope", "qk_norm", "sliding_window", "dtype", "use_flash", "backend",
    "use_recompute_qkv_prep",
}  # fmt: skip
ROPE_HELD = {"name": ("default",), "no_global_rope": OFF, "partial_rotary_factor": (None, 1)}
ROPE_READ = {"theta", "scaling", "full_precision"}
MLP_HELD = {"name": ("default",), "bias": OFF, "activation": ("silu",)}
MLP_READ = {"hidden_size", "dtype"}
HEAD_HELD = {"name": ("default",), "bias": OFF}
HEAD_READ = {"layer_norm", "dtype", "loss_implementation"}
YARN_CLASS = "YaRNRoPEScalingConfig"
SCALING_READ = {"factor", "beta_fast", "beta_slow", "old_context_len"}
WINDOW_READ = {"pattern", "force_full_attention_on_first_layer", "force_full_attention_on_last_layer"}


class Reader:
    """Reads a JSON tree strictly and collects what is wrong with it, by dotted name."""

    def __init__(self, path: Path):
        self.path = path
        self.problems: list[str] = []

    def object(self, value: Any, name: str) -> Mapping[str, Any]:
        """`value` if it is an object; otherwise an empty one, and a problem. None is an empty one."""
        if isinstance(value, Mapping):
            return value
        if value is not None:
            self.problems.append(f"{name} is {short(value)}, not an object")
        return {}

    def count(self, tree: Mapping[str, Any], key: str, default: int | None = None) -> int:
        """A whole number from 1 on; `default` where the field is absent or null."""
        value = tree.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
            said = "is missing" if value is None else f"is {short(value)}, not a count"
            self.problems.append(f"{key} {said}")
            return 1
        return value

    def number(
        self, tree: Mapping[str, Any], key: str, default: float | None = None, name: str = ""
    ) -> float:
        """A positive finite number; `default` where the field is absent or null. `name`: where the key alone says too little."""
        value = tree.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            return float(value)
        said = "is missing" if value is None else f"is {short(value)}, not a positive number"
        self.problems.append(f"{name or key} {said}")
        return 1.0

    def held(self, tree: Mapping[str, Any], name: str, values: Mapping[str, tuple[Any, ...]]) -> None:
        """Every field of `values` that `tree` has must be one of its values."""
        for key, allowed in values.items():
            if key in tree and tree[key] not in allowed:
                wanted = next((short(v) for v in allowed if v is not None), "absent")
                self.problems.append(f"{name}{key} is {short(tree[key])}, not {wanted}")

    def known(self, tree: Mapping[str, Any], name: str, fields: set[str]) -> None:
        """Any field not among `fields` must be off: nobody here knows what it does to the model."""
        for key in sorted(map(str, tree.keys() - fields - {"_CLASS_"})):
            if tree[key] not in OFF:
                self.problems.append(f"{name}{key} is {short(tree[key])}, a field that is not known here")

    def finish(self) -> None:
        """Raise IdentityError if anything was wrong."""
        if self.problems:
            shown = "; ".join(dict.fromkeys(self.problems[:8]))
            raise IdentityError(
                f"{self.path} describes no OLMo 3 that ours could be: {shown}",
                "give the checkpoint of an OLMo 3 with its own config.json",
            )

    def model(self, **fields: Any) -> ModelConfig:
        """The model of `fields`. Raises IdentityError where they fit no model."""
        self.finish()
        try:
            return ModelConfig(**fields)
        except ValidationError as e:
            for error in e.errors():
                where = ".".join(map(str, error["loc"]))
                self.problems.append(f"{where}: {error['msg']}" if where else str(error["ctx"]["error"]))
            self.finish()
            raise


def short(value: Any) -> str:
    """`value` for a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def hf_model(directory: str | Path) -> ModelConfig:
    """The model section that the `config.json` of an HF directory describes.

    Raises IdentityError that names every field by which transformers would run another model than ours.
    """
    path = Path(directory) / "config.json"
    r = Reader(path)
    c = r.object(read_json(path, "give a directory with a whole config.json"), "it")
    if c.get("model_type") != "olmo3":
        raise IdentityError(
            f"{path} is of type {short(c.get('model_type'))}, not olmo3",
            "give the checkpoint of an OLMo 3 with its own config.json",
        )
    r.held(c, "", HF_HELD)
    width, heads = r.count(c, "hidden_size"), r.count(c, "num_attention_heads")
    layers, rows = r.count(c, "num_hidden_layers"), r.count(c, "vocab_size")
    kinds = hf_layer_kinds(r, c.get("layer_types"), layers)
    theta, yarn = hf_rope(r, c)
    period = next(p for p in range(1, len(kinds) + 1) if all(k == kinds[i % p] for i, k in enumerate(kinds)))
    return r.model(
        d_model=width,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=r.count(c, "num_key_value_heads", heads),
        head_dim=r.count(c, "head_dim", max(1, width // heads)),
        d_ff=r.count(c, "intermediate_size"),
        vocab_size=TRIMMED if rows == PADDED else rows,
        padded_vocab_size=PADDED if rows == TRIMMED else rows,
        layer_pattern=tuple(kinds[:period]),
        last_layer_full=kinds[-1] is LayerKind.FULL,
        window=r.count(c, "sliding_window"),
        rope_theta=theta,
        rope_scaling=yarn,
        norm_eps=r.number(c, "rms_norm_eps"),
    )


def hf_layer_kinds(r: Reader, types: Any, layers: int) -> list[LayerKind]:
    """The kind of every layer; where nothing is said, every fourth is full (the class default)."""
    if types is None:
        return [LayerKind.SLIDING if (i + 1) % 4 else LayerKind.FULL for i in range(min(layers, 1024))]
    if not isinstance(types, list) or len(types) != layers:
        said = f"{len(types)} entries" if isinstance(types, list) else short(types)
        r.problems.append(f"layer_types is {said}, for {layers} layers")
        return [LayerKind.FULL]
    unknown = sorted({short(t) for t in types if not isinstance(t, str) or t not in KINDS})
    if unknown:
        r.problems.append(f"layer_types names {', '.join(unknown)}; known: {', '.join(KINDS)}")
        return [LayerKind.FULL]
    return [KINDS[t] for t in types]


def hf_rope(r: Reader, c: Mapping[str, Any]) -> tuple[float, YarnConfig | None]:
    """(theta, scaling of the full-attention layers), as both transformers 4 and 5 understand them."""
    by_kind = r.object(c.get("rope_parameters"), "rope_parameters")
    for key in sorted(map(str, by_kind.keys() - KINDS.keys())):
        r.problems.append(
            f"rope_parameters.{key} stands under no kind of layer, where transformers ignores it"
        )
    top = r.number(c, "rope_theta", THETA)
    sliding = r.object(by_kind.get("sliding_attention"), "rope_parameters.sliding_attention")
    full = {
        **r.object(by_kind.get("full_attention"), "rope_parameters.full_attention"),
        **r.object(c.get("rope_scaling"), "rope_scaling"),
    }
    if c.get("rope_theta") is not None and sliding.get("rope_theta") is None and top != THETA:
        r.problems.append(
            f"rope_theta is {top:g} at the top level only: transformers 5 gives the sliding layers {THETA:g}; "
            "state it in rope_parameters for both kinds of layer"
        )
    theta = r.number(full, "rope_theta", top, "rope_theta of full attention")
    other = r.number(sliding, "rope_theta", top, "rope_theta of sliding attention")
    if theta != other:
        r.problems.append(f"rope_theta is {theta:g} in full attention and {other:g} in sliding attention")
    r.held(sliding, "rope_parameters.sliding_attention.", {"rope_type": ("default",)})
    r.known(sliding, "rope_parameters.sliding_attention.", PLAIN_FIELDS)
    kind = full.get("rope_type", "default")
    if kind not in ("default", "yarn"):
        r.problems.append(f"rope_type of full attention is {short(kind)}, not default or yarn")
        return theta, None
    r.known(
        full, "rope_parameters.full_attention.", PLAIN_FIELDS | (YARN_FIELDS if kind == "yarn" else set())
    )
    if kind == "default":
        return theta, None
    yarn = yarn_of(r, full, "original_max_position_embeddings")
    said = r.number(full, "attention_factor", attention_factor(yarn))
    if yarn is not None and not math.isclose(said, attention_factor(yarn), rel_tol=1e-6):
        r.problems.append(
            f"attention_factor is {said:g}; YaRN by {yarn.factor:g} has {attention_factor(yarn):.6g}"
        )
    return theta, yarn


def yarn_of(r: Reader, tree: Mapping[str, Any], context: str) -> YarnConfig | None:
    """The YaRN of `tree`, whose old context stands under `context`."""
    values = {
        "factor": r.number(tree, "factor"),
        "beta_fast": r.number(tree, "beta_fast", 32.0),
        "beta_slow": r.number(tree, "beta_slow", 1.0),
        "original_context": r.count(tree, context),
    }
    try:
        return YarnConfig.model_validate(values)
    except ValidationError as e:
        r.problems += [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in e.errors()]
        return None


def olmo_core_model(step_dir: str | Path) -> ModelConfig:
    """The model section of the `config.json` that OLMo-core's scripts write into a checkpoint directory.

    Raises IdentityError that names every field by which OLMo-core would run another model than ours.
    """
    path = Path(step_dir) / "config.json"
    r = Reader(path)
    whole = r.object(read_json(path, "give a directory with a whole config.json"), "it")
    model = r.object(whole.get("model", whole), "model")
    r.held(model, "", MODEL_HELD)
    r.known(model, "", MODEL_HELD.keys() | MODEL_READ)
    layers = r.count(model, "n_layers")
    block = r.object(model.get("block"), "block")
    mixer, eps = core_block(r, block, "block.")
    head = r.object(model.get("lm_head"), "lm_head")
    r.held(head, "lm_head.", HEAD_HELD)
    r.known(head, "lm_head.", HEAD_HELD.keys() | HEAD_READ)
    eps |= core_norm(r, head.get("layer_norm"), "lm_head.layer_norm")
    if len(eps) > 1:
        r.problems.append(f"the norms have several eps: {', '.join(f'{e:g}' for e in sorted(eps))}")
    rope = r.object(mixer.get("rope"), "block.rope")
    if rope.get("scaling") is not None:
        r.problems.append("RoPE scaling on every layer; OLMo 3 scales full-attention layers only")
    pattern, window, last_full = core_window(r, mixer)
    heads, rows = r.count(mixer, "n_heads"), r.count(model, "vocab_size")
    width = r.count(model, "d_model")
    fields = {
        "d_model": width,
        "n_layers": layers,
        "n_heads": heads,
        "n_kv_heads": r.count(mixer, "n_kv_heads", heads),
        "head_dim": r.count(mixer, "head_dim", max(1, width // heads)),
        "d_ff": r.count(r.object(block.get("feed_forward"), "block.feed_forward"), "hidden_size"),
        "vocab_size": min(rows, TRIMMED),
        "padded_vocab_size": rows,
        "layer_pattern": pattern,
        "last_layer_full": last_full,
        "window": window,
        "rope_theta": r.number(rope, "theta", THETA),
        "norm_eps": eps.pop() if eps else 1e-6,
        "init_std": r.number(model, "init_std", 0.02),
        "init_seed": model.get("init_seed") or 0,
    }
    plain = r.model(**fields)
    yarn = core_scaling(r, model, block, plain)
    return r.model(**fields, rope_scaling=yarn)


def core_block(r: Reader, block: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], set[float]]:
    """(the attention section of a block, the eps of its norms); what is wrong goes to the reader."""
    r.held({"name": None, **block}, name, BLOCK_HELD)
    r.known(block, name, BLOCK_HELD.keys() | BLOCK_READ)
    mixer = r.object(block.get("sequence_mixer") or block.get("attention"), f"{name}attention")
    rope, mlp = (
        r.object(tree.get(key), f"{name}{key}") for tree, key in ((mixer, "rope"), (block, "feed_forward"))
    )
    for part, where, held, read in (
        (mixer, "attention.", MIXER_HELD, MIXER_READ),
        (rope, "attention.rope.", ROPE_HELD, ROPE_READ),
        (mlp, "feed_forward.", MLP_HELD, MLP_READ),
    ):
        r.held(part, name + where, held)
        r.known(part, name + where, held.keys() | read)
    if not rope:
        r.problems.append(f"{name}attention has no rope")
    eps = core_norm(r, block.get("layer_norm"), f"{name}layer_norm")
    return mixer, eps | core_norm(r, mixer.get("qk_norm"), f"{name}attention.qk_norm")


def core_norm(r: Reader, value: Any, name: str) -> set[float]:
    """The eps of a norm (class default 1e-5), which must be there and be an RMSNorm with a gain."""
    norm = r.object(value, name)
    if not norm:
        r.problems.append(f"{name} is absent")
        return set()
    r.held({"name": "default", **norm}, f"{name}.", NORM_HELD)
    r.known(norm, f"{name}.", NORM_HELD.keys() | NORM_READ)
    return {r.number(norm, "eps", 1e-5, f"{name}.eps")}


def core_window(r: Reader, mixer: Mapping[str, Any]) -> tuple[tuple[LayerKind, ...], int, bool]:
    """(pattern of layers, window, whether the last layer is forced to full attention)."""
    window = r.object(mixer.get("sliding_window"), "sliding_window")
    r.known(window, "sliding_window.", WINDOW_READ)
    pattern = window.get("pattern")
    if (
        not isinstance(pattern, list)
        or not pattern
        or not all(type(w) is int and (w == -1 or w >= 1) for w in pattern)
    ):
        r.problems.append(f"sliding_window.pattern is {short(pattern)}, no list of windows and -1")
        return (LayerKind.FULL,), 1, True
    sizes = {w for w in pattern if w != -1}
    if len(sizes) != 1:
        r.problems.append(f"sliding_window.pattern has windows of several sizes or none: {sorted(sizes)}")
    if window.get("force_full_attention_on_first_layer", True):
        r.problems.append("the first layer is forced to full attention")
    kinds = tuple(LayerKind.FULL if w == -1 else LayerKind.SLIDING for w in pattern)
    return kinds, max(sizes, default=1), bool(window.get("force_full_attention_on_last_layer", True))


def core_scaling(
    r: Reader, model: Mapping[str, Any], block: Mapping[str, Any], plain: ModelConfig
) -> YarnConfig | None:
    """The YaRN that `block_overrides` give to every full-attention layer; they may change nothing else."""
    overrides = r.object(model.get("block_overrides"), "block_overrides")
    if not overrides:
        return None
    full = {str(i) for i, kind in enumerate(plain.layer_kinds) if kind is LayerKind.FULL}
    if {str(k) for k in overrides} != full:
        r.problems.append(
            f"block_overrides change layers {', '.join(sorted(map(str, overrides)))[:60]}, "
            f"full attention has {', '.join(sorted(full, key=int))[:60]}"
        )
    scalings = []
    for key, override in overrides.items():
        scaling, rest = without_scaling(r.object(override, f"block_overrides.{key}"))
        if rest != without_scaling(block)[1]:
            r.problems.append(f"block_overrides.{key} changes more than the RoPE scaling")
        scalings.append(r.object(scaling, f"block_overrides.{key}.rope.scaling"))
    first = scalings[0]
    kind = str(first.get("_CLASS_", YARN_CLASS)).rpartition(".")[2]
    if any(s != first for s in scalings) or kind != YARN_CLASS:
        r.problems.append(f"block_overrides hold scalings other than one YaRN: {short(scalings[:2])}")
        return None
    r.known(first, "block_overrides.rope.scaling.", SCALING_READ)
    return yarn_of(r, first, "old_context_len")


def without_scaling(block: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """(the RoPE scaling of a block, the block without it)."""
    key = "sequence_mixer" if "sequence_mixer" in block else "attention"
    mixer = block.get(key)
    rope = mixer.get("rope") if isinstance(mixer, Mapping) else None
    if not isinstance(mixer, Mapping) or not isinstance(rope, Mapping):
        return None, dict(block)
    rest = {k: v for k, v in rope.items() if k != "scaling"}
    return rope.get("scaling"), {**block, key: {**mixer, "rope": rest}}
