"""Commands beside the chain: `parity A B`, `convert SOURCE OUT`, `audit`, `compare`, `plan`.

Each is a thin layer over one function of the packages below. The surprising thing: parity prompts are the
held-out tokens of a run directory (found above A, or named with --run-dir), never made up.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from infra.errors import RecipeError

if TYPE_CHECKING:
    from model.config import ModelConfig
    from model.plan import Range
    from pipelines.recipe import Recipe

EXIT_OF_VERDICT = {"FAITHFUL": 0, "NOT FAITHFUL": 1, "INCONCLUSIVE": 3}


def add_parity(sub: argparse.ArgumentParser) -> None:
    """Options of `repro parity A B`."""
    sub.add_argument("--in", dest="implementations", default="jax,transformers", metavar="A,B",
                     help="implementations of A and B: jax, transformers, olmo-core")  # fmt: skip
    sub.add_argument("--mode", choices=("fp32", "bf16"), default="fp32")
    sub.add_argument(
        "--localise", action="store_true", help="name the first sub-block that differs (A: HF, B: ours)"
    )
    sub.add_argument(
        "--floor", action="store_true", help="measure the noise floor of A in transformers as well"
    )
    sub.add_argument("--out", default="", help="write the result as JSON")


def add_convert(sub: argparse.ArgumentParser) -> None:
    """Options of `repro convert SOURCE OUT`."""
    sub.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    sub.add_argument("--keep-padding", action="store_true", help="keep all padded vocabulary rows")
    sub.add_argument(
        "--no-parity", action="store_true", help="skip the parity gate; leaves a mark in the lineage"
    )


def add_runner(sub: argparse.ArgumentParser) -> None:
    """Options of `repro tokenize`: where the Beam job runs. Its output does not depend on them."""
    sub.add_argument("--runner", choices=("direct", "dask", "flink", "dataflow"), default=None)
    sub.add_argument("--processes", type=int, default=None, help="worker processes (direct, dask)")
    sub.add_argument(
        "--beam",
        action="append",
        default=[],
        metavar="FLAG",
        help="one more Beam flag, e.g. --beam=--region=…",
    )


def with_runner(recipe: "Recipe", args: argparse.Namespace) -> "Recipe":
    """The recipe with what the command line says about the tokenize job's runner."""
    said = {
        "tokenize_runner": args.runner,
        "tokenize_processes": args.processes,
        "tokenize_options": tuple(args.beam) or None,
    }
    given = {field: value for field, value in said.items() if value is not None}
    return recipe.model_copy(update={"launch": recipe.launch.model_copy(update=given)})


def run_above(path: Path, named: str) -> Path:
    """The run directory named, or the one `path` lies in."""
    for candidate in [Path(named)] if named else [path, *path.resolve().parents]:
        if (candidate / "recipe.json").is_file():
            return candidate
    raise RecipeError(
        f"{named or path} is not in a run directory, so there are no held-out tokens to compare on",
        "name one with --run-dir",
    )


def undescribed(path: Path, recipe: "Recipe") -> "ModelConfig | None":
    """The reference's model section for an OLMo-core checkpoint without its own config.json; None for all others.

    OLMo-core's trainer leaves config.json to the script around it, and the local reference has none beside its steps.
    """
    tables = (path / ".metadata", path / "model_and_optim" / ".metadata")
    if any(t.is_file() for t in tables) and not (path / "config.json").is_file():
        return recipe.reference.model
    return None


