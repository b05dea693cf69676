"""Conversion of any checkpoint to HF safetensors in bounded memory: tensor by tensor, slab by slab.

    convert("RUN/checkpoints/step48", "out/")

A source is one of ours (`checkpoints/step<k>`), an OLMo-core step directory, or an HF directory. Work happens in
`OUT.partial/`: a plan, and one finished file after the other, so an interrupted conversion goes on where it
stopped; `OUT` appears by one rename when everything is there. Peak memory is the largest tensor plus a slab.
The surprising thing: a memory-mapped source counts as memory of the process while it is mapped, so each tensor
is mapped, written and unmapped before the next.
"""

import functools
import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from infra.artifacts import fingerprint, read_json, sha256_files, versions, write_json_atomic
from infra.errors import IdentityError, ReproError
from infra.lease import Lease
from infra.progress import Progress
from model.config import ModelConfig
from model.convert.names import Entry, entries
from model.convert.safetensors_io import CODES, DTYPES, Tensors

SLAB_BYTES = 32 << 20
FILE_BYTES = 2 * 10**9
PLAN, LINEAGE, LOCK = "plan.json", "conversion.json", ".lease"


class Source(NamedTuple):
    """Where tensors come from. `read(entry)` gives a map or array; `rows` is the vocabulary it holds.

    `path`: its directory, where it has one. `files`: those that hold the weights, unless `identity` already stands for
    their bytes.
    """

    kind: str
    model: ModelConfig
    rows: int
    read: Callable[[Entry], np.ndarray]
    identity: dict[str, Any]
    path: Path | None = None
    files: tuple[Path, ...] = ()


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


def lineage_of(source: Source) -> dict[str, Any]:
    """The source for the lineage: kind, place, and what its bytes are (the sha256 of its files takes a while)."""
    digests = {f.name: d for f, d in zip(source.files, sha256_files(source.files))}
    known = {"sha256": digests} if digests else {}
    return {"kind": source.kind, "path": str(source.path or source.kind), **source.identity, **known}


