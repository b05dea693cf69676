"""The tokenize job: exact bytes, AI2's format, audit, and the same output on every runner."""

import csv
import gzip
import hashlib
import json
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from data.config import FilterConfig, TokenizerConfig
from data.index import InstanceIndex
from data.masks import scan_index
from data.shard_writer import JobSpec, ShardSpec, tokenize_shard
from data.tokenize_job import TokenizeShard, audit_entries, shard_specs, tokenize
from data.tokenizer import load_tokenizer
from infra.errors import DataError

EOS = 100257
TEXTS = {
    "code": [
        "def f(x):\n    return x\n",
        "  padded  ",
        "ends in eos<|endoftext|>",
        "a<|endoftext|>b<|endoftext|>c",
    ],
    "prose": ["Grüße, 中文!", "ha " * 400, "word", "1 2 3 4 5 6 7 8 9"],
}


@pytest.fixture
def sources(tmp_path):
    found = []
    for domain, texts in TEXTS.items():
        for part in range(2):
            path = tmp_path / "corpus" / domain / f"{part:05d}.jsonl.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = [{"id": f"{domain}{part}-{i}", "text": t} for i, t in enumerate(texts[part::2])]
            with gzip.open(path, "wt") as f:
                f.writelines(json.dumps(r) + "\n" for r in rows)
                f.write('{"id": "void", "text": "  "}\n')
            found.append((domain, path))
    return found


def oracle(text, policy="special"):
    """dolma's rule: strip, encode, add EOS unless the last id is one."""
    ids = load_tokenizer(TokenizerConfig(literal_eos=policy), "tokenizers").encode(text.strip())
    return ids if ids[-1] == EOS else [*ids, EOS]


def unpacked(path):
    return gzip.decompress(path.read_bytes()).decode()


def tree(root):
    return {
        p.relative_to(root).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in root.rglob("*.*")
    }


def test_tokens_boundaries_and_manifest(sources, tmp_path):
    out = tmp_path / "tokens"
    manifest = tokenize(sources, out, TokenizerConfig(), sequence_length=16)
    assert [s["path"] for s in manifest["shards"]] == [
        "code/00000.npy", "code/00001.npy", "prose/00000.npy", "prose/00001.npy",
    ]  # fmt: skip
    for entry, (domain, part) in zip(
        manifest["shards"], [("code", 0), ("code", 1), ("prose", 0), ("prose", 1)]
    ):
        texts = TEXTS[domain][part::2]
        expected = [oracle(t) for t in texts]
        tokens = np.fromfile(out / entry["path"], dtype="<u4")
        assert tokens.tolist() == [i for ids in expected for i in ids]
        ends = np.cumsum([len(ids) for ids in expected]).tolist()
        rows = [r.split(",") for r in unpacked(out / entry["boundaries"]).splitlines()]
        assert [[int(r[0]), int(r[1])] for r in rows] == [list(p) for p in zip([0, *ends[:-1]], ends)]
        assert [r[2:] for r in rows] == [
            [f"{domain}{part}-{i}", f"{domain}/{part:05d}.jsonl.gz", str(i + 1)] for i in range(len(texts))
        ]
        assert entry["documents"] == len(texts) and entry["empty"] == 1
        assert entry["rejected_names"] == [{"loc": len(texts) + 1, "id": "void", "reason": "empty"}]
        assert entry["sha256"] == hashlib.sha256(tokens.tobytes()).hexdigest()
        assert (entry["min_id"], entry["max_id"]) == (tokens.min(), tokens.max())
        assert entry["longest_document"] == max(len(ids) for ids in expected)
    audit = manifest["audit"]
    assert (audit["documents"], audit["literal_eos"], audit["eos"]) == (8, 2, 10)
    assert audit["rejected"] == {"empty": 4}
    assert sum(d["tokens"] for d in manifest["domains"].values()) == audit["tokens"]
    assert (out / "mix.txt").read_text().splitlines()[2] == "prose,prose/00000.npy"
    assert manifest["tokenizer"]["sha256"] == TokenizerConfig().sha256


def test_olmo_core_reads_the_boundaries(sources, tmp_path):
    from olmo_core.data.utils import iter_document_indices

    manifest = tokenize(sources, tmp_path / "t", TokenizerConfig())
    for entry in manifest["shards"]:
        path = tmp_path / "t" / entry["path"]
        read = list(iter_document_indices(str(path), use_array_if_local=False, dtype=np.uint32))
        scanned = list(iter_document_indices(str(path), eos_token_id=EOS, dtype=np.uint32))
        assert len(scanned) == len(read) + entry["literal_eos"]
        assert read[-1][1] == scanned[-1][1] == entry["tokens"]


