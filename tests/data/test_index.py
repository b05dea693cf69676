"""The index: identity by content, refusals that name the file, OLMo-core's instances."""

import json

import numpy as np
import pytest

from data.config import FilterConfig, TokenizerConfig
from data.index import InstanceIndex
from data.masks import open_mask, unpack, write_mask
from data.token_files import (
    SAMPLE_BYTES,
    TokenShard,
    sample_digest,
    sample_offsets,
    token_count,
    verify_shard,
)
from infra.artifacts import read_json, write_json_atomic
from infra.errors import DataError, IdentityError, ReproError

S, VOCAB = 32, 100278


@pytest.fixture
def arrays():
    rng = np.random.default_rng(5)
    return [rng.integers(0, 100278, n).astype("<u4") for n in (1000, 31, 0, 640, 96)]


@pytest.fixture
def root(token_dir, arrays):
    return token_dir(arrays)


def test_instances_never_cross_files(root, arrays):
    index = InstanceIndex.from_manifest(root, S)
    assert index.n_instances == 31 + 0 + 0 + 20 + 3
    expected = np.concatenate([a[: len(a) // S * S].reshape(-1, S) for a in arrays])
    np.testing.assert_array_equal(index.read(np.arange(index.n_instances)), expected)
    assert index.labels_of([0, 30, 31, 50, 51]) == ["d0", "d0", "d3", "d3", "d4"]


def test_olmo_core_has_the_same_instances(root, arrays, reference_loader):
    for chunk in (1, 2, 3):
        index = InstanceIndex.from_manifest(root, S, chunk=chunk)
        paths = [s.path for s in index.shards if s.tokens]
        target = None if chunk == 1 else chunk * S
        dataset = reference_loader(paths, S, 2, max_target=target).dataset
        assert index.n_instances == len(dataset)
        for i in range(len(dataset)):
            np.testing.assert_array_equal(index.read([i])[0], dataset[i]["input_ids"].numpy())


def test_ids_out_of_range(root):
    index = InstanceIndex.from_manifest(root, S)
    for ids in ([index.n_instances], [-1]):
        with pytest.raises(DataError, match="out of range"):
            index.read(np.array(ids))


def files(root):
    return sorted(root.rglob("*.npy"))


@pytest.mark.parametrize("verify", ["full", "sampled"])
def test_changed_truncated_swapped_or_missing_files_are_refused_by_name(root, verify):
    first = root / "d0/00000.npy"
    good = first.read_bytes()

    def refused(error, match):
        with pytest.raises(error, match=match) as e:
            InstanceIndex.from_manifest(root, S, verify=verify)
        assert "00000.npy" in str(e.value)

    first.write_bytes(good[:401] + bytes([good[401] ^ 1]) + good[402:])
    refused(IdentityError, "has the digest")
    first.write_bytes(good[:-4])
    refused(IdentityError, "has 999 tokens, its manifest says 1000")
    first.write_bytes(good[:-3])
    refused(DataError, "not a multiple of 4")
    first.unlink()
    refused(DataError, "does not exist")
    first.write_bytes(good)
    InstanceIndex.from_manifest(root, S, verify=verify)


def test_swapped_files_of_equal_size_are_refused(token_dir):
    root = token_dir([np.arange(64, dtype="<u4"), np.arange(64, 128, dtype="<u4")])
    a, b = files(root)
    x, y = a.read_bytes(), b.read_bytes()
    a.write_bytes(y)
    b.write_bytes(x)
    for verify in ("full", "sampled"):
        with pytest.raises(IdentityError, match=r"00000\.npy has the digest"):
            InstanceIndex.from_manifest(root, S, verify=verify)


def test_digest_is_content_and_not_place(token_dir, arrays):
    one = InstanceIndex.from_manifest(token_dir(arrays, "one"), S)
    two = InstanceIndex.from_manifest(token_dir(arrays, "two", labels=["x"] * len(arrays)), S)
    assert one.digest == two.digest
    other = [a.copy() for a in arrays]
    other[3][639] ^= 1
    assert InstanceIndex.from_manifest(token_dir(other, "three"), S).digest != one.digest
    assert InstanceIndex.from_manifest(token_dir(arrays[::-1], "four"), S).digest != one.digest
    assert InstanceIndex.from_manifest(token_dir(arrays, "five"), S, chunk=2).digest != one.digest
    assert InstanceIndex.from_manifest(token_dir(arrays, "six"), 2 * S).digest != one.digest


@pytest.mark.parametrize(
    "field, value",
    [("sha256", "0" * 64), ("vocab_size", 100279), ("eos_id", 0), ("strip", False), ("literal_eos", "text")],
)
def test_tokens_of_another_tokenizer_are_refused(root, field, value):
    InstanceIndex.from_manifest(root, S, tokenizer=TokenizerConfig())
    with pytest.raises(IdentityError, match=rf"tokenizer\.{field}"):
        InstanceIndex.from_manifest(root, S, tokenizer=TokenizerConfig(**{field: value}))


def test_a_directory_without_manifest_or_of_another_format(root):
    with pytest.raises(IdentityError, match="does not exist"):
        InstanceIndex.from_manifest(root / "nowhere", S)
    manifest = read_json(root / "manifest.json")
    write_json_atomic(root / "manifest.json", {**manifest, "format": "v0"})
    with pytest.raises(IdentityError, match="not of the format"):
        InstanceIndex.from_manifest(root, S)


def test_too_few_tokens_for_one_instance(root):
    with pytest.raises(DataError, match="not one instance of 8192"):
        InstanceIndex.from_manifest(root, 8192)


def test_masks_are_bound_to_their_index(root, tmp_path):
    index = InstanceIndex.from_manifest(root, S)
    cfg = FilterConfig(enabled=True)
    mask = np.arange(index.n_instances) % 3 > 0
    described = write_mask(tmp_path, mask, cfg, index)
    assert described["masked"] == 18
    np.testing.assert_array_equal(open_mask(tmp_path, index, cfg), mask)
    with pytest.raises(IdentityError, match="max_count"):
        open_mask(tmp_path, index, FilterConfig(enabled=True, max_count=8))
    with pytest.raises(IdentityError, match="sequence_length"):
        open_mask(tmp_path, InstanceIndex.from_manifest(root, 16), cfg)
    with pytest.raises(DataError, match="entries, the index"):
        index.set_mask(mask[:-1])
    with pytest.raises(DataError, match="bytes"):
        unpack(bytes(3), 25, "mask.bits")
    bits = tmp_path / "mask.bits"
    bits.write_bytes(bytes(len(bits.read_bytes())))
    with pytest.raises(IdentityError, match="changed"):
        open_mask(tmp_path, index, cfg)


def test_sampled_digest_sees_every_sampled_block(tmp_path):
    path = tmp_path / "big.npy"
    size = 8_000_000
    data = np.arange(size // 4, dtype="<u4")
    data.tofile(path)
    shard = TokenShard(str(path), "x", size // 4, "", sample_digest(path))
    offsets = sample_offsets(size)
    assert offsets[0] == 0 and offsets[-1] == size - SAMPLE_BYTES and len(offsets) == 64
    for offset in (offsets[0], offsets[31], offsets[-1]):
        with open(path, "r+b") as f:
            f.seek(offset + 100)
            f.write(b"\xff")
        with pytest.raises(IdentityError):
            verify_shard(shard, "sampled")
        data.tofile(path)
    verify_shard(shard, "sampled")
    assert token_count(path) == size // 4


@pytest.mark.parametrize(
    "change, words",
    [
        ({"path": "a" * 300 + ".npy"}, "shard 0 has the path"),
        ({"path": "\ud800.npy"}, "shard 0 has the path"),
        ({"max_id": "many"}, "shard 0 has the max_id"),
        ({"max_id": VOCAB}, "shard 0 has the max_id"),
    ],
)
def test_an_entry_that_no_file_can_fit_is_named(root, change, words):
    manifest = read_json(root / "manifest.json")
    manifest["shards"][0] |= change
    (root / "manifest.json").write_text(json.dumps(manifest))
    for verify in ("sampled", "none"):
        with pytest.raises(IdentityError, match=words):
            InstanceIndex.from_manifest(root, S, verify=verify)


@pytest.mark.parametrize("base", ["a\0b", "\ud800", "foo://x", "http://127.0.0.1:9/x", 3, "x" * 300])
def test_a_base_folder_that_cannot_be_is_named_and_not_asked(root, monkeypatch, base):
    monkeypatch.setattr("socket.socket.connect", lambda *a: pytest.fail("connected"))
    (root / "manifest.json").write_text(json.dumps({**read_json(root / "manifest.json"), "base_dir": base}))
    with pytest.raises(IdentityError, match="`base_dir` is"):
        InstanceIndex.from_manifest(root, S)


def test_a_base_folder_that_is_a_file_is_named(root):
    write_json_atomic(
        root / "manifest.json",
        {**read_json(root / "manifest.json"), "base_dir": str(root / "manifest.json")},
    )
    for verify in ("sampled", "none"):
        with pytest.raises(DataError, match=r"manifest\.json/d0/00000\.npy"):
            index = InstanceIndex.from_manifest(root, S, verify=verify)
            index.read(np.arange(1))


@pytest.mark.parametrize("vocab_size", [None, "many", 0, True])
def test_a_manifest_without_the_size_of_its_vocabulary_is_refused(root, vocab_size):
    manifest = read_json(root / "manifest.json")
    manifest["tokenizer"]["vocab_size"] = vocab_size
    write_json_atomic(root / "manifest.json", manifest)
    with pytest.raises(IdentityError, match="vocab_size"):
        InstanceIndex.from_manifest(root, S)


@pytest.mark.parametrize("verify", ["full", "sampled", "size", "none"])
def test_a_false_max_id_does_not_switch_the_check_off(token_dir, arrays, verify):
    wrong = arrays[0].copy()
    wrong[3] = 4_000_000_000
    root = token_dir([wrong], "wrong")
    manifest = read_json(root / "manifest.json")
    manifest["shards"][0]["max_id"] = 0
    write_json_atomic(root / "manifest.json", manifest)
    with pytest.raises(ReproError, match="4000000000"):
        InstanceIndex.from_manifest(root, S, verify=verify).read(np.arange(1))
