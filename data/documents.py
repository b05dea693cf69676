"""Documents from files: jsonl, jsonl.gz, jsonl.zst, parquet and txt; local, gs:// and other fsspec addresses.

Readers stream. Memory is bounded by `max_bytes` (the longest document that is accepted, default 64 MB)
plus one read block, however large the file is: a line longer than `max_bytes` is skipped without being
held. For parquet it is one batch of rows read from one row group. A txt file is one document.

What cannot be used is not lost: each reader yields `Reject`s (empty, not UTF-8, over-long, not JSON, no
text field) with file, position and reason. The surprising thing: a JSON string with a lone surrogate is
"not UTF-8" too, since no UTF-8 text stands for it.
"""

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from infra.errors import DataError, ReproError

READ_BLOCK = 1 << 20
PARQUET_ROWS = 64
FORMATS = {
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl.gz",
    ".json.gz": "jsonl.gz",
    ".jsonl.zst": "jsonl.zst",
    ".json.zst": "jsonl.zst",
    ".parquet": "parquet",
    ".txt": "txt",
}
EMPTY, NOT_UTF8, OVERLONG = "empty", "not UTF-8", "over-long"
NETWORK = (
    "aiohttp",
    "gcsfs",
    "google",
    "requests",
    "urllib3",
)  # whose errors speak of the way, not of the file
NOT_JSON, NO_TEXT = "not JSON", "no text field"


@dataclass(frozen=True)
class Document:
    """One document: its text, its id, and its position in the file (lines and rows count from 1)."""

    text: str
    id: str
    loc: int


@dataclass(frozen=True)
class Reject:
    """A document that is kept aside: position, id where known, reason."""

    loc: int
    id: str
    reason: str


def format_of(path: str | Path, declared: str = "auto") -> str:
    """The format of a file: as declared, else from its name."""
    if declared != "auto":
        return declared
    name = str(path).lower()
    for ending in sorted(FORMATS, key=len, reverse=True):
        if name.endswith(ending):
            return FORMATS[ending]
    raise DataError(
        f"{path}: the format is not known from its name",
        f"name it in the source's `format`: {', '.join(FORMATS)}",
    )


def open_bytes(path: str | Path) -> BinaryIO:
    """Open a local or remote file for reading bytes, with a clear error when it is missing."""
    text = str(path)
    try:
        if "://" in text:
            import fsspec

            with _reached(text):
                return cast(BinaryIO, fsspec.open(text, "rb").open())
        return open(text, "rb")
    except FileNotFoundError:
        raise DataError(f"document file {text} does not exist", "check the source's glob") from None


@contextlib.contextmanager
def _reached(address: str) -> Iterator[None]:
    """Whatever a remote file system raises (aiohttp, gcsfs, credentials) becomes one error that names the address."""
    try:
        yield
    except (ReproError, FileNotFoundError):
        raise
    except Exception as e:
        raise DataError(
            f"{address} cannot be reached: {type(e).__name__}: {' '.join(str(e).split())[:200]}",
            "check the address, the network and your access to it, then run the same command again",
        ) from e


def expand_glob(pattern: str) -> list[str]:
    """The files a glob matches, sorted by name; matching nothing is an error."""
    import fsspec

    try:
        fs, key = fsspec.core.url_to_fs(pattern)
    except (ValueError, ImportError) as e:  # an unknown protocol, or one whose package is not installed
        raise DataError(f"the glob {pattern} cannot be read: {e}", "give a local path or gs://") from None
    remote = "://" in pattern
    with _reached(pattern) if remote else contextlib.nullcontext():
        found = sorted(
            str(fs.unstrip_protocol(p)) if remote else str(p) for p in fs.glob(key) if fs.isfile(p)
        )
    if not found:
        raise DataError(
            f"the glob {pattern} matches no file", "check the path; a glob needs * to match several files"
        )
    return found


def _stream(raw: BinaryIO, kind: str) -> BinaryIO:
    """The uncompressed bytes. Arrow's readers hold one block and refuse a truncated stream, several members too."""
    codec = {"jsonl.gz": "gzip", "jsonl.zst": "zstd"}.get(kind)
    if codec is None:
        return raw
    import pyarrow

    unpacked = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), codec)
    return cast(BinaryIO, io.BufferedReader(cast(Any, unpacked), READ_BLOCK))