def parity(args: argparse.Namespace) -> int:
    """Two checkpoints, in any of three implementations, on held-out tokens; exit 1 when they differ."""
    from evals import localise, pairs
    from infra.artifacts import write_json_atomic
    from model.convert.sources import resolve
    from pipelines.stages import read_recipe
    from pipelines.work import parity_prompts

    check_file_place(args.out)
    a, b = (Path(resolve(t)[0]) for t in args.targets)
    names = args.implementations.split(",")
    if len(names) != 2:
        raise RecipeError(
            f"--in {args.implementations!r} does not name two implementations", "for example jax,transformers"
        )
    if args.localise and not (a / "config.json").is_file():
        raise RecipeError(
            f"--localise reads the inputs of every sub-block from transformers, and {a} is no HF directory",
            "name the HF directory first, or convert A with `repro convert`",
        )
    run = run_above(a, args.run_dir)
    recipe = read_recipe(run)
    prompts = parity_prompts(recipe, run)
    first, second = (pairs.side(p, n, undescribed(p, recipe)) for p, n in zip((a, b), names))
    found = pairs.compare(first, second, prompts, recipe.parity, mode=args.mode)
    kl = max(found["kl_max"], found["reverse_kl_max"])
    print(
        f"A  {found['first']}\nB  {found['second']}\n{found['mode']}, prompts {found['shape']}, window {found['window']}"
    )
    print(
        f"max |dlogit| {found['max']:.3g} (limit {found['limits']['max_logit_difference']:.3g})  mean {found['mean']:.3g}"
    )
    print(
        f"max KL {kl:.3g} (limit {found['limits']['max_kl']:.3g})  top-1 {found['top1']:.4f}  top-5 {found['top5']:.4f}"
    )
    for bucket in found["buckets"]:
        print(
            f"  positions {bucket['from']:>5}..{bucket['to'] - 1:<5}  max {bucket['max']:.3g}  mean {bucket['mean']:.3g}"
        )
    print(f"worst: {found['where']}")
    if args.floor:
        found["floor"] = pairs.noise_floor(a, prompts, undescribed(a, recipe))
        for name, floor in found["floor"].items():
            print(f"noise floor, {name}: max {floor['max']:.3g}, KL {floor['kl_max']:.3g}")
    if args.localise:
        from model.convert import stream

        source = stream.open_source(b, undescribed(b, recipe))
        found["localise"] = localise.localise(a, pairs.params_of(source), source.model, prompts[0])
        print(localise.table(found["localise"]))
        found["ok"] = found["ok"] and found["localise"]["ok"]
    if args.out:
        write_json_atomic(args.out, found)
    print("PARITY" if found["ok"] else "NO PARITY")
    return 0 if found["ok"] else 1


def check_file_place(path: str, option: str = "--out") -> None:
    """Refuse a place for a result that cannot be written, before anything is computed. Nothing is said of ''."""
    above = next((p for p in Path(path).absolute().parents if p.exists()), Path("/"))
    if path and (Path(path).is_dir() or not above.is_dir() or not os.access(above, os.W_OK)):
        raise RecipeError(
            f"{option} {path} is no place for a file", "name a file in a directory that can be written"
        )


def convert(args: argparse.Namespace) -> int:
    """A checkpoint (ours, HF or OLMo-core) to HF safetensors, through the parity gate."""
    from evals.pairs import export_checked
    from model.convert.sources import resolve
    from model.convert.stream import free_place
    from pipelines.stages import read_recipe
    from pipelines.work import parity_prompts

    free_place(args.targets[1])
    resolved = resolve(args.targets[0])
    source, out = Path(resolved.path), Path(args.targets[1])
    run = run_above(source, args.run_dir)
    recipe = read_recipe(run)
    lineage = export_checked(
        source, out, parity_prompts(recipe, run), recipe.parity, dtype=args.dtype, keep_padding=args.keep_padding,
        context_length=recipe.data.sequence_length, eos_id=recipe.tokenizer.eos_id, pad_id=recipe.tokenizer.pad_id,
        no_parity=args.no_parity, model=undescribed(source, recipe),
        origin=resolved.lineage,
    )  # fmt: skip
    checked = lineage["parity"]
    print(
        f"{out}: " + (f"parity, max |dlogit| {checked['max']:.3g}" if checked["checked"] else checked["why"])
    )
    return 0


def audit(args: argparse.Namespace) -> int:
    """Recompute the data receipts of a run from index and order; exit 1 and name the first step that differs."""
    from data.audit import audit_run
    from data.order import open_order
    from pipelines.stages import read_recipe
    from pipelines.work import train_index

    run = Path(args.run_dir or f"runs/{args.recipe}")
    recipe = read_recipe(run)
    index = train_index(recipe, run, verify="full")
    order = open_order(run / "order", n_instances=index.n_instances, index_digest=index.digest)
    found = audit_run(run, index, order, recipe.data.global_batch_instances)
    print("\n".join(side["text"] for side in found.values() if isinstance(side, dict)))
    return 0 if found["ok"] else 1


