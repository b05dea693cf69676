"""The training loop: `python -m model.train --run RUN_DIR`.

Reads RUN_DIR/recipe.json, the step-0 weights of RUN_DIR/init/hf, tokens and order; writes RUN_DIR/train/metrics.jsonl
and RUN_DIR/checkpoints/. Started again, it goes on from the newest whole checkpoint, bit for bit on the same mesh.
SIGTERM saves and ends with status 75. The number of threads comes from the environment. With --distributed several
processes train together (`model.hosts`): a SIGTERM on any of them is a checkpoint of all.

The surprising thing: the log of a step is fetched one step late, so the device never waits for the host; before a
checkpoint the log is brought up to date, so every checkpoint has its lines.
"""

import argparse
import contextlib
import dataclasses
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from data.config import DataConfig
from infra.artifacts import canonical, differences, fingerprint, read_json, write_json_atomic
from infra.errors import IdentityError, RecipeError, ReproError
from infra.lease import Lease
from infra.owner import watch_owner
from infra.progress import Progress
from infra.topology import peak_flops
from model import checkpoint, hosts, seams, sharding, skip_step, stage
from model import step as step_lib
from model.config import (
    HistoryConfig,
    LogConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    NumericsConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)
from model.flops import step_flops
from model.log_writers import Trace, open_writers
from model.metrics import MetricsLog, truncate
from model.schedule import learning_rate

PREEMPTED = 75  # EX_TEMPFAIL: saved, start again
TAKEOVER_SECONDS = 60.0  # a trainer whose launcher was killed needs this long at most to save and end


@dataclasses.dataclass(frozen=True)
class TrainSpec:
    """What one training run needs. `run` is the run directory."""

    run: Path
    data: DataConfig
    model: ModelConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    loss: LossConfig
    history: HistoryConfig
    numerics: NumericsConfig
    mesh: MeshConfig
    train: TrainConfig

    @classmethod
    def from_run(cls, run: str | Path) -> "TrainSpec":
        """The spec in RUN/recipe.json; other sections of the recipe are not looked at."""
        run = Path(run)
        recipe = read_json(run / "recipe.json")
        if not isinstance(recipe, dict):
            raise RecipeError(f"{run}/recipe.json is no object", "write the recipe again")
        sections: dict[str, Any] = {}
        for field in dataclasses.fields(cls)[1:]:
            if field.name not in recipe:
                raise RecipeError(
                    f"{run}/recipe.json has no section {field.name!r}", "write the recipe again"
                )
            try:
                sections[field.name] = field.type.model_validate(recipe[field.name])  # type: ignore[union-attr]
            except ValueError as e:
                raise RecipeError(f"{run}/recipe.json, section {field.name}: {e}", "fix the field") from None
        return cls(run, **sections)

    def step_spec(self) -> step_lib.StepSpec:
        """The part the compiled step depends on."""
        mesh = sharding.make_mesh(self.mesh)
        micro = self.train.micro_batch_instances
        sharding.check_batch(self.data.global_batch_instances, micro, sharding.batch_shards(mesh))
        return step_lib.StepSpec(self.model, self.optimizer, self.loss, self.numerics, mesh, micro)

    def identity(self, index_digest: str, order_digest: str) -> dict[str, Any]:
        """What a checkpoint must share with the run that goes on from it. Mesh, length and prefetch may change."""
        data = self.data.model_dump(mode="json", exclude={"workers", "worker_kind", "prefetch"})
        sections = {n: getattr(self, n) for n in ("model", "optimizer", "schedule", "loss", "history")}
        numerics = self.numerics.model_dump(mode="json", include={"mode"})
        return canonical(
            {**sections, "data": data, "numerics": numerics, "index": index_digest, "order": order_digest}
        )


class Preempted(Exception):
    """SIGTERM arrived; the state is saved."""


class Stop:
    """What SIGTERM does. In the loop: `asked` becomes true, the loop saves and ends. Before it nothing is to be saved, so
    the process ends at once, with the same status; not where other hosts wait for this one (`at_once=False`).
    """

    def __init__(self, at_once: bool = True):
        self.asked, self.at_once = False, at_once

    def listen(self) -> Any:
        """Take SIGTERM from here on; the handler before."""
        return signal.signal(signal.SIGTERM, self._told)

    def _told(self, signum: int, frame: Any) -> None:
        if self.at_once:
            os.write(2, b"SIGTERM before the first step: nothing to save, start again\n")
            os._exit(PREEMPTED)
        self.asked = True


