"""Launch a Python module as its own process through XManager's local executor; no docker, no absl app.

    code = run_module("model.train", ["--run", "runs/tiny"], name="train", log_dir=…, state_dir=…)   # to its end
    job = LocalJob("model.train", […], name="train", log_dir=…, state_dir=…); job.wait(); job.cancel()

Surprising things, found by running XManager 0.8.5: a local job runs under `sh -c` in a session of its own, so
`terminate()` kills only the shell and we signal the process group; a failure is raised twice (from the wait
and from the experiment's exit); its database must be named through a YAML file before flags are parsed.
"""

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.errors import LaunchError
from infra.launch.job import Status, failure, status_of
from infra.lease import Lease
from infra.owner import owner_environment
from infra.redact import redact

GRACE_SECONDS = 10.0
AGAIN = "free disk space or mend what is named, then run the same command again"
_live: set["LocalJob"] = set()
_quiet_names: set[str] = set()


def parse_flags(state_dir: Path) -> None:
    """Name XManager's database, once per process; the data loader may have marked the flags as parsed before."""
    from absl import flags
    from xmanager import xm_flags

    state_dir.mkdir(parents=True, exist_ok=True)
    config = state_dir / "xm_db.yaml"
    config.write_text(
        "sql_connector: sqlite\nsql_connection_settings:\n  backend: sqlite\n"
        f"  db_name: {state_dir.resolve() / 'xm.sqlite3'}\n"
    )
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["repro"], known_only=True)
    if xm_flags.DB_YAML_CONFIG_PATH.value is None:
        flags.FLAGS[xm_flags.DB_YAML_CONFIG_PATH.name].value = str(config.resolve())


def _print_line(name: str, line: str) -> None:
    """What XManager calls for every line of a job."""
    if name not in _quiet_names:
        print(f"[{name}] {redact(line.rstrip())}", flush=True)


def _log_line(path: str, line: str) -> None:
    """What XManager calls to append a line to the log of a job."""
    with open(path, "a") as log:
        log.write(redact(line))


def starting(state_dir: Path) -> Lease:
    """Held while a job is started: XManager migrates its database then, and two at once break it."""
    return Lease(state_dir / ".starting", "starting a job", wait_seconds=120)


def _forget_finished() -> None:
    """Drop ended jobs from XManager's list, or it says at exit that they may still be running."""
    from xmanager.xm_local import execution

    with execution._local_jobs_lock:
        execution._local_jobs[:] = [h for h in execution._local_jobs if h.process.returncode is None]


