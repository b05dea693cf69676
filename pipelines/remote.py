"""A run directory as a local path, also when it is named by a gs:// URL.

with local_run("gs://bucket/run", "repro train") as run: …      # run: runs/.gs/bucket/run, mirrored
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from infra.mirror import Mirror, working_copy

SEND_EVERY_SECONDS = 15.0


def is_remote(run_dir: str | Path) -> bool:
    return str(run_dir).startswith("gs://")


@contextlib.contextmanager
def local_run(run_dir: str | Path, what: str, root: Path = Path("runs")) -> Iterator[Path]:
    """The local directory of a run. A gs:// run is brought on entry, sent while it is open, and leased."""
    if not is_remote(run_dir):
        yield Path(run_dir)
        return
    with Mirror(str(run_dir), working_copy(str(run_dir), root), what, every=SEND_EVERY_SECONDS) as mirror:
        yield mirror.local
