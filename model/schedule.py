"""Learning rate as data: parts with hand-over, in Python float64.

`learning_rate(cfg, step)` is the rate of the update of global step `step`; the first step is 1, so the first rate
is peak/warmup and never 0. The trainer sends it to the device as a number, so a skipped step never delays it.
Formulas: sheet section 4.1; `allenai/OLMo-core` @ fa6c5014c `optim/scheduler.py`.
"""

from math import cos, pi

import numpy as np

from infra.errors import RecipeError
from model.config import ScheduleConfig, SchedulePart


def part_rate(part: SchedulePart, step: int) -> float:
    """Rate of one part at `step` (from 1)."""
    p, w, t = part.peak, part.warmup, part.horizon
    low = p * part.alpha_f
    if part.kind == "half_cosine":
        if step < w:
            return (low + (p - low) / 2) * step / w
        if step >= t:
            return low
        return low + (p - low) * (1 + cos(pi * ((step - w) + (t - w)) / (2 * (t - w)))) / 2
    if step < w:
        return p * min(step, w) / w
    if step >= t:
        return low
    if part.kind == "cosine":
        return low + (p - low) * (1 + cos(pi * (step - w) / (t - w))) / 2
    return p - (p - low) * ((step - w) / (t - w))


def learning_rate(cfg: ScheduleConfig, step: int) -> float:
    """Rate of the update of global step `step`, counted from 1."""
    if step < 1:
        raise RecipeError(f"learning rate asked for step {step}", "steps count from 1")
    for part in cfg.parts:
        if part.until is None or step <= part.until:
            return part_rate(part, step)
    raise RecipeError(
        f"step {step} lies after the end of the last schedule part, {cfg.parts[-1].until}",
        "raise `until` of the last part of schedule.parts or leave it out",
    )


def rates(cfg: ScheduleConfig, first: int, last: int) -> np.ndarray:
    """float64[last-first+1]: the rates of steps first..last."""
    return np.array([learning_rate(cfg, s) for s in range(first, last + 1)], dtype=np.float64)
