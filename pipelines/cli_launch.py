"""`repro launch`: the training job of a recipe on this machine, a GKE TPU slice or Vertex AI, until it is done.

    repro launch olmo3_7b_stage1 --target gke --dry-run --set launch.image=… --set launch.bucket=gs://…

`--dry-run` sends nothing: it writes the whole spec to a file, says in words what it asks for, and prints the commands that
build and push the image and submit the spec by hand. The surprising thing: what a launch needs of the run directory
(tokens, order, step-0 weights) must stand first: stages tokenize, order, init and gate, each with `--run-dir gs://…`. Goal, mesh
and batch are those of the run's own recipe.json; the command line may change the launch section only.
"""

import argparse
import re
from collections.abc import Callable
from contextlib import nullcontext
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
    from infra.launch import targets
    from infra.mirror import working_copy
    from pipelines.remote import is_remote, local_run
    from pipelines.run_recipe import recipe_for, stored

    remote = is_remote(args.run_dir)
    run = working_copy(args.run_dir) if remote else Path(args.run_dir or f"runs/{args.recipe}")
    overrides = [*args.overrides, *([f"launch.target={args.target}"] if args.target else [])]
    recipe = recipe_for(args.recipe, overrides, stored(run), run)
    bucket = str(args.run_dir) if remote else recipe.launch.bucket
    if not args.dry_run and bucket and (remote or recipe.launch.target != "local"):
        recipe = recipe_for(args.recipe, overrides, stored(bucket), bucket)
    cfg = recipe.launch
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
    _can_train(bucket if remote else where)
    mirrored = local_run(args.run_dir, "repro launch") if remote and cfg.target == "local" else nullcontext()
    with mirrored:
        return _until_done(job, cfg, recipe, run, bucket)


def _can_train(where: str) -> None:
    """Refuse a run in which something that training reads is not made, before anything is started."""
    from infra.errors import RecipeError
    from pipelines.stages import BY_NAME

    needed = [f"stages/{name}.json" for name in BY_NAME["train"].after]
    if where.startswith("gs://"):
        from infra.storage import open_url

        bucket, prefix = open_url(where)
        there = bucket.list(f"{prefix}stages/")
        missing = [n for n in needed if f"{prefix}{n}" not in there]
    else:
        missing = [n for n in needed if not (Path(where) / n).exists()]
    if missing:
        stages = [n.removeprefix("stages/").removesuffix(".json") for n in missing]
        raise RecipeError(
            f"{where} cannot train yet: not made are {', '.join(stages)}",
            f"run {', '.join(f'`repro {s}`' for s in stages)} in this order, with the same recipe and --run-dir; "
            "or `repro reproduce`, which makes them and trains on this machine",
        )


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
