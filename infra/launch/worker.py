"""What a container of a cloud job runs: bring the run directory, run the module in it, send back what it commits.

    python -m infra.launch.worker --run gs://bucket/run --module model.train -- --distributed

One host: a local working copy, mirrored while it runs (commit markers last), so that a lost machine costs at most the steps
since the last checkpoint. Several hosts write one checkpoint together and need one file system: the bucket mounted at
/gcs/BUCKET. The surprising thing: SIGTERM goes to the module, which saves and ends with 75; only then is the
last state sent, and 75 is also our exit status.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from infra.errors import ReproError

WORK = "/scratch/run"
TAKEOVER_SECONDS = 300.0  # a lost machine holds its lease for two minutes and a half


def main(argv: list[str] | None = None) -> int:
    """Run the module; returns its exit status."""
    parser = argparse.ArgumentParser(description="Run a module on a run directory in a bucket.")
    parser.add_argument("--run", required=True, help="gs://bucket/path")
    parser.add_argument("--module", required=True)
    parser.add_argument("--work", default=WORK, help="local working copy")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between sends")
    parser.add_argument("args", nargs="*")
    options = parser.parse_args(argv)
    try:
        if int(os.environ.get("REPRO_HOSTS", "1")) > 1:
            mounted = Path("/gcs") / options.run.removeprefix("gs://")
            if not mounted.is_dir():
                raise ReproError(f"{mounted} is not mounted", "enable the GCS FUSE CSI driver of the cluster")
            return run(options.module, mounted, options.args)
        from infra.mirror import Mirror

        with Mirror(
            options.run, Path(options.work), "worker", every=options.every, lease_wait=TAKEOVER_SECONDS
        ) as mirror:
            return run(options.module, mirror.local, options.args)
    except ReproError as e:
        print(f"error: {e}", file=sys.stderr)
        return e.exit_code


def log_name(logs: Path) -> str:
    """`worker-0001.log`, counted up; with the host's number where several hosts share the directory."""
    host = ""
    if int(os.environ.get("REPRO_HOSTS", "1")) > 1:
        known = (os.environ.get(name) for name in ("JOB_COMPLETION_INDEX", "TPU_WORKER_ID"))
        host = f"-host{next((k for k in known if k), socket.gethostname())}"
    return f"worker-{1 + len(list(logs.glob(f'worker-*{host}.log'))):04d}{host}.log"


def run(module: str, directory: Path, args: list[str]) -> int:
    """The module as a child, its output also in RUN/logs; SIGTERM and SIGINT are passed on."""
    logs = directory / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", module, "--run", str(directory), *args]
    with (logs / log_name(logs)).open("wb") as log:
        child = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        before = {
            s: signal.signal(s, lambda number, frame: os.killpg(child.pid, number))
            for s in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            assert child.stdout is not None
            for line in child.stdout:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
                log.write(line)
                log.flush()
            return child.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
