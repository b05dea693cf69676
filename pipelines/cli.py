"""The `repro` command: the whole chain, one stage of a run directory, or a look at it.

    repro reproduce tiny                    the whole chain through a Prefect flow
    repro reproduce tiny --no-server        the same chain as plain functions
    repro train tiny --run-dir runs/tiny    one stage
    repro parity A B --in jax,olmo-core     any two checkpoints

Exit status: 0 FAITHFUL (or done, or parity), 1 NOT FAITHFUL (or a difference), 3 INCONCLUSIVE, 2 a problem you
can fix, 130 interrupted. The surprising thing: nothing heavy is imported before it is needed, so `repro --help`
and `repro status` are instant.
"""

import argparse
import errno
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from infra.errors import RecipeError, ReproError
from infra.lease import Lease
from infra.progress import clock
from pipelines import cli_launch, cli_serve, remote, tools
from pipelines.recipe import Recipe, field_lines, load_recipe, recipe_names
from pipelines.run_recipe import launch_only, recipe_for, stored, with_launch
from pipelines.stages import (
    BY_NAME,
    chain,
    open_run,
    read_recipe,
    redo_from,
    run_stage,
    status_lines,
    verdict_of,
)

OS_REMEDIES = {
    errno.ENOSPC: "free some space and run the same command again; nothing half-written counts as done",
    errno.EDQUOT: "free some space and run the same command again; nothing half-written counts as done",
    errno.EFBIG: "a file may not grow so large here: raise the limit (`ulimit -f`) and run the same command again",
    errno.EACCES: "check the permissions, or choose another place (RUN_DIR, OUT)",
    errno.EPERM: "check the permissions, or choose another place (RUN_DIR, OUT)",
    errno.EEXIST: "a file stands where a directory should be: choose another place (RUN_DIR, OUT)",
    errno.ENOTDIR: "a file stands where a directory should be: choose another place (RUN_DIR, OUT)",
    errno.EISDIR: "a directory stands where a file should be: choose another place (RUN_DIR, OUT)",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "a symbolic link leads to itself: choose another place (RUN_DIR, OUT)",
    errno.EROFS: "the file system is read-only: choose another place (RUN_DIR, OUT)",
}
# Stages that also take two paths: what they do then, their options, their handler.
ON_TWO_PATHS: dict[str, tuple[str, Callable, Callable]] = {
    "parity": ("compare checkpoints A and B", tools.add_parity, tools.parity),
    "convert": ("convert A to the HF directory B", tools.add_convert, tools.convert),
}


def parser() -> argparse.ArgumentParser:
    """The command line of `repro`. Every command sets `handler(args) -> exit status`."""
    top = argparse.ArgumentParser(
        prog="repro", description="Reproduce an OLMo 3 run in JAX and prove it faithful."
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, help_text: str, handler: Callable, *, recipe: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help_text, description=help_text)
        if recipe:
            sub.add_argument("recipe", nargs="?", default="tiny", help="recipe name (default: tiny)")
        sub.add_argument("--run-dir", default="", help="run directory (default: runs/<recipe>)")
        sub.add_argument(
            "--set", action="append", default=[], metavar="FIELD=VALUE", dest="overrides", help="override one field"
        )  # fmt: skip
        sub.add_argument("--debug", action="store_true", help="show tracebacks")
        sub.set_defaults(handler=handler)
        return sub

    whole = add("reproduce", "the whole chain, ending with a verdict", reproduce)
    whole.add_argument("--fresh", action="store_true", help="delete the run directory first")
    whole.add_argument("--no-server", action="store_true", help="plain functions, no Prefect")
    for name, stage in BY_NAME.items():
        if name in ON_TWO_PATHS:
            other, options, _ = ON_TWO_PATHS[name]
            one = add(name, f"one stage: {stage.does}; with two paths: {other}", stage_or_paths, recipe=False)
            one.add_argument(
                "targets", nargs="*", metavar="RECIPE | A B", help="recipe name (default: tiny), or two paths"
            )
            options(one)
        else:
            one = add(name, f"one stage: {stage.does}", one_stage)
        if name == "tokenize":
            tools.add_runner(one)
        one.add_argument(
            "--redo", action="store_true", help="forget this stage and all after it, then make it"
        )
    two = add("compare", "judge run B as the reproduction of run A", tools.compare, recipe=False)
    two.add_argument("run_a", help="run directory A")
    two.add_argument("run_b", help="run directory B")
    two.add_argument("--out", default="", help="directory of the comparison (default: runs/compare-A-B)")
    add("audit", "recompute a run's data receipts from index and order", tools.audit)
    tools.add_plan(add("plan", "compile the step for a TPU slice: memory, FLOPs, time, price", tools.plan))
    cli_launch.register(add)
    cli_serve.register(add)
    add("status", "what is done in a run directory", status)
    listing = add("recipes", "the known recipes, or every field of one", recipes, recipe=False)
    listing.add_argument("recipe", nargs="?", default="", help="recipe name")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    args = parser().parse_args(argv)
    try:
        quiet(args)
        return remote.dispatch(args)
    except KeyboardInterrupt:
        print("repro: interrupted; the same command continues from what is committed", file=sys.stderr)
        return 130
    except ReproError as e:
        if args.debug:
            raise
        print(f"repro: {located(str(e), args)}", file=sys.stderr)
        return e.exit_code
    except OSError as e:
        if args.debug or e.errno not in OS_REMEDIES:
            raise
        where = e.filename or "where the result is written"
        print(f"repro: {e.strerror}: {where}\n  -> {OS_REMEDIES[e.errno]}", file=sys.stderr)
        return 2


