"""Landmarks of a run in a bucket, watched from two machines at once over real HTTP with enforced preconditions."""

import json
import threading
from pathlib import Path

from infra.artifacts import digest_tree, write_json_atomic
from infra.mirror import Mirror
from model import checkpoint
from pipelines import landmarks
from pipelines.recipe import load_recipe

FIELDS = ["train.steps=6", "train.landmarks=[2,4,6]", "launch.watch.retries=0"]


def test_two_machines_evaluate_each_landmark_once_and_the_bucket_has_the_results(gcs, tmp_path, monkeypatch):
    with Mirror("gs://b/run", tmp_path / "trainer", "training", every=0) as m:
        recipe = load_recipe("tiny", FIELDS)
        write_json_atomic(m.local / "recipe.json", recipe.model_dump(mode="json"))
        write_json_atomic(m.local / "stages" / "reference.json", {"digest": "r", "seconds": 1})
        (m.local / "reference" / "checkpoints").mkdir(parents=True)
        (m.local / "reference" / "checkpoints" / "large").write_bytes(b"not needed for evaluation")
        for step in (2, 4):
            root = m.local / "checkpoints" / f"step{step}"
            for name in ("params/d", "optimizer/d", "meta.json"):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_bytes(b"w" * step)
            write_json_atomic(root / "MANIFEST.json", {"format": 1, "step": step, "files": digest_tree(root)})
    calls: list[int] = []
    both = threading.Barrier(2)

    def evaluate(target, step):
        from evals.evaluate import FILES

        calls.append(step)
        for name in FILES:
            write_json_atomic(target.run / "evals" / f"step{step}" / f"{name}.json", {"step": step})

    def report(target, say=print):
        (target.run / "report").mkdir(exist_ok=True)
        (target.run / "report" / "report.md").write_text("so far")
        target.send()

    monkeypatch.setattr(landmarks, "_evaluate", evaluate)
    monkeypatch.setattr(landmarks, "refresh_report", report)
    found: dict[str, dict[int, str]] = {}

    def machine(name):
        with landmarks.watched("gs://b/run", tmp_path / name) as target:
            assert not (target.run / "reference" / "checkpoints").exists(), "only what is needed is brought"
            both.wait(20)
            landmarks.tick(target, say=lambda line: None)
            target.refresh()
            found[name] = {x.step: x.state for x in landmarks.survey(target.run, recipe)}

    threads = [threading.Thread(target=machine, args=(f"machine{i}",)) for i in (1, 2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert sorted(calls) == [2, 4]
    assert len(found) == 2 and all(found[n][6] == "waiting" for n in found)
    names = gcs.names()
    assert {n for n in names if "landmarks/" in n} == {"run/landmarks/step2.json", "run/landmarks/step4.json"}
    assert len([n for n in names if n.startswith("run/evals/")]) == 10 and "run/report/report.md" in names
    assert not [n for n in names if ".leases" in n], "every lease was given back"
    with landmarks.watched("gs://b/run", tmp_path / "machine3") as target:
        assert [x.state for x in landmarks.survey(target.run, recipe)] == [
            "evaluated",
            "evaluated",
            "waiting",
        ]
        landmarks.tick(target, say=lambda line: None)
    assert sorted(calls) == [2, 4]
    assert json.loads(gcs.objects["b", "run/landmarks/step2.json"]["data"])["state"] == "evaluated"
    assert Path(tmp_path / "machine3").is_dir()


def test_of_checkpoints_only_landmarks_weights_and_records_are_brought(gcs, tmp_path):
    recipe = load_recipe("tiny", FIELDS)
    with Mirror("gs://b/run", tmp_path / "trainer", "training", every=0) as m:
        write_json_atomic(m.local / "recipe.json", recipe.model_dump(mode="json"))
        write_json_atomic(m.local / "stages" / "reference.json", {"digest": "r", "seconds": 1})
        for step in (2, 3):
            root = m.local / "checkpoints" / f"step{step}"
            for part in ("params", "optimizer"):
                (root / part).mkdir(parents=True)
                (root / part / "d").write_bytes(b"w" * step)
            (root / "optimizer" / "ocdbt.process_0").mkdir()
            (root / "optimizer" / "ocdbt.process_0" / "d").write_bytes(b"large")
            write_json_atomic(root / "meta.json", {"step": step})
            write_json_atomic(root / "MANIFEST.json", {"format": 1, "step": step, "files": digest_tree(root)})
    with landmarks.watched("gs://b/run", tmp_path / "watcher") as target:
        root = target.run / "checkpoints"
        found = sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())
        assert found == ["step2/MANIFEST.json", "step2/meta.json", "step2/optimizer/d", "step2/params/d"]
        assert [x.state for x in landmarks.survey(target.run, recipe)] == ["ready", "waiting", "waiting"]
        assert checkpoint.committed(root).steps == (), "nobody can train on from weights alone"
        (root / "step2" / "params" / "d").write_bytes(b"cut off")
        assert landmarks.survey(target.run, recipe)[0].state == "waiting"
    assert "ocdbt.process_0" not in "".join(u for method, u in gcs.requests if "alt=media" in u)
