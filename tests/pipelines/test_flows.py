"""Identity under Prefect, and the `launch` command: what the public reports P2, P3, P4 and P8 ask for, without a server."""

import json
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from infra.artifacts import fingerprint
from infra.errors import IdentityError, RecipeError
from infra.owner import start_time, started_by
from pipelines.cli import main
from pipelines.flows import healthy
from pipelines.recipe import load_recipe, recipe_names

pytestmark = pytest.mark.usefixtures("xmanager_database")

ROOT = Path(__file__).parents[2]
CLOUD = ["--set", "launch.image=us-docker.pkg.dev/p/repro/train:1", "--set", "launch.bucket=gs://bkt/run"]


def test_p2_keys_are_equal_in_every_process():
    """Not a pickle: another process with another hash seed gives the same key for every recipe."""
    code = "from infra.artifacts import fingerprint; from pipelines.recipe import *\nfor n in recipe_names(): print(n, fingerprint(load_recipe(n)))"
    ours = "".join(f"{n} {fingerprint(load_recipe(n))}\n" for n in recipe_names())
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        assert (
            subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env).stdout
            == ours
        )


def test_p2_what_has_no_stable_form_is_refused():
    with pytest.raises(IdentityError, match="cannot be serialised the same way twice"):
        fingerprint({"tasks": {"a", "b"}})


def test_p3_an_edit_of_a_helper_far_below_changes_the_key(tmp_path):
    """infra/lease.py is imported by the trainer three modules down; its own text is in the training stage's code digest."""
    import shutil

    for package in ("infra", "data", "model", "evals", "pipelines"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    code = "from infra.code import code_digest; from infra.artifacts import fingerprint; print(fingerprint(code_digest('model.train')), fingerprint(code_digest('evals.report.build')))"

    def keys() -> list[str]:
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path
        ).stdout.split()

    before = keys()
    assert len(before) == 2
    lease = tmp_path / "infra" / "lease.py"
    lease.write_text(lease.read_text() + "\n# edited\n")
    train, _ = keys()
    assert train != before[0]
    lease.write_text(lease.read_text().removesuffix("\n# edited\n"))
    page = tmp_path / "evals" / "report" / "html.py"
    page.write_text(page.read_text() + "\n# edited\n")
    train, report = keys()
    assert (train, report) == (before[0], report) and report != before[1]


def test_p4_prefects_cache_is_off_everywhere():
    """One key function, ours. A task or flow of Prefect with a cache of its own would be a second one."""
    import re

    for path in (ROOT / "pipelines").rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"cache_key_fn|cache_expiration|INPUTS|TASK_SOURCE|persist_result=True", text), (
            path
        )
        assert all(c == "NO_CACHE" for c in re.findall(r"cache_policy=(\w+)", text)), path


def test_p8_a_local_launch_needs_no_docker_and_its_failure_is_told(tmp_path, monkeypatch):
    """PATH holds neither docker nor bazel; the child's exit code and its last lines arrive, without its secrets."""
    from infra.errors import LaunchError
    from infra.launch.local import run_module

    (tmp_path / "fails.py").write_text(
        "import os\nprint('loading')\nprint('token', os.environ['HF_TOKEN'])\nraise SystemExit(9)"
    )
    monkeypatch.setenv("HF_TOKEN", "planted-secret-value")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"exit code 9(.|\n)*loading(.|\n)*token \[removed\]"):
        run_module("fails", [], name="f", log_dir=tmp_path / "logs", state_dir=tmp_path / "xm")


