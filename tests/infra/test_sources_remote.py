"""Checkpoints by hub name and from gs://, over real HTTP to servers of this test: whole, half, missing, wrong."""

import hashlib
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest

from infra.errors import IdentityError
from infra.storage import StorageError
from model.convert import sources
from model.convert.safetensors_io import Tensors

ROOT = Path(__file__).parents[2]
REPO, REVISION, COMMIT = "allenai/Olmo-3-test", "stage1-step0", "c" * 40
VALUES = np.arange(50_000, dtype="<f4")


def safetensors_bytes() -> bytes:
    entry = {"dtype": "F32", "shape": [50_000], "data_offsets": [0, 200_000]}
    text = json.dumps({"a": entry}).encode()
    return struct.pack("<Q", len(text)) + text + VALUES.tobytes()


FILES = {
    "model.safetensors": safetensors_bytes(),
    "config.json": b'{"model_type": "olmo3"}',
    "pytorch_model.bin": b"never fetched",
    "modeling_olmo3.py": b"raise SystemExit('never fetched')",
}


class FakeHub:
    """The five requests that `snapshot_download` makes. `cut`: how often a body ends half way; `lie`: bytes are changed."""

    def __init__(self):
        self.cut, self.lie, self.gets = 0, False, []
        handler = type("Handler", (HubHandler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def name_of(self, name: str) -> str:
        """As the hub names contents: sha256 of large files, git's blob id of small ones."""
        data = FILES[name]
        if name.endswith(".safetensors"):
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *args):
        pass

    def answer(self, status, body=b"", headers=None, half=False):
        self.send_response(status)
        for k, v in (headers or {}).items():
            self.send_header(k, v)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if half else body)
        if half:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        if path == f"/api/models/{REPO}/revision/{REVISION}":
            return self.answer(200, json.dumps({"id": REPO, "sha": COMMIT, "siblings": []}).encode())
        if path == f"/api/models/{REPO}/tree/{COMMIT}":
            rows = []
            for name, data in FILES.items():
                row = {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                if name.endswith(".safetensors"):
                    row["lfs"] = {"oid": self.hub.name_of(name), "size": len(data), "pointerSize": 130}
                rows.append(row)
            return self.answer(200, json.dumps(rows).encode(), {"Content-Type": "application/json"})
        if path.startswith(f"/api/models/{REPO}/revision/"):
            return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if path.startswith("/api/models/"):
            return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        name = path.removeprefix(f"/{REPO}/resolve/{COMMIT}/")
        if name not in FILES:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        data = FILES[name]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{self.hub.name_of(name)}"', "Accept-Ranges": "bytes"}
        if self.command == "GET":
            self.hub.gets.append(name)
        if self.hub.lie and name == "model.safetensors":
            data = data[:-1] + bytes([data[-1] ^ 1])
        first = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        status = 200
        if first:
            start = int(first[1])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            data, status = data[start:], 206
        half = self.command == "GET" and name == "model.safetensors" and self.hub.cut > 0
        if half:
            self.hub.cut -= 1
            if first:
                data = b"" if len(data) < 2 else data  # keeps its announced length, sends half of it
        self.answer(status, data, headers, half)

    do_HEAD = do_GET


@pytest.fixture
def hub():
    fake = FakeHub()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


def resolve(url: str, address: str, cache: Path, **env: str) -> dict:
    """`sources.resolve` in a process of its own, for the hub client reads HF_ENDPOINT when it is imported."""
    program = (
        "import json, sys, time\n"
        "time.sleep = lambda seconds: None\n"  # the client waits a second between its tries
        "from infra.errors import ReproError\n"
        "from model.convert.sources import resolve\n"
        "try:\n"
        "    found = resolve(sys.argv[1], sys.argv[2])\n"
        "    print(json.dumps({'path': str(found.path), **found.lineage}))\n"
        "except ReproError as e:\n"
        "    print(json.dumps({'error': str(e), 'kind': type(e).__name__}))\n"
    )
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1",
        "HF_HOME": str(cache / "home"), **env,
    }  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-c", program, address, str(cache)], env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_a_pinned_name_is_fetched_with_commit_and_digests_and_only_data(hub, tmp_path):
    found = resolve(hub.url, f"{REPO}@{REVISION}", tmp_path)
    assert found["commit"] == COMMIT and found["revision"] == REVISION
    digests = {n: hashlib.sha256(FILES[n]).hexdigest() for n in ("config.json", "model.safetensors")}
    assert found["files"] == digests
    assert np.array_equal(Tensors(Path(found["path"])).read("a"), VALUES)
    assert sorted(hub.gets) == ["config.json", "model.safetensors"]  # no pickle, no code
    again = resolve(hub.url, f"{REPO}@{REVISION}", tmp_path)
    assert again == found and len(hub.gets) == 2  # from the cache
    offline = resolve("http://127.0.0.1:9", f"{REPO}@{REVISION}", tmp_path, HF_HUB_OFFLINE="1")
    assert offline == found


