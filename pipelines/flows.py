"""Prefect flows over the stages. Prefect shows and schedules; what is done is decided by the stage records.

The environment must be set before Prefect is imported (its settings are read once), so `run_reproduce` is the
entry point and the import happens inside. The surprising thing: Prefect's own result cache is off
everywhere; a cache hit there would not check that the files still stand.
"""

import os
from pathlib import Path
from typing import Any

from pipelines.stages import Outcome, chain, read_recipe, run_stage


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
    }
    for key, value in defaults.items():
        os.environ.setdefault(key, value)
    if not os.environ.get("PREFECT_API_URL"):
        os.environ.pop("PREFECT_API_URL", None)  # an empty value breaks Prefect's event worker


def build_flow() -> Any:
    """The `reproduce` flow: one task per stage, in the chain's order."""
    from prefect import flow, task
    from prefect.cache_policies import NO_CACHE

    @flow(name="reproduce", validate_parameters=False)
    def reproduce(run_dir: str) -> list[Outcome]:
        """Run every stage of `run_dir`, reusing what stands."""
        run = Path(run_dir)
        recipe = read_recipe(run)

        def one(name: str) -> Outcome:
            step = task(name=name, cache_policy=NO_CACHE, persist_result=False)(run_stage)
            return step(name, recipe, run)

        return chain(recipe, run, one)

    return reproduce


def run_reproduce(run: Path) -> list[Outcome]:
    """Run the whole chain of a run directory as a Prefect flow, with a server of its own unless one is named."""
    prefect_environment(run.parent / ".prefect")
    return build_flow()(str(run))
