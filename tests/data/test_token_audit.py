"""The audit of token files: silent on what the job wrote, and naming the document for each way of being wrong."""

import gzip
import json

import numpy as np
import pytest

from data.config import TokenizerConfig
from data.token_audit import audit_tokens
from data.tokenize_job import tokenize
from infra.errors import DataError

TEXTS = [
    "Grüße, 中文! The Same Words.",
    "  padded  ",
    "ends in eos<|endoftext|>",
    "a<|endoftext|>b",
    "x = 1\n",
]


@pytest.fixture
def made(tmp_path):
    """(sources, token directory) of five documents in two files."""
    sources = []
    for part in range(2):
        path = tmp_path / f"{part:05d}.jsonl.gz"
        with gzip.open(path, "wt") as f:
            f.writelines(json.dumps({"id": str(i), "text": t}) + "\n" for i, t in enumerate(TEXTS[part:]))
        sources.append(("prose", path))
    tokenize(sources, tmp_path / "tokens", TokenizerConfig())
    return sources, tmp_path / "tokens"


def test_what_the_job_writes_passes(made):
    assert audit_tokens(*made, TokenizerConfig(), documents=10) == len(TEXTS) * 2 - 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: np.delete(t, np.flatnonzero(t == 100257)[0]), "its text gives 100257"),
        (lambda t: np.insert(t, 0, 100257), "token 0 is 100257"),
        (lambda t: np.roll(t, -3), "its text gives"),
        (lambda t: t[:5], "the file ends after"),
        (lambda t: np.concatenate([t[:3], t[3:4] + 1, t[4:]]), "token 0 is"),
    ],
    ids=["EOS lost", "BOS", "shifted", "cut", "one token"],
)
def test_each_difference_is_named(made, change, words):
    sources, tokens = made
    path = tokens / "prose" / "00001.npy"
    change(np.fromfile(path, "<u4")).tofile(path)
    manifest = json.loads((tokens / "manifest.json").read_text())
    manifest["shards"][1]["tokens"] = path.stat().st_size // 4
    (tokens / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"document \d of 00001.jsonl.gz") as raised:
        audit_tokens(sources, tokens, TokenizerConfig())
    assert words in str(raised.value)


def test_tokens_of_another_text_are_noticed(made, tmp_path):
    """The tokens of the lower-cased text: every id is in range and every document ends in EOS."""
    sources, _ = made
    lower = []
    for domain, path in sources:
        copy = tmp_path / f"lower-{path.name}"
        with gzip.open(path, "rt") as f, gzip.open(copy, "wt") as g:
            g.write(f.read().lower())
        lower.append((domain, copy))
    tokenize(lower, tmp_path / "other", TokenizerConfig())
    with pytest.raises(DataError, match=r"document 1 of 00000.jsonl.gz"):
        audit_tokens(sources, tmp_path / "other", TokenizerConfig())