def test_a_missing_revision_or_repository_is_named(hub, tmp_path):
    found = resolve(hub.url, f"{REPO}@stage1-step7", tmp_path)
    assert found["kind"] == "IdentityError" and f"{REPO} has no revision 'stage1-step7'" in found["error"]
    found = resolve(hub.url, f"allenai/no-such-model@{REVISION}", tmp_path)
    assert found["kind"] == "IdentityError" and "cannot be fetched" in found["error"]
    assert hub.gets == []


def test_a_half_transfer_is_continued_or_named_and_never_used(hub, tmp_path):
    hub.cut = 2
    found = resolve(hub.url, f"{REPO}@{REVISION}", tmp_path / "once")
    assert found["files"]["model.safetensors"] == hashlib.sha256(FILES["model.safetensors"]).hexdigest()
    assert hub.gets.count("model.safetensors") == 3
    hub.cut = 10_000
    broken = resolve(hub.url, f"{REPO}@{REVISION}", tmp_path / "always")
    assert broken["kind"] == "IdentityError" and "cannot be fetched" in broken["error"]
    assert not list((tmp_path / "always").rglob("snapshots/*/model.safetensors"))
    hub.cut = 0
    assert "files" in resolve(
        hub.url, f"{REPO}@{REVISION}", tmp_path / "always"
    )  # goes on from what had arrived


def test_wrong_bytes_of_the_right_length_are_refused(hub, tmp_path):
    """The hub's client compares sizes only; the digest it announced is checked by us, on every use."""
    hub.lie = True
    for _ in range(2):
        found = resolve(hub.url, f"{REPO}@{REVISION}", tmp_path)
        wanted = hashlib.sha256(FILES["model.safetensors"]).hexdigest()
        assert (
            found["kind"] == "IdentityError" and "model.safetensors arrived with the digest" in found["error"]
        )
        assert f"the hub says {wanted[:16]}" in found["error"]


# ---------------------------------------------------------------- gs://


def fill(gcs):
    for name in ("model.safetensors", "config.json"):
        gcs.put("b", f"run/hf/step1/{name}", FILES[name], None)
    gcs.put("b", "run/hf/step10/config.json", b"another step", None)


def test_a_bucket_directory_is_fetched_once_and_whole(gcs, tmp_path):
    fill(gcs)
    found = sources.resolve("gs://b/run/hf/step1", tmp_path)
    assert sorted(p.name for p in found.path.iterdir()) == ["config.json", "model.safetensors"]
    assert np.array_equal(Tensors(found.path).read("a"), VALUES)
    assert found.lineage["objects"]["config.json"]["bytes"] == len(FILES["config.json"])
    bodies = [r for r in gcs.requests if "alt=media" in r[1]]
    assert sources.resolve("gs://b/run/hf/step1/", tmp_path).path.name.startswith("step1-")
    assert sources.resolve("gs://b/run/hf/step1", tmp_path).path == found.path
    gcs.put("b", "run/hf/step1/config.json", b"{}", None)  # another object is another copy
    other = sources.resolve("gs://b/run/hf/step1", tmp_path)
    assert other.path != found.path and (other.path / "config.json").read_bytes() == b"{}"
    assert len(bodies) == 2


@pytest.mark.parametrize("kind", ["truncate", "corrupt"])
def test_a_bad_body_is_fetched_again_and_a_bad_bucket_leaves_nothing(gcs, tmp_path, monkeypatch, kind):
    """Half a transfer, and a body whose CRC32C is not the announced one."""
    fill(gcs)
    gcs.fail("GET", "/o/run/hf/step1/model", kind, 2)
    found = sources.resolve("gs://b/run/hf/step1", tmp_path / "good")
    assert (found.path / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    gcs.fail("GET", "/o/run/hf/step1/model", kind, 10_000)
    real = sources_open_url()
    monkeypatch.setattr("infra.storage.open_url", lambda url: real(url, deadline=1.0, first_pause=0.05))
    with pytest.raises(StorageError, match=r"cannot download gs://b/run/hf/step1/model.safetensors"):
        sources.resolve("gs://b/run/hf/step1", tmp_path / "bad")
    assert not [p for p in (tmp_path / "bad").rglob("*") if p.is_file()]


def sources_open_url():
    from infra.storage import open_url

    return open_url


def test_an_empty_or_hostile_bucket_is_refused(gcs, tmp_path):
    with pytest.raises(IdentityError, match="holds no file"):
        sources.resolve("gs://b/run/hf/step2", tmp_path)
    gcs.put("b", "run/hf/step3/../../../evil", b"x", None)
    with pytest.raises(IdentityError, match="leads elsewhere"):
        sources.resolve("gs://b/run/hf/step3", tmp_path)
    assert not (tmp_path / "evil").exists()
