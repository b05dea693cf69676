"""One document file -> one token file: the work of one element of the tokenize job, without Beam.

Writes `<name>.npy` (headerless uint32, EOS after each document) and `<name>.csv.gz` (one row per document:
start,end,id,src,loc, as the dolma toolkit writes), and with the filter on `<name>.mask.bits` and
`<name>.rejects.csv.gz` (shard,instance,period,count). Returns the shard's entry of the manifest.

A document that already ends in a literal EOS gets no second one, as in the dolma toolkit. The surprising
thing: memory is bounded by the longest accepted document plus about 2 MB of text, whatever the file size.
"""

import csv
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from data.config import FilterConfig
from data.documents import EMPTY, Document, Reject, read_documents
from data.files import gzip_text, join, whole_file
from data.masks import pack
from data.repetition import rejections
from data.token_files import sample_digest
from data.tokenizer import Tokenizer
from infra.errors import DataError

BATCH_CHARACTERS, BATCH_DOCUMENTS = 1 << 20, 1024
NAMED = 100


@dataclass(frozen=True)
class ShardSpec:
    """One element of the job: the document file `path` becomes `<name>.npy`.

    `source` stands for the file in boundaries and ids, so that output does not depend on where it lies.
    """

    path: str
    name: str
    label: str
    source: str
    format: str = "auto"
    text_field: str = "text"
    id_field: str = "id"


@dataclass(frozen=True)
class JobSpec:
    """What is the same for all elements of a job."""

    out: str
    sequence_length: int = 8192
    filter: FilterConfig = field(default_factory=FilterConfig)
    max_bytes: int = 64_000_000


@dataclass
class _Facts:
    """Counts of one shard."""

    documents: int = 0
    tokens: int = 0
    eos: int = 0
    text_bytes: int = 0
    literal_eos: int = 0
    literal_text: int = 0
    longest: int = 0
    min_id: int = -1
    max_id: int = -1
    reasons: Counter[str] = field(default_factory=Counter)
    rejected: list[dict[str, Any]] = field(default_factory=list)
    literal: list[dict[str, Any]] = field(default_factory=list)

    def reject(self, found: Reject) -> None:
        self.reasons[found.reason] += 1
        if len(self.rejected) < NAMED:
            self.rejected.append({"loc": found.loc, "id": found.id, "reason": found.reason})


