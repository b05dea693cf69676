"""Every other way to lose a run: each stage killed, the flow, its server, a full disk, a read-only one, a jumping clock, a second
flow, one byte changed in each kind of artifact. Afterwards the run ends bit-equal to the one left alone, or the fault is named.

    python tests/campaigns/crash.py                       all trials on a shrunk `tiny` (part of `make resume-campaign`)
    python tests/campaigns/crash.py --only 17             one trial again
    python tests/campaigns/crash.py --list

A trial takes a copy of the finished control from which a stage and all after it are gone, lets the stage (or the flow) be
disturbed, and then gives the same command again without disturbance. Compared: every artifact that the stages after it own.
A trial is `equal`; or `named`: exit 2, one message that names the changed file, and nothing that the asked stage or a later one
owns was made or changed; or, where the report is asked for, `reported`: it is made and lists the changed file. A disturbance that did
not happen is `did not land`: it proves nothing, is tried again at half the moment (twice at most) and counted apart. Anything else fails.

Seed and number fix kind and moment, as a fraction of the stage's duration in the control. The surprising thing: a full disk is
a real one (`disturb.py`); where the kernel gives no namespace, these trials are left out by name.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from disturb import (  # noqa: E402
    again,
    change_one_byte,
    clock_that_jumps,
    command,
    jumped,
    kill,
    left_running,
    namespaces_work,
    on_read_only,
    on_small_disk,
    server_below,
    start,
)
from resume import STABLE, finish_record  # noqa: E402

STAGES = (
    "tokenize",
    "order",
    "init",
    "gate",
    "reference",
    "train",
    "convert",
    "parity",
    "evaluate",
    "report",
)
TRIED = {"tokenize": 3, "order": 2, "init": 2, "gate": 2, "reference": 2, "train": 2, "convert": 3, "parity": 2,
         "evaluate": 3, "report": 2}  # fmt: skip
# Artifacts of which one byte is changed: a pattern below the run directory, and the stage that is asked for afterwards.
KINDS_OF_FILES = {
    "token shard": ("tokens/train/*/00000.npy", "order"),
    "held-out token shard": ("tokens/heldout/*/00000.npy", "evaluate"),
    "token manifest": ("tokens/train/manifest.json", "train"),
    "document boundaries": ("tokens/heldout/*/00000.csv.gz", "evaluate"),
    "global order": ("order/order.u32", "train"),
    "repetition mask": ("order/mask.bits", "train"),
    "step-0 weights": ("init/hf/*.safetensors", "train"),
    "reference's weights": ("reference/hf/step16/*.safetensors", "evaluate"),
    "reference's log": ("reference/metrics.jsonl", "parity"),
    "checkpoint": ("checkpoints/step16/params/**/*", "convert"),
    "checkpoint's record": ("checkpoints/step16/meta.json", "convert"),
    "exported weights": ("hf/step16/*.safetensors", "parity"),
    "training log": ("train/metrics.jsonl", "parity"),
    "step-0 logit parity": ("parity/step0.json", "train"),
    "results": ("evals/step16/reproduced.heldout.json", "report"),
    "parity results": ("parity/training.json", "report"),
    "stage record": ("stages/train.json", "convert"),
}
DID_NOT_LAND, EARLIER = "did not land", 2  # a disturbance that came too late is tried so many times again
# Files whose bytes tell the time or the place, with what is compared instead.
TIMED = (
    "reference/log.txt",
    "reference/spec.json",
    "reference/work",
    "evals/timings.json",
    "train/trace",
    "report/",
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """One trial: what is done to which stage (or artifact), and when."""

    number: int
    kind: str
    target: str
    fraction: float = 0.0
    whole_group: bool = False


def plans(seed: int) -> list[Plan]:
    """Every trial, a pure function of the seed."""
    made: list[tuple[str, str]] = [("kill", stage) for stage in STAGES for _ in range(TRIED[stage])]
    made += [("kill flow", s) for s in ("convert", "evaluate")] + [
        ("kill server", s) for s in ("convert", "parity")
    ]
    made += [("disk full", s) for s in ("tokenize", "train", "convert", "evaluate")]
    made += [("read-only", s) for s in ("order", "convert")]
    made += [("clock jumps", s) for s in ("train", "evaluate")] + [("two flows", "convert")]
    made += [("byte changed", kind) for kind in KINDS_OF_FILES]
    out = []
    for number, (kind, target) in enumerate(made, 1):
        rng = random.Random(f"{seed}/{number}")
        out.append(Plan(number, kind, target, round(rng.uniform(0.05, 0.75), 3), rng.random() < 0.5))
    return out


# ---------------------------------------------------------------- runs


def clone(base: Path, run: Path, keep: str = "") -> None:
    """A run directory of hard links to the control's; `keep`: a pattern whose files are copied, since they are changed."""
    shutil.rmtree(run, ignore_errors=True)
    aside = (".lease", ".leases", ".xmanager", "logs", ".cache", ".prefect")

    def at_the_top(folder: str, names: list[str]) -> set[str]:
        return {n for n in names if n in aside} if Path(folder) == base else set()

    shutil.copytree(base, run, symlinks=True, copy_function=os.link, ignore=at_the_top)
    # What is written in place, or is changed by the trial, must not be the control's own.
    for path in [run / "train" / "metrics.jsonl", *(run.glob(keep) if keep else ())]:
        if path.is_file():
            copy = path.with_name(path.name + ".copy")
            shutil.copy(path, copy)
            os.replace(copy, path)
    if (base / ".cache").exists():
        (run / ".cache").symlink_to((base / ".cache").resolve())


