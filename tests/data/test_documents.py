"""Document readers: all formats give the same documents; bad ones are told apart; memory stays bounded."""

import gzip
import io
import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from data.documents import Document, Reject, expand_glob, format_of, iter_lines, read_documents
from infra.errors import DataError

TEXTS = [
    "plain",
    "Grüße 中文 👩‍👩‍👧",
    "two\nlines\r\n",
    "  padded  ",
    'quote " and \\ and \u2028',
    "x" * 5000,
]


def rows():
    return [{"id": f"doc-{i}", "text": t, "meta": {"body": t}} for i, t in enumerate(TEXTS)]


def write(path, rows):
    body = "".join(json.dumps(r, ensure_ascii=i % 2 == 0) + "\n" for i, r in enumerate(rows)).encode()
    if path.name.endswith(".gz"):
        half = len(body) // 2
        path.write_bytes(gzip.compress(body[:half]) + gzip.compress(body[half:]))
    elif path.name.endswith(".zst"):
        half = len(body) // 2
        path.write_bytes(zstandard.compress(body[:half]) + zstandard.compress(body[half:]))
    elif path.name.endswith(".parquet"):
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    else:
        path.write_bytes(body)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json.gz", "a.jsonl.zst", "a.parquet"])
def test_every_format_gives_the_same_documents(tmp_path, name):
    path = write(tmp_path / name, rows())
    expected = [Document(t, f"doc-{i}", i + 1) for i, t in enumerate(TEXTS)]
    assert list(read_documents(path)) == expected
    nested = list(read_documents(path, text_field="meta.body", id_field="absent", name="s"))
    assert nested == [Document(t, f"s:{i + 1}", i + 1) for i, t in enumerate(TEXTS)]


def test_txt_is_one_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("one\ntwo é\n".encode())
    assert list(read_documents(path, name="n")) == [Document("one\ntwo é\n", "n", 1)]
    path.write_bytes(b"\xff\xfe latin")
    assert list(read_documents(path, name="n")) == [Reject(1, "n", "not UTF-8")]
    path.write_bytes(b"x" * 101)
    assert list(read_documents(path, name="n", max_bytes=100)) == [Reject(1, "n", "over-long")]


def test_every_kind_of_bad_document_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [
        b'{"id": "ok", "text": "fine"}',
        b'{"id": "e", "text": ""}',
        b'{"id": "w", "text": " \\n\\t "}',
        b"",
        b'{"id": "latin", "text": "\xe9"}',
        b'{"id": "surrogate", "text": "a\\ud800b"}',
        b'{"id": "broken", "text": ',
        b'["no object"]',
        b'{"id": "none"}',
        b'{"id": "number", "text": 5}',
        b'{"id": "long", "text": "' + b"y" * 1000 + b'"}',
        b'{"id": 7, "text": "integer id"}',
        b'{"id": "new\\nline", "text": "an id over two lines"}',
        b'{"text": "no id"}',
        b'{"id": "lone\\ud800", "text": "an id that UTF-8 cannot hold"}',
    ]
    path.write_bytes(b"\n".join(lines))
    found = list(read_documents(path, max_bytes=500, name="src"))
    assert [(f.reason if isinstance(f, Reject) else f.id) for f in found] == [
        "ok", "empty", "empty", "empty", "not UTF-8", "not UTF-8", "not JSON", "not JSON",
        "no text field", "no text field", "over-long", "7", "new line", "src:14", "lone\\ud800",
    ]  # fmt: skip
    assert [f.loc for f in found] == list(range(1, 16))
    kept = list(read_documents(path, max_bytes=500, strip=False))
    assert kept[2] == Document(" \n\t ", "w", 3)


def test_a_file_name_that_is_no_utf8_gives_an_id_that_can_be_written(tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path / "caf") + b"\xe9.txt")
    Path(path).write_text("text")
    (found,) = read_documents(path)
    assert found.id == f"{tmp_path}/caf\\udce9.txt" and found.text == "text"


def test_over_long_counts_bytes_of_text(tmp_path):
    path = tmp_path / "a.parquet"
    write(path, [{"id": "a", "text": "é" * 50}, {"id": "b", "text": "é" * 51}])
    assert [type(f) for f in read_documents(path, max_bytes=100)] == [Document, Reject]


