"""Hostile safetensors headers and indices are refused; addresses resolve to pinned, named places."""

import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from infra.errors import IdentityError, RecipeError
from model.convert import sources
from model.convert.safetensors_io import Tensors


def write(folder: Path, header, body=b"\0" * 32, name="model.safetensors") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + body)
    return folder


def entry(start=0, stop=32, shape=(2, 4), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def test_good_file_is_read(tmp_path):
    values = np.arange(8, dtype="<f4")
    found = Tensors(write(tmp_path, {"__metadata__": {"format": "pt"}, "a": entry()}, values.tobytes()))
    assert found.read("a").tolist() == values.reshape(2, 4).tolist()


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"a": entry(stop=64, shape=(4, 4))}, "cut short"),
        ({"a": entry(shape=(2, 5))}, "needs 40 bytes, its offsets give 32"),
        ({"a": entry(shape=(10**15,))}, "has the shape"),
        ({"a": entry(shape=(2**40, 2**40))}, "needs"),
        ({"a": entry(shape=(-2, -4))}, "has the shape"),
        ({"a": entry(shape=(True, 8))}, "has the shape"),
        ({"a": entry(shape=[2] * 9)}, "has the shape"),
        ({"a": entry(dtype="EVIL")}, "dtype 'EVIL'"),
        ({"a": entry(start=-32, stop=0)}, "has the offsets"),
        ({"a": entry(), "b": entry(start=16, stop=32, shape=(4,))}, "overlaps"),
        ({"a": entry(start=16, shape=(4,))}, "leaves a hole"),
        ({"a": entry(stop=16, shape=(4,))}, "belong to no tensor"),
        ({"a": {"dtype": "F32"}}, "incomplete"),
        (b'{"a": {}, "a": {}}', "gives 'a' twice"),
        (b"[1, 2]", "instead of an object"),
        (b"[" * 100_000, "no valid JSON"),
    ],
)
def test_hostile_header_is_refused(tmp_path, header, said):
    with pytest.raises(IdentityError, match=said):
        Tensors(write(tmp_path, header))


def test_header_longer_than_the_file_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(IdentityError, match="not a safetensors file"):
        Tensors(tmp_path)


def test_what_is_no_file_of_weights_is_named(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(
        IdentityError, match=r"(?s)does not exist.*pytorch_model.bin is a pickle, which is not read"
    ):
        Tensors(tmp_path)
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(IdentityError, match="cannot be read: Is a directory"):
        Tensors(tmp_path)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "x.bin", 3])
def test_index_that_leads_elsewhere_is_refused(tmp_path, file):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(IdentityError, match="outside its directory"):
        Tensors(tmp_path)


def test_link_that_leads_elsewhere_is_refused(tmp_path):
    (tmp_path / "w").mkdir()
    (tmp_path / "w/a.safetensors").symlink_to("/etc/passwd")
    (tmp_path / "w/model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "a.safetensors"}})
    )
    with pytest.raises(IdentityError, match="outside its directory"):
        Tensors(tmp_path / "w")


def test_index_and_files_must_agree(tmp_path):
    write(tmp_path, {"a": entry()}, name="one.safetensors")
    write(tmp_path, {"b": entry()}, name="two.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    assert Tensors(tmp_path).names() == {"a", "b"}
    for wrong in ({"a": "two.safetensors", "b": "one.safetensors"}, {"a": "one.safetensors"},
                  {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}):  # fmt: skip
        index.write_text(json.dumps({"weight_map": wrong}))
        if len(wrong) > 1:
            with pytest.raises(IdentityError, match="disagree"):
                Tensors(tmp_path)


# ---------------------------------------------------------------- addresses


def test_published_list_is_the_real_one():
    """Written out as AI2's CSV it has the length of the file in `allenai/OLMo-core` (143,567 characters)."""
    lines = ["Stage,Step,Checkpoint Directory"]
    for stage, (name, _, _) in sources.STAGES_7B.items():
        lines += [f"{name},{step},{url}" for step, url in sources.steps_7b(stage).items()]
    assert len("\n".join(lines) + "\n") == 143_567


def test_published_steps_resolve():
    base = "https://olmo-checkpoints.org/ai2-llm/Olmo-3-1025-7B"
    assert sources.published("stage1/step100000") == f"{base}/stage1/step100000/"
    assert sources.published("Olmo-3-1025-7B:stage3/step11921") == f"{base}/stage3/step11921/"
    for text in ("stage1/step1413814", "stage2/step47684", "stage1/step0"):
        assert sources.published(text).startswith(base)
    with pytest.raises(RecipeError, match=r"no published step 596047") as e:
        sources.published("stage1/step596047")
    assert "nearest: 596000 and 597000" in str(e.value)
    with pytest.raises(RecipeError, match="no published step 0"):
        sources.published("stage2/step0")
    with pytest.raises(RecipeError, match="as stage1/step100000"):
        sources.published("stage4/step1")


def test_table_of_another_model(tmp_path):
    (tmp_path / "t.csv").write_text(
        "Stage,Step,Checkpoint Directory\nstage_3_longcontext,10,https://x/step10/\n"
    )
    assert sources.published("stage3/step10", tmp_path / "t.csv") == "https://x/step10/"
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    with pytest.raises(IdentityError, match="columns"):
        sources.published("stage3/step10", tmp_path / "t.csv")


def test_hub_needs_a_pinned_revision_and_gives_its_commit(tmp_path, monkeypatch):
    """A cache as the hub client lays it out; nothing is fetched. Transfers: `tests/infra/test_sources_remote.py`."""
    commit = "a" * 40
    root = tmp_path / "models--allenai--Olmo-3-test"
    (root / "blobs").mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "snapshots" / commit).mkdir(parents=True)
    (root / "refs/stage1-step0").write_text(commit)
    write(root / "blobs", {"a": entry()}, name="new")
    blob = hashlib.sha256((root / "blobs/new").read_bytes()).hexdigest()
    (root / "blobs/new").rename(root / "blobs" / blob)
    (root / "snapshots" / commit / "model.safetensors").symlink_to(root / "blobs" / blob)
    (root / "snapshots" / commit / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = sources.resolve("allenai/Olmo-3-test@stage1-step0", tmp_path)
    assert found.lineage["commit"] == commit and found.lineage["files"]["model.safetensors"] == blob
    assert Tensors(found.path).names() == {"a"}
    with pytest.raises(RecipeError, match="lacks a revision"):
        sources.resolve("allenai/Olmo-3-test", tmp_path)
    with pytest.raises(IdentityError, match=r"@other is not in the cache"):
        sources.resolve("allenai/Olmo-3-test@other", tmp_path)


def test_local_and_unknown_addresses(tmp_path):
    assert sources.resolve(tmp_path).path == tmp_path
    with pytest.raises(IdentityError, match="is no directory"):
        sources.resolve("no such thing")
    with pytest.raises(RecipeError, match="published at https"):
        sources.resolve("stage1/step1000")


def test_remote_directory_is_copied_once(tmp_path):
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe({"/bucket/step1/config.json": b"{}", "/bucket/step1/sub/x": b"1234"})
    found = sources.fetch("memory://bucket/step1", tmp_path)
    assert (found.path / "sub/x").read_bytes() == b"1234" and found.lineage["sizes"] == {
        "config.json": 2,
        "sub/x": 4,
    }
    assert sources.fetch("memory://bucket/step1", tmp_path).path == found.path
    with pytest.raises(IdentityError, match="holds no file"):
        sources.fetch("memory://bucket/none", tmp_path)
