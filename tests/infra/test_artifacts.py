"""Identity: strict fingerprints, atomic writes, stage records that refuse what changed."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data.files import whole_file
from infra.artifacts import (
    StageRecord,
    atomic_dir,
    canonical,
    differences,
    fingerprint,
    read_json,
    write_bytes_atomic,
    write_json_atomic,
)
from infra.errors import IdentityError
from infra.leftovers import clear_dead
from model.config import SIZES

ROOT = Path(__file__).resolve().parents[2]


def test_fingerprint_ignores_key_order_and_tuple_or_list():
    assert fingerprint({"a": 1, "b": (1, 2)}) == fingerprint({"b": [1, 2], "a": 1})


def test_fingerprint_tells_values_apart():
    assert len({fingerprint(v) for v in (1, 1.5, "1", [1], {"1": 1}, None, True, "true")}) == 8


def test_fingerprint_is_pinned():
    # sha256 of the literal canonical text: a change here would orphan every run directory.
    import hashlib

    assert fingerprint({"b": 1, "a": [None, "x"]}) == hashlib.sha256(b'{"a":[null,"x"],"b":1}').hexdigest()


@pytest.mark.parametrize("value", [{1, 2}, Path("x"), math.nan, {1: 2}, object(), b"x"])
def test_unstable_values_are_refused(value):
    with pytest.raises(IdentityError):
        canonical({"x": value})


def test_sections_are_canonical():
    assert fingerprint(SIZES["7B"]) != fingerprint(SIZES["7B"].model_copy(update={"window": 4097}))


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "f"
    write_bytes_atomic(target, b"old")

    def full(*a):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        write_bytes_atomic(target, b"new")
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f"]


def test_nan_is_not_written(tmp_path):
    with pytest.raises(ValueError):
        write_json_atomic(tmp_path / "x.json", {"a": math.nan})
    assert not (tmp_path / "x.json").exists()


def test_broken_json_is_named(tmp_path):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(IdentityError, match=r"x\.json"):
        read_json(tmp_path / "x.json")


def test_atomic_dir_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(RuntimeError), atomic_dir(tmp_path / "d") as d:
        (d / "half").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with atomic_dir(tmp_path / "d") as d:
        (d / "a").write_text("1")
    with atomic_dir(tmp_path / "d") as d:
        (d / "b").write_text("2")
    assert [p.name for p in (tmp_path / "d").iterdir()] == ["b"]


def _killed_while_it_writes(path: Path, how: str) -> None:
    """A process that is killed with `how` half written."""
    code = (
        "import os, sys; from pathlib import Path; from data.files import whole_file\n"
        "from infra.artifacts import atomic_dir\n"
        f"with {how}(Path({str(path)!r})) as out:\n"
        "    out.write(b'half') if hasattr(out, 'write') else (out / 'half').write_text('x')\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == -9


def test_what_a_killed_writer_leaves_goes_and_what_a_live_one_writes_stays(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "ours.npy").write_bytes(b"whole")
    _killed_while_it_writes(tmp_path / "deep" / "a.npy", "whole_file")
    _killed_while_it_writes(tmp_path / "d", "atomic_dir")
    assert len(list(tmp_path.rglob(".*.tmp-*"))) == 2
    with whole_file(tmp_path / "deep" / "a.npy") as live:
        live.write(b"now")
        assert len(clear_dead(tmp_path)) == 2
    left = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*"))
    assert left == ["deep", "deep/a.npy", "deep/ours.npy"]
    assert clear_dead(tmp_path / "nowhere") == []


def test_differences_name_the_path():
    old = {"m": {"theta": 1, "w": [1, 2]}, "same": 1}
    new = {"m": {"theta": 2, "w": [1, 3]}, "same": 1, "extra": 5}
    assert differences(old, new) == ["extra (absent -> 5)", "m.theta (1 -> 2)", "m.w.1 (2 -> 3)"]


def _record(run: Path, theta: float = 1.0) -> StageRecord:
    return StageRecord(run, "train", {"sections": {"model": {"theta": theta}}})


def test_record_is_reused_only_while_its_outputs_stand(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").write_bytes(b"abc")
    record = _record(tmp_path)
    assert record.standing() is None
    record.begin()
    record.commit(["out"], {"seconds": 1.0})
    assert _record(tmp_path).standing()["outputs"]["out/a"]["bytes"] == 3
    (tmp_path / "out" / "a").write_bytes(b"abd")
    with pytest.raises(IdentityError, match=r"out/a changed"):
        record.standing()
    (tmp_path / "out" / "a").unlink()
    with pytest.raises(IdentityError, match=r"out/a is missing"):
        record.standing()


def test_another_identity_is_an_error_that_names_the_field(tmp_path):
    (tmp_path / "out").write_bytes(b"abc")
    _record(tmp_path).commit(["out"], {"seconds": 1.0})
    with pytest.raises(IdentityError, match=r"sections.model.theta \(1.0 -> 2.0\)"):
        _record(tmp_path, theta=2.0).standing()


def test_a_half_made_stage_of_another_identity_is_refused(tmp_path):
    _record(tmp_path).begin()
    _record(tmp_path).begin()
    with pytest.raises(IdentityError, match="was begun"):
        _record(tmp_path, theta=2.0).begin()


def test_record_is_plain_json(tmp_path):
    (tmp_path / "out").write_bytes(b"abc")
    _record(tmp_path).commit(["out"], {"seconds": 1.0})
    assert json.loads((tmp_path / "stages" / "train.json").read_text())["stage"] == "train"
