"""One door to the three targets: `launch(job, cfg)` gives a handle, `spec(job, cfg)` the whole spec without launching.

handle = launch(job, recipe.launch, state_dir=run / ".xmanager", log_dir=run / "logs")
"""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from infra.config import LaunchConfig
from infra.launch.job import Handle, Job, Spec

IMAGE_FILE = "infra/Dockerfile"


def launch(job: Job, cfg: LaunchConfig, *, state_dir: Path, log_dir: Path) -> Handle:
    """Start `job` on `cfg.target` through XManager; returns at once."""
    if cfg.target == "local":
        from infra.launch.local import LocalJob

        return LocalJob(
            job.module, job.args, name=job.name, log_dir=log_dir, state_dir=state_dir, env=job.env
        )
    if cfg.target == "gke":
        from infra.launch.gke import JobSets, launch_gke

        return launch_gke(job, JobSets(cfg.namespace, cfg.context), state_dir)
    from infra.launch.vertex import VertexApi, launch_vertex

    return launch_vertex(job, VertexApi(cfg.project, cfg.region), state_dir)


def spec(job: Job, cfg: LaunchConfig) -> Spec:
    """Exactly what `launch` would send, as JSON values."""
    if cfg.target == "local":
        return {
            "executor": "xm_local.Local",
            "command": [sys.executable, "-m", job.module, *job.args],
            "env": dict(job.env),
            "session": "its own process group; SIGTERM saves and ends with 75",
        }
    if cfg.target == "gke":
        from infra.launch.gke import render

        return render(job)
    from infra.launch.vertex import render as render_vertex
    from infra.launch.vertex import to_dict

    return to_dict(render_vertex(job, cfg.project, cfg.region), cfg.project, cfg.region)


def explain(job: Job, cfg: LaunchConfig) -> list[str]:
    """The spec in words."""
    if cfg.target == "local":
        return [
            f"a process on this machine: python -m {shlex.join([job.module, *job.args])}",
            "no container, no cluster",
        ]
    if cfg.target == "gke":
        from infra.launch.gke import explain as words
    else:
        from infra.launch.vertex import explain as words
    return words(job)


def by_hand(job: Job, cfg: LaunchConfig, path: Path) -> list[str]:
    """Commands that build and push the image and send the spec in `path` without us."""
    if cfg.target == "local":
        return [shlex.join([sys.executable, "-m", job.module, *job.args])]
    registry = job.image.split("/", 1)[0]
    lines = [
        f"gcloud auth configure-docker {registry}",
        shlex.join(["docker", "build", "--platform", "linux/amd64", "-f", IMAGE_FILE, "-t", job.image, "."]),
        shlex.join(["docker", "push", job.image]),
    ]
    if cfg.target == "gke":
        context = ["--context", cfg.context] if cfg.context else []
        lines.append(shlex.join(["kubectl", *context, "-n", cfg.namespace, "apply", "-f", str(path)]))
        lines.append(
            shlex.join(
                [
                    "kubectl",
                    *context,
                    "-n",
                    cfg.namespace,
                    "logs",
                    "-f",
                    "-l",
                    f"jobset.sigs.k8s.io/jobset-name={job.name}",
                ]
            )
        )
    else:
        lines.append(
            f"curl -X POST -H \"Authorization: Bearer $(gcloud auth print-access-token)\" -H 'Content-Type: application/json' "
            f'-d "$(jq .customJob {shlex.quote(str(path))})" '
            f"https://{cfg.region}-aiplatform.googleapis.com/v1/projects/{cfg.project}/locations/{cfg.region}/customJobs"
        )
    return lines


def text(value: Any) -> str:
    """A spec as JSON (which is also YAML, so kubectl takes it)."""
    return json.dumps(value, indent=2) + "\n"
