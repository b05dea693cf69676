"""The whole data plane on real text at 8192: corpus, job, index, mask, order, batches, receipt."""

import json
import subprocess
import sys

import numpy as np
import pytest

from data.config import CorpusConfig, DataConfig, FilterConfig, TokenizerConfig
from data.corpus import build_corpus, corpus_sources
from data.index import InstanceIndex
from data.loader import batches
from data.masks import scan_index
from data.order import global_order
from data.packing import read_boundaries
from data.receipt import Receipt, expected
from data.tokenize_job import tokenize

S, B = 8192, 16
EOS = 100257
FILTER = FilterConfig(enabled=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    cfg = CorpusConfig(megabytes_per_domain=2.0, shard_megabytes=0.5)
    described = build_corpus(cfg, root / "corpus")
    manifests = {
        side: tokenize(
            corpus_sources(root / "corpus", described, side), root / "tokens" / side, TokenizerConfig(),
            sequence_length=S, filter=FILTER,
        )
        for side in ("train", "heldout")
    }  # fmt: skip
    return root, described, manifests


def documents(root, side, manifest):
    """The token bytes of every document, from the boundaries."""
    found = []
    for entry in manifest["shards"]:
        path = root / "tokens" / side / entry["path"]
        tokens = np.fromfile(path, dtype="<u4")
        spans = read_boundaries(str(path).replace(".npy", ".csv.gz"), len(tokens))
        assert len(spans) == entry["documents"]
        assert spans[0][0] == 0 and spans[-1][1] == len(tokens)
        assert (spans[1:, 0] == spans[:-1, 1]).all()
        assert (tokens[spans[:, 1] - 1] == EOS).all()
        found += [tokens[a:b].tobytes() for a, b in spans]
    return found


def test_heldout_and_training_documents_are_disjoint_in_tokens(run):
    root, described, manifests = run
    train, held = (documents(root, side, manifests[side]) for side in ("train", "heldout"))
    assert len(train) == described["documents"]["train"] and len(held) == described["documents"]["heldout"]
    assert set(train).isdisjoint(held)


def test_the_audit_counts_what_is_in_the_files(run):
    root, described, manifests = run
    for side, manifest in manifests.items():
        tokens = np.concatenate(
            [np.fromfile(root / "tokens" / side / s["path"], dtype="<u4") for s in manifest["shards"]]
        )
        audit = manifest["audit"]
        assert audit["tokens"] == len(tokens)
        assert audit["eos"] == (tokens == EOS).sum() == audit["documents"] + audit["literal_eos"]
        assert (audit["min_id"], audit["max_id"]) == (tokens.min(), tokens.max())
        assert set(manifest["domains"]) == set(described["domains"])


def test_batches_masks_and_receipts_at_8192_equal_olmo_core(run, reference_loader):
    root, _, _ = run
    index = InstanceIndex.from_manifest(root / "tokens/train", S, tokenizer=TokenizerConfig(), filter=FILTER)
    np.testing.assert_array_equal(index.mask, scan_index(index, FILTER))
    order = global_order(index.n_instances, 34521)
    loader = reference_loader([s.path for s in index.shards], S, B, filter_count=32)
    receipt = Receipt()
    count = 0
    cfg = DataConfig(sequence_length=S, global_batch_instances=B)
    for mine, theirs in zip(batches(index, order, cfg), loader, strict=True):
        np.testing.assert_array_equal(mine.tokens, theirs["input_ids"].numpy())
        np.testing.assert_array_equal(mine.instance_mask, theirs["instance_mask"].numpy())
        receipt.update(mine.step, theirs["index"].numpy(), theirs["input_ids"].numpy().astype(np.uint32))
        count += 1
    assert count == index.n_instances // B >= 10
    assert receipt.hexdigest() == expected(index, order, B, count)[count]


MEMORY = """
import json, sys
from data.config import FilterConfig, TokenizerConfig
from data.shard_writer import JobSpec, ShardSpec, tokenize_shard
from data.tokenizer import load_tokenizer
tokenizer = load_tokenizer(TokenizerConfig())
job = JobSpec(sys.argv[1], 8192, FilterConfig(enabled=True), 8_000_000)
tokenize_shard(ShardSpec(sys.argv[2], "small", "x", "s"), job, tokenizer)
before = peak_kb()
entry = tokenize_shard(ShardSpec(sys.argv[3], "big", "x", "s"), job, tokenizer)
print(json.dumps([entry["documents"], entry["rejected"], peak_kb() - before]))
"""


def test_a_worker_needs_bounded_memory(tmp_path, peak_kb):
    """60 MB of documents and one of 60 MB, limit 8 MB: less than 150 MB more than for a small file."""
    line = json.dumps({"id": "x", "text": "some real words, and 12345 numbers\n" * 3000}) + "\n"
    (tmp_path / "small.jsonl").write_text(line * 20)
    with open(tmp_path / "big.jsonl", "w") as f:
        for _ in range(600):
            f.write(line)
        f.write('{"id": "huge", "text": "')
        for _ in range(600):
            f.write("some real words, and 12345 numbers " * 3000)
        f.write('"}\n')
    command = [
        sys.executable,
        "-c",
        peak_kb + MEMORY,
        str(tmp_path),
        str(tmp_path / "small.jsonl"),
        str(tmp_path / "big.jsonl"),
    ]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    documents, rejected, extra = json.loads(out.stdout)
    assert (documents, rejected) == (600, {"over-long": 1})
    assert extra < 150_000, f"{extra} KB more"