def test_literal_eos_as_text(sources, tmp_path):
    manifest = tokenize(sources, tmp_path / "t", TokenizerConfig(literal_eos="text"))
    audit = manifest["audit"]
    assert (audit["documents"], audit["literal_eos"], audit["eos"]) == (8, 0, 8)
    assert manifest["domains"]["code"]["literal_eos_as_text"] == 3
    listed = [d for s in manifest["shards"] for d in s["literal_eos_documents"]]
    assert [(d["id"], d["count"]) for d in listed] == [("code0-1", 1), ("code1-1", 2)]
    tokens = np.fromfile(tmp_path / "t/code/00001.npy", dtype="<u4")
    expected = [oracle(t, "text") for t in TEXTS["code"][1::2]]
    assert tokens.tolist() == [i for ids in expected for i in ids]


def test_without_stripping(sources, tmp_path):
    tokenize(sources, tmp_path / "t", TokenizerConfig(strip=False))
    ids = np.fromfile(tmp_path / "t/code/00001.npy", dtype="<u4").tolist()
    assert ids[: ids.index(EOS)] == load_tokenizer(TokenizerConfig(), "tokenizers").encode("  padded  ")


def test_the_filter_writes_mask_and_rejects(sources, tmp_path):
    cfg = FilterConfig(enabled=True, max_count=8)
    out = tmp_path / "t"
    manifest = tokenize(sources, out, TokenizerConfig(), sequence_length=16, filter=cfg)
    index = InstanceIndex.from_manifest(out, 16, filter=cfg)
    np.testing.assert_array_equal(index.mask, scan_index(index, cfg))
    masked = int((~index.mask).sum())
    assert masked > 10
    assert manifest["domains"]["prose"]["masked"] == masked and manifest["domains"]["code"]["masked"] == 0
    rows = list(csv.reader(unpacked(out / "prose/00001.rejects.csv.gz").splitlines()))
    assert rows[0] == ["shard", "instance", "period", "count"]
    start = int(index.starts[3])
    assert [int(r[1]) + start for r in rows[1:]] == np.flatnonzero(~index.mask).tolist()
    assert {r[0] for r in rows[1:]} == {"prose/00001.npy"}
    assert all(int(r[3]) >= 8 for r in rows[1:])
    chunked = InstanceIndex.from_manifest(out, 16, chunk=3, filter=cfg)
    np.testing.assert_array_equal(chunked.mask, scan_index(chunked, cfg))
    other = InstanceIndex.from_manifest(out, 8, filter=cfg)
    np.testing.assert_array_equal(other.mask, scan_index(other, cfg))


def test_a_rerun_and_another_place_give_the_same_bytes(sources, tmp_path):
    cfg = FilterConfig(enabled=True)
    tokenize(sources, tmp_path / "a", TokenizerConfig(), sequence_length=16, filter=cfg)
    first = tree(tmp_path / "a")
    tokenize(sources, tmp_path / "a", TokenizerConfig(), sequence_length=16, filter=cfg)
    assert tree(tmp_path / "a") == first
    (tmp_path / "moved").mkdir()
    moved = [(d, (tmp_path / "moved" / f"{d}-{p.name}")) for d, p in sources]
    for (_, old), (_, new) in zip(sources, moved):
        new.write_bytes(old.read_bytes())
    tokenize(moved, tmp_path / "b", TokenizerConfig(), sequence_length=16, filter=cfg)
    same = {k: v for k, v in tree(tmp_path / "b").items() if k.endswith((".npy", ".bits"))}
    assert same == {k: v for k, v in first.items() if k.endswith((".npy", ".bits"))}


def test_workers_in_processes_give_the_same_bytes(sources, tmp_path):
    cfg = FilterConfig(enabled=True)
    tokenize(sources, tmp_path / "a", TokenizerConfig(), sequence_length=16, filter=cfg)
    tokenize(sources, tmp_path / "b", TokenizerConfig(), sequence_length=16, filter=cfg, processes=2)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_dask_gives_the_same_bytes(sources, tmp_path):
    cfg = FilterConfig(enabled=True)
    tokenize(sources, tmp_path / "a", TokenizerConfig(), sequence_length=16, filter=cfg)
    tokenize(
        sources, tmp_path / "b", TokenizerConfig(), sequence_length=16, filter=cfg, runner="dask", processes=2
    )
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_bad_inputs_are_named(sources, tmp_path):
    with pytest.raises(DataError, match="no document file"):
        tokenize([], tmp_path / "t", TokenizerConfig())
    with pytest.raises(DataError, match="unknown runner 'spark'"):
        tokenize(sources, tmp_path / "t", TokenizerConfig(), runner="spark")
    with pytest.raises(DataError, match=r"none\.json does not exist"):
        tokenize(sources, tmp_path / "t", TokenizerConfig(file=str(tmp_path / "none.json")))
    damaged = sources[1][1]
    damaged.write_bytes(damaged.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"00001\.jsonl\.gz cannot be read to its end"):
        tokenize(sources, tmp_path / "t", TokenizerConfig())
    assert not (tmp_path / "t/manifest.json").exists()
    assert not (tmp_path / "t/code/00001.npy").exists()
    with pytest.raises(DataError, match="would be written"):
        shard_specs([ShardSpec("a", "n", "d", "s"), ShardSpec("b", "n", "d", "s")])


