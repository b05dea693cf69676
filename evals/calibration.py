"""Calibrate the verdict: how often does it say FAITHFUL of runs that differ, and how often does it miss runs that agree?

    python -m evals.calibration --simulations 1000 --out docs/calibration.md

Pairs of runs are simulated with a known true difference of 0, 1/2, 1 and 2 bounds; each goes through the very functions that judge a run. A false
FAITHFUL is FAITHFUL at a true difference of one bound or more; the promise is at most 5% of them, in one cell as in a whole run.
Documents get Student-t differences (4 degrees of freedom: a few documents differ much) that are shared in part by a domain, answers flip
both ways, KL is log-normal. The surprising thing: power, not the false rate, is what more items buy.
"""

import argparse
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evals.config import BoundsConfig
from evals.statistics import Comparison, accuracy_difference, kl_level, loss_difference
from evals.verdict import FAITHFUL, OF_OUTCOME, worst
from infra.artifacts import write_bytes_atomic
from infra.progress import Progress

SHIFTS = (0.0, 0.5, 1.0, 2.0)
LANDMARKS = 6
DOMAINS, TASKS = 4, 8


@dataclass(frozen=True)
class Setting:
    """How much there is to judge by, and how noisy it is."""

    name: str
    documents: int  # per domain
    items: int  # per task
    document_noise: float  # nat per prediction, scale of one document's difference
    flips: float  # share of answers that change by chance, half each way
    kl_spread: float  # sigma of the log of a document's KL


SETTINGS = (
    Setting("tiny, sides as close as rounding", 32, 100, 1e-5, 0.0, 0.3),
    Setting("tiny, run-to-run noise", 32, 100, 0.02, 0.02, 0.5),
    Setting("larger, run-to-run noise", 200, 500, 0.02, 0.02, 0.5),
)


def simulate_loss(s: Setting, shift: float, rng: np.random.Generator, b: BoundsConfig) -> Comparison:
    """Held-out loss of two runs whose true difference is `shift` bounds."""
    n = s.documents * DOMAINS
    predictions = np.maximum(1, np.minimum(255, rng.lognormal(5, 1, n))).astype(int)
    noise = s.document_noise * rng.standard_t(4, n) / np.sqrt(2)
    reference = rng.normal(3, 0.6, n) * predictions
    reproduced = reference + (shift * b.heldout_loss + noise) * predictions
    domains = [f"d{i % DOMAINS}" for i in range(n)]
    return loss_difference(
        reference.tolist(), reproduced.tolist(), predictions.tolist(), domains, bound=b.heldout_loss, bounds=b,
        landmarks=LANDMARKS,
    )  # fmt: skip


def simulate_accuracy(s: Setting, shift: float, rng: np.random.Generator, b: BoundsConfig) -> Comparison:
    """Macro accuracy of two runs whose true difference is `shift` bounds: more answers go wrong than right."""
    n = s.items * TASKS
    extra = shift * b.macro_accuracy
    drawn = rng.random(n)
    lost = drawn < s.flips / 2 + extra
    gained = (drawn >= 1 - s.flips / 2) & ~lost
    right = np.where(lost, 1, np.where(gained, 0, rng.integers(0, 2, n)))
    other = np.where(lost, 0, np.where(gained, 1, right))
    tasks = [f"t{i % TASKS}" for i in range(n)]
    return accuracy_difference(right, other, tasks, bound=b.macro_accuracy, bounds=b, landmarks=LANDMARKS)  # type: ignore[arg-type]


def simulate_kl(s: Setting, shift: float, rng: np.random.Generator, b: BoundsConfig) -> Comparison:
    """Token KL whose true mean is `shift` bounds (1/100 of the bound for 0: two runs are never one)."""
    n = s.documents * DOMAINS
    predictions = np.maximum(1, np.minimum(255, rng.lognormal(5, 1, n))).astype(int)
    mean = max(shift, 0.01) * b.token_kl
    kl = mean * rng.lognormal(-(s.kl_spread**2) / 2, s.kl_spread, n)
    domains = [f"d{i % DOMAINS}" for i in range(n)]
    return kl_level(kl * predictions, predictions, domains, bound=b.token_kl, bounds=b, landmarks=LANDMARKS)  # type: ignore[arg-type]


SIMULATORS: dict[str, Callable[[Setting, float, np.random.Generator, BoundsConfig], Comparison]] = {
    "held-out loss": simulate_loss,
    "downstream accuracy": simulate_accuracy,
    "token KL": simulate_kl,
}


