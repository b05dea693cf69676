"""Recipe section of the launch: where the training job runs."""

from typing import Literal

from pydantic import Field

from infra.section import Section


class LaunchConfig(Section):
    """`local` starts a process on this machine through XManager's local executor."""

    target: Literal["local", "gke", "vertex"] = "local"
    threads: int = Field(2, ge=1, description="local: CPU threads of the training process")
    topology: str = Field("", description="TPU slice, for instance v5p:4x4x4")
    image: str = ""
    project: str = ""
    region: str = ""
    max_relaunches: int = Field(3, ge=0)
