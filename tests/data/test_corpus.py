"""The corpus: two sides disjoint by construction, every document accounted for, the same bytes each time."""

import gzip
import json
from pathlib import Path

import pytest

from data.config import CorpusConfig, Source
from data.corpus import build_corpus, corpus_sources, is_heldout, text_hash
from data.environment import DOMAINS, domain_of, environment_files
from infra.artifacts import read_json, sha256_file
from infra.errors import DataError

SMALL = CorpusConfig(megabytes_per_domain=0.3, shard_megabytes=0.1, heldout_max_documents=3)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    out = tmp_path_factory.mktemp("corpus") / "corpus"
    return out, build_corpus(SMALL, out)


def documents(root: Path, described, side):
    found = []
    for domain, path in corpus_sources(root, described, side):
        with gzip.open(path, "rt") as f:
            found += [(domain, json.loads(line)) for line in f]
    return found


def test_four_domains_with_enough_text(environment):
    out, described = environment
    assert tuple(described["domains"]) == DOMAINS
    for facts in described["domains"].values():
        assert facts["train"]["bytes"] >= 300_000
        assert len(facts["train"]["shards"]) >= 3
        assert 1 <= facts["heldout"]["documents"] <= 3
    assert read_json(out / "corpus.json") == json.loads(json.dumps(described))


def test_sides_are_disjoint_and_split_by_content(environment):
    out, described = environment
    train, held = documents(out, described, "train"), documents(out, described, "heldout")
    assert {text_hash(d["text"]) for _, d in train}.isdisjoint({text_hash(d["text"]) for _, d in held})
    assert {d["id"] for _, d in train}.isdisjoint({d["id"] for _, d in held})
    assert all(is_heldout(d["text"], 20) for _, d in held)
    assert not any(is_heldout(d["text"], 20) for _, d in train)
    assert len({text_hash(d["text"]) for _, d in train}) == len(train)
    for domain in DOMAINS:
        ids = [d["id"] for name, d in train if name == domain]
        assert ids == sorted(ids)


def test_a_second_build_gives_the_same_bytes(environment, tmp_path):
    out, described = environment
    again = build_corpus(SMALL, tmp_path / "again")
    assert again == described
    for shard in described["files"]:
        assert (
            sha256_file(tmp_path / "again" / shard) == sha256_file(out / shard) == described["files"][shard]
        )


def test_own_code_and_evaluation_items_are_left_out():
    for files in environment_files().values():
        for file in files:
            parts = file.name.split("/")
            assert not {"olmo_eval", "lm_eval", "olmo_data", "__pycache__"} & set(parts)
            assert not parts[1].startswith(("olmo3_repro", "__editable__"))
            assert parts[1] not in {"pipelines", "evals", "model", "data", "infra"}
    assert domain_of("x-1.0.dist-info/RECORD", "packages") is None
    assert domain_of("x-1.0.dist-info/direct_url.json", "packages") is None
    assert domain_of("x-1.0.dist-info/METADATA", "packages") == "prose"
    assert domain_of("a/b.py", "stdlib") == "stdlib-code"
    assert domain_of("a/b.json", "packages") == "structured"


@pytest.fixture
def own(tmp_path):
    """Two files of one domain, with everything that can go wrong, and a second domain."""
    folder = tmp_path / "in"
    folder.mkdir()
    texts = [f"document number {i}" for i in range(200)]
    held = next(t for t in texts if is_heldout(t, 4))
    lines = [json.dumps({"id": f"a{i}", "text": t}).encode() for i, t in enumerate(texts)]
    lines += [b'{"id": "empty", "text": "  "}', b'{"id": "latin", "text": "\xe9"}', b"no json"]
    (folder / "a.jsonl").write_bytes(b"\n".join(lines))
    twins = [{"id": "twin-padded", "text": f"  {held}\n"}, {"id": "twin", "text": held}]
    (folder / "b.jsonl").write_text("".join(json.dumps(t) + "\n" for t in twins))
    (folder / "notes.jsonl").write_text("".join(json.dumps({"text": f"note {i}"}) + "\n" for i in range(50)))
    return folder


def files_config(folder, **changes):
    sources = (
        Source(domain="web", glob=f"{folder}/[ab].jsonl"),
        Source(domain="notes", glob=f"{folder}/notes.jsonl"),
    )
    return CorpusConfig(**{"kind": "files", "sources": sources, "heldout_one_in": 4, **changes})


def test_files_are_split_by_the_same_rule(own, tmp_path, capsys):
    out = tmp_path / "corpus"
    described = build_corpus(files_config(own), out)
    web = described["domains"]["web"]
    assert web["rejected"] == {"empty": 1, "not JSON": 1, "not UTF-8": 1}
    assert [r["id"] for r in web["rejected_names"]] == ["empty", f"{own}/a.jsonl:202", f"{own}/a.jsonl:203"]
    assert web["duplicates"] == 2
    assert described["rejected"] == web["rejected"]
    assert "3 set aside (corpus/rejected.jsonl.gz says which and why)" in capsys.readouterr().err
    train, held = documents(out, described, "train"), documents(out, described, "heldout")
    kept = web["train"]["documents"] + web["heldout"]["documents"] + web["heldout_over_limit"]
    assert kept + web["duplicates"] + 3 == 205
    assert {d["text"].strip() for _, d in train}.isdisjoint({d["text"].strip() for _, d in held})
    assert all(is_heldout(d["text"], 4) for _, d in held)
    with gzip.open(out / "rejected.jsonl.gz", "rt") as f:
        assert len(f.readlines()) == 3


def test_heldout_documents_over_the_limit_are_never_trained_on(own, tmp_path):
    described = build_corpus(files_config(own, heldout_max_documents=5), tmp_path / "c")
    web = described["domains"]["web"]
    assert web["heldout"]["documents"] == 5
    assert web["heldout_over_limit"] > 20
    assert not any(is_heldout(d["text"], 4) for _, d in documents(tmp_path / "c", described, "train"))


def test_a_glob_that_matches_nothing_is_an_error_before_any_work(own, tmp_path):
    cfg = CorpusConfig(kind="files", sources=(Source(domain="web", glob=f"{own}/nothing*.jsonl"),))
    with pytest.raises(DataError, match="matches no file"):
        build_corpus(cfg, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_more_text_than_the_environment_has(tmp_path):
    with pytest.raises(DataError, match=r"only .* MB of training text"):
        build_corpus(CorpusConfig(megabytes_per_domain=100_000), tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_domain_without_heldout_documents_is_an_error(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": next(t for t in map(str, range(99)) if not is_heldout(t, 20))}))
    cfg = CorpusConfig(kind="files", sources=(Source(domain="web", glob=str(path)),))
    with pytest.raises(DataError, match="no train document") as e:
        wrong = Source(domain="web", glob=str(path), text_field="body")
        build_corpus(CorpusConfig(kind="files", sources=(wrong,)), tmp_path / "b")
    assert e.value.remedy == "name the field that holds the text: text_field of the sources of web"
    with pytest.raises(DataError, match="no heldout document"):
        build_corpus(cfg, tmp_path / "c")


def test_a_full_disk_leaves_nothing_that_looks_done(own, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("data.corpus._Side.add", full)
    with pytest.raises(DataError, match="disk full"):
        build_corpus(files_config(own), tmp_path / "c")
    assert not (tmp_path / "c").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
