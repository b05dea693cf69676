"""What a job is, whatever runs it: `Job`, `Status`, and the `Handle` that every target returns.

    job = Job("train", "model.train", ("--run", "gs://b/run"), slice=parse("v6e:2x4"), image="…/repro:1")

The surprising thing: exit status 75 (saved and ended on request) is `PREEMPTED`, which is not a failure.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from infra.errors import LaunchError, RecipeError
from infra.redact import looks_secret
from infra.topology import Slice

PREEMPTED_CODE = 75
NAME = re.compile(
    r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?"
)  # JobSet adds suffixes; a pod's host name has 63 characters


class Status(StrEnum):
    """State of a job."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    PREEMPTED = "preempted"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self not in (Status.QUEUED, Status.RUNNING)


def status_of(code: int) -> Status:
    """The status that an exit code means."""
    return {0: Status.SUCCEEDED, PREEMPTED_CODE: Status.PREEMPTED}.get(code, Status.FAILED)


@dataclass(frozen=True)
class Job:
    """One Python module with its arguments, and where it runs.

    `slice` None: this machine. `run`: the gs:// run directory of a cloud job. `restarts`: failures that the
    platform itself restarts after; preemptions are not counted.
    """

    name: str
    module: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    slice: Slice | None = None
    image: str = ""
    run: str = ""
    service_account: str = ""
    capacity: str = "on_demand"
    queue: str = ""
    restarts: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise RecipeError(
                f"job name {self.name!r} is not a DNS label of at most 40 characters",
                "use small letters, digits and '-'",
            )
        secret = [k for k, v in self.env.items() if looks_secret(k, v)]
        if secret:
            raise RecipeError(
                f"the job's environment holds what looks like a secret: {', '.join(secret)}",
                "a spec is stored and shown; give the job a service account, or mount a secret of the cluster",
            )

    @property
    def hosts(self) -> int:
        return self.slice.hosts if self.slice else 1


class Handle(Protocol):
    """A launched job."""

    name: str

    def status(self) -> Status:
        """What it is doing now."""

    def wait(self, timeout: float | None = None) -> Status:
        """Block until it has ended; returns its status. Raises TimeoutError after `timeout` seconds."""

    def logs(self, lines: int = 100) -> list[str]:
        """The last lines of its output."""

    def cancel(self) -> None:
        """Ask it to save and end; kill it if it does not."""

    @property
    def exit_code(self) -> int | None:
        """Exit code once it has ended; None before, or where the platform does not tell."""


def require(job: Job, target: str) -> Slice:
    """The slice of a cloud job, after checking that everything needed is there."""
    missing = [n for n in ("image", "run") if not getattr(job, n)]
    if job.slice is None:
        missing.insert(0, "topology")
    if missing or job.slice is None:
        names = {"topology": "launch.topology", "image": "launch.image", "run": "launch.bucket"}
        raise RecipeError(
            f"target {target} needs {', '.join(names[m] for m in missing)}",
            "for instance --set launch.topology=v6e:2x4 --set launch.image=REGION-docker.pkg.dev/PROJECT/repro/train:1 "
            "--set launch.bucket=gs://BUCKET/run",
        )
    if ":" not in job.image.rsplit("/", 1)[-1] and "@sha256:" not in job.image:
        raise RecipeError(f"image {job.image!r} has no tag", "pin it: name:tag or name@sha256:…")
    return job.slice


def failure(handle: Handle, status: Status, lines: int = 15) -> LaunchError:
    """The error of a job that did not succeed, with its exit code and last lines."""
    from infra.redact import redact

    code = "" if handle.exit_code is None else f" with exit code {handle.exit_code}"
    tail = "\n  ".join(redact(line) for line in handle.logs(lines))
    return LaunchError(
        f"job {handle.name} {status}{code}; last lines:\n  {tail}",
        "mend the cause and run the same command again: it continues from the last committed checkpoint",
    )


def environment(job: Job) -> dict[str, str]:
    """Environment of every host of a cloud job."""
    fixed = {
        "PYTHONUNBUFFERED": "1",
        "REPRO_RUN": job.run,
        "REPRO_HOSTS": str(job.hosts),
        "REPRO_SLICE": job.slice.name if job.slice else "",
    }
    return {**fixed, **job.env}


def command(job: Job) -> list[str]:
    """What the container runs: the worker that brings the run directory, then the module."""
    return ["python", "-m", "infra.launch.worker", "--run", job.run, "--module", job.module, "--", *job.args]


Spec = dict[str, Any]
