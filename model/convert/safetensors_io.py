"""Reading and writing safetensors one tensor at a time, so that no model has to fit in memory twice.

The format: little-endian u64 header length, JSON header {name: {dtype, shape, data_offsets}}, raw bytes.
The surprising thing: numpy has no bfloat16, which is why the library's numpy reader is not used; `ml_dtypes` gives
it one here. Format: https://github.com/huggingface/safetensors (README, "Format").
"""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from infra.errors import IdentityError
from model.convert.guard import AGAIN, check_header, check_index, parse_object

DTYPES: dict[str, Any] = {
    "F32": np.dtype("<f4"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype("<f2"),
}
CODES = {"float32": "F32", "bfloat16": "BF16"}
MAX_HEADER = 100_000_000


class Tensors:
    """The tensors of a directory: `model.safetensors`, or the shards of `model.safetensors.index.json`."""

    def __init__(self, directory: Path):
        self.directory = directory
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            claimed = check_index(index)
            names = sorted(set(claimed.values()))
        else:
            claimed, names = None, ["model.safetensors"]
        self.where: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for name in names:
            self._read_header(directory / name)
        stray = sorted((claimed or self.where).keys() ^ self.where.keys())
        stray += [
            n for n, file in (claimed or {}).items() if n in self.where and self.where[n][0].name != file
        ]
        if stray:
            raise IdentityError(f"{index} and its files disagree about {', '.join(stray[:5])}", AGAIN)

    def _read_header(self, path: Path) -> None:
        try:
            size = path.stat().st_size
            with open(path, "rb") as f:
                (length,) = struct.unpack("<Q", f.read(8))
                if length > min(MAX_HEADER, size - 8):
                    raise ValueError(f"header of {length} bytes in a file of {size}")
                header = parse_object(f.read(length), path)
        except FileNotFoundError:
            pickled = sorted(p.name for p in path.parent.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
            raise IdentityError(
                f"{path} does not exist",
                f"{pickled[0]} is a pickle, which is not read: save it as safetensors" if pickled else AGAIN,
            ) from None
        except OSError as e:
            raise IdentityError(f"{path} cannot be read: {e.strerror}", AGAIN) from None
        except (ValueError, struct.error) as e:
            raise IdentityError(f"{path} is not a safetensors file: {e}", AGAIN) from None
        header.pop("__metadata__", None)
        check_header(header, size - 8 - length, path)
        for name, entry in header.items():
            if name in self.where:
                raise IdentityError(f"{name} stands in two files of {self.directory}")
            self.where[name] = (path, 8 + length, entry)

    def names(self) -> set[str]:
        """All tensor names."""
        return set(self.where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self.where[name][2]["shape"])

    def dtype(self, name: str) -> str:
        """Format code of a tensor: F32, BF16, F16."""
        return self.where[name][2]["dtype"]

    def read(self, name: str) -> np.ndarray:
        """The tensor as a read-only map of the file."""
        path, base, entry = self.where[name]
        if entry["dtype"] not in DTYPES:
            raise IdentityError(f"{name} in {path} has dtype {entry['dtype']}; known: {', '.join(DTYPES)}")
        start, stop = entry["data_offsets"]
        raw = np.memmap(path, np.uint8, "r", base + start, (stop - start,))
        return raw.view(DTYPES[entry["dtype"]]).reshape(entry["shape"])


def write(
    directory: Path,
    tensors: list[tuple[str, tuple[int, ...], Callable[[], np.ndarray]]],
    dtype: str,
    max_file_bytes: int = 5 * 10**9,
) -> list[str]:
    """Write tensors (name, shape, function that gives the array) to `directory`; returns the file names.

    One file `model.safetensors`, or numbered files and an index once `max_file_bytes` is exceeded.
    """
    code, item = CODES[dtype], DTYPES[CODES[dtype]]
    groups: list[list[Any]] = [[]]
    filled = 0
    for entry in tensors:
        size = int(np.prod(entry[1])) * item.itemsize
        if groups[-1] and filled + size > max_file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += size
    files, weight_map, total = [], {}, 0
    for number, group in enumerate(groups, 1):
        many = len(groups) > 1
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if many else "model.safetensors"
        total += _write_file(directory / name, group, code, item)
        weight_map.update({entry[0]: name for entry in group})
        files.append(name)
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        files.append("model.safetensors.index.json")
    return files


def _write_file(path: Path, group: list[Any], code: str, item: np.dtype) -> int:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape, _ in group:
        size = int(np.prod(shape)) * item.itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name, shape, make in group:
            for block in _blocks(np.asarray(make())):
                if block.shape[1:] != tuple(shape[1:]):
                    raise IdentityError(f"{name} has shape {block.shape}, expected {shape}")
                f.write(np.ascontiguousarray(block.astype(item, copy=False)).tobytes())
    if path.stat().st_size != 8 + len(text) + at:
        raise IdentityError(f"{path} has {path.stat().st_size} bytes, expected {8 + len(text) + at}")
    return at


def _blocks(array: np.ndarray, rows: int = 16384) -> Iterator[np.ndarray]:
    for start in range(0, len(array), rows):
        yield array[start : start + rows]
