"""Packed and padded instances: whole documents in rows of fixed length (long-context stage, LM evaluation).

Packed (sheet section 5.7): documents of a group of files are sorted by length, longest first, and each goes
into the row whose free space fits it best; among equals into the one that reached that space first. The rest
of a row is padding. Padded (5.9): one row per document. Longer documents are cut to S (or split into pieces
with `fragment`). Source: OLMo-core 3.0.0, `data/utils.py: InstancePacker`, `data/numpy_dataset.py`.

The surprising thing: OLMo-core sorts with numpy's default, unstable argsort, whose order among equal lengths
depends on processor and numpy build. `sort="stable"` is ours and the same everywhere; `sort="olmo-core"`
repeats the reference on a machine like the one it ran on. A run says which.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numba
import numpy as np

from data.boundaries import boundaries
from data.config import FilterConfig
from data.documents import open_bytes
from data.index import InstanceIndex
from data.repetition import accepted
from data.token_files import TokenShard, is_remote, open_tokens
from infra.artifacts import fingerprint
from infra.errors import DataError

Sort = Literal["stable", "olmo-core"]
LongDocuments = Literal["truncate", "fragment"]


def permuted(n: int, seed: int | None) -> list[int]:
    """OLMo-core's `source_permutation_seed`: the order of n files; None keeps the manifest's."""
    order = list(range(n))
    if seed is not None:
        random.Random(seed).shuffle(order)
    return order


def scan_documents(tokens: np.ndarray, eos_id: int, bos_id: int | None = None) -> np.ndarray:
    """Spans of the documents in `tokens`: int64[n, 2]. A tail without EOS is no document.

    With `bos_id` (it may equal `eos_id`) a boundary is an EOS that a BOS follows, or an EOS at the very end.
    """
    at_eos = np.asarray(tokens) == eos_id
    if bos_id is not None and len(tokens):
        last = at_eos[-1]
        at_eos = np.append(at_eos[:-1] & (np.asarray(tokens)[1:] == bos_id), last)
    ends = np.flatnonzero(at_eos).astype(np.int64) + 1
    return np.stack([np.concatenate([[0], ends[:-1]])[: len(ends)], ends], axis=1).astype(np.int64)


def read_boundaries(path: str, tokens: int) -> np.ndarray:
    """Spans from a `.csv.gz` (start,end,...): int64[n, 2], checked against the length of the token file."""
    with open_bytes(path) as raw:
        pairs = [(start, end) for start, end, _ in boundaries(raw, tokens, path)]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def documents_of(
    shard: TokenShard, eos_id: int, bos_id: int | None = None, from_csv: bool | None = None
) -> np.ndarray:
    """Document spans of a token file. As OLMo-core: scanned for local files, from `.csv.gz` for remote ones."""
    if is_remote(shard.path) if from_csv is None else from_csv:
        return read_boundaries(shard.path.removesuffix(".npy") + ".csv.gz", shard.tokens)
    return scan_documents(open_tokens(shard)[: shard.tokens], eos_id, bos_id)


def cut(spans: np.ndarray, limit: int, how: LongDocuments = "truncate") -> np.ndarray:
    """Spans of at most `limit` tokens: the heads, or all pieces."""
    if how == "truncate":
        return np.stack([spans[:, 0], np.minimum(spans[:, 1], spans[:, 0] + limit)], axis=1)
    pieces = -(-(spans[:, 1] - spans[:, 0]) // limit)
    owner = np.repeat(np.arange(len(spans)), pieces)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = spans[owner, 0] + number * limit
    return np.stack([starts, np.minimum(starts + limit, spans[owner, 1])], axis=1)


@numba.njit(cache=True)
def _best_fit(lengths: np.ndarray, S: int) -> tuple[np.ndarray, int]:
    """Row of each document, for documents in placement order. lengths int64[n], each in 1..S.

    `tree` holds in its leaves which free spaces 1..S some row has; rows of one space queue first in, first out.
    """
    size = 1
    while size < S:
        size *= 2
    tree = np.zeros(2 * size, dtype=np.int64)
    head = np.full(S + 1, -1, dtype=np.int64)
    tail = np.full(S + 1, -1, dtype=np.int64)
    following = np.full(len(lengths), -1, dtype=np.int64)
    rows = np.empty(len(lengths), dtype=np.int64)
    made = 0
    for d in range(len(lengths)):
        need = lengths[d]
        space = S
        if tree[1] >= need:
            node = 1
            while node < size:
                node = 2 * node if tree[2 * node] >= need else 2 * node + 1
            space = node - size + 1
            row = head[space]
            head[space] = following[row]
            if head[space] < 0:
                _set(tree, space - 1 + size, 0)
        else:
            row = made
            made += 1
        rows[d] = row
        left = space - need
        if left > 0:
            following[row] = -1
            if head[left] < 0:
                head[left] = row
                _set(tree, left - 1 + size, left)
            else:
                following[tail[left]] = row
            tail[left] = row
    return rows, made


@numba.njit(cache=True)
def _set(tree: np.ndarray, node: int, value: int) -> None:
    tree[node] = value
    node //= 2
    while node:
        tree[node] = max(tree[2 * node], tree[2 * node + 1])
        node //= 2


def pack(lengths: np.ndarray, S: int, sort: Sort = "stable") -> tuple[np.ndarray, np.ndarray]:
    """Best-fit-decreasing packing of documents into rows of S.

    Returns (order, offsets): row r holds the documents order[offsets[r]:offsets[r+1]], in that sequence.
    """
    if len(lengths) and (lengths.min() < 1 or lengths.max() > S):
        raise DataError(f"document lengths must be between 1 and {S} to be packed")
    keys = -1 * np.asarray(lengths).astype(np.int64)
    by_length = np.argsort(keys, kind="stable") if sort == "stable" else np.argsort(keys)
    rows, made = _best_fit(np.asarray(lengths, dtype=np.int64)[by_length], S)
    by_row = np.argsort(rows, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=made))]).astype(np.int64)
    return by_length[by_row], offsets


@dataclass(frozen=True)
class PackedConfig:
    """How to pack. The long-context stage of OLMo 3 uses permutation seed 123 and groups of 8 files."""

    sort: Sort = "stable"
    group_size: int = 1
    permutation_seed: int | None = None
    long_documents: LongDocuments = "truncate"
    from_csv: bool | None = None
    bos_id: int | None = None


class DocumentRows(InstanceIndex):
    """Rows that are made of whole documents; reads like an `InstanceIndex`, with a label mask.

    `spans[k]` is (file, start, end) of placed document k; row r holds documents offsets[r]..offsets[r+1].
    """

    def __init__(
        self,
        shards: Sequence[TokenShard],
        S: int,
        *,
        spans: np.ndarray,
        offsets: np.ndarray,
        pad_id: int,
        eos_id: int,
        kind: dict[str, Any],
    ):
        super().__init__(shards, S)
        self.spans, self.offsets = spans, offsets
        self.pad_id, self.eos_id, self.kind = pad_id, eos_id, kind
        self.n_instances = len(offsets) - 1
        self.starts = np.zeros(0, dtype=np.int64)

    @property
    def digest(self) -> str:
        return fingerprint({"rows": super().digest, "kind": self.kind, "n": self.n_instances})

    def lengths(self, i: int) -> list[int]:
        """Real tokens of each document in row i, in sequence."""
        part = self.spans[self.offsets[i] : self.offsets[i + 1]]
        return (part[:, 2] - part[:, 1]).tolist()

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Rows with their padding: uint32[len(ids), S]."""
        out = np.full((len(ids), self.sequence_length), self.pad_id, dtype=np.uint32)
        for row, i in enumerate(np.asarray(ids, dtype=np.int64).tolist()):
            if not 0 <= i < self.n_instances:
                raise DataError(f"instance {i} is out of range: the index has {self.n_instances}")
            at = 0
            for file, start, end in self.spans[self.offsets[i] : self.offsets[i + 1]].tolist():
                out[row, at : at + end - start] = self.tokens_of(file)[start:end]
                at += end - start
        return out

    def label_mask(self, ids: np.ndarray) -> np.ndarray:
        """bool[len(ids), S]: True on real tokens. The label of a document's EOS (the next document) is kept."""
        used = [sum(self.lengths(i)) for i in np.asarray(ids, dtype=np.int64).tolist()]
        return np.arange(self.sequence_length)[None, :] < np.array(used, dtype=np.int64)[:, None]

    def document_lengths(self, ids: np.ndarray) -> list[list[int]]:
        """OLMo-core's `doc_lens` of each row: spans that end at an EOS; padding is a span of its own."""
        found = []
        for row in self.read(ids):
            ends = np.flatnonzero(row == self.eos_id) + 1
            if not len(ends) or ends[-1] != len(row):
                ends = np.append(ends, len(row))
            found.append(np.diff(ends, prepend=0).tolist())
        return found

    def repetition_mask(self, cfg: FilterConfig) -> np.ndarray:
        """bool[n]: the filter looks at the padded row, so one with 32 pads or more is rejected (sheet 5.6)."""
        blocks = [np.arange(s, min(s + 256, self.n_instances)) for s in range(0, self.n_instances, 256)]
        return np.concatenate([accepted(self.read(ids), cfg) for ids in blocks])


