"""Conversion of any checkpoint to HF safetensors in bounded memory: tensor by tensor, slab by slab.

    python -m model.convert.stream SOURCE OUT [--dtype bfloat16] [--keep-padding]

SOURCE is one of ours (`checkpoints/step<k>`), an OLMo-core step directory, or an HF directory. Work happens in
`OUT.partial/`: a plan, and one finished file after the other, so an interrupted conversion goes on where it
stopped; `OUT` appears by one rename when everything is there. Peak memory is the largest tensor plus a slab.
The surprising thing: a memory-mapped source counts as memory of the process while it is mapped, so each tensor
is mapped, written and unmapped before the next.
"""

import argparse
import functools
import hashlib
import json
import math
import os
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from infra.artifacts import fingerprint, read_json, versions, write_json_atomic
from infra.errors import IdentityError, ReproError
from infra.progress import Progress
from model.config import ModelConfig
from model.convert.names import Entry, entries
from model.convert.safetensors_io import CODES, DTYPES, Tensors

SLAB_BYTES = 32 << 20
FILE_BYTES = 2 * 10**9
PLAN, LINEAGE = "plan.json", "conversion.json"


class Source(NamedTuple):
    """Where tensors come from. `read(entry)` gives a map or array; `rows` is the vocabulary it holds."""

    kind: str
    model: ModelConfig
    rows: int
    read: Callable[[Entry], np.ndarray]
    identity: dict[str, Any]


def open_source(path: str | Path, model: ModelConfig | None = None) -> Source:
    """The source in `path`, checked against `model` (or the model it describes itself). Raises IdentityError."""
    path = Path(path)
    if (path / "MANIFEST.json").is_file():
        return orbax_source(path, model)
    if (path / ".metadata").is_file() or (path / "model_and_optim" / ".metadata").is_file():
        return dcp_source(path, model)
    if (path / "config.json").is_file():
        return hf_source(path, model)
    raise IdentityError(
        f"{path} is no checkpoint: it has no MANIFEST.json (ours), .metadata (OLMo-core) or config.json (HF)",
        "give the directory of one step",
    )


def named(source: str | Path | Source) -> str:
    """The source for the lineage: its path, or its kind where it has none."""
    return source.kind if isinstance(source, Source) else str(source)


def dcp_source(path: Path, model: ModelConfig | None) -> Source:
    """An OLMo-core checkpoint; without `model` its own config.json must stand beside it."""
    from model.convert.dcp import Checkpoint
    from model.convert.olmo_core import check, model_config, source_name

    checkpoint = Checkpoint(path)
    model = model or model_config(path)
    check(checkpoint, model, optimizer=False)
    table = (checkpoint.directory / ".metadata").read_bytes()
    identity = {"metadata_sha256": hashlib.sha256(table).hexdigest()}
    return Source(
        "olmo-core", model, model.padded_vocab_size, lambda e: checkpoint.read(source_name(e)), identity
    )


def hf_source(path: Path, model: ModelConfig | None) -> Source:
    """An HF directory of an OLMo 3, full or trimmed vocabulary."""
    model = model or model_of_hf(path)
    tensors = Tensors(path)
    table = {e.hf: e for e in entries(model)}
    rows = tensors.shape("lm_head.weight")[0] if "lm_head.weight" in tensors.names() else 0
    problems = [f"missing {n}" for n in sorted(table.keys() - tensors.names())]
    problems += [f"unexpected {n}" for n in sorted(tensors.names() - table.keys())]
    for name in sorted(table.keys() & tensors.names()):
        e = table[name]
        wanted = (rows, *e.shape[1:]) if e.vocab_rows else e.shape
        if tensors.shape(name) != wanted or (
            e.vocab_rows and rows not in (model.vocab_size, model.padded_vocab_size)
        ):
            problems.append(f"{name} has shape {tensors.shape(name)}, expected {e.shape}")
    if problems:
        raise IdentityError(
            f"{path} does not fit the model: {'; '.join(problems[:8])}", "check its config.json"
        )
    files = sorted({str(p.name) for p, _, _ in tensors.where.values()})
    identity = {"files": {n: header_digest(path / n) for n in files}}
    return Source("hf", model, rows, lambda e: tensors.read(e.hf), identity)


def orbax_source(path: Path, model: ModelConfig | None) -> Source:
    """One of our checkpoints, read slice by slice through tensorstore."""
    from model.checkpoint import problem

    why = problem(path)
    if why is not None:
        raise IdentityError(f"{path} is not a committed checkpoint: {why}", "choose another step")
    stored = ModelConfig.model_validate(read_json(path / "meta.json")["model"])
    if model is not None and model != stored:
        raise IdentityError(f"{path} holds another model than the one asked for", "leave the model out")
    opened: dict[str, Any] = {}

    def read(e: Entry) -> np.ndarray:
        name = ".".join(e.path)
        if name not in opened:
            opened[name] = open_array(path / "params", name)
        array = opened[name]
        return np.asarray((array if e.index is None else array[e.index]).read().result())

    digests = {n: f["sha256"] for n, f in read_json(path / "MANIFEST.json")["files"].items()}
    return Source("ours", stored, stored.padded_vocab_size, read, {"manifest": fingerprint(digests)})


