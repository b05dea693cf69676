"""With the repetition filter on, stage `order` leaves the mask that the trainer opens."""

import shutil

import numpy as np

from data.masks import open_mask, scan_index
from pipelines.recipe import load_recipe
from pipelines.work import order, train_index


def test_order_writes_the_mask_the_trainer_reads(gated_run, micro_fields, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(gated_run / "tokens", run / "tokens")
    fields = [*micro_fields, "data.filter.enabled=true", "data.filter.max_count=4"]
    recipe = load_recipe("tiny", fields)
    order(recipe, run)
    index = train_index(load_recipe("tiny", micro_fields), run)
    mask = open_mask(run / "order", index, recipe.data.filter)
    assert 0 < (~mask).sum() < len(mask)  # some are rejected, so an empty mask would be noticed
    np.testing.assert_array_equal(mask, scan_index(index, recipe.data.filter))


def test_no_mask_without_the_filter(gated_run):
    assert not list((gated_run / "order").glob("mask*"))
