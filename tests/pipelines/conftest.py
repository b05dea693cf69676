"""One micro run up to the parity gate, made once and copied by the tests that need a run which can train."""

from pathlib import Path

import pytest

FIELDS = [
    "corpus.megabytes_per_domain=0.3", "corpus.heldout_max_documents=6", "data.sequence_length=96",
    "data.global_batch_instances=4", "model.window=32", "reference.model.window=32", "train.steps=14",
    "train.checkpoint_every=4", "train.landmarks=[4,14]", "parity.prompts=1", "launch.watch.interval_seconds=20",
]  # fmt: skip


@pytest.fixture(scope="session")
def micro_fields() -> list[str]:
    """Overrides that shrink `tiny`."""
    return list(FIELDS)


@pytest.fixture(scope="session")
def gated_run(tmp_path_factory) -> Path:
    """Do not write into it: copy it."""
    from pipelines.recipe import load_recipe
    from pipelines.stages import open_run, run_stage

    run = tmp_path_factory.mktemp("gated") / "run"
    recipe = load_recipe("tiny", FIELDS)
    open_run(recipe, run)
    for stage in ("tokenize", "order", "init", "gate"):
        run_stage(stage, recipe, run)
    return run
