"""Packed and padded rows against OLMo-core's own datasets, on files with awkward documents."""

import csv
import gzip
import itertools

import numpy as np
import pytest

from data.config import DataConfig, FilterConfig
from data.loader import batches
from data.order import global_order
from data.packing import (
    PackedConfig,
    cut,
    pack,
    packed_index,
    padded_index,
    permuted,
    read_boundaries,
    scan_documents,
)
from data.token_files import TokenShard
from infra.errors import DataError

EOS, PAD = 100257, 100277


@pytest.fixture
def shards(tmp_path):
    """Ten files: many documents of equal length, long ones, single-token ones, and tails without EOS."""
    rng = np.random.Generator(np.random.PCG64(9))
    made = []
    for k in range(10):
        parts = []
        for _ in range(int(rng.integers(3, 60))):
            n = int(rng.choice([1, 2, 5, 8, 8, 8, 30, 64, 65, 100, 200]))
            parts.append(np.append(rng.integers(0, 100256, n - 1), EOS))
        if k % 3 == 0:
            parts.append(rng.integers(0, 100256, 17))
        tokens = np.concatenate(parts).astype("<u4")
        path = tmp_path / f"{k:02d}.npy"
        tokens.tofile(path)
        made.append(TokenShard(str(path), f"d{k}", len(tokens)))
    return made


def paths(shards):
    return [s.path for s in shards]


