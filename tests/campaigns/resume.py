"""Kill a training run at random moments and show that it ends bit-equal to the run that was left alone.

    python tests/campaigns/resume.py                      36 trials on a shrunk `tiny` (`make resume-campaign`)
    python tests/campaigns/resume.py --only 17            one trial again
    python tests/campaigns/resume.py --run RUN --trials 2 another prepared run directory

A trial is one or two interruptions and then an undisturbed start to the end. Compared at every landmark: weights,
moments, Adam count, skip window, step, receipt; and every logged number of every step. Trial 0 is the control:
one bit of one moment is flipped on the way, and the comparison must notice.

Seed and number fix kind, signal and moment of a trial (a step or event, and a fraction of a measured duration);
the machine's scheduling decides where within that the process dies, so each record says what was found after it.
Trials share the compiled step through JAX's compilation cache (an empty JAX_COMPILATION_CACHE_DIR turns it off).
The surprising thing: a process killed before its first step counts too. Most bugs of resuming live there.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("kill", "term", "save", "twice", "restore", "term in save")
INPUTS = ("tokens", "order", "init", "recipe.json")
STABLE = ("step", "ce", "z_loss", "grad_norm", "skipped", "lr", "receipt", "tokens_seen")
PREEMPTED = 75
WIDTH = {"d_model": 8, "n_heads": 2, "n_kv_heads": 2, "head_dim": 4, "d_ff": 16, "window": 8}
SHRUNK = [
    *(f"{side}.{k}={v}" for side in ("model", "reference.model") for k, v in WIDTH.items()),
    "corpus.megabytes_per_domain=0.3", "corpus.heldout_max_documents=6", "data.sequence_length=32",
    "data.global_batch_instances=4", "train.steps=16", "train.checkpoint_every=3", "train.landmarks=[9, 16]",
    "schedule.parts=[{\"kind\": \"cosine\", \"peak\": 1e-3, \"warmup\": 3, \"horizon\": 16}]",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Blow:
    """One interruption: `event` (start, step, save, restore) number `step` or later, plus `fraction` of a duration."""

    event: str
    step: int
    fraction: float
    signal: str = "SIGKILL"


@dataclasses.dataclass
class Pace:
    """Seconds measured on the straight run: start to first step, one step, one save."""

    start: float
    step: float
    save: float

    def of(self, event: str) -> float:
        """The duration that a blow's fraction is taken of."""
        return {"start": self.start, "step": self.step, "save": self.save, "restore": 0.2 * self.start}[event]


def blows(seed: int, number: int, steps: int) -> tuple[str, tuple[Blow, ...]]:
    """(kind, interruptions) of a trial: a pure function."""
    rng = random.Random(f"{seed}/{number}")
    kind = KINDS[(number - 1) % len(KINDS)]

    def anywhere(sign: str = "SIGKILL") -> Blow:
        if rng.random() < 0.25:
            return Blow("start", 0, rng.random(), sign)
        return Blow("step", rng.randint(1, steps - 2), rng.random(), sign)

    def saving(sign: str = "SIGKILL") -> Blow:
        return Blow("save", rng.randint(1, steps - 4), rng.random(), sign)

    made = {
        "kill": lambda: (anywhere(),),
        "term": lambda: (anywhere("SIGTERM"),),
        "save": lambda: (saving(),),
        "twice": lambda: (anywhere(), anywhere()),
        "restore": lambda: (Blow("step", rng.randint(4, steps - 2), rng.random()), Blow("restore", 0, rng.random())),
        "term in save": lambda: (saving("SIGTERM"), anywhere()),
    }  # fmt: skip
    return kind, made[kind]()


