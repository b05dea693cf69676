"""Recipe sections of the model and its training, and the named sizes of OLMo 3.

Architecture facts: `allenai/OLMo-core` @ fa6c5014c, `src/olmo_core/nn/transformer/config.py`.
"""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from infra.section import Section


class LayerKind(StrEnum):
    """Attention of a layer: the last `window` tokens including the current one, or all of them."""

    SLIDING = "sliding"
    FULL = "full"


OLMO3_PATTERN = (LayerKind.SLIDING, LayerKind.SLIDING, LayerKind.SLIDING, LayerKind.FULL)


class YarnConfig(Section):
    """YaRN frequencies, applied to full-attention layers only (stage 3)."""

    factor: float = Field(8.0, gt=1)
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_context: int = 8192


LARGEST = (
    1 << 24
)  # of any size: what a damaged or hostile file may ask for is refused before anything is built


class ModelConfig(Section):
    """One OLMo 3 model. `padded_vocab_size` is what trains; exports keep the first `vocab_size` rows."""

    d_model: int = Field(ge=1, le=LARGEST)
    n_layers: int = Field(ge=1, le=1024)
    n_heads: int = Field(ge=1, le=LARGEST)
    n_kv_heads: int = Field(ge=1, le=LARGEST)
    head_dim: int = Field(ge=2, le=LARGEST)
    d_ff: int = Field(ge=1, le=LARGEST)
    vocab_size: int = Field(100278, ge=1, le=LARGEST)
    padded_vocab_size: int = Field(100352, ge=1, le=LARGEST)
    layer_pattern: tuple[LayerKind, ...] = OLMO3_PATTERN
    last_layer_full: bool = True
    window: int = Field(4096, ge=1, description="keys a sliding query sees, itself included")
    rope_theta: float = Field(500_000.0, gt=1)
    rope_scaling: YarnConfig | None = None
    norm_eps: float = Field(1e-6, gt=0)
    init_std: float = Field(0.02, gt=0)
    init_seed: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _shapes(self) -> "ModelConfig":
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"model.n_heads {self.n_heads} is not a multiple of model.n_kv_heads {self.n_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim {self.head_dim} must be even for RoPE")
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(
                f"model.padded_vocab_size {self.padded_vocab_size} is below model.vocab_size {self.vocab_size}"
            )
        if not self.layer_pattern:
            raise ValueError("model.layer_pattern is empty")
        return self

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer: the pattern cycled from layer 0, the last layer forced to full."""
        kinds = [self.layer_pattern[i % len(self.layer_pattern)] for i in range(self.n_layers)]
        if self.last_layer_full:
            kinds[-1] = LayerKind.FULL
        return tuple(kinds)


class SkipStepConfig(Section):
    """Skip-step guard (sheet section 3.3).

    `reference`: a NaN stays in the window and every step skips until it leaves (129 calls).
    `safe`: a NaN skips exactly one step and never enters the window.
    """

    enabled: bool = True
    window: int = Field(128, ge=2)
    sigma: float = Field(6.0, gt=0)
    nan_policy: Literal["reference", "safe"] = "safe"


class OptimizerConfig(Section):
    """Skip-step AdamW (sheet section 3). Weight decay applies to everything but `embeddings.weight`."""

    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    skip_step: SkipStepConfig = SkipStepConfig()
    moments_dtype: Literal["float32", "bfloat16"] = "float32"


class SchedulePart(Section):
    """One part of the learning-rate history, in force for steps up to and including `until`.

    Steps count from 1. Formulas: sheet section 4.1. `horizon` is T, `warmup` is w, `peak` is P.
    """

    kind: Literal["cosine", "half_cosine", "linear"]
    peak: float = Field(gt=0)
    warmup: int = Field(ge=0)
    horizon: int = Field(ge=1)
    alpha_f: float = Field(0.1, ge=0, le=1)
    until: int | None = Field(None, ge=1, description="last step of this part; None: to the end")


class ScheduleConfig(Section):
    """Learning rate over the whole run: parts with hand-over."""

    parts: tuple[SchedulePart, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _ordered(self) -> "ScheduleConfig":
        ends = [p.until or 0 for p in self.parts[:-1]]
        if 0 in ends or ends != sorted(set(ends)):
            raise ValueError("schedule.parts: every part but the last needs an increasing `until`")
        return self


class LossConfig(Section):
    """Cross entropy plus z-loss (sheet section 2)."""

    z_loss_multiplier: float = Field(1e-5, ge=0)
    reference_ranks: int = Field(
        1, ge=1, description="data-parallel ranks of the reference: the loss is a mean of rank means"
    )


class HistoryConfig(Section):
    """Switches for what happened in the run being reproduced and is not in its formulas."""

    adam_count_at_start: Literal[0, 1] = Field(
        0, description="1: the reference wrote a step-0 checkpoint, which advances Adam's counter once"
    )
    cold_window_at: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (), description="steps after which the reference restarted and lost its skip window"
    )


class NumericsConfig(Section):
    """`fp32` for parity; `mixed` is what the reference did on GPUs (sheet section 1.7)."""

    mode: Literal["fp32", "mixed"] = "fp32"
    attention: Literal["auto", "xla", "splash", "cudnn"] = "auto"
    remat: Literal["none", "dots", "block", "full", "offload"] = "none"
    loss_slice_tokens: int = Field(512, ge=1, description="tokens per slice of the cross entropy")


def _auto_is_zero(size: Any) -> Any:
    return 0 if size == "auto" else size


MeshSize = Annotated[int, BeforeValidator(_auto_is_zero), Field(ge=0)]


class MeshConfig(Section):
    """Sizes of the device mesh axes in devices; `auto`, kept as 0, means `all that is left`."""

    data: MeshSize = 1
    fsdp: MeshSize = 0
    tensor: MeshSize = 1


class LogConfig(Section):
    """Writers beside `train/metrics.jsonl`, which is always written."""

    tensorboard: bool = Field(False, description="event files in RUN/train/tensorboard")
    wandb: Literal["off", "offline", "online"] = Field("off", description="offline: files in RUN/train/wandb")
    wandb_project: str = "olmo3-repro"
    trace_steps: tuple[int, int] | None = Field(
        None, description="first and last step of an XProf trace in RUN/train/trace"
    )

    @model_validator(mode="after")
    def _trace(self) -> "LogConfig":
        if self.trace_steps and not 1 <= self.trace_steps[0] <= self.trace_steps[1]:
            raise ValueError(
                f"train.log.trace_steps {list(self.trace_steps)} is not [first, last] from step 1 on"
            )
        return self


class PreviousStage(Section):
    """The training stage this one goes on from (sheet section 3.4)."""

    run: str = Field(description="run directory of the stage before")
    step: int = Field(ge=1, description="its checkpoint")


class TrainConfig(Section):
    """How far, and what is kept."""

    steps: int = Field(ge=1)
    enter_from: PreviousStage | None = Field(
        None, description="weights and optimizer state of another run's checkpoint; null: the step-0 weights"
    )
    landmarks: tuple[int, ...] | Literal["auto"] = Field(
        "auto", description="steps judged; auto: six, evenly spaced"
    )
    checkpoint_every: int = Field(1000, ge=1)
    keep_last: int = Field(2, ge=1, description="checkpoints kept besides the landmarks")
    micro_batch_instances: int = Field(0, ge=0, description="0: the whole global batch at once")
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _landmarks(self) -> "TrainConfig":
        if self.landmarks == "auto":
            return self
        late = [s for s in self.landmarks if s > self.steps]
        if late:
            raise ValueError(f"train.landmarks: {late} lie beyond the last step, train.steps = {self.steps}")
        if (
            not self.landmarks
            or min(self.landmarks) < 1
            or list(self.landmarks) != sorted(set(self.landmarks))
        ):
            raise ValueError("train.landmarks must be increasing steps from 1 on")
        return self

    @property
    def landmark_steps(self) -> tuple[int, ...]:
        """The judged steps, increasing."""
        if self.landmarks != "auto":
            return self.landmarks
        return tuple(sorted({max(1, round(self.steps * i / 6)) for i in range(1, 7)}))


def olmo3_size(name: str) -> ModelConfig:
    """A published or preset size by name. Raises KeyError with the known names."""
    if name not in SIZES:
        raise KeyError(f"unknown model size {name!r}; known: {', '.join(SIZES)}")
    return SIZES[name]


def _size(d: int, layers: int, heads: int, head_dim: int, ff: int, kv: int | None = None) -> ModelConfig:
    return ModelConfig(
        d_model=d, n_layers=layers, n_heads=heads, n_kv_heads=kv or heads, head_dim=head_dim, d_ff=ff
    )


SIZES = {
    "1M": _size(12, 4, 4, 4, 256),
    "14M": _size(128, 4, 8, 16, 512),
    "30M": _size(256, 4, 8, 32, 768),
    "60M": _size(384, 8, 8, 48, 1536),
    "100M": _size(512, 12, 8, 64, 2048),
    "190M": _size(768, 12, 12, 64, 3072),
    "370M": _size(1024, 16, 16, 64, 4096),
    "600M": _size(1280, 16, 16, 80, 5120),
    "760M": _size(1536, 16, 16, 96, 6144),
    "1B": _size(2048, 16, 16, 128, 8192),
    "3B": _size(3328, 16, 16, 208, 13312),
    "7B": _size(4096, 32, 32, 128, 11008),
    "13B": _size(5120, 40, 40, 128, 13824),
    "32B": _size(5120, 64, 40, 128, 27648, kv=8),
}