def open_array(tree: Path, name: str) -> Any:
    """One array of an Orbax tree as a tensorstore handle; nothing is read yet."""
    import tensorstore as ts

    errors = []
    for driver in ("zarr", "zarr3"):
        spec = {
            "driver": driver,
            "kvstore": {"driver": "ocdbt", "base": f"file://{tree.resolve()}", "path": f"{name}/"},
        }
        try:
            return ts.open(spec, open=True, read=True).result()
        except ValueError as e:
            errors.append(str(e).splitlines()[0])
    raise IdentityError(f"{tree} has no array {name}: {errors[0]}", "the checkpoint is incomplete")


def model_of_hf(path: Path) -> ModelConfig:
    """The model section that an HF config.json describes. Raises IdentityError if it is no OLMo 3."""
    from model.config import LayerKind, YarnConfig

    c = read_json(path / "config.json")
    if c.get("model_type") != "olmo3":
        raise IdentityError(f"{path}/config.json is of type {c.get('model_type')!r}, not olmo3")
    rope = c.get("rope_parameters") or {}
    full = rope.get("full_attention") or c.get("rope_scaling") or {}
    yarn = None
    if full.get("rope_type", "default") == "yarn":
        yarn = YarnConfig(
            factor=full["factor"], beta_fast=full.get("beta_fast", 32), beta_slow=full.get("beta_slow", 1),
            original_context=full["original_max_position_embeddings"],
        )  # fmt: skip
    rows = c["vocab_size"]
    kinds = [LayerKind.SLIDING if t == "sliding_attention" else LayerKind.FULL for t in c["layer_types"]]
    period = next(p for p in range(1, len(kinds) + 1) if all(k == kinds[i % p] for i, k in enumerate(kinds)))
    return ModelConfig(
        d_model=c["hidden_size"],
        n_layers=c["num_hidden_layers"],
        n_heads=c["num_attention_heads"],
        n_kv_heads=c["num_key_value_heads"],
        head_dim=c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
        d_ff=c["intermediate_size"],
        vocab_size=100278 if rows == 100352 else rows,
        padded_vocab_size=100352 if rows == 100278 else rows,
        layer_pattern=tuple(kinds[:period]),
        last_layer_full=kinds[-1] is LayerKind.FULL,
        window=c["sliding_window"],
        rope_theta=full.get("rope_theta", c.get("rope_theta", 500_000.0)),
        rope_scaling=yarn,
        norm_eps=c["rms_norm_eps"],
    )


def header_digest(path: Path) -> str:
    """sha256 of a safetensors header and the file's size: what the file claims to hold, without reading it all."""
    with path.open("rb") as f:
        (length,) = struct.unpack("<Q", f.read(8))
        return hashlib.sha256(f.read(length) + struct.pack("<Q", path.stat().st_size)).hexdigest()


