"""`train/metrics.jsonl`: one line per step, flushed, and cut back to the resumed step on restart.

A value that is not finite is written as null and the line carries `"nonfinite": true`, since JSON has no NaN.
"""

import json
import math
import os
from pathlib import Path
from typing import Any, TextIO

from infra.artifacts import write_bytes_atomic
from infra.errors import IdentityError

DAMAGED = "put a copy of the log back, or train again: `repro train --redo`"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines; a half-written last line is left out. Raises IdentityError that names a damaged line."""
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        if line:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
                row = None
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise IdentityError(f"line {number} of {path} is no record of a step", DAMAGED)
            rows.append(row)
    return rows


def truncate(path: Path, step: int) -> None:
    """Keep exactly the lines of steps 1..step. A gap among them is an error."""
    kept = [m for m in read_metrics(path) if m["step"] <= step]
    steps = [m["step"] for m in kept]
    if steps != list(range(1, step + 1)):
        raise IdentityError(f"{path} does not hold each of the steps 1..{step} once", DAMAGED)
    text = "".join(json.dumps(m) + "\n" for m in kept)
    if step or path.exists():
        write_bytes_atomic(path, text.encode())


class MetricsLog:
    """Appends lines to the log. Floats keep all digits."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = open(path, "a")  # noqa: SIM115

    def write(self, record: dict[str, Any]) -> None:
        """Append one record and flush it."""
        bad = [k for k, v in record.items() if isinstance(v, float) and not math.isfinite(v)]
        if bad:
            record = {**record, **dict.fromkeys(bad), "nonfinite": True}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Bring every line to the disk: done before a checkpoint is committed, which speaks for all steps up to it."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush to disk and close."""
        self.sync()
        self._file.close()
