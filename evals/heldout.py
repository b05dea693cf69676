"""Held-out LM loss and multi-domain perplexity over padded documents.

    documents = read_documents(run / "tokens/heldout", rules)
    result = evaluate(scorer, params, documents)

One instance per EOS-terminated document: its first S tokens, no BOS, EOS included, and an unterminated tail
dropped (OLMo-core's padded FSL, sheet section 5.9). The surprising thing: AI2's LM evaluator divides the summed loss of
L tokens by L although there are only L - 1 predictions, so its figure is low by (L-1)/L. Both definitions
stand in every result, by name: `reference` divides by L, `per_prediction` by L - 1. The verdict uses
`per_prediction`. Nothing is dropped by batch: AI2's subset depends on world size (sheet section 6.1), ours does not.
AI2's published validation mixes (`corpus.heldout_manifest`) are read in the same way, from where their files lie.

Surface 1 is `heldout_loss`: one domain (`evals.loss_domain`, C4-style prose in the shipped recipes) or, where that
is empty, all documents pooled. Surface 3 is `domain_loss`: the same, domain by domain.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data.boundaries import boundaries
from data.files import join
from data.index import read_manifest
from data.token_files import TokenShard, is_remote, open_tokens, verify_shard
from evals.scoring import Params, Request, Scorer
from infra.errors import DataError


@dataclass(frozen=True)
class Document:
    """One held-out document: `tokens` int32[L], L <= S. `bytes` are the UTF-8 bytes of its predicted tokens."""

    id: str
    domain: str
    tokens: np.ndarray
    bytes: int
    cut: bool

    @property
    def predictions(self) -> int:
        return len(self.tokens) - 1


@dataclass(frozen=True)
class HeldoutSet:
    """The documents that are judged, and what was left out and why.

    `singles`: documents of one token, by domain, where every document of the domain is judged. They predict nothing, and
    OLMo-core counts their token in L all the same. `source`: the published mix, where it is one.
    """

    documents: list[Document]
    context: int
    left_out: dict[str, int]
    singles: dict[str, int] = field(default_factory=dict)
    source: str = ""

    @property
    def domains(self) -> list[str]:
        return list(dict.fromkeys(d.domain for d in self.documents))

    @property
    def digest(self) -> str:
        """sha256 over ids, domains and token bytes, in order."""
        h = hashlib.sha256()
        for d in self.documents:
            h.update(f"{d.domain}\0{d.id}\0{len(d.tokens)}\0".encode())
            h.update(d.tokens.astype("<i4").tobytes())
        for domain, n in sorted(self.singles.items()):
            h.update(f"{domain}\0{n}\0".encode())
        return h.hexdigest()


def spans(tokens: np.ndarray, eos_id: int) -> list[tuple[int, int]]:
    """[start, end) of every EOS-terminated document, EOS included. An unterminated tail is not a document."""
    ends = np.flatnonzero(np.asarray(tokens) == eos_id) + 1
    return list(zip([0, *ends[:-1].tolist()], ends.tolist())) if len(ends) else []


def shard_documents(tokens: Any, path: str, eos_id: int) -> Iterator[tuple[int, int, str]]:
    """(start, end, id) of a token file's documents, from the `.csv.gz` at `path` where there is one, else by EOS."""
    rows = list(boundary_rows(path, len(tokens)))
    for k, (start, end, name) in enumerate(rows):
        yield start, end, name or str(k)
    if not rows:
        for k, (start, end) in enumerate(spans(tokens[0 : len(tokens)], eos_id)):
            yield start, end, str(k)


def boundary_rows(path: str, tokens: int) -> Iterator[tuple[int, int, str]]:
    """The rows of a local or remote `.csv.gz`; nothing where there is none."""
    import fsspec

    system, key = fsspec.core.url_to_fs(path)
    if system.exists(key):
        with system.open(key, "rb") as raw:
            yield from boundaries(raw, tokens, path)


