"""A small Cloud Storage over real HTTP that enforces generation preconditions (the emulator does not) and breaks on
request: status codes, resets, truncated and slow bodies, and answers lost after the write was done."""

import base64
import email.parser
import json
import socket
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import google_crc32c
import pytest


class FakeGcs:
    """`objects`: {(bucket, name): {"data", "generation", "updated"}}; `faults`: list of [method, part of the URL, kind, times]."""

    def __init__(self):
        self.objects, self.faults, self.requests, self.sessions = {}, [], [], {}
        self.lock, self.generation = threading.RLock(), 1000
        handler = type("Handler", (Handler,), {"gcs": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def fail(self, method, part, kind, times=1):
        self.faults.append([method, part, kind, times])

    def fault(self, method, url):
        with self.lock:
            for f in self.faults:
                if f[0] == method and f[1] in url and f[3] > 0:
                    f[3] -= 1
                    return f[2]
        return None

    def put(self, bucket, name, data, condition):
        """Store; None when the precondition does not hold."""
        with self.lock:
            stands = self.objects.get((bucket, name))
            if condition is not None and int(condition) != (stands["generation"] if stands else 0):
                return None
            self.generation += 1
            self.objects[bucket, name] = {"data": data, "generation": self.generation, "updated": time.time()}
            return self.facts(bucket, name)

    def facts(self, bucket, name):
        o = self.objects[bucket, name]
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(o["updated"])) + ".000Z"
        crc = base64.b64encode(google_crc32c.Checksum(o["data"]).digest()).decode()
        return {
            "name": name, "bucket": bucket, "size": str(len(o["data"])), "crc32c": crc, "updated": stamp,
            "generation": str(o["generation"]), "metageneration": "1",
        }  # fmt: skip

    def names(self, bucket="b"):
        return sorted(n for b, n in self.objects if b == bucket)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    gcs: FakeGcs

    def log_message(self, *args):
        pass

    def answer(self, status, body=b"", headers=None, kind=None):
        if isinstance(body, dict):
            body = json.dumps(body).encode()
        self.send_response(status)
        for k, v in (headers or {}).items():
            self.send_header(k, v)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if kind == "truncate":
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            return self.cut()
        if kind == "corrupt":
            body = bytes([body[0] ^ 1]) + body[1:]
        if kind == "slow":
            for i in range(0, len(body), max(1, len(body) // 40)):
                self.wfile.write(body[i : i + max(1, len(body) // 40)])
                self.wfile.flush()
                time.sleep(0.1)
            return None
        self.wfile.write(body)
        return None

    def cut(self):
        """Reset the connection."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def handle_any(self, method):
        url, length = urlsplit(self.path), int(self.headers.get("Content-Length") or 0)
        q = {k: v[0] for k, v in parse_qs(url.query).items()}
        body = self.rfile.read(length)
        self.gcs.requests.append((method, self.path))
        kind = self.gcs.fault(method, unquote(self.path))
        if kind == "reset":
            return self.cut()
        if kind is not None and kind.isdigit():
            return self.answer(int(kind), {"error": {"code": int(kind), "message": "injected"}})
        parts = [unquote(p) for p in url.path.strip("/").split("/")]
        bucket = parts[parts.index("b") + 1] if "b" in parts else ""
        name = unquote(url.path.split("/o/", 1)[1]) if "/o/" in url.path else ""
        if method == "GET" and not name:
            items = [
                self.gcs.facts(b, n)
                for b, n in sorted(self.gcs.objects)
                if b == bucket and n.startswith(q.get("prefix", ""))
            ]
            return self.answer(200, {"items": items}, kind=kind)
        if method == "GET":
            o = self.gcs.objects.get((bucket, name))
            if o is None or ("generation" in q and int(q["generation"]) != o["generation"]):
                return self.answer(404, {"error": {"code": 404, "message": "no such object"}})
            facts = self.gcs.facts(bucket, name)
            if q.get("alt") == "media":
                return self.answer(
                    200,
                    o["data"],
                    {"X-Goog-Hash": f"crc32c={facts['crc32c']}", "X-Goog-Generation": facts["generation"]},
                    kind,
                )
            return self.answer(200, facts)
        if method == "DELETE":
            o = self.gcs.objects.get((bucket, name))
            if o is None:
                return self.answer(404, {"error": {"code": 404, "message": "no such object"}})
            if "ifGenerationMatch" in q and int(q["ifGenerationMatch"]) != o["generation"]:
                return self.answer(412, {"error": {"code": 412, "message": "conditionNotMet"}})
            del self.gcs.objects[bucket, name]
            return self.answer(204)
        if method == "POST" and q.get("uploadType") == "multipart":
            message = email.parser.BytesParser().parsebytes(
                b"Content-Type: " + self.headers["Content-Type"].encode() + b"\r\n\r\n" + body
            )
            meta, _ = message.get_payload()
            boundary = self.headers["Content-Type"].split("boundary=")[1].strip("'\"").encode()
            raw = body.split(b"--" + boundary)[2].split(b"\r\n\r\n", 1)[1][:-2]
            return self.store(
                bucket, json.loads(meta.get_payload())["name"], raw, q.get("ifGenerationMatch"), kind
            )
        if method == "POST" and q.get("uploadType") == "resumable":
            key = str(len(self.gcs.sessions))
            named = json.loads(body or b"{}").get("name") or q.get("name")
            self.gcs.sessions[key] = [bucket, named, b"", q.get("ifGenerationMatch")]
            return self.answer(200, b"", {"Location": f"{self.gcs.url}/session/{key}"})
        if method == "PUT" and url.path.startswith("/session/"):
            session = self.gcs.sessions[url.path.rsplit("/", 1)[1]]
            span, total = self.headers["Content-Range"].removeprefix("bytes ").split("/")
            if span != "*":
                first = int(span.split("-")[0])
                session[2] = session[2][:first] + body
            if total != "*" and len(session[2]) == int(total):
                return self.store(session[0], session[1], session[2], session[3], kind)
            return self.answer(308, b"", {"Range": f"bytes=0-{len(session[2]) - 1}"} if session[2] else {})
        return self.answer(501, {"error": {"code": 501, "message": f"{method} {self.path}"}})

    def store(self, bucket, name, data, condition, kind):
        facts = self.gcs.put(bucket, name, data, condition)
        if kind == "lost_answer":
            return self.cut()
        if facts is None:
            return self.answer(412, {"error": {"code": 412, "message": "conditionNotMet"}})
        return self.answer(200, facts)

    def do_GET(self):
        self.handle_any("GET")

    def do_POST(self):
        self.handle_any("POST")

    def do_PUT(self):
        self.handle_any("PUT")

    def do_DELETE(self):
        self.handle_any("DELETE")


@pytest.fixture
def gcs(monkeypatch):
    """The fake, and the environment that leads every client to it."""
    fake = FakeGcs()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake.url)
    yield fake
    fake.server.shutdown()
    fake.server.server_close()
