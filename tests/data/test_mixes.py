"""Published mixes: AI2's manifests as OLMo-core resolves them, indexes from sizes alone, refused lines."""

import hashlib

import numpy as np
import pytest

from data.config import CorpusConfig, TokenizerConfig
from data.index import InstanceIndex
from data.mixes import PUBLIC_BASE, lock_mix, mix_file, read_mix, read_sizes, shipped_mixes
from data.order import order_length
from infra.errors import DataError, IdentityError

OFFICIAL = "OLMo-mix-0625-official"
USED = [
    OFFICIAL, "OLMo-mix-0925-official", "OLMo-mix-0625", "OLMo-midtraining-mix-0625-100B",
    "OLMo-midtraining-mix-0925-ingredient1-100B", "OLMo-midtraining-mix-0925-ingredient2-100B",
    "OLMo-longmino-mix-0625", "OLMo-longmino-mix-0925", "v3-small-ppl-validation", "c4-ppl-validation",
]  # fmt: skip


def tokens_config(manifest=OFFICIAL, base=PUBLIC_BASE):
    return CorpusConfig(kind="tokens", manifest=str(manifest), base_dir=str(base))


@pytest.mark.parametrize("name", USED)
def test_every_mix_resolves_as_olmo_core_does(name):
    from olmo_core.data import DataMix, TokenizerName

    paths, labels = DataMix(name).build(PUBLIC_BASE, TokenizerName.dolma2)
    entries = read_mix(name, TokenizerConfig())
    assert [f"{PUBLIC_BASE}/{e.path}" for e in entries] == paths
    assert [e.label for e in entries] == labels


def test_the_official_manifest_is_the_one_of_the_sheet():
    assert hashlib.sha256(mix_file(OFFICIAL).read_bytes()).hexdigest().startswith("d770716a78fe0e9f")
    assert (
        hashlib.sha256(mix_file("OLMo-mix-0925-official").read_bytes())
        .hexdigest()
        .startswith("e72803971ba7150d")
    )
    entries = read_mix(OFFICIAL, TokenizerConfig())
    assert len(entries) == 1016
    root = "preprocessed/dolma3-0625/v0.1-official/allenai/dolma3-tokenizer"
    assert entries[0].path == f"{root}/common_crawl/adult_content/000000.npy"
    assert entries[-1].path.endswith("dolma1_7-wiki-en/000007.npy")


def sizes_for(entries, instances=723_872_800):
    """Sizes with odd tails that make about `instances` instances of 8192 in all."""
    rng = np.random.default_rng(0)
    share = instances // len(entries)
    return {e.path: 4 * (8192 * share + int(rng.integers(0, 8192))) for e in entries}


