"""What `repro serve` registers: `reproduce`, one deployment per stage, and `landmarks` on a schedule.

Prefect's worker imports this file by path, one process per flow run; the parameters of each flow are its form in the UI.
The surprising thing: an error a person can act on fails the flow run with its two sentences and nothing is
retried by Prefect; trying again is the person's or the schedule's decision, and what was committed is reused.
"""

import contextlib
import io
import os
import threading
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from pydantic import Field

from infra.lease import Lease
from infra.owner import watch_owner
from pipelines import artifacts, flows, landmarks, remote
from pipelines.recipe import Recipe, load_recipe, recipe_names
from pipelines.run_recipe import launch_only, recipe_for, stored
from pipelines.stages import BY_NAME, open_run, read_recipe, redo_from, verdict_of

Overrides = Annotated[list[str], Field(description="field=value, for instance train.steps=40")]
RecipeName = StrEnum("RecipeName", {n: n for n in recipe_names()})  # type: ignore[misc]
DEFAULT = RecipeName("tiny")
STAGE_DEPLOYMENTS = (
    "tokenize",
    "order",
    "init",
    "gate",
    "reference",
    "train",
    "convert",
    "parity",
    "evaluate",
    "report",
)
SCHEDULED = "landmarks"


def _open(
    recipe: str, run_dir: str, overrides: list[str], stack: ExitStack, what: str, fresh: bool = False
) -> tuple[Recipe, Path]:
    """The recipe and the leased local directory of a run; gs:// runs are mirrored while the stack is open."""
    watch_owner()
    run = stack.enter_context(remote.local_run(run_dir or f"runs/{recipe}", what))
    made = load_recipe(recipe, overrides) if fresh else recipe_for(recipe, overrides, stored(run), run)
    open_run(made, run, fresh=fresh)
    stack.enter_context(Lease(run / ".lease", what))
    return made, run


@flow(name="reproduce", persist_result=False)
def reproduce(
    recipe: RecipeName = DEFAULT,
    run_dir: str = "",
    overrides: Overrides = [],  # noqa: B006
    fresh: bool = False,
) -> str:
    """The whole chain, ending with a verdict. What stands is reused; `fresh` deletes the run first."""
    with ExitStack() as stack:
        made, run = _open(str(recipe), run_dir, overrides, stack, "prefect reproduce", fresh)
        outcomes = flows.run_chain(made, run)
        verdict = verdict_of(run)["overall"]
        get_run_logger().info(
            "%s; made: %s", verdict, ", ".join(o.stage for o in outcomes if not o.reused) or "nothing"
        )
    return verdict


def _stage_flow(name: str) -> Any:
    def stage(
        recipe: RecipeName = DEFAULT,
        run_dir: str = "",
        overrides: Overrides = [],  # noqa: B006
        redo: bool = False,
    ) -> str:
        from infra.launch.local import stop_all

        with ExitStack() as stack:
            made, run = _open(str(recipe), run_dir, overrides, stack, f"prefect {name}")
            if redo:
                redo_from(name, run)
            try:
                with flows.publishing(run, made):
                    outcome = flows.stage_task(name, made, run)
            except BaseException:
                stop_all()
                raise
        get_run_logger().info(
            "%s %s in %.1f s", name, "reused" if outcome.reused else "made", outcome.seconds
        )
        return outcome.digest

    stage.__name__ = stage.__qualname__ = name
    stage.__doc__ = f"One stage: {BY_NAME[name].does}. `redo` makes it and all after it again."
    return flow(name=name, persist_result=False)(stage)


tokenize, order, init, gate, reference, train, convert, parity, evaluate, report = map(
    _stage_flow, STAGE_DEPLOYMENTS
)


@flow(name=SCHEDULED, persist_result=False)
def watch(
    run_dir: str = "runs/tiny",
    overrides: Overrides = [],  # noqa: B006
) -> dict[str, str]:
    """Find landmarks that are committed and not evaluated, evaluate each once, refresh the report. Overrides: launch.* only."""
    from prefect import task
    from prefect.cache_policies import NO_CACHE

    watch_owner()
    log = get_run_logger()

    def many(target: landmarks.Watched, recipe: Recipe, steps: list[int]) -> list[str]:
        slots = threading.Semaphore(recipe.launch.watch.concurrency)

        def evaluate_landmark(step: int) -> str:
            with slots:
                return landmarks.evaluate_landmark(target, recipe, step, say=log.info)

        waiting = [
            task(name=f"landmark-{s}", cache_policy=NO_CACHE, persist_result=False)(evaluate_landmark).submit(
                s
            )
            for s in steps
        ]
        return [w.result() for w in waiting]

    with landmarks.watched(run_dir) as target:
        found = landmarks.tick(target, say=log.info, many=many, overrides=overrides)
        if found:
            artifacts.publish(target.run, read_recipe(target.run))
    for m in found:
        log.info("step %s: %s %s", m.step, m.state, m.detail)
    failed = [m.step for m in found if m.state == "failed"]
    if failed:
        log.error("landmarks given up: %s; delete RUN/landmarks/step<k>.json to try again", failed)
    return {str(m.step): m.state for m in found}


def register(pool: str, root: Path, defaults: dict[str, Any], schedule: dict[str, Any]) -> list[str]:
    """Create or renew the deployments in the server at PREFECT_API_URL; returns their names."""
    watched = {"run_dir": defaults["run_dir"], "overrides": launch_only(defaults["overrides"])}
    here = Path(__file__).resolve()
    source = here.parents[1]
    made = []
    for attribute in ("reproduce", *STAGE_DEPLOYMENTS, "watch"):
        entry = f"{here.relative_to(source).as_posix()}:{attribute}"
        loaded: Any = flow.from_source(source=str(source), entrypoint=entry)
        scheduled = attribute == "watch"
        with contextlib.redirect_stdout(io.StringIO()):  # it draws a table for every one
            # One look at a time: a look that is due while another is at work is left out.
            once = ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW)
            loaded.deploy(
                concurrency_limit=once if scheduled else None,
                name="local", work_pool_name=pool, build=False, push=False, print_next_steps=False, ignore_warnings=True,
                parameters=watched if scheduled else defaults,
                job_variables={"working_dir": str(root)}, **(schedule if scheduled else {}),
            )  # fmt: skip
        made.append(f"{loaded.name}/local")
    return made


def work_pool(name: str, limit: int) -> None:
    """The process work pool, created if it is not there."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists

    with get_client(sync_client=True) as client:
        try:
            client.create_work_pool(WorkPoolCreate(name=name, type="process", concurrency_limit=limit))
        except ObjectAlreadyExists:
            return


def sweep(home: Path) -> list[str]:
    """Mark flow runs as crashed whose process is gone; the server itself never notices a kill -9."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.states import Cancelled, Crashed

    from infra.owner import start_time

    swept = []
    with get_client(sync_client=True) as client:
        wanted = {"state": {"type": {"any_": ["RUNNING", "CANCELLING"]}}}
        for run in client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(wanted)):
            host, _, pid = (run.infrastructure_pid or "").rpartition(":")
            if not pid.isdigit() or host != os.uname().nodename or start_time(int(pid)):
                continue
            state = Cancelled if run.state is not None and run.state.type.value == "CANCELLING" else Crashed
            client.set_flow_run_state(run.id, state(message="its process is gone"), force=True)
            swept.append(run.name)
    return swept
