"""Any checkpoint into one of ours: `checkpoints/step<k>` with weights only, readable by `restore_params`.

    to_checkpoint("allenai-snapshot/", "RUN/checkpoints", 0)

Streamed like the other direction (`model.convert.stream`): layer by layer into Orbax's own files, peak memory the
largest tensor plus a slab. The surprising thing: work happens in the hidden `.writing-step<k>` and starts over when it
was interrupted, for a half-filled Orbax tree cannot be told from a whole one by its files.
"""

from pathlib import Path
from typing import Any

import numpy as np

from infra.errors import IdentityError
from infra.progress import Progress
from model import layout
from model.checkpoint import write_checkpoint
from model.config import ModelConfig
from model.convert.names import entries
from model.convert.pieces import Shown, pieces_tree, writer
from model.convert.stream import Source, lineage_of, open_source


def read_tree(source: Source, *, fill_missing_rows: bool = False) -> dict[str, Any]:
    """Our tree of float32 arrays, all in memory. Missing vocabulary rows are an error, or zeros when asked for."""
    cfg = source.model
    check_rows(source, fill_missing_rows)
    out = layout.map_axes(lambda path, axes, shape: np.zeros(shape, np.float32), cfg)
    for e in entries(cfg):
        leaf = layout.get(out, e.path)
        array = source.read(e)
        (leaf if e.index is None else leaf[e.index])[: len(array)] = array
    return out


def check_rows(source: Source, fill: bool) -> None:
    """Raise IdentityError where the source lacks vocabulary rows that training needs, unless `fill`."""
    missing = source.model.padded_vocab_size - source.rows
    if missing and not fill:
        raise IdentityError(
            f"the source holds {source.rows} of {source.model.padded_vocab_size} vocabulary rows; {missing} are missing. "
            "They take part in the softmax of training, so neither losses nor gradients would be the reference's",
            "start from a checkpoint with all rows, or allow zeros for evaluation only",
        )


def to_checkpoint(
    source: str | Path | Source,
    root: str | Path,
    step: int,
    *,
    model: ModelConfig | None = None,
    fill_missing_rows: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write the weights of `source` (HF, OLMo-core or ours) as `root/step<k>`; returns that directory."""
    found = source if isinstance(source, Source) else open_source(source, model)
    check_rows(found, fill_missing_rows)
    shown = Shown(4 * layout.count_params(found.model), progress)
    meta = {
        "format": 1,
        "step": step,
        "model": found.model.model_dump(mode="json"),
        "layout": "pattern-scan-v1",
        "converted_from": lineage_of(found),
        "missing_vocab_rows": found.model.padded_vocab_size - found.rows,
    }
    state = {"params": pieces_tree(found.model, found.read, done=shown), "step": np.int32(step)}
    path = write_checkpoint(Path(root), step, state, meta, checkpointer=writer())
    shown.finish()
    return path
