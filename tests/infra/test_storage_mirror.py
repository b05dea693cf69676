"""A run directory in a bucket: what arrives, in which order, and what a killed or second writer leaves."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infra.errors import IdentityError, LeaseError
from infra.mirror import Mirror, newest_step, tier, working_copy
from infra.storage import Bucket, Conflict, StorageError


def mirror(local: Path, what="test", **options) -> Mirror:
    bucket = Bucket("b", deadline=20.0, first_pause=0.02, threads=2, read_seconds=2.0)
    return Mirror("gs://b/run", local, what, bucket=bucket, **{"every": 0.0, **options})


def checkpoint(run: Path, step: int, size: int = 1000) -> None:
    """A committed checkpoint as the trainer leaves it: content, then the manifest."""
    root = run / "checkpoints" / f"step{step}"
    (root / "params").mkdir(parents=True)
    data = os.urandom(size)
    (root / "params" / "d").write_bytes(data)
    (root / "MANIFEST.json").write_text(
        json.dumps({"format": 1, "step": step, "files": {"params/d": {"bytes": size}}})
    )
    log = run / "train" / "metrics.jsonl"
    log.parent.mkdir(exist_ok=True)
    with log.open("a") as f:
        f.write(json.dumps({"step": step}) + "\n")


def tree(root: Path) -> dict[str, bytes]:
    files = (p for p in root.rglob("*") if p.is_file())
    return {r: p.read_bytes() for p in files if not (r := p.relative_to(root).as_posix()).startswith(".")}


def test_there_and_back_in_another_place(gcs, tmp_path):
    with mirror(tmp_path / "a") as m:
        checkpoint(m.local, 3)
        (m.local / "stages").mkdir()
        (m.local / "stages" / "train.json").write_text("{}")
        (m.local / ".lease").write_text("mine alone")
        (m.local / "checkpoints" / ".writing-step4").mkdir()
        (m.local / "checkpoints" / ".writing-step4" / "half").write_text("half")
    assert not [n for n in gcs.names() if "/." in n]
    with mirror(tmp_path / "b") as m:
        assert tree(m.local) == {k: v for k, v in tree(tmp_path / "a").items() if "/." not in k}
    assert newest_step("gs://b/run", m.bucket) == 3


def test_markers_go_last_and_an_unchanged_copy_sends_nothing(gcs, tmp_path):
    with mirror(tmp_path / "a") as m:
        checkpoint(m.local, 3)
        (m.local / "stages").mkdir()
        (m.local / "stages" / "train.json").write_text("{}")
        sent = m.push()
        assert [tier(r) for r in sent] == sorted(tier(r) for r in sent) and len(sent) == 4
        before = len(gcs.requests)
        assert m.push() == []
        assert not [r for r in gcs.requests[before:] if r[0] != "GET"]


def test_a_half_sent_checkpoint_is_not_there_for_anybody(gcs, tmp_path):
    with mirror(tmp_path / "a") as m:
        checkpoint(m.local, 3)
        m.push()
        checkpoint(m.local, 6)
        m.bucket.deadline = 0.5
        gcs.fail("POST", "upload", "503", 10**6)
        with pytest.raises(Exception, match=r"503|ServiceUnavailable"):
            m.push()
        assert newest_step("gs://b/run", m.bucket) == 3
        gcs.faults.clear()
        m.bucket.deadline = 20
        # the content arrived, its manifest did not
        m.bucket.upload(
            [(m.local / "checkpoints/step6/params/d", "run/checkpoints/step6/params/d")], lambda n: 0
        )
        assert newest_step("gs://b/run", m.bucket) == 3
    assert newest_step("gs://b/run", m.bucket) == 6


def test_log_in_the_bucket_covers_every_checkpoint_there(gcs, tmp_path):
    with mirror(tmp_path / "a") as m:
        for step in (1, 2, 3):
            checkpoint(m.local, step)
        with (m.local / "train" / "metrics.jsonl").open("a") as f:
            f.write('{"step": 4, "half')
        m.push()
        lines = gcs.objects["b", "run/train/metrics.jsonl"]["data"].decode()
        assert [json.loads(x)["step"] for x in lines.splitlines()] == [1, 2, 3] and lines.endswith("\n")


def test_a_retired_checkpoint_leaves_the_bucket_marker_first(gcs, tmp_path):
    import shutil

    with mirror(tmp_path / "a") as m:
        checkpoint(m.local, 1)
        checkpoint(m.local, 2)
        m.push()
        shutil.rmtree(m.local / "checkpoints" / "step1")
        before = len(gcs.requests)
        m.push()
        deleted = [u for method, u in gcs.requests[before:] if method == "DELETE"]
        assert "MANIFEST" in deleted[0] and len(deleted) == 2
    assert not [n for n in gcs.names() if "step1/" in n] and newest_step("gs://b/run", m.bucket) == 2


def test_a_copy_that_is_deleted_deletes_what_it_had_sent(gcs, tmp_path):
    """FRESH=1 on a bucket: nothing of the old run is left beside the new one."""
    import shutil

    gcs.put("b", "run/notes.txt", b"somebody's", None)
    with mirror(tmp_path / "a", brings=lambda r: r != "notes.txt") as m:
        checkpoint(m.local, 1)
        m.push()
        shutil.rmtree(m.local)
        checkpoint(m.local, 2)
    assert [n for n in gcs.names() if "step1/" in n] == [] and newest_step("gs://b/run", m.bucket) == 2
    assert "run/notes.txt" in gcs.names()


def test_what_this_copy_never_had_is_neither_deleted_nor_overwritten(gcs, tmp_path):
    gcs.put("b", "run/notes.txt", b"somebody's", None)
    with mirror(tmp_path / "a", brings=lambda r: r != "notes.txt") as m:
        m.push()
        assert "run/notes.txt" in gcs.names()
        (m.local / "notes.txt").write_text("mine")
        with pytest.raises(Conflict, match=r"gs://b/run/notes.txt was written by somebody else"):
            m.push()
        (m.local / "notes.txt").unlink()
    assert gcs.objects["b", "run/notes.txt"]["data"] == b"somebody's"


def test_both_sides_changed_is_an_error_that_names_the_file(gcs, tmp_path):
    with mirror(tmp_path / "a") as m:
        (m.local / "recipe.json").write_text("{}")
    gcs.put("b", "run/recipe.json", b'{"other": 1}', None)
    (tmp_path / "a" / "recipe.json").write_text('{"mine": 1}')
    with pytest.raises(IdentityError, match=r"recipe.json were both changed"), mirror(tmp_path / "a"):
        pass
    assert [n for n in gcs.names() if "lease" in n] == []


def test_two_writers_of_one_run_are_refused(gcs, tmp_path):
    with (
        mirror(tmp_path / "a", "first"),
        pytest.raises(LeaseError, match=r"gs://b/run/.leases/run is held by first"),
        mirror(tmp_path / "b", "second"),
    ):
        pass


def test_a_working_copy_of_another_run_is_refused(gcs, tmp_path):
    with mirror(tmp_path / "a"):
        pass
    with pytest.raises(IdentityError, match="working copy of gs://b/run, not of gs://b/other"):
        Mirror("gs://b/other", tmp_path / "a", "x", exclusive=False, every=0).__enter__()
    assert working_copy("gs://b/run/") == Path("runs/.gs/b/run")


def test_sending_goes_on_after_an_outage_longer_than_the_deadline(gcs, tmp_path, capsys):
    with mirror(tmp_path / "a", every=0.1) as m:
        m.bucket.deadline = 0.2
        gcs.fail("POST", "upload", "503", 10**6)
        (m.local / "x").write_text("x")
        time.sleep(1.2)
        assert m.failures and m._thread.is_alive()
        gcs.faults.clear()
        m.bucket.deadline = 20
        (m.local / "y").write_text("y")
        until = time.monotonic() + 10
        while not {"run/x", "run/y"} <= set(gcs.names()):
            assert time.monotonic() < until
            time.sleep(0.05)
        time.sleep(0.2)
        (m.local / "z").write_text("z")
    assert {"run/x", "run/y", "run/z"} <= set(gcs.names())
    err = capsys.readouterr().err
    assert err.count("gs://b/run: not sent: cannot upload gs://b/run/x") == 1
    assert err.count("gs://b/run: sending again") == 1


def test_a_run_that_somebody_took_over_is_stopped_and_ends_with_an_error(gcs, tmp_path, capsys):
    stopped = []
    m = mirror(tmp_path / "a", every=0.1, stop=lambda: stopped.append(1))
    m._lease.ttl = 0.3
    with pytest.raises(LeaseError, match="was lost: somebody else took it over"), m:
        gcs.put("b", "run/.leases/run", b'{"token": "another"}', None)
        until = time.monotonic() + 10
        while not stopped:
            assert time.monotonic() < until
            time.sleep(0.05)
        (m.local / "x").write_text("x")
    assert stopped == [1] and "run/x" not in gcs.names()
    assert "run/.leases/run" in gcs.names(), "the other's lease stays"
    assert "somebody else has taken over this run" in capsys.readouterr().err


def between(monkeypatch, what):
    """Do `what` once, between a listing and the downloads from it."""
    listed, todo = Bucket.list, [what]

    def listing(self, prefix):
        found = listed(self, prefix)
        if todo:
            todo.pop()()
        return found

    monkeypatch.setattr(Bucket, "list", listing)


def test_a_log_that_grows_while_it_is_brought_is_brought_at_its_newest(gcs, tmp_path, monkeypatch):
    gcs.put("b", "run/train/metrics.jsonl", b"1\n", None)
    between(monkeypatch, lambda: gcs.put("b", "run/train/metrics.jsonl", b"1\n2\n", None))
    with mirror(tmp_path / "w", exclusive=False, sends=lambda r: False) as m:
        assert (m.local / "train/metrics.jsonl").read_text() == "1\n2\n"
        gcs.put("b", "run/train/metrics.jsonl", b"1\n2\n3\n", None)
        assert m.pull() == ["train/metrics.jsonl"]


def test_a_checkpoint_that_is_retired_while_it_is_brought_is_never_half_there(gcs, tmp_path, monkeypatch):
    with mirror(tmp_path / "a") as m:
        checkpoint(m.local, 1)
        checkpoint(m.local, 2)

    def retire():
        for name in ("MANIFEST.json", "params/d"):
            del gcs.objects["b", f"run/checkpoints/step1/{name}"]

    between(monkeypatch, retire)
    with mirror(tmp_path / "w", exclusive=False, sends=lambda r: False) as m:
        assert sorted(r for r in tree(m.local) if "checkpoints" in r) == [
            "checkpoints/step2/MANIFEST.json",
            "checkpoints/step2/params/d",
        ]


def test_a_run_that_changes_at_every_look_ends_in_one_error(gcs, tmp_path, monkeypatch):
    listed = Bucket.list

    def listing(self, prefix):
        gcs.put("b", "run/a", b"x", None)
        found = listed(self, prefix)
        gcs.put("b", "run/a", b"y", None)
        return found

    monkeypatch.setattr(Bucket, "list", listing)
    with pytest.raises(StorageError, match="gs://b/run is changed faster than it can be brought"):
        mirror(tmp_path / "w", exclusive=False).__enter__()


TRAINER = """
import json, os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
run = Path(sys.argv[sys.argv.index("--run") + 1])
log = run / "train" / "metrics.jsonl"
log.parent.mkdir(exist_ok=True, parents=True)
done = max([int(p.parent.name[4:]) for p in run.glob("checkpoints/step*/MANIFEST.json")], default=0)
stop = []
signal.signal(signal.SIGTERM, lambda *a: stop.append(1))
print("from", done, flush=True)
for step in range(done + 1, 7):
    time.sleep(0.3)
    with log.open("a") as f:
        f.write(json.dumps(dict(step=step)) + "\\n")
    root = run / "checkpoints" / f"step{{step}}"
    root.mkdir(parents=True)
    (root / "d").write_bytes(b"x" * step)
    (root / "MANIFEST.json").write_text(json.dumps(dict(format=1, files=dict(d=dict(bytes=step)))))
    if stop:
        sys.exit(75)
