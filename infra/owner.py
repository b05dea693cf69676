"""A launched job ends when its launcher is gone, so that a killed flow leaves no orphan training.

The launcher puts its process id and start time into the job's environment; the job watches them. When the
launcher has gone, the job gets SIGTERM, which for the trainer means: save a checkpoint and exit. A program that is not ours
cannot watch: `end_with_us` leaves a small process behind that does it in its place.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

VARIABLE = "REPRO_OWNER"
STARTED_BY = "REPRO_STARTED_BY"


def start_time(pid: int) -> str:
    """The kernel's start time of a process in clock ticks since boot; '' if there is none, or it has ended.

    One that was killed stands in the table until its parent asks for its status, which may be never.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return ""


def owner_environment() -> dict[str, str]:
    """What a launcher adds to its job's environment."""
    return {VARIABLE: f"{os.getpid()}:{start_time(os.getpid())}"}


def watch_owner(every_seconds: float = 1.0) -> threading.Thread | None:
    """Start watching the owner named in the environment; None when there is none or no /proc."""
    pid, _, started = os.environ.get(VARIABLE, "").partition(":")
    if not pid or not started:
        return None

    def watch() -> None:
        while start_time(int(pid)) == started:
            time.sleep(every_seconds)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=watch, name="owner-watch", daemon=True)
    thread.start()
    return thread


def end_with_us(program: str) -> None:
    """From here on, processes of ours whose command line holds `program` get SIGTERM once this process is gone.

    They are known by an environment variable that they inherit, so that one which is just starting is found too.
    """
    os.environ[STARTED_BY] = owner_environment()[VARIABLE]
    subprocess.Popen(
        [sys.executable, "-m", "infra.owner", program], env={**os.environ, **owner_environment()}, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def started_by(owner: str, program: str) -> list[int]:
    """Process ids that inherited `owner` from `end_with_us` and whose command line holds `program`."""
    mark, found = f"{STARTED_BY}={owner}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            inherited = mark in (folder / "environ").read_bytes().split(b"\0")
            if inherited and program.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return [pid for pid in found if pid != os.getpid()]


def main(program: str) -> None:
    """Wait until the owner named in the environment is gone, then end what it left."""
    owner = os.environ[VARIABLE]
    pid, _, started = owner.partition(":")
    while start_time(int(pid)) == started:
        time.sleep(1.0)
    for left in started_by(owner, program):
        with contextlib.suppress(ProcessLookupError):
            os.kill(left, signal.SIGTERM)


if __name__ == "__main__":
    main(sys.argv[1])