def test_speculative_workers_on_one_file_do_no_harm(sources, tmp_path):
    spec = shard_specs(sources)[0]
    tokenizer = load_tokenizer(TokenizerConfig())
    alone = tokenize_shard(spec, JobSpec(str(tmp_path / "a"), 16, FilterConfig(enabled=True)), tokenizer)
    job = JobSpec(str(tmp_path / "b"), 16, FilterConfig(enabled=True))
    with ThreadPoolExecutor(8) as pool:
        entries = list(pool.map(lambda _: tokenize_shard(spec, job, tokenizer), range(24)))
    assert all(entry == alone for entry in entries)
    assert tree(tmp_path / "b") == tree(tmp_path / "a")


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(sources, tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("data.files.os.fsync", full)
    with pytest.raises(DataError, match="disk full while writing"):
        tokenize(sources, tmp_path / "t", TokenizerConfig())
    assert not list((tmp_path / "t").rglob("*.npy*"))


def test_a_missing_permission_is_one_clear_error(sources, tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("data.files.os.replace", refused)
    with pytest.raises(DataError, match="no permission to write"):
        tokenize(sources, tmp_path / "t", TokenizerConfig())


def test_the_audit_is_enforced():
    entry = {
        "path": "a.npy",
        "documents": 3,
        "literal_eos": 1,
        "eos": 4,
        "max_id": 9,
        "min_id": 0,
        "tokens": 8,
    }
    entry["rejected"] = {}
    assert audit_entries([entry], 10, 1)["eos"] == 4
    for change, match in (({"eos": 3}, "3 EOS ids"), ({"max_id": 10}, "token id 10"), ({}, "1 shards for 2")):
        with pytest.raises(DataError, match=match):
            audit_entries([{**entry, **change}], 10, 1 if change else 2)


def test_the_main_session_is_never_pickled():
    from apache_beam.options.pipeline_options import SetupOptions

    from data.runners import make_pipeline

    pipeline, _ = make_pipeline("direct", 2)
    assert pipeline._options.view_as(SetupOptions).save_main_session is False
    with pytest.raises(DataError, match="0 processes"):
        make_pipeline("direct", 0)


def test_output_behind_an_address_is_the_same(sources, tmp_path):
    """Any fsspec address takes the output (gs:// in earnest, an in-memory store here)."""
    import fsspec

    local = tokenize(sources, tmp_path / "t", TokenizerConfig(), sequence_length=16)
    remote = tokenize(sources, "memory://job-test/tokens", TokenizerConfig(), sequence_length=16)
    assert remote == local
    memory = fsspec.filesystem("memory")
    for entry in local["shards"]:
        for name in (entry["path"], entry["boundaries"]):
            assert memory.cat_file(f"/job-test/tokens/{name}") == (tmp_path / "t" / name).read_bytes()


UNPICKLE = """
import pickle, sys
sys.modules.pop("__main__")
fn = pickle.loads(bytes.fromhex(sys.stdin.read()))
fn.setup()
[(position, entry)] = fn.process((0, {fields!r}))
print(position, entry.get("documents"), entry.get("error"))
"""


def test_the_dofn_works_in_a_new_process_without_the_main_module(sources, tmp_path):
    from apache_beam.internal import pickler

    fn = TokenizeShard(JobSpec(str(tmp_path / "t")), TokenizerConfig())
    fn.setup()
    fresh = TokenizeShard(fn.job, fn.cfg)
    fields = {"path": str(sources[0][1]), "name": "code/00000", "label": "code", "source": "s"}
    code = UNPICKLE.replace("{fields!r}", repr(fields))
    out = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(fresh).hex(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert out.stdout.strip() == "0 2 None", out.stderr[-800:]
    assert b"__main__" not in pickler.dumps(fresh)


def test_the_graph_spreads_files_and_ends_in_one_node(sources, tmp_path):
    import apache_beam as beam

    from data.tokenize_job import build_pipeline

    pipeline = beam.Pipeline()
    build_pipeline(pipeline, shard_specs(sources), JobSpec(str(tmp_path)), TokenizerConfig())
    transforms = pipeline.to_runner_api().components.transforms
    names = {t.unique_name: t for t in transforms.values()}
    [reshuffle] = [t for name, t in names.items() if name == "spread"]
    assert "reshuffle" in reshuffle.spec.urn
    assert list(names["tokenize"].inputs.values()) == list(reshuffle.outputs.values())
    consumed = {i for t in transforms.values() for i in t.inputs.values()}
    leaves = {o for t in transforms.values() for o in t.outputs.values()} - consumed
    assert leaves == set(names["manifest"].outputs.values())
