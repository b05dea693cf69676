"""Refuses hostile or broken safetensors headers before a byte of weight is touched.

A header is a claim by whoever wrote the file: names, dtypes, shapes, offsets, and in an index the files. Nothing
is allocated from it before it is consistent with itself and with the file's size. The surprising thing: JSON
allows a key twice, and readers keep the last one, so a name given twice can show two readers two models.
Rules: https://github.com/huggingface/safetensors (README, "Format").
"""

import json
import math
from pathlib import Path
from typing import Any

from infra.errors import IdentityError

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "U16": 2, "U32": 4,
    "U64": 8, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
MAX_AXES = 8
REMEDY = "do not load this file; get it again from its source"
AGAIN = "fetch or export it again"


def parse_object(text: bytes, path: Path) -> dict[str, Any]:
    """JSON object without repeated keys."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [k for k, _ in pairs]
        if len(set(keys)) != len(keys):
            twice = next(k for k in keys if keys.count(k) > 1)
            raise IdentityError(f"{path} gives {twice!r} twice", REMEDY)
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as e:
        raise IdentityError(f"{path} holds no valid JSON: {e}", REMEDY) from None
    if not isinstance(value, dict):
        raise IdentityError(f"{path} holds a {type(value).__name__} instead of an object", REMEDY)
    return value


def check_header(header: dict[str, Any], body: int, path: Path) -> None:
    """Every tensor of `header` (without `__metadata__`) has a sane dtype, shape and place in a body of `body` bytes.

    Places must follow each other without overlap or gap and fill the body exactly, as the format demands.
    """
    places = []
    for name, entry in header.items():
        if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
            raise IdentityError(f"{path}: the entry of {name} is incomplete", REMEDY)
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            raise IdentityError(f"{path}: {name} has dtype {dtype!r}; known: {', '.join(ITEM_BYTES)}", REMEDY)
        if not isinstance(shape, list) or len(shape) > MAX_AXES or not all(_count(n) for n in shape):
            raise IdentityError(f"{path}: {name} has the shape {shape!r}", REMEDY)
        if not (isinstance(offsets, list) and len(offsets) == 2 and all(_count(n) for n in offsets)):
            raise IdentityError(f"{path}: {name} has the offsets {offsets!r}", REMEDY)
        start, stop = offsets
        if math.prod(shape) * ITEM_BYTES[dtype] != stop - start:
            raise IdentityError(
                f"{path}: {name} of shape {shape} and {dtype} needs {math.prod(shape) * ITEM_BYTES[dtype]} bytes, "
                f"its offsets give {stop - start}",
                REMEDY,
            )
        if stop > body:
            raise IdentityError(f"{path} is cut short: {name} ends at {stop} of {body} bytes", AGAIN)
        places.append((start, stop, name))
    at = 0
    for start, stop, name in sorted(places):
        if start != at:
            what = "overlaps the tensor before it" if start < at else "leaves a hole before it"
            raise IdentityError(f"{path}: {name} at {start} {what}, which ends at {at}", REMEDY)
        at = stop
    if at != body:
        raise IdentityError(f"{path} has {body - at} bytes that belong to no tensor", REMEDY)


def _count(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 48


def check_index(path: Path) -> dict[str, str]:
    """`weight_map` of an index file: tensor -> plain name of a file beside it. Refuses any path that leads elsewhere."""
    index = parse_object(path.read_bytes(), path)
    found = index.get("weight_map")
    if not isinstance(found, dict) or not found:
        raise IdentityError(f"{path} has no weight_map", REMEDY)
    for name, file in found.items():
        plain = isinstance(file, str) and Path(file).name == file and file.endswith(".safetensors")
        if not plain or ((path.parent / file).is_symlink() and not _inside(path.parent / file, path.parent)):
            raise IdentityError(f"{path} points outside its directory: {name} in {file!r}", REMEDY)
    return dict(found)


def _inside(path: Path, directory: Path) -> bool:
    """Whether a link stays below `directory`, or below the `blobs` of a hub cache (where snapshots link to)."""
    target = path.resolve()
    cache = directory.resolve().parent.parent / "blobs"
    return target.parent == directory.resolve() or target.parent == cache
