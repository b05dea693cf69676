"""A run directory in a bucket: a local working copy, brought on entry and sent back while it is worked on.

    with Mirror("gs://bucket/run", Path("runs/.gs/bucket/run"), "repro train") as mirror:
        work(mirror.local)          # a background thread sends what is committed; leaving sends the rest

What a process on another machine may trust are the commit markers: checkpoints' `MANIFEST.json` and the records in `stages/`.
They are sent after everything they speak of, and fetched after it. The surprising thing: the list of markers to send
is taken *before* the training log is read, so a checkpoint in the bucket always has its log lines beside it.
Objects that this copy did not write or fetch are never overwritten or deleted. An outage of the storage, however long, is said
once and waited for; a lease that somebody else took over stops the process.
"""

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra.artifacts import read_json, write_json_atomic
from infra.errors import IdentityError, LeaseError, ReproError
from infra.gcs_lease import GcsLease
from infra.storage import Bucket, Conflict, Entry, Gone, StorageError, crc32c_file, crc32c_of, open_url

GROWING = (".jsonl", ".log")  # appended to while we send: cut at the last whole line
LAST_WINS = ("report/", "landmarks/", "logs/", "evals/timings.json")
LEASES = ".leases/"
LISTINGS = 10  # a run that is sent to while it is brought is listed again, so often


def tier(relative: str) -> int:
    """0: content; 1: marker of a directory; 2: record of a stage. Sent and fetched in this order."""
    if relative.startswith("stages/") and not relative.endswith(".begun.json"):
        return 2
    return 1 if relative.rsplit("/", 1)[-1] == "MANIFEST.json" else 0


def hidden(relative: str) -> bool:
    """Whether a path is private to one machine: leases, caches, half-written files."""
    return any(part.startswith(".") for part in relative.split("/"))


def everything(relative: str) -> bool:
    return True


def stop_this_process() -> None:
    """SIGTERM where the process handles it (a worker passes it to its child), else SIGINT as from a Ctrl-C."""
    handled = callable(signal.getsignal(signal.SIGTERM))
    os.kill(os.getpid(), signal.SIGTERM if handled else signal.SIGINT)