def packed_index(
    shards: Sequence[TokenShard], S: int, *, eos_id: int, pad_id: int, cfg: PackedConfig
) -> DocumentRows:
    """The packed rows of `shards`: files permuted, grouped, documents packed within each group."""
    ordered = [shards[k] for k in permuted(len(shards), cfg.permutation_seed)]
    spans: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    for first in range(0, len(ordered), cfg.group_size):
        pieces = []
        for file in range(first, min(first + cfg.group_size, len(ordered))):
            found = cut(documents_of(ordered[file], eos_id, cfg.bos_id, cfg.from_csv), S, cfg.long_documents)
            pieces.append(np.column_stack([np.full(len(found), file, dtype=np.int64), found]))
        documents = np.concatenate(pieces)
        order, offsets = pack(documents[:, 2] - documents[:, 1], S, cfg.sort)
        spans.append(documents[order])
        counts.append(np.diff(offsets))
    ends = np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64)
    kind = {
        "kind": "packed",
        "eos_id": eos_id,
        "pad_id": pad_id,
        **{k: getattr(cfg, k) for k in cfg.__annotations__},
    }
    return DocumentRows(
        ordered, S, spans=np.concatenate(spans), offsets=ends, pad_id=pad_id, eos_id=eos_id, kind=kind
    )


def padded_index(
    shards: Sequence[TokenShard], S: int, *, eos_id: int, pad_id: int, from_csv: bool | None = None
) -> DocumentRows:
    """One row per document, its first S tokens, padded. A tail without EOS is dropped."""
    pieces = []
    for file, shard in enumerate(shards):
        found = cut(documents_of(shard, eos_id, None, from_csv), S)
        pieces.append(np.column_stack([np.full(len(found), file, dtype=np.int64), found]))
    spans = np.concatenate(pieces)
    kind = {"kind": "padded", "eos_id": eos_id, "pad_id": pad_id, "from_csv": from_csv}
    offsets = np.arange(len(spans) + 1, dtype=np.int64)
    return DocumentRows(shards, S, spans=spans, offsets=offsets, pad_id=pad_id, eos_id=eos_id, kind=kind)