def _batches(found: Iterable[Document | Reject], facts: _Facts) -> Iterator[list[Document]]:
    """Documents in groups of at most 1,024 or about 1 MB of text; rejects are counted on the way."""
    group: list[Document] = []
    size = 0
    for item in found:
        if isinstance(item, Reject):
            facts.reject(item)
            continue
        if group and (size + len(item.text) > BATCH_CHARACTERS or len(group) == BATCH_DOCUMENTS):
            yield group
            group, size = [], 0
        group.append(item)
        size += len(item.text)
    if group:
        yield group


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Ids of the documents with their EOS: (uint32[total], int64[len(texts)] ends)."""
    flat, offsets = tokenizer.encode_flat(texts)
    ends = offsets[1:]
    if (np.diff(offsets) == 0).any():
        raise DataError("the tokenizer gave no id for a document that is not empty")
    missing = flat[ends - 1] != tokenizer.eos_id
    return np.insert(flat, ends[missing], tokenizer.eos_id), ends + np.cumsum(missing)


class _Filter:
    """Applies the repetition filter to the stream of tokens, instance by instance."""

    def __init__(self, cfg: FilterConfig, sequence_length: int):
        self.cfg, self.S = cfg, sequence_length
        self.left = np.zeros(0, dtype=np.uint32)
        self.verdicts: list[np.ndarray] = []

    def add(self, ids: np.ndarray) -> None:
        whole = np.concatenate([self.left, ids])
        cut = len(whole) // self.S * self.S
        if cut:
            self.verdicts.append(rejections(whole[:cut].reshape(-1, self.S), self.cfg))
        self.left = whole[cut:]

    def verdict(self) -> np.ndarray:
        """int64[n, 2]: (period, copies), zeros where the instance passes."""
        return np.concatenate(self.verdicts) if self.verdicts else np.zeros((0, 2), dtype=np.int64)


def tokenize_shard(spec: ShardSpec, job: JobSpec, tokenizer: Tokenizer) -> dict[str, Any]:
    """Tokenize one document file; see the module docstring. The result depends on the file only."""
    facts = _Facts()
    eos_text = tokenizer.eos_text
    strip = tokenizer.cfg.strip
    digest = hashlib.sha256()
    sieve = _Filter(job.filter, job.sequence_length) if job.filter.enabled else None
    npy, boundaries = f"{spec.name}.npy", f"{spec.name}.csv.gz"
    found = read_documents(
        spec.path,
        format=spec.format,
        text_field=spec.text_field,
        id_field=spec.id_field,
        max_bytes=job.max_bytes,
        strip=strip,
        name=spec.source,
    )
    with ExitStack() as stack:
        tokens_out = stack.enter_context(whole_file(join(job.out, npy)))
        rows = csv.writer(stack.enter_context(gzip_text(join(job.out, boundaries), level=4)))
        for group in _batches(found, facts):
            texts = [d.text.strip() if strip else d.text for d in group]
            ids, ends = encode_documents(tokenizer, texts)
            starts = np.concatenate([[0], ends[:-1]])
            low, high = int(ids.min()), int(ids.max())
            if high >= tokenizer.vocab_size:
                raise DataError(
                    f"{spec.path} gave the token id {high}, the vocabulary has {tokenizer.vocab_size}"
                )
            facts.min_id = low if facts.min_id < 0 else min(facts.min_id, low)
            facts.max_id = max(facts.max_id, high)
            _count_literals(facts, group, texts, eos_text, tokenizer.cfg.literal_eos)
            rows.writerows(
                (facts.tokens + s, facts.tokens + e, d.id, spec.source, d.loc)
                for s, e, d in zip(starts.tolist(), ends.tolist(), group)
            )
            raw = np.ascontiguousarray(ids.astype("<u4", copy=False)).data
            tokens_out.write(raw)
            digest.update(raw)
            if sieve is not None:
                sieve.add(ids)
            facts.documents += len(group)
            facts.tokens += len(ids)
            facts.eos += int((ids == tokenizer.eos_id).sum())
            facts.longest = max(facts.longest, int((ends - starts).max()))
    entry: dict[str, Any] = {
        "path": npy,
        "boundaries": boundaries,
        "label": spec.label,
        "source": spec.source,
        "documents": facts.documents,
        "tokens": facts.tokens,
        "eos": facts.eos,
        "literal_eos": facts.literal_eos,
        "literal_eos_as_text": facts.literal_text,
        "literal_eos_documents": facts.literal,
        "text_bytes": facts.text_bytes,
        "longest_document": facts.longest,
        "min_id": facts.min_id,
        "max_id": facts.max_id,
        "empty": facts.reasons[EMPTY],
        "rejected": dict(sorted(facts.reasons.items())),
        "rejected_names": facts.rejected,
        "sha256": digest.hexdigest(),
        "sample_sha256": sample_digest(join(job.out, npy)),
    }
    if sieve is not None:
        entry["mask"] = _write_mask(spec, job, sieve.verdict())
    return entry


def _count_literals(
    facts: _Facts, group: list[Document], texts: list[str], eos_text: str, policy: str
) -> None:
    """Count literal EOS strings from the text, independently of the ids. A final one is the document's own EOS."""
    for document, text in zip(group, texts):
        facts.text_bytes += len(text) if text.isascii() else len(text.encode())
        count = text.count(eos_text)
        if not count:
            continue
        inner = count - 1 if policy == "special" and text.endswith(eos_text) else count
        if policy == "special":
            facts.literal_eos += inner
        else:
            facts.literal_text += inner
        if len(facts.literal) < NAMED:
            facts.literal.append({"loc": document.loc, "id": document.id, "count": count})


def _write_mask(spec: ShardSpec, job: JobSpec, verdict: np.ndarray) -> dict[str, Any]:
    """Write the compact mask and the reject list of a shard; returns their description."""
    path, listed = f"{spec.name}.mask.bits", f"{spec.name}.rejects.csv.gz"
    raw = pack(verdict[:, 0] == 0)
    with whole_file(join(job.out, path)) as f:
        f.write(raw)
    masked = np.flatnonzero(verdict[:, 0])
    with gzip_text(join(job.out, listed), level=4) as text:
        rows = csv.writer(text)
        rows.writerow(("shard", "instance", "period", "count"))
        rows.writerows((f"{spec.name}.npy", int(i), int(verdict[i, 0]), int(verdict[i, 1])) for i in masked)
    return {
        "path": path,
        "rejects": listed,
        "instances": len(verdict),
        "masked": len(masked),
        "sha256": hashlib.sha256(raw).hexdigest(),
    }
