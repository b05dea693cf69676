"""Start the reference run as its own process, watch it, and end it with its caller.

The child gets its thread count and its offline switches from the environment, because torch reads them at
import. Its own process group is killed when the caller is interrupted: a cancelled flow leaves nothing
behind. The surprising thing: progress comes from `metrics.jsonl` itself, the file the result is read from.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from evals.reference.spec import ReferenceSpec, check_possible, segments
from infra.artifacts import canonical, differences, read_json, write_json_atomic
from infra.errors import IdentityError, LaunchError
from infra.memory import allocator_environment
from infra.owner import owner_environment
from infra.progress import Progress

POLL_SECONDS = 0.5
TAIL_LINES = 15
REPOSITORY = Path(__file__).resolve().parents[2]


def run_reference(spec: ReferenceSpec, progress: Progress | None = None) -> Path:
    """Run (or go on with) the reference of `spec`; returns its `reference/` directory.

    Raises RecipeError for an impossible spec, IdentityError when the directory holds another reference,
    LaunchError with exit code and last log lines when the child fails.
    """
    check_possible(spec)
    segments(spec)
    out = Path(spec.out)
    write_spec(spec)
    progress = progress or Progress("reference", spec.steps, "steps")
    with (out / "log.txt").open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "evals.reference.trainer", "--spec", str(out / "spec.json")],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=child_environment(spec.threads),
            start_new_session=True,
        )
    try:
        status = watch(child, out / "metrics.jsonl", progress)
    except BaseException:
        stop_group(child)
        raise
    if status != 0:
        raise LaunchError(
            f"the reference run ended with exit code {status}; its last lines:\n{tail(out / 'log.txt')}",
            f"the whole log is {out / 'log.txt'}; running the stage again continues from its newest checkpoint",
        )
    progress.finish(f"{spec.steps} steps by OLMo-core")
    return out


def write_spec(spec: ReferenceSpec) -> Path:
    """Write `spec.json`, or check that the one that stands is the same reference."""
    path = Path(spec.out) / "spec.json"
    if path.is_file():
        changed = differences(read_json(path), canonical(spec))
        if changed:
            raise IdentityError(
                f"{path.parent} holds another reference run: {', '.join(changed[:6])}",
                "use a fresh run directory, or remove this one",
            )
        return path
    write_json_atomic(path, canonical(spec))
    return path


def child_environment(threads: int) -> dict[str, str]:
    """The environment of the child: threads fixed before torch starts, no network, no accelerator."""
    count = str(threads)
    path = os.pathsep.join(p for p in (str(REPOSITORY), os.environ.get("PYTHONPATH", "")) if p)
    return {
        **os.environ,
        **owner_environment(),
        **allocator_environment(),
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def watch(child: subprocess.Popen[bytes], metrics: Path, progress: Progress) -> int:
    """Follow `metrics` until `child` ends; returns its exit code."""
    size = 0
    while True:
        try:
            status: int | None = child.wait(timeout=POLL_SECONDS)
        except subprocess.TimeoutExpired:
            status = None
        if metrics.is_file() and metrics.stat().st_size != size:
            written = metrics.read_bytes()
            size = len(written)
            progress.update(written.count(b"\n"))
        if status is not None:
            return status


def stop_group(child: subprocess.Popen[bytes], patience: float = 5.0) -> None:
    """End the child's whole process group: ask, wait, then kill."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is None:
            try:
                os.killpg(child.pid, sign)
            except ProcessLookupError:
                return
            deadline = time.monotonic() + patience
            while child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, in at most 64 kB."""
    if not path.is_file():
        return "(no log)"
    with path.open("rb") as f:
        f.seek(max(0, path.stat().st_size - 65536))
        return "\n".join(f.read().decode(errors="replace").splitlines()[-lines:])
