"""`repro serve`: a local Prefect server with the deployments, a worker, and the run directory's files; Ctrl-C ends it all.

    repro serve tiny --run-dir runs/tiny           # UI at http://127.0.0.1:4200, the landmarks of runs/tiny watched
    prefect deployment run train/local -p run_dir=runs/tiny

State lies in `.prefect/` of the directory it is started in. With PREFECT_API_URL set, that server is used and none is started.
The surprising thing: a kill -9 of server or worker is repaired here (started again), and a kill -9 of this process ends
them too, because the kernel tells children of their parent's death.
"""

import argparse
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra.artifacts import write_json_atomic
from infra.errors import LaunchError, LeaseError, RecipeError
from infra.lease import Lease
from infra.owner import owner_environment, start_time
from infra.redact import redact
from pipelines.flows import healthy
from pipelines.recipe import Recipe
from pipelines.run_recipe import recipe_for, stored
from pipelines.serve_files import serve_files

POOL = "repro"
HOST = "127.0.0.1"
START_SECONDS = 120.0
LOOK_SECONDS = 1.0
SWEEP_SECONDS = 20.0
GRACE_SECONDS = 20.0


def register(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommand; `add` is the command line's own helper."""
    one = add("serve", "Prefect server, deployments and worker on this machine, until Ctrl-C", command)
    one.add_argument(
        "--port", type=_port, default=4200, help="port of the UI; the next one shows report files"
    )
    one.add_argument("--limit", type=_positive, default=3, help="flow runs at the same time")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65534:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 1 to 65534 (the next one shows files)")
    return int(text)


def require_cron(cron: str) -> None:
    """Refuse a schedule that Prefect would refuse, before a server is started for it."""
    from prefect.client.schemas.schedules import CronSchedule

    try:
        CronSchedule(cron=cron)
    except ValueError:
        raise RecipeError(
            f"launch.watch.cron {cron!r} is no schedule",
            "five fields, for instance '*/10 * * * *'; or '' for the interval",
        ) from None


def environment(home: Path, port: int, files_root: Path) -> dict[str, str]:
    """Environment of server, worker and flow runs. An existing PREFECT_API_URL is kept."""
    home = home.resolve()
    ours = {
        "PREFECT_HOME": str(home),
        "PREFECT_LOCAL_STORAGE_PATH": str(home / "results"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home / 'prefect.db'}",
        "PREFECT_SERVER_UI_API_URL": f"http://{HOST}:{port}/api",
        "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(home / "ui"),
        "PREFECT_LOGGING_LEVEL": "INFO",
        "PREFECT_LOGGING_TO_API_ENABLED": "true",
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
        "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "REPRO_FILES_URL": f"http://{HOST}:{port + 1}",
        "REPRO_FILES_ROOT": str(files_root.resolve()),
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
        ),
        **owner_environment(),
    }
    return {
        **os.environ,
        **ours,
        "PREFECT_API_URL": os.environ.get("PREFECT_API_URL", "").rstrip("/") or f"http://{HOST}:{port}/api",
    }


def _die_with_parent() -> None:
    """In the child: SIGTERM when the parent is gone, also after its kill -9 (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


class Child:
    """A process in a group of its own that is started again when it dies."""

    def __init__(self, name: str, argv: list[str], env: dict[str, str], log: Path):
        self.name, self.argv, self.env, self.log = name, argv, env, log
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.argv, env=self.env, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True, preexec_fn=_die_with_parent,
            )  # fmt: skip
        self.starts += 1

    def keep(self) -> bool:
        """Start it again if it has died; whether it had."""
        if self.process is not None and self.process.poll() is None:
            return False
        self.start()
        return True

    def note(self, state: Path) -> None:
        """Write down which process it is, so that the next `repro serve` knows it after our kill -9."""
        assert self.process is not None
        pid = self.process.pid
        known = json.loads(state.read_text()) if state.exists() else {}
        write_json_atomic(state, {**known, self.name: [pid, start_time(pid)]})

    def stop(self) -> None:
        """SIGTERM to the process, then SIGKILL to its group."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def end_left_server(state: Path) -> None:
    """End the server that a killed `repro serve` of this directory left behind; it may still hold the port."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        pid, started = json.loads(state.read_text())["server"]
        deadline = time.monotonic() + GRACE_SECONDS
        while started and start_time(pid) == started and _state_of(pid) != "Z":
            late = time.monotonic() > deadline
            os.killpg(pid, signal.SIGKILL if late else signal.SIGTERM)
            time.sleep(0.2)
    state.unlink(missing_ok=True)


def _state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def require_free(port: int) -> None:
    """Refuse a port that another program holds: a server that was not named is not taken over."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            raise LaunchError(
                f"port {port} is taken by another server",
                "choose another with --port; or set PREFECT_API_URL to use that server",
            ) from None


