"""A TPU job in the cloud behind XManager's interfaces: one executor and one handle, for GKE and for Vertex.

    handle = submit(job, start=lambda: GkeJob(…), record=lambda experiment, unit: …, state_dir=…)

`start` sends the job and returns our handle of it; `record` writes it into XManager's database. The surprising thing:
XManager's work unit keeps handles of its own two cloud executors only, so we add ours to its list.
"""

import asyncio
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attr
from xmanager import xm
from xmanager.xm_local import executables, handles, registry

from infra.launch.job import Handle, Job, Status


@attr.s(auto_attribs=True)
class CloudHandle(handles.ExecutionHandle):
    """XManager's handle interface over one of ours."""

    job: Handle
    name: str
    record: Callable[[int, int], None]

    async def wait(self) -> None:
        if await asyncio.to_thread(self.job.wait) == Status.FAILED:
            raise RuntimeError(f"{self.name} failed")

    def get_status(self) -> Any:
        from xmanager.xm_local import status

        kinds = status.LocalWorkUnitStatusEnum
        by_status = {
            Status.SUCCEEDED: kinds.COMPLETED,
            Status.FAILED: kinds.FAILED,
            Status.CANCELLED: kinds.CANCELLED,
        }
        return status.LocalWorkUnitStatus(status=by_status.get(self.job.status(), kinds.RUNNING))

    def stop(self) -> None:
        self.job.cancel()

    def save_to_storage(self, experiment_id: int, work_unit_id: int) -> None:
        self.record(experiment_id, work_unit_id)


@attr.s(auto_attribs=True)
class CloudTpuSpec(xm.ExecutorSpec):
    """We package nothing: the image is named in the recipe."""

    push_image_tag: str | None = None


@attr.s(auto_attribs=True)
class CloudTpu(xm.Executor):
    """XManager executor of one TPU job: sends it when the experiment adds it, and keeps our handle."""

    start: Callable[[], Handle]
    record: Callable[[Handle, int, int], None]
    handle: Any = None

    Spec = CloudTpuSpec

    def __attrs_post_init__(self) -> None:
        registry.register(CloudTpu, launch=_launch)

    @classmethod
    async def launch(
        cls, local_experiment_unit: Any, job_group: xm.JobGroup
    ) -> Sequence[handles.ExecutionHandle]:
        return await _launch(local_experiment_unit, job_group)


async def _launch(unit: Any, group: xm.JobGroup) -> Sequence[handles.ExecutionHandle]:
    made = []
    for xm_job in xm.job_operators.collect_jobs_by_filter(group, lambda j: isinstance(j.executor, CloudTpu)):
        executor = xm_job.executor
        started = executor.handle = executor.start()
        handle = CloudHandle(started, xm_job.name, functools.partial(executor.record, started))
        unit._non_local_execution_handles.append(handle)
        handle.save_to_storage(unit.experiment_id, unit.work_unit_id)
        made.append(handle)
    return made


def submit(
    job: Job, start: Callable[[], Handle], record: Callable[[Any, int, int], None], state_dir: Path
) -> Any:
    """Start `job` as an XManager experiment and return what `start` returned, at once.

    Raises what `start` raises; nothing is recorded then.
    """
    from xmanager import xm_local

    from infra.launch.local import parse_flags, starting

    parse_flags(state_dir)
    executor = CloudTpu(start, record)

    async def add() -> None:
        async with xm_local.create_experiment(f"repro {job.name}") as experiment:
            image = executables.GoogleContainerRegistryImage(name=job.name, image_path=job.image)
            await experiment.add(xm.Job(image, executor, name=job.name))

    with starting(state_dir):
        asyncio.run(add())
    return executor.handle