def stamps(files: Iterable[Path]) -> dict[str, list[int]]:
    """What changes when a file is written or replaced: its size, times and inode."""
    found = ((f, f.stat()) for f in files)
    return {str(f): [s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for f, s in found}


def dcp_source(path: Path, model: ModelConfig | None) -> Source:
    """An OLMo-core checkpoint; without `model` its own config.json must stand beside it."""
    from model.convert.dcp import Checkpoint
    from model.convert.described import olmo_core_model
    from model.convert.olmo_core import check, source_name

    checkpoint = Checkpoint(path)
    model = model or olmo_core_model(path)
    check(checkpoint, model, optimizer=False)
    files = tuple(sorted(p for p in checkpoint.directory.iterdir() if p.is_file()))
    return Source(
        "olmo-core", model, model.padded_vocab_size, lambda e: checkpoint.read(source_name(e)), {}, path, files
    )  # fmt: skip


def hf_source(path: Path, model: ModelConfig | None) -> Source:
    """An HF directory of an OLMo 3, full or trimmed vocabulary."""
    from model.convert.described import hf_model
    from model.convert.hf import check_config

    found = hf_model(path)
    if model is not None:
        check_config(path, model)
    model = model or found
    tensors = Tensors(path)
    table = {e.hf: e for e in entries(model)}
    rows = int(read_json(path / "config.json")["vocab_size"])
    problems = [f"missing {n}" for n in sorted(table.keys() - tensors.names())]
    problems += [f"unexpected {n}" for n in sorted(tensors.names() - table.keys())]
    if rows not in (model.vocab_size, model.padded_vocab_size):
        problems.append(
            f"vocab_size is {rows}, expected {model.vocab_size} or {model.padded_vocab_size} of the model"
        )
    for name in sorted(table.keys() & tensors.names()):
        e, shape = table[name], tensors.shape(name)
        wanted = (rows, *e.shape[1:]) if e.vocab_rows else e.shape
        if shape != wanted:
            problems.append(f"{name} has shape {shape}, expected {wanted}")
        if tensors.dtype(name) not in DTYPES:
            problems.append(f"{name} is {tensors.dtype(name)}, expected one of {', '.join(DTYPES)}")
    if problems:
        raise IdentityError(
            f"{path} does not fit the model: {'; '.join(problems[:8])}",
            "check its config.json, or fetch or export it again",
        )
    files = tuple(sorted({p for p, _, _ in tensors.where.values()}))
    return Source("hf", model, rows, lambda e: tensors.read(e.hf), {}, path, files)


def orbax_source(path: Path, model: ModelConfig | None) -> Source:
    """One of our checkpoints, read slice by slice through tensorstore. Every byte of its weights is held to its manifest."""
    from model.checkpoint import problem

    why = problem(path, verify=True, parts=("params", "meta.json"))
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
    return Source("ours", stored, stored.padded_vocab_size, read, {"manifest": fingerprint(digests)}, path)


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
    finish: Callable[[Path], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Convert `source` (a directory, or a Source of any other kind) to the HF directory `out`; returns its lineage.

    `finish(directory)` sees the finished files before they become `out`, and returns more of the lineage; what it refuses
    leaves nothing. Raises IdentityError where `out` is taken, where source and model disagree, where padding is asked for
    that the source lacks, or where the source changed while it was read; LeaseError where another process writes `out`.
    """
    from model.convert.hf import generation_config, hf_config

    out = free_place(out)
    found = source if isinstance(source, Source) else open_source(source, model)
    cfg = found.model
    rows = cfg.padded_vocab_size if keep_padding else cfg.vocab_size
    if rows > found.rows:
        missing = rows - found.rows
        raise IdentityError(
            f"{found.path or found.kind} holds {found.rows} of {rows} vocabulary rows: the {missing} padding rows were cut off. "
            f"They take part in the softmax, so a loss without them is lower by about {math.log(rows / found.rows):.1e} nat at start",
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
    settings = {"dtype": dtype, "vocab_rows": rows, "config": config, "max_file_bytes": max_file_bytes}
    begun = stamps(found.files)
    told = {"kind": found.kind, "path": str(found.path), **found.identity, "files": begun}
    plan = {**settings, "source": told}
    partial = working_place(out)
    with Lease(partial / LOCK, "a conversion", remedy="wait until it ends, or choose another OUT"):
        try:
            resumed = begin(partial, plan)
            progress = progress or Progress("convert", 1, "MB")
            size = write_files(partial, found, rows, dtype, max_file_bytes, progress)
            write_json_atomic(partial / "generation_config.json", generation_config(rows, eos_id, pad_id))
            write_json_atomic(partial / "config.json", config)
            lineage = {
                **settings,
                "source": lineage_of(found),
                "versions": versions("numpy", "ml-dtypes"),
                "dropped_rows": found.rows - rows,
            }
            if stamps(found.files) != begun:
                raise IdentityError(
                    f"{found.path} changed while it was read", "convert again once nothing writes it"
                )
            lineage |= finish(partial) if finish is not None else {}
        except ReproError:
            shutil.rmtree(partial)
            raise
        write_json_atomic(partial / LINEAGE, lineage)
        for name in (PLAN, LOCK):
            (partial / name).unlink()
        os.replace(partial, free_place(out))
    progress.finish(f"{size / 1e9:.2f} GB{', resumed' if resumed else ''}")
    return lineage


def working_place(out: Path) -> Path:
    """`OUT.partial`, made if it is not there. Refused where it holds what no conversion left there."""
    partial = out.with_name(f"{out.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    there = {p.name for p in partial.iterdir()}
    if there - {LOCK} and not there & {PLAN, LINEAGE}:
        raise IdentityError(
            f"{partial} is no interrupted conversion: it has no {PLAN}", "move it away, or choose another OUT"
        )
    return partial


def free_place(out: str | Path) -> Path:
    """`out` with its links followed, if a directory may appear there: nothing is there, or an empty directory."""
    place = Path(os.path.realpath(out))
    if place.is_dir() and any(place.iterdir()):
        raise IdentityError(f"{out} is not empty", "remove it, or choose another OUT")
    if place.exists() and not place.is_dir():
        raise IdentityError(f"{out} is a file", "choose another OUT")
    above = next(p for p in place.parents if p.exists())
    if not above.is_dir():
        raise IdentityError(f"{above} is a file, so {out} cannot be made", "choose another OUT")
    return place


def write_files(
    partial: Path, found: Source, rows: int, dtype: str, max_file_bytes: int, progress: Progress
) -> int:
    """Every safetensors file that `partial` lacks, and the index; returns the bytes of all tensors."""
    item = DTYPES[CODES[dtype]].itemsize
    groups = split(entries(found.model), rows, item, max_file_bytes)
    weight_map: dict[str, str] = {}
    done = 0
    progress.total = 1 + (sum(tensor_bytes(e, rows, item) for g in groups for e in g) >> 20)
    for number, group in enumerate(groups, 1):
        many = len(groups) > 1
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if many else "model.safetensors"
        header, body = header_of(group, rows, dtype)
        target = partial / name
        if not (target.is_file() and target.stat().st_size == len(header) + body):
            report = functools.partial(_shown, progress, done)
            write_file(target, header, group, rows, dtype, found.read, report)
        done += body
        weight_map.update({e.hf: name for e in group})
        progress.update(done >> 20)
    if len(groups) > 1:
        index = {"metadata": {"total_size": done}, "weight_map": dict(sorted(weight_map.items()))}
        write_json_atomic(partial / "model.safetensors.index.json", index)
    return done


def begin(partial: Path, plan: dict[str, Any]) -> bool:
    """Prepare the working directory, which we hold; True when an interrupted conversion of the same plan is continued."""
    resumed = (partial / PLAN).is_file() and read_json(partial / PLAN) == plan
    for path in partial.iterdir():  # the old plan goes last: it says whose the files are
        if path.name not in (LOCK, PLAN) and (not resumed or path.suffix == ".tmp"):
            path.unlink() if not path.is_dir() or path.is_symlink() else shutil.rmtree(path)
    write_json_atomic(partial / PLAN, plan)
    return resumed


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
