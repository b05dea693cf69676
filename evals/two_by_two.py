"""The 2x2 of the design: the same held-out documents under two weights and two implementations.

    result = measure(reference_hf, reproduced_hf, scorers, documents)

R is the reference's weights, P the reproduced ones; T is PyTorch (transformers' Olmo3, bit-equal to OLMo-core in fp32 on CPU), J is our JAX model. The implementation
gap is the larger of |R.J - R.T| and |P.J - P.T| and must be rounding; the training gap is P.J - R.J, what the surfaces judge. The surprising
thing: the torch side is the only slow part, so it runs on the first few documents of each domain.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evals.heldout import Document, HeldoutSet, evaluate
from evals.scoring import Params, Scorer


def few(heldout: HeldoutSet, per_domain: int) -> HeldoutSet:
    """The first `per_domain` documents of each domain."""
    kept: list[Document] = []
    for name in heldout.domains:
        kept += [d for d in heldout.documents if d.domain == name][:per_domain]
    return HeldoutSet(kept, heldout.context, {})


def torch_losses(hf_dir: Path, documents: Sequence[Document]) -> list[float]:
    """Summed negative log-likelihood (nat) of each document by transformers, logits fp32, sums in float64."""
    import torch

    from evals.parity import hf_logits

    run = hf_logits(hf_dir)
    out = []
    for d in documents:
        logits = torch.from_numpy(run(d.tokens[None, :-1]))
        targets = torch.from_numpy(d.tokens[1:].astype(np.int64))
        out.append(float(torch.nn.functional.cross_entropy(logits, targets, reduction="none").double().sum()))
    return out


def measure(
    torch_sides: tuple[Path, Path],
    scorers: tuple[Scorer, Scorer],
    params: tuple[Params, Params],
    heldout: HeldoutSet,
) -> dict[str, Any]:
    """Mean loss (nat per prediction) in the four cells, and both gaps. Each pair is (reference, reproduced)."""
    n = sum(d.predictions for d in heldout.documents)
    sums: dict[str, list[float]] = {}
    for name, place, scorer, weights in zip("RP", torch_sides, scorers, params):
        sums[f"{name}.T"] = torch_losses(place, heldout.documents)
        sums[f"{name}.J"] = evaluate(scorer, weights, heldout)
    loss = {cell: sum(values) / n for cell, values in sums.items()}
    per_document = [
        abs(t - j) / d.predictions
        for w in "RP"
        for t, j, d in zip(sums[f"{w}.T"], sums[f"{w}.J"], heldout.documents)
    ]
    return {
        "loss": loss,
        "implementation_gap": max(abs(loss[f"{w}.J"] - loss[f"{w}.T"]) for w in "RP"),
        "implementation_gap_worst_document": max(per_document),
        "training_gap": loss["P.J"] - loss["R.J"],
        "training_gap_in_torch": loss["P.T"] - loss["R.T"],
        "documents": [d.id for d in heldout.documents],
        "predictions": n,
    }
