"""Launch a Python module as its own process through XManager's local executor; no docker, no absl app.

Surprising things, found by running XManager 0.8.5: a local job runs under `sh -c` in a session of its own, so
`terminate()` kills only the shell and we signal the process group; a failure is raised twice (from the wait
and from the experiment's exit); its database must be named through a YAML file before flags are parsed.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.errors import LaunchError
from infra.owner import owner_environment

TAIL_LINES = 15


def _parse_flags(state_dir: Path) -> None:
    from absl import flags

    state_dir.mkdir(parents=True, exist_ok=True)
    config = state_dir / "xm_db.yaml"
    config.write_text(
        "sql_connector: sqlite\nsql_connection_settings:\n  backend: sqlite\n"
        f"  db_name: {state_dir.resolve() / 'xm.sqlite3'}\n"
    )
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["repro", f"--xm_db_yaml_config_path={config.resolve()}"], known_only=True)


async def _run(argv: Sequence[str], title: str, name: str, env: Mapping[str, str], log_dir: Path) -> int:
    from xmanager import xm, xm_local
    from xmanager.xm_local import handles

    handles.BinaryHandle.log_dir = str(log_dir)
    work_unit: Any = None
    failure: Exception | None = None
    try:
        async with xm_local.create_experiment(title) as experiment:
            [executable] = experiment.package(
                [xm.Packageable(xm.Binary(path=sys.executable), xm_local.Local.Spec())]
            )
            job = xm.Job(
                executable,
                xm_local.Local(),
                name=name,
                args=xm.SequentialArgs.from_collection(list(argv)),
                env_vars=dict(env),
            )
            work_unit = await experiment.add(job)
            try:
                await work_unit.wait_until_complete()
            except xm.ExperimentUnitFailedError as e:
                failure = e
            except asyncio.CancelledError:
                for handle in work_unit._local_execution_handles:
                    _stop_group(handle.process.pid)
                raise
    except RuntimeError as e:
        failure = failure or e
    handles_ = work_unit._local_execution_handles if work_unit is not None else []
    codes = [h.process.returncode for h in handles_]
    if codes and all(c is not None for c in codes):
        return max(codes, key=abs)
    raise LaunchError(f"job {name} could not be started: {failure}")


def _forget_finished() -> None:
    """Drop ended jobs from XManager's list, or it says at exit that they may still be running."""
    from xmanager.xm_local import execution

    with execution._local_jobs_lock:
        execution._local_jobs[:] = [h for h in execution._local_jobs if h.process.returncode is None]


def _stop_group(pid: int, grace_seconds: float = 10.0) -> None:
    """SIGTERM to the job's process group, SIGKILL after `grace_seconds`."""
    try:
        os.killpg(pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        while time.monotonic() < deadline:
            os.killpg(pid, 0)
            time.sleep(0.1)
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


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

    Output goes to this process's stdout and to `log_dir/<name>-<attempt>.log` (XManager truncates a log of
    the same name). `accept` are exit codes that are not failures. Raises LaunchError with the exit code and
    the last log lines otherwise.
    """
    _parse_flags(state_dir)
    log_dir.mkdir(parents=True, exist_ok=True)
    attempt = 1 + len(list(log_dir.glob(f"{name}-*.log")))
    log = log_dir / f"{name}-{attempt}.log"
    environment = {"PYTHONUNBUFFERED": "1", **owner_environment(), **(env or {})}
    try:
        code = asyncio.run(_run(["-m", module, *args], f"repro {name}", log.stem, environment, log_dir))
    finally:
        _forget_finished()
    if code not in accept:
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        tail = lines[-TAIL_LINES:]
        raise LaunchError(
            f"job {name} ended with exit code {code}; last lines of {log}:\n  " + "\n  ".join(tail),
            "mend the cause and run the same command again: it continues from the last committed checkpoint",
        )
    return code
