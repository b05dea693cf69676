"""Weights that are read piece by piece while Orbax writes them, so that no checkpoint has to fit in memory.

    tree = pieces_tree(cfg, source.read)
    write_checkpoint(root, step, {"params": tree, "step": np.int32(step)}, meta, checkpointer=writer())

A `Pieces` leaf knows its shape and where its parts come from. Orbax writes it through a type handler of ours:
path, metadata, compression and commit stay Orbax's, only the array is filled slab by slab, two slabs of the whole
tree at a time. What is written is an ordinary array: any Orbax restores it, with no handler of ours.

Chunks are stored plain: zstd, the default of Orbax, took a third more CPU time on random ones.

The surprising thing: chunks are cut so that each slab is whole chunks. With Orbax's own choice (one chunk for a
whole stack of layers) every slab would read and rewrite the chunk, and the stack would be in memory after all.
Written against orbax-checkpoint 0.12 (`NumpyHandler._open_and_write`); another version fails loudly, on the leaf.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from infra.errors import IdentityError
from infra.progress import Progress
from model import layout
from model.config import ModelConfig
from model.convert.names import Entry, entries

SLAB_BYTES = 64 << 20
IN_FLIGHT = 2  # slabs: one is read and filled while the other is written
FOREVER = 30 * 24 * 3600  # seconds Orbax may wait for a save; its default of ten minutes is for training


@dataclasses.dataclass(frozen=True, eq=False)
class Pieces:
    """An array of `shape` whose part k along axis 0 (stacked), or whose whole, comes from `reads[k]()`.

    A source with fewer rows than its part leaves zeros behind them (vocabulary padding).
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    stacked: bool
    reads: tuple[Callable[[], np.ndarray], ...]
    done: Callable[[int], None] = lambda nbytes: None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def chunks(self) -> tuple[int, ...]:
        """Shape of one slab and of one stored chunk, at most SLAB_BYTES: rows of one part, or several whole parts."""
        part = self.shape[1:] if self.stacked else self.shape
        row = max(1, math.prod(part[1:]) * self.dtype.itemsize)
        rows = max(1, min(part[0], SLAB_BYTES // row))
        if not self.stacked:
            return (rows, *part[1:])
        return (max(1, min(self.shape[0], SLAB_BYTES // (row * part[0]))), rows, *part[1:])

    def slabs(self) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        """(place, array of `dtype`) of every slab; a part is open only while its slabs are asked for."""
        part = self.shape[1:] if self.stacked else self.shape
        if self.stacked and (together := self.chunks[0]) > 1:
            for k in range(0, len(self.reads), together):
                some = self.reads[k : k + together]
                slab = np.zeros((len(some), *part), self.dtype)
                for i, read in enumerate(some):
                    array = checked(read(), part)
                    slab[i, : len(array)] = array
                yield (slice(k, k + len(some)),), slab
            return
        step = self.chunks[1 if self.stacked else 0]
        for k, read in enumerate(self.reads):
            array = checked(read(), part)
            for start in range(0, part[0], step):
                rows = slice(start, min(part[0], start + step))
                have = slab = array[rows]
                if have.dtype != self.dtype or len(have) < rows.stop - start:
                    slab = np.zeros((rows.stop - start, *part[1:]), self.dtype)
                    slab[: len(have)] = have
                if self.stacked:
                    yield (slice(k, k + 1), rows), slab[None]
                else:
                    yield (rows,), slab
            del array, have, slab


def checked(array: np.ndarray, part: tuple[int, ...]) -> np.ndarray:
    """`array`, if it fits into a part of this shape."""
    if tuple(array.shape[1:]) != part[1:] or len(array) > part[0]:
        raise IdentityError(f"a tensor came as {array.shape}, expected {part}")
    return array


class PiecesHandler(ocp.type_handlers.NumpyHandler):
    """Orbax's handler of numpy arrays, which writes `Pieces` slab by slab."""

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)
        self._failed = False

    async def _open_and_write(self, value: Any, tspec: dict[str, Any], ts_context: ts.Context) -> None:
        """Without a single `await`: Orbax starts all leaves at once, and so each is finished before the next begins."""
        if self._failed:
            return
        try:
            metadata = {**tspec["metadata"], "chunks": list(value.chunks), "compressor": None}
            spec = ts.Spec({**tspec, "metadata": metadata})
            array = ts.open(spec, create=True, open=True, context=ts_context).result()
            under_way: list[tuple[Any, int]] = []
            for place, slab in value.slabs():
                write = array[place].write(slab, can_reference_source_data_indefinitely=True)
                under_way.append((write, slab.nbytes))
                if len(under_way) == IN_FLIGHT:
                    _finish(under_way.pop(0), value.done)
            for entry in under_way:
                _finish(entry, value.done)
        except BaseException:
            self._failed = True
            raise


def _finish(entry: tuple[Any, int], done: Callable[[int], None]) -> None:
    write, nbytes = entry
    write.result()
    done(nbytes)


def writer() -> ocp.AsyncCheckpointer:
    """A checkpointer for trees with `Pieces`, arrays and scalars as leaves."""
    handlers = ocp.type_handlers
    registry = handlers.create_type_handler_registry(
        (Pieces, PiecesHandler()),
        (
            np.generic,
            handlers.NumpyHandler(),
        ),  # numbers as arrays without axes, as the standard checkpointer does
        (np.ndarray, handlers.NumpyHandler()),
        (jax.Array, handlers.get_type_handler(jax.Array)),
    )
    return ocp.AsyncCheckpointer(
        ocp.PyTreeCheckpointHandler(type_handler_registry=registry), timeout_secs=FOREVER
    )


def pieces_tree(
    cfg: ModelConfig, read: Callable[[Entry], np.ndarray], dtype: Any = np.float32, done: Any = None
) -> dict[str, Any]:
    """Our tree of `Pieces`: every stacked leaf is filled layer by layer from `read(entry)`."""
    found: dict[layout.Path, list[Entry]] = {}
    for e in entries(cfg):
        found.setdefault(e.path, []).append(e)

    def leaf(path: layout.Path, axes: tuple[str, ...], shape: tuple[int, ...]) -> Pieces:
        parts = found[path]
        stacked = parts[0].index is not None
        if stacked and [e.index for e in parts] != list(range(shape[0])):
            raise IdentityError(f"{'/'.join(path)} is not filled exactly once by the table of names")
        reads = tuple(_reader(read, e) for e in parts)
        return Pieces(shape, np.dtype(dtype), stacked, reads, done or (lambda nbytes: None))

    return layout.map_axes(leaf, cfg)


def _reader(read: Callable[[Entry], np.ndarray], e: Entry) -> Callable[[], np.ndarray]:
    return lambda: read(e)


class Shown:
    """Counts bytes into a progress line."""

    def __init__(self, total: int, progress: Progress | None = None):
        self.written = 0
        self.progress = progress or Progress("convert", 1 + (total >> 20), "MB")

    def __call__(self, nbytes: int) -> None:
        self.written += nbytes
        self.progress.update(self.written >> 20)

    def finish(self) -> None:
        """Close the line."""
        self.progress.finish(f"{self.written / 1e9:.2f} GB")