class Mirror:
    """See the module. `brings` and `sends` choose by relative path; `every`: seconds between sends (0: only at the end).
    `stop`: what ends the work once the lease is lost.

    `exclusive` holds the lease of the whole run directory; others hold none and must send disjoint paths.
    """

    def __init__(
        self, url: str, local: Path, what: str, *, every: float = 15.0, exclusive: bool = True, bucket: Bucket | None = None,
        brings: Callable[[str], bool] = everything, sends: Callable[[str], bool] = everything, lease_wait: float = 0.0,
        stop: Callable[[], None] = stop_this_process,
    ):  # fmt: skip
        if bucket is None:
            self.bucket, self.prefix = open_url(url)
        else:
            self.bucket, self.prefix = bucket, open_url(url)[1]
        self.url, self.local, self.every, self.brings, self.sends = (
            url.rstrip("/"),
            Path(local),
            every,
            brings,
            sends,
        )
        self._lease = (
            GcsLease(
                self.bucket,
                f"{self.prefix}{LEASES}run",
                what,
                wait_seconds=lease_wait,
                on_lost=self._lease_lost,
            )
            if exclusive
            else None
        )
        # Beside the copy, so that deleting the copy (FRESH=1) deletes what it had sent.
        self._state_path = self.local.with_name(f"{self.local.name}.mirror.json")
        self._stop = stop
        self._stack = contextlib.ExitStack()
        self._lock, self._done = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self.failures: list[str] = []

    def __enter__(self) -> "Mirror":
        if self._lease is not None:
            self._stack.enter_context(self._lease)
        try:
            self.pull()
        except BaseException:
            self._stack.close()
            raise
        if self.every > 0:
            self._thread = threading.Thread(target=self._keep_sending, name="mirror", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: Any, error: Any, tb: Any) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        try:
            self.push()
        finally:
            self._stack.close()

    def _keep_sending(self) -> None:
        """A failed send is tried again at the next turn; what is in the bucket stays a consistent older state."""
        failing = False
        while not self._done.wait(self.every):
            try:
                self.push()
                if failing:
                    self._say("sending again")
                failing = False
            except LeaseError:
                return  # said, and the work is being stopped
            except (ReproError, OSError) as e:
                what = e.what if isinstance(e, ReproError) else str(e)
                self.failures.append(what)
                if not failing:
                    self._say(f"not sent: {what}; the work goes on here, sending is tried again")
                failing = True

    def _lease_lost(self) -> None:
        self._say("somebody else has taken over this run; the work here is stopped")
        self._stop()

    def _say(self, what: str) -> None:
        print(f"{self.url}: {what}", file=sys.stderr, flush=True)

    # -- state: {relative: [size, mtime_ns, crc32c, generation]} of what the bucket and this copy agree on

    def _state(self) -> dict[str, list[Any]]:
        path = self._state_path
        if not path.exists():
            return {}
        state = read_json(path)
        if state["url"] != self.url:
            raise IdentityError(
                f"{self.local} is the working copy of {state['url']}, not of {self.url}",
                "choose another directory",
            )
        return state["files"]

    def _write_state(self, files: dict[str, list[Any]]) -> None:
        write_json_atomic(self._state_path, {"url": self.url, "files": files})

    def _changed(self, relative: str, known: list[Any] | None) -> bool:
        """Whether the local file differs from what was last agreed on."""
        stat = (self.local / relative).stat()
        if known is None or stat.st_size != known[0]:
            return True
        return stat.st_mtime_ns != known[1] and crc32c_file(self.local / relative) != known[2]

    # -- from the bucket

    def remote(self) -> dict[str, Entry]:
        """Objects of the run by relative path."""
        found = self.bucket.list(self.prefix)
        return {
            n.removeprefix(self.prefix): e
            for n, e in found.items()
            if not hidden(n.removeprefix(self.prefix))
        }

    def pull(self) -> list[str]:
        """Bring what is new or changed in the bucket, markers last; returns what was fetched.

        What its writer replaces or deletes meanwhile is listed again, before any marker that speaks of it is fetched.
        """
        with self._lock:
            self.local.mkdir(parents=True, exist_ok=True)
            state = self._state()
            fetched: list[str] = []
            for _ in range(LISTINGS):
                remote = self.remote()
                if all(self._fetch(level, remote, state, fetched) for level in (0, 1, 2)):
                    break
            else:
                raise StorageError(
                    f"{self.url} is changed faster than it can be brought", "run the same command again"
                )
            # Markers first: what is left of a retired checkpoint is never taken for a whole one.
            for relative in sorted(
                (r for r in state if r not in remote and self.brings(r)), key=tier, reverse=True
            ):
                path = self.local / relative
                if path.exists() and not self._changed(relative, state[relative]):
                    path.unlink()
                del state[relative]
            self._write_state(state)
            return fetched

    def _fetch(
        self, level: int, remote: dict[str, Entry], state: dict[str, list[Any]], fetched: list[str]
    ) -> bool:
        """Bring one tier of a listing; False if something of it had vanished. Of files that grow the newest is taken."""
        wanted = []
        for relative, entry in remote.items():
            if tier(relative) != level or not self.brings(relative):
                continue
            path, known = self.local / relative, state.get(relative)
            if known is not None and known[3] == entry.generation and path.exists():
                continue
            if path.exists():
                if path.stat().st_size == entry.size and crc32c_file(path) == entry.crc32c:
                    state[relative] = self._agreed(relative, entry)
                    continue
                if self._changed(relative, known) and not relative.startswith(LAST_WINS):
                    raise IdentityError(
                        f"{path} and {self.bucket.url(entry.name)} were both changed since they last agreed",
                        f"delete {self.local} and {self._state_path.name} to take the bucket's state",
                    )
            wanted.append((entry, path))
        whole = True
        while wanted:
            vanished = self.bucket.download(wanted, may_vanish=True)
            for entry, path in wanted:
                if entry not in vanished:
                    relative = path.relative_to(self.local).as_posix()
                    state[relative] = self._agreed(relative, entry)
                    fetched.append(relative)
            newer = {e.name: self.bucket.stat(e.name) for e in vanished if e.name.endswith(GROWING)}
            whole = whole and all(newer.get(e.name) is not None for e in vanished)
            wanted = [
                (n, path) for e, path in wanted if e in vanished and (n := newer.get(e.name)) is not None
            ]
        self._write_state(state)
        return whole

    def _agreed(self, relative: str, entry: Entry) -> list[Any]:
        return [entry.size, (self.local / relative).stat().st_mtime_ns, entry.crc32c, entry.generation]

    # -- to the bucket

    def push(self) -> list[str]:
        """Send what changed here, markers last; delete what this copy had and has no more. Returns what was sent."""
        with self._lock:
            if self._lease is not None:
                self._lease.check()
            state = self._state()
            files = [
                p.relative_to(self.local).as_posix() for p in sorted(self.local.rglob("*")) if p.is_file()
            ]
            files = [r for r in files if not hidden(r) and self.sends(r)]
            sent: list[str] = []
            self._delete(state, set(files))
            broken: set[str] = set()
            for level in (0, 1, 2):
                todo = [
                    r
                    for r in files
                    if tier(r) == level and not (level == 1 and str(Path(r).parent) in broken)
                ]
                if level == 2 and broken:
                    break
                sent += self._send([r for r in todo if self._is_new(r, state, broken)], state, broken)
            return sent

    def _is_new(self, relative: str, state: dict[str, list[Any]], broken: set[str]) -> bool:
        try:
            return self._changed(relative, state.get(relative))
        except FileNotFoundError:
            self._vanished(relative, broken)
            return False

    def _vanished(self, relative: str, broken: set[str]) -> None:
        """A file was retired while we sent: the markers above it are not sent in this round."""
        broken.update(str(p) for p in Path(relative).parents if str(p) != ".")

    def _send(self, relatives: list[str], state: dict[str, list[Any]], broken: set[str]) -> list[str]:
        done: list[str] = []
        plain = [r for r in relatives if not r.endswith(GROWING)]
        for start in range(0, len(plain), 64):
            batch = []
            for r in plain[start : start + 64]:
                if (self.local / r).exists():
                    batch.append(r)
                else:
                    self._vanished(r, broken)
            before = {r: (self.local / r).stat().st_mtime_ns for r in batch}
            try:
                entries = self.bucket.upload(
                    [(self.local / r, self.prefix + r) for r in batch],
                    lambda name: self._condition(name, state),
                )
            except FileNotFoundError as e:
                self._vanished(
                    Path(e.filename).relative_to(self.local).as_posix() if e.filename else batch[0], broken
                )
                continue
            for r in batch:
                entry = entries[self.prefix + r]
                state[r] = [entry.size, before[r], entry.crc32c, entry.generation]
                done.append(r)
            self._write_state(state)
        for r in (r for r in relatives if r.endswith(GROWING)):
            data = (self.local / r).read_bytes()
            data = data[: data.rfind(b"\n") + 1]
            known = state.get(r)
            if known is not None and known[0] == len(data) and known[2] == crc32c_of(data):
                continue
            entry = self.bucket.write_bytes(self.prefix + r, data, self._condition(self.prefix + r, state))
            state[r] = [
                entry.size,
                (self.local / r).stat().st_mtime_ns if len(data) == (self.local / r).stat().st_size else 0,
                entry.crc32c,
                entry.generation,
            ]
            done.append(r)
            self._write_state(state)
        return done

    def _condition(self, name: str, state: dict[str, list[Any]]) -> int | None:
        relative = name.removeprefix(self.prefix)
        if relative.startswith(LAST_WINS):
            return None
        return state[relative][3] if relative in state else 0

    def _delete(self, state: dict[str, list[Any]], here: set[str]) -> None:
        gone = [r for r in state if r not in here and self.sends(r) and not (self.local / r).exists()]
        for relative in sorted(gone, key=tier, reverse=True):
            with contextlib.suppress(Conflict):
                self.bucket.delete(self.prefix + relative, if_generation=state[relative][3])
            del state[relative]
        if gone:
            self._write_state(state)


def working_copy(url: str | Path, root: Path = Path("runs")) -> Path:
    """Where the local copy of a gs:// run directory lies: runs/.gs/bucket/path."""
    return root / ".gs" / str(url).removeprefix("gs://").strip("/")


def newest_step(url: str, bucket: Bucket | None = None) -> int:
    """The newest committed checkpoint of a run in a bucket (0: none): the largest whose manifest and files stand."""
    if bucket is None:
        bucket, prefix = open_url(url)
    else:
        prefix = open_url(url)[1]
    found = bucket.list(f"{prefix}checkpoints/")
    steps = sorted(
        (
            int(n.split("/")[-2].removeprefix("step"))
            for n in found
            if n.endswith("/MANIFEST.json") and n.split("/")[-2].removeprefix("step").isdigit()
        ),
        reverse=True,
    )
    for step in steps:
        base = f"{prefix}checkpoints/step{step}/"
        try:
            files = json.loads(bucket.read_bytes(f"{base}MANIFEST.json")[0])["files"]
        except Gone:  # retired since it was listed
            continue
        if all(f"{base}{n}" in found and found[f"{base}{n}"].size == f["bytes"] for n, f in files.items()):
            return step
    return 0
