"""A reference that was trained elsewhere: its published checkpoints as HF directories in fp32 with every vocabulary row.

    bring("allenai/Olmo-3-1025-7B@stage1-step{step}", 1000, RUN / "reference/hf/step1000", model, context_length=8192)
    bring("/data/stage1/step{step}", 0, RUN / "init/hf", model, context_length=8192, to_start=True)

An address is anything that `model.convert.sources.resolve` takes: a directory, gs://, a hub name with its revision; an
HF export or an OLMo-core checkpoint. The surprising thing: AI2's hub exports are rounded to bf16 and lack the 74 padding
rows. To judge them that will do, and the lineage says it; to start training from them is another run than the reference's
(sheet, trap A10), and is refused.
"""

from pathlib import Path
from typing import Any

import numpy as np

from infra.errors import IdentityError, RecipeError
from model.config import ModelConfig
from model.convert.names import Entry
from model.convert.safetensors_io import Tensors
from model.convert.sources import resolve
from model.convert.stream import Source, convert, open_source


def bring(
    pattern: str, step: int, out: Path, model: ModelConfig, *, context_length: int, eos_id: int | None = 100257,
    pad_id: int | None = 100277, to_start: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Write the weights that `pattern` names for `step` to the HF directory `out`; returns {address, rounded, filled_rows, …}.

    `to_start`: training starts from these weights, so they must be fp32 originals with all rows. Raises RecipeError where no
    pattern is given, IdentityError where the weights are not there, are of another model, or will not do.
    """
    if "{step}" not in pattern:
        raise RecipeError(
            f"reference.published is {pattern!r}: it must name the checkpoints of the reference, with {{step}} in it",
            "give a directory, gs://… or NAME@REVISION, or train the reference here: reference.kind=olmo_core_local",
        )
    resolved = resolve(pattern.replace("{step}", str(step)))
    source = open_source(resolved.path, model)
    cut = model.padded_vocab_size - source.rows
    rounded = source.kind == "hf" and is_rounded(resolved.path)
    if to_start and (cut or rounded):
        what = " and ".join(["are rounded to bf16"] * rounded + [f"lack {cut} vocabulary rows"] * bool(cut))
        raise IdentityError(
            f"the weights at {pattern.replace('{step}', str(step))} {what}: to train from them is another run than the reference's",
            "give the fp32 original (AI2's OLMo-core checkpoint of this step) in reference.published_init",
        )
    found = {"step": step, "rounded": rounded, "filled_rows": cut, "origin": resolved.lineage}
    convert(
        filled(source), out, dtype="float32", keep_padding=True, context_length=context_length, eos_id=eos_id, pad_id=pad_id,
        finish=lambda _: {"published": found},
    )  # fmt: skip
    return found


def is_rounded(directory: Path) -> bool:
    """Whether any tensor of an HF directory is not float32."""
    tensors = Tensors(directory)
    return any(tensors.dtype(name) != "F32" for name in tensors.names())


def filled(source: Source) -> Source:
    """`source` with zeros for the vocabulary rows it lacks, so that their logits are 0."""
    cut = source.model.padded_vocab_size - source.rows

    def read(e: Entry) -> np.ndarray:
        found = source.read(e)
        return np.pad(found, ((0, cut), (0, 0))) if e.vocab_rows and cut else found

    return source._replace(rows=source.model.padded_vocab_size, read=read)
