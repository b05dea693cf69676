"""Reading the records of a run that may be missing, broken or half there."""

from pathlib import Path
from typing import Any

from infra.artifacts import read_json
from infra.errors import ReproError
from model.metrics import read_metrics

SPLITS = ("train", "heldout")

Facts = dict[str, Any]


def optional(path: Path, missing: list[str]) -> Any:
    """A JSON file, or None; a missing or broken one is listed."""
    try:
        return read_json(path)
    except ReproError as error:
        missing.append(error.what)
        return None


def training_curves(run: Path, missing: list[str]) -> dict[str, list[dict[str, Any]]]:
    """The logged steps of both sides, aligned by step where both have one."""
    out = {}
    for side, path in (
        ("reference", run / "reference" / "metrics.jsonl"),
        ("reproduced", run / "train" / "metrics.jsonl"),
    ):
        rows = read_metrics(path)
        if not rows:
            missing.append(f"{path} has no step")
        out[side] = rows
    return out


def paired_steps(curves: dict[str, list[dict[str, Any]]], key: str) -> list[tuple[int, float, float]]:
    """(step, reference, reproduced) where both sides logged a number."""
    ours = {r["step"]: float(r[key]) for r in curves["reproduced"] if r.get(key) is not None}
    return [
        (r["step"], float(r[key]), ours[r["step"]])
        for r in curves["reference"]
        if r.get(key) is not None and r["step"] in ours
    ]