"""


def worker(gcs, tmp_path, name, **popen):
    (tmp_path / "toy_trainer.py").write_text(TRAINER.format(tests=str(Path(__file__).parent)))
    env = {
        **os.environ,
        "STORAGE_EMULATOR_HOST": gcs.url,
        "PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}",
    }
    argv = [
        sys.executable,
        "-m",
        "infra.launch.worker",
        "--run",
        "gs://b/run",
        "--module",
        "toy_trainer",
        "--work",
        str(tmp_path / name),
        "--every",
        "0.2",
    ]
    return subprocess.Popen(
        argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **popen
    )


def wait_for_step(bucket, step, seconds=30):
    deadline = time.monotonic() + seconds
    while newest_step("gs://b/run", bucket) < step:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_worker_is_preempted_and_goes_on_from_the_bucket(gcs, tmp_path):
    """SIGTERM: the module saves, the last state is sent, exit 75; a new machine goes on where it stood."""
    bucket = Bucket("b", deadline=20)
    first = worker(gcs, tmp_path, "one")
    wait_for_step(bucket, 2)
    first.terminate()
    assert first.wait(20) == 75
    stands = newest_step("gs://b/run", bucket)
    assert 2 <= stands < 6
    second = worker(gcs, tmp_path, "two")
    out, _ = second.communicate(timeout=40)
    assert second.returncode == 0 and f"from {stands}" in out
    assert newest_step("gs://b/run", bucket) == 6
    steps = [
        json.loads(x)["step"]
        for x in gcs.objects["b", "run/train/metrics.jsonl"]["data"].decode().splitlines()
    ]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert sorted(n for n in gcs.names() if "logs/" in n) == [
        "run/logs/worker-0001.log",
        "run/logs/worker-0002.log",
    ]