class Trainer:
    """One run of the loop. Split in methods so that each can be read alone."""

    def __init__(self, spec: TrainSpec, stop: Stop | None = None):
        from data.index import InstanceIndex
        from data.masks import open_mask
        from data.order import describe_order, open_order

        self.entry = None
        if spec.train.enter_from:
            self.entry = stage.find(
                spec.train.enter_from, spec.optimizer, spec.run / "train" / "entered.json"
            )
            spec = dataclasses.replace(spec, optimizer=self.entry.optimizer)
        self.spec, self.step_spec = spec, spec.step_spec()
        run, data = spec.run, spec.data
        self.index = InstanceIndex.from_manifest(
            run / "tokens" / "train", data.sequence_length, data.chunk, verify="sampled"
        )
        if data.filter.enabled:
            self.index.set_mask(open_mask(run / "order", self.index, data.filter))
        self.order = open_order(
            run / "order", n_instances=self.index.n_instances, index_digest=self.index.digest
        )
        self.index.require(data.global_batch_instances, spec.train.steps)
        self.identity = spec.identity(
            self.index.digest, fingerprint(canonical(describe_order(run / "order")))
        )
        if self.entry:
            self.identity["entered_from"] = self.entry.fingerprint
        self.root = run / "checkpoints"
        self.hosts = hosts.Hosts(self.step_spec.mesh)
        self.stop = stop or Stop(at_once=False)

    def start(self) -> tuple[int, Any, Any]:
        """(steps done, state, receipt): from the newest whole checkpoint, or from the step-0 weights."""
        from data.receipt import Receipt

        step = self.newest()
        if step is None:
            from model.convert.hf import import_hf

            if self.entry:
                return 0, self.enter(self.entry), Receipt()
            # The weights are the reference's by design; whether the models are equal is the parity gate's question.
            params = import_hf(self.spec.run / "init" / "hf", self.spec.model, same_architecture=False)
            return 0, step_lib.new_state(self.step_spec, params, self.spec.history), Receipt()
        meta = checkpoint.read_meta(self.root, step)
        stored: dict[str, Any] = {name: meta.get(name) for name in ("identity", "receipt", "position")}
        if not all(isinstance(value, dict) for value in stored.values()):
            raise IdentityError(
                f"{checkpoint.step_dir(self.root, step)}/{checkpoint.META} lacks what training goes on from ({', '.join(stored)})",
                "move this checkpoint away: the one before it is taken",
            )
        wrong = differences(stored["identity"], self.identity)
        if wrong:
            raise IdentityError(
                f"checkpoint step{step} in {self.root} was made by another recipe; different: {', '.join(wrong[:6])}",
                "FRESH=1 starts over; RUN_DIR=... keeps both",
            )
        abstract = step_lib.abstract_state(self.step_spec)
        state, meta = checkpoint.restore(self.root, step, abstract, verify=False)  # verified just above
        receipt = Receipt.from_json(stored["receipt"])
        if not step == int(state["step"]) == receipt.step == stored["position"].get("step"):
            raise IdentityError(
                f"step{step} in {self.root}: its parts stand at different steps",
                "move this checkpoint away: the one before it is taken",
            )
        if hosts.lead():
            print(f"resuming from {checkpoint.step_dir(self.root, step)}", file=sys.stderr)
        return step, state, receipt

    def newest(self) -> int | None:
        """The newest whole checkpoint; the lead looks, digests it and says what it passed over."""
        step = None
        if hosts.lead():
            step, skipped = checkpoint.latest_committed(self.root)
            for name, why in skipped:
                print(f"passing over {self.root / name}: {why}", file=sys.stderr)
        found = hosts.from_lead(-1 if step is None else step)
        return None if found < 0 else found

    def enter(self, entry: stage.Entry) -> Any:
        """State of the stage before; what of our optimizer has no effect is printed and kept for the report."""
        state = stage.load(entry, self.step_spec)
        if hosts.lead():
            print(f"entering from step{entry.step} of {entry.run}", file=sys.stderr)
            for line in entry.overruled:
                print(f"the checkpoint's value stays: optimizer.{line}", file=sys.stderr)
            write_json_atomic(self.spec.run / "train" / "entered.json", entry.to_json())
        return state

    def meta(self, step: int, receipt: Any, state: Any) -> dict[str, Any]:
        """The record beside the arrays of a checkpoint."""
        spec = self.spec
        return {
            "position": {"step": step, "tokens_seen": step * spec.data.global_batch_tokens},
            "receipt": receipt.to_json(),
            "skip_window": skip_step.seen_values(state["opt"]["window"]),
            "model": spec.model.model_dump(mode="json"),
            "identity": self.identity,
            "fingerprint": fingerprint(self.identity),
            "mesh": dict(self.step_spec.mesh.shape),
            "layout": checkpoint.LAYOUT,
        }

    def run(self) -> dict[str, Any]:
        """Train to the last step; returns a summary."""
        from data.receipt import step_digest

        spec, train, lead = self.spec, self.spec.train, hosts.lead()
        done, state, receipt = self.start()
        log_path = spec.run / "train" / "metrics.jsonl"
        if lead:
            for name in checkpoint.make_room(self.root, done):
                print(f"set aside as {self.root / name}", file=sys.stderr)
            truncate(log_path, done)
            seams.note(log_path.parent / seams.FILE, done + 1, self.step_spec.mesh)
        summary = {"resumed_from": done, "steps": max(train.steps, done), "seconds": 0.0, "skipped_steps": 0}
        if done >= train.steps:
            return {**summary, "receipt": receipt.hexdigest()}
        rows, length = spec.data.global_batch_instances, spec.data.sequence_length
        begun = time.monotonic()
        program = (
            step_lib.jit_step(self.step_spec)
            .lower(
                step_lib.abstract_state(self.step_spec), step_lib.abstract_batch(self.step_spec, rows, length)
            )
            .compile()
        )
        summary["compile_seconds"] = time.monotonic() - begun
        log = MetricsLog(log_path) if lead else None
        progress = Progress("train", train.steps, "steps")
        landmarks, flops_per_second = set(train.landmark_steps), self.peak_flops()
        step_model_flops = step_flops(spec.model, length, rows).model
        pending: dict[str, Any] | None = None
        stopping = False  # what all hosts know one step after any of them was told
        trace = Trace(train.log.trace_steps, spec.run / "train" / "trace")
        with (
            checkpoint.Saver(self.root, landmarks, train.keep_last) as saver,
            contextlib.closing(log) if log else contextlib.nullcontext(),
            open_writers(train.log if lead else LogConfig(), log_path.parent, done + 1) as writers,
            contextlib.closing(trace),
        ):
            saver.prepare(step_lib.abstract_state(self.step_spec))
            clock = time.monotonic()

            def flush(record: dict[str, Any] | None) -> None:
                nonlocal clock, stopping
                if record is None:
                    return
                digest, stopping = self.hosts.heard(record.pop("told"))
                receipt.push(record["step"], digest)
                record["receipt"] = receipt.hexdigest()
                values = {k: float(v) for k, v in jax.device_get(record.pop("device")).items()}
                now = time.monotonic()
                seconds, clock = max(now - clock, 1e-9), now
                record = {"step": record.pop("step"), **values, **record}
                record["tokens_per_second"] = spec.data.global_batch_tokens / seconds
                record["mfu"] = step_model_flops / (seconds * flops_per_second) if flops_per_second else None
                summary["skipped_steps"] += int(values["skipped"])
                if log is None:
                    return
                log.write(record)
                writers.write(record)
                skipped = "  SKIPPED" if values["skipped"] else ""
                progress.update(record["step"], f"CE {values['ce']:.4f}{skipped}")

            self.stop.at_once = False
            with jax.transfer_guard("disallow"):
                for batch, placed in self.feed(done + 1, train.steps):
                    saver.check()
                    trace.before(batch.step)
                    state, device_metrics = program(state, placed)
                    trace.after(batch.step, device_metrics)
                    rows = step_digest(
                        batch.step, batch.ids, batch.tokens, self.hosts.group, self.hosts.groups
                    )
                    told = self.hosts.tell(rows, self.stop.asked, after=device_metrics)
                    flush(pending)
                    pending = {
                        "step": batch.step,
                        "device": device_metrics,
                        "told": told,
                        "lr": learning_rate(spec.schedule, batch.step),
                        "receipt": "",
                        "tokens_seen": batch.step * spec.data.global_batch_tokens,
                    }
                    at, stop = batch.step, stopping or (self.stop.asked and self.hosts.count == 1)
                    if at in landmarks or at % train.checkpoint_every == 0 or at == train.steps or stop:
                        flush(pending)
                        pending = None
                        if log:
                            log.sync()
                        saver.save(at, state, self.meta(at, receipt, state))
                    if stop and at < train.steps:
                        saver.wait()
                        raise Preempted(f"SIGTERM: saved step {at}, start again to go on")
        summary["seconds"] = time.monotonic() - begun
        if lead:
            progress.finish(f"{train.steps} steps, receipt {receipt.hexdigest()[:12]}")
        return {**summary, "receipt": receipt.hexdigest()}

    def peak_flops(self) -> float | None:
        """Peak dense bf16 FLOP/s of all devices of the mesh, for MFU; None where the table has no entry (CPU)."""
        mesh = self.step_spec.mesh
        one = peak_flops(mesh.devices.flat[0].device_kind)
        return one * mesh.size if one else None

    def feed(self, first: int, last: int) -> Iterator[tuple[Any, Any]]:
        """(batch, its arrays on the devices) of each step; the transfer of the next one overlaps the step."""
        from data.loader import batches

        spec, rows = self.spec, self.spec.data.global_batch_instances
        where = step_lib.batch_shardings(self.step_spec)

        def place(batch: Any) -> Any:
            numbers = step_lib.control(spec.schedule, spec.optimizer, spec.history, batch.step)
            arrays = step_lib.host_batch(batch.tokens, batch.instance_mask, numbers)
            arrays["position"] = self.hosts.positions(len(batch.ids))
            if self.hosts.count == 1:
                return jax.device_put(arrays, where)
            return {k: self.hosts.place(v, where[k], rows) for k, v in arrays.items()}

        ahead, group, groups = None, self.hosts.group, self.hosts.groups
        for batch in batches(self.index, self.order, spec.data, first, last, group, groups):
            current, ahead = ahead, (batch, place(batch))
            if current is not None:
                yield current
        if ahead is not None:
            yield ahead