def cut(run: Path, stage: str) -> list[str]:
    """Remove what `stage` and all after it made. Returns these stages."""
    if stage == "report":
        shutil.rmtree(run / "report")
        return ["report"]
    from pipelines.stages import redo_from

    shutil.rmtree(run / "report", ignore_errors=True)
    return [*redo_from(stage, run), "report"]


def owned(run: Path, stages: list[str]) -> dict[str, str]:
    """Digest of every file that these stages own, and of their records."""
    from infra.artifacts import digest_tree
    from pipelines.stages import BY_NAME

    patterns = [
        p
        for stage in stages
        for p in (*BY_NAME[stage].owns, f"stages/{stage}.json", f"stages/{stage}.begun.json")
    ]
    roots = [root for pattern in patterns for root in sorted(run.glob(pattern))]
    return {
        f"{root.relative_to(run)}/{inner}".rstrip("/"): d["sha256"]
        for root in roots
        for inner, d in digest_tree(root).items()
    }


def judged(asked: str, file: str, code: int, text: str, before: dict[str, str], after: dict[str, str]) -> str:
    """Outcome of a trial in which `file` was changed: `named` by the stage that was asked for, or `reported`; else what is wrong."""
    if "Traceback" in text:
        return "FAILED: a traceback"
    if file not in text:
        return "FAILED: the message does not name it"
    if asked == "report":
        return "reported" if code in (1, 3) else f"FAILED: exit {code}, the report says nothing is wrong"
    if code != 2:
        return f"FAILED: exit {code}, not 2"
    made = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
    return f"FAILED: made from it: {made[0]}" if made else "named"


