"""The weights of a landmark against the log: on the batch of the next step they must give the CE that was logged there.

    ours = Side(RUN/hf, model, loss, of_log(RUN/train/metrics.jsonl))
    found = measure({"reproduced": ours}, source, steps, numerics, limit)

Step k+1 computes its loss before it changes a weight, so that number belongs to the weights of step k and to batch k+1 alone.
A checkpoint that holds the weights of another moment, an export under a wrong name, a log of another run, another order of
the data: each gives another number. The surprising thing is its one blind spot: behind the last step nothing is logged.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data.loader import StepSource
from evals.logged_curve import Curve
from evals.parity import read_metrics
from model.config import LossConfig, ModelConfig, NumericsConfig


@dataclasses.dataclass(frozen=True)
class Side:
    """HF exports `exports`/step<k> of one side, the model and loss they were trained with, and the CE that was logged."""

    exports: Path
    model: ModelConfig
    loss: LossConfig
    logged: Mapping[int, float]  # step -> nat


def of_log(path: Path) -> dict[int, float]:
    """{step: CE} of a metrics file."""
    return {r["step"]: r["ce"] for r in read_metrics(path) if r["ce"] is not None}


def of_curve(curve: Curve) -> dict[int, float]:
    """{step: CE} of a published curve, which may hold only some steps."""
    return dict(zip(curve.steps.tolist(), curve.values["ce"].tolist()))


def measure(
    sides: Mapping[str, Side],
    source: StepSource,
    steps: Sequence[int],
    numerics: NumericsConfig,
    limit: float,
    rows: int = 0,
) -> dict[str, Any]:
    """Compare for every landmark of `steps` that has a step behind it. `limit`: nat. `rows`: instances at a time, 0: all.

    Returns {"ok", "limit", "failures", "rows": [{"side", "step", "logged", "measured"}]}; never raises for a difference.
    """
    from model.convert.hf import import_hf

    out, failures = [], []
    for side, at in sides.items():
        program = ce_program(at.model, numerics, at.loss)
        for step in (s for s in steps if s + 1 in at.logged):
            params = import_hf(at.exports / f"step{step}", at.model)
            measured = batch_loss(program, params, source[step], at.loss, rows)
            due = float(at.logged[step + 1])
            out.append({"side": side, "step": step, "logged": due, "measured": measured})
            if not abs(measured - due) <= limit:
                failures.append(
                    f"the {side} weights of step {step} give CE {measured:.6f} on the batch of step {step + 1}, "
                    f"whose log says {due:.6f} (allowed {limit:g})"
                )
    return {"ok": not failures, "limit": limit, "failures": failures, "rows": out}


@functools.cache
def ce_program(model: ModelConfig, numerics: NumericsConfig, loss: LossConfig) -> Any:
    """Jitted (params, tokens [B,S], labels [B,S], weights [B,S]) -> CE of these rows in nat, float32 scalar."""
    import jax

    from model.loss import train_loss

    def ce(params: Any, tokens: Any, labels: Any, weights: Any) -> Any:
        return train_loss(params, model, numerics, loss, tokens, labels, weights)[1]["ce"]

    return jax.jit(ce)


def batch_loss(program: Any, params: Any, batch: Any, loss: LossConfig, rows: int = 0) -> float:
    """CE of a global batch as training computes it: mean of rank means, masked instances in the denominator (nat)."""
    import jax.numpy as jnp

    from model.loss import token_weights

    tokens = jnp.asarray(batch.tokens)
    labels, weights = token_weights(
        tokens,
        jnp.asarray(batch.instance_mask),
        jnp.arange(len(tokens)),
        loss.reference_ranks,
        batch.label_mask,
    )
    size = rows or len(tokens)
    cuts = [slice(k, k + size) for k in range(0, len(tokens), size)]
    return sum(float(program(params, tokens[c], labels[c], weights[c])) for c in cuts)
