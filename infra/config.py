"""Recipe section of the launch: where the training job runs, and how its landmarks are watched.

Nothing here changes what a run computes, so nothing here is part of a stage's identity.
"""

import re
from typing import Literal

from pydantic import Field, model_validator

from infra.section import Section

LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
# What the clouds accept, so that a slip is met here and not after an image was built. Sources: OCI distribution
# specification (references), Google Cloud "Creating and managing projects", "Bucket naming", Kubernetes "Object Names and IDs".
SPELLINGS = {
    "image": (
        rf"({LABEL}(\.{LABEL})*(:\d+)?/)?[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
        r"(:\w[\w.-]{0,127})?(@sha256:[0-9a-f]{64})?",
        "an image name in small letters with a tag: REGION-docker.pkg.dev/PROJECT/repro/train:1",
    ),
    "project": (
        r"([a-z0-9.-]+:)?[a-z][-a-z0-9]{4,28}[a-z0-9]",
        "a project id: 6 to 30 small letters, digits and '-'",
    ),
    "region": (r"[a-z]+-[a-z]+\d+", "a region such as us-east5 (a zone has one more letter)"),
    "bucket": (
        r"gs://[a-z0-9][-_.a-z0-9]{1,220}[a-z0-9](/[^/\s?#\[\]*]+)*/?",
        "of the form gs://bucket/path, without empty parts",
    ),
    "namespace": (LABEL, "a Kubernetes name: small letters, digits and '-', at most 63"),
    "queue": (rf"{LABEL}(\.{LABEL})*", "a Kubernetes name: small letters, digits, '-' and '.'"),
    "context": (r"[^\s'\"]+", "a context of the kubeconfig: `kubectl config get-contexts`"),
}
SERVICE_ACCOUNT = {
    "gke": (
        rf"{LABEL}(\.{LABEL})*",
        "a Kubernetes service account, for instance `trainer`, not an e-mail address",
    ),
    "vertex": (r"[^@\s]+@[a-z0-9.-]+", "the e-mail address of a Google service account"),
}


class WatchConfig(Section):
    """When landmarks are looked for and how they are evaluated. `cron`, if set, wins over the interval."""

    interval_seconds: int = Field(60, ge=1)
    cron: str = Field("", description="for instance */10 * * * *")
    while_training: bool = Field(
        True, description="evaluate landmarks as they are committed, beside the training"
    )
    concurrency: int = Field(1, ge=1, description="landmarks evaluated at the same time")
    retries: int = Field(2, ge=0, description="further tries of a landmark that fails, then it is marked")
    retry_delay_seconds: float = Field(10.0, ge=0)


class LaunchConfig(Section):
    """`local` starts a process on this machine through XManager's local executor."""

    target: Literal["local", "gke", "vertex"] = "local"
    threads: int = Field(2, ge=1, description="local: CPU threads of the training process")
    topology: str = Field("", description="TPU slice, for instance v5p:4x4x4")
    image: str = Field("", description="container image with tag or digest")
    project: str = ""
    region: str = ""
    bucket: str = Field("", description="run directory of the launched job: gs://bucket/path")
    service_account: str = Field(
        "", description="gke: Kubernetes account; vertex: e-mail of the Google account"
    )
    namespace: str = Field("default", description="gke: namespace")
    context: str = Field("", description="gke: kubeconfig context; empty: the current one")
    capacity: Literal["on_demand", "spot", "flex_start"] = "on_demand"
    queue: str = Field("", description="gke: Kueue LocalQueue; the job waits there until it is admitted")
    tokenize_runner: Literal["direct", "dask", "flink", "dataflow"] = "direct"
    tokenize_processes: int = Field(1, ge=1, description="worker processes of the tokenize job")
    tokenize_options: tuple[str, ...] = Field((), description="further Beam flags of the tokenize job")
    max_relaunches: int = Field(3, ge=0, description="relaunches in a row that gain no step before giving up")
    backoff_seconds: float = Field(
        30.0, ge=0, description="wait before the first relaunch; doubles, at most 30 minutes"
    )
    watch: WatchConfig = WatchConfig()

    @model_validator(mode="after")
    def _possible(self) -> "LaunchConfig":
        spellings = {**SPELLINGS}
        if self.target in SERVICE_ACCOUNT:
            spellings["service_account"] = SERVICE_ACCOUNT[self.target]
        for field, (pattern, wanted) in spellings.items():
            value = getattr(self, field)
            if value and not re.fullmatch(pattern, value):
                raise ValueError(f"launch.{field} {value!r} is not {wanted}")
        if ".." in self.bucket.split("/"):
            raise ValueError(f"launch.bucket {self.bucket!r} holds '..'")
        if self.queue and self.target == "vertex":
            raise ValueError("launch.queue is a Kueue queue; Vertex queues with launch.capacity=flex_start")
        return self