def test_the_example_of_the_sheet():
    lengths = [6, 3, 8, 2, 4, 10, 3]
    spans = np.stack([np.cumsum(lengths) - lengths, np.cumsum(lengths)], axis=1)
    found = cut(spans, 8)
    order, offsets = pack(found[:, 1] - found[:, 0], 8)
    rows = [order[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    assert [[lengths[d] if lengths[d] < 9 else 8 for d in row] for row in rows] == [
        [8],
        [8],
        [6, 2],
        [4, 3],
        [3],
    ]


def test_file_permutation_goldens():
    assert permuted(10, 123) == [8, 7, 5, 9, 2, 3, 6, 1, 4, 0]
    assert permuted(1000, 123)[:8] == [178, 830, 641, 410, 255, 470, 433, 580]
    assert permuted(3, None) == [0, 1, 2]


@pytest.mark.parametrize("S", [64, 128])
@pytest.mark.parametrize("group, seed", [(1, None), (4, 123), (8, 7)])
@pytest.mark.parametrize("long_documents", ["truncate", "fragment"])
def test_packed_rows_equal_olmo_core(shards, reference_loader, S, group, seed, long_documents):
    from olmo_core.data import LongDocStrategy

    cfg = PackedConfig("olmo-core", group, seed, long_documents)
    index = packed_index(shards, S, eos_id=EOS, pad_id=PAD, cfg=cfg)
    dataset = reference_loader(
        paths(shards), S, 2, kind="packed", source_group_size=group, source_permutation_seed=seed,
        long_doc_strategy=LongDocStrategy(long_documents), generate_doc_lengths=True,
    ).dataset  # fmt: skip
    assert index.n_instances == len(dataset)
    ids = np.arange(len(dataset))
    rows, mask, lengths = index.read(ids), index.label_mask(ids), index.document_lengths(ids)
    for i in range(len(dataset)):
        item = dataset[i]
        np.testing.assert_array_equal(rows[i], item["input_ids"].numpy())
        np.testing.assert_array_equal(mask[i], item["label_mask"].numpy())
        assert lengths[i] == item["doc_lens"].tolist()


def test_batches_of_packed_rows_equal_olmo_core(shards, reference_loader):
    S, B = 64, 3
    index = packed_index(shards, S, eos_id=EOS, pad_id=PAD, cfg=PackedConfig("olmo-core", 4, 123))
    order = global_order(index.n_instances, 4123)
    loader = reference_loader(
        paths(shards), S, B, kind="packed", seed=4123, source_group_size=4, source_permutation_seed=123
    )
    cfg = DataConfig(sequence_length=S, global_batch_instances=B, seed=4123)
    for mine, theirs in zip(batches(index, order, cfg), loader, strict=True):
        np.testing.assert_array_equal(mine.tokens, theirs["input_ids"].numpy())
        np.testing.assert_array_equal(mine.label_mask, theirs["label_mask"].numpy())


def test_the_stable_sort_places_the_same_lengths(shards):
    """Both sorts fill rows with the same lengths; only which of several equal documents comes first differs."""
    stable = packed_index(shards, 64, eos_id=EOS, pad_id=PAD, cfg=PackedConfig(group_size=10))
    unstable = packed_index(shards, 64, eos_id=EOS, pad_id=PAD, cfg=PackedConfig("olmo-core", 10))
    assert stable.n_instances == unstable.n_instances
    assert [stable.lengths(i) for i in range(stable.n_instances)] == [
        unstable.lengths(i) for i in range(unstable.n_instances)
    ]
    assert stable.digest != unstable.digest
    again = packed_index(shards, 64, eos_id=EOS, pad_id=PAD, cfg=PackedConfig(group_size=10))
    np.testing.assert_array_equal(stable.spans, again.spans)
    assert stable.digest == again.digest


def test_padded_rows_equal_olmo_core(shards, reference_loader):
    S = 64
    index = padded_index(shards, S, eos_id=EOS, pad_id=PAD)
    loader = reference_loader(paths(shards), S, 4, kind="padded", seed=0)
    assert index.n_instances == len(loader.dataset)
    order = global_order(index.n_instances, 0)
    cfg = DataConfig(sequence_length=S, global_batch_instances=4, seed=0)
    for mine, theirs in zip(batches(index, order, cfg), loader, strict=True):
        np.testing.assert_array_equal(mine.tokens, theirs["input_ids"].numpy())
        np.testing.assert_array_equal(mine.label_mask, theirs["label_mask"].numpy())


def test_the_filter_sees_the_padding_as_olmo_core_does(shards, reference_loader):
    S = 64
    index = packed_index(shards, S, eos_id=EOS, pad_id=PAD, cfg=PackedConfig("olmo-core"))
    mask = index.repetition_mask(FilterConfig(enabled=True, max_count=20))
    dataset = reference_loader(paths(shards), S, 2, kind="packed", filter_count=20).dataset
    assert mask.tolist() == [bool(dataset[i]["instance_mask"]) for i in range(len(dataset))]
    assert 0 < mask.sum() < len(mask)


@pytest.mark.parametrize(
    "tokens, bos, spans",
    [
        ([1, 9, 2, 9], None, [[0, 2], [2, 4]]),
        ([1, 9, 2], None, [[0, 2]]),
        ([9, 9, 1, 9], None, [[0, 1], [1, 2], [2, 4]]),
        ([], None, []),
        ([9, 1, 9, 9, 2, 9], 9, [[0, 3], [3, 6]]),
        ([9, 1, 9, 2, 9], 9, [[0, 5]]),
        ([7, 1, 9, 7, 2], 7, [[0, 3]]),
    ],
)
def test_document_boundaries(tokens, bos, spans):
    """Also where BOS and EOS share one id (OLMo-core PR 291): a boundary is EOS followed by BOS."""
    assert scan_documents(np.array(tokens, dtype=np.uint32), 9, bos).tolist() == spans


def test_boundaries_with_bos_equal_olmo_core(tmp_path):
    from olmo_core.data.utils import iter_document_indices

    rng = np.random.default_rng(1)
    for k in range(30):
        tokens = rng.choice([1, 2, 9], int(rng.integers(2, 40)), p=[0.4, 0.2, 0.4]).astype("<u4")
        path = tmp_path / f"{k}.npy"
        tokens.tofile(path)
        for bos in (None, 9, 2):
            theirs = [
                list(map(int, p))
                for p in iter_document_indices(str(path), eos_token_id=9, bos_token_id=bos, dtype=np.uint32)
            ]
            assert scan_documents(tokens, 9, bos).tolist() == theirs


def test_boundaries_from_the_csv(shards, tmp_path):
    first = shards[0]
    spans = scan_documents(np.fromfile(first.path, dtype="<u4"), EOS)
    with gzip.open(first.path.replace(".npy", ".csv.gz"), "wt", newline="") as f:
        csv.writer(f).writerows((*s, "id, with comma", "src", 1) for s in spans.tolist())
    a = padded_index(shards[:1], 64, eos_id=EOS, pad_id=PAD)
    b = padded_index(shards[:1], 64, eos_id=EOS, pad_id=PAD, from_csv=True)
    np.testing.assert_array_equal(a.read(np.arange(a.n_instances)), b.read(np.arange(b.n_instances)))
    with pytest.raises(DataError, match="outside its"):
        read_boundaries(first.path.replace(".npy", ".csv.gz"), 10)
    with gzip.open(tmp_path / "bad.csv.gz", "wt") as f:
        f.write("a,b\n")
    with pytest.raises(DataError, match="not a list of document boundaries"):
        read_boundaries(str(tmp_path / "bad.csv.gz"), 10)


def test_documents_that_do_not_fit_are_refused():
    with pytest.raises(DataError, match="between 1 and 8"):
        pack(np.array([9]), 8)
