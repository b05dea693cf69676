"""The repetition mask as an artifact: one bit per instance, made once, checked at every start.

`mask.bits` holds np.packbits of bool[n] (True: counts in the loss), `mask.json` says what it belongs to.
The tokenize job writes one such file per shard when the filter is on; otherwise the mask is made here from
the token files. The surprising thing: a mask is refused for another index, another length or other filter
settings, because a shifted mask would train without a sign of error.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data.config import FilterConfig
from data.repetition import accepted
from infra.artifacts import read_json, write_bytes_atomic, write_json_atomic
from infra.errors import DataError, IdentityError

BITS, DESCRIPTION = "mask.bits", "mask.json"
READ = 1024


def pack(mask: np.ndarray) -> bytes:
    return np.packbits(np.asarray(mask, dtype=bool)).tobytes()


def unpack(raw: bytes, n: int, where: str) -> np.ndarray:
    """bool[n] from packed bits; another length is refused."""
    if len(raw) != -(-n // 8):
        raise DataError(
            f"{where} has {len(raw)} bytes, {n} instances need {-(-n // 8)}",
            "the mask belongs to other tokens or another sequence length: make it again",
        )
    return np.unpackbits(np.frombuffer(raw, dtype=np.uint8), count=n).astype(bool)


def filter_identity(cfg: FilterConfig, sequence_length: int) -> dict[str, int]:
    """What a mask depends on besides the tokens."""
    return {
        "min_period": cfg.min_period,
        "max_period": cfg.max_period,
        "max_count": cfg.max_count,
        "sequence_length": sequence_length,
    }


def scan_index(index: Any, cfg: FilterConfig) -> np.ndarray:
    """The mask of every instance of `index`, read in blocks of 1,024 instances: bool[n]."""
    mask = np.ones(index.n_instances, dtype=bool)
    for start in range(0, index.n_instances, READ):
        ids = np.arange(start, min(start + READ, index.n_instances))
        mask[start : start + len(ids)] = accepted(index.read(ids), cfg)
    return mask


def mask_for(index: Any, cfg: FilterConfig, tokens_dir: Path, manifest: Mapping[str, Any]) -> np.ndarray:
    """The mask of `index`: from the job's own files when it filtered with these settings, else scanned now."""
    if manifest.get("filter") != filter_identity(cfg, index.sequence_length):
        return scan_index(index, cfg)
    parts = []
    for number, entry in enumerate(manifest["shards"]):
        path = tokens_dir / entry["mask"]["path"]
        raw = path.read_bytes() if path.exists() else b""
        if hashlib.sha256(raw).hexdigest() != entry["mask"]["sha256"]:
            raise IdentityError(f"mask {path} is not the one its manifest describes", "tokenize again")
        whole = unpack(raw, entry["tokens"] // index.sequence_length, str(path))
        parts.append(whole[: int(index.starts[number + 1] - index.starts[number])])
    return np.concatenate(parts)


def write_mask(directory: str | Path, mask: np.ndarray, cfg: FilterConfig, index: Any) -> dict[str, Any]:
    """Write `mask.bits` and its description; returns the description."""
    directory = Path(directory)
    raw = pack(mask)
    described = {
        **filter_identity(cfg, index.sequence_length),
        "n_instances": len(mask),
        "masked": int((~np.asarray(mask, dtype=bool)).sum()),
        "index_digest": index.digest,
        "sha256": hashlib.sha256(raw).hexdigest(),
    }
    write_bytes_atomic(directory / BITS, raw)
    write_json_atomic(directory / DESCRIPTION, described)
    return described


def open_mask(directory: str | Path, index: Any, cfg: FilterConfig) -> np.ndarray:
    """The mask in `directory` for `index` and `cfg`: bool[n]. Refuses one that belongs to anything else."""
    directory = Path(directory)
    described = read_json(directory / DESCRIPTION)
    wanted = {
        **filter_identity(cfg, index.sequence_length),
        "n_instances": index.n_instances,
        "index_digest": index.digest,
    }
    for field, value in wanted.items():
        if described.get(field) != value:
            raise IdentityError(
                f"{directory / BITS} was made with {field} = {described.get(field)}, this index has {value}",
                "make the order and mask again with `repro order`",
            )
    raw = (directory / BITS).read_bytes()
    if hashlib.sha256(raw).hexdigest() != described["sha256"]:
        raise IdentityError(
            f"{directory / BITS} changed since it was written", "make it again with `repro order`"
        )
    return unpack(raw, index.n_instances, str(directory / BITS))