@pytest.mark.parametrize(
    ("recipe", "target", "more", "kind"),
    [
        ("olmo3_7b_stage1", "gke", [], "JobSet"),
        (
            "olmo3_190m",
            "vertex",
            ["launch.topology=v6e:2x2", "launch.project=my-project", "launch.region=us-east5"],
            "CustomJob",
        ),
        ("tiny", "local", [], "a process on this machine"),
    ],
)
def test_dry_run_writes_the_whole_spec_and_explains_it(tmp_path, capsys, recipe, target, more, kind):
    out = tmp_path / "spec.json"
    flags = [x for f in more for x in ("--set", f)]
    assert main(["launch", recipe, "--target", target, "--dry-run", "--out", str(out), *CLOUD, *flags]) == 0
    said = capsys.readouterr().out
    assert kind in said and str(out) in said and "by hand:" in said
    spec = json.loads(out.read_text())
    if target == "gke":
        assert spec["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"] == 16
        assert "docker build" in said and "docker push" in said and "kubectl" in said
    if target == "vertex":
        assert spec["customJob"]["jobSpec"]["workerPoolSpecs"][0]["machineSpec"]["tpuTopology"] == "2x2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["olmo3_7b_stage1", "--set", "launch.topology=v5p:3x7x13", *CLOUD], "'v5p:3x7x13' does not exist"),
        (
            ["olmo3_7b_stage1", "--set", "launch.topology=v5p:8x8x16", *CLOUD],
            "512 instances does not split over 1024 devices",
        ),
        (["olmo3_7b_stage1", "--set", "mesh.tensor=3", *CLOUD], "does not match the 64 devices"),
        (["olmo3_7b_stage1"], "needs launch.image, launch.bucket"),
        (["olmo3_7b_stage1", "--target", "vertex", *CLOUD], "not on v5p"),
        (["tiny", "--set", "launch.bucket=s3://x"], "not of the form gs://"),
        (["tiny", "--set", "launch.target=vertex", "--set", "launch.queue=q"], "Kueue"),
    ],
)
def test_impossible_launches_are_refused_before_anything_is_sent(tmp_path, capsys, arguments, message):
    assert main(["launch", *arguments, "--dry-run", "--out", str(tmp_path / "x")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_launch_on_this_machine_needs_a_run_directory(tmp_path, capsys):
    assert main(["launch", "tiny", "--run-dir", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err
    assert all(f"`repro {s} --run-dir" in said for s in ("tokenize", "order", "init", "gate"))
    assert not (tmp_path / "none" / "recipe.json").exists()


def test_command_lines_with_secrets_are_refused_or_masked(monkeypatch):
    from infra.redact import looks_secret, redact

    assert looks_secret("WANDB_API_KEY") and looks_secret("X", "hf_" + "a" * 30)
    assert not looks_secret("TOKENIZERS_PARALLELISM", "false") and not looks_secret(
        "GOOGLE_APPLICATION_CREDENTIALS", "/a/b.json"
    )
    key = "-----BEGIN PRIVATE KEY-----\nMIIabc\n-----END PRIVATE KEY-----"
    assert redact(f"see {key} and ghp_{'a' * 36}") == "see [removed] and [removed]"
    monkeypatch.setenv("DB_PASSWORD", "correct-horse")
    assert redact("login correct-horse") == "login [removed]"


def test_recipes_name_their_remote_target():
    with pytest.raises(RecipeError, match="this stage trains on this machine"):
        from pipelines.work import train

        train(load_recipe("tiny", ["launch.target=gke"]), Path("/nowhere"))


def test_ctrl_c_in_a_terminal_ends_a_flow_within_seconds(tmp_path):
    """A terminal sends SIGINT to the whole process group. The server must outlive it, or the flow waits for it for ever."""
    code = """
import signal
import time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
from pipelines.flows import prefect_environment, start_server
prefect_environment(Path("home"))
start_server()
from prefect import flow
@flow
def waits():
    print("in the flow", flush=True)
    time.sleep(120)
waits()
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)} | {
        "PREFECT_API_URL": "",
        "PREFECT_HOME": str(tmp_path / "home"),
    }
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, start_new_session=True, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout and process.stdout.readline() == "in the flow\n"
            owner = f"{process.pid}:{start_time(process.pid)}"
            servers = started_by(owner, "prefect.server.api.server")
            assert servers and all(os.getpgid(pid) != process.pid for pid in servers)
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(10) != 0
        finally:
            process.kill()


def test_a_server_that_is_named_and_does_not_answer_is_one_message(tmp_path, monkeypatch, capfd):
    from pipelines import cli

    monkeypatch.setattr(cli, "quiet", lambda args: None)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    assert main(["reproduce", "--run-dir", str(tmp_path / "run")]) == 2
    assert "no Prefect server answers at http://127.0.0.1:9/api" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("status", "answers"), [(200, True), (401, True), (403, True), (404, False), (503, False)]
)
def test_a_server_that_asks_for_a_key_answers(status, answers):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status if self.path == "/api/health" else 500)
            self.end_headers()

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert healthy(f"http://127.0.0.1:{server.server_port}/api") is answers
