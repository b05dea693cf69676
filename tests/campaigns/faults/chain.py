"""A small run with one fault on our side: the stages again, every check heard, and the verdict.

    control(run)                        # the whole chain, undisturbed but for one interruption of training; once
    found = trial(run, fault, where)    # a copy of links, the stages from `fault.redo` on, what the checks said
    for found in trials(run, names, where, jobs=2, cache=...): ...     # the same, in processes of their own

All mechanisms of the recipe are on in the control, on both sides: masked instances, skipped steps, two schedules with a lost
window, YaRN on full layers. A check that fires is written down and the chain goes on where it can, so that later checks and
the verdict are heard too. The surprising thing: the stages of a trial run in one process, since a fault lives in a process;
only the reference has another one, which no fault reaches.
"""

import contextlib
import dataclasses
import functools
import io
import multiprocessing
import os
import shutil
import time
import unittest.mock
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from faults.catalogue import BY_NAME, Fault
from faults.hear import Check, effect, hear, rank
from faults.inject import applied, swapped

INTERRUPT_AT = 14
# The wider draw keeps branch outputs as far above the norms' epsilon as they are at width 4096.
WIDTH = {"init_std": 0.1, "d_model": 16, "n_heads": 2, "n_kv_heads": 2, "head_dim": 8, "d_ff": 32, "window": 32,
         "rope_scaling": '{"factor": 8, "original_context": 48}'}  # fmt: skip
BOTH = {
    "optimizer.skip_step.window": "8",
    "optimizer.skip_step.sigma": "1.0",
    "schedule.parts": '[{"kind": "cosine", "peak": 3e-3, "warmup": 4, "horizon": 16, "until": 8},'
    ' {"kind": "half_cosine", "peak": 3e-3, "warmup": 8, "horizon": 30}]',
    "history.cold_window_at": "[8]",
    **{f"model.{k}": str(v) for k, v in WIDTH.items()},
}
MICRO = [
    *(f"{side}{field}={value}" for side in ("", "reference.") for field, value in BOTH.items()),
    "corpus.megabytes_per_domain=0.3", "corpus.heldout_max_documents=6",
    "data.sequence_length=96", "data.global_batch_instances=4",
    "data.filter.enabled=true", "data.filter.max_count=4",
    "train.steps=24", "train.landmarks=[12, 24]", "train.checkpoint_every=12",
    "reference.threads=1", "evals.heldout_documents=6", "evals.items_per_task=6", "evals.context=256",
    "evals.torch_documents=1", "evals.spot_items=1", "evals.bounds.macro_accuracy=0.2",
]  # fmt: skip
LINKED = ("corpus", "tokens", "order", "init", "parity", "reference", "checkpoints", "train", "hf", "evals",
          "stages")  # fmt: skip


@functools.cache
def control_recipe() -> Any:
    """The recipe of the control: `tiny`, shrunk, with every mechanism on."""
    from pipelines.recipe import load_recipe

    return load_recipe("tiny", MICRO)


def settle(cache: Path) -> None:
    """One process for many runs: compiled programs are kept on disk."""
    import jax

    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def control(run: Path) -> dict[str, Any]:
    """Make the control run; returns what was heard, which must be nothing."""
    from pipelines.stages import STAGES, open_run, run_stage

    begun = time.monotonic()
    open_run(control_recipe(), run)
    with quiet(run), trained_here(INTERRUPT_AT):
        for stage in STAGES:
            run_stage(stage.name, control_recipe(), run)
        found = judged(run, [], None)
    return {"name": "control", "seconds": round(time.monotonic() - begun, 1), **found, **exercised(run)}


def exercised(run: Path) -> dict[str, Any]:
    """What of the recipe's mechanisms the reference's run really went through."""
    from evals.parity import read_metrics

    rows = read_metrics(run / "reference" / "metrics.jsonl")
    return {
        "skipped_steps": [r["step"] for r in rows if r["skipped"]],
        "masked_instances": sum(len(r["masked"]) for r in rows),
        "steps": len(rows),
    }


def trial(
    base: Path, fault: Fault, where: Path, *, keep: bool = False, extra: Sequence[str] = ()
) -> dict[str, Any]:
    """One fault in a run directory of its own; returns its record. `extra`: overrides beside the fault's own."""
    from infra.artifacts import read_json, write_json_atomic
    from infra.errors import ReproError
    from pipelines.recipe import _apply, validate
    from pipelines.stages import run_stage

    begun, run = time.monotonic(), where / fault.name
    shutil.rmtree(run, ignore_errors=True)
    clone(base, run)
    stages = to_make(fault)
    for stage in stages:
        clear(run, stage, fault)
    tree = read_json(run / "recipe.json")
    for field in (*fault.sets, *extra):
        _apply(tree, field)
    recipe = validate(tree)
    write_json_atomic(run / "recipe.json", recipe.model_dump(mode="json"))
    checks: list[Check] = []
    broke = ""
    with quiet(run), trained_here(INTERRUPT_AT if fault.interrupted else 0), token_audit_heard(checks):
        for stage in stages:
            try:
                with applied(fault, stage):
                    run_stage(stage, recipe, run)
            except ReproError as error:
                checks.append(Check(stage, f"{stage} refuses", None, error.what))
                break
            except Exception as error:  # no check of ours: the injection is at fault, or the product crashes
                broke = f"{stage}: {type(error).__name__}: {error}"
                break
        if fault.unit_test:
            checks += unit_test(fault)
        with applied(fault, "report"):
            found = judged(run, checks, base)
    if not keep:
        shutil.rmtree(run)
    return {
        "name": fault.name, "section": fault.section, "traps": list(fault.traps), "words": fault.words, "alike": fault.alike,
        "sets": list(fault.sets), "patch": fault.patch[0] if fault.patch else "",
        "seconds": round(time.monotonic() - begun, 1), "broke": broke, **found,
    }  # fmt: skip


