"""What `repro serve` gives out and takes over, without a Prefect server."""

import http.client
import json
import re
import socket
import subprocess
import sys
from urllib.parse import urlsplit

import pytest

from infra.artifacts import write_json_atomic
from infra.errors import LaunchError
from infra.lease import Lease
from infra.owner import start_time
from pipelines import artifacts
from pipelines.cli import main
from pipelines.cli_serve import end_left_server, environment, require_free
from pipelines.serve_files import serve_files


@pytest.fixture
def root(tmp_path):
    """A run, a working copy of a gs:// run, and things that are nobody's business."""
    for run in ("tiny", ".gs/b/run.landmarks"):
        folder = tmp_path / run
        write_json_atomic(folder / "recipe.json", {})
        (folder / "report" / "figures").mkdir(parents=True)
        (folder / "report" / "index.html").write_text("page")
        (folder / "report" / "figures" / "a.svg").write_text("plot")
        (folder / "logs").mkdir()
        (folder / "logs" / "train-1.log").write_text("line")
    (tmp_path / ".prefect").mkdir()
    (tmp_path / ".prefect" / "x").write_text("secret")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "other.txt").write_text("not a run's")
    (tmp_path / "tiny" / "logs" / "away").symlink_to(tmp_path / "tiny" / "recipe.json")
    return tmp_path


@pytest.fixture
def get(root):
    server = serve_files(root, "127.0.0.1", 0)

    def status(path):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=5)
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    status.url = f"http://127.0.0.1:{server.server_port}"
    yield status
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "path",
    [
        "/", "/tiny/", "/tiny/recipe.json", "/tiny/logs/%2e%2e/recipe.json", "/tiny/logs/../recipe.json",
        "/tiny/logs/%2e%2e/%2e%2e/%2eprefect/x", "/tiny/logs/away", "/logs/other.txt", "/tiny/report/figures/",
        "/.gs/", "/bucket-runs/", "/bucket-runs/b/run.landmarks/recipe.json", "/tiny/logs%2f..%2frecipe.json",
        "/tiny/logs/%00", "/.prefect/x",
    ],
)  # fmt: skip
def test_nothing_but_report_and_logs_of_runs_is_given_out(get, path):
    assert get(path)[0] == 404


def test_report_and_logs_are_given_out(get):
    assert get("/tiny/report/") == (200, "page") and get("/tiny/logs/train-1.log") == (200, "line")
    assert get("/tiny/logs/")[0] == 200


def test_every_published_link_of_a_run_in_a_bucket_opens(get, root, monkeypatch):
    monkeypatch.setenv("REPRO_FILES_URL", get.url)
    monkeypatch.setenv("REPRO_FILES_ROOT", str(root))
    text = artifacts.report_text(root / ".gs" / "b" / "run.landmarks")
    links = re.findall(r"\((http[^)]*)\)", text)
    assert [get(urlsplit(u).path)[0] for u in links if "report.md" not in u] == [200, 200]


def test_a_server_that_was_not_named_is_not_taken_over():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(LaunchError, match=r"is taken by another server(.|\n)*--port"):
            require_free(other.getsockname()[1])


def test_the_server_that_a_killed_serve_left_is_ended(tmp_path):
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    state = tmp_path / "serve.json"
    state.write_text(json.dumps({"server": [left.pid, start_time(left.pid) + "0"]}))
    end_left_server(state)
    assert left.poll() is None, "another process with the same number is left alone"
    state.write_text(json.dumps({"server": [left.pid, start_time(left.pid)]}))
    end_left_server(state)
    assert left.wait(5) != 0 and not state.exists()


@pytest.mark.parametrize(
    "flags", [["--port", "65535"], ["--port", "99999"], ["--limit", "-1"], ["--limit", "0"]]
)
def test_impossible_numbers_are_refused(flags, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", *flags])
    assert ended.value.code == 2 and "is not a" in capsys.readouterr().err


def test_a_slash_at_the_end_of_the_api_is_dropped(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api/")
    assert environment(tmp_path, 4200, tmp_path)["PREFECT_API_URL"] == "http://127.0.0.1:1/api"


def test_a_second_serve_is_told_of_the_first_and_another_run_is_not_taken_for_it(
    tmp_path, monkeypatch, capfd
):
    """Also while the first is still starting: then it has no address yet."""
    monkeypatch.chdir(tmp_path)
    state = tmp_path / ".prefect" / "serve.json"
    again = ["serve", "tiny", "--run-dir", "runs/a"]
    with Lease(tmp_path / ".prefect" / "serve.lease", "repro serve"):
        assert main(again) == 2 and "in use by repro serve" in capfd.readouterr().err
        state.write_text(json.dumps({"run": str(tmp_path / "runs" / "a"), "pid": 77}))
        assert main(again) == 0 and "already running: it is still starting" in capfd.readouterr().out
        state.write_text(json.dumps({"run": str(tmp_path / "runs" / "a"), "pid": 77, "ui": "http://x:1"}))
        assert main(again) == 0 and capfd.readouterr().out == "already running: http://x:1\n"
        assert main(["serve", "tiny", "--run-dir", "runs/b"]) == 2
        said = capfd.readouterr().err
        assert "runs/a is already served" in said and "http://x:1" in said and "kill 77" in said
