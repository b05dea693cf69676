"""Token files: headerless little-endian uint32, AI2's format. Open, digest and verify them.

A file is known by content: its sha256, or a sampled digest where reading everything would take hours
(`sample_digest`: size, both ends and 64 blocks spread over the file). Names and sizes are never identity.
The surprising thing: the files are called `.npy` but have no NumPy header, so `np.load` fails on them.
Source: OLMo-core 3.0.0, `data/numpy_dataset.py`.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from infra.errors import DataError, IdentityError

ITEM = 4
GONE = "check the manifest and its base directory; of a corpus of documents, `repro tokenize --redo` makes it again"
SAMPLE_BLOCKS, SAMPLE_BYTES = 64, 1 << 16


def is_remote(path: str | Path) -> bool:
    """True for gs://, https:// and other addresses that are not on this machine's file system."""
    text = str(path)
    return "://" in text and not text.startswith("file://")


@dataclass(frozen=True)
class TokenShard:
    """One token file: where it lies, its label, its length, and its digests ('' where unknown)."""

    path: str
    label: str
    tokens: int
    sha256: str = ""
    sample: str = ""
    name: str = ""
    max_id: int | None = None  # the largest id, where the job that wrote the file has said it

    @property
    def identity(self) -> str:
        """What stands for the content in an index digest."""
        return self.sha256 or self.sample or f"size-only:{self.name or self.path}:{self.tokens}"


class RemoteTokens:
    """A token file behind an fsspec address; slices are read by byte range."""

    def __init__(self, path: str, tokens: int):
        import fsspec

        self.path, self.tokens = path, tokens
        self.fs, self.key = fsspec.core.url_to_fs(path)

    def __len__(self) -> int:
        return self.tokens

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(self.tokens)
        raw = self.fs.cat_file(self.key, start=start * ITEM, end=stop * ITEM)
        if len(raw) != (stop - start) * ITEM:
            raise IdentityError(
                f"{self.path} gave {len(raw)} bytes for tokens {start}..{stop}", "the file is truncated"
            )
        return np.frombuffer(raw, dtype="<u4")


@contextlib.contextmanager
def readable(path: str | Path) -> Iterator[None]:
    """Turn whatever keeps a token file from being opened into a DataError that names it."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"token file {path} does not exist", GONE) from None
    except (OSError, ValueError, ImportError) as e:  # a name no file can have, a folder, an unknown protocol
        raise DataError(f"token file {str(path)[:400]!r} cannot be read: {str(e)[:400]}", GONE) from None


def byte_size(path: str | Path) -> int:
    """Size of a local or remote file in bytes; raises DataError that names a file which is missing or cannot be read."""
    with readable(path):
        if is_remote(path):
            import fsspec

            fs, key = fsspec.core.url_to_fs(str(path))
            return int(fs.size(key))
        return os.stat(path).st_size


def token_count(path: str | Path, size: int | None = None) -> int:
    """Tokens in a file, from its size; a size that is not a multiple of 4 is refused."""
    size = byte_size(path) if size is None else size
    if size % ITEM:
        raise DataError(
            f"token file {path} has {size} bytes, which is not a multiple of {ITEM}",
            "it is truncated or not uint32: make or fetch it again",
        )
    return size // ITEM


def open_tokens(shard: TokenShard) -> Any:
    """The tokens as something that can be sliced: a memory map, or range reads for a remote file."""
    if shard.tokens == 0:
        return np.zeros(0, dtype="<u4")
    with readable(shard.path):
        if is_remote(shard.path):
            return RemoteTokens(shard.path, shard.tokens)
        return np.memmap(shard.path, dtype="<u4", mode="r", shape=(shard.tokens,)).view(np.ndarray)


def sample_offsets(size: int) -> list[int]:
    """Byte offsets of the blocks that `sample_digest` reads: evenly spread, first and last included."""
    if size <= SAMPLE_BLOCKS * SAMPLE_BYTES:
        return list(range(0, size, SAMPLE_BYTES))
    last = size - SAMPLE_BYTES
    return [last * k // (SAMPLE_BLOCKS - 1) // ITEM * ITEM for k in range(SAMPLE_BLOCKS)]


def sample_digest(path: str | Path) -> str:
    """sha256 over the size and up to 64 blocks of 64 KB. The whole file when it is at most 4 MB."""
    size = byte_size(path)
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    if is_remote(path):
        import fsspec

        fs, key = fsspec.core.url_to_fs(str(path))
        for offset in sample_offsets(size):
            digest.update(fs.cat_file(key, start=offset, end=min(offset + SAMPLE_BYTES, size)))
    else:
        with open(path, "rb") as f:
            for offset in sample_offsets(size):
                f.seek(offset)
                digest.update(f.read(SAMPLE_BYTES))
    return digest.hexdigest()


def full_digest(path: str | Path) -> str:
    """sha256 of the whole file, streamed."""
    if is_remote(path):
        import fsspec

        digest = hashlib.sha256()
        with fsspec.open(str(path), "rb") as f:
            while block := f.read(1 << 22):
                digest.update(block)
        return digest.hexdigest()
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def verify_shard(shard: TokenShard, how: str = "full") -> None:
    """Refuse a file that is not the one its manifest describes, naming it. `how`: full, sampled or size."""
    size = byte_size(shard.path)
    tokens = token_count(shard.path, size)
    if tokens != shard.tokens:
        raise IdentityError(
            f"token file {shard.path} has {tokens} tokens, its manifest says {shard.tokens}",
            "it is truncated or was replaced: make the tokens again with `repro tokenize`",
        )
    if how == "size":
        return
    expected, actual = "", ""
    if how == "full" and shard.sha256:
        expected, actual = shard.sha256, full_digest(shard.path)
    elif shard.sample:
        expected, actual = shard.sample, sample_digest(shard.path)
    if expected != actual:
        raise IdentityError(
            f"token file {shard.path} has the digest {actual[:16]}, its manifest says {expected[:16]}",
            "it was changed, swapped or renamed: make the tokens again with `repro tokenize`",
        )
    if shard.max_id is not None and (largest := largest_id(shard, how)) > shard.max_id:
        raise IdentityError(
            f"token file {shard.path} holds the id {largest}, its manifest says max_id {shard.max_id}",
            "its manifest was changed: make the tokens again with `repro tokenize`",
        )


def largest_id(shard: TokenShard, how: str) -> int:
    """The largest id of the tokens that verification reads: `full` all of them, `sampled` those of the sampled blocks; -1 of none."""
    tokens = open_tokens(shard)
    if how == "full":
        return int(tokens[0 : shard.tokens].max()) if shard.tokens else -1
    starts = (offset // ITEM for offset in sample_offsets(shard.tokens * ITEM))
    return max((int(tokens[s : s + SAMPLE_BYTES // ITEM].max()) for s in starts), default=-1)
