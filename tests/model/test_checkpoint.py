"""Checkpoints: atomic, self-describing, robust against every half-written and corrupt form (user-issues B, D)."""

import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infra.artifacts import digest_tree
from infra.errors import IdentityError, ReproError
from model import checkpoint
from model import step as step_lib
from model.checkpoint import (
    Saver,
    committed,
    latest_committed,
    make_room,
    restore,
    restore_params,
    state_digest,
)
from model.config import HistoryConfig, LossConfig, MeshConfig, NumericsConfig, OptimizerConfig
from model.sharding import make_mesh


@pytest.fixture
def spec(golden_cfg):
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    return step_lib.StepSpec(golden_cfg, OptimizerConfig(), LossConfig(), NumericsConfig(), mesh)


@pytest.fixture
def state(spec, golden_params):
    return step_lib.new_state(spec, golden_params, HistoryConfig(adam_count_at_start=1))


def meta(spec):
    return {"model": spec.model.model_dump(mode="json")}


def at(state, step):
    """The state as it would be after `step`: what a checkpoint holds must stand where its name says."""
    return {**state, "step": jnp.int32(step)}


def save(root, step, state, spec, **kw):
    with Saver(root, **kw) as saver:
        saver.save(step, at(state, step), meta(spec))


def test_round_trip(tmp_path, spec, state):
    save(tmp_path, 5, state, spec)
    back, record = restore(tmp_path, 5, step_lib.abstract_state(spec))
    assert state_digest(back) == state_digest(at(state, 5))
    assert record["step"] == 5 and float(back["opt"]["count"]) == 1
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, back["params"], state["params"]))


def test_a_state_of_another_step_is_not_saved(tmp_path, spec, state):
    wanted = pytest.raises(ReproError, match="saved as step 5 is that of step 0")
    with wanted as refused, Saver(tmp_path) as saver:
        saver.save(5, state, meta(spec))
    assert refused.value.remedy == "nothing was written; report this"  # not that of a full disk
    assert committed(tmp_path).steps == ()


def test_parameters_only_and_self_describing(tmp_path, spec, state):  # B1, B3
    save(tmp_path, 5, state, spec)
    params, cfg = restore_params(tmp_path, 5)
    assert cfg == spec.model and state_digest(params) == state_digest(state["params"])


def test_donated_buffers_do_not_reach_the_file(tmp_path, spec, state):  # D2, D7
    state = jax.device_put(at(state, 1), step_lib.state_shardings(spec))
    before = state_digest(state)
    destroy = jax.jit(
        lambda s: jax.tree.map(lambda x: x * 0 - 7 if x.dtype == jnp.float32 else x, s), donate_argnums=0
    )
    with Saver(tmp_path) as saver:
        saver.prepare(step_lib.abstract_state(spec))
        saver.save(1, state, meta(spec))
        gone = destroy(state)
        jax.block_until_ready(gone)
    back, _ = restore(tmp_path, 1, step_lib.abstract_state(spec))
    assert state_digest(back) == before


def test_failed_save_raises_with_its_path(tmp_path, spec, state):  # D1
    root = tmp_path / "checkpoints"
    saver = Saver(root)
    saver.save(1, at(state, 1), meta(spec))
    saver.wait()
    shutil.rmtree(root)
    root.write_text("a file where the directory should be")
    saver.save(2, at(state, 2), meta(spec))
    saver._thread.join()
    with pytest.raises(ReproError, match="step2 failed"):
        saver.check()
    root.unlink()
    saver.save(3, at(state, 3), meta(spec))
    saver.wait()
    assert latest_committed(root)[0] == 3


