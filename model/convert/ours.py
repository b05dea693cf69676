"""Any checkpoint into one of ours: `checkpoints/step<k>` with weights only, readable by `restore_params`.

    to_checkpoint("allenai-snapshot/", "RUN/checkpoints", 0)

The surprising thing: this direction holds the weights once in memory (28 GB for 7B), because Orbax writes our
stacked layers as whole arrays; the other direction (`model.convert.stream`) does not.
"""

from pathlib import Path
from typing import Any

import numpy as np

from infra.errors import IdentityError
from model import layout
from model.checkpoint import write_checkpoint
from model.config import ModelConfig
from model.convert.names import entries
from model.convert.stream import Source, open_source


def read_tree(source: Source, *, fill_missing_rows: bool = False) -> dict[str, Any]:
    """Our tree of float32 arrays. Vocabulary rows that the source lacks are an error, or zeros when asked for."""
    cfg = source.model
    missing = cfg.padded_vocab_size - source.rows
    if missing and not fill_missing_rows:
        raise IdentityError(
            f"the source holds {source.rows} of {cfg.padded_vocab_size} vocabulary rows; {missing} are missing. They take "
            "part in the softmax of training, so neither losses nor gradients would be the reference's",
            "start from a checkpoint with all rows, or allow zeros for evaluation only",
        )
    out = layout.map_axes(lambda path, axes, shape: np.zeros(shape, np.float32), cfg)
    for e in entries(cfg):
        leaf = layout.get(out, e.path)
        array = source.read(e)
        (leaf if e.index is None else leaf[e.index])[: len(array)] = array
    return out


def to_checkpoint(
    source: str | Path,
    root: str | Path,
    step: int,
    *,
    model: ModelConfig | None = None,
    fill_missing_rows: bool = False,
) -> Path:
    """Write the weights of `source` (HF, OLMo-core or ours) as `root/step<k>`; returns that directory."""
    found = open_source(source, model)
    params = read_tree(found, fill_missing_rows=fill_missing_rows)
    meta = {
        "format": 1,
        "step": step,
        "model": found.model.model_dump(mode="json"),
        "layout": "pattern-scan-v1",
        "converted_from": {"kind": found.kind, "path": str(source), **found.identity},
        "missing_vocab_rows": found.model.padded_vocab_size - found.rows,
    }
    return write_checkpoint(Path(root), step, {"params": params, "step": np.int32(step)}, meta)