def test_the_whole_official_mix_indexes_from_a_table_of_sizes(tmp_path):
    entries = read_mix(OFFICIAL, TokenizerConfig())
    sizes = sizes_for(entries)
    table = tmp_path / "sizes.csv"
    table.write_text("# path,bytes\n" + "".join(f"{p},{s}\n" for p, s in sizes.items()))
    lock_mix(tokens_config(), TokenizerConfig(), tmp_path / "t", sizes=read_sizes(table), digests="size")
    index = InstanceIndex.from_manifest(tmp_path / "t", 8192, tokenizer=TokenizerConfig(), verify="none")
    expected = [sizes[e.path] // 4 // 8192 for e in entries]
    assert index.n_instances == sum(expected)
    assert index.starts[1:].tolist() == np.cumsum(expected).tolist()
    files, offsets = index.locate(np.array([0, expected[0] - 1, expected[0], index.n_instances - 1]))
    assert files.tolist() == [0, 0, 1, 1015]
    assert offsets.tolist() == [0, (expected[0] - 1) * 8192, 0, (expected[-1] - 1) * 8192]
    chunked = InstanceIndex.from_manifest(tmp_path / "t", 4096, chunk=2, verify="none")
    assert order_length(chunked.n_instances, 2) == 2 * index.n_instances


@pytest.fixture
def local_mix(tmp_path):
    """Three token files below a base directory and a manifest with the placeholder."""
    base = tmp_path / "base"
    lines = ["# a comment", ""]
    for k in range(3):
        path = base / "allenai/dolma2-tokenizer" / f"{k}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.arange(k, k + 100 + k, dtype="<u4").tofile(path)
        lines.append(f"label{k},{{TOKENIZER}}/{k}.npy")
    manifest = tmp_path / "my-mix.txt"
    manifest.write_text("\n".join(lines) + "\n")
    return base, manifest


@pytest.mark.parametrize("digests", ["full", "sampled"])
def test_a_local_mix_is_locked_with_identity(local_mix, tmp_path, digests):
    base, manifest = local_mix
    lock_mix(tokens_config(manifest, base), TokenizerConfig(), tmp_path / "t", digests=digests)
    index = InstanceIndex.from_manifest(tmp_path / "t", 16, verify=digests)
    assert index.n_instances == 18
    np.testing.assert_array_equal(index.read([17])[0], np.arange(2 + 80, 2 + 96))
    path = base / "allenai/dolma2-tokenizer/1.npy"
    path.write_bytes(path.read_bytes()[:-4] + b"\1\0\0\0")
    with pytest.raises(IdentityError, match=r"1\.npy has the digest"):
        InstanceIndex.from_manifest(tmp_path / "t", 16, verify=digests)


def test_a_renamed_entry_is_named_before_any_step(local_mix, tmp_path):
    base, manifest = local_mix
    (base / "allenai/dolma2-tokenizer/1.npy").rename(base / "allenai/dolma2-tokenizer/one.npy")
    with pytest.raises(DataError, match=r"line 4 of the mix: .*1\.npy does not exist \(1 of 3"):
        lock_mix(tokens_config(manifest, base), TokenizerConfig(), tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_an_entry_without_a_size_is_named(local_mix, tmp_path):
    base, manifest = local_mix
    with pytest.raises(DataError, match="is not in the table of sizes"):
        lock_mix(tokens_config(manifest, base), TokenizerConfig(), tmp_path / "t", sizes={}, digests="size")


@pytest.mark.parametrize(
    "line, match",
    [
        ("a,../b.npy", "leaves the base directory"),
        ("a,x/../../b.npy", "leaves the base directory"),
        ("a,/etc/b.npy", "leaves the base directory"),
        ("a,gs://other/b.npy", "leaves the base directory"),
        ("a b.npy", "is not `label,path`"),
        ("a,b,c.npy", "is not `label,path`"),
        (",b.npy", "is not `label,path`"),
        ("# nothing", "has no entry"),
    ],
)
def test_bad_lines_are_refused(tmp_path, line, match):
    manifest = tmp_path / "mix.txt"
    manifest.write_text(line + "\n")
    with pytest.raises(DataError, match=match):
        read_mix(str(manifest), TokenizerConfig())


def test_a_size_that_is_no_multiple_of_four_is_refused(local_mix, tmp_path):
    base, manifest = local_mix
    with open(base / "allenai/dolma2-tokenizer/2.npy", "ab") as f:
        f.write(b"x")
    with pytest.raises(DataError, match=r"2\.npy has 409 bytes, which is not a multiple of 4"):
        lock_mix(tokens_config(manifest, base), TokenizerConfig(), tmp_path / "t")


def test_ids_beyond_the_vocabulary_are_refused_when_read(local_mix, tmp_path):
    base, manifest = local_mix
    np.full(100, 100278, dtype="<u4").tofile(base / "allenai/dolma2-tokenizer/0.npy")
    lock_mix(tokens_config(manifest, base), TokenizerConfig(), tmp_path / "t")
    index = InstanceIndex.from_manifest(tmp_path / "t", 16)
    index.read(np.array([10]))
    with pytest.raises(DataError, match=r"0\.npy holds the id 100278 in instance 3"):
        index.read(np.array([10, 3]))


def test_unknown_mixes_list_the_known_ones():
    assert OFFICIAL in shipped_mixes()
    with pytest.raises(DataError, match="OLMo-mix-0625-official") as e:
        mix_file("OLMo-mix-9999")
    assert "there is no mix manifest 'OLMo-mix-9999'" in e.value.what


def test_mixes_over_fsspec_are_read_by_range(local_mix, tmp_path):
    import fsspec

    base, manifest = local_mix
    memory = fsspec.filesystem("memory")
    for path in base.rglob("*.npy"):
        memory.pipe_file(f"/mix-test/{path.relative_to(base)}", path.read_bytes())
    cfg = tokens_config(manifest, "memory://mix-test")
    lock_mix(cfg, TokenizerConfig(), tmp_path / "t", digests="full")
    lock_mix(tokens_config(manifest, base), TokenizerConfig(), tmp_path / "u", digests="full")
    remote = InstanceIndex.from_manifest(tmp_path / "t", 16)
    local = InstanceIndex.from_manifest(tmp_path / "u", 16)
    assert remote.digest == local.digest
    ids = np.arange(remote.n_instances)
    np.testing.assert_array_equal(remote.read(ids), local.read(ids))
