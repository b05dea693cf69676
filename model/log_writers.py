"""Optional writers of training metrics: TensorBoard event files, W&B (offline capable), an XProf trace.

    with open_writers(cfg, run / "train", first_step=1) as writers:
        writers.write({"step": 1, "ce": 11.5, ...})

`train/metrics.jsonl` stays the record; these are views of it. The surprising thing: a view that fails to open is an
error before the first step, not a warning in the middle of a run. Sources: `tensorboardX` (event files without
TensorFlow), `wandb` with `mode="offline"` (files only, `wandb sync` sends them), `jax.profiler`.
"""

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from infra.errors import RecipeError
from model.config import LogConfig

Write = Callable[[int, dict[str, float]], None]


class Writers:
    """All writers that are switched on; none is fine."""

    def __init__(self, writes: list[Write]):
        self._writes = writes

    def write(self, record: dict[str, Any]) -> None:
        """Numbers of a log record, under its step; values that are not finite numbers are left out."""
        values = {k: float(v) for k, v in record.items()
                  if k != "step" and isinstance(v, int | float) and math.isfinite(v)}  # fmt: skip
        for write in self._writes:
            write(record["step"], values)


@contextlib.contextmanager
def open_writers(cfg: LogConfig, directory: Path, first_step: int) -> Iterator[Writers]:
    """Open what `cfg` asks for below `directory`; closed on leaving. A resumed run starts at `first_step`."""
    with contextlib.ExitStack() as stack:
        writes: list[Write] = []
        if cfg.tensorboard:
            writes.append(_tensorboard(directory / "tensorboard", first_step, stack))
        if cfg.wandb != "off":
            writes.append(_wandb(cfg, directory, stack))
        yield Writers(writes)


def _tensorboard(directory: Path, first_step: int, stack: contextlib.ExitStack) -> Write:
    """Event files; what an interrupted run wrote from `first_step` on is marked as superseded."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError as e:
        raise RecipeError(
            "train.log.tensorboard needs the package tensorboardX", "install it or switch it off"
        ) from e
    writer = SummaryWriter(str(directory), purge_step=first_step if first_step > 1 else None)
    stack.callback(writer.close)

    def write(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(f"train/{name}", value, step)

    return write


def _wandb(cfg: LogConfig, directory: Path, stack: contextlib.ExitStack) -> Write:
    """A W&B run whose id follows from the run directory, so that a resumed run continues it."""
    try:
        import wandb
    except ImportError as e:
        raise RecipeError(
            "train.log.wandb needs the package wandb", "install it or set train.log.wandb=off"
        ) from e
    run = wandb.init(
        project=cfg.wandb_project,
        dir=str(directory),
        mode="online" if cfg.wandb == "online" else "offline",
        id=hashlib.sha256(str(directory.absolute()).encode()).hexdigest()[:16],
        resume="allow",
        settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True, disable_git=True),
    )  # fmt: skip
    stack.callback(run.finish)

    def write(step: int, values: dict[str, float]) -> None:
        run.log({f"train/{name}": value for name, value in values.items()}, step=step)

    return write


class Trace:
    """An XProf trace of the steps first..last, into `directory`; `None`: nothing."""

    def __init__(self, steps: tuple[int, int] | None, directory: Path):
        self.steps, self.directory, self.on = steps, directory, False

    def before(self, step: int) -> None:
        """Start the trace when `step` is its first, or when a resumed run begins inside it."""
        import jax

        if self.steps and not self.on and self.steps[0] <= step <= self.steps[1]:
            jax.profiler.start_trace(str(self.directory))
            self.on = True

    def after(self, step: int, arrays: Any) -> None:
        """Stop the trace after its last step, once `arrays` are computed."""
        if self.on and self.steps and step >= self.steps[1]:
            import jax

            jax.block_until_ready(arrays)
            self.close()

    def close(self) -> None:
        """Write the trace if one is running."""
        if self.on:
            import jax

            jax.profiler.stop_trace()
            self.on = False