def study(
    s: Setting, shift: float, simulations: int, bounds: BoundsConfig, seed: int = 0
) -> dict[str, Counter[str]]:
    """Counts of verdicts per surface, and of the whole run: all surfaces at all landmarks, drawn independently."""
    out: dict[str, Counter[str]] = {name: Counter() for name in (*SIMULATORS, "whole run")}
    rng = np.random.Generator(np.random.PCG64(seed))
    runs, cells = [], []
    for k in range(simulations):
        for name, simulate in SIMULATORS.items():
            verdict = OF_OUTCOME[simulate(s, shift, rng, bounds).outcome]
            out[name][verdict] += 1
            cells.append(verdict)
        if (k + 1) % LANDMARKS == 0:
            runs.append(worst(cells))
            cells = []
    out["whole run"].update(runs)
    return out


def table(simulations: int, bounds: BoundsConfig, settings: tuple[Setting, ...] = SETTINGS) -> str:
    """The study as Markdown."""
    lines = [
        "# Calibration of the verdict",
        "",
        f"Simulated pairs of runs, {simulations} per line and surface, {bounds.bootstrap} bootstrap samples, "
        f"alpha {bounds.alpha:g}, {LANDMARKS} landmarks. Made by `python -m evals.calibration`.",
        "",
        "A *false FAITHFUL* is FAITHFUL where the true difference is one bound or more. Power is the share of FAITHFUL at a true difference of 0.",
        "",
        "| setting | surface | true difference | FAITHFUL | INCONCLUSIVE | NOT FAITHFUL |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    false: dict[str, float] = {}
    power: dict[str, list[str]] = {}
    progress = Progress("calibration", len(settings) * len(SHIFTS), "cases")
    for i, s in enumerate(settings):
        for j, shift in enumerate(SHIFTS):
            for name, counts in study(s, shift, simulations, bounds, seed=100 * i + j).items():
                n = sum(counts.values())
                share = [f"{counts[v] / n:.1%}" for v in (FAITHFUL, "INCONCLUSIVE", "NOT FAITHFUL")]
                if shift >= 1:
                    false[name] = max(false.get(name, 0.0), counts[FAITHFUL] / n)
                elif shift == 0:
                    power.setdefault(name, []).append(share[0])
                lines.append(f"| {s.name} | {name} | {shift:g} bounds | {' | '.join(share)} |")
            progress.update(i * len(SHIFTS) + j + 1)
    progress.finish()
    sizes = "; ".join(
        f"{s.name}: {s.documents} documents per domain, {s.items} items per task" for s in settings
    )
    return "\n".join([*lines, "", f"Sizes: {sizes}.", "", *meaning(false, power, simulations, bounds)])


def meaning(
    false: dict[str, float], power: dict[str, list[str]], simulations: int, bounds: BoundsConfig
) -> list[str]:
    """What the table says, with its own sampling error."""
    error = 1.96 * (bounds.alpha * (1 - bounds.alpha) / simulations) ** 0.5
    worst_rate = max(false.values())
    held = (
        "no rate lies above it by more than that"
        if worst_rate <= bounds.alpha + error
        else "IT IS BROKEN HERE"
    )
    return [
        "## What it means", "",
        "| surface | largest false FAITHFUL rate | power, by setting in the order above |", "| --- | ---: | --- |",
        *(f"| {name} | {rate:.1%} | {', '.join(power[name])} |" for name, rate in false.items()), "",
        f"- A difference of exactly one bound is the hardest case: two one-sided tests are made to pass it {bounds.alpha:.0%} of the time at most. With "
        f"{simulations} simulations a share near {bounds.alpha:.0%} is known to about +-{error:.1%}; the largest is {worst_rate:.1%}: {held}.",
        f"- A whole run needs every surface at all {LANDMARKS} landmarks, so it is stricter than any cell: hardly ever falsely FAITHFUL, and less often "
        f"FAITHFUL when the runs agree. Its lines rest on {simulations // LANDMARKS} runs; landmarks are drawn independently here, those of a real run are not.",
        "- Downstream accuracy is the weak surface: with answers that flip by chance, hundreds of items per task cannot show agreement within the "
        "bound. The verdict is then INCONCLUSIVE, and the report says how many items would be needed. Little power is not an error.",
        "- Simulated differences are simple. What real runs do beyond them (drift along training, shared seeds) is not covered by this table.", "",
    ]  # fmt: skip


def main() -> None:
    """`--simulations N --out FILE`."""
    parser = argparse.ArgumentParser(description="Calibrate the verdict on simulated runs.")
    parser.add_argument("--simulations", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("docs/calibration.md"))
    args = parser.parse_args()
    write_bytes_atomic(args.out, table(args.simulations, BoundsConfig(bootstrap=400)).encode())


if __name__ == "__main__":
    main()