def convert(
    source: str | Path | Source,
    out: str | Path,
    *,
    model: ModelConfig | None = None,
    dtype: str = "bfloat16",
    keep_padding: bool = False,
    context_length: int = 8192,
    eos_id: int | None = 100257,
    pad_id: int | None = 100277,
    max_file_bytes: int = FILE_BYTES,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Convert `source` (a directory, or a Source of any other kind) to the HF directory `out`; returns its lineage.

    Raises IdentityError where source and model disagree, or where padding is asked for that the source lacks.
    """
    from model.convert.hf import IM_END_ID, hf_config

    out = Path(out)
    found = source if isinstance(source, Source) else open_source(source, model)
    cfg = found.model
    rows = cfg.padded_vocab_size if keep_padding else cfg.vocab_size
    if rows > found.rows:
        missing = rows - found.rows
        raise IdentityError(
            f"{named(source)} holds {found.rows} of {rows} vocabulary rows: the {missing} padding rows were cut off. They take "
            f"part in the softmax, so a loss without them is lower by about {math.log(rows / found.rows):.1e} nat at start",
            "convert without --keep-padding, or start from a checkpoint with all rows",
        )
    config = hf_config(
        cfg,
        context_length=context_length,
        dtype=dtype,
        keep_padding=keep_padding,
        eos_id=eos_id,
        pad_id=pad_id,
    )
    plan = {
        "source": {"kind": found.kind, "path": named(source), **found.identity},
        "dtype": dtype,
        "vocab_rows": rows,
        "config": config,
        "max_file_bytes": max_file_bytes,
    }
    groups = split(entries(cfg), rows, DTYPES[CODES[dtype]].itemsize, max_file_bytes)
    partial = out.with_name(f"{out.name}.partial")
    resumed = begin(partial, plan)
    weight_map: dict[str, str] = {}
    size = done = 0
    total = sum(tensor_bytes(e, rows, DTYPES[CODES[dtype]].itemsize) for g in groups for e in g)
    progress = progress or Progress("convert", 1 + (total >> 20), "MB")
    for number, group in enumerate(groups, 1):
        name = (
            "model.safetensors"
            if len(groups) == 1
            else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        )
        header, body = header_of(group, rows, dtype)
        target = partial / name
        if not (target.is_file() and target.stat().st_size == len(header) + body):
            write_file(
                target,
                header,
                group,
                rows,
                dtype,
                found.read,
                functools.partial(_shown, progress, done),
            )
        done += body
        size += body
        weight_map.update({e.hf: name for e in group})
        progress.update(done >> 20)
    if len(groups) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        write_json_atomic(partial / "model.safetensors.index.json", index)
    stops = [i for i in (IM_END_ID, eos_id) if i is not None and i < rows]
    write_json_atomic(partial / "generation_config.json", {"eos_token_id": stops, "pad_token_id": pad_id})
    write_json_atomic(partial / "config.json", config)
    lineage = {**plan, "versions": versions("numpy", "ml-dtypes"), "dropped_rows": found.rows - rows}
    write_json_atomic(partial / LINEAGE, lineage)
    (partial / PLAN).unlink()
    if out.exists():
        shutil.rmtree(out)
    os.replace(partial, out)
    progress.finish(f"{size / 1e9:.2f} GB{', resumed' if resumed else ''}")
    return lineage


def begin(partial: Path, plan: dict[str, Any]) -> bool:
    """Prepare the working directory; True when an interrupted conversion of the same plan is continued."""
    if (partial / PLAN).is_file() and read_json(partial / PLAN) == plan:
        for stale in partial.glob("*.tmp"):
            stale.unlink()
        return True
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_json_atomic(partial / PLAN, plan)
    return False


def tensor_bytes(e: Entry, rows: int, item: int) -> int:
    """Bytes of a tensor in the output."""
    return math.prod((rows, *e.shape[1:]) if e.vocab_rows else e.shape) * item


def split(table: list[Entry], rows: int, item: int, limit: int) -> list[list[Entry]]:
    """The tensors in order, cut into files of at most `limit` bytes (a larger tensor has a file of its own)."""
    groups: list[list[Entry]] = [[]]
    filled = 0
    for e in table:
        n = tensor_bytes(e, rows, item)
        if groups[-1] and filled + n > limit:
            groups.append([])
            filled = 0
        groups[-1].append(e)
        filled += n
    return groups


def header_of(group: list[Entry], rows: int, dtype: str) -> tuple[bytes, int]:
    """(the safetensors header of a file, the number of bytes that follow it)."""
    item = DTYPES[CODES[dtype]].itemsize
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for e in group:
        shape = (rows, *e.shape[1:]) if e.vocab_rows else e.shape
        n = tensor_bytes(e, rows, item)
        header[e.hf] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [at, at + n]}
        at += n
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, at


def write_file(
    target: Path,
    header: bytes,
    group: list[Entry],
    rows: int,
    dtype: str,
    read: Callable[[Entry], np.ndarray],
    report: Callable[[int], None],
) -> None:
    """One safetensors file, through a temporary name; fsync before the rename, so a whole name means whole bytes."""
    item = DTYPES[CODES[dtype]]
    tmp = target.with_name(f"{target.name}.tmp")
    written = 0
    with tmp.open("wb") as f:
        f.write(header)
        for e in group:
            array = read(e)
            if tuple(array.shape[1:]) != e.shape[1:]:
                raise IdentityError(f"{e.hf} came as {array.shape}, expected {e.shape}")
            count = rows if e.vocab_rows else e.shape[0]
            step = max(1, SLAB_BYTES // max(1, array[:1].nbytes))
            for start in range(0, count, step):
                slab = np.ascontiguousarray(array[start : min(count, start + step)].astype(item, copy=False))
                f.write(slab.reshape(-1).view(np.uint8).data)
                written += slab.nbytes
                report(written)
            del array
        f.flush()
        os.fsync(f.fileno())
    os.replace(tmp, target)


def _shown(progress: Progress, before: int, written: int) -> None:
    """Show MiB done: `before` bytes of finished files and `written` of the present one."""
    progress.update((before + written) >> 20)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Convert a checkpoint to HF safetensors.")
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=sorted(CODES), default="bfloat16")
    parser.add_argument("--keep-padding", action="store_true", help="keep all padded vocabulary rows")
    parser.add_argument("--context", type=int, default=8192)
    args = parser.parse_args(argv)
    try:
        convert(
            args.source,
            args.out,
            dtype=args.dtype,
            keep_padding=args.keep_padding,
            context_length=args.context,
        )
    except ReproError as e:
        print(f"error: {e}", file=sys.stderr)
        return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
