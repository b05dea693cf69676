"""`repro serve` for real: server, worker, deployments, a training that is cancelled, killed, and goes on.

One server serves the whole file. The recipe is `tiny`, shrunk; everything up to the gate is made once, in this process.
Covers the public reports P5 (killed worker), P6 (no heartbeats), P7 (cancelled flow leaves training), P8 (no docker).
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

# A real server, worker and training: minutes of work, so behind `make proofs`.
pytestmark = pytest.mark.slow_proof

ROOT = Path(__file__).parents[2]
PLANTED = "planted-secret-0123456789"


def free_port() -> int:
    """A port whose successor is free too (the file server's)."""
    for _ in range(50):
        with socket.socket() as a, socket.socket() as b:
            a.bind(("127.0.0.1", 0))
            port = a.getsockname()[1]
            try:
                b.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
    raise RuntimeError("no two free ports")


class Served:
    """A `repro serve` process in a directory of its own, and its API."""

    def __init__(self, home: Path, run: Path, fields: list[str]):
        self.home, self.run, self.port = home, run, free_port()
        self.flags = [x for f in fields for x in ("--set", f)]
        self.process: subprocess.Popen | None = None
        self.ids: dict[str, str] = {}

    def argv(self) -> list[str]:
        return [
            sys.executable,
            "-m",
            "pipelines.cli",
            "serve",
            "tiny",
            "--run-dir",
            str(self.run),
            "--port",
            str(self.port),
            *self.flags,
        ]

    def environment(self) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
        return {
            **env,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "HF_TOKEN": PLANTED,
            "MY_API_KEY": PLANTED,
        }

    def start(self) -> str:
        """Start, wait until it is ready; returns what it said."""
        self.log = (self.home / "serve.out").open("a+")
        self.log.truncate(0)
        self.process = subprocess.Popen(
            self.argv(),
            cwd=self.home,
            env=self.environment(),
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        said = wait_for(
            lambda: (text := (self.home / "serve.out").read_text()) and "Ctrl-C ends" in text and text,
            120,
            self.process,
        )
        self.ids = {d["entrypoint"].split(":")[1]: d["id"] for d in self.api("/deployments/filter", {})}
        return said

    def api(self, path: str, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/api{path}", data, {"Content-Type": "application/json"}
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as e:
                # SQLite is busy; Prefect's own client tries again too.
                if e.code != 503 or time.monotonic() > deadline:
                    raise
            time.sleep(1)

    def submit(self, deployment: str, **parameters) -> str:
        made = self.api(
            f"/deployments/{self.ids[deployment]}/create_flow_run",
            {"parameters": parameters, "state": {"type": "SCHEDULED"}},
        )
        return made["id"]

    def state(self, flow_run: str) -> str:
        return self.api(f"/flow_runs/{flow_run}")["state_name"]

    def ended(self, flow_run: str, seconds: float = 300) -> str:
        ends = ("Completed", "Failed", "Crashed", "Cancelled", "TimedOut")
        return wait_for(lambda: (s := self.state(flow_run)) in ends and s, seconds)

    def steps(self) -> int:
        path = self.run / "train" / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def trainers(self) -> list[int]:
        return running(f"-m model.train --run {self.run}")


def running(part: str) -> list[int]:
    """Processes whose command line holds `part`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if part in path.read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def wait_for(what, seconds: float, process: subprocess.Popen | None = None):
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert process is None or process.poll() is None, "the process has ended"
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.2)
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory, gated_run, micro_fields):
    home = tmp_path_factory.mktemp("served")
    run = home / "runs" / "micro"
    shutil.copytree(gated_run, run)
    made = Served(home, run, micro_fields)
    made.said = made.start()
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.send_signal(signal.SIGINT)
        assert made.process.wait(60) == 0
    assert running(str(home)) == [], "Ctrl-C leaves nothing behind"


def test_it_says_where_it_is_and_a_second_call_too(served):
    assert f"http://127.0.0.1:{served.port}" in served.said and "12 deployments" in served.said
    again = subprocess.run(
        served.argv(), cwd=served.home, env=served.environment(), capture_output=True, text=True, timeout=60
    )
    assert again.returncode == 0 and again.stdout == f"already running: http://127.0.0.1:{served.port}\n"
    assert (served.home / ".prefect" / "prefect.db").exists()


def test_parameters_are_typed_and_the_schedule_is_the_recipes(served):
    found = {d["entrypoint"].split(":")[1]: d for d in served.api("/deployments/filter", {})}
    assert set(found) == {
        "reproduce",
        "tokenize",
        "order",
        "init",
        "gate",
        "reference",
        "train",
        "convert",
        "parity",
        "evaluate",
        "report",
        "watch",
    }
    schema = found["train"]["parameter_openapi_schema"]
    assert "tiny" in schema["definitions"]["RecipeName"]["enum"]
    assert {k: v.get("type") for k, v in schema["properties"].items()} == {
        "recipe": None,
        "run_dir": "string",
        "overrides": "array",
        "redo": "boolean",
    }
    assert found["watch"]["schedules"][0]["schedule"]["interval"] == 20
    assert found["watch"]["parameters"] == {
        "run_dir": str(served.run),
        "overrides": ["launch.watch.interval_seconds=20"],
    }


def test_cancel_stops_training_within_ten_seconds_after_it_has_saved(served):
    flow_run = served.submit("train")
    wait_for(lambda: served.steps() >= 3 and served.trainers(), 300)
    start = time.monotonic()
    served.api(f"/flow_runs/{flow_run}/set_state", {"state": {"type": "CANCELLING"}})
    wait_for(lambda: not served.trainers(), 10)
    assert time.monotonic() - start < 10
    assert served.ended(flow_run) == "Cancelled"
    step = served.steps()
    assert step < 14 and (served.run / "checkpoints" / f"step{step}" / "MANIFEST.json").exists()
    assert "SIGTERM: saved step" in (served.run / "logs" / "train-1.log").read_text()


def test_kill_9_of_the_flow_leaves_no_training_and_another_run_goes_on(served):
    """Nothing is cleaned up by hand: the lease of a dead owner is free, the record says what is done."""
    before = served.steps()
    flow_run = served.submit("train")
    wait_for(lambda: served.trainers() and served.steps() > before, 300)
    shell = next(p for p in served.trainers() if parent(p) not in served.trainers())
    os.kill(parent(shell), signal.SIGKILL)
    wait_for(lambda: not served.trainers(), 15)
    assert served.ended(flow_run) == "Crashed"
    again = served.submit("train")
    assert served.ended(again) == "Completed"
    steps = [json.loads(x)["step"] for x in (served.run / "train" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 15))
    assert (served.run / "stages" / "train.json").exists()


def test_a_changed_output_is_found_on_reuse(served):
    flow_run = served.submit("order")
    assert served.ended(flow_run) == "Completed"
    order = served.run / "order" / "order.u32"
    content = order.read_bytes()
    order.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    flow_run = served.submit("order")
    assert served.ended(flow_run) == "Failed"
    assert "changed since stage order made it" in served.api(f"/flow_runs/{flow_run}")["state"]["message"]
    order.write_bytes(content)


def test_landmarks_looked_on_schedule(served, micro_fields):
    """Committed landmarks are seen; they wait here because the reference was not run."""
    from pipelines.landmarks import survey
    from pipelines.recipe import load_recipe

    assert [(m.step, m.state, m.detail) for m in survey(served.run, load_recipe("tiny", micro_fields))] == [
        (4, "waiting", "the reference is not done"),
        (14, "waiting", "the reference is not done"),
    ]

    def ticks():
        wanted = {
            "deployments": {"id": {"any_": [served.ids["watch"]]}},
            "flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}},
        }
        return len(served.api("/flow_runs/filter", wanted)) >= 3

    wait_for(ticks, 300)
    latest = {a["key"]: a["data"] for a in served.api("/artifacts/latest/filter", {}) if a["key"]}
    assert json.loads(latest["landmarks-micro"])[0]["detail"] == "the reference is not done"
    assert (
        "step 14 of 14" in latest["progress-micro"]
        and f":{served.port + 1}/micro/logs/train-1.log" in latest["progress-micro"]
    )


def test_files_are_report_and_logs_only(served):
    def status(path):
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{served.port + 1}{path}", timeout=5).status
        except urllib.error.HTTPError as e:
            return e.code

    assert status("/micro/logs/train-1.log") == 200
    assert [
        status(p)
        for p in (
            "/micro/recipe.json",
            "/",
            "/micro/logs/../recipe.json",
            "/micro/checkpoints/",
            "/../.prefect/logs/x",
        )
    ] == [404] * 5


def test_killed_server_and_worker_come_back_and_kill_9_of_serve_ends_them(served):
    for part in ("worker start --pool repro", f"server start --host 127.0.0.1 --port {served.port}"):
        [old] = [p for p in running(part) if parent(p) == served.process.pid]
        os.kill(old, signal.SIGKILL)
        wait_for(
            lambda part=part, old=old: [
                p for p in running(part) if p != old and parent(p) == served.process.pid
            ],
            20,
        )
    wait_for(lambda: "server had died and was started again" in (served.home / "serve.out").read_text(), 10)
    os.kill(served.process.pid, signal.SIGKILL)
    served.process.wait()
    wait_for(lambda: not running(f"--port {served.port}") and not running(str(served.run)), 30)
    served.start()
    assert served.ended(served.submit("order")) == "Completed"


def test_an_existing_server_is_used_and_left_alone(served, tmp_path, micro_fields):
    """With PREFECT_API_URL set: deployments and a worker, no second server; Ctrl-C ends only what is ours."""
    other = Served(tmp_path, served.run, micro_fields)
    env = {**other.environment(), "PREFECT_API_URL": f"http://127.0.0.1:{served.port}/api"}
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(
            other.argv(), cwd=tmp_path, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    wait_for(lambda: "Ctrl-C ends" in (tmp_path / "out").read_text(), 120, process)
    children = [p for p in running("prefect") if parent(p) == process.pid]
    assert len(children) == 1 and children[0] in running("worker start")
    assert f"Prefect UI: http://127.0.0.1:{served.port}\n" in (tmp_path / "out").read_text()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert served.api("/health") is True


def test_the_planted_secret_is_nowhere(served):
    """Logs, records, report, database: the value of HF_TOKEN and of MY_API_KEY was never written down."""
    leaks = [p for p in served.home.rglob("*") if p.is_file() and PLANTED.encode() in p.read_bytes()]
    assert leaks == []
