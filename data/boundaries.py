"""Document boundaries of a token file, from its `.csv.gz`: `start,end[,id,...]` per line, as dolma writes them.

    for start, end, name in boundaries(open_bytes("00000.csv.gz"), tokens=1000, where="00000.csv.gz"): ...

The surprising thing: a few kB of gzip can unfold to a line of many GB, or to rows without end. So a line has a limit, rows must
follow each other, and none may lie beyond the token file; the first that does not is a named error.
"""

import csv
import gzip
import zlib
from collections.abc import Iterator
from typing import BinaryIO, TextIO, cast

from infra.errors import DataError

MAX_LINE = 1 << 20
REMEDY = "it is damaged or belongs to another token file: make it again"


def boundaries(raw: BinaryIO, tokens: int, where: str) -> Iterator[tuple[int, int, str]]:
    """(start, end, id or '') of every document, in order, 0 <= start < end <= `tokens`. Raises DataError that names the line."""
    last = 0
    try:
        with gzip.open(raw, "rt", newline="", encoding="utf-8") as f:
            for number, row in enumerate(csv.reader(_lines(cast(TextIO, f), where)), 1):
                try:
                    start, end = int(row[0]), int(row[1])
                except (ValueError, IndexError):
                    raise DataError(
                        f"{where} is not a list of document boundaries: line {number} is {','.join(row)[:80]!r}",
                        REMEDY,
                    ) from None
                if not last <= start < end <= tokens:
                    raise DataError(
                        f"{where}, line {number}: {start}..{end} does not follow {last} or lies outside its {tokens} tokens",
                        REMEDY,
                    )
                last = end
                yield start, end, row[2] if len(row) > 2 else ""
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as e:
        raise DataError(f"{where} cannot be read to its end: {e}", REMEDY) from None


def _lines(f: TextIO, where: str) -> Iterator[str]:
    """Lines of at most MAX_LINE characters."""
    while line := f.readline(MAX_LINE):
        if len(line) == MAX_LINE:
            raise DataError(f"{where} has a line of more than {MAX_LINE} characters", REMEDY)
        yield line
