"""The one callback of the reference run: it listens and changes nothing.

Per step it takes what OLMo-core's loader yielded (`index`, `input_ids`), what its train module logged, and
the gradients before clipping, and appends a line to `metrics.jsonl`. Its state travels inside OLMo-core's
own checkpoints: the receipt, and the skip-step window, which OLMo-core itself does not save. The window is
put back only after a crash (`restore_window`), never at a restart that the recipe declares.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from olmo_core.train.callbacks import Callback

from data.receipt import Receipt


@dataclass
class Listener(Callback):
    """Writes `out`/metrics.jsonl: step, ce, z_loss, grad_norm, grad_norm_f64, lr, skipped, receipt, ids, masked."""

    out: str = ""
    restore_window: bool = False
    _receipt: Any = field(default_factory=Receipt)
    _row: dict[str, Any] = field(default_factory=dict)

    def pre_step(self, batch: dict[str, Any]) -> None:
        ids = batch["index"].cpu().numpy()
        self._receipt.update(
            self.step, ids.astype("uint32"), batch["input_ids"].cpu().numpy().astype("uint32")
        )
        mask = batch.get("instance_mask")
        self._row = {
            "step": self.step,
            "ids": ids.tolist(),
            "masked": [] if mask is None else ids[~mask.cpu().numpy()].tolist(),
            "receipt": self._receipt.hexdigest(),
        }

    def pre_optim_step(self) -> None:
        """The gradient norm in float64, before clipping: torch's fp32 norm on CPU is the inaccurate one."""
        total = torch.zeros((), dtype=torch.float64)
        for parameter in self.trainer.train_module.model.parameters():  # type: ignore[attr-defined]
            if parameter.grad is not None:
                total += torch.linalg.vector_norm(parameter.grad, dtype=torch.float64) ** 2
        self._row["grad_norm_f64"] = float(total.sqrt())

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        if "train/CE loss" not in metrics:
            return
        row = self._row
        assert row["step"] == step, "OLMo-core logged a step out of turn"
        line = {
            "step": step,
            "ce": metrics["train/CE loss"],
            "z_loss": metrics.get("train/Z loss", 0.0),
            "grad_norm": metrics["optim/total grad norm"],
            "grad_norm_f64": row["grad_norm_f64"],
            "lr": metrics["optim/LR (group 0)"],
            "skipped": metrics["optim/step skipped"],
            "receipt": row["receipt"],
            "ids": row["ids"],
            "masked": row["masked"],
        }
        with (Path(self.out) / "metrics.jsonl").open("a") as f:
            f.write(json.dumps(line) + "\n")

    def state_dict(self) -> dict[str, Any]:
        optimizer = self.trainer.train_module.optim  # type: ignore[attr-defined]
        return {
            "receipt": self._receipt.to_json(),
            "losses": [float(x) for x in optimizer._losses],
            "grad_norms": [float(x) for x in optimizer._grad_norms],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._receipt = Receipt.from_json(state_dict["receipt"])
        if self.restore_window:
            optimizer = self.trainer.train_module.optim  # type: ignore[attr-defined]
            optimizer._losses = [torch.tensor(x) for x in state_dict["losses"]]
            optimizer._grad_norms = [torch.tensor(x) for x in state_dict["grad_norms"]]
