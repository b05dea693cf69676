"""A run directory as a local path, also when it is named by a gs:// URL.

with local_run("gs://bucket/run", "repro train") as run: …      # run: runs/.gs/bucket/run, mirrored
dispatch(args)                                                  # a command of `repro`, on either kind
"""

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

from infra.mirror import Mirror, working_copy

SEND_EVERY_SECONDS = 15.0
BY_THEMSELVES = ("launch", "serve")  # commands that take the URL as it is
LOOKING = ("status",)
SHOWN = ("recipe.json", "stages/", "report/verdict")  # what such a command reads


def is_remote(run_dir: str | Path) -> bool:
    return str(run_dir).startswith("gs://")


@contextlib.contextmanager
def local_run(run_dir: str | Path, what: str, root: Path = Path("runs")) -> Iterator[Path]:
    """The local directory of a run. A gs:// run is brought on entry, sent while it is open, and leased."""
    if not is_remote(run_dir):
        yield Path(run_dir)
        return
    with Mirror(str(run_dir), working_copy(run_dir, root), what, every=SEND_EVERY_SECONDS) as mirror:
        yield mirror.local


def dispatch(args: argparse.Namespace) -> int:
    """Run the command's handler; a gs:// run directory is mirrored around it. Returns the exit status."""
    if not is_remote(args.run_dir) or args.command in BY_THEMSELVES:
        return args.handler(args)
    url, what = args.run_dir, f"repro {args.command}"
    if args.command in LOOKING:
        looked_at = working_copy(url).with_name(working_copy(url).name + ".status")
        with Mirror(
            url,
            looked_at,
            what,
            every=0,
            exclusive=False,
            brings=lambda r: r.startswith(SHOWN),
            sends=lambda r: False,
        ):
            args.run_dir = str(looked_at)
            return args.handler(args)
    with local_run(url, what) as run:
        args.run_dir = str(run)
        return args.handler(args)
