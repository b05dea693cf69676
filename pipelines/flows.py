"""The chain as a Prefect flow. Prefect shows and schedules; what is done is decided by the stage records.

The environment must be set before Prefect is imported (its settings are read once), so `run_reproduce` is the
entry point and imports happen inside. The surprising thing: Prefect's own result cache is off
everywhere; a cache hit there would not check that the files still stand. Identity has one key function,
`infra.artifacts.fingerprint`, over what `pipelines.stages.identity` lists.
"""

import contextlib
import contextvars
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from infra.errors import LaunchError
from infra.memory import allocator_environment
from infra.owner import end_with_us
from pipelines.recipe import Recipe
from pipelines.run_recipe import with_launch
from pipelines.stages import Outcome, chain, read_recipe, run_stage

PROGRESS_SECONDS = 5.0


def prefect_environment(home: Path) -> None:
    """Point Prefect at a home of our own and keep it quiet and local; existing settings win."""
    defaults = {
        "PREFECT_HOME": str(home.resolve()),
        "PREFECT_LOCAL_STORAGE_PATH": str(home.resolve() / "results"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "PREFECT_LOGGING_TO_API_ENABLED": "false",
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
        "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
    }
    for key, value in defaults.items():
        os.environ.setdefault(key, value)
    if not os.environ.get("PREFECT_API_URL"):
        os.environ.pop("PREFECT_API_URL", None)  # an empty value breaks Prefect's event worker


def stage_task(name: str, recipe: Recipe, run: Path) -> Outcome:
    """One stage as a Prefect task, in this thread, so that a cancelled flow interrupts it."""
    from prefect import task
    from prefect.cache_policies import NO_CACHE

    @task(name=name, cache_policy=NO_CACHE, persist_result=False)
    def step() -> Outcome:
        return run_stage(name, recipe, run)

    return step()


def run_chain(recipe: Recipe, run: Path) -> list[Outcome]:
    """Every stage in order, inside a flow. While training runs, landmarks are evaluated as they are committed.

    However the flow ends (done, failed, cancelled, killed politely), no job of ours outlives it.
    """
    from infra.launch.local import LocalJob, stop_all

    follower: LocalJob | None = None

    def one(name: str) -> Outcome:
        nonlocal follower
        if name == "train" and recipe.launch.watch.while_training and not _made(run, "train"):
            follower = LocalJob(
                "pipelines.landmarks", ["--run", str(run), "--follow", "--nice", "10", "--set", f"launch={recipe.launch.model_dump_json()}"], name="landmarks", quiet=True,
                log_dir=run / "logs", state_dir=run / ".xmanager",
                env={"JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"), "OMP_NUM_THREADS": str(recipe.launch.threads), **allocator_environment()},
            )  # fmt: skip
        if name == "evaluate" and follower is not None:
            follower.wait()
        return stage_task(name, recipe, run)

    try:
        with publishing(run, recipe):
            return chain(recipe, run, one)
    finally:
        stop_all()


def _made(run: Path, stage: str) -> bool:
    return (run / "stages" / f"{stage}.json").exists()


@contextlib.contextmanager
def publishing(run: Path, recipe: Recipe) -> Iterator[None]:
    """Keep the artifacts of a run fresh while a stage blocks the flow, and once more at the end."""
    from pipelines import artifacts

    ended, context = threading.Event(), contextvars.copy_context()

    def beat() -> None:
        while not ended.wait(PROGRESS_SECONDS):
            context.run(artifacts.publish, run, recipe)

    thread = threading.Thread(target=beat, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(PROGRESS_SECONDS)
        artifacts.publish(run, recipe)


def build_flow(overrides: Sequence[str] = ()) -> Any:
    """The `reproduce` flow over a run directory that is already open and leased, with the launch overrides of this command."""
    from prefect import flow

    @flow(name="reproduce", validate_parameters=False, persist_result=False)
    def reproduce(run_dir: str) -> list[Outcome]:
        """Run every stage of `run_dir`, reusing what stands."""
        run = Path(run_dir)
        return run_chain(with_launch(read_recipe(run), overrides), run)

    return reproduce


def healthy(api: str) -> bool:
    """Whether a Prefect API answers at this URL; one that first asks who we are (Prefect Cloud) does."""
    try:
        with urllib.request.urlopen(f"{api}/health", timeout=2) as answer:
            return answer.status == 200
    except urllib.error.HTTPError as e:
        return e.code in (401, 403)
    except (OSError, ValueError):
        return False


def start_server() -> None:
    """Start the server that Prefect's client of this process will use; it ends with us, also when we are killed."""
    from prefect.server.api.server import SubprocessASGIServer
    from prefect.settings import get_current_settings

    class Server(SubprocessASGIServer):
        """Prefect's own temporary server, in a session of its own.

        Ctrl-C in a terminal reaches all of our process group; a flow whose server dies of it never ends, it waits to
        report that it was interrupted.
        """

        def _run_uvicorn_command(self) -> subprocess.Popen[Any]:
            alone = {
                "PREFECT_UI_ENABLED": "0",
                "PREFECT__SERVER_EPHEMERAL": "1",
                "PREFECT__SERVER_FINAL": "1",
            }
            settings = get_current_settings().to_environment_variables(exclude_unset=True)
            return subprocess.Popen(
                [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app", "--lifespan", "on",
                 "--host", "127.0.0.1", "--port", str(self.port), "--log-level", "error"],
                env={**os.environ, **alone, **settings}, start_new_session=True,
            )  # fmt: skip

    end_with_us("prefect.server.api.server")
    try:
        Server().start()
    except RuntimeError as e:
        raise LaunchError(
            f"the Prefect server of this run did not start: {e}",
            "run the same command again; `repro reproduce --no-server` does without it",
        ) from None


def run_reproduce(run: Path, overrides: Sequence[str] = ()) -> list[Outcome]:
    """Run the whole chain of a run directory as a Prefect flow, with a server of its own unless one is named."""
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")  # a failing stage is said once, by `repro`
    prefect_environment(run.parent / ".prefect")
    api = os.environ.get("PREFECT_API_URL")
    if not api:
        start_server()
    elif not healthy(api):
        raise LaunchError(f"no Prefect server answers at {api}", "start it, or unset PREFECT_API_URL")
    return build_flow(overrides)(str(run))
