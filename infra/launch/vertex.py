"""TPU slices on Vertex AI: builds the CustomJob proto and submits it through our XManager executor.

    custom_job = render(job, "my-project")                       # google.cloud.aiplatform_v1.CustomJob
    handle = launch_vertex(job, VertexApi("my-project", "us-east5"), state_dir=…)

Why our own: XManager 0.8.5's `xm_local.Vertex` knows TPU v2 and v3 only and drops the service account of TPU jobs.
Limits, on purpose: custom training documents TPU VMs of v5e and v6e; and only slices of one host are launched here, since
what `replica_count` means for several could not be checked. Everything else goes to GKE.
The surprising thing: Vertex has no exit codes. It writes "exited with a non-zero status of 75" into the job's
error message, which is where we read it.

Source: Vertex AI documentation, "Training with TPU accelerators"; REST reference of CustomJobSpec.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra.errors import LaunchError, RecipeError
from infra.launch.executor import submit
from infra.launch.job import Job, Status, command, environment, require, status_of
from infra.launch.patience import CALL_SECONDS, judge_google, patiently

TYPES = ("v5e", "v6e")
EXIT_STATUS = re.compile(r"non-zero status of (\d+)")
STRATEGIES = {"on_demand": "STANDARD", "spot": "SPOT", "flex_start": "FLEX_START"}
POLL_SECONDS = 30.0


def machine_type(job: Job) -> str:
    """The machine with all chips of one host: `ct6e-standard-4t`."""
    slice_ = require(job, "vertex")
    if slice_.type.name not in TYPES:
        raise RecipeError(
            f"Vertex AI trains on TPU {' and '.join(TYPES)}, not on {slice_.type.name}",
            "use --target gke for it",
        )
    if slice_.hosts > 1:
        raise RecipeError(
            f"{slice_.name} has {slice_.hosts} hosts; on Vertex AI only slices of one host are launched",
            "use --target gke, or a smaller slice such as v6e:2x2",
        )
    return slice_.type.gke_machine.rsplit("-", 1)[0] + f"-{slice_.chips_per_host}t"


def require_place(project: str, region: str) -> None:
    """Refuse a spec that could be sent nowhere."""
    missing = [f"launch.{n}" for n, v in (("project", project), ("region", region)) if not v]
    if missing:
        raise RecipeError(
            f"target vertex needs {' and '.join(missing)}",
            "--set launch.project=… --set launch.region=us-east5",
        )


def render(job: Job, project: str, region: str) -> Any:
    """The CustomJob proto, exactly what is sent."""
    from google.cloud import aiplatform_v1 as aip

    machine = machine_type(job)
    require_place(project, region)
    slice_ = require(job, "vertex")
    env = [{"name": k, "value": v} for k, v in environment(job).items()]
    whole = command(job)
    pool = aip.WorkerPoolSpec(
        machine_spec=aip.MachineSpec(machine_type=machine, tpu_topology=slice_.topology),
        replica_count=1,
        container_spec=aip.ContainerSpec(image_uri=job.image, command=whole[:1], args=whole[1:], env=env),
    )
    strategies: Any = aip.Scheduling.Strategy
    scheduling = aip.Scheduling(
        strategy=strategies[STRATEGIES[job.capacity]],
        restart_job_on_worker_restart=True,
        disable_retries=job.restarts == 0,
    )
    if job.capacity == "flex_start":
        scheduling.max_wait_duration = {"seconds": 7 * 24 * 3600}
    return aip.CustomJob(
        display_name=job.name,
        labels={k.replace("/", "_").replace(".", "_").lower(): v for k, v in job.labels.items()},
        job_spec=aip.CustomJobSpec(
            worker_pool_specs=[pool],
            scheduling=scheduling,
            service_account=job.service_account,
            base_output_directory=aip.GcsDestination(output_uri_prefix=job.run),
        ),
    )


def to_dict(custom_job: Any, project: str, region: str) -> dict[str, Any]:
    """The proto as JSON, with where it is sent."""
    body = type(custom_job).to_dict(custom_job, preserving_proto_field_name=False, use_integers_for_enums=False,
                                    always_print_fields_with_no_presence=False)  # fmt: skip
    return {"parent": f"projects/{project}/locations/{region}", "customJob": body}


def explain(job: Job) -> list[str]:
    """What the spec asks for, one line per decision."""
    slice_ = require(job, "vertex")
    how = {"spot": "spot: may be taken away", "flex_start": "waits at most 7 days for capacity"}
    return [
        f"CustomJob {job.name}: one {machine_type(job)} with {slice_.chips} chips ({slice_.name}), {slice_.devices} JAX devices",
        f"scheduling {STRATEGIES[job.capacity]} ({how.get(job.capacity, 'on demand')})",
        f"run directory {job.run}; Vertex mounts buckets at /gcs by itself",
        f"as {job.service_account or 'the Vertex AI service agent (name launch.service_account to choose another)'}",
        "exit 75 comes back as an error message; `repro launch` reads it and launches again, which is not an error",
    ]


class VertexApi:
    """The calls to Vertex AI that we need. `client`: an aiplatform_v1.JobServiceClient.

    `patience`: how long to wait out passing trouble, as `patiently` takes it (`longest`, `sleep`, `say`).
    Every call raises LaunchError when the API refuses or stays away.
    """

    def __init__(self, project: str, region: str, client: Any = None, patience: dict[str, Any] | None = None):
        require_place(project, region)
        self.project, self.region, self.patience = project, region, patience or {}
        self.parent = f"projects/{project}/locations/{region}"
        if client is None:
            import google.auth.exceptions
            from google.cloud import aiplatform_v1 as aip

            try:
                client = aip.JobServiceClient(
                    client_options={"api_endpoint": f"{region}-aiplatform.googleapis.com"}
                )
            except google.auth.exceptions.DefaultCredentialsError:
                raise LaunchError(
                    "no Google credentials were found", "run `gcloud auth application-default login`"
                ) from None
        self.client = client

    def _ask(self, what: str, call: Callable[[], Any], **how: Any) -> Any:
        return patiently(call, judge=judge_google, what=what, **self.patience, **how)

    def create(self, job: Job) -> str:
        """Submit; returns the resource name. A try without an answer may have made the job: then that one counts."""
        made = render(job, self.project, self.region)
        tries = 0

        def send() -> str:
            nonlocal tries
            tries += 1
            found = self._running(job) if tries > 1 else None
            return found or self.client.create_custom_job(
                parent=self.parent, custom_job=made, timeout=CALL_SECONDS
            ).name  # fmt: skip

        name: str = self._ask(f"CustomJob {job.name} was refused", send)
        return name

    def get(self, name: str) -> Any:
        """The CustomJob with its state."""
        return self._ask(
            f"CustomJob {name.rsplit('/', 1)[-1]} cannot be read",
            lambda: self.client.get_custom_job(name=name, timeout=CALL_SECONDS),
        )

    def running(self, job: Job) -> str | None:
        """Resource name of a job of this name that has not ended."""
        found: str | None = self._ask(
            f"the CustomJobs of {self.parent} cannot be listed", lambda: self._running(job)
        )
        return found

    def _running(self, job: Job) -> str | None:
        found = self.client.list_custom_jobs(
            request={"parent": self.parent, "filter": f'display_name="{job.name}"'}, timeout=CALL_SECONDS
        )
        live = ("QUEUED", "PENDING", "RUNNING", "PAUSED", "UPDATING")
        return next(
            (
                j.name
                for j in found
                if j.display_name == job.name and j.state.name.removeprefix("JOB_STATE_") in live
            ),
            None,
        )

    def cancel(self, name: str) -> None:
        """Ask Vertex to end it; one that has ended or is gone is no error."""
        self._ask(
            f"CustomJob {name.rsplit('/', 1)[-1]} cannot be cancelled",
            lambda: self.client.cancel_custom_job(name=name, timeout=CALL_SECONDS),
            accept=lambda judgement, tried_before: judgement.code == 404,
        )


class VertexJob:
    """Our handle of a CustomJob. Its log lies in the run directory, written by the worker."""

    def __init__(self, api: VertexApi, resource: str, job: Job, poll_seconds: float = POLL_SECONDS):
        self.api, self.resource, self.job, self.name, self.poll_seconds = (
            api,
            resource,
            job,
            job.name,
            poll_seconds,
        )

    def status(self) -> Status:
        found = self.api.get(self.resource)
        state = found.state.name.removeprefix("JOB_STATE_")
        if state == "FAILED":
            code = self.exit_code
            return Status.FAILED if code is None else status_of(code)
        known = {"SUCCEEDED": Status.SUCCEEDED, "CANCELLED": Status.CANCELLED, "EXPIRED": Status.FAILED}
        return known.get(state, Status.QUEUED if state in ("QUEUED", "PENDING") else Status.RUNNING)

    @property
    def exit_code(self) -> int | None:
        found = self.api.get(self.resource)
        if found.state.name == "JOB_STATE_SUCCEEDED":
            return 0
        match = EXIT_STATUS.search(found.error.message if found.error else "")
        return int(match.group(1)) if match else None

    def wait(self, timeout: float | None = None) -> Status:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not (status := self.status()).ended:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"CustomJob {self.name} is still {status} after {timeout:.0f} s")
            time.sleep(self.poll_seconds)
        return status

    def logs(self, lines: int = 100) -> list[str]:
        """From RUN/logs in the bucket; the platform's own message when there is none."""
        from infra.storage import open_url

        bucket, prefix = open_url(self.job.run)
        found = sorted(n for n in bucket.list(f"{prefix}logs/") if n.endswith(".log"))
        if found:
            return bucket.read_bytes(found[-1])[0].decode(errors="replace").splitlines()[-lines:]
        return [self.api.get(self.resource).error.message]

    def cancel(self) -> None:
        self.api.cancel(self.resource)


def launch_vertex(job: Job, api: VertexApi, state_dir: Path, poll_seconds: float = POLL_SECONDS) -> VertexJob:
    """Submit through an XManager experiment; returns at once. A job of this name that still runs is taken over."""
    machine_type(job)

    def start() -> VertexJob:
        return VertexJob(api, api.create(job), job, poll_seconds)

    def record(made: VertexJob, experiment_id: int, work_unit_id: int) -> None:
        from xmanager.xm_local.storage import database

        database.database().insert_vertex_job(experiment_id, work_unit_id, made.resource)

    running = api.running(job)
    if running is not None:
        return VertexJob(api, running, job, poll_seconds)
    return submit(job, start, record, state_dir)