def compare(args: argparse.Namespace) -> int:
    """Two runs judged against each other: run B as the reproduction of run A; the exit status is the verdict's."""
    from evals.compare_runs import compare_runs
    from evals.report.terminal import terminal_table
    from pipelines.stages import verdict_of

    a, b = Path(args.run_a), Path(args.run_b)
    out = Path(args.out or f"runs/compare-{a.name}-{b.name}")
    page = compare_runs(a, b, out)
    verdict = verdict_of(out)
    print(terminal_table(verdict))
    print(f"report: {page}")
    return EXIT_OF_VERDICT[verdict["overall"]]


def add_plan(sub: argparse.ArgumentParser) -> None:
    """Options of `repro plan`."""
    sub.add_argument(
        "--topology", default="", help="TPU slice, for instance v5p:4x4x4 (default: the recipe's)"
    )
    sub.add_argument(
        "--sweep", action="store_true", help="try meshes, rematerialisation and micro-batches; rank them"
    )
    sub.add_argument("--tensors", default="1,2,4", help="sizes of the tensor axis that --sweep tries")
    sub.add_argument("--remats", default="none,dots,block,full", help="policies that --sweep tries")
    sub.add_argument("--splits", default="1,4", help="micro-batches per step that --sweep tries")
    sub.add_argument("--prices", default="", help='JSON file {"v5p": 4.2} in USD per chip and hour')
    sub.add_argument("--out", default="", help="write the plan as JSON")
    sub.add_argument("--cache", default=".cache/plans", help="compiled results by fingerprint")


def sweep_range(args: argparse.Namespace) -> "Range":
    """What --tensors, --remats and --splits name."""
    from model.config import NumericsConfig
    from model.plan import Range

    remats = tuple(args.remats.split(","))
    known = get_args(NumericsConfig.model_fields["remat"].annotation)
    unknown = sorted(set(remats) - set(known))
    if unknown:
        raise RecipeError(f"unknown policy {', '.join(unknown)}", f"known: {', '.join(known)}")
    try:
        tensors, splits = (tuple(int(n) for n in text.split(",")) for text in (args.tensors, args.splits))
    except ValueError:
        tensors = splits = ()
    if not tensors or not splits or min(*tensors, *splits) < 1:
        raise RecipeError(
            f"--tensors {args.tensors!r} and --splits {args.splits!r} must be numbers from 1 on",
            "for example 1,2,4",
        )
    return Range(tensors, remats, splits)


def plan(args: argparse.Namespace) -> int:
    """Compile the recipe's step for a TPU slice on this machine; exit 1 when it does not fit."""
    from infra.artifacts import write_json_atomic
    from infra.prices import price_of
    from infra.topology import parse
    from model.plan import PlanRequest, make_plan, sweep, text
    from pipelines.recipe import load_recipe

    check_file_place(args.out)
    check_file_place(str(Path(args.cache) / "plan.json"), "--cache")
    recipe = load_recipe(args.recipe, args.overrides)
    slice_ = parse(args.topology or recipe.launch.topology)
    request = PlanRequest(
        recipe.model, recipe.optimizer, recipe.loss, recipe.numerics, recipe.mesh, recipe.train,
        recipe.data.sequence_length, recipe.data.global_batch_instances,
    )  # fmt: skip
    price, cache = price_of(slice_.type.name, args.prices), Path(args.cache)
    if args.sweep:
        plans, refused = sweep(request, slice_, sweep_range(args), price_per_chip_hour=price, cache=cache)
        for choice, why in refused:
            print(
                f"refused: tensor={choice.mesh.tensor} remat={choice.numerics.remat}: {why}", file=sys.stderr
            )
    else:
        plans = [make_plan(request, slice_, price_per_chip_hour=price, cache=cache)]
    print("\n\n".join(text(p, recipe.train.steps) for p in plans))
    if args.out:
        write_json_atomic(args.out, plans if args.sweep else plans[0])
    return 0 if plans and plans[0]["fits"] else 1
