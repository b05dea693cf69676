"""`repro launch`: the training job of a recipe on this machine, a GKE TPU slice or Vertex AI, until it is done.

    repro launch olmo3_7b_stage1 --target gke --dry-run --set launch.image=… --set launch.bucket=gs://…

`--dry-run` sends nothing: it writes the whole spec to a file, says in words what it asks for, and prints the commands that
build and push the image and submit the spec by hand. The surprising thing: what a launch needs of the run directory
(tokens, order, step-0 weights) must lie in the bucket first; `repro gate RECIPE --run-dir gs://…` puts it there.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infra.config import LaunchConfig
    from infra.launch.job import Handle, Job
    from pipelines.recipe import Recipe


def register(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommand; `add` is the command line's own helper."""
    one = add(
        "launch", "the training job on a machine or a TPU slice, launched again until it is done", command
    )
    one.add_argument(
        "--target", choices=("local", "gke", "vertex"), help="instead of the recipe's launch.target"
    )
    one.add_argument(
        "--dry-run", action="store_true", help="write the spec to a file and explain it; send nothing"
    )
    one.add_argument("--out", default="", help="file of the spec (default: RUN_DIR/launch/<target>.json)")


def make_job(recipe: "Recipe", cfg: "LaunchConfig", run: str) -> "Job":
    """The training job of a recipe. `run`: a local directory, or gs://bucket/path for a cloud target."""
    from infra.launch.job import Job
    from infra.memory import allocator_environment
    from infra.topology import parse

    slice_ = parse(cfg.topology) if cfg.topology else None
    name = re.sub(r"[^a-z0-9]+", "-", f"repro-{recipe.name}".lower()).strip("-")[:40].rstrip("-")
    if cfg.target == "local":
        env = {"OMP_NUM_THREADS": str(cfg.threads), "JAX_PLATFORMS": "cpu", **allocator_environment()}
        return Job(name, "model.train", ("--run", run), env=env)
    return Job(
        name,
        "model.train",
        ("--distributed",) if slice_ is not None and slice_.hosts > 1 else (),
        slice=slice_,
        image=cfg.image,
        run=run,
        service_account=cfg.service_account,
        capacity=cfg.capacity,
        queue=cfg.queue,
        restarts=cfg.max_relaunches,
        labels={"recipe": name},
    )


def command(args: argparse.Namespace) -> int:
    """Run `repro launch`; returns the exit status."""
    from infra.errors import RecipeError
    from infra.launch import targets
    from infra.mirror import working_copy
    from pipelines.recipe import load_recipe
    from pipelines.stages import read_recipe

    remote = str(args.run_dir).startswith("gs://")
    run = working_copy(args.run_dir) if remote else Path(args.run_dir or f"runs/{args.recipe}")
    stands = (run / "recipe.json").exists() and not args.overrides
    recipe = read_recipe(run) if stands else load_recipe(args.recipe, args.overrides)
    cfg = recipe.launch if args.target is None else recipe.launch.model_copy(update={"target": args.target})
    bucket = str(args.run_dir) if str(args.run_dir).startswith("gs://") else cfg.bucket
    where = str(run) if cfg.target == "local" else bucket
    job = make_job(recipe, cfg, where)
    _mesh_fits(recipe, job)
    spec = targets.spec(job, cfg)
    if args.dry_run:
        out = Path(args.out) if args.out else run / "launch" / f"{cfg.target}.json"
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(targets.text(spec))
        print(f"{out}\n")
        print("\n".join(f"  {line}" for line in targets.explain(job, cfg)))
        print("\nby hand:\n" + "\n".join(f"  {line}" for line in targets.by_hand(job, cfg, out)))
        return 0
    if cfg.target == "local" and not (run / "recipe.json").exists():
        raise RecipeError(
            f"{run} is not a run directory", "run `repro gate` for it first: it makes all that training needs"
        )
    return _until_done(job, cfg, recipe, run, bucket)


def _mesh_fits(recipe: "Recipe", job: "Job") -> None:
    """Refuse a mesh or batch that the slice cannot hold, before anything is paid for."""
    from infra.errors import RecipeError

    if job.slice is None:
        return
    sizes = [recipe.mesh.data, recipe.mesh.fsdp, recipe.mesh.tensor]
    known = 1
    for size in sizes:
        known *= size or 1
    devices = job.slice.devices
    if devices % known or (0 not in sizes and known != devices):
        raise RecipeError(
            f"mesh {sizes[0]} x {sizes[1]} x {sizes[2]} does not match the {devices} devices of {job.slice.name}",
            "set one of mesh.data, mesh.fsdp, mesh.tensor to 0 (all that is left), or choose another launch.topology",
        )
    shards = devices // max(1, recipe.mesh.tensor)
    if recipe.data.global_batch_instances % shards:
        raise RecipeError(
            f"a batch of {recipe.data.global_batch_instances} instances does not split over {shards} devices of {job.slice.name}",
            "choose another launch.topology or mesh",
        )


def _until_done(job: "Job", cfg: "LaunchConfig", recipe: "Recipe", run: Path, bucket: str) -> int:
    from infra.launch import targets
    from infra.launch.job import PREEMPTED_CODE, Status
    from infra.launch.until_done import RelaunchPolicy, run_until_done

    def start(attempt: int) -> "Handle":
        return targets.launch(job, cfg, state_dir=run / ".xmanager", log_dir=run / "logs")

    def progress() -> int:
        if cfg.target != "local":
            from infra.mirror import newest_step

            return newest_step(bucket)
        from model.checkpoint import latest_committed

        return latest_committed(run / "checkpoints", verify=False)[0] or 0

    policy = RelaunchPolicy(max_idle=cfg.max_relaunches, backoff=cfg.backoff_seconds)
    outcome = run_until_done(start, progress, recipe.train.steps, policy)
    print(
        f"{outcome.status} at step {outcome.step} of {recipe.train.steps} after {outcome.launches} launches"
    )
    return 0 if outcome.status == Status.SUCCEEDED else PREEMPTED_CODE
