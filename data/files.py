"""Writing files that appear whole or not at all, locally and behind fsspec addresses.

A local file is written beside its final name and renamed; a retry or a second worker that writes the same
content at the same time is harmless. On gs:// an object appears when its upload closes, so there is nothing
to rename. A full disk or a missing permission becomes one clear error, and no half-written file is left.
"""

import contextlib
import errno
import gzip
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from infra.errors import DataError
from infra.leftovers import sibling


def join(base: str | Path, relative: str) -> str:
    """`relative` below `base`, which may be a local folder or an address."""
    return f"{str(base).rstrip('/')}/{relative}"


@contextlib.contextmanager
def clear_os_errors(path: str | Path) -> Iterator[None]:
    """Turn a full disk, a missing permission or a read-only file system into a DataError that names `path`."""
    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(f"disk full while writing {path}", "free some space and run again") from e
        if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise DataError(f"no permission to write {path}", "choose another run directory") from e
        raise


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """Open `path` for writing bytes; it takes its place only when the block ends without an error."""
    if "://" in str(path):
        import fsspec

        fs, key = fsspec.core.url_to_fs(str(path))
        stream = fs.open(key, "wb")
        try:
            yield cast(BinaryIO, stream)
        except BaseException:
            with contextlib.suppress(AttributeError, NotImplementedError):
                stream.discard()
            raise
        stream.close()
        return
    path = Path(path)
    tmp = sibling(path)
    with clear_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(tmp, "wb") as f:
                yield f
                f.flush()
                os.fsync(f.fileno())
            os.replace(tmp, path)
        finally:
            tmp.unlink(missing_ok=True)


@contextlib.contextmanager
def gzip_text(path: str | Path, level: int = 6) -> Iterator[TextIO]:
    """Open a gzip text file whose bytes depend on the text only (no time, no name in the header)."""
    import io

    with (
        whole_file(path) as raw,
        gzip.GzipFile(filename="", mode="wb", compresslevel=level, fileobj=raw, mtime=0) as packed,
        io.TextIOWrapper(cast(Any, packed), encoding="utf-8", newline="") as text,
    ):
        yield text
