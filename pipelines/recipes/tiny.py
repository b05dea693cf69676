"""`tiny`: the whole reproduction on a laptop CPU, against OLMo-core run on the same machine.

A true OLMo 3, shrunk: reordered norm, whole-width QK-norm, three sliding layers then a full one, a window
shorter than the sequence, untied head over 100,352 classes, z-loss, skip-step AdamW, and the two-part
schedule with its hand-over and its lost skip window. What is shrunk: width, depth, sequence, batch, steps.
"""

from data.config import CorpusConfig, DataConfig, TokenizerConfig
from evals.config import EvalConfig, ParityConfig, ReferenceConfig
from infra.config import LaunchConfig
from model.config import (
    HistoryConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    NumericsConfig,
    OptimizerConfig,
    ScheduleConfig,
    SchedulePart,
    SkipStepConfig,
    TrainConfig,
)
from pipelines.recipe import Recipe

STEPS = 96
# Part 1 is cut at half its horizon, where both curves stand at 0.55 of the peak, as in the 7B run.
HANDOVER = 24


def tiny() -> Recipe:
    """4 layers of width 64 on 16 MB of the environment's own text, 96 steps of 8 x 192 tokens."""
    model = ModelConfig(d_model=64, n_layers=4, n_heads=4, n_kv_heads=4, head_dim=16, d_ff=256, window=64)
    optimizer = OptimizerConfig(skip_step=SkipStepConfig(nan_policy="reference"))
    schedule = ScheduleConfig(
        parts=(
            SchedulePart(kind="cosine", peak=1e-3, warmup=6, horizon=2 * HANDOVER, until=HANDOVER),
            SchedulePart(kind="half_cosine", peak=1e-3, warmup=HANDOVER, horizon=113),
        )
    )
    loss = LossConfig()
    history = HistoryConfig(adam_count_at_start=1, cold_window_at=(HANDOVER,))
    return Recipe(
        name="tiny",
        description="a four-layer OLMo 3 on the environment's own text, 96 steps, against OLMo-core on this machine",
        corpus=CorpusConfig(kind="environment", megabytes_per_domain=4.0),
        tokenizer=TokenizerConfig(),
        data=DataConfig(sequence_length=192, global_batch_instances=8),
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        loss=loss,
        history=history,
        numerics=NumericsConfig(mode="fp32"),
        mesh=MeshConfig(),
        train=TrainConfig(steps=STEPS, checkpoint_every=8),
        reference=ReferenceConfig(
            model=model,
            optimizer=optimizer,
            schedule=schedule,
            loss=loss,
            history=history,
            micro_batch_instances=2,
        ),
        parity=ParityConfig(),
        evals=EvalConfig(heldout_documents=32, items_per_task=120),
        launch=LaunchConfig(target="local"),
    )