def read_documents(
    tokens_dir: Path, *, context: int, per_domain: int, eos_id: int, byte_lengths: np.ndarray
) -> HeldoutSet:
    """At most `per_domain` documents of each domain of a token directory, the same ones every time.

    The choice is by sha256 of the document's place, so that a larger `per_domain` only adds documents.
    `byte_lengths` int[V]: UTF-8 bytes of each token id (0 for special tokens). Files of a published mix are checked
    against their sampled digests first, and read whole where they are remote.
    """
    chosen: dict[str, list[tuple[str, Document]]] = {}
    singles: dict[str, int] = {}
    left = {"without_a_prediction": 0, "unterminated_tail_tokens": 0, "beyond_the_limit": 0}
    manifest = read_manifest(tokens_dir)
    base = manifest.get("base_dir") or str(tokens_dir)  # of a published mix, or of the run itself
    for shard in manifest["shards"]:
        path = join(base, shard["path"])
        digests = shard.get("sha256", ""), shard.get("sample_sha256", "")
        found = TokenShard(path, shard["label"], shard["tokens"], *digests)
        if manifest.get("base_dir"):
            verify_shard(found, "full" if found.sha256 else "sampled" if found.sample else "size")
        tokens = open_tokens(found)
        tokens = tokens[0 : len(tokens)] if is_remote(path) else tokens
        check_ids(tokens, len(byte_lengths), path)
        last = 0
        for start, end, name in shard_documents(tokens, f"{path.removesuffix('.npy')}.csv.gz", eos_id):
            last = end
            ids = np.asarray(tokens[start : min(end, start + context)], np.int32)
            if int(tokens[end - 1 : end][0]) != eos_id:
                left["unterminated_tail_tokens"] += end - start
                continue
            if len(ids) < 2:
                left["without_a_prediction"] += 1
                singles[shard["label"]] = singles.get(shard["label"], 0) + 1
                continue
            key = f"{shard['path']}#{name}"
            document = Document(
                key, shard["label"], ids, int(byte_lengths[ids[1:]].sum()), end - start > context
            )
            chosen.setdefault(shard["label"], []).append((hashlib.sha256(key.encode()).hexdigest(), document))
        left["unterminated_tail_tokens"] += len(tokens) - last
    documents: list[Document] = []
    for label, candidates in chosen.items():
        kept = {id(d) for _, d in sorted(candidates, key=lambda pair: pair[0])[:per_domain]}
        left["beyond_the_limit"] += len(candidates) - len(kept)
        documents += [d for _, d in candidates if id(d) in kept]
        if len(kept) < len(candidates):
            singles.pop(label, None)
    if not documents:
        raise DataError(
            f"{tokens_dir} holds no held-out document with at least one prediction",
            "use a larger corpus or a smaller corpus.heldout_one_in",
        )
    judged = {label: n for label, n in singles.items() if label in chosen}
    return HeldoutSet(documents, context, left, judged, str(manifest.get("mix", "")))


def check_ids(tokens: np.ndarray, vocab: int, path: str) -> None:
    """Raise DataError where a token file holds ids that the model has no row for."""
    if len(tokens) and int(tokens.max()) >= vocab:
        raise DataError(
            f"{path} holds the token id {int(tokens.max())}, the model has {vocab} rows",
            "these tokens are of another tokenizer",
        )


def evaluate(scorer: Scorer, params: Params, heldout: HeldoutSet) -> list[float]:
    """Summed negative log-likelihood (nat) of each document under one set of weights."""
    scored = scorer.score(params, [Request(d.tokens, 1) for d in heldout.documents])
    return [-s.total for s in scored]


def figures(nll: float, predictions: int, tokens: int, size: int) -> dict[str, float]:
    """Both loss definitions, perplexity and bits per byte of one group of documents."""
    per_prediction = nll / predictions
    return {
        "per_prediction": per_prediction,
        "reference": nll / tokens,
        "perplexity": math.exp(min(per_prediction, 700.0)),
        "bits_per_byte": nll / math.log(2) / size if size else math.nan,
        "predictions": predictions,
        "tokens": tokens,
        "bytes": size,
    }


def summary(heldout: HeldoutSet, nll: Sequence[float]) -> dict[str, Any]:
    """The result of one side as JSON: every document, every domain, and all documents pooled."""
    if len(nll) != len(heldout.documents):
        raise ValueError(f"{len(nll)} losses for {len(heldout.documents)} documents")
    bad = [d.id for d, x in zip(heldout.documents, nll) if not math.isfinite(x)]
    if bad:
        raise DataError(
            f"the loss of {len(bad)} held-out documents is not finite, first {bad[0]}", "look at the weights"
        )
    rows = [
        {"id": d.id, "domain": d.domain, "nll": float(x), "predictions": d.predictions,
         "tokens": len(d.tokens), "bytes": d.bytes, "cut": d.cut}
        for d, x in zip(heldout.documents, nll)
    ]  # fmt: skip
    return {
        "documents": rows,
        "domains": {
            name: pooled([r for r in rows if r["domain"] == name], heldout.singles.get(name, 0))
            for name in heldout.domains
        },
        "pooled": pooled(rows, sum(heldout.singles.values())),
        "left_out": heldout.left_out,
        "rules": {
            "documents": heldout.source or "held out of the corpus",
            "bos": "none",
            "window": f"first {heldout.context} tokens of each document, one window, EOS included",
            "definitions": {"reference": "sum / L", "per_prediction": "sum / (L - 1)"},
            "units": "nat",
        },
    }


def pooled(rows: Sequence[Mapping[str, Any]], singles: int = 0) -> dict[str, float]:
    """`figures` over documents, weighted by token; `singles` more tokens that predict nothing."""
    nll, predictions, tokens, size = (
        sum(r[key] for r in rows) for key in ("nll", "predictions", "tokens", "bytes")
    )
    return {**figures(nll, predictions, tokens + singles, size), "documents": len(rows)}