def damage(directory, how):
    if how == "no manifest":
        (directory / "MANIFEST.json").unlink()
    elif how == "broken manifest":
        (directory / "MANIFEST.json").write_text('{"format": 1, "fil')
    elif how == "missing file":
        (directory / "meta.json").unlink()
    elif how == "short file":
        big = max((p for p in directory.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        os.truncate(big, big.stat().st_size // 2)
    elif how == "flipped bit":
        big = max((p for p in directory.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        raw = bytearray(big.read_bytes())
        raw[len(raw) // 2] ^= 1
        big.write_bytes(bytes(raw))


@pytest.mark.parametrize(
    "how", ["no manifest", "broken manifest", "missing file", "short file", "flipped bit"]
)
def test_damaged_checkpoint_is_named_skipped_and_kept(tmp_path, spec, state, how):  # D5, D6
    save(tmp_path, 1, state, spec)
    save(tmp_path, 2, state, spec)
    damage(tmp_path / "step2", how)
    step, skipped = latest_committed(tmp_path)
    assert step == 1 and [name for name, _ in skipped] == ["step2"]
    assert (tmp_path / "step2").is_dir()
    with pytest.raises(IdentityError, match="step2"):
        restore(tmp_path, 2, step_lib.abstract_state(spec))
    save(tmp_path, 2, state, spec)  # after rolling back, the same step is saved again
    assert latest_committed(tmp_path)[0] == 2
    assert (tmp_path / "set-aside-step2").is_dir()


def test_leftovers_of_a_killed_writer(tmp_path, spec, state):
    save(tmp_path, 1, state, spec)
    shutil.copytree(tmp_path / "step1", tmp_path / ".writing-step2")
    step, skipped = latest_committed(tmp_path)
    assert step == 1 and skipped[0][0] == ".writing-step2"
    save(tmp_path, 2, state, spec)
    assert committed(tmp_path).steps == (1, 2)


def test_after_a_roll_back_what_is_saved_stays(tmp_path, spec, state):
    """Corrupt steps beyond the one that training went on from must not take the places of those it saves now."""
    with Saver(tmp_path, keep=(3,), keep_last=2) as saver:
        for step in (3, 7, 9):
            saver.save(step, at(state, step), meta(spec))
    for step in (7, 9):
        damage(tmp_path / f"step{step}", "flipped bit")
    assert latest_committed(tmp_path)[0] == 3
    with Saver(
        tmp_path, keep=(3,), keep_last=1
    ) as saver:  # without make_room: the newest written still stays
        saver.save(4, at(state, 4), meta(spec))
    assert committed(tmp_path).steps == (3, 4, 7, 9)
    assert make_room(tmp_path, 4) == ["set-aside-step7", "set-aside-step9"]
    with Saver(tmp_path, keep=(3,), keep_last=2) as saver:
        for step in (5, 6):
            saver.save(step, at(state, step), meta(spec))
    assert committed(tmp_path).steps == (3, 5, 6)
    assert (tmp_path / "set-aside-step9" / "meta.json").is_file()


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path, spec, state):
    save(tmp_path, 1, state, spec)
    for name in (".writing-step2", ".deleted-step1", ".deleted-step5"):
        shutil.copytree(tmp_path / "step1", tmp_path / name)
    with Saver(tmp_path, keep_last=1) as saver:  # step1 is retired over its own leftover
        saver.save(2, at(state, 2), meta(spec))
    assert committed(tmp_path).steps == (2,)
    make_room(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step2"]


def test_a_hollow_or_renamed_checkpoint_is_none(tmp_path, spec, state):
    save(tmp_path, 1, state, spec)
    shutil.copytree(tmp_path / "step1", tmp_path / "step8")
    (tmp_path / "step9").mkdir()
    (tmp_path / "step9" / "MANIFEST.json").write_text('{"format": 1, "step": 9, "files": {}}')
    shutil.copytree(tmp_path / "step1", tmp_path / "step010")
    step, skipped = latest_committed(tmp_path)
    assert step == 1
    assert dict(skipped) == {
        "step010": "not a step directory",
        "step8": "its manifest is that of step 1",
        "step9": "broken manifest: it lists no params",
    }


def fitting(directory):
    """Write a manifest that fits what now lies in `directory`: damage that no digest sees."""
    (directory / "MANIFEST.json").unlink()
    record = {"format": 1, "step": int(directory.name[4:]), "files": digest_tree(directory)}
    (directory / "MANIFEST.json").write_text(json.dumps(record))


@pytest.mark.parametrize("file", ["_METADATA", "_sharding", "manifest.ocdbt", "array_metadatas/process_0"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"null", b"[" * 100_000])
def test_damaged_files_of_orbax_are_one_named_error(tmp_path, spec, state, file, content):
    save(tmp_path, 1, state, spec)
    (tmp_path / "step1" / "params" / file).write_bytes(content)
    fitting(tmp_path / "step1")
    try:
        params, _ = restore_params(tmp_path, 1)
    except IdentityError as e:
        assert "step1" in str(e)
    else:  # what Orbax does not need
        assert state_digest(params) == state_digest(at(state, 1)["params"])


def test_a_name_that_no_file_can_have(tmp_path, spec, state):
    save(tmp_path, 1, state, spec)
    manifest = json.loads((tmp_path / "step1" / "MANIFEST.json").read_text())
    manifest["files"]["params/" + "x" * 300] = {"sha256": "0" * 64, "bytes": 1}
    (tmp_path / "step1" / "MANIFEST.json").write_text(json.dumps(manifest))
    assert latest_committed(tmp_path)[0] is None


def test_retention_keeps_landmarks(tmp_path, spec, state):
    with Saver(tmp_path, keep=(2, 5), keep_last=2) as saver:
        for step in range(1, 9):
            saver.save(step, at(state, step), meta(spec))
    assert committed(tmp_path).steps == (2, 5, 7, 8)
    assert not committed(tmp_path).skipped


def test_copied_checkpoint_is_still_one(tmp_path, spec, state):  # D4
    save(tmp_path / "a", 1, state, spec)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    back, _ = restore(tmp_path / "b", 1, step_lib.abstract_state(spec))
    assert state_digest(back) == state_digest(at(state, 1))
    partial = tmp_path / "c" / "step1"  # manifest travels last: without it nothing is taken as done
    shutil.copytree(tmp_path / "a" / "step1", partial, ignore=shutil.ignore_patterns("MANIFEST.json"))
    assert latest_committed(tmp_path / "c")[0] is None


def test_other_model_is_refused(tmp_path, spec, state, golden_cfg):
    import dataclasses

    save(tmp_path, 1, state, spec)
    other = dataclasses.replace(spec, model=golden_cfg.model_copy(update={"d_ff": 128}))
    with pytest.raises(IdentityError, match=r"holds another model.*w1"):
        restore(tmp_path, 1, step_lib.abstract_state(other))


def test_other_layout_is_refused(tmp_path, spec, state):  # B3
    with Saver(tmp_path) as saver:
        saver.save(1, at(state, 1), {**meta(spec), "layout": "one-by-one-v9"})
    with pytest.raises(IdentityError, match="one-by-one-v9"):
        restore(tmp_path, 1, step_lib.abstract_state(spec))


def test_meta_is_plain_json(tmp_path, spec, state):
    save(tmp_path, 1, state, spec)
    record = json.loads((tmp_path / "step1" / "meta.json").read_text())
    assert record["model"]["d_model"] == 64 and set(record["versions"]) == {"jax", "flax", "orbax-checkpoint"}
    manifest = json.loads((tmp_path / "step1" / "MANIFEST.json").read_text())
    assert "meta.json" in manifest["files"] and len(manifest["files"]) > 3


def test_digest_sees_one_bit():
    a = {"x": np.zeros(3, np.float32)}
    b = {"x": np.array([0, 0, -0.0], np.float32)}
    assert state_digest(a) != state_digest(b) and state_digest(a) == state_digest({"x": a["x"].copy()})
    assert checkpoint.FORMAT == 1
