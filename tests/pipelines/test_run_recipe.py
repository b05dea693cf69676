"""A command on a run that stands: the run's own recipe, and of the command line only the launch section."""

import json

import pytest

from infra.artifacts import write_json_atomic
from infra.errors import IdentityError, RecipeError
from pipelines.cli import main
from pipelines.recipe import load_recipe
from pipelines.run_recipe import recipe_for, stored
from pipelines.stages import open_run

FIELDS = ["train.steps=14", "train.landmarks=[4,14]"]


@pytest.fixture
def run(tmp_path):
    """A run of 14 steps in which everything before training is recorded as made."""
    open_run(load_recipe("tiny", FIELDS), tmp_path / "run")
    for name in ("tokenize", "order", "init", "gate"):
        write_json_atomic(tmp_path / "run" / "stages" / f"{name}.json", {"digest": name})
    return tmp_path / "run"


def launched(monkeypatch):
    """What `repro launch` was about to wait for: (goal, launch section)."""
    from pipelines import cli_launch

    seen = []
    monkeypatch.setattr(
        cli_launch, "_until_done", lambda job, cfg, recipe, *rest: seen.append((recipe.train.steps, cfg)) or 0
    )
    return seen


def test_launch_has_the_goal_of_the_run_and_the_launch_section_of_the_command_line(run, monkeypatch):
    seen = launched(monkeypatch)
    assert main(["launch", "tiny", "--run-dir", str(run), "--set", "launch.backoff_seconds=0"]) == 0
    assert seen[0][0] == 14 and seen[0][1].backoff_seconds == 0


def test_launch_refuses_what_is_not_the_runs(run, monkeypatch, capsys):
    seen = launched(monkeypatch)
    assert main(["launch", "tiny", "--run-dir", str(run), "--set", "train.steps=96"]) == 2
    assert "train.steps (14 -> 96)" in capsys.readouterr().err
    assert main(["launch", "olmo3_190m", "--run-dir", str(run)]) == 2
    assert "holds recipe 'tiny'" in capsys.readouterr().err and seen == []


def test_launch_names_the_stages_that_are_missing(run, monkeypatch, capsys):
    seen = launched(monkeypatch)
    (run / "stages" / "order.json").unlink()
    assert main(["launch", "tiny", "--run-dir", str(run)]) == 2
    assert "not made are order" in capsys.readouterr().err and seen == []


def test_an_override_that_repeats_the_run_is_welcome(run):
    made = recipe_for("tiny", ["train.steps=14", "launch.threads=1"], stored(run), run)
    assert (made.train.steps, made.launch.threads) == (14, 1)
    with pytest.raises(IdentityError, match=r"train\.steps \(14 -> 40\)"):
        recipe_for("tiny", ["train.steps=40"], stored(run), run)
    with pytest.raises(RecipeError):
        recipe_for("tiny", ["launch.threads=0"], stored(run), run)


def test_a_look_at_landmarks_uses_the_launch_section_it_was_given(run, monkeypatch):
    from pipelines import landmarks

    used = []
    monkeypatch.setattr(
        landmarks, "survey", lambda run, recipe: used.append(recipe.launch.watch.retries) or []
    )
    assert landmarks.main(["--run", str(run), "--set", "launch.watch.retries=7"]) == 0
    whole = recipe_for("tiny", ["launch.watch.retries=5"], stored(run), run).launch.model_dump_json()
    assert landmarks.main(["--run", str(run), "--set", f"launch={whole}"]) == 0
    assert used == [7, 7, 5, 5]


def test_a_deployment_takes_what_it_was_not_told_from_the_run(run):
    from contextlib import ExitStack

    from pipelines import deployments

    with ExitStack() as stack:
        made, _ = deployments._open("tiny", str(run), ["launch.watch.interval_seconds=30"], stack, "test")
    assert (made.train.steps, made.launch.watch.interval_seconds) == (14, 30)
    assert json.loads((run / "recipe.json").read_text())["launch"]["watch"]["interval_seconds"] == 60
