"""OLMo-core checkpoints to ours: weights, Adam state, and a checkpoint from which our trainer goes on.

    params = read_params("reference/checkpoints/step48", cfg)
    adopt(TrainSpec.from_run(RUN), "reference/checkpoints/step48", 48)   # then `python -m model.train --run RUN`

Names derive from the one table in `model.convert.names`. Every tensor must be known: weights and the three
optimizer entries per weight; the hyperparameter values OLMo-core stores beside them are listed as dropped. The
surprising thing: OLMo-core keeps one Adam counter per tensor, ours is one for all, so unequal counters are refused;
and it does not keep the skip-step window, so an adopted run starts with an empty one, as the reference does.
"""

from pathlib import Path
from typing import Any

import numpy as np

from infra.artifacts import read_json
from infra.errors import IdentityError
from model import layout
from model.config import LayerKind, ModelConfig, OptimizerConfig, YarnConfig
from model.convert.dcp import Checkpoint
from model.convert.names import Entry, entries

MOMENTS = {"m": "exp_avg", "v": "exp_avg_sq"}
DROPPED = "optim.param_groups."  # learning rate, betas, eps, decay: the recipe states them


def source_name(entry: Entry, part: str = "params") -> str:
    """The checkpoint's key of a weight (`params`), of a moment (`m`, `v`) or of its counter (`step`)."""
    if part == "params":
        return f"model.{entry.olmo_core}"
    return f"optim.state.{entry.olmo_core}.{MOMENTS.get(part, part)}"


def check(checkpoint: Checkpoint, cfg: ModelConfig, *, optimizer: bool) -> None:
    """Raise IdentityError that names every missing, unexpected or misshaped tensor."""
    expected: dict[str, tuple[int, ...]] = {}
    for e in entries(cfg):
        expected[source_name(e)] = e.shape
        if optimizer or any(n.startswith("optim.state.") for n in checkpoint.tensors):
            expected.update({source_name(e, part): e.shape for part in MOMENTS})
            expected[source_name(e, "step")] = ()
    found = {n: t.shape for n, t in checkpoint.tensors.items() if not n.startswith(DROPPED)}
    problems = [f"missing {n}" for n in sorted(expected.keys() - found.keys())]
    problems += [f"unexpected {n}" for n in sorted(found.keys() - expected.keys())]
    problems += [f"unexpected {n}" for n in sorted(checkpoint.values()) if not n.startswith(DROPPED)]
    problems += [
        f"{n} has shape {found[n]}, expected {expected[n]}"
        for n in sorted(expected.keys() & found.keys())
        if found[n] != expected[n]
    ]
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise IdentityError(
            f"{checkpoint.directory} does not fit the model: {shown}",
            "check the model section against its config.json",
        )


def read_params(directory: str | Path, cfg: ModelConfig) -> dict[str, Any]:
    """Our tree of float32 numpy arrays from an OLMo-core checkpoint. Raises IdentityError (see `check`)."""
    checkpoint = Checkpoint(directory)
    check(checkpoint, cfg, optimizer=False)
    return _tree(checkpoint, cfg, "params")


def read_state(
    directory: str | Path, cfg: ModelConfig, optimizer: OptimizerConfig, step: int, *, streamed: bool = False
) -> dict[str, Any]:
    """The whole training state after `step`: `{"params", "opt": {"m", "v", "count", "window"}, "step"}`, numpy.

    `streamed`: weights and moments are `Pieces`, read only while Orbax writes them.
    """
    checkpoint = Checkpoint(directory)
    check(checkpoint, cfg, optimizer=True)
    counts = {float(checkpoint.read(source_name(e, "step"))) for e in entries(cfg)}
    if len(counts) != 1:
        raise IdentityError(
            f"{checkpoint.directory}: Adam's counter is not the same for every tensor: {sorted(counts)[:4]}",
            "only a checkpoint of one uninterrupted set of parameters can be continued",
        )
    slots = optimizer.skip_step.window + 1
    window = {
        "losses": np.zeros(slots, np.float32),
        "norms": np.zeros(slots, np.float32),
        "seen": np.int32(0),
    }
    make = _streamed if streamed else _tree
    return {
        "params": make(checkpoint, cfg, "params"),
        "opt": {
            "m": make(checkpoint, cfg, "m", np.dtype(optimizer.moments_dtype)),
            "v": make(checkpoint, cfg, "v", np.dtype(optimizer.moments_dtype)),
            "count": np.float32(counts.pop()),
            "window": window,
        },
        "step": np.int32(step),
    }


def _tree(checkpoint: Checkpoint, cfg: ModelConfig, part: str, dtype: Any = np.float32) -> dict[str, Any]:
    """One part of the checkpoint in our layout, tensor by tensor."""
    out = layout.map_axes(lambda path, axes, shape: np.empty(shape, dtype), cfg)
    for e in entries(cfg):
        leaf = layout.get(out, e.path)
        (leaf if e.index is None else leaf[e.index])[...] = checkpoint.read(source_name(e, part))
    return out


