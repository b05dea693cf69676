"""Reader of torch's distributed checkpoints (DCP), as OLMo-core writes them. Needs no torch and runs no pickle code.

    .metadata          pickled tables: tensor -> shape, dtype, chunks; chunk -> file, offset, length
    __<rank>_<n>.distcp  each chunk a torch.save archive: an uncompressed zip with `data.pkl` and the raw bytes

Both pickles are read by an unpickler that knows a short list of names and maps each to a plain stand-in of this
module; any other name is refused, so nothing in a checkpoint can run. Shapes, chunk tiling, file names and sizes
are checked before anything is allocated. Chunks are memory-mapped, so a tensor costs memory only where it is put
together from several chunks. The surprising thing: a chunk's bytes lie inside a zip inside the file.
Source: torch 2.13 `distributed/checkpoint/metadata.py`, ai2-olmo-core 3.0.0 `distributed/checkpoint/filesystem.py`.
"""

import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, NamedTuple

import ml_dtypes
import numpy as np

from infra.errors import IdentityError

MAX_METADATA_BYTES = 1 << 30
MAX_PICKLE_BYTES = 1 << 20  # of one archive; a tensor's is 160 bytes
MAX_TUPLE_LEAVES = 1000
NUMPY_DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "uint8": np.dtype("u1"),
    "bool": np.dtype("?"),
}
STORAGES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}


class Record:
    """Stand-in for a dataclass of torch or OLMo-core: keeps the pickled state and has no behaviour."""

    state: Any = None  # stays None where torch pickles an empty dataclass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str, position: int | None = None) -> Any:
        """A field by name, or by position where torch pickles a tuple."""
        if isinstance(self.state, dict):
            return self.state.get(name)
        return self.state[position] if position is not None and isinstance(self.state, tuple) else None


class Index(Record):
    """Stand-in for MetadataIndex; usable as a key of a dict."""

    def __hash__(self) -> int:
        name, offset = self.get("fqn"), self.get("offset")
        return hash((name if isinstance(name, str) else None, offset if isinstance(offset, tuple) else None))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Index) and self.state == other.state


class Code(str):
    """A dtype, a layout or a memory format, as its name."""


class View(NamedTuple):
    """What `_rebuild_tensor_v2` was asked for."""

    dtype: str
    key: str
    numel: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _rebuild(storage: Any, offset: int, shape: Any, stride: Any, *rest: Any) -> View:
    dtype, key, numel = storage
    return View(dtype, key, int(numel), int(offset), tuple(map(int, shape)), tuple(map(int, stride)))


def _size(values: Any = ()) -> tuple[int, ...]:
    return tuple(int(v) for v in values)


META = "torch.distributed.checkpoint.metadata"
KNOWN: dict[tuple[str, str], Any] = {
    **{(META, n): type(n, (Record,), {}) for n in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "StorageMeta",
    )},
    (META, "MetadataIndex"): Index,
    (META, "_MEM_FORMAT_ENCODING"): lambda number: Code(f"memory_format_{int(number)}"),
    ("olmo_core.distributed.checkpoint.filesystem", "_StorageInfo"): type("_StorageInfo", (Record,), {}),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): type("_StorageInfo", (Record,), {}),
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): lambda name: Code(name),
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): PurePosixPath,
    **{("torch", n): Code(n) for n in NUMPY_DTYPES},
    **{("torch", n): Code(d) for n, d in STORAGES.items()},
}  # fmt: skip


class SafeUnpickler(pickle._Unpickler):
    """Knows the names in KNOWN and refuses every other.

    The interpreter's unpickler in Python: the one in C reserves memory for any number in a damaged stream. Tuples that
    hold each other twice, fifty deep, would take for ever to be a key of a dict, so their whole size is bounded.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        found = KNOWN.get((module, name))
        if found is None:
            raise IdentityError(
                f"a checkpoint file asks for {module}.{name}, which no checkpoint of weights needs",
                "do not load this file: it may be hostile",
            )
        return found

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, _, numel = pid
        if kind != "storage" or not isinstance(dtype, Code):
            raise IdentityError(f"a checkpoint file holds a persistent object of kind {kind!r}")
        return str(dtype), str(key), int(numel)


def _bounded(load_tuple: Any) -> Any:
    def load(self: Any) -> None:
        load_tuple(self)
        if _leaves(self.stack[-1]) > MAX_TUPLE_LEAVES:
            raise IdentityError(
                "a checkpoint file nests tuples without end", "do not load this file: it may be hostile"
            )

    return load


def _leaves(value: Any) -> int:
    """Values in nested tuples; each inner one was bounded when it was made."""
    return sum(map(_leaves, value)) if isinstance(value, tuple) and value else 1


for _code in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3):
    SafeUnpickler.dispatch[_code[0]] = _bounded(SafeUnpickler.dispatch[_code[0]])


def unpickle(data: bytes, what: str) -> Any:
    """The value pickled in `data`, by the restricted unpickler. Raises IdentityError that names `what`."""
    try:
        return SafeUnpickler(io.BytesIO(data)).load()
    except IdentityError:
        raise
    except Exception as e:  # any malformed stream ends here, as one clear message
        raise IdentityError(
            f"{what} cannot be read: {type(e).__name__}: {e}", "copy the checkpoint again"
        ) from None


class Chunk(NamedTuple):
    """One stored piece of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    at: int
    length: int


