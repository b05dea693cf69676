"""Leases in a bucket: one owner of a name among machines, by generation preconditions.

    with GcsLease(bucket, prefix + ".leases/run", "training") as lease: …; lease.check()

The surprising thing: a killed owner is taken over at once by a process that could see it in /proc (same boot, same process
namespace); from anywhere else only once it has not renewed its lease for a while.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra.errors import LeaseError
from infra.owner import start_time
from infra.storage import Bucket, Conflict, StorageError

CLOCK_SKEW_SECONDS = 30.0


def machine_id() -> str:
    """What two processes share that can see each other in /proc: the boot and the process namespace; '' without /proc."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


class GcsLease:
    """One owner of a name in a bucket, by generation preconditions.

    A dead owner is taken over at once on its own machine, elsewhere `ttl` seconds after its last sign of life. Renewed in
    the background. Only another owner makes it lost, never an outage of the storage: then `on_lost` is called, and `check()`
    raises LeaseError. Clocks may differ by half a minute.
    """

    def __init__(
        self,
        bucket: Bucket,
        name: str,
        what: str,
        *,
        ttl: float = 120.0,
        wait_seconds: float = 0.0,
        skew: float = CLOCK_SKEW_SECONDS,
        on_lost: Callable[[], None] = lambda: None,
    ):
        self.bucket, self.name, self.what, self.ttl, self.wait_seconds, self.skew = (
            bucket,
            name,
            what,
            ttl,
            wait_seconds,
            skew,
        )
        self._on_lost = on_lost
        self._token = secrets.token_hex(8)
        self._generation = 0
        self._lost = ""
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def _content(self) -> bytes:
        owner = {
            "what": self.what, "host": socket.gethostname(), "pid": os.getpid(), "token": self._token, "ttl": self.ttl,
            "at": time.time(), "machine": machine_id(), "started": start_time(os.getpid()),
        }  # fmt: skip
        return json.dumps(owner).encode()

    def __enter__(self) -> "GcsLease":
        deadline = time.monotonic() + self.wait_seconds
        while True:
            try:
                self._generation = self.bucket.write_bytes(
                    self.name, self._content(), if_generation=0
                ).generation
                break
            except Conflict:
                owner = self._take_over()
                if owner is None:
                    break
                if time.monotonic() >= deadline:
                    raise LeaseError(
                        f"{self.bucket.url(self.name)} is held by {owner}", "wait until it ends, or stop it"
                    ) from None
                time.sleep(min(2.0, self.ttl / 10))
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()
        return self

    def _take_over(self) -> str | None:
        """Become the owner if the present one is dead (None); else who it is."""
        stands = self.bucket.stat(self.name)
        if stands is None:
            return "somebody who has just left"
        try:
            owner = json.loads(self.bucket.read_bytes(self.name)[0])
            text, ttl = f"{owner['what']} (process {owner['pid']} on {owner['host']})", float(owner["ttl"])
            killed = owner["machine"] == machine_id() != "" and start_time(owner["pid"]) != owner["started"]
        except (ValueError, KeyError, StorageError):
            text, ttl, killed = "an unknown owner", self.ttl, False
        if not killed and time.time() - stands.updated <= ttl + self.skew:
            return text
        try:
            self._generation = self.bucket.write_bytes(
                self.name, self._content(), if_generation=stands.generation
            ).generation
        except Conflict:
            return "another process that took it over"
        return None

    def _renew(self) -> None:
        while not self._done.wait(self.ttl / 3):
            try:
                self._generation = self.bucket.write_bytes(
                    self.name, self._content(), if_generation=self._generation
                ).generation
            except Conflict:
                try:
                    if self._still_ours():
                        continue
                except Conflict:
                    pass
                except StorageError:
                    continue
                self._lost = "somebody else took it over"
                self._on_lost()
                return
            except StorageError:
                continue  # an outage; whether somebody was quicker after it, the next write says

    def _still_ours(self) -> bool:
        """After a refused renewal: our own write whose answer was lost is ours; a lease that is gone is made anew."""
        if self.bucket.stat(self.name) is None:
            self._generation = self.bucket.write_bytes(self.name, self._content(), if_generation=0).generation
            return True
        data, generation = self.bucket.read_bytes(self.name)
        try:
            ours = json.loads(data)["token"] == self._token
        except (ValueError, KeyError, TypeError):
            return False
        if ours:
            self._generation = generation
        return ours

    def check(self) -> None:
        """Raise if the lease was lost."""
        if self._lost:
            raise LeaseError(
                f"the lease {self.bucket.url(self.name)} was lost: {self._lost}", "run the same command again"
            )

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        if not self._lost:
            with contextlib.suppress(StorageError):
                self.bucket.delete(self.name, if_generation=self._generation)