def located(text: str, args: argparse.Namespace) -> str:
    """Commands in a message, with the run directory they are meant for."""
    if not args.run_dir:
        return text
    stages = "|".join(BY_NAME)
    return re.sub(rf"`repro ({stages})( --redo)?`", rf"`repro \1\2 --run-dir {args.run_dir}`", text)


def quiet(args: argparse.Namespace) -> None:
    """Our own progress lines are what is shown; libraries speak only of errors.

    Nothing looks for a network, unless a checkpoint is named by hub and revision (`NAME@REVISION`).
    """
    if not any(Path(p).exists() for p in ("/dev/accel0", "/dev/vfio/0", "/dev/nvidia0")):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if not asks_the_hub(args):
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
            os.environ.setdefault(name, "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not args.debug:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("PREFECT_LOGGING_ROOT_LEVEL", "ERROR")  # Prefect sets the root logger anew
        logging.getLogger().setLevel(logging.ERROR)


def asks_the_hub(args: argparse.Namespace) -> bool:
    """Whether a checkpoint is named by hub and revision, on the command line or in the recipe of a published reference."""
    if any("@" in t for t in (*getattr(args, "targets", []), *args.overrides)):
        return True
    if args.command not in ("reproduce", "init", "reference"):
        return False
    path = run_of(args) / "recipe.json"
    try:
        recipe = read_recipe(path.parent) if path.is_file() else load_recipe(args.recipe, args.overrides)
    except ReproError:
        return False  # said by the command itself
    named = recipe.reference.published + recipe.reference.published_init
    return recipe.reference.kind == "published" and "@" in named


def run_of(args: argparse.Namespace) -> Path:
    """The run directory of a command."""
    return Path(args.run_dir or f"runs/{args.recipe}")


def reproduce(args: argparse.Namespace) -> int:
    """The whole chain; the exit status is the verdict's."""
    recipe, run = load_recipe(args.recipe, args.overrides), run_of(args)
    open_run(recipe, run, fresh=args.fresh)
    recipe = with_launch(read_recipe(run), args.overrides)
    # A killed flow's trainer saves and ends by itself within seconds; the trainer's own lease covers it.
    with Lease(run / ".lease", "repro reproduce"):
        if args.no_server:
            outcomes = chain(recipe, run, lambda name: run_stage(name, recipe, run))
        else:
            from pipelines.flows import run_reproduce

            outcomes = run_reproduce(run, launch_only(args.overrides))
    reused = [o.stage for o in outcomes if o.reused]
    made = [f"{o.stage} {clock(o.seconds)}" for o in outcomes if not o.reused]
    print(f"\nmade: {', '.join(made) or 'nothing'}\nreused: {', '.join(reused) or 'nothing'}\n")
    return print_verdict(run)


def require_name(args: argparse.Namespace, recipe: Recipe) -> None:
    """Refuse a recipe name that is not the run directory's; `tiny` is also what stands when none is given."""
    if args.recipe not in ("tiny", recipe.name):
        raise RecipeError(
            f"{run_of(args)} holds recipe {recipe.name!r}, not {args.recipe!r}",
            "name another --run-dir, or leave the recipe out",
        )


def one_stage(args: argparse.Namespace) -> int:
    """One stage of a run directory, which is made if it does not stand."""
    run = run_of(args)
    stands = (run / "recipe.json").exists()
    if args.command == "report" and not stands:
        raise RecipeError(f"{run} is not a run directory: nothing to report", "check --run-dir")
    recipe = recipe_for(args.recipe, args.overrides, stored(run), run)
    if args.command == "tokenize":
        recipe = tools.with_runner(recipe, args)
    open_run(recipe, run)
    with Lease(run / ".lease", f"repro {args.command}"):
        if args.redo:
            redo_from(args.command, run)
        run_stage(args.command, recipe, run)
    return print_verdict(run) if args.command == "report" else 0


def stage_or_paths(args: argparse.Namespace) -> int:
    """`repro parity tiny` is the stage, `repro parity A B` compares two paths."""
    if len(args.targets) == 2:
        return ON_TWO_PATHS[args.command][2](args)
    if len(args.targets) > 2:
        raise RecipeError(
            f"{len(args.targets)} paths given", f"`repro {args.command} RECIPE` or `repro {args.command} A B`"
        )
    args.recipe = args.targets[0] if args.targets else "tiny"
    return one_stage(args)


def status(args: argparse.Namespace) -> int:
    """What is done in a run directory."""
    run = run_of(args)
    if not run.is_dir():
        raise RecipeError(f"there is no run directory {run}", "check --run-dir")
    if not (run / "recipe.json").exists():
        raise RecipeError(f"{run} is not a run directory: it has no recipe.json", "check --run-dir")
    recipe = read_recipe(run)
    require_name(args, recipe)
    if args.overrides:
        raise RecipeError("`repro status` takes no --set", "it shows what stands in the run directory")
    print("\n".join(status_lines(run)))
    return 0


def recipes(args: argparse.Namespace) -> int:
    """The known recipes, or every field of one."""
    if args.recipe:
        print("\n".join(field_lines(load_recipe(args.recipe, args.overrides))))
    else:
        for name in recipe_names():
            print(f"{name:<18} {load_recipe(name).description}")
    return 0


def print_verdict(run: Path) -> int:
    """The verdict table and the path of the report; returns the verdict's exit status."""
    from evals.report.terminal import terminal_table

    verdict = verdict_of(run)
    print(terminal_table(verdict))
    print(f"report: {run / 'report' / 'index.html'}")
    return tools.EXIT_OF_VERDICT[verdict["overall"]]


if __name__ == "__main__":
    sys.exit(main())
