"""Landmarks: found by manifest, evaluated once however many watch, retried, marked, and never in each other's way."""

import json
import multiprocessing
import threading
import time
from pathlib import Path

import pytest

from infra.artifacts import write_json_atomic
from pipelines import landmarks
from pipelines.landmarks import Watched, evaluate_landmark, follow, survey, tick
from pipelines.recipe import load_recipe

STEPS = (2, 4, 6)
FIELDS = [
    "train.steps=6",
    "train.landmarks=[2,4,6]",
    "launch.watch.retries=2",
    "launch.watch.retry_delay_seconds=0",
    "launch.watch.concurrency=2",
]


@pytest.fixture
def run(tmp_path) -> Path:
    """A run whose reference is done and whose checkpoints come when a test says so."""
    recipe = load_recipe("tiny", FIELDS)
    write_json_atomic(tmp_path / "recipe.json", recipe.model_dump(mode="json"))
    write_json_atomic(tmp_path / "stages" / "reference.json", {"digest": "r", "seconds": 1})
    return tmp_path


def commit(run: Path, step: int, content: bytes = b"weights") -> None:
    from infra.artifacts import digest_tree

    root = run / "checkpoints" / f"step{step}"
    for name in ("params/d", "optimizer/d", "meta.json"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    (root / "MANIFEST.json").unlink(missing_ok=True)
    write_json_atomic(root / "MANIFEST.json", {"format": 1, "step": step, "files": digest_tree(root)})


def results(target: Watched, step: int) -> None:
    """An evaluation that leaves its files and a line that says it was at work."""
    from evals.evaluate import FILES

    time.sleep(0.05)
    with (target.run / "calls.txt").open("a") as f:
        f.write(f"{step}\n")
    for name in FILES:
        write_json_atomic(target.run / "evals" / f"step{step}" / f"{name}.json", {"step": step})


def calls(run: Path) -> list[int]:
    path = run / "calls.txt"
    return [int(x) for x in path.read_text().split()] if path.exists() else []


@pytest.fixture
def stub(monkeypatch):
    """Evaluation and report replaced; what is tested is who does them and when."""
    monkeypatch.setattr(landmarks, "_evaluate", results)
    reports = []
    monkeypatch.setattr(landmarks, "refresh_report", lambda target, say=print: reports.append(time.time()))
    return reports


def states(run: Path) -> dict[int, str]:
    return {m.step: m.state for m in survey(run, load_recipe("tiny", FIELDS))}


def test_only_committed_landmarks_are_ready(run, stub):
    commit(run, 2)
    half = run / "checkpoints" / "step4" / "params"
    half.mkdir(parents=True)
    (half / "d").write_bytes(b"half")
    assert states(run) == {2: "ready", 4: "waiting", 6: "waiting"}
    found = tick(Watched(run))
    assert {m.step: m.state for m in found} == {2: "evaluated", 4: "waiting", 6: "waiting"}
    assert calls(run) == [2] and len(stub) == 1
    tick(Watched(run))
    assert calls(run) == [2] and len(stub) == 1, "a look without news does nothing"
    commit(run, 4)
    tick(Watched(run))
    assert calls(run) == [2, 4] and len(stub) == 2


def test_nothing_is_ready_before_the_reference_is_done(run, stub):
    (run / "stages" / "reference.json").unlink()
    commit(run, 2)
    assert states(run)[2] == "waiting"


def test_new_weights_are_evaluated_again_and_lost_results_too(run, stub):
    commit(run, 2)
    tick(Watched(run))
    commit(run, 2, b"other weights")
    tick(Watched(run))
    assert calls(run) == [2, 2]
    (run / "evals" / "step2" / "token_kl.json").unlink()
    tick(Watched(run))
    assert calls(run) == [2, 2, 2]


def test_a_failing_landmark_is_retried_marked_and_in_nobodys_way(run, monkeypatch, stub):
    def fails_at_4(target, step):
        if step == 4:
            with (target.run / "calls.txt").open("a") as f:
                f.write("4\n")
            raise RuntimeError("the disk is on fire")
        results(target, step)

    monkeypatch.setattr(landmarks, "_evaluate", fails_at_4)
    for step in STEPS:
        commit(run, step)
    said = []
    found = {m.step: m for m in tick(Watched(run), say=said.append)}
    assert [found[s].state for s in STEPS] == ["evaluated", "failed", "evaluated"]
    assert found[4].detail == "RuntimeError: the disk is on fire"
    assert sorted(calls(run)) == [2, 4, 4, 4, 6]
    marker = json.loads((run / "landmarks" / "step4.json").read_text())
    assert marker["attempts"] == 3 and len(marker["errors"]) == 3
    assert any("try 3 of 3 failed" in line for line in said)
    tick(Watched(run))
    assert sorted(calls(run)) == [2, 4, 4, 4, 6], "a marked landmark is not tried at every look"
    (run / "landmarks" / "step4.json").unlink()
    monkeypatch.setattr(landmarks, "_evaluate", results)
    tick(Watched(run))
    assert states(run)[4] == "evaluated"


def test_a_second_try_that_works_is_enough(run, stub, monkeypatch):
    commit(run, 2)
    tries = []

    def once(target, step):
        tries.append(step)
        if len(tries) == 1:
            raise OSError("busy")
        results(target, step)

    assert evaluate_landmark(Watched(run), load_recipe("tiny", FIELDS), 2, work=once) == "evaluated"
    assert json.loads((run / "landmarks" / "step2.json").read_text())["attempts"] == 2


def _look(run: str, gate) -> None:
    landmarks._evaluate = results
    landmarks.refresh_report = lambda target, say=print: None
    gate.wait()
    tick(Watched(Path(run)), say=lambda line: None)


def test_three_watchers_at_once_evaluate_each_landmark_once(run):
    for step in STEPS:
        commit(run, step)
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(3)
    watchers = [context.Process(target=_look, args=(str(run), gate)) for _ in range(3)]
    for w in watchers:
        w.start()
    for w in watchers:
        w.join(60)
    assert sorted(calls(run)) == [2, 4, 6]
    assert set(states(run).values()) == {"evaluated"}


def test_follow_ends_when_everything_is_judged(run, stub):
    threading.Timer(0.3, lambda: [commit(run, s) for s in (2, 4)]).start()
    threading.Timer(0.8, lambda: commit(run, 6)).start()
    found = follow(Watched(run), sleep=lambda s: time.sleep(0.05))
    assert [m.state for m in found] == ["evaluated"] * 3 and sorted(calls(run)) == [2, 4, 6]


def test_follow_does_not_wait_for_a_landmark_that_cannot_come(run, stub):
    """Training is done and a landmark's checkpoint is broken: the follower says so and ends."""
    commit(run, 2)
    commit(run, 4)
    (run / "checkpoints" / "step4" / "params" / "d").write_bytes(b"cut")
    write_json_atomic(run / "stages" / "train.json", {"digest": "t", "seconds": 1})
    found = follow(Watched(run), sleep=lambda s: pytest.fail("it waits"))
    assert [m.state for m in found] == ["evaluated", "waiting", "waiting"]
    assert "another size" in found[1].detail


def test_a_secret_in_an_error_is_not_written_down(run, stub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "planted-secret-value")

    def leaks(target, step):
        raise RuntimeError("401 for token planted-secret-value and ya29.abcdefghijklmnop")

    commit(run, 2)
    said = []
    evaluate_landmark(Watched(run), load_recipe("tiny", FIELDS), 2, work=leaks, say=said.append)
    text = (run / "landmarks" / "step2.json").read_text() + "".join(said)
    assert "planted-secret" not in text and "ya29" not in text and "[removed]" in text


def test_no_run_is_not_an_error(tmp_path, stub):
    said = []
    assert tick(Watched(tmp_path), say=said.append) == [] and "not a run yet" in said[0]
