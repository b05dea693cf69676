"""Leases: one owner per directory, and a dead owner never blocks the next one.

The lock is the kernel's (`flock`), so it disappears with its process, also under `kill -9`. The file's text
only serves the message. It does not work across machines on a shared disk without `flock`.
"""

import fcntl
import json
import os
import time
from pathlib import Path
from types import TracebackType

from infra.errors import LeaseError


class Lease:
    """`with Lease(path, what):` holds the lease file at `path`, waiting up to `wait_seconds` for it.

    Raises LeaseError that names the owner when another live process holds it.
    """

    def __init__(
        self,
        path: str | Path,
        what: str,
        wait_seconds: float = 0.0,
        remedy: str = "wait until it ends, stop it, or choose another RUN_DIR",
    ):
        self.path, self.what, self.wait_seconds, self.remedy = Path(path), what, wait_seconds, remedy
        self._fd = -1

    def __enter__(self) -> "Lease":
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as e:
            raise LeaseError(
                f"{self.path} cannot be written: {e.strerror}",
                "make the directory writable, or choose another RUN_DIR",
            ) from None
        deadline = time.monotonic() + self.wait_seconds
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.2)
                    continue
                owner = self._owner()
                os.close(self._fd)
                self._fd = -1
                raise LeaseError(f"{self.path.parent} is in use by {owner}", self.remedy) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(
            self._fd, json.dumps({"pid": os.getpid(), "what": self.what, "since": time.time()}).encode(), 0
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        os.ftruncate(self._fd, 0)
        os.close(self._fd)
        self._fd = -1

    def _owner(self) -> str:
        try:
            owner = json.loads(os.pread(self._fd, 4096, 0) or b"{}")
            return f"{owner['what']} (process {owner['pid']})"
        except (ValueError, KeyError, TypeError, RecursionError):
            return "another process"
