"""Storage against a small service over real HTTP that enforces preconditions and breaks on request."""

import os
import subprocess
import sys
import threading
import time

import pytest

from infra.errors import LeaseError
from infra.gcs_lease import GcsLease
from infra.storage import Bucket, Conflict, StorageError, crc32c_of, open_url, split_url

FAULTS = ["429", "500", "503", "reset"]


def bucket(**options) -> Bucket:
    return Bucket(
        "b", **{"deadline": 20.0, "first_pause": 0.02, "threads": 2, "read_seconds": 2.0, **options}
    )


def test_url_is_split_and_a_wrong_one_is_named():
    assert split_url("gs://b/a/run/") == ("b", "a/run/")
    assert split_url("gs://b") == ("b", "")
    with pytest.raises(StorageError, match="s3://x' is not of the form"):
        split_url("s3://x")


def test_files_go_up_and_come_back_equal(gcs, tmp_path):
    contents = {f"d/{i}.bin": os.urandom(i * 1000) for i in range(12)}
    for name, data in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    b, prefix = open_url("gs://b/run")
    entries = b.upload([(tmp_path / n, prefix + n) for n in contents], lambda name: 0)
    assert {n: e.crc32c for n, e in entries.items()} == {
        f"run/{n}": crc32c_of(d) for n, d in contents.items()
    }
    b.download([(e, tmp_path / "back" / n) for n, e in b.list(prefix).items()])
    assert {n: (tmp_path / "back" / "run" / n).read_bytes() for n in contents} == contents
    assert not [p for p in (tmp_path / "back").rglob("*") if ".tmp-" in p.name]


@pytest.mark.parametrize("kind", FAULTS)
def test_faults_are_retried_until_they_pass(gcs, tmp_path, kind):
    (tmp_path / "a").write_bytes(b"content" * 999)
    b = bucket()
    gcs.fail("POST", "upload", kind, 3)
    entry = b.upload([(tmp_path / "a", "run/a")], lambda name: 0)["run/a"]
    gcs.fail("GET", "/o/run/a", kind, 3)
    b.download([(entry, tmp_path / "b")])
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()
    gcs.fail("GET", "/b/b/o?", kind, 2)
    assert list(b.list("run/")) == ["run/a"]
    gcs.fail("DELETE", "run/a", kind, 2)
    b.delete("run/a")
    assert gcs.names() == []


