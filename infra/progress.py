"""One live line per stage: what, how far, how long, how much longer.

On a terminal the line is rewritten in place; elsewhere a line is printed at most every
`every` seconds, so that a log file stays readable.
"""

import sys
import time
from typing import TextIO


def clock(seconds: float) -> str:
    """`seconds` as `12.3s` or `3m05s`."""
    return f"{seconds:.1f}s" if seconds < 60 else f"{int(seconds) // 60}m{int(seconds) % 60:02d}s"


class Progress:
    """A progress line for `stage`, counting `total` units of `unit` (0: unknown)."""

    def __init__(
        self, stage: str, total: int = 0, unit: str = "", *, out: TextIO | None = None, every: float = 10.0
    ):
        self.stage, self.total, self.unit = stage, total, unit
        self.out = out if out is not None else sys.stderr
        self.live = self.out.isatty()
        self.every = 0.1 if self.live else every
        self.start = time.monotonic()
        self.last = -1e9
        self.first_done: int | None = None

    def update(self, done: int, note: str = "") -> None:
        """Say that `done` units are finished."""
        now = time.monotonic()
        if self.first_done is None:
            self.first_done = done
        if now - self.last < self.every and done != self.total:
            return
        self.last = now
        elapsed = now - self.start
        text = f"{self.stage:<12} {done}"
        if self.total:
            text += f"/{self.total}"
        text += f" {self.unit}  {clock(elapsed)}"
        gained = done - self.first_done
        if self.total and gained > 0 and done < self.total:
            text += f", {clock(elapsed / gained * (self.total - done))} left"
        if note:
            text += f"  {note}"
        self.out.write(f"\r\033[K{text}" if self.live else f"{text}\n")
        self.out.flush()

    def finish(self, note: str = "") -> None:
        """Close the line with the total time."""
        text = f"{self.stage:<12} done in {clock(time.monotonic() - self.start)}  {note}".rstrip()
        self.out.write(f"\r\033[K{text}\n" if self.live else f"{text}\n")
        self.out.flush()
