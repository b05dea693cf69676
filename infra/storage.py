"""Google Cloud Storage: bulk transfers with checksums, commit markers by generation, retries with a deadline.

    bucket, prefix = open_url("gs://bucket/run/")
    bucket.upload([(Path("a.npy"), prefix + "a.npy")]); bucket.download([(entry, Path("b.npy"))])
    bucket.write_bytes(prefix + "DONE", b"…", if_generation=0)     # Conflict if it is there already

Credentials come through the ordinary chain only (application default). `STORAGE_EMULATOR_HOST` names an emulator. The
surprising thing: after a lost answer, a repeated conditional write is refused although the first one was ours; so a
refusal is a Conflict only if other bytes stand there.
"""

import base64
import contextlib
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from infra.errors import ReproError
from infra.leftovers import sibling

T = TypeVar("T")
CHUNK = 8 * 2**20  # of a resumable upload; a larger file is sent in such pieces and continues after an error
CONNECT_SECONDS, READ_SECONDS = 10.0, 30.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
SAID_AT_TRY = 3  # a fault that lasts so many tries is said, once per deadline
LOG_IN = "run `gcloud auth application-default login`, or use a service account"


class StorageError(ReproError):
    """An object could not be read or written in time; the message names it."""


class Conflict(StorageError):
    """The object is not the one expected: somebody else wrote it."""


class Gone(StorageError):
    """The object, or that generation of it, is not there: never written, replaced or deleted."""


@dataclass(frozen=True)
class Entry:
    """One object: name, bytes, CRC32C (base64, as the service gives it), generation, time of its last write."""

    name: str
    size: int
    crc32c: str
    generation: int
    updated: float = 0.0


def crc32c_of(data: bytes) -> str:
    """CRC32C of bytes in the service's spelling."""
    import google_crc32c

    return base64.b64encode(google_crc32c.Checksum(data).digest()).decode()


def crc32c_file(path: Path) -> str:
    """CRC32C of a file in the service's spelling."""
    import google_crc32c

    checksum = google_crc32c.Checksum()
    with path.open("rb") as f:
        while block := f.read(2**20):
            checksum.update(block)
    return base64.b64encode(checksum.digest()).decode()


def split_url(url: str) -> tuple[str, str]:
    """`gs://bucket/a/b` -> (bucket, `a/b/`)."""
    bucket, _, prefix = url.removeprefix("gs://").partition("/")
    if not url.startswith("gs://") or not bucket:
        raise StorageError(f"{url!r} is not of the form gs://bucket/path")
    prefix = prefix.strip("/")
    return bucket, f"{prefix}/" if prefix else ""


def open_url(url: str, **options: Any) -> tuple["Bucket", str]:
    """(bucket, prefix with a trailing slash) of a gs:// directory."""
    name, prefix = split_url(url)
    return Bucket(name, **options), prefix


def make_client(bucket: str) -> Any:
    """A storage client with the ordinary credentials; anonymous for an emulator. `bucket` is named where there are none."""
    import google.auth.exceptions
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage

    try:
        if os.environ.get("STORAGE_EMULATOR_HOST"):
            return storage.Client(project="emulator", credentials=AnonymousCredentials())
        return storage.Client(project=os.environ.get("GOOGLE_CLOUD_PROJECT", "unset"))
    except google.auth.exceptions.DefaultCredentialsError:
        raise StorageError(f"gs://{bucket}: no Google credentials were found", LOG_IN) from None