def test_lines_longer_than_the_limit_are_skipped_without_being_held():
    stream = io.BytesIO(b"a\n" + b"b" * 100 + b"\n" + b"c" * 10 + b"\n" + b"d" * 11)
    assert list(iter_lines(stream, 10)) == [(1, b"a"), (2, None), (3, b"c" * 10), (4, None)]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_truncated_file_is_an_error_that_names_it(tmp_path, name):
    path = write(tmp_path / name, rows() * 50)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"a\.jsonl.* cannot be read to its end"):
        list(read_documents(path))


def test_bad_inputs_are_clear_errors(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        list(read_documents(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="format is not known"):
        format_of("a.docx")
    with pytest.raises(DataError, match="matches no file"):
        expand_glob(f"{tmp_path}/*.jsonl")
    write(tmp_path / "a.parquet", rows())
    with pytest.raises(DataError, match="no column 'body'"):
        list(read_documents(tmp_path / "a.parquet", text_field="body"))
    (tmp_path / "b.parquet").write_bytes(b"PAR1nonsense")
    with pytest.raises(DataError, match="not valid parquet"):
        list(read_documents(tmp_path / "b.parquet"))


def test_globs_are_sorted(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).write_text("{}")
    assert expand_glob(f"{tmp_path}/*.jsonl") == [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"]


MEMORY = """
import sys
from data.documents import read_documents
before = peak_kb()
count = sum(1 for _ in read_documents(sys.argv[1], max_bytes=1_000_000))
print(count, peak_kb() - before)
"""


@pytest.mark.parametrize("ending", [".jsonl.gz", ".jsonl.zst", ".jsonl"])
def test_memory_is_bounded_whatever_the_size_of_file_and_document(tmp_path, ending, peak_kb):
    """150 MB of lines and one document of 150 MB: less than 40 MB more than an idle process."""
    path = tmp_path / f"big{ending}"
    line = json.dumps({"id": "x", "text": "word " * 100_000}).encode() + b"\n"
    with ExitStack() as stack:
        f = stack.enter_context(open(path, "wb"))
        if ending == ".jsonl.gz":
            f = stack.enter_context(gzip.GzipFile(fileobj=f, mode="wb", compresslevel=1))
        elif ending == ".jsonl.zst":
            f = stack.enter_context(zstandard.ZstdCompressor(level=1).stream_writer(f))
        for _ in range(300):
            f.write(line)
        f.write(b'{"id": "huge", "text": "')
        for _ in range(300):
            f.write(b"word " * 100_000)
        f.write(b'"}\n')
        f.write(b'{"id": "last", "text": "end"}\n')
    out = subprocess.run(
        [sys.executable, "-c", "import pyarrow, orjson\n" + peak_kb + MEMORY, str(path)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    count, extra = map(int, out.stdout.split())
    assert count == 302
    assert extra < 40_000, f"{extra} KB more than before"


@pytest.mark.parametrize("glob", ["foo://bucket/*.jsonl", "sftp://host/*.jsonl"])
def test_a_glob_of_another_protocol_is_named(glob):
    with pytest.raises(DataError, match=rf"the glob {re.escape(glob)} cannot be read(.|\n)*gs://"):
        expand_glob(glob)


def test_a_remote_source_that_cannot_be_reached_is_named(monkeypatch):
    import aiohttp
    import fsspec

    class Unreachable:
        def open(self):
            raise aiohttp.ClientConnectionError("refused")

        def readline(self, size):
            raise aiohttp.ClientPayloadError("cut off")

        def glob(self, key):
            raise aiohttp.ClientConnectionError("refused")

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(fsspec, "open", lambda *a: Unreachable())
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url: (Unreachable(), url))
    with pytest.raises(
        DataError, match=r"gs://b/x\.jsonl cannot be reached: ClientConnectionError: refused"
    ) as e:
        expand_glob("gs://b/x.jsonl")
    assert "the network" in e.value.remedy
    with pytest.raises(DataError, match=r"gs://b/x\.jsonl cannot be reached"):
        list(read_documents("gs://b/x.jsonl"))
    monkeypatch.setattr("data.documents.open_bytes", lambda path: Unreachable())
    with pytest.raises(DataError, match=r"gs://b/x\.jsonl cannot be reached: ClientPayloadError: cut off"):
        list(read_documents("gs://b/x.jsonl"))