def launch(run: Path) -> subprocess.Popen:
    """The trainer in a process of its own, as the launcher starts it; messages go to RUN/stderr.txt."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT),
           "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(run.parent / "compiled")),
           "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # fmt: skip
    with open(run / "stderr.txt", "w") as err:
        return subprocess.Popen(
            [sys.executable, "-m", "model.train", "--run", str(run)],
            env=env, stdout=subprocess.DEVNULL, stderr=err, cwd=ROOT,
        )  # fmt: skip


def logged(run: Path) -> int:
    """Complete lines of the log."""
    path = run / "train" / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def writing(run: Path) -> list[int]:
    """Steps whose checkpoint is half-written."""
    root = run / "checkpoints"
    names = os.listdir(root) if root.is_dir() else []
    return [int(n.removeprefix(".writing-step")) for n in names if n.startswith(".writing-step")]


def happened(run: Path, blow: Blow) -> bool:
    """Whether the event of a blow has come."""
    if blow.event == "start":
        return True
    if blow.event == "step":
        return logged(run) >= blow.step
    if blow.event == "save":
        return any(step >= blow.step for step in writing(run))
    return "resuming from" in (run / "stderr.txt").read_text()


def wait(process: subprocess.Popen, until: Callable[[], bool], seconds: float = 600.0) -> bool:
    """Wait for `until`, looking every 2 ms; False when the process ended first."""
    deadline = time.monotonic() + seconds
    while process.poll() is None:
        if until():
            return True
        if time.monotonic() > deadline:
            process.kill()
            raise SystemExit(f"the trainer hangs: {process.args}")
        time.sleep(0.002)
    return False


def strike(run: Path, blow: Blow, pace: Pace) -> dict[str, Any]:
    """Start the trainer, interrupt it, and say what was found afterwards."""
    before = max(saved(run), default=0)
    process = launch(run)
    if wait(process, lambda: happened(run, blow)):
        wait_until = time.monotonic() + blow.fraction * pace.of(blow.event)
        wait(process, lambda: time.monotonic() >= wait_until)
        process.send_signal(getattr(signal, blow.signal))
    code = process.wait(600)
    if code not in (0, PREEMPTED, -signal.SIGKILL, -signal.SIGTERM):
        raise SystemExit((run / "stderr.txt").read_text())
    return {**dataclasses.asdict(blow), "exit": code, "landed": code != 0, "saved_before": before,
            "saved_after": max(saved(run), default=0), "logged": logged(run),
            "half_written": writing(run)}  # fmt: skip


def saved(run: Path) -> tuple[int, ...]:
    """Committed checkpoints."""
    from model.checkpoint import committed

    return committed(run / "checkpoints").steps


def finish(run: Path) -> float:
    """Start the trainer and let it end; returns seconds."""
    begun = time.monotonic()
    if launch(run).wait(600):
        raise SystemExit((run / "stderr.txt").read_text())
    return time.monotonic() - begun


def straight(run: Path) -> Pace:
    """The undisturbed run, with the durations that the moments of the trials are taken from."""
    process, begun = launch(run), time.monotonic()
    wait(process, lambda: logged(run) >= 1)
    first = time.monotonic()
    saves, since = [], 0.0
    while process.poll() is None:
        now, busy = time.monotonic(), bool(writing(run))
        if busy and not since:
            since = now
        elif since and not busy:
            saves.append(now - since)
            since = 0.0
        time.sleep(0.002)
    if process.returncode:
        raise SystemExit((run / "stderr.txt").read_text())
    steps = logged(run)
    return Pace(first - begun, (time.monotonic() - first) / steps, sum(saves) / max(len(saves), 1) or 0.05)


def evidence(run: Path) -> dict[str, str]:
    """Digests of everything that must be bit-equal: state at each landmark, and the log."""
    from model.checkpoint import restore, state_digest
    from model.metrics import read_metrics
    from model.step import abstract_state
    from model.train import TrainSpec

    spec = TrainSpec.from_run(run)
    found = {}
    for step in spec.train.landmark_steps:
        state, meta = restore(run / "checkpoints", step, abstract_state(spec.step_spec()))
        opt = state["opt"]
        parts = {"weights": state["params"], "moments": {"m": opt["m"], "v": opt["v"]}, "adam count": opt["count"],
                 "skip window": opt["window"], "step": state["step"]}  # fmt: skip
        found |= {f"{name} at {step}": state_digest(tree) for name, tree in parts.items()}
        found[f"receipt at {step}"] = hashlib.sha256(json.dumps(meta["receipt"]).encode()).hexdigest()
    for line in read_metrics(run / "train" / "metrics.jsonl"):
        found[f"log of step {line['step']}"] = json.dumps([line[k] for k in STABLE])
    return found


def flip_one_bit(run: Path) -> None:
    """The control: save the newest checkpoint again with one bit of one first moment flipped."""
    import jax
    import numpy as np

    from model.checkpoint import latest_committed, read_meta, restore, write_checkpoint
    from model.step import abstract_state
    from model.train import TrainSpec

    root = run / "checkpoints"
    step, _ = latest_committed(root)
    state, _ = restore(root, step, abstract_state(TrainSpec.from_run(run).step_spec()))
    gain = np.array(state["opt"]["m"]["final_norm"])
    gain.view(np.uint32)[0] ^= 1 << 20  # the lowest bits are rounded away by the next update
    state["opt"]["m"]["final_norm"] = jax.device_put(gain)
    write_checkpoint(root, step, state, read_meta(root, step))


def trial(
    base: Path, where: Path, seed: int, number: int, pace: Pace, wanted: dict[str, str]
) -> dict[str, Any]:
    """One trial in a run directory of its own; its record."""
    run = where / f"trial{number}"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    for name in INPUTS:
        (run / name).symlink_to((base / name).resolve())
    steps = json.loads((base / "recipe.json").read_text())["train"]["steps"]
    if number:
        kind, plan = blows(seed, number, steps)
    else:
        kind, plan = "control", (Blow("step", steps // 2, 0.5, "SIGTERM"),)
    struck = [strike(run, blow, pace) for blow in plan]
    if not number:
        flip_one_bit(run)
    finish(run)
    found = evidence(run)
    different = sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k))
    shutil.rmtree(run)
    return {"trial": number, "kind": kind, "blows": struck, "different": different}


def prepare(base: Path) -> None:
    """The shrunk `tiny`: tokens, order and step-0 weights through the usual stages."""
    flags = [flag for field in SHRUNK for flag in ("--set", field)]
    for stage in ("tokenize", "order", "init"):
        command = [sys.executable, "-m", "pipelines.cli", stage, "tiny", "--run-dir", str(base), *flags]
        if subprocess.run(command, cwd=ROOT).returncode:
            raise SystemExit(f"repro {stage} failed")


def page(record: dict[str, Any]) -> str:
    """The record for a person."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for t in record["trials"]:
        kinds.setdefault(t["kind"], []).append(t)
    rows = []
    for kind, trials in kinds.items():
        struck = [b for t in trials for b in t["blows"]]
        rows.append(
            f"| {kind} | {len(trials)} | {sum(b['landed'] for b in struck)} of {len(struck)} "
            f"| {sum(b['saved_after'] == b['saved_before'] for b in struck)} "
            f"| {sum(bool(b['half_written']) for b in struck)} | {sum(b['exit'] == PREEMPTED for b in struck)} "
            f"| {sum(not t['different'] for t in trials)} of {len(trials)} |"
        )
    pace = record["pace"]
    real = [t for t in record["trials"] if t["trial"]]
    hit = [t for t in real if any(b["landed"] for b in t["blows"])]
    return "\n".join(
        [
            "# Resume campaign", "",
            f"`make resume-campaign` (seed {record['seed']}): {len(real)} trials in {record['seconds'] / 60:.1f} minutes, "
            f"{len(hit)} of them really interrupted; {sum(not t['different'] for t in hit)} of these {len(hit)} are bit-equal to the "
            "straight run.",
            "An interruption that comes after the last step does not land and proves nothing; it is counted apart.",
            "Made by `tests/campaigns/resume.py`; every interruption of every trial is in `resume-campaign.json`.", "",
            f"Run: {record['about']}. On the straight run: {pace['start']:.1f} s to the first step, "
            f"{pace['step'] * 1000:.0f} ms per step, {pace['save'] * 1000:.0f} ms per save. "
            + ", ".join(f"{k} {v}" for k, v in record["versions"].items()) + f", {record['cpus']} CPUs.", "",
            "Bit-equal means: weights, moments, Adam count, skip window, step and receipt at each landmark, and every",
            f"logged number of every step ({len(record['compared'])} items). The control flips one bit of one moment on",
            "the way and must come out different.", "",
            "| kind | trials | interruptions that landed | without a new checkpoint | left a half-written one "
            "| saved on SIGTERM (status 75) | bit-equal |",
            "|---|---|---|---|---|---|---|",
            *rows, "",
            "One trial again: `python tests/campaigns/resume.py --only NUMBER`.", "",
        ]
    )  # fmt: skip