def trials(
    base: Path, names: Sequence[str], where: Path, *, jobs: int, cache: Path, keep: bool = False, extra: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """The records of the named faults, as they come. What a mistake leaves behind in a process reaches no other trial's files."""
    from infra.memory import allocator_environment

    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn, initializer=settle, initargs=(cache,)) as pool:
        # Tensors are small: threads of one trial would only wait for each other. Workers read this when they start.
        with unittest.mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", **allocator_environment()}):
            asked = [pool.submit(_named, base, name, where, keep, extra) for name in names]
        yield from (done.result() for done in as_completed(asked))


def _named(base: Path, name: str, where: Path, keep: bool, extra: Sequence[str]) -> dict[str, Any]:
    return trial(base, BY_NAME[name], where, keep=keep, extra=extra)


def judged(run: Path, checks: list[Check], base: Path | None) -> dict[str, Any]:
    """Everything the checks of the product say about `run`, the verdict, and the effect on the outcome."""
    from evals.report.build import plain
    from evals.report.gather import gather, verdict_inputs
    from evals.verdict import judge

    facts = gather(run)
    verdict = judge(plain(verdict_inputs(facts)))
    checks = sorted([*checks, *hear(run, facts, verdict)], key=rank)
    return {
        "checks": [{**dataclasses.asdict(c), "message": c.message.replace(str(run), "RUN")} for c in checks],
        "verdict": verdict.overall,
        "reasons": [r.replace(str(run), "RUN") for r in verdict.reasons],
        "surfaces": verdict.surfaces,
        "effect": effect(run, facts, base),
    }


def to_make(fault: Fault) -> list[str]:
    """Stages made again, in order. The reference and its weights stay, unless the tokens themselves change."""
    from pipelines.stages import STAGES

    gone = [fault.redo]
    for stage in STAGES:
        if stage.name not in gone and set(stage.after) & set(gone):
            gone.append(stage.name)
    kept = {"init"} if fault.redo == "tokenize" else {"init", "reference"}
    return [s.name for s in STAGES if s.name in gone and s.name not in kept]


def clone(base: Path, run: Path) -> None:
    """A run directory of hard links; the cache of compiled items is shared."""
    run.mkdir(parents=True)
    shutil.copy(base / "recipe.json", run / "recipe.json")
    for name in LINKED:
        shutil.copytree(base / name, run / name, copy_function=os.link)
    (run / ".cache").symlink_to((base / ".cache").resolve())


def clear(run: Path, stage: str, fault: Fault) -> None:
    """Remove what a stage made. Scores of the reference that the fault cannot change stay and are used again."""
    from pipelines.stages import BY_NAME as STAGE

    spare = stage == "evaluate" and fault.redo in ("order", "train", "convert")
    (run / "stages" / f"{stage}.json").unlink()
    (run / "stages" / f"{stage}.begun.json").unlink(missing_ok=True)
    for pattern in STAGE[stage].owns:
        for path in run.glob(pattern):
            files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
            for file in files:
                if not (spare and file.name == "reference.downstream.json"):
                    file.unlink()
            if path.is_dir() and not spare:
                shutil.rmtree(path)


@contextlib.contextmanager
def trained_here(interrupt_at: int) -> Iterator[None]:
    """Stage `train` in this process; the step-0 gate has been heard and does not stop it. 0: no interruption."""
    from pipelines.stages import BY_NAME as STAGE

    real = STAGE["train"]
    STAGE["train"] = dataclasses.replace(real, work=lambda recipe, run: train_here(run, interrupt_at))
    try:
        yield
    finally:
        STAGE["train"] = real


def train_here(run: Path, interrupt_at: int) -> None:
    """Train as `python -m model.train` does; at `interrupt_at` stop as on SIGTERM, and start again."""
    from model.train import Preempted, Trainer, TrainSpec

    class Stopped(Trainer):
        def feed(self, first: int, last: int) -> Iterator[Any]:
            for batch, placed in super().feed(first, last):
                self.stop.asked = batch.step == interrupt_at
                yield batch, placed

    try:
        Stopped(TrainSpec.from_run(run)).run()
    except Preempted:
        Trainer(TrainSpec.from_run(run)).run()


@contextlib.contextmanager
def token_audit_heard(checks: list[Check]) -> Iterator[None]:
    """The audit of the token files is written down, and the chain goes on past it."""
    from infra.errors import DataError

    def heard(real: Any) -> Any:
        def audit(*args: Any) -> None:
            try:
                real(*args)
            except DataError as error:
                checks.append(Check("tokenize", "token audit", None, error.what))

        return audit

    with swapped("data.token_audit:audit_tokens", heard):
        yield


def unit_test(fault: Fault) -> list[Check]:
    """The named test with the fault on; a check fires when it fails."""
    import pytest

    with applied(fault, "train"):
        status = pytest.main(["-q", "-p", "no:cacheprovider", "--no-header", fault.unit_test])
    return [Check("test", "unit test", None, f"{fault.unit_test} fails")] if status == 1 else []


@contextlib.contextmanager
def quiet(run: Path) -> Iterator[None]:
    """What stages print goes to RUN/log.txt."""
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            yield
    finally:
        (run / "log.txt").write_text(text.getvalue())
