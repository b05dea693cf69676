"""Byte equality with the dolma toolkit, from a stored run of it (`fixtures/dolma/README.md`)."""

import gzip
from pathlib import Path

import pytest

from data.config import TokenizerConfig
from data.shard_writer import JobSpec, ShardSpec, tokenize_shard
from data.tokenize_job import tokenize
from data.tokenizer import load_tokenizer

FIXTURE = Path(__file__).parent / "fixtures" / "dolma"


@pytest.mark.parametrize("backend", ["fastokens", "tokenizers"])
def test_tokens_and_boundaries_are_those_of_the_toolkit(tmp_path, backend):
    spec = ShardSpec(str(FIXTURE / "input.jsonl.gz"), "x/00000", "x", "input.jsonl.gz")
    entry = tokenize_shard(spec, JobSpec(str(tmp_path)), load_tokenizer(TokenizerConfig(), backend))
    assert (tmp_path / "x/00000.npy").read_bytes() == (FIXTURE / "tokens.npy").read_bytes()
    with gzip.open(FIXTURE / "boundaries.csv.gz") as theirs, gzip.open(tmp_path / "x/00000.csv.gz") as ours:
        assert ours.read() == theirs.read()
    assert entry["documents"] == 81 and entry["empty"] == 2
    assert entry["literal_eos"] == 4 and entry["eos"] == 85


def test_the_job_gives_the_same(tmp_path):
    spec = ShardSpec(str(FIXTURE / "input.jsonl.gz"), "", "x", "input.jsonl.gz")
    tokenize([spec], tmp_path, TokenizerConfig())
    assert (tmp_path / "x/00000.npy").read_bytes() == (FIXTURE / "tokens.npy").read_bytes()


def test_without_stripping_it_would_differ(tmp_path):
    spec = ShardSpec(str(FIXTURE / "input.jsonl.gz"), "x/00000", "x", "input.jsonl.gz")
    tokenize_shard(spec, JobSpec(str(tmp_path)), load_tokenizer(TokenizerConfig(strip=False)))
    assert (tmp_path / "x/00000.npy").read_bytes() != (FIXTURE / "tokens.npy").read_bytes()
