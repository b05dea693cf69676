"""`RUN_DIR=gs://…`: the real command against a Cloud Storage emulator over HTTP; killed, moved to another machine, resumed."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

# A real server, worker and training: minutes of work, so behind `make proofs`.
pytestmark = pytest.mark.slow_proof

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def emulator():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [
        str(Path(sys.executable).parent / "gcp-storage-emulator"),
        "start",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "-M",
        "-q",
        "--default-bucket",
        "bkt",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    before = os.environ.get("STORAGE_EMULATOR_HOST")
    os.environ["STORAGE_EMULATOR_HOST"] = f"http://127.0.0.1:{port}"
    yield f"http://127.0.0.1:{port}"
    if before is None:
        del os.environ["STORAGE_EMULATOR_HOST"]
    process.terminate()
    process.wait()


def repro(machine: Path, *arguments: str) -> subprocess.Popen:
    """The command, started in the directory of a machine."""
    machine.mkdir(exist_ok=True)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, "-m", "pipelines.cli", *arguments, "--run-dir", "gs://bkt/run"],
        cwd=machine, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def ended(process: subprocess.Popen) -> str:
    out, _ = process.communicate(timeout=500)
    assert process.returncode == 0, out[-3000:]
    return out


def test_training_in_a_bucket_survives_kill_9_and_a_change_of_machine(emulator, gated_run, tmp_path):
    from infra.mirror import Mirror, newest_step
    from infra.storage import open_url

    shutil.copytree(gated_run, tmp_path / "laptop")
    with Mirror("gs://bkt/run", tmp_path / "laptop", "bringing it there", every=0):
        pass
    status = ended(repro(tmp_path / "a", "status"))
    assert status.count("done in") == 4
    first = repro(tmp_path / "a", "train", "tiny")
    deadline = time.monotonic() + 300
    while newest_step("gs://bkt/run") < 4:
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.3)
    first.send_signal(signal.SIGKILL)
    first.wait()
    stands = newest_step("gs://bkt/run")
    assert 4 <= stands < 14
    out = ended(repro(tmp_path / "b", "train", "tiny"))
    assert (
        f"resuming from {tmp_path}/b/runs/.gs/bkt/run/checkpoints/step{stands}" in out
        or f"step{stands}" in out
    )
    assert newest_step("gs://bkt/run") == 14
    bucket, prefix = open_url("gs://bkt/run")
    log = bucket.read_bytes(f"{prefix}train/metrics.jsonl")[0].decode().splitlines()
    assert [json.loads(x)["step"] for x in log] == list(range(1, 15))
    record = json.loads(bucket.read_bytes(f"{prefix}stages/train.json")[0])
    there = bucket.list(prefix)
    assert all(there[prefix + name].size == facts["bytes"] for name, facts in record["outputs"].items())
    assert not [n for n in there if "/." in n.removeprefix(prefix)], (
        "leases are given back, half-written files never sent"
    )
    again = ended(repro(tmp_path / "b", "train", "tiny"))
    assert "reused" in again
