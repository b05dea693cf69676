"""The reference run: AI2's own OLMo-core trainer on CPU, step for step.

    python -m evals.reference.trainer --spec RUN/reference/spec.json

Model, loader, SkipStepAdamW, schedulers, trainer loop and checkpointer are OLMo-core's, unpatched. One
callback listens: it writes `metrics.jsonl` (one line per step) with the receipt of the batch the loader
really yielded. A restart continues from the newest checkpoint whose metrics are complete; a finished run
returns at once.

The surprising thing: when OLMo-core writes its step-0 checkpoint, torch creates the optimizer state by one
step with zero gradients, and Adam's counter starts at 1. `history.adam_count_at_start` says which history
is meant, and every checkpoint is checked against it.
Source: ai2-olmo-core 3.0.0, `train/trainer.py`, `train/callbacks/checkpointer.py`.
"""

import argparse
import ctypes
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from evals.reference.spec import ReferenceSpec, Segment, check_possible, segments
from infra.artifacts import read_json, write_bytes_atomic, write_json_atomic
from infra.errors import LaunchError, ReproError
from infra.lease import Lease
from infra.owner import watch_owner
from model.config import SchedulePart

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc malloc.h
LEASE_PATIENCE = 30.0  # seconds: an orphaned predecessor saves a checkpoint and leaves


def main(argv: list[str] | None = None) -> int:
    """Run the reference of `--spec`. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Run OLMo-core's own trainer on CPU.")
    parser.add_argument("--spec", type=Path, required=True)
    spec = ReferenceSpec.model_validate(read_json(parser.parse_args(argv).spec))
    quiet_network()
    try:
        check_possible(spec)
        with Lease(Path(spec.out) / ".lease", "the reference run", wait_seconds=LEASE_PATIENCE):
            if not finished(spec):
                watch_owner()
                reuse_freed_memory()
                train(spec)
    except ReproError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def quiet_network() -> None:
    """Nothing of the reference may ask a hub."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1")


def reuse_freed_memory() -> None:
    """Let glibc keep freed blocks: without it half the CPU time is page faults on the logits buffers."""
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(M_MMAP_MAX, 0)
            libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def finished(spec: ReferenceSpec) -> bool:
    """Whether metrics, checkpoints, exports and receipts of every landmark are all there."""
    out = Path(spec.out)
    rows = read_rows(out)
    return (
        len(rows) == spec.steps
        and (out / "receipts.json").is_file()
        and all(committed(out, s) and exported(out, s) for s in spec.landmarks)
        and exported(out, 0)
    )


def committed(out: Path, step: int) -> bool:
    """OLMo-core writes `.metadata.json` last."""
    return (out / "checkpoints" / f"step{step}" / ".metadata.json").is_file()


def exported(out: Path, step: int) -> bool:
    """An export directory appears by rename only, so its presence is its completeness."""
    return (out / "hf" / f"step{step}" / "config.json").is_file()


def read_rows(out: Path) -> list[dict[str, Any]]:
    """The complete rows of `metrics.jsonl`, steps 1, 2, 3 ...; a torn or repeated tail is left out."""
    rows: list[dict[str, Any]] = []
    path = out / "metrics.jsonl"
    if not path.is_file():
        return rows
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break
        if row.get("step") != len(rows) + 1:
            break
        rows.append(row)
    return rows


def resume_step(spec: ReferenceSpec) -> int | None:
    """The newest step to continue from: checkpoint committed, every earlier metric present. None: afresh."""
    out = Path(spec.out)
    return next((s for s in range(len(read_rows(out)), -1, -1) if committed(out, s)), None)


def train(spec: ReferenceSpec) -> None:
    """Train, or go on training, through every segment; then export every landmark."""
    import torch

    torch.set_num_threads(spec.threads)
    out = Path(spec.out)
    done = resume_step(spec)
    rows = read_rows(out)[: done or 0]
    write_bytes_atomic(out / "metrics.jsonl", b"".join(_line(row) for row in rows))
    if done is not None:
        print(f"reference: continuing after step {done}", flush=True)
    for segment in segments(spec):
        if done is None or done < segment.stop:
            run_segment(spec, segment, done)
            done = segment.stop
    rows = read_rows(out)
    if len(rows) != spec.steps:
        raise LaunchError(f"the reference logged {len(rows)} of {spec.steps} steps", f"see {out / 'log.txt'}")
    for step in spec.landmarks:
        skipped = sum(int(row["skipped"]) for row in rows[:step])
        check_adam_count(out, step, step + spec.history.adam_count_at_start - skipped)
        export_step(spec, step)
    write_json_atomic(out / "receipts.json", {str(s): rows[s - 1]["receipt"] for s in spec.landmarks})


