"""The `repro` command: the whole chain, one stage of a run directory, or a look at it.

    repro reproduce tiny                    the whole chain through a Prefect flow
    repro reproduce tiny --no-server        the same chain as plain functions
    repro train tiny --run-dir runs/tiny    one stage
    repro status tiny

Exit status: 0 FAITHFUL (or stage done), 1 NOT FAITHFUL, 3 INCONCLUSIVE, 2 a problem you can fix,
75 training was preempted and saved. The surprising thing: nothing heavy is imported before it is needed,
so `repro --help` and `repro status` are instant.
"""

import argparse
import errno
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from infra.errors import ReproError
from infra.progress import clock

EXIT_OF_VERDICT = {"FAITHFUL": 0, "NOT FAITHFUL": 1, "INCONCLUSIVE": 3}


def parser() -> argparse.ArgumentParser:
    """The command line of `repro`."""
    from pipelines.stages import BY_NAME

    top = argparse.ArgumentParser(
        prog="repro", description="Reproduce an OLMo 3 run in JAX and prove it faithful."
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, help_text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help_text, description=help_text)
        sub.add_argument("recipe", nargs="?", default="tiny", help="recipe name (default: tiny)")
        sub.add_argument("--run-dir", default="", help="run directory (default: runs/<recipe>)")
        sub.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="FIELD=VALUE",
            dest="overrides",
            help="override one field",
        )
        sub.add_argument("--debug", action="store_true", help="show tracebacks")
        return sub

    whole = add("reproduce", "the whole chain, ending with a verdict")
    whole.add_argument("--fresh", action="store_true", help="delete the run directory first")
    whole.add_argument("--no-server", action="store_true", help="plain functions, no Prefect")
    for name, stage in BY_NAME.items():
        one = add(name, f"one stage: {stage.does}")
        one.add_argument(
            "--redo", action="store_true", help="forget this stage and all after it, then make it"
        )
    add("status", "what is done in a run directory")
    add("recipes", "the known recipes, or every field of one")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    args = parser().parse_args(argv)
    _quiet(args.debug)
    try:
        return _dispatch(args)
    except KeyboardInterrupt:
        print("repro: interrupted; the same command continues from what is committed", file=sys.stderr)
        return 130
    except ReproError as e:
        if args.debug:
            raise
        print(f"repro: {e}", file=sys.stderr)
        return e.exit_code
    except OSError as e:
        if args.debug or e.errno not in _OS_REMEDIES:
            raise
        print(
            f"repro: {e.strerror}: {e.filename or 'the run directory'}\n  -> {_OS_REMEDIES[e.errno]}",
            file=sys.stderr,
        )
        return 2


_OS_REMEDIES = {
    errno.ENOSPC: "free some space and run the same command again; nothing half-written counts as done",
    errno.EDQUOT: "free some space and run the same command again; nothing half-written counts as done",
    errno.EACCES: "check the permissions, or choose another RUN_DIR",
    errno.EPERM: "check the permissions, or choose another RUN_DIR",
    errno.EROFS: "the file system is read-only: choose another RUN_DIR",
}


def _quiet(debug: bool) -> None:
    """Our own progress lines are what is shown; libraries speak only of errors. Nothing looks for a network."""
    if not any(Path(p).exists() for p in ("/dev/accel0", "/dev/vfio/0", "/dev/nvidia0")):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not debug:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        logging.getLogger().setLevel(logging.ERROR)


def _dispatch(args: argparse.Namespace) -> int:
    from pipelines.recipe import field_lines, load_recipe, recipe_names
    from pipelines.stages import open_run, read_recipe, redo_from, run_stage, status_lines

    if args.command == "recipes":
        if args.recipe == "tiny" and "tiny" not in sys.argv[2:]:
            for name in recipe_names():
                print(f"{name:<18} {load_recipe(name).description}")
            return 0
        print("\n".join(field_lines(load_recipe(args.recipe, args.overrides))))
        return 0
    run = Path(args.run_dir or f"runs/{args.recipe}")
    if args.command == "status":
        print("\n".join(status_lines(run)))
        return 0
    if args.command == "reproduce":
        recipe = load_recipe(args.recipe, args.overrides)
        open_run(recipe, run, fresh=args.fresh)
        return _reproduce(recipe, run, server=not args.no_server)
    stands = (run / "recipe.json").exists()
    recipe = read_recipe(run) if stands and not args.overrides else load_recipe(args.recipe, args.overrides)
    open_run(recipe, run)
    from infra.lease import Lease

    with Lease(run / ".lease", f"repro {args.command}"):
        if args.redo:
            redo_from(args.command, run)
        run_stage(args.command, recipe, run)
    return _print_verdict(run) if args.command == "report" else 0


def _reproduce(recipe, run: Path, *, server: bool) -> int:
    from infra.lease import Lease
    from pipelines.stages import chain, run_stage

    # A killed flow's trainer saves and ends by itself within seconds; the trainer's own lease covers it.
    with Lease(run / ".lease", "repro reproduce"):
        if server:
            from pipelines.flows import run_reproduce

            outcomes = run_reproduce(run)
        else:
            outcomes = chain(recipe, run, lambda name: run_stage(name, recipe, run))
    reused = [o.stage for o in outcomes if o.reused]
    made = [f"{o.stage} {clock(o.seconds)}" for o in outcomes if not o.reused]
    print(f"\nmade: {', '.join(made) or 'nothing'}\nreused: {', '.join(reused) or 'nothing'}\n")
    return _print_verdict(run)


def _print_verdict(run: Path) -> int:
    from evals.report.terminal import terminal_table

    from pipelines.stages import verdict_of

    verdict = verdict_of(run)
    print(terminal_table(verdict))
    print(f"report: {run / 'report' / 'index.html'}")
    return EXIT_OF_VERDICT[verdict["overall"]]


if __name__ == "__main__":
    sys.exit(main())
