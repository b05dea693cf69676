"""A launched job ends when its launcher is gone, so that a killed flow leaves no orphan training.

The launcher puts its process id and start time into the job's environment; the job watches them. When the
launcher has gone, the job gets SIGTERM, which for the trainer means: save a checkpoint and exit.
"""

import os
import signal
import threading
import time
from pathlib import Path

VARIABLE = "REPRO_OWNER"


def start_time(pid: int) -> str:
    """The kernel's start time of a process in clock ticks since boot; '' if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
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
