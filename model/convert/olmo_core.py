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

from infra.errors import IdentityError
from model import layout
from model.config import ModelConfig, OptimizerConfig
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
