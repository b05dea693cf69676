"""Beam runners by name: direct, dask, flink, dataflow. The job's bytes are the same on all of them.

FnApiRunner is named explicitly: Beam's `DirectRunner` first looks for another engine on the network. With
`processes` > 1 it starts SDK worker processes. DaskRunner leaves its client open, which hangs the process at
exit, so `finish` closes it. The surprising thing: Beam 2.77 pickles the main session by default on runners with
remote workers, which breaks on them; it is switched off here for all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from infra.errors import DataError, LaunchError

RUNNERS = ("direct", "dask", "flink", "dataflow")
NO_MAIN_SESSION = "--no_save_main_session"
REMOTE = {"flink": "FlinkRunner", "dataflow": "DataflowRunner"}


def make_pipeline(
    runner: str, processes: int = 1, options: Sequence[str] = ()
) -> tuple[beam.Pipeline, Callable[[beam.Pipeline], None]]:
    """An empty pipeline for `runner` and the function that runs it to its end."""
    if runner not in RUNNERS:
        raise DataError(f"unknown runner {runner!r}", f"known runners: {', '.join(RUNNERS)}")
    if processes < 1:
        raise DataError(f"{processes} processes are not possible", "use 1 or more")
    if runner == "dask":
        return _dask(processes, options)
    flags = [*options, NO_MAIN_SESSION]
    engine: Any
    if runner == "direct":
        from apache_beam.runners.portability.fn_api_runner import FnApiRunner

        mode = "in_memory" if processes == 1 else "multi_processing"
        flags += [f"--direct_running_mode={mode}", f"--direct_num_workers={processes}"]
        engine = FnApiRunner()
    else:
        engine = REMOTE[runner]
    return beam.Pipeline(runner=engine, options=PipelineOptions(flags)), _run


def _run(pipeline: beam.Pipeline) -> None:
    result = pipeline.run()
    state = result.wait_until_finish()
    if state is not None and str(state) != "DONE":
        raise LaunchError(f"the tokenize job ended in the state {state}", "see the runner's log")


def _dask(processes: int, options: Sequence[str]) -> tuple[beam.Pipeline, Callable[[beam.Pipeline], None]]:
    from apache_beam.runners.dask.dask_runner import DaskRunner
    from distributed import LocalCluster

    own = not any(flag.startswith("--dask_client_address") for flag in options)
    cluster = LocalCluster(n_workers=processes, threads_per_worker=1, dashboard_address=None) if own else None
    flags = [
        *options,
        NO_MAIN_SESSION,
        *([f"--dask_client_address={cluster.scheduler_address}"] if cluster else []),
    ]

    def finish(pipeline: beam.Pipeline) -> None:
        result: Any = None
        try:
            result = pipeline.run()
            result.wait_until_finish()
        finally:
            if result is not None:
                result.client.close()
            if cluster is not None:
                cluster.close()

    return beam.Pipeline(runner=DaskRunner(), options=PipelineOptions(flags)), finish
