"""Resume until done: launch again while there is progress, stop with the last log when there is none.

    outcome = run_until_done(start, progress, goal=1_413_814, policy=RelaunchPolicy(max_idle=3))

Preemption is not an error: a job that ends with 75, or is taken away, is launched again like any other. What counts
is the step of the newest committed checkpoint, read from storage and never from the job: `max_idle` launches in a
row that do not move it end in an error with the last log lines. A cancelled job is not launched again.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from infra.launch.job import Handle, Status, failure
from infra.progress import clock
from infra.redact import redact


@dataclass(frozen=True)
class RelaunchPolicy:
    """`max_idle`: launches in a row without a new committed step. Waits double from `backoff` to `longest` seconds."""

    max_idle: int = 3
    backoff: float = 30.0
    longest: float = 1800.0


@dataclass(frozen=True)
class Outcome:
    """How it ended, after how many launches, at which step."""

    status: Status
    launches: int
    step: int


def run_until_done(
    start: Callable[[int], Handle],
    progress: Callable[[], int],
    goal: int,
    policy: RelaunchPolicy,
    *,
    say: Callable[[str], None] = print,
    sleep: Callable[[float], None] = time.sleep,
) -> Outcome:
    """Launch (attempt 1, 2, …) until the committed step reaches `goal`. Raises LaunchError without progress."""
    step, idle, attempt = progress(), 0, 0
    while step < goal:
        attempt += 1
        handle = start(attempt)
        say(f"launch {attempt}: {handle.name}, from step {step} of {goal}")
        status = handle.wait()
        before, step = step, progress()
        if step >= goal:
            break
        if status == Status.CANCELLED:
            say(f"{handle.name} was cancelled at step {step}; not launched again")
            return Outcome(status, attempt, step)
        gained = step - before
        idle = 0 if gained > 0 else idle + 1
        if idle > policy.max_idle:
            error = failure(handle, status)
            error.what = f"{idle} launches in a row gained no step (still at {step} of {goal}); {error.what}"
            error.args = (error.what,)
            raise error
        why = (
            "was preempted"
            if status == Status.PREEMPTED
            else f"ended ({status}, exit code {handle.exit_code})"
        )
        pause = (
            0.0
            if gained > 0 and status == Status.PREEMPTED
            else min(policy.backoff * 2 ** max(idle - 1, 0), policy.longest)
        )
        say(f"{handle.name} {why} after {gained} new steps; again in {clock(pause)}")
        if status == Status.FAILED:
            for line in handle.logs(5):
                say(f"  {redact(line)}")
        sleep(pause)
    return Outcome(Status.SUCCEEDED, attempt, step)