def _members(group: int) -> list[int]:
    """Processes of a group other than its leader, which is XManager's shell."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int(stat.read_text().rsplit(")", 1)[1].split()[2]) == group and int(stat.parent.name) != group:
                found.append(int(stat.parent.name))
    return found


def stop_group(pid: int, grace_seconds: float = GRACE_SECONDS) -> None:
    """SIGTERM to the processes of the group, SIGKILL after `grace_seconds`; returns when it is gone.

    The shell is left out, so that it hands on the exit code of the job.
    """
    with contextlib.suppress(ProcessLookupError):
        members = _members(pid)
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGTERM)
        if not members:
            os.killpg(pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        while time.monotonic() < deadline:
            os.killpg(pid, 0)
            time.sleep(0.05)
        os.killpg(pid, signal.SIGKILL)


def stop_all() -> None:
    """Stop every job of this process that still runs; the trainer saves first."""
    for job in list(_live):
        job.cancel()


def _causes(error: BaseException | None) -> str:
    """The first line of an error and of what caused it: XManager says that its database failed, and SQLite why."""
    lines: list[str] = []
    while error is not None:
        line = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        if not any(line in said for said in lines):
            lines.append(line)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return ", because: ".join(lines)


class LocalJob:
    """A module in a process group of its own, watched by a thread of ours. Started on construction.

    Output goes to this process's stdout and to `log_dir/<name>-<attempt>.log` (XManager truncates a log of the
    same name). `quiet`: only to the log.
    """

    def __init__(
        self,
        module: str,
        args: Sequence[str],
        *,
        name: str,
        log_dir: Path,
        state_dir: Path,
        env: Mapping[str, str] | None = None,
        quiet: bool = False,
    ):
        parse_flags(state_dir)
        log_dir.mkdir(parents=True, exist_ok=True)
        attempt = 1 + len(list(log_dir.glob(f"{name}-*.log")))
        self.name, self.log = name, log_dir / f"{name}-{attempt}.log"
        self._state_dir, self._quiet = state_dir, quiet
        self._argv = ["-m", module, *args]
        self._env = {"PYTHONUNBUFFERED": "1", **owner_environment(), **(env or {})}
        self._pid = 0
        self._code: int | None = None
        self._cancelled = False
        self._error: BaseException | None = None
        self._started, self._ended = threading.Event(), threading.Event()
        _live.add(self)
        self._thread = threading.Thread(target=self._watch, name=f"job-{name}", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        try:
            self._code = asyncio.run(self._run())
        except BaseException as e:
            self._error = e
        finally:
            _live.discard(self)
            _forget_finished()
            self._started.set()
            self._ended.set()

    async def _run(self) -> int:
        from xmanager import xm, xm_local
        from xmanager.xm_local import handles

        handles.BinaryHandle.log_dir = str(self.log.parent)
        handles._print_chunk, handles._log_chunk = _print_line, _log_line
        if self._quiet:
            _quiet_names.add(self.log.stem)
        work_unit: Any = None
        failed: Exception | None = None
        start = contextlib.ExitStack()
        try:
            start.enter_context(starting(self._state_dir))
            async with xm_local.create_experiment(f"repro {self.name}") as experiment:
                experiment._wait_for_local_jobs = lambda *_: None  # we wait ourselves, and say so ourselves
                [executable] = experiment.package(
                    [xm.Packageable(xm.Binary(path=sys.executable), xm_local.Local.Spec())]
                )
                job = xm.Job(
                    executable,
                    xm_local.Local(),
                    name=self.log.stem,
                    args=xm.SequentialArgs.from_collection(self._argv),
                    env_vars=self._env,
                )
                work_unit = await experiment.add(job)
                self._pid = work_unit._local_execution_handles[0].process.pid
                start.close()
                self._started.set()
                try:
                    await work_unit.wait_until_complete()
                except xm.ExperimentUnitFailedError as e:
                    failed = e
        except RuntimeError as e:
            failed = failed or e
        finally:
            start.close()
        codes = (
            [h.process.returncode for h in work_unit._local_execution_handles]
            if work_unit is not None
            else []
        )
        if codes and all(c is not None for c in codes):
            return max(codes, key=abs)
        raise LaunchError(f"job {self.name} could not be started: {_causes(failed)}", AGAIN)

    @property
    def exit_code(self) -> int | None:
        return self._code

    @property
    def pid(self) -> int:
        """Process group of the job; waits until it has started."""
        self._started.wait()
        return self._pid

    def status(self) -> Status:
        if not self._ended.is_set():
            return Status.RUNNING
        if self._error is not None:
            return Status.FAILED
        if self._cancelled:
            return Status.CANCELLED
        return status_of(int(self._code or 0))

    def wait(self, timeout: float | None = None) -> Status:
        """Block to the end. An interrupt of the caller stops the job before it goes on."""
        try:
            if not self._ended.wait(timeout):
                raise TimeoutError(f"job {self.name} still runs after {timeout:.0f} s")
        except TimeoutError:
            raise
        except BaseException:
            self.cancel()
            raise
        if isinstance(self._error, LaunchError):
            raise self._error
        if self._error is not None:
            what = "is no longer watched" if self._pid else "could not be started"
            raise LaunchError(f"job {self.name} {what}: {_causes(self._error)}", AGAIN) from self._error
        return self.status()

    def logs(self, lines: int = 100) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()[-lines:] if self.log.exists() else []

    def cancel(self) -> None:
        """SIGTERM to the whole group (the trainer saves and ends with 75), SIGKILL after 10 s."""
        self._started.wait()
        if not self._ended.is_set() and self._pid:
            self._cancelled = True
            stop_group(self._pid)
            self._ended.wait(5)


def run_module(
    module: str,
    args: Sequence[str],
    *,
    name: str,
    log_dir: Path,
    state_dir: Path,
    env: Mapping[str, str] | None = None,
    accept: Sequence[int] = (0,),
) -> int:
    """Run `python -m module args...` to its end and return its exit code.

    `accept` are exit codes that are not failures. Raises LaunchError with the exit code and the last log lines
    otherwise. An interrupt (Ctrl-C, a cancelled flow) stops the job's whole process group first.
    """
    job = LocalJob(module, args, name=name, log_dir=log_dir, state_dir=state_dir, env=env)
    status = job.wait()
    code = int(job.exit_code or 0)
    if code not in accept:
        if status == Status.CANCELLED:
            status = Status.FAILED
        error = failure(job, status)
        raise LaunchError(
            error.what.replace(f"job {name} failed with", f"job {name} ended with").replace(
                "last lines:", f"last lines of {job.log}:"
            ),
            error.remedy,
        )
    return code
