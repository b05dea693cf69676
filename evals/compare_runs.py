"""The same report for any two runs: is run B a faithful reproduction of run A?

    page = compare_runs(Path("runs/a"), Path("runs/b"), Path("runs/a-against-b"))

Makes a run directory of links in which A's reproduced weights, log and receipts stand as the reference and B's as the reproduction, then evaluates and
reports it like any other. The surprising thing: step-by-step training parity is not asked of two runs, but data receipts still are: two runs
that saw different batches are not a reproduction, however alike they come out.
"""

import os
from pathlib import Path
from typing import Any

from data.config import CorpusConfig
from evals.evaluate import EvaluateSpec, evaluate_run
from evals.report.build import build
from infra.artifacts import differences, read_json, write_json_atomic
from infra.errors import IdentityError, RecipeError
from model.config import TrainConfig
from model.metrics import read_metrics

SHARED = ("model", "optimizer", "schedule", "loss", "history")


def compare_runs(a: Path, b: Path, out: Path, *, cache: Path | None = None) -> Path:
    """Evaluate and report B against A in `out`. Returns the page. Raises where the two cannot be paired."""
    recipes = [read_json(run / "recipe.json") for run in (a, b)]
    recipe = joint_recipe(recipes[0], recipes[1], a, b)
    same_heldout(a, b)
    if (out / "recipe.json").exists() and (found := differences(read_json(out / "recipe.json"), recipe)):
        raise IdentityError(
            f"{out} compares other runs; different: {', '.join(found[:4])}", "choose another folder"
        )
    write_json_atomic(out / "recipe.json", recipe)
    steps = recipe["train"]["landmarks"]
    for step in steps:
        link(weights_of(a, step), out / "reference" / "hf" / f"step{step}")
        link(weights_of(b, step), out / "hf" / f"step{step}")
        link(b / "checkpoints" / f"step{step}", out / "checkpoints" / f"step{step}")
    for name in ("tokens", "corpus", "order"):
        link(b / name, out / name)
    link(a / "train" / "metrics.jsonl", out / "reference" / "metrics.jsonl")
    link(b / "train" / "metrics.jsonl", out / "train" / "metrics.jsonl")
    logged = {str(r["step"]): r.get("receipt") for r in read_metrics(a / "train" / "metrics.jsonl")}
    write_json_atomic(
        out / "reference" / "receipts.json", {str(s): logged[str(s)] for s in steps if logged.get(str(s))}
    )
    for step in (0, *steps):
        joint_gate(a, b, step, out / "parity" / f"step{step}.json")
    joint_logged(a, b, out / "parity" / "logged.json")
    evaluate_run(out, EvaluateSpec.from_recipe(recipe), cache=cache)
    return build(out)


def joint_recipe(first: dict[str, Any], second: dict[str, Any], a: Path, b: Path) -> dict[str, Any]:
    """B's recipe with A's training as its reference, at the landmarks that both have."""
    landmarks = [set(TrainConfig.model_validate(r["train"]).landmark_steps) for r in (first, second)]
    common = sorted(landmarks[0] & landmarks[1])
    if not common:
        raise RecipeError(
            f"{a} and {b} have no landmark in common ({sorted(landmarks[0])} against {sorted(landmarks[1])})",
            "set train.landmarks of one of them",
        )
    if first["data"]["sequence_length"] != second["data"]["sequence_length"]:
        raise RecipeError(
            "the two runs have different sequence lengths", "compare runs of one sequence length"
        )
    return {
        **second,
        "name": f"{first['name']} against {second['name']}",
        "description": f"{b.name} judged as a reproduction of {a.name}",
        "reference": {**second["reference"], **{s: first[s] for s in SHARED}},
        "train": {**second["train"], "landmarks": common, "steps": max(common)},
        "compared": {"reference": str(a), "reproduced": str(b)},
    }


def same_heldout(a: Path, b: Path) -> None:
    """Both runs must hold the same held-out tokens: losses of other documents cannot be paired."""
    folders = [CorpusConfig.model_validate(read_json(run / "recipe.json")["corpus"]).judged for run in (a, b)]
    shards = [read_json(r / "tokens" / f / "manifest.json")["shards"] for r, f in zip((a, b), folders)]
    fields = ("path", "label", "tokens", "sha256", "sample_sha256")
    left, right = ([{k: s[k] for k in fields} for s in side] for side in shards)
    found = differences(left, right)
    if found:
        raise IdentityError(
            f"the two runs hold out different documents: {found[0]}", "compare runs of one corpus"
        )


def weights_of(run: Path, step: int) -> Path:
    """The HF export of a landmark."""
    place = run / "hf" / f"step{step}"
    if not (place / "config.json").exists():
        raise IdentityError(f"{run} has no export of step {step}", f"run `repro convert` for {run}")
    return place


def link(source: Path, target: Path) -> None:
    """A symbolic link, made again where it stands; a source that is not there is left out."""
    if not source.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_symlink():
        target.unlink()
    os.symlink(source.resolve(), target)


def joint_gate(a: Path, b: Path, step: int, target: Path) -> None:
    """The worse of the two runs' logit parity; missing where one of them has none."""
    places = [run / "parity" / f"step{step}.json" for run in (a, b)]
    if all(p.exists() for p in places):
        found = [read_json(p) for p in places]
        worse = max(found, key=lambda f: (not f.get("ok"), f.get("max") or 0.0))
        write_json_atomic(target, {**worse, "ok": all(f.get("ok") is True for f in found)})


def joint_logged(a: Path, b: Path, target: Path) -> None:
    """What each run found of its own weights against its own log; missing where one of them has nothing."""
    places = {"reference": a / "parity" / "logged.json", "reproduced": b / "parity" / "logged.json"}
    if not all(p.exists() for p in places.values()):
        return
    found = {side: read_json(p) for side, p in places.items()}
    ours = [{**r, "side": s} for s, f in found.items() for r in f["rows"] if r["side"] == "reproduced"]
    failures = [text for f in found.values() for text in f["failures"]]
    limit = max(f["limit"] for f in found.values())
    write_json_atomic(target, {"ok": not failures, "limit": limit, "failures": failures, "rows": ours})