class Stored(NamedTuple):
    """A tensor: dtype name, shape, chunks that tile it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class Checkpoint:
    """The tensors and values of one `model_and_optim/` directory (or of the `step<k>/` directory around it)."""

    def __init__(self, directory: str | Path):
        directory = Path(directory)
        if (directory / "model_and_optim").is_dir():
            directory = directory / "model_and_optim"
        self.directory = directory
        path = directory / ".metadata"
        if not path.is_file():
            raise IdentityError(
                f"{path} does not exist", "give the directory of an OLMo-core checkpoint step"
            )
        if path.stat().st_size > MAX_METADATA_BYTES:
            raise IdentityError(f"{path} has {path.stat().st_size} bytes; no real one is that large")
        self.tensors: dict[str, Stored] = {}
        self._values: dict[str, tuple[Path, int, int]] = {}
        table = unpickle(path.read_bytes(), str(path))
        try:
            self._take(table)
        except (AttributeError, TypeError, ValueError, KeyError, OverflowError) as e:
            raise IdentityError(
                f"{path} is not the metadata of a checkpoint: {type(e).__name__}: {str(e)[:200]}",
                "copy the checkpoint again",
            ) from None

    def _take(self, table: Any) -> None:
        """Fill the tables of tensors and values; what is not shaped like one raises as Python does."""
        entries, places = table.get("state_dict_metadata"), table.get("storage_data")
        where = {(k.get("fqn"), k.get("offset")): self._place(k, v) for k, v in places.items()}
        for name, entry in entries.items():
            if entry.get("chunks") is not None:
                self.tensors[name] = self._tensor(name, entry, where)
            elif (name, None) in where:
                self._values[name] = where[name, None]

    def _place(self, key: Any, info: Any) -> tuple[Path, int, int]:
        name, at, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if not isinstance(name, str) or Path(name).name != name or name in (".", ".."):
            raise IdentityError(
                f"{self.directory}/.metadata points outside its directory: {name!r}",
                "do not load this checkpoint",
            )
        path = self.directory / name
        if not path.is_file() or (path.is_symlink() and path.resolve().parent != self.directory.resolve()):
            raise IdentityError(f"{path}, named by .metadata, does not exist", "copy the checkpoint again")
        if not (isinstance(at, int) and isinstance(length, int) and at >= 0 and length > 0):
            raise IdentityError(f"{key.get('fqn')} has the impossible place {at}+{length} in {path}")
        if at + length > path.stat().st_size:
            raise IdentityError(
                f"{path} is cut short: {key.get('fqn')} ends at {at + length}", "copy it again"
            )
        return path, at, length

    def _tensor(self, name: str, entry: Any, where: dict[Any, tuple[Path, int, int]]) -> Stored:
        shape = entry.get("size")
        dtype = str(entry.get("properties").get("dtype", 0))
        if dtype not in NUMPY_DTYPES or not isinstance(shape, tuple) or any(n < 0 for n in shape):
            raise IdentityError(
                f"{name} has shape {shape} and dtype {dtype}; known: {', '.join(NUMPY_DTYPES)}"
            )
        chunks = []
        for chunk in entry.get("chunks"):
            offsets, sizes = chunk.get("offsets"), chunk.get("sizes")
            if (name, offsets) not in where:
                raise IdentityError(
                    f"{name}: the chunk at {offsets} is stored nowhere", "copy the checkpoint again"
                )
            path, at, length = where[name, offsets]
            if math.prod(sizes) * NUMPY_DTYPES[dtype].itemsize > length:
                raise IdentityError(f"{name}: a chunk of shape {sizes} cannot fit in {length} bytes")
            chunks.append(Chunk(offsets, sizes, path, at, length))
        check_tiling(name, shape, chunks)
        return Stored(dtype, shape, tuple(chunks))

    def read(self, name: str) -> np.ndarray:
        """A tensor: a read-only map for one chunk, an array put together from several."""
        stored = self.tensors[name]
        if len(stored.chunks) == 1:
            return read_chunk(name, stored.dtype, stored.chunks[0])
        out = np.empty(stored.shape, NUMPY_DTYPES[stored.dtype])
        for chunk in stored.chunks:
            place = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes))
            out[place] = read_chunk(name, stored.dtype, chunk)
        return out

    def values(self) -> set[str]:
        """Names of the entries that are not tensors (learning rates, betas ...)."""
        return set(self._values)

    def value(self, name: str) -> Any:
        """One plain value: numbers, strings, tuples, lists, dicts."""
        path, at, length = self._values[name]
        with path.open("rb") as f:
            return unpickle(_archive(f, at, length, name)[1], name)


def check_tiling(name: str, shape: tuple[int, ...], chunks: list[Chunk]) -> None:
    """Refuse chunks that leave the tensor, overlap, or do not cover it."""
    low = np.array([c.offsets for c in chunks], np.int64).reshape(len(chunks), len(shape))
    size = np.array([c.sizes for c in chunks], np.int64).reshape(len(chunks), len(shape))
    high = low + size
    if (low < 0).any() or (size < 0).any() or (high > np.array(shape, np.int64)).any():
        raise IdentityError(f"{name}: a chunk lies outside the shape {shape}")
    if sum(math.prod(c.sizes) for c in chunks) != math.prod(shape):
        raise IdentityError(f"{name}: its chunks do not cover the shape {shape} exactly once")
    for i in range(len(chunks) - 1):
        both = (low[i + 1 :] < high[i]) & (low[i] < high[i + 1 :])
        if both.all(axis=1).any():
            raise IdentityError(f"{name}: chunks overlap at {chunks[i].offsets}")


def read_chunk(name: str, dtype: str, chunk: Chunk) -> np.ndarray:
    """The chunk as a read-only map of its file."""
    with chunk.path.open("rb") as f:
        members, pickled = _archive(f, chunk.at, chunk.length, name)
        view = unpickle(pickled, name)
        item = NUMPY_DTYPES[dtype]
        strides = tuple(math.prod(chunk.sizes[i + 1 :]) for i in range(len(chunk.sizes)))
        fits = (
            isinstance(view, View) and view.dtype == dtype and view.shape == chunk.sizes and view.offset == 0
        )
        if not fits or (view.stride != strides and math.prod(view.shape) > 1):
            raise IdentityError(f"{name}: its file holds {view}, the metadata says {dtype} {chunk.sizes}")
        start, size = _member(f, members, f"data/{view.key}", name)
    if size != view.numel * item.itemsize or math.prod(chunk.sizes) > view.numel:
        raise IdentityError(f"{name}: {size} bytes stored for {chunk.sizes} of {dtype}")
    if not size:
        return np.empty(chunk.sizes, item)
    raw = np.memmap(chunk.path, np.uint8, "r", start, math.prod(chunk.sizes) * item.itemsize)
    return raw.view(item).reshape(chunk.sizes)


class _Window(io.RawIOBase):
    """Bytes [at, at+length) of an open file, as a file."""

    def __init__(self, f: Any, at: int, length: int):
        self.f, self.start, self.length, self.position = f, at, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = 0) -> int:
        self.position = max(0, (0, self.position, self.length)[whence] + offset)
        return self.position

    def read(self, n: int = -1) -> bytes:
        left = max(0, self.length - self.position)
        n = left if n is None or n < 0 else min(n, left)
        self.f.seek(self.start + self.position)
        out = self.f.read(n)
        self.position += len(out)
        return out


def _archive(f: Any, at: int, length: int, name: str) -> tuple[dict[str, tuple[int, int]], bytes]:
    """({member without its first folder: (place of its local header, size)}, the bytes of data.pkl)."""
    try:
        with zipfile.ZipFile(_Window(f, at, length)) as archive:
            members = {}
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED or info.header_offset + info.file_size > length:
                    raise IdentityError(f"{name}: {info.filename} in its archive is compressed or too large")
                members[info.filename.split("/", 1)[-1]] = (at + info.header_offset, info.file_size)
            if members.get("data.pkl", (0, MAX_PICKLE_BYTES + 1))[1] > MAX_PICKLE_BYTES:
                raise IdentityError(f"{name}: its archive has no data.pkl of a sane size")
            order = [n for n in archive.namelist() if n.endswith("/byteorder")]
            if order and archive.read(order[0]) != b"little":
                raise IdentityError(f"{name}: stored with another byte order")
            return members, archive.read(next(n for n in archive.namelist() if n.endswith("/data.pkl")))
    except (zipfile.BadZipFile, OSError, ValueError) as e:
        raise IdentityError(
            f"{name}: its bytes are no torch archive: {e}", "copy the checkpoint again"
        ) from None


def _member(f: Any, members: dict[str, tuple[int, int]], key: str, name: str) -> tuple[int, int]:
    """(absolute place of the raw bytes of member `key`, their number)."""
    if key not in members:
        raise IdentityError(f"{name}: its archive lacks {key}")
    header, size = members[key]
    f.seek(header)
    fixed = f.read(30)
    if fixed[:4] != b"PK\x03\x04":
        raise IdentityError(f"{name}: the zip entry of {key} is broken")
    name_length, extra_length = struct.unpack("<HH", fixed[26:30])
    return header + 30 + name_length + extra_length, size
