"""What the reference run is, completely: one frozen section, written to `reference/spec.json`.

The reference is AI2's own trainer (`ai2-olmo-core` 3.0.0). Everything it needs is in this object, so that
`python -m evals.reference.trainer --spec FILE` depends on nothing else. The surprising part is `segments`:
OLMo-core forgets its skip-step window whenever it restarts, so a schedule with several parts is several
trainer runs, and the recipe must say so in `history.cold_window_at`.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, model_validator

from data.config import DataConfig, FilterConfig, TokenizerConfig
from evals.config import ReferenceConfig
from infra.errors import RecipeError
from infra.section import Section
from model.config import (
    HistoryConfig,
    LayerKind,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    SchedulePart,
    TrainConfig,
)


class Segment(NamedTuple):
    """One uninterrupted OLMo-core trainer run: steps start+1 .. stop under one schedule part."""

    start: int
    stop: int
    part: SchedulePart


class ReferenceSpec(Section):
    """The reference run. Paths are absolute; lengths are in tokens, batches in instances, steps from 1."""

    model: ModelConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    loss: LossConfig
    history: HistoryConfig
    token_files: tuple[str, ...] = Field(min_length=1, description="headerless uint32 files, manifest order")
    vocab_size: int
    eos_id: int
    pad_id: int
    sequence_length: int = Field(ge=2)
    max_sequence_length: int | None = None
    global_batch_instances: int = Field(ge=1)
    seed: int
    filter: FilterConfig = FilterConfig()
    steps: int = Field(ge=1)
    landmarks: tuple[int, ...]
    threads: int = Field(2, ge=1)
    micro_batch_instances: int = Field(2, ge=1)
    initial_weights: str = Field("", description="HF directory to start from; empty: OLMo-core's own init")
    out: str = Field(description="the `reference/` directory of the run")

    @model_validator(mode="after")
    def _possible(self) -> "ReferenceSpec":
        if self.global_batch_instances % self.micro_batch_instances:
            raise ValueError(
                f"reference.micro_batch_instances {self.micro_batch_instances} does not divide "
                f"global_batch_instances {self.global_batch_instances}"
            )
        late = [s for s in self.landmarks if not 1 <= s <= self.steps]
        if late or list(self.landmarks) != sorted(set(self.landmarks)):
            raise ValueError(f"landmarks {self.landmarks} must be increasing steps within 1..{self.steps}")
        return self

    @classmethod
    def from_sections(
        cls,
        *,
        reference: ReferenceConfig,
        data: DataConfig,
        tokenizer: TokenizerConfig,
        train: TrainConfig,
        token_files: Sequence[str | Path],
        out: str | Path,
        initial_weights: str | Path = "",
    ) -> "ReferenceSpec":
        """The spec of a recipe's reference on `token_files` (manifest order), writing into `out`."""
        if data.epoch != 1:
            raise RecipeError(
                f"data.epoch is {data.epoch}, but OLMo-core's trainer starts at epoch 1",
                "set data.epoch=1 for a local reference",
            )
        return cls(
            model=reference.model,
            optimizer=reference.optimizer,
            schedule=reference.schedule,
            loss=reference.loss,
            history=reference.history,
            token_files=tuple(str(Path(f).resolve()) for f in token_files),
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
            sequence_length=data.sequence_length,
            max_sequence_length=data.max_sequence_length,
            global_batch_instances=data.global_batch_instances,
            seed=data.seed,
            filter=data.filter,
            steps=train.steps,
            landmarks=train.landmark_steps,
            threads=reference.threads,
            micro_batch_instances=reference.micro_batch_instances,
            initial_weights=str(initial_weights),
            out=str(Path(out).resolve()),
        )


def check_possible(spec: ReferenceSpec) -> None:
    """Raise RecipeError where the spec asks for something OLMo-core 3.0.0 on one process cannot do."""
    model = spec.model
    if spec.loss.reference_ranks != 1:
        raise RecipeError(
            f"reference.loss.reference_ranks is {spec.loss.reference_ranks}; the local reference is one process",
            "set it to 1: the mean of rank means then is the plain mean",
        )
    if LayerKind.SLIDING not in model.layer_kinds:
        raise RecipeError(
            "reference.model.layer_pattern has no sliding layer: OLMo-core exports such a model as OLMo 2",
            "keep at least one sliding layer",
        )
    if model.n_heads * model.head_dim != model.d_model:
        raise RecipeError(
            f"reference.model: n_heads x head_dim = {model.n_heads * model.head_dim} is not d_model = {model.d_model};"
            " OLMo-core's HF export cannot state a separate head width",
            "choose head_dim = d_model / n_heads",
        )
    scaling = model.rope_scaling
    if scaling and (
        scaling.beta_fast != int(scaling.beta_fast) or scaling.beta_slow != int(scaling.beta_slow)
    ):
        raise RecipeError("reference.model.rope_scaling: OLMo-core takes whole beta_fast and beta_slow only")
    segments(spec)


def segments(spec: ReferenceSpec) -> tuple[Segment, ...]:
    """The trainer runs of `spec`, in order: cut at each schedule hand-over and each declared restart."""
    handovers = [p.until for p in spec.schedule.parts[:-1] if p.until is not None and p.until < spec.steps]
    silent = [s for s in handovers if s not in spec.history.cold_window_at]
    if silent:
        raise RecipeError(
            f"reference.schedule hands over after step {silent[0]}, but reference.history.cold_window_at does not "
            "list it: OLMo-core changes its schedule by a restart, and a restart loses the skip-step window",
            f"add {silent[0]} to history.cold_window_at",
        )
    cuts = sorted({0, spec.steps, *handovers, *(s for s in spec.history.cold_window_at if s < spec.steps)})
    return tuple(Segment(a, b, _part(spec.schedule, b)) for a, b in itertools.pairwise(cuts))


def _part(schedule: ScheduleConfig, step: int) -> SchedulePart:
    """The part in force at `step`."""
    for part in schedule.parts[:-1]:
        if part.until is not None and step <= part.until:
            return part
    last = schedule.parts[-1]
    if last.until is not None and step > last.until:
        raise RecipeError(f"reference.schedule: no part covers step {step}", "raise `until` of the last part")
    return last