def run_segment(spec: ReferenceSpec, segment: Segment, done: int | None) -> None:
    """One OLMo-core trainer run over `segment`, from checkpoint `done` (None: from initial weights)."""
    import torch
    from olmo_core.data import NumpyDataLoaderConfig, NumpyDatasetDType, NumpyFSLDatasetConfig
    from olmo_core.data import TokenizerConfig as OlmoTokenizer
    from olmo_core.data.numpy_dataset import InstanceFilterConfig
    from olmo_core.optim import OptimGroupOverride, SkipStepAdamWConfig
    from olmo_core.train import Duration, TrainerConfig
    from olmo_core.train.callbacks import CheckpointerCallback, GarbageCollectorCallback
    from olmo_core.train.callbacks.checkpointer import CheckpointRemovalStrategy
    from olmo_core.train.common import LoadStrategy
    from olmo_core.train.train_module import TransformerTrainModuleConfig
    from olmo_core.utils import seed_all

    from evals.reference.listener import Listener
    from evals.reference.olmo_core_model import export_hf, olmo_core_config

    out = Path(spec.out)
    seed_all(0)  # nothing in this model draws at train time; fixed so that nothing can
    optimizer, skip, length = spec.optimizer, spec.optimizer.skip_step, spec.sequence_length
    model = olmo_core_config(spec.model).build(init_device="meta")
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=spec.micro_batch_instances * length,
        max_sequence_length=length,
        optim=SkipStepAdamWConfig(
            lr=segment.part.peak,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            dtype=None if optimizer.moments_dtype == "float32" else "bfloat16",  # type: ignore[arg-type]
            # a window that never fills is OLMo-core's way to never skip
            rolling_interval_length=skip.window if skip.enabled else 2 * (spec.steps + 2),
            sigma_factor=skip.sigma,  # type: ignore[arg-type]
            group_overrides=[OptimGroupOverride(params=["embeddings.weight"], opts={"weight_decay": 0.0})],
        ),
        scheduler=olmo_core_scheduler(segment.part),
        z_loss_multiplier=spec.loss.z_loss_multiplier,
        max_grad_norm=optimizer.max_grad_norm,
    ).build(model, device=torch.device("cpu"))
    if done is None and spec.initial_weights:
        load_initial_weights(module.model, Path(spec.initial_weights))
    dataset = NumpyFSLDatasetConfig(
        paths=list(spec.token_files),
        tokenizer=OlmoTokenizer(
            vocab_size=spec.vocab_size, eos_token_id=spec.eos_id, pad_token_id=spec.pad_id
        ),
        dtype=NumpyDatasetDType.uint32,
        sequence_length=length,
        max_target_sequence_length=spec.max_sequence_length,
        work_dir=str(out / "work"),
        instance_filter_config=InstanceFilterConfig(
            repetition_min_period=spec.filter.min_period,
            repetition_max_period=spec.filter.max_period,
            repetition_max_count=spec.filter.max_count,
        )
        if spec.filter.enabled
        else None,
    ).build()
    loader = NumpyDataLoaderConfig(
        global_batch_size=spec.global_batch_instances * length, seed=spec.seed, work_dir=str(out / "work")
    ).build(dataset)
    wanted = {s for s in (*spec.landmarks, segment.stop) if segment.start < s <= segment.stop}
    listener = Listener(out=str(out), restore_window=done is not None and done != segment.start)
    trainer = (
        TrainerConfig(
            save_folder=str(out / "checkpoints"),
            work_dir=str(out / "work"),
            save_overwrite=True,
            metrics_collect_interval=1,
            max_duration=Duration.steps(spec.steps),
            hard_stop=Duration.steps(segment.stop),
            load_strategy=LoadStrategy.never,
            cancel_check_interval=1,
        )
        .with_callback(
            "checkpointer",
            CheckpointerCallback(
                save_interval=None,
                fixed_steps=sorted(wanted),
                pre_train_checkpoint=bool(spec.history.adam_count_at_start) and done is None,
                save_async=False,
                remove=CheckpointRemovalStrategy.never,
                max_checkpoints=None,
            ),
        )
        .with_callback("garbage_collector", GarbageCollectorCallback(enabled=False))
        .with_callback("listener", listener)
        .build(module, loader)
    )
    if loader.total_batches is not None and loader.total_batches < spec.steps:
        raise LaunchError(
            f"the corpus holds {loader.total_batches} batches of {spec.global_batch_instances} instances, "
            f"fewer than train.steps = {spec.steps}",
            "give more text (corpus.megabytes_per_domain) or train fewer steps",
        )
    if done is None:
        export_hf(
            module.model, spec.model, out / "hf" / "step0",
            context_length=length, eos_id=spec.eos_id, pad_id=spec.pad_id,
        )  # fmt: skip
    else:
        trainer.load_checkpoint(
            str(out / "checkpoints" / f"step{done}"), load_trainer_state=True, load_optim_state=True
        )
    trainer.fit()
    if trainer.global_step != segment.stop:
        raise LaunchError(f"the reference was stopped at step {trainer.global_step} of {segment.stop}")
    if segment.start == 0 and spec.history.adam_count_at_start:
        check_adam_count(out, 0, 1)


