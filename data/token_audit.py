"""Are these token files the text they are said to be? A few documents of every file, encoded again.

    audit_tokens(corpus_sources(corpus, described, side), tokens_dir, TokenizerConfig())

The job encodes with a fast engine, in groups, in worker processes; here the plain engine reads the tokenizer's JSON and
the documents' own file, and must give the same ids, each document ended by EOS. So another tokenizer, a lost or doubled
EOS, a token put in front, a shifted file: all of it stops the stage, though both sides of a reproduction would train on it
and agree. The surprising thing: it is enough to look at the first documents, since a file is written front to back by one rule.
"""

import gzip
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.config import TokenizerConfig
from data.index import read_manifest
from data.tokenizer import tokenizer_file
from infra.errors import DataError

DOCUMENTS = 4


def audit_tokens(
    sources: Sequence[tuple[str, Path]], tokens_dir: Path, cfg: TokenizerConfig, documents: int = DOCUMENTS
) -> int:
    """Compare the first `documents` of each shard with the text in `sources` (jsonl.gz, manifest order).

    Returns how many were compared; raises DataError that names the first one that differs.
    """
    from tokenizers import Tokenizer

    engine = Tokenizer.from_file(str(tokenizer_file(cfg)))
    engine.encode_special_tokens = cfg.literal_eos == "text"
    compared = 0
    for (_, path), shard in zip(sources, read_manifest(tokens_dir)["shards"], strict=True):
        tokens = np.memmap(tokens_dir / shard["path"], "<u4", "r") if shard["tokens"] else np.zeros(0, "<u4")
        start = 0
        with gzip.open(path, "rt", encoding="utf-8") as f:
            for number, line in enumerate(itertools.islice(f, documents), 1):
                text = json.loads(line)["text"]
                text = text.strip() if cfg.strip else text
                ids = engine.encode(text, add_special_tokens=False).ids
                if not ids:
                    continue
                if ids[-1] != cfg.eos_id:
                    ids.append(cfg.eos_id)
                found = tokens[start : start + len(ids)]
                if not np.array_equal(found, np.asarray(ids, "<u4")):
                    raise DataError(
                        f"document {number} of {path.name} ({shard['label']}) is not the tokens that stand in "
                        f"{tokens_dir / shard['path']} from {start} on: {first_difference(ids, found)}",
                        "another tokenizer or another rule for EOS made this file: tokenize again",
                    )
                start += len(ids)
                compared += 1
    return compared


def first_difference(wanted: Sequence[int], found: np.ndarray) -> str:
    """The first place where ids differ, in words."""
    for k, (a, b) in enumerate(zip(wanted, found.tolist())):
        if a != b:
            return f"token {k} is {b}, its text gives {a}"
    return f"the file ends after {len(found)} of {len(wanted)} tokens"