def finish_record(record: dict[str, Any], text: str, stem: str) -> None:
    """Print the page; with a stem, write STEM.json and STEM.md."""
    from infra.artifacts import write_json_atomic

    if stem:
        write_json_atomic(f"{stem}.json", record)
        Path(f"{stem}.md").write_text(text)
    print(text)


def main() -> int:
    """Prepare, run straight, run the trials, write the record; 1 if a trial differs or the control does not."""
    parser = argparse.ArgumentParser(
        description="Kill training at random moments; compare with the straight run."
    )
    parser.add_argument("--run", default="", help="prepared run directory (default: a shrunk tiny is made)")
    parser.add_argument("--work", default="runs/resume-campaign", help="where the runs go")
    parser.add_argument("--trials", type=int, default=36)
    parser.add_argument("--only", type=int, default=-1, help="this trial only")
    parser.add_argument("--seed", type=int, default=34521)
    parser.add_argument("--out", default="", help="stem of the record: OUT.json and OUT.md")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from infra.artifacts import versions

    begun, where = time.monotonic(), Path(args.work)
    base = Path(args.run) if args.run else where / "base"
    if not args.run:
        prepare(base)
    for made in ("checkpoints", "train"):
        shutil.rmtree(base / made, ignore_errors=True)
    pace, wanted = straight(base), evidence(base)
    numbers = [args.only] if args.only >= 0 else range(args.trials + 1)
    trials = []
    for number in numbers:
        done = trial(base, where, args.seed, number, pace, wanted)
        trials.append(done)
        print(f"trial {number:>2} {done['kind']:<12} "
              + ("bit-equal" if not done["different"] else f"DIFFERENT: {', '.join(done['different'][:4])}")
              + "".join(f"; {b['signal']} at {b['event']} {b['step']}: exit {b['exit']}, log at {b['logged']}"
                        for b in done["blows"]), flush=True)  # fmt: skip
    recipe = json.loads((base / "recipe.json").read_text())
    model, data = recipe["model"], recipe["data"]
    record = {
        "seed": args.seed, "seconds": round(time.monotonic() - begun, 1), "cpus": os.cpu_count(),
        "about": f"{recipe.get('name', 'synthetic')} shrunk to width {model['d_model']}, {recipe['train']['steps']} steps of "
        f"{data['global_batch_instances']} x {data['sequence_length']} tokens, vocabulary {model['padded_vocab_size']}, a "
        f"checkpoint every {recipe['train']['checkpoint_every']} steps",
        "versions": versions("jax", "orbax-checkpoint", "grain", "numpy"), "pace": dataclasses.asdict(pace),
        "compared": sorted(wanted), "trials": trials,
    }  # fmt: skip
    finish_record(record, page(record), args.out)
    return int(any(bool(t["different"]) == bool(t["trial"]) for t in trials))


if __name__ == "__main__":
    sys.exit(main())
