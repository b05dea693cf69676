"""What is done to a run from outside: commands in processes of their own, and the ways to kill, starve and damage them.

Used by the crash campaign (`crash.py`, which says what is tried and what must come of it). The surprising thing: disks that are
full or read-only are real ones, mounted in a namespace of the command's own.
"""

import contextlib
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from resume import SHRUNK  # noqa: E402

RECIPE = [
    *(f for f in SHRUNK if not f.startswith("data.sequence")), "data.sequence_length=48", "evals.context=128",
    "evals.heldout_documents=4", "evals.items_per_task=2", "evals.tasks=[\"arc_easy\",\"piqa\"]", "evals.torch_documents=1",
    "evals.spot_items=1", "data.filter.enabled=true",
]  # fmt: skip


# ---------------------------------------------------------------- processes


def environment(run: Path, **extra: str) -> dict[str, str]:
    """Of a command under test: CPU, compiled programs shared between trials."""
    return {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT),
            "JAX_COMPILATION_CACHE_DIR": str(run.parent / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", **extra}  # fmt: skip


def command(run: Path, stage: str) -> list[str]:
    """`repro STAGE` of a run directory; `reproduce` is the whole chain."""
    flags = [flag for field in RECIPE for flag in ("--set", field)]
    return [sys.executable, "-m", "pipelines.cli", stage, "tiny", "--run-dir", str(run), *flags]


def start(run: Path, argv: list[str], **extra: str) -> subprocess.Popen:
    """A command in a session of its own; what it says goes to RUN.txt."""
    with open(run.with_suffix(".txt"), "a") as out:
        return subprocess.Popen(
            argv, env=environment(run, **extra), cwd=ROOT, stdout=out, stderr=out, start_new_session=True
        )


def again(run: Path, argv: list[str]) -> tuple[int, str]:
    """(exit status, what it said) of an undisturbed command."""
    done = subprocess.run(argv, env=environment(run), cwd=ROOT, capture_output=True, text=True, timeout=900)
    return done.returncode, done.stderr + done.stdout


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            fields = stat.read_text().rsplit(")", 1)[1].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    out, todo = [], [pid]
    while todo:
        found = children.get(todo.pop(), [])
        out += found
        todo += found
    return out


def kill(process: subprocess.Popen, whole_group: bool) -> None:
    """kill -9 of the command alone, or of all that it started, as when the machine dies."""
    victims = [*descendants(process.pid), process.pid] if whole_group else [process.pid]
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def left_running(run: Path, patience: float = 90.0) -> list[str]:
    """What the killed command left running, after the time it needs to save and end."""
    marks = (f"PREFECT_HOME={run.parent / '.prefect'}".encode(), str(run).encode())
    deadline, found = time.monotonic() + patience, [""]
    while found and time.monotonic() < deadline:
        time.sleep(0.5)
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                line = (folder / "cmdline").read_bytes()
                if marks[0] in (folder / "environ").read_bytes() or (
                    marks[1] in line and int(folder.name) != os.getpid()
                ):
                    found.append(line.replace(b"\0", b" ").decode()[:160])
    return found


def server_below(pid: int, process: subprocess.Popen, patience: float = 120.0) -> int:
    """The process of the Prefect server that a flow has started; 0 when the flow ended first."""
    deadline = time.monotonic() + patience
    while process.poll() is None and time.monotonic() < deadline:
        for child in descendants(pid):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ")
                if b"prefect" in line and (b"uvicorn" in line or b"server" in line):
                    return child
        time.sleep(0.05)
    return 0


# ---------------------------------------------------------------- disturbances


@contextlib.contextmanager
def clock_that_jumps(run: Path, seconds: float) -> Iterator[dict[str, str]]:
    """Environment of a process whose clock goes two days back after `seconds`, through a sitecustomize of its own."""
    folder = run.with_suffix(".clock")
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(
        "import time\n_real, _begun, _late = time.time, time.monotonic(), []\n"
        "def _time():\n"
        f"    if time.monotonic() - _begun <= {seconds}:\n        return _real()\n"
        f"    if not _late:\n        _late.append(1)\n        open({str(folder / 'seen')!r}, 'w').close()\n"
        "    return _real() - 172800\n"
        "time.time = _time\n"
    )
    yield {"PYTHONPATH": f"{folder}:{ROOT}"}
    shutil.rmtree(folder)


def jumped(run: Path) -> bool:
    """Whether a process has asked for the time after it jumped (while `clock_that_jumps` lasts)."""
    return (run.with_suffix(".clock") / "seen").exists()


def namespace(run: Path, script: str) -> list[str]:
    """A shell in a mount namespace of its own, with the run directory's place to be mounted over."""
    return ["unshare", "--map-root-user", "--mount", "sh", "-ec", script]


def namespaces_work() -> bool:
    """Whether the kernel lets this user mount in a namespace of his own."""
    try:
        return (
            subprocess.run(namespace(ROOT, "mount -t tmpfs none /mnt"), capture_output=True).returncode == 0
        )
    except FileNotFoundError:
        return False


def on_small_disk(run: Path, stage: str, free_kb: int) -> tuple[int, str]:
    """The stage on a disk with `free_kb` left: the run directory is moved onto a tmpfs and back."""
    used = sum(p.stat().st_blocks for p in run.rglob("*") if p.is_file() and not p.is_symlink()) // 2
    parked, argv = run.with_suffix(".parked"), shlex.join(command(run, stage))
    os.rename(run, parked)
    run.mkdir()
    script = (
        f"mount -t tmpfs -o size={used + free_kb}k,nr_inodes=0 none {run}; cp -a {parked}/. {run}; code=0; {argv} || code=$?; "
        f"rm -rf {parked}/*; cp -a {run}/. {parked}; exit $code"
    )
    try:
        return again(run, namespace(run, script))
    finally:
        run.rmdir()
        os.rename(parked, run)


def on_read_only(run: Path, stage: str) -> tuple[int, str]:
    """The stage on a file system that is mounted read-only."""
    script = f"mount --bind {run} {run}; mount -o remount,ro,bind {run}; {shlex.join(command(run, stage))}"
    return again(run, namespace(run, script))


def change_one_byte(run: Path, pattern: str, rng: random.Random) -> Path:
    """One byte of the largest file of a kind."""
    path = max((p for p in run.glob(pattern) if p.is_file()), key=lambda p: p.stat().st_size)
    raw = bytearray(path.read_bytes())
    raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(raw))
    return path
