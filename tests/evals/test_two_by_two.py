"""The 2x2: an implementation gap of rounding size, a training gap that is the same in both frameworks."""

import numpy as np

from evals.heldout import Document, HeldoutSet
from evals.two_by_two import few, measure


def test_both_gaps_are_told_apart(scorer, params, nearby_params, model_cfg, hf_dir, tmp_path):
    from model.convert.hf import export_hf

    export_hf(nearby_params, model_cfg, tmp_path / "hf", context_length=96, keep_padding=True)
    rng = np.random.default_rng(0)
    documents = [
        Document(str(i), "ab"[i % 2], rng.integers(0, 100278, 40).astype(np.int32), 9, False)
        for i in range(6)
    ]
    heldout = few(HeldoutSet(documents, 96, {}), 2)
    assert [d.id for d in heldout.documents] == ["0", "2", "1", "3"]
    found = measure((hf_dir, tmp_path / "hf"), (scorer, scorer), (params, nearby_params), heldout)
    assert found["implementation_gap"] < 2e-6 and found["implementation_gap_worst_document"] < 5e-6
    assert abs(found["training_gap"]) > 50 * found["implementation_gap"]
    assert abs(found["training_gap"] - found["training_gap_in_torch"]) < 4e-6