def train(spec: TrainSpec, stop: Stop | None = None) -> dict[str, Any]:
    """Run the loop under the lease of the run's training directory; returns a summary.

    Raises Preempted once `stop` was asked for and the state is saved, ReproError for anything the user can fix.
    """
    with hosts.leading(Lease(spec.run / ".lease.train", "training", wait_seconds=TAKEOVER_SECONDS)):
        return Trainer(spec, stop).run()


def quiet_orbax() -> None:
    """A failed save is one error of ours: without the traces that Orbax logs, and without those of answers to the event
    loop that it has closed by then.
    """
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    otherwise = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            otherwise(unraisable)

    sys.unraisablehook = hook


def main(argv: list[str] | None = None) -> int:
    """Command line of the training process."""
    parser = argparse.ArgumentParser(description="Train the recipe of a run directory.")
    parser.add_argument("--run", required=True, help="run directory with recipe.json")
    parser.add_argument("--distributed", action="store_true", help="call jax.distributed.initialize() first")
    parser.add_argument(
        "--coordinator", default=None, help="HOST:PORT of process 0, where jax cannot find it"
    )
    parser.add_argument("--processes", type=int, default=None, help="their number, where jax cannot find it")
    parser.add_argument("--process", type=int, default=None, help="this one, from 0")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of user errors")
    args = parser.parse_args(argv)
    stop = Stop(at_once=not args.distributed)
    stop.listen()
    if not args.debug:
        quiet_orbax()
    try:
        watch_owner()
        if args.distributed:
            jax.distributed.initialize(args.coordinator, args.processes, args.process)
            stop.listen()  # jax has put its own handler there
        summary = train(TrainSpec.from_run(args.run), stop)
    except Preempted as e:
        print(e, file=sys.stderr)
        return PREEMPTED
    except ReproError as e:
        if args.debug:
            traceback.print_exc()
        print(f"error: {e}", file=sys.stderr)
        return e.exit_code
    if hosts.lead():
        print(
            f"trained {summary['steps']} steps, {summary['skipped_steps']} skipped, receipt {summary['receipt']}"
        )
    return 0


if __name__ == "__main__":
    status = main()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # saved and said: a second one changes nothing
    sys.exit(status)