def olmo_core_scheduler(part: SchedulePart) -> Any:
    """OLMo-core's scheduler of one part, with its horizon stated (`t_max`), not derived from the duration."""
    from olmo_core.optim import CosWithWarmup, HalfCosWithWarmup, LinearWithWarmup

    kinds: dict[str, Any] = {
        "cosine": CosWithWarmup,
        "half_cosine": HalfCosWithWarmup,
        "linear": LinearWithWarmup,
    }
    return kinds[part.kind](warmup=part.warmup, alpha_f=part.alpha_f, t_max=part.horizon)


def load_initial_weights(model: Any, hf_dir: Path) -> None:
    """Put the weights of an HF directory into OLMo-core's model, by OLMo-core's own key mapping."""
    from olmo_core.nn.hf.convert import convert_state_from_hf
    from safetensors.torch import load_file
    from transformers import AutoConfig

    state: dict[str, Any] = {}
    for path in sorted(hf_dir.glob("*.safetensors")):
        state.update(load_file(path))
    model.load_state_dict(
        convert_state_from_hf(AutoConfig.from_pretrained(hf_dir), state, model_type="olmo3"), strict=True
    )


def check_adam_count(out: Path, step: int, expected: int) -> None:
    """Compare Adam's counter in the saved checkpoint of `step` with what the recipe's history implies."""
    import torch
    from olmo_core.distributed.checkpoint import load_state_dict

    key = "optim.state.lm_head.w_out.weight.step"
    state = {key: torch.zeros(())}
    load_state_dict(str(out / "checkpoints" / f"step{step}" / "model_and_optim"), state)
    if float(state[key]) != expected:
        raise LaunchError(
            f"Adam's counter in the reference's checkpoint of step {step} is {float(state[key]):g}, "
            f"but the recipe's history implies {expected}",
            "check reference.history.adam_count_at_start",
        )


def export_step(spec: ReferenceSpec, step: int) -> None:
    """Export one landmark checkpoint to `hf/step<k>/`, fp32, padding kept; skipped when it stands."""
    from olmo_core.distributed.checkpoint import load_model_and_optim_state

    from evals.reference.olmo_core_model import export_hf, olmo_core_config

    out = Path(spec.out)
    if exported(out, step):
        return
    model = olmo_core_config(spec.model).build(init_device="cpu")
    load_model_and_optim_state(str(out / "checkpoints" / f"step{step}" / "model_and_optim"), model)
    export_hf(
        model, spec.model, out / "hf" / f"step{step}",
        context_length=spec.sequence_length, eos_id=spec.eos_id, pad_id=spec.pad_id,
    )  # fmt: skip


def _line(row: dict[str, Any]) -> bytes:
    return (json.dumps(row) + "\n").encode()


if __name__ == "__main__":
    started = time.monotonic()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stdout)
    status = main()
    print(f"reference: exit {status} after {time.monotonic() - started:.1f} s", flush=True)
    sys.exit(status)