def descendants(pid: int) -> list[int]:
    """All processes below one, nearest first."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents.setdefault(int(stat.read_text().rsplit(")", 1)[1].split()[1]), []).append(
                int(stat.parent.name)
            )
    found, todo = [], [pid]
    while todo:
        children = parents.get(todo.pop(0), [])
        found += children
        todo += children
    return found


def command(args: argparse.Namespace) -> int:
    """Run `repro serve`."""
    home = Path(".prefect")
    state = home / "serve.json"
    remote = str(args.run_dir).startswith("gs://")
    run = args.run_dir if remote else Path(args.run_dir or f"runs/{args.recipe}").resolve()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(Lease(home / "serve.lease", "repro serve"))
        except LeaseError:
            if not state.exists():
                raise
            return _already(state, str(run))
        return _serve(args, home, state, run)


def _already(state: Path, run: str) -> int:
    """The answer of a second `repro serve` in a directory. Raises LaunchError if the first one serves another run."""
    known: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(state.read_text())
    at = known.get("ui") or "it is still starting, its own window will show the address"
    if known.get("run", run) != run:
        raise LaunchError(
            f"{known['run']} is already served from this directory ({at}), by process {known.get('pid')}",
            f"end that one first: Ctrl-C, or `kill {known.get('pid')}`; or start from another directory, with another --port",
        )
    print(f"already running: {at}")
    return 0


def _serve(args: argparse.Namespace, home: Path, state: Path, run: Path | str) -> int:
    recipe = recipe_for(args.recipe, args.overrides, stored(run), run)
    if recipe.launch.watch.cron:
        require_cron(recipe.launch.watch.cron)
    files_root = run.parent if isinstance(run, Path) else Path("runs").resolve()
    files_root.mkdir(parents=True, exist_ok=True)
    named = bool(os.environ.get("PREFECT_API_URL"))  # by the person; otherwise the server is ours to start
    env = environment(home, args.port, files_root)
    os.environ.update(env)
    api = env["PREFECT_API_URL"]
    children: list[Child] = []
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    python = [sys.executable, "-m", "prefect"]
    files = serve_files(files_root, HOST, args.port + 1)
    try:
        if not named:
            end_left_server(state)
            require_free(args.port)
        elif not healthy(api):
            raise LaunchError(
                f"no Prefect server answers at {redact(api)}", "start it, or unset PREFECT_API_URL"
            )
        write_json_atomic(state, {"run": str(run), "pid": os.getpid()})
        if not named:
            server = Child(
                "server",
                [*python, "server", "start", "--host", HOST, "--port", str(args.port)],
                env,
                home / "server.log",
            )
            children.append(server)
            server.start()
            server.note(state)
            _wait_healthy(api, server, stop)
        if stop.is_set():
            return 0
        names = _register(args, recipe, run)
        worker = Child(
            "worker",
            [*python, "worker", "start", "--pool", POOL, "--type", "process", "--name", "repro"],
            env,
            home / "worker.log",
        )
        children.append(worker)
        worker.start()
        ui = redact(api.removesuffix("/api"))
        known = json.loads(state.read_text()) if state.exists() else {}
        write_json_atomic(state, {**known, "ui": ui, "deployments": names})
        print(f"Prefect UI: {ui}\n{len(names)} deployments: {', '.join(names)}")
        print(
            f"report files: {env['REPRO_FILES_URL']}"
            if files
            else f"port {args.port + 1} is taken: no report files"
        )
        print(
            f"for the prefect command: export PREFECT_API_URL={redact(api)}\nCtrl-C ends server, worker and running flows",
            flush=True,
        )
        _keep(children, stop, state)
        return 0
    finally:
        _end(children)
        if files is not None:
            files.shutdown()
        state.unlink(missing_ok=True)


def _wait_healthy(api: str, server: Child, stop: threading.Event) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not healthy(api) and not stop.is_set():
        if server.process is not None and server.process.poll() is not None:
            tail = server.log.read_text(errors="replace").splitlines()[-8:]
            raise LaunchError(
                "the Prefect server ended:\n  " + "\n  ".join(tail),
                "is the port taken? --port chooses another",
            )
        if time.monotonic() > deadline:
            raise LaunchError(
                f"the Prefect server does not answer after {START_SECONDS:.0f} s", f"see {server.log}"
            )
        stop.wait(0.3)


def _register(args: argparse.Namespace, recipe: Recipe, run: Path | str) -> list[str]:
    """Deployments with this recipe and run as defaults; the schedule is the recipe's."""
    from pipelines import deployments

    watch = recipe.launch.watch
    schedule: dict[str, Any] = {"cron": watch.cron} if watch.cron else {"interval": watch.interval_seconds}
    deployments.work_pool(POOL, args.limit)
    swept = deployments.sweep(Path(".prefect"))
    if swept:
        print(f"marked as crashed, their processes are gone: {', '.join(swept)}")
    defaults = {"recipe": recipe.name, "run_dir": str(run), "overrides": list(args.overrides)}
    return deployments.register(POOL, Path.cwd(), defaults, schedule)


def _keep(children: list[Child], stop: threading.Event, state: Path) -> None:
    """Until asked to end: start again what has died, and clear flow runs whose process is gone."""
    from pipelines.deployments import sweep

    swept = time.monotonic()
    while not stop.wait(LOOK_SECONDS):
        for child in children:
            if child.keep():
                if child.name == "server":
                    child.note(state)
                print(f"{child.name} had died and was started again", flush=True)
        if time.monotonic() - swept > SWEEP_SECONDS:
            swept = time.monotonic()
            try:
                for name in sweep(Path(".prefect")):
                    print(f"flow run {name} is marked as crashed: its process is gone", flush=True)
            except Exception as e:
                print(f"could not look for crashed flow runs: {type(e).__name__}", flush=True)


def _end(children: list[Child]) -> None:
    """Flows first (their training saves), then the worker, then the server."""
    for child in reversed(children):
        if child.name == "worker" and child.process is not None:
            flows = descendants(child.process.pid)
            for pid in flows:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + GRACE_SECONDS
            while any(Path(f"/proc/{p}").exists() for p in flows) and time.monotonic() < deadline:
                time.sleep(0.1)
            for pid in flows:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        child.stop()
