"""Temporary files beside what they become, and the removal of those whose writer was killed.

    tmp = sibling(path)            # .name.tmp-<process>.<its start>-<random>, in the same folder
    clear_dead(run / "tokens")     # before a stage is made: none of them may be taken for an output

The name says which process writes it, so a file that another live process is just writing stays.
"""

import os
import re
import secrets
import shutil
from pathlib import Path

from infra.owner import start_time

NAME = re.compile(r"\..+\.tmp-(\d+)\.(\d*)-[0-9a-f]{8}", re.DOTALL)


def sibling(path: Path) -> Path:
    """A path in the folder of `path` that no other writer uses, and that `clear_dead` knows."""
    pid = os.getpid()
    return path.with_name(f".{path.name}.tmp-{pid}.{start_time(pid)}-{secrets.token_hex(4)}")


def is_dead(name: str) -> bool:
    """Whether a file of this name is a temporary one of a process that is gone from this machine."""
    found = NAME.fullmatch(name)
    return found is not None and start_time(int(found[1])) != found[2]


def clear_dead(root: Path) -> list[Path]:
    """Remove what killed writers left below `root` (a folder; one that is not there holds nothing); returns it."""
    gone = []
    for folder, folders, files in os.walk(root):
        dead = [n for n in (*folders, *files) if is_dead(n)]
        folders[:] = [n for n in folders if n not in dead]
        for path in (Path(folder, n) for n in dead):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
            gone.append(path)
    return gone
