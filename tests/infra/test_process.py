"""Leases, owner watch, code digests and the local launch, against real processes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from infra.code import closure, code_digest
from infra.errors import LaunchError, LeaseError
from infra.launch.local import run_module
from infra.lease import Lease
from infra.owner import start_time, watch_owner

pytestmark = pytest.mark.usefixtures("xmanager_database")

HOLD = "from infra.lease import Lease; import sys, time\nwith Lease(sys.argv[1], 'holder'):\n print('held', flush=True); time.sleep(60)"


def _holder(path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_second_owner_is_refused_and_told_who(tmp_path):
    holder = _holder(tmp_path / ".lease")
    try:
        with (
            pytest.raises(LeaseError, match=rf"in use by holder \(process {holder.pid}\)"),
            Lease(tmp_path / ".lease", "x"),
        ):
            pass
    finally:
        holder.kill()
        holder.wait()


def test_lease_of_a_killed_owner_is_taken_over(tmp_path):
    holder = _holder(tmp_path / ".lease")
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with Lease(tmp_path / ".lease", "x"):
        assert json.loads((tmp_path / ".lease").read_text())["pid"] == os.getpid()


def test_waiting_for_a_lease(tmp_path):
    holder = _holder(tmp_path / ".lease")
    holder.kill()
    with Lease(tmp_path / ".lease", "x", wait_seconds=10):
        pass
    holder.wait()


def test_job_ends_when_its_owner_dies(tmp_path):
    """owner -> job; the owner is killed with SIGKILL, the job must get SIGTERM."""
    job = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *a: (open(sys.argv[1], 'w').write('saved'), sys.exit(75)))\n"
        "from infra.owner import watch_owner\nassert watch_owner(0.05)\nprint('up', flush=True)\ntime.sleep(60)"
    )
    owner = (
        "import os, subprocess, sys\nfrom infra.owner import owner_environment\n"
        "p = subprocess.Popen([sys.executable, '-c', sys.argv[1], sys.argv[2]], env={**os.environ, **owner_environment()})\n"
        "p.wait()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", owner, job, str(tmp_path / "saved")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "up\n"
    process.kill()  # and not waited for: a killed launcher may stand in the table for ever
    deadline = time.monotonic() + 20
    while not (tmp_path / "saved").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (tmp_path / "saved").read_text() == "saved"
    process.wait()


FOREIGN = """
import subprocess, sys, time
from infra.owner import end_with_us
end_with_us("a program of others")
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
print(*(subprocess.Popen([*sleep, name]).pid for name in ("a program of others", "another")), flush=True)
time.sleep(600)
"""


def alive(pid):
    """Whether a process still runs; one that nobody has waited for yet does not."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_program_of_others_ends_with_us():
    """kill -9 of the one that started it; what has another name is left alone."""
    owner = subprocess.Popen([sys.executable, "-c", FOREIGN], stdout=subprocess.PIPE, text=True)
    theirs, other = map(int, owner.stdout.readline().split())
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 30
    while alive(theirs) and time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        assert not alive(theirs) and alive(other)
    finally:
        os.kill(other, signal.SIGKILL)


def test_no_watch_without_an_owner(monkeypatch):
    monkeypatch.delenv("REPRO_OWNER", raising=False)
    assert watch_owner() is None
    assert start_time(2**22 + 1) == ""


def test_code_digest_follows_imports():
    reached = closure("data.config")
    assert {"data.config", "data", "infra", "infra.section"} <= set(reached)
    assert "infra.artifacts" not in reached
    assert set(code_digest("data.config")) == set(reached)


def test_launch_reports_exit_code_and_last_lines(tmp_path):
    with pytest.raises(LaunchError, match=r"exit code 1(.|\n)*No module named infra.nothing"):
        run_module("infra.nothing", [], name="bad", log_dir=tmp_path, state_dir=tmp_path / "xm")


def test_launch_passes_arguments_as_they_are(tmp_path, capfd):
    script = tmp_path / "echo_args.py"
    script.write_text("import sys, json; print(json.dumps(sys.argv[1:])); sys.exit(75)")
    code = run_module(
        "echo_args", ["a b $HOME", "--x='1'"], name="echo", log_dir=tmp_path, state_dir=tmp_path / "xm",
        env={"PYTHONPATH": str(tmp_path)}, accept=(0, 75),
    )  # fmt: skip
    assert code == 75
    assert json.loads((tmp_path / "echo-1.log").read_text()) == ["a b $HOME", "--x='1'"]


def test_a_job_that_cannot_start_says_what_xmanager_does_not(tmp_path):
    """XManager wraps every trouble of its database in the same words; a directory in its place stands for a full disk."""
    code = (
        "from pathlib import Path; from infra.launch.local import run_module\n"
        f"run_module('infra.nothing', [], name='bad', log_dir=Path({str(tmp_path)!r}), state_dir=Path({str(tmp_path / 'xm')!r}))"
    )
    (tmp_path / "xm" / "xm.sqlite3").mkdir(parents=True)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr[done.stderr.rindex("LaunchError:") :]
    assert "could not be started" in last and "unable to open database file" in last
    assert "then run the same command again" in last


def test_a_secret_that_a_job_prints_is_in_neither_its_log_nor_our_output(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HF_TOKEN", "correct-horse-battery")
    (tmp_path / "leaky.py").write_text("import os; print('using', os.environ['HF_TOKEN'])")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    run_module("leaky", [], name="leaky", log_dir=tmp_path, state_dir=tmp_path / "xm")
    assert (tmp_path / "leaky-1.log").read_text() == "using [removed]\n"
    said = capfd.readouterr()
    assert "using [removed]" in said.out and "battery" not in said.out + said.err