class _Timed:
    """A file for writing that gives up after a deadline: a body that trickles defeats every socket time-out."""

    def __init__(self, file: IO[bytes], deadline: float):
        self._file, self._deadline = file, deadline

    def write(self, data: bytes) -> int:
        if time.monotonic() > self._deadline:
            raise TimeoutError("the body is too slow")
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Bucket:
    """One bucket. `deadline`: seconds for one object over all its tries; `slow`: seconds for one try's body."""

    def __init__(
        self, name: str, *, client: Any = None, deadline: float = 300.0, slow: float = 0.0, threads: int = 8,
        first_pause: float = FIRST_PAUSE, read_seconds: float = READ_SECONDS,
    ):  # fmt: skip
        self.name, self.deadline, self.threads = name, deadline, threads
        self.slow = slow or deadline
        self.first_pause, self.read_seconds = first_pause, read_seconds
        self._client = client
        self._lock = threading.Lock()
        self._silent_until = 0.0

    @property
    def client(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = make_client(self.name)
            return self._client

    def blob(self, name: str, generation: int | None = None) -> Any:
        blob = self.client.bucket(self.name).blob(name, generation=generation)
        blob.chunk_size = CHUNK
        return blob

    def url(self, name: str) -> str:
        return f"gs://{self.name}/{name}"

    # -- single objects

    def list(self, prefix: str) -> dict[str, Entry]:
        """All objects under a prefix. For discovery only: what is done is said by markers."""
        fields = "items(name,size,crc32c,generation,updated),nextPageToken"

        def once(timeout: tuple[float, float]) -> dict[str, Entry]:
            found = self.client.list_blobs(
                self.name, prefix=prefix, fields=fields, retry=None, timeout=timeout
            )
            return {b.name: _entry(b) for b in found}

        return self._retry("list", prefix, once)

    def stat(self, name: str) -> Entry | None:
        """The object's facts; None if there is none."""
        from google.api_core.exceptions import NotFound

        def once(timeout: tuple[float, float]) -> Entry | None:
            blob = self.blob(name)
            try:
                blob.reload(retry=None, timeout=timeout)
            except NotFound:
                return None
            return _entry(blob)

        return self._retry("look at", name, once)

    def read_bytes(self, name: str) -> tuple[bytes, int]:
        """(content, generation), checked against the service's CRC32C. Raises Gone if it is not there."""
        import io

        def once(timeout: tuple[float, float]) -> tuple[bytes, int]:
            out, blob = io.BytesIO(), self.blob(name)
            blob.chunk_size = None
            blob.download_to_file(
                _Timed(out, time.monotonic() + self.slow), retry=None, timeout=timeout, checksum="auto"
            )
            return out.getvalue(), int(blob.generation or 0)

        return self._retry("read", name, once)

    def write_bytes(self, name: str, data: bytes, if_generation: int | None = None) -> Entry:
        """Write a small object whole. `if_generation`: 0 = must not exist, n = must be that one. Raises Conflict."""

        def once(timeout: tuple[float, float]) -> Entry:
            blob = self.blob(name)
            blob.upload_from_string(
                data, content_type="application/octet-stream", if_generation_match=if_generation, retry=None,
                timeout=timeout, checksum="crc32c",
            )  # fmt: skip
            return _entry(blob)

        return self._conditional("write", name, once, len(data), lambda: crc32c_of(data))

    def delete(self, name: str, if_generation: int | None = None) -> None:
        """Delete; gone already is fine. Raises Conflict when another generation stands there."""
        from google.api_core.exceptions import NotFound, PreconditionFailed

        def once(timeout: tuple[float, float]) -> None:
            with contextlib.suppress(NotFound):
                self.blob(name).delete(if_generation_match=if_generation, retry=None, timeout=timeout)

        try:
            self._retry("delete", name, once)
        except PreconditionFailed:
            if self.stat(name) is not None:
                raise Conflict(
                    f"{self.url(name)} was written by somebody else meanwhile", "it is not deleted"
                ) from None

    # -- many objects

    def upload(
        self,
        pairs: Sequence[tuple[Path, str]],
        if_generation: Callable[[str], int | None] = lambda name: None,
    ) -> dict[str, Entry]:
        """Send files, each checked by CRC32C; returns the entries by object name.

        First all of them through the transfer manager, then what failed one by one with retries.
        """
        from google.cloud.storage import transfer_manager

        by_condition: dict[int | None, list[tuple[Path, str]]] = {}
        for path, name in pairs:
            by_condition.setdefault(if_generation(name), []).append((path, name))
        done: dict[str, Entry] = {}
        for condition, group in by_condition.items():
            blobs = [self.blob(name) for _, name in group]
            results: list[Any] = transfer_manager.upload_many(
                [(str(path), blob) for (path, _), blob in zip(group, blobs)],
                upload_kwargs={"if_generation_match": condition, "checksum": "crc32c", "retry": None, "timeout": self._timeout(self.deadline)},
                worker_type=transfer_manager.THREAD, max_workers=self.threads,
            )  # fmt: skip
            for (path, name), blob, result in zip(group, blobs, results):
                if isinstance(result, FileNotFoundError):
                    raise result
                done[name] = _entry(blob) if result is None else self._upload_one(path, name, condition)
        return done

    def _upload_one(self, path: Path, name: str, condition: int | None) -> Entry:
        from google.api_core.retry import Retry
        from google.cloud.storage.retry import _should_retry

        until, failed = time.time() + self.deadline, 0

        def heard(error: Exception) -> None:
            nonlocal failed
            failed += 1
            if failed == SAID_AT_TRY:
                self._say_waiting("upload", name, error, until)

        def once(timeout: tuple[float, float]) -> Entry:
            blob = self.blob(name)
            # Of a resumable upload the library repeats the failed piece; everything else starts over.
            large = path.stat().st_size > CHUNK
            blob.upload_from_filename(
                str(path), if_generation_match=condition, checksum="crc32c", timeout=timeout,
                retry=Retry(predicate=_should_retry, initial=self.first_pause, timeout=self.deadline, on_error=heard) if large else None,
            )  # fmt: skip
            return _entry(blob)

        return self._conditional("upload", name, once, path.stat().st_size, lambda: crc32c_file(path))

    def download(self, wanted: Iterable[tuple[Entry, Path]], *, may_vanish: bool = False) -> Sequence[Entry]:
        """Fetch objects into files, each whole and checked or not there at all.

        `may_vanish`: generations that were replaced or deleted since they were listed are returned; else they raise Gone.
        """
        from google.cloud.storage import transfer_manager

        wanted = list(wanted)
        parts = [sibling(path) for _, path in wanted]
        vanished: list[Entry] = []
        with contextlib.ExitStack() as files:
            pairs = []
            for (entry, path), part in zip(wanted, parts):
                path.parent.mkdir(parents=True, exist_ok=True)
                files.callback(part.unlink, missing_ok=True)
                out = files.enter_context(part.open("wb"))
                blob = self.blob(entry.name, entry.generation or None)
                blob.chunk_size = None
                pairs.append((blob, _Timed(out, time.monotonic() + self.slow)))
            results: list[Any] = transfer_manager.download_many(
                pairs, download_kwargs={"checksum": "auto", "retry": None, "timeout": self._timeout(self.deadline)},
                worker_type=transfer_manager.THREAD, max_workers=self.threads,
            )  # fmt: skip
            for (_, timed), (entry, path), part, result in zip(pairs, wanted, parts, results):
                timed.close()
                if isinstance(result, Exception) or not self._whole(part, entry):
                    try:
                        self._download_one(entry, part)
                    except Gone:
                        if not may_vanish:
                            raise
                        vanished.append(entry)
                        continue
                os.replace(part, path)
        return vanished

    def _whole(self, part: Path, entry: Entry) -> bool:
        return part.stat().st_size == entry.size and (not entry.crc32c or crc32c_file(part) == entry.crc32c)

    def _download_one(self, entry: Entry, part: Path) -> None:
        def once(timeout: tuple[float, float]) -> None:
            blob = self.blob(entry.name, entry.generation or None)
            blob.chunk_size = None
            with part.open("wb") as out:
                blob.download_to_file(
                    _Timed(out, time.monotonic() + self.slow), retry=None, timeout=timeout, checksum="auto"
                )
            if not self._whole(part, entry):
                raise ConnectionError("the body is not what the service announced")

        self._retry("download", entry.name, once)

    # -- retries

    def _timeout(self, left: float) -> tuple[float, float]:
        return (min(CONNECT_SECONDS, left), min(self.read_seconds, left))

    def _conditional(
        self,
        verb: str,
        name: str,
        once: Callable[[tuple[float, float]], Entry],
        size: int,
        crc: Callable[[], str],
    ) -> Entry:
        from google.api_core.exceptions import PreconditionFailed

        try:
            return self._retry(verb, name, once)
        except PreconditionFailed:
            stands = self.stat(name)
            if stands is not None and stands.size == size and stands.crc32c == crc():
                return stands
            raise Conflict(
                f"{self.url(name)} was written by somebody else meanwhile",
                "one run directory has one writer at a time",
            ) from None

    def _retry(self, verb: str, name: str, once: Callable[[tuple[float, float]], T]) -> T:
        """Call `once(timeout)` until it works or the deadline is over; waits double, with jitter."""
        from google.api_core.exceptions import (
            Forbidden,
            GoogleAPICallError,
            NotFound,
            PreconditionFailed,
            Unauthorized,
        )
        from google.auth.exceptions import RefreshError

        start, pause, tries = time.monotonic(), self.first_pause, 0
        until = time.time() + self.deadline
        while True:
            tries += 1
            left = self.deadline - (time.monotonic() - start)
            try:
                return once(self._timeout(max(left, 0.1)))
            except ReproError:
                raise
            except RefreshError as e:
                raise StorageError(
                    f"the Google credentials do not work: {' '.join(str(e).split())[:120]}", LOG_IN
                ) from None
            except PreconditionFailed:
                raise
            except NotFound:
                if verb in ("read", "download"):
                    raise Gone(f"{self.url(name)} is not there", "check the bucket and the path") from None
                raise StorageError(
                    f"cannot {verb} {self.url(name)}: the bucket gs://{self.name} does not exist, or you may not see it",
                    f"check its name, or make it: `gcloud storage buckets create gs://{self.name}`",
                ) from None
            except (Forbidden, Unauthorized) as e:
                raise StorageError(
                    f"cannot {verb} {self.url(name)}: access denied ({e.code})",
                    "give the account the role Storage Object User on the bucket",
                ) from None
            except Exception as e:
                if not retryable(e):
                    raise StorageError(
                        f"cannot {verb} {self.url(name)}: {type(e).__name__}: {str(e)[:300]}",
                        "check the bucket and STORAGE_EMULATOR_HOST, then run the same command again",
                    ) from e
                used = time.monotonic() - start
                if used + pause > self.deadline:
                    why = e.message if isinstance(e, GoogleAPICallError) else str(e)
                    what = f"{type(e).__name__}: {' '.join(str(why).split())[:160]}"
                    raise StorageError(
                        f"cannot {verb} {self.url(name)}: {what} ({tries} tries in {used:.0f} s)",
                        "check the network and the service's status, then run the same command again",
                    ) from e
                if tries == SAID_AT_TRY:
                    self._say_waiting(verb, name, e, until)
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, LONGEST_PAUSE)

    def _say_waiting(self, verb: str, name: str, error: Exception, until: float) -> None:
        """One line on stderr that an object is waited for; then silence for a deadline, however many objects wait."""
        with self._lock:
            if time.monotonic() < self._silent_until:
                return
            self._silent_until = time.monotonic() + self.deadline
        clock = time.strftime("%H:%M:%S", time.localtime(until))
        print(
            f"storage: cannot {verb} {self.url(name)} yet ({type(error).__name__}); trying until {clock}",
            file=sys.stderr,
            flush=True,
        )


def retryable(error: BaseException) -> bool:
    """Whether trying again can help: overload, broken or slow connections, bodies that do not match their checksum."""
    from google.cloud.storage.exceptions import DataCorruption
    from google.cloud.storage.retry import _should_retry
    from requests.exceptions import JSONDecodeError as RequestsJSONDecodeError

    broken = DataCorruption | json.JSONDecodeError | RequestsJSONDecodeError | UnicodeDecodeError
    return isinstance(error, broken | TimeoutError | ConnectionError) or bool(_should_retry(error))


def _entry(blob: Any) -> Entry:
    updated = blob.updated.timestamp() if blob.updated else 0.0
    return Entry(blob.name, int(blob.size or 0), blob.crc32c or "", int(blob.generation or 0), updated)