def iter_lines(stream: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """(line number from 1, line without its end) for each line; None for a line longer than `max_bytes`."""
    number = 0
    while True:
        line = stream.readline(max_bytes + 1)
        if not line:
            return
        number += 1
        if len(line) > max_bytes and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = stream.readline(READ_BLOCK)
            yield number, None
        else:
            yield number, line.rstrip(b"\r\n")


def _field(row: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        if not isinstance(row, dict):
            return None
        row = row.get(part)
    return row


def _loads() -> Any:
    """orjson where it is installed (three times as fast), else the standard library."""
    try:
        import orjson
    except ImportError:
        return json.loads
    return orjson.loads


def writable(name: str) -> str:
    """A name that any file can hold: a lone surrogate (a file name in Latin-1, say) becomes its escape."""
    return name if name.isascii() else name.encode("utf-8", "backslashreplace").decode()


def _one_line(value: Any, fallback: str) -> str:
    """An id as one line of text: boundaries are read line by line (OLMo-core), so no id may hold a newline."""
    if value is None:
        return fallback
    return writable(" ".join(str(value).splitlines()))


def checked(text: Any, loc: int, id: str, max_bytes: int, strip: bool) -> Document | Reject:
    """A Document, or the reason why this is none."""
    if not isinstance(text, str):
        return Reject(loc, id, NO_TEXT)
    if not (text.strip() if strip else text):
        return Reject(loc, id, EMPTY)
    if len(text) * 4 > max_bytes and len(text.encode("utf-8", "surrogatepass")) > max_bytes:
        return Reject(loc, id, OVERLONG)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return Reject(loc, id, NOT_UTF8)
    return Document(text, id, loc)


def _read_jsonl(stream: BinaryIO, name: str, text_field: str, id_field: str, max_bytes: int, strip: bool):
    loads = _loads()
    plain = "." not in text_field and "." not in id_field
    for loc, line in iter_lines(stream, max_bytes):
        fallback = f"{name}:{loc}"
        if line is None:
            yield Reject(loc, fallback, OVERLONG)
            continue
        if not line.strip():
            yield Reject(loc, fallback, EMPTY)
            continue
        try:
            row = loads(line)
        except ValueError:
            try:
                line.decode()
                row = json.loads(line)  # orjson refuses lone surrogates; the reason is told apart below
            except UnicodeDecodeError:
                yield Reject(loc, fallback, NOT_UTF8)
                continue
            except (ValueError, RecursionError):
                yield Reject(loc, fallback, NOT_JSON)
                continue
        if not isinstance(row, dict):
            yield Reject(loc, fallback, NOT_JSON)
            continue
        text, id = (
            (row.get(text_field), row.get(id_field))
            if plain
            else (_field(row, text_field), _field(row, id_field))
        )
        yield checked(text, loc, _one_line(id, fallback), max_bytes, strip)


def _read_txt(stream: BinaryIO, name: str, max_bytes: int, strip: bool) -> Iterator[Document | Reject]:
    raw = stream.read(max_bytes + 1)
    if len(raw) > max_bytes:
        yield Reject(1, name, OVERLONG)
        return
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        yield Reject(1, name, NOT_UTF8)
        return
    yield checked(text, 1, name, max_bytes, strip)


def _read_parquet(raw: BinaryIO, name: str, text_field: str, id_field: str, max_bytes: int, strip: bool):
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(raw, pre_buffer=False)
    except pyarrow.ArrowInvalid as e:
        raise DataError(f"{name} is not valid parquet: {e}", "fetch or write it again") from None
    fields = file.schema_arrow.names
    top = text_field.split(".")[0]
    if top not in fields:
        raise DataError(
            f"{name} has no column {text_field!r}",
            f"set the source's text_field; columns: {', '.join(fields)}",
        )
    columns = [top] + ([id_field.split(".")[0]] if id_field.split(".")[0] in fields else [])
    loc = 0
    for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=list(dict.fromkeys(columns))):
        for k in range(batch.num_rows):
            loc += 1
            fallback = f"{name}:{loc}"
            try:
                row = {column: batch.column(column)[k].as_py() for column in batch.schema.names}
            except UnicodeDecodeError:
                yield Reject(loc, fallback, NOT_UTF8)
                continue
            yield checked(
                _field(row, text_field), loc, _one_line(_field(row, id_field), fallback), max_bytes, strip
            )


@contextlib.contextmanager
def _readable(path: str | Path) -> Iterator[None]:
    try:
        yield
    except Exception as e:
        if type(e).__module__.split(".")[0] in NETWORK or isinstance(e, TimeoutError | ConnectionError):
            with _reached(str(path)):
                raise
        if not isinstance(e, OSError):
            raise
        raise DataError(f"{path} cannot be read to its end: {e}", "it is damaged: fetch it again") from e


def read_documents(
    path: str | Path,
    *,
    format: str = "auto",
    text_field: str = "text",
    id_field: str = "id",
    max_bytes: int = 64_000_000,
    strip: bool = True,
    name: str = "",
) -> Iterator[Document | Reject]:
    """The documents of one file, in order, with the rejected ones in their place.

    `name` stands for the file in ids that the file does not give (default: the path). With `strip` a
    document of white space only is empty. The text itself is passed on unchanged.
    """
    kind = format_of(path, format)
    name = writable(name or str(path))
    with open_bytes(path) as raw, _readable(path):
        if kind == "parquet":
            yield from _read_parquet(raw, name, text_field, id_field, max_bytes, strip)
        elif kind == "txt":
            yield from _read_txt(raw, name, max_bytes, strip)
        else:
            yield from _read_jsonl(_stream(raw, kind), name, text_field, id_field, max_bytes, strip)
