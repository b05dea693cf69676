"""Documents of a run: split into training and held-out by content, written as small jsonl.gz shards.

    build_corpus(cfg, out)  ->  out/{train,heldout}/<domain>/00000.jsonl.gz, out/corpus.json, out/rejected.jsonl.gz

A document is held out when `sha256(stripped text) % heldout_one_in == 0`, so the two sides are disjoint by
construction: equal texts fall on the same side, even in different files. Held-out documents beyond the
domain's limit are set aside, never trained on. What cannot be used is counted and named.

The surprising thing: the same inputs give the same bytes on every run (path order, gzip without a time).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from data.config import CorpusConfig
from data.documents import NO_TEXT, Document, Reject, expand_glob, read_documents, writable
from data.environment import DOMAINS, environment_files
from data.files import clear_os_errors, gzip_text
from infra.artifacts import atomic_dir, fingerprint, sha256_file, write_json_atomic
from infra.errors import DataError
from infra.progress import Progress

ENVIRONMENT_DOCUMENT_BYTES = 100_000
NAMED_REJECTS = 100
MEGABYTE = 1_000_000


def text_hash(text: str) -> int:
    """The number that decides the side of a document. White space around it plays no part."""
    return int(hashlib.sha256(text.strip().encode()).hexdigest(), 16)


def is_heldout(text: str, one_in: int) -> bool:
    """True when the document belongs to the held-out side."""
    return text_hash(text) % one_in == 0


class _Side:
    """Writes the documents of one domain and side into numbered shards of about `shard_bytes` of text."""

    def __init__(self, root: Path, domain: str, side: str, shard_bytes: float):
        self.folder, self.relative = root / side / domain, f"{side}/{domain}"
        self.shard_bytes = shard_bytes
        self.documents = self.bytes = self.in_shard = 0
        self.shards: list[str] = []
        self.stack = ExitStack()
        self.out: TextIO | None = None

    def add(self, document: Document, size: int) -> None:
        if self.out is None or self.in_shard >= self.shard_bytes:
            self.close()
            name = f"{len(self.shards):05d}.jsonl.gz"
            self.out = self.stack.enter_context(gzip_text(self.folder / name))
            self.shards.append(f"{self.relative}/{name}")
            self.in_shard = 0
        self.out.write(json.dumps({"id": document.id, "text": document.text}, ensure_ascii=False) + "\n")
        self.documents += 1
        self.bytes += size
        self.in_shard += size

    def close(self) -> None:
        self.stack.close()
        self.out = None

    def facts(self) -> dict[str, Any]:
        return {"documents": self.documents, "bytes": self.bytes, "shards": self.shards}


class _Domain:
    """Splits the documents of one domain."""

    def __init__(self, root: Path, domain: str, cfg: CorpusConfig, rejected: TextIO, dedupe_all: bool):
        self.domain, self.cfg, self.rejected, self.dedupe_all = domain, cfg, rejected, dedupe_all
        self.train = _Side(root, domain, "train", cfg.shard_megabytes * MEGABYTE)
        self.heldout = _Side(root, domain, "heldout", cfg.shard_megabytes * MEGABYTE)
        self.duplicates = self.over_limit = 0
        self.reasons: Counter[str] = Counter()
        self.named: list[dict[str, Any]] = []
        self.seen: set[int] = set()

    def add(self, source: str, found: Document | Reject) -> None:
        if isinstance(found, Reject):
            self.reject(source, found)
            return
        number = text_hash(found.text)
        held = number % self.cfg.heldout_one_in == 0
        if held or self.dedupe_all:
            if number in self.seen:
                self.duplicates += 1
                return
            if not held or len(self.seen) < 1_000_000:
                self.seen.add(number)
        size = len(found.text.encode())
        if not held:
            self.train.add(found, size)
        elif self.heldout.documents < self.cfg.heldout_max_documents:
            self.heldout.add(found, size)
        else:
            self.over_limit += 1

    def reject(self, source: str, reject: Reject) -> None:
        self.reasons[reject.reason] += 1
        entry = {
            "domain": self.domain,
            "source": source,
            "loc": reject.loc,
            "id": reject.id,
            "reason": reject.reason,
        }
        self.rejected.write(json.dumps(entry, ensure_ascii=True, sort_keys=True) + "\n")
        if len(self.named) < NAMED_REJECTS:
            self.named.append(entry)

    def close(self) -> None:
        self.train.close()
        self.heldout.close()

    def facts(self) -> dict[str, Any]:
        return {
            "train": self.train.facts(),
            "heldout": self.heldout.facts(),
            "duplicates": self.duplicates,
            "heldout_over_limit": self.over_limit,
            "rejected": dict(sorted(self.reasons.items())),
            "rejected_names": self.named,
        }


def _environment(
    domain: str, files: Iterable[Any], cfg: CorpusConfig
) -> Iterator[tuple[str, Document | Reject]]:
    """Documents of one environment domain: enough for its training text, in path order.

    Stops when the training side has `megabytes_per_domain`. The files of a domain are held in memory.
    """
    limit = min(ENVIRONMENT_DOCUMENT_BYTES, int(cfg.max_document_mb * MEGABYTE))
    wanted, taken, seen = cfg.megabytes_per_domain * MEGABYTE, 0, set()
    chosen: list[tuple[str, Document | Reject]] = []
    for file in files:
        if taken >= wanted:
            break
        for found in read_documents(file.path, format="txt", max_bytes=limit, name=file.name):
            chosen.append((file.name, found))
            if isinstance(found, Document):
                number = text_hash(found.text)
                if number not in seen and number % cfg.heldout_one_in:
                    taken += len(found.text.encode())
                seen.add(number)
    if taken < wanted:
        raise DataError(
            f"the environment has only {taken / MEGABYTE:.1f} MB of training text for the domain {domain}, "
            f"{cfg.megabytes_per_domain} MB are asked for",
            "lower corpus.megabytes_per_domain or bring your own documents (corpus.kind=files)",
        )
    yield from sorted(chosen, key=lambda pair: pair[0].encode("utf-8", "surrogateescape"))


def _documents(cfg: CorpusConfig) -> dict[str, Iterator[tuple[str, Document | Reject]]]:
    """For each domain, its (source, document or reject) pairs in order."""
    if cfg.kind == "environment":
        files = environment_files()
        return {domain: _environment(domain, files[domain], cfg) for domain in DOMAINS}
    resolved = [(source, expand_glob(source.glob)) for source in cfg.sources]
    limit = int(cfg.max_document_mb * MEGABYTE)

    def read(domain: str) -> Iterator[tuple[str, Document | Reject]]:
        for source, paths in resolved:
            if source.domain != domain:
                continue
            for path in paths:
                for found in read_documents(
                    path,
                    format=source.format,
                    text_field=source.text_field,
                    id_field=source.id_field,
                    max_bytes=limit,
                ):
                    yield writable(path), found

    return {domain: read(domain) for domain in dict.fromkeys(source.domain for source in cfg.sources)}


def build_corpus(cfg: CorpusConfig, out: str | Path) -> dict[str, Any]:
    """Write the corpus of `cfg` to the folder `out` (whole or not at all); returns what corpus.json says."""
    if cfg.kind == "tokens":
        raise DataError("corpus.kind 'tokens' has no documents", "it starts at the order stage")
    out = Path(out)
    domains = _documents(cfg)
    progress = Progress("corpus", len(domains), "domains")
    with clear_os_errors(out), atomic_dir(out) as tmp:
        facts: dict[str, Any] = {}
        with gzip_text(tmp / "rejected.jsonl.gz") as rejected:
            for done, (name, pairs) in enumerate(domains.items()):
                progress.update(done, name)
                domain = _Domain(tmp, name, cfg, rejected, dedupe_all=cfg.kind == "environment")
                try:
                    for source, found in pairs:
                        domain.add(source, found)
                finally:
                    domain.close()
                facts[name] = domain.facts()
        _require_documents(facts)
        rejects = sum((Counter(d["rejected"]) for d in facts.values()), Counter[str]())
        sides = [d[side] for d in facts.values() for side in ("train", "heldout")]
        files = {shard: sha256_file(tmp / shard) for side in sides for shard in side["shards"]}
        described = {
            "format": "olmo3-corpus-v1",
            "kind": cfg.kind,
            "domains": facts,
            "files": files,
            "digest": fingerprint(files),
            "documents": {
                side: sum(d[side]["documents"] for d in facts.values()) for side in ("train", "heldout")
            },
            "bytes": {side: sum(d[side]["bytes"] for d in facts.values()) for side in ("train", "heldout")},
            "rejected": dict(sorted(rejects.items())),
        }
        write_json_atomic(tmp / "corpus.json", described)
    documents, size = (sum(d["train"][key] for d in facts.values()) for key in ("documents", "bytes"))
    aside = rejects.total()
    said = f", {aside} set aside (corpus/rejected.jsonl.gz says which and why)" if aside else ""
    progress.finish(f"{documents} documents, {size / MEGABYTE:.1f} MB{said}")
    return described


def _require_documents(facts: dict[str, Any]) -> None:
    for domain, d in facts.items():
        for side in ("train", "heldout"):
            if not d[side]["documents"]:
                share = "fewer" if side == "train" else "more"
                remedy = f"add documents, or hold out {share} of them (corpus.heldout_one_in)"
                if NO_TEXT in d["rejected"]:
                    remedy = f"name the field that holds the text: text_field of the sources of {domain}"
                raise DataError(
                    f"the domain {domain} has no {side} document ({d['rejected'] or 'nothing rejected'})",
                    remedy,
                )


def corpus_sources(corpus: str | Path, described: dict[str, Any], side: str) -> list[tuple[str, Path]]:
    """(domain, file) of every document shard of one side, in manifest order: the input of `tokenize`."""
    return [
        (domain, Path(corpus) / shard)
        for domain, d in described["domains"].items()
        for shard in d[side]["shards"]
    ]