def _streamed(checkpoint: Checkpoint, cfg: ModelConfig, part: str, dtype: Any = np.float32) -> dict[str, Any]:
    """One part of the checkpoint in our layout, read only while it is written."""
    from model.convert.pieces import pieces_tree

    return pieces_tree(cfg, lambda e: checkpoint.read(source_name(e, part)), dtype)


def adopt(spec: Any, directory: str | Path, step: int) -> Path:
    """Write RUN/checkpoints/step<k> from the reference's step k, so that our trainer continues there.

    `spec`: model.train.TrainSpec. The receipt is the one of the run's own index and order after `step` steps. Weights
    and moments stream: memory is the largest tensor, not the 88 GB of a 7B state.
    """
    from data.receipt import Receipt, expected
    from model.checkpoint import write_checkpoint
    from model.convert.pieces import writer
    from model.train import Trainer

    trainer = Trainer(spec)
    state = read_state(directory, spec.model, spec.optimizer, step, streamed=True)
    receipts = expected(trainer.index, trainer.order, spec.data.global_batch_instances, step)
    receipt = Receipt(step, bytes.fromhex(receipts[step])) if step else Receipt()
    meta = {**trainer.meta(step, receipt, state), "adopted_from": str(directory)}
    return write_checkpoint(trainer.root, step, state, meta, checkpointer=writer())


def model_config(step_dir: str | Path) -> ModelConfig:
    """The model section of the `config.json` that OLMo-core writes into a checkpoint directory.

    Raises IdentityError for anything that is not an OLMo 3: another block, bias, per-head norm, tied embeddings.
    """
    path = Path(step_dir) / "config.json"
    whole = read_json(path)
    model = whole.get("model", whole)
    block = model.get("block", {})
    mixer = block.get("sequence_mixer") or block.get("attention") or {}
    rope, window = mixer.get("rope") or {}, mixer.get("sliding_window") or {}
    norm = block.get("layer_norm") or mixer.get("qk_norm") or {}
    wrong = [
        text
        for text, bad in (
            (f"block {block.get('name')!r} is not reordered_norm", block.get("name") != "reordered_norm"),
            ("attention has a bias", bool(mixer.get("bias"))),
            (
                "QK-norm is absent or per head",
                not mixer.get("qk_norm") or bool(mixer.get("use_head_qk_norm")),
            ),
            ("embeddings are tied", bool(model.get("tie_word_embeddings"))),
            ("no sliding window", not window.get("pattern")),
            ("the first layer is forced to full", window.get("force_full_attention_on_first_layer", True)),
            ("RoPE scaling on every layer", rope.get("scaling") is not None),
        )
        if bad
    ]
    if wrong:
        raise IdentityError(f"{path} is no OLMo 3: {'; '.join(wrong)}", "give the checkpoint of an OLMo 3")
    sizes = {w for w in window["pattern"] if w != -1}
    if len(sizes) != 1:
        raise IdentityError(f"{path} has windows of several sizes: {sorted(sizes)}")
    heads = mixer["n_heads"]
    return ModelConfig(
        d_model=model["d_model"],
        n_layers=model["n_layers"],
        n_heads=heads,
        n_kv_heads=mixer.get("n_kv_heads") or heads,
        head_dim=mixer.get("head_dim") or model["d_model"] // heads,
        d_ff=block["feed_forward"]["hidden_size"],
        vocab_size=min(model["vocab_size"], 100278),
        padded_vocab_size=model["vocab_size"],
        layer_pattern=tuple(LayerKind.FULL if w == -1 else LayerKind.SLIDING for w in window["pattern"]),
        last_layer_full=window.get("force_full_attention_on_last_layer", True),
        window=sizes.pop(),
        rope_theta=rope.get("theta", 500_000),
        rope_scaling=_yarn(model, path),
        norm_eps=norm.get("eps", 1e-6),
        init_std=model.get("init_std", 0.02),
        init_seed=model.get("init_seed", 0),
    )


def _yarn(model: dict[str, Any], path: Path) -> YarnConfig | None:
    """The scaling that `block_overrides` give to full-attention layers; None where there is none."""
    overrides = model.get("block_overrides") or {}
    found = []
    for block in overrides.values():
        mixer = block.get("sequence_mixer") or block.get("attention") or {}
        found.append((mixer.get("rope") or {}).get("scaling"))
    if not any(found):
        return None
    first = found[0] or {}
    if any(s != first for s in found) or "beta_fast" not in first:
        raise IdentityError(f"{path}: block_overrides hold scalings other than one YaRN: {found[:2]}")
    return YarnConfig(
        factor=first["factor"],
        beta_fast=first["beta_fast"],
        beta_slow=first["beta_slow"],
        original_context=first["old_context_len"],
    )