@pytest.mark.parametrize("kind", ["truncate", "corrupt", "slow"])
def test_a_bad_body_is_fetched_again_and_never_left_behind(gcs, tmp_path, kind):
    data = os.urandom(300_000)
    b = bucket(slow=0.8)
    entry = b.write_bytes("run/a", data, 0)
    gcs.fail("GET", "/o/run/a", kind, 2)
    b.download([(entry, tmp_path / "a")])
    assert (tmp_path / "a").read_bytes() == data
    gcs.fail("GET", "/o/run/a", kind, 1)
    assert b.read_bytes("run/a")[0] == data
    gcs.fail("GET", "/o/run/a", kind, 999)
    with pytest.raises(StorageError, match=r"cannot download gs://b/run/a: .* \(\d+ tries in \d+ s\)"):
        bucket(deadline=1.5, slow=0.5).download([(entry, tmp_path / "c")])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def test_the_deadline_ends_in_one_error_that_names_the_object(gcs, tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    gcs.fail("POST", "upload", "503", 999)
    start = time.monotonic()
    with pytest.raises(StorageError, match=r"cannot upload gs://b/run/a: .*tries in") as e:
        bucket(deadline=1.0).upload([(tmp_path / "a", "run/a")])
    assert time.monotonic() - start < 6
    assert "check the network" in e.value.remedy and gcs.names() == []


def test_resumable_upload_continues_after_errors(gcs, tmp_path, monkeypatch):
    """20 MB in pieces of 8: a failed piece is repeated, the pieces before it are not sent again."""
    data = os.urandom(20 * 2**20)
    (tmp_path / "big").write_bytes(data)
    gcs.fail("POST", "uploadType=resumable", "503", 1)
    gcs.fail("PUT", "/session/", "503", 1)
    entry = bucket().upload([(tmp_path / "big", "big")], lambda name: 0)["big"]
    assert gcs.objects["b", "big"]["data"] == data and entry.crc32c == crc32c_of(data)
    puts = [u for m, u in gcs.requests if m == "PUT"]
    assert 3 <= len(puts) <= 5


def test_conditional_write_is_refused_once_it_stands(gcs):
    b = bucket()
    first = b.write_bytes("run/DONE", b"one", if_generation=0)
    with pytest.raises(Conflict, match="gs://b/run/DONE was written by somebody else"):
        b.write_bytes("run/DONE", b"two", if_generation=0)
    second = b.write_bytes("run/DONE", b"two", if_generation=first.generation)
    with pytest.raises(Conflict):
        b.delete("run/DONE", if_generation=first.generation)
    assert b.read_bytes("run/DONE") == (b"two", second.generation)


def test_a_lost_answer_is_not_a_conflict(gcs):
    """The write was done, its answer was lost, the repetition gets 412: it was ours."""
    gcs.fail("POST", "upload", "lost_answer", 1)
    entry = bucket().write_bytes("run/DONE", b"mine", if_generation=0)
    assert gcs.objects["b", "run/DONE"]["generation"] == entry.generation


def test_access_denied_and_missing_are_said_at_once(gcs):
    gcs.fail("GET", "/o/run/a", "403", 9)
    with pytest.raises(StorageError, match="access denied") as e:
        bucket().read_bytes("run/a")
    assert "Storage Object User" in e.value.remedy
    with pytest.raises(StorageError, match="gs://b/run/none is not there"):
        bucket().read_bytes("run/none")


def test_missing_credentials_give_the_remedy(monkeypatch, tmp_path):
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    with pytest.raises(StorageError, match=r"gs://[a-z-]+: no Google credentials") as e:
        bucket().list("run/")
    assert e.value.remedy.startswith("run `gcloud auth application-default login`")


def test_one_lease_has_one_owner(gcs):
    b, won, errors = bucket(), [], []

    def take(i):
        try:
            with GcsLease(bucket(), "run/.leases/x", f"owner {i}"):
                won.append(i)
                time.sleep(0.5)
        except LeaseError as e:
            errors.append(str(e))

    threads = [threading.Thread(target=take, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(won) == 1 and len(errors) == 3
    assert all("is held by" in e for e in errors)
    with GcsLease(b, "run/.leases/x", "next"):
        pass
    assert gcs.names() == []


def test_lease_is_renewed_and_a_dead_owner_is_taken_over(gcs):
    b = bucket()
    with GcsLease(b, "x", "alive", ttl=0.6, skew=0.0) as alive:
        time.sleep(1.5)
        alive.check()
        with pytest.raises(LeaseError, match="held by alive"), GcsLease(b, "x", "second", ttl=0.6, skew=1.0):
            pass
    dead = GcsLease(b, "x", "dead", ttl=0.5, skew=0.0)
    dead._renew = lambda: None  # a killed process renews nothing
    dead.__enter__()
    with GcsLease(b, "x", "next", ttl=0.5, skew=0.0, wait_seconds=10) as heir:
        heir.check()
        dead._done.set()
        dead.__exit__()
        heir._generation = b.write_bytes("x", heir._content(), if_generation=heir._generation).generation


def test_a_killed_owner_on_this_machine_is_taken_over_at_once(gcs):
    code = "from infra.storage import *; from infra.gcs_lease import *; import time; GcsLease(Bucket('b'), 'x', 'killed').__enter__(); print('held', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    with (
        pytest.raises(LeaseError, match=rf"held by killed \(process {process.pid}"),
        GcsLease(bucket(), "x", "heir"),
    ):
        pass
    process.kill()
    process.wait()
    with GcsLease(bucket(), "x", "heir"):
        pass


def test_a_lost_lease_is_noticed(gcs):
    b = bucket()
    with GcsLease(b, "x", "first", ttl=0.3) as lease:
        b.write_bytes("x", b"{}")
        time.sleep(0.5)
        with pytest.raises(LeaseError, match="was lost"):
            lease.check()


def test_a_lease_outlives_an_outage_longer_than_the_deadline(gcs):
    b = bucket(deadline=0.2)
    with GcsLease(b, "x", "first", ttl=0.3) as lease:
        gcs.fail("POST", "upload", "503", 10**6)
        time.sleep(1.0)
        lease.check()
        gcs.faults.clear()
        before = gcs.objects["b", "x"]["generation"]
        time.sleep(0.5)
        assert gcs.objects["b", "x"]["generation"] > before
        lease.check()
    assert gcs.names() == []


def test_a_lease_that_is_gone_is_made_anew_and_our_own_lost_write_is_ours(gcs):
    b = bucket()
    with GcsLease(b, "x", "first", ttl=0.3) as lease:
        b.delete("x")
        time.sleep(0.4)
        lease.check()
        b.write_bytes("x", lease._content())  # as after a renewal whose answer never came
        time.sleep(0.4)
        lease.check()
    assert gcs.names() == []


def test_an_object_that_is_waited_for_is_said_once(gcs, capsys):
    gcs.fail("GET", "/o/run/a", "503", 5)
    gcs.put("b", "run/a", b"x", None)
    assert bucket().read_bytes("run/a")[0] == b"x"
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "cannot read gs://b/run/a yet" in lines[0] and "trying until " in lines[0]


def test_a_corrupt_listing_is_fetched_again_and_then_an_error(gcs):
    gcs.put("b", "run/a", b"x", None)
    gcs.fail("GET", "/b/b/o?", "corrupt", 2)
    assert list(bucket().list("run/")) == ["run/a"]
    gcs.fail("GET", "/b/b/o?", "corrupt", 999)
    with pytest.raises(StorageError, match=r"cannot list gs://b/run/: .*tries in") as e:
        bucket(deadline=0.3).list("run/")
    assert "run the same command again" in e.value.remedy


def test_a_bucket_that_does_not_exist_is_named(gcs, tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    gcs.fail("POST", "upload", "404", 999)
    gcs.fail("GET", "/b/b/o?", "404", 999)
    for attempt in (
        lambda: bucket().write_bytes("run/a", b"x", 0),
        lambda: bucket().upload([(tmp_path / "a", "run/a")]),
        lambda: bucket().list("run/"),
    ):
        with pytest.raises(
            StorageError, match="the bucket gs://b does not exist, or you may not see it"
        ) as e:
            attempt()
        assert "check its name" in e.value.remedy