def evidence(run: Path, stages: list[str]) -> dict[str, str]:
    """Digest of every file that these stages own; logs and checkpoints by their content without clock and place."""
    from infra.artifacts import digest_tree
    from pipelines.stages import BY_NAME

    out: dict[str, str] = {}
    for stage in stages:
        for pattern in BY_NAME[stage].owns:
            for root in sorted(run.glob(pattern)):
                for inner, digest in digest_tree(root).items():
                    name = f"{root.relative_to(run).as_posix()}/{inner}".rstrip("/")
                    if not name.startswith(
                        (*TIMED, "checkpoints/", "reference/checkpoints")
                    ) and not name.endswith("metrics.jsonl"):
                        out[name] = digest["sha256"]
    if "train" in stages:
        from resume import evidence as trained

        out |= trained(run)
    if "reference" in stages:
        for line in (run / "reference" / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            out[f"reference's log of step {row['step']}"] = json.dumps([row.get(k) for k in STABLE])
    if "report" in stages:
        verdict = json.loads((run / "report" / "verdict.json").read_text())
        out["verdict"] = hashlib.sha256(json.dumps(verdict, sort_keys=True).encode()).hexdigest()
    return out


# ---------------------------------------------------------------- trials


def trial(
    base: Path, where: Path, seed: int, plan: Plan, seconds: dict[str, float], control: dict[str, str]
) -> dict[str, Any]:
    """One trial, again at half the moment while the disturbance does not land; the record of the last try."""
    tried: list[float] = []
    while True:
        found = attempt(base, where, seed, plan, seconds, control)
        if found["outcome"] != DID_NOT_LAND or len(tried) == EARLIER:
            return {**found, "tried_before": tried}
        tried.append(found["moment"])
        plan = dataclasses.replace(plan, fraction=round(plan.fraction / 2, 4))


def attempt(
    base: Path, where: Path, seed: int, plan: Plan, seconds: dict[str, float], control: dict[str, str]
) -> dict[str, Any]:
    """One try of a trial; its record says what was done, what was found after it, and the outcome."""
    run, rng = where / f"crash{plan.number}", random.Random(f"{seed}/{plan.number}/byte")
    run.with_suffix(".txt").unlink(missing_ok=True)
    pattern, asked = KINDS_OF_FILES.get(plan.target, ("", plan.target))
    clone(base, run, pattern)
    stages = cut(run, asked)
    whole = plan.kind in ("kill flow", "kill server", "two flows")
    argv = command(run, "reproduce" if whole else asked)
    moment = plan.fraction * (seconds["reproduce"] if whole else seconds[asked])
    said: dict[str, Any] = {}
    if plan.kind == "byte changed":
        said["file"] = str(change_one_byte(run, pattern, rng).relative_to(run))
    elif plan.kind == "disk full":
        said["exit"], text = on_small_disk(run, asked, int(8 + plan.fraction * 64))
        said |= starved(said["exit"], text, ("no space left", "disk full", "disk is full"))
    elif plan.kind == "read-only":
        said["exit"], text = on_read_only(run, asked)
        said |= starved(said["exit"], text, ("read-only", "no permission"))
    elif plan.kind == "two flows":
        first, second = start(run, argv), start(run, argv)
        said["exits"] = sorted((first.wait(900), second.wait(900)))
        said["named"] = "is in use by" in run.with_suffix(".txt").read_text()
    elif plan.kind == "clock jumps":
        with clock_that_jumps(run, moment) as extra:
            said["exit"] = start(run, argv, **extra).wait(900)
            said["landed"] = jumped(run)
    else:
        said |= struck(run, argv, plan, moment)
        said["left_running"] = left_running(run)
    said["half_made"] = sorted(
        p.name
        for p in (run / "stages").glob("*.begun.json")
        if not (run / "stages" / p.name.replace(".begun", "")).exists()
    )
    before = owned(run, stages) if plan.kind == "byte changed" else {}
    code, text = again(run, argv)
    found = {
        "number": plan.number,
        "kind": plan.kind,
        "target": plan.target,
        "moment": round(moment, 2),
        **said,
        "exit_after": code,
    }
    if plan.kind == "byte changed":
        at = text.find("repro: ") if code == 2 else text.find(said["file"])
        message = " ".join(text[max(0, at) :].split())
        outcome = judged(asked, said["file"], code, text, before, owned(run, stages))
        found |= {"outcome": outcome, "message": message.replace(str(run), "RUN")[:300]}
    elif code not in (0, 1, 3) or "Traceback" in text:
        found |= {"outcome": f"FAILED: exit {code}", "message": text[-600:].replace(str(run), "RUN")}
    else:
        # One stage was asked for again: only what it owns is there to compare.
        mine = evidence(run, stages if whole else [asked])
        wanted = control_of(control, stages if whole else [asked], base)
        different = sorted(k for k in wanted.keys() | mine.keys() if wanted.get(k) != mine.get(k))
        found |= {
            "outcome": "equal" if not different else "FAILED: different",
            "different": different[:6],
            "compared": len(wanted),
        }
    if said.get("landed") is False and found["outcome"] == "equal":
        found["outcome"] = DID_NOT_LAND
    if said.get("left_running"):
        found["outcome"] = f"FAILED: still running: {said['left_running'][0]}"
    if said.get("named") is False:
        found["outcome"] = "FAILED: the disturbance was not named, or ended in a traceback"
    if not found["outcome"].startswith("FAILED"):
        shutil.rmtree(run)
        run.with_suffix(".txt").unlink(missing_ok=True)
    return found


def starved(code: int, text: str, words: tuple[str, ...]) -> dict[str, bool]:
    """Whether a full or read-only disk was met, and whether what the user sees names it, without a traceback."""
    met = code != 0
    return (
        {"landed": met, "named": any(w in text.lower() for w in words) and "Traceback" not in text}
        if met
        else {"landed": False}
    )


def control_of(control: dict[str, Any], stages: list[str], base: Path) -> dict[str, str]:
    """The control's evidence of some stages, kept."""
    key = ",".join(stages)
    if key not in control:
        control[key] = evidence(base, stages)
    return control[key]


def struck(run: Path, argv: list[str], plan: Plan, moment: float) -> dict[str, Any]:
    """Start, wait until the moment, kill; what was killed and whether it still ran."""
    process, begun = start(run, argv), time.monotonic()
    victim = process.pid
    while process.poll() is None and time.monotonic() - begun < moment:
        time.sleep(0.01)
    landed = process.poll() is None
    if landed and plan.kind == "kill server":
        victim = server_below(process.pid, process)
        landed = bool(victim)
        if victim:
            os.kill(victim, signal.SIGKILL)
        process.wait(900)
    elif landed:
        kill(process, plan.whole_group)
    return {
        "exit": process.returncode,
        "landed": landed,
        "killed": "all" if plan.whole_group else "the command",
    }


def make_control(base: Path) -> dict[str, float]:
    """The undisturbed run, stage by stage, each in a process as a trial starts it; seconds of each, warm where it can be."""
    shutil.rmtree(base, ignore_errors=True)
    seconds: dict[str, float] = {}
    for round_ in (1, 2):
        for stage in STAGES if round_ == 1 else ("gate", "train", "convert", "parity", "evaluate"):
            if round_ == 2:
                shutil.rmtree(base.with_name("again"), ignore_errors=True)
                clone(base, base.with_name("again"))
                cut(base.with_name("again"), stage)
            begun, run = time.monotonic(), base if round_ == 1 else base.with_name("again")
            code, text = again(run, command(run, stage))
            if code not in (0, 1, 3):
                raise SystemExit(f"the control fails at {stage}: {text[-2000:]}")
            seconds[stage] = round(time.monotonic() - begun, 2)
    shutil.rmtree(base.with_name("again"))
    seconds["reproduce"] = (
        15.0 + seconds["convert"]
    )  # the flow's own start, and into the first stage that it makes
    return seconds


def main() -> int:
    """The control, the trials, the record; 1 if a trial failed."""
    parser = argparse.ArgumentParser(description="Disturb every stage; compare with the run left alone.")
    parser.add_argument("--work", default="runs/crash-campaign", help="where the runs go")
    parser.add_argument("--only", type=int, nargs="*", default=[], help="these trials only")
    parser.add_argument("--seed", type=int, default=20261)
    parser.add_argument("--out", default="", help="stem of the record: OUT.json and OUT.md")
    parser.add_argument("--fresh", action="store_true", help="make the control again, also where it stands")
    parser.add_argument("--list", action="store_true", help="print the trials")
    args = parser.parse_args()
    chosen = [p for p in plans(args.seed) if not args.only or p.number in args.only]
    if args.list:
        print("\n".join(f"{p.number:>2} {p.kind:<13} {p.target:<22} {p.fraction}" for p in chosen))
        return 0
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    begun, where = time.monotonic(), Path(args.work).resolve()
    base = where / "base"
    kept = where / "control.json"
    standing_file = where / "trials.json"
    if args.fresh or not kept.exists():
        kept.unlink(missing_ok=True)
        standing_file.unlink(missing_ok=True)
        seconds = make_control(base)
        kept.write_text(json.dumps(seconds))
    seconds = json.loads(kept.read_text())
    if absent := [kind for kind, (pattern, _) in KINDS_OF_FILES.items() if not any(base.glob(pattern))]:
        raise SystemExit(f"the control has no {absent[0]}: {KINDS_OF_FILES[absent[0]][0]}")
    standing = json.loads(standing_file.read_text()) if standing_file.exists() else {}
    mounts, control = namespaces_work(), {}
    for plan in chosen:
        if plan.kind in ("disk full", "read-only") and not mounts:
            print(
                f"trial {plan.number:>2} {plan.kind}: left out, the kernel gives no mount namespace",
                flush=True,
            )
            continue
        done = trial(base, where, args.seed, plan, seconds, control)
        standing[str(plan.number)] = done
        standing_file.write_text(json.dumps(standing))
        print(f"trial {plan.number:>2} {plan.kind:<13} {plan.target:<22} {done['outcome']}"
              + (f": {done['message'].splitlines()[-1][:160]}" if done.get("message") else "")
              + (f": {', '.join(done['different'])}" if done.get("different") else ""), flush=True)  # fmt: skip
    record = {"seed": args.seed, "seconds": round(time.monotonic() - begun, 1), "cpus": os.cpu_count(),
              "control": seconds, "asked": len(plans(args.seed)), "made": len(chosen),
              "trials": [standing[k] for k in sorted(standing, key=int)]}  # fmt: skip
    if args.out and len(chosen) < len(plans(args.seed)):
        raise SystemExit("--out needs all trials of one command: leave --only out")
    finish_record(record, page(record), args.out)
    return int(any(t["outcome"].startswith("FAILED") for t in standing.values()))


def page(record: dict[str, Any]) -> str:
    """The record for a person."""
    trials = record["trials"]
    equal, named, told, missed = (
        sum(t["outcome"] == o for t in trials) for o in ("equal", "named", "reported", DID_NOT_LAND)
    )
    failed = sum(t["outcome"].startswith("FAILED") for t in trials)
    earlier = (
        ""
        if record["made"] == len(trials)
        else f", {len(trials) - record['made']} rows are from earlier runs of the command"
    )
    out = [
        "# Crash campaign", "",
        f"`python tests/campaigns/crash.py`, part of `make resume-campaign` (seed {record['seed']}): {len(trials)} of {record['asked']} trials ({record['made']} of them in "
        f"{record['seconds'] / 60:.1f} minutes on {record['cpus']} CPUs{earlier}): {equal} end bit-equal to the undisturbed run, in {named} the fault is named and "
        f"nothing is made from it, in {told} the report says which file was changed, {missed} did not land and prove nothing, {failed} fail.", "",
        "A shrunk `tiny`; `moment` is seconds after the command's start. Killed: the command alone, or all that it had started. "
        "Every file that the stages own is compared by digest; checkpoints by their state, logs by what does not tell the time.", "",
        "| trial | disturbance | stage or artifact | moment | killed | landed | then | what was said |", "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for t in trials:
        words = (t.get("message") or ", ".join(t.get("different", []))).replace("|", "\\|").split("\n")[0]
        landed = {True: "yes", False: "no"}.get(t.get("landed"), "-")  # type: ignore[arg-type]
        out.append(
            f"| {t['number']} | {t['kind']} | {t['target']} | {t['moment']} | {t.get('killed', '-')} | {landed} | {t['outcome']} | {words} |"
        )
    return "\n".join([*out, "", "One trial again: `python tests/campaigns/crash.py --only NUMBER`.", ""])


if __name__ == "__main__":
    sys.exit(main())
