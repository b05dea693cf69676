"""The published runs as recipes. Every number is from AI2's scripts and checkpoint lists.

Source: `allenai/OLMo-core` @ fa6c5014c, `src/scripts/train/OLMo3/` (internal scripts win over the cleaned-up
official copies, and the published checkpoint list wins over both).
"""

from data.config import CorpusConfig, DataConfig, FilterConfig, TokenizerConfig
from evals.config import EvalConfig, ParityConfig, ReferenceConfig
from infra.config import LaunchConfig
from model.config import (
    HistoryConfig,
    LossConfig,
    MeshConfig,
    NumericsConfig,
    OptimizerConfig,
    ScheduleConfig,
    SchedulePart,
    SkipStepConfig,
    TrainConfig,
    olmo3_size,
)
from pipelines.recipe import Recipe

PUBLIC_DATA = "https://olmo-data.org"
STAGE1_PEAK = 3e-4
STAGE1_WARMUP = 2000
# ceil(5e12 / 2**22) and ceil(7e12 / 2**22): the horizons of the two parts, in steps of 4,194,304 tokens.
STAGE1_HORIZON_5T = 1_192_093
STAGE1_HORIZON_7T = 1_668_931
# Part 2 loads the checkpoint of this step; its own warmup ends 999 steps later, at 1192092 // 2 + 1000.
STAGE1_HANDOVER = 596_047
STAGE1_PART2_WARMUP = 597_046
STAGE1_STEPS = 1_413_814


def _olmo3(
    *,
    name: str,
    description: str,
    size: str,
    mix: str,
    batch: int,
    filtered: bool,
    schedule: ScheduleConfig,
    history: HistoryConfig,
    ranks: int,
    train: TrainConfig,
    published: str,
    launch: LaunchConfig,
) -> Recipe:
    model = olmo3_size(size)
    optimizer = OptimizerConfig(skip_step=SkipStepConfig(nan_policy="reference"))
    loss = LossConfig(reference_ranks=ranks)
    return Recipe(
        name=name,
        description=description,
        corpus=CorpusConfig(
            kind="tokens", manifest=mix, base_dir=PUBLIC_DATA, heldout_manifest="v3-small-ppl-validation"
        ),
        tokenizer=TokenizerConfig(),
        data=DataConfig(
            sequence_length=8192,
            global_batch_instances=batch,
            seed=34521,
            filter=FilterConfig(enabled=filtered),
        ),
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        loss=loss,
        history=history,
        numerics=NumericsConfig(mode="mixed", remat="block"),
        mesh=MeshConfig(),
        train=train,
        reference=ReferenceConfig(
            kind="published",
            model=model,
            optimizer=optimizer,
            schedule=schedule,
            loss=loss,
            history=history,
            published=published,
        ),
        parity=ParityConfig(prompt_tokens=8192),
        evals=EvalConfig(heldout_documents=1000, items_per_task=10_000, context=8192, batch_tokens=65_536),
        launch=launch,
    )


def olmo3_190m() -> Recipe:
    """The 190M script: one Chinchilla of tokens, filter on, single cosine."""
    return _olmo3(
        name="olmo3_190m",
        description="OLMo 3 190M, 3.8B tokens of OLMo-mix-0925, repetition filter on",
        size="190M",
        mix="OLMo-mix-0925-official",
        batch=64,
        filtered=True,
        schedule=ScheduleConfig(
            parts=(SchedulePart(kind="cosine", peak=STAGE1_PEAK, warmup=STAGE1_WARMUP, horizon=7262),)
        ),
        history=HistoryConfig(adam_count_at_start=1),
        ranks=32,
        train=TrainConfig(steps=7262, checkpoint_every=1000),
        published="",
        launch=LaunchConfig(target="gke", topology="v6e:2x4"),
    )


def olmo3_7b_stage1() -> Recipe:
    """Stage 1 of the 7B: 5.93T tokens, two-part schedule with its hand-over, filter off."""
    return _olmo3(
        name="olmo3_7b_stage1",
        description="OLMo 3 7B stage 1, 5.93T tokens of OLMo-mix-0625, two-part schedule, no filter",
        size="7B",
        mix="OLMo-mix-0625-official",
        batch=512,
        filtered=False,
        schedule=ScheduleConfig(
            parts=(
                SchedulePart(
                    kind="cosine",
                    peak=STAGE1_PEAK,
                    warmup=STAGE1_WARMUP,
                    horizon=STAGE1_HORIZON_5T,
                    until=STAGE1_HANDOVER,
                ),
                SchedulePart(
                    kind="half_cosine",
                    peak=STAGE1_PEAK,
                    warmup=STAGE1_PART2_WARMUP,
                    horizon=STAGE1_HORIZON_7T,
                ),
            )
        ),
        history=HistoryConfig(adam_count_at_start=1, cold_window_at=(STAGE1_HANDOVER,)),
        ranks=512,
        train=TrainConfig(
            steps=STAGE1_STEPS,
            landmarks=(10_000, 100_000, 300_000, 600_000, 1_000_000, STAGE1_STEPS),
            checkpoint_every=1000,
        ),
        published="allenai/Olmo-3-1025-7B@stage1-step{step}",
        launch=LaunchConfig(target="gke", topology="v5p:4x4x4"),
    )
