"""The file server beside the Prefect UI: reports and logs of the runs below one folder, read-only, and nothing else.

    server = serve_files(Path("runs"), "127.0.0.1", 4201)      # http://127.0.0.1:4201/tiny/report/index.html

The surprising thing: what is judged is the path after symbolic links and escapes, never the one that was asked for.
"""

import functools
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pipelines.artifacts import COPIES, COPIES_SHOWN_AS

SHOWN = ("report", "logs")  # folders of a run that are given out


def shown_file(root: Path, url_path: str) -> Path | None:
    """The file or folder behind a URL path, if it lies in `report/` or `logs/` of a run below `root`; else None.

    Judged is the unquoted path after symbolic links. Working copies of gs:// runs are shown as `bucket-runs/`.
    """
    parts = [p for p in unquote(urlsplit(url_path).path).split("/") if p]
    if ".." in parts or any("\0" in p for p in parts):
        return None
    if parts[:1] == [COPIES_SHOWN_AS]:
        parts[0] = COPIES
    root = root.resolve()
    path = root.joinpath(*parts).resolve()
    for candidate in (path, (path / "index.html").resolve()):
        if not candidate.is_relative_to(root):
            return None
        inside = candidate.relative_to(root).parts
        runs = [
            i
            for i, p in enumerate(inside)
            if p in SHOWN and (root.joinpath(*inside[:i], "recipe.json")).is_file()
        ]
        private = inside[1:] if inside[:1] == (COPIES,) else inside
        if not runs or any(p.startswith(".") for p in private):
            return None
    return path


class Files(SimpleHTTPRequestHandler):
    """Report and logs of the runs, read-only, on this machine only. Only `logs/` is listed."""

    def log_message(self, *args: Any) -> None:
        pass

    def send_head(self) -> Any:
        if shown_file(Path(self.directory), self.path) is None:
            self.send_error(404)
            return None
        return super().send_head()

    def translate_path(self, path: str) -> str:
        found = shown_file(Path(self.directory), path)
        return str(found or Path(self.directory) / "nothing") + (
            "/" if urlsplit(path).path.endswith("/") else ""
        )

    def list_directory(self, path: Any) -> Any:
        if "logs" in Path(path).parts:
            return super().list_directory(path)
        self.send_error(404)
        return None


def serve_files(root: Path, host: str, port: int) -> ThreadingHTTPServer | None:
    """Start the file server in a thread; None when its port is taken."""
    try:
        server = ThreadingHTTPServer((host, port), functools.partial(Files, directory=str(root)))
    except OSError:
        return None
    threading.Thread(target=server.serve_forever, name="files", daemon=True).start()
    return server
