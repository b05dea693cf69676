"""The published runs as recipes. Every number is from AI2's scripts and checkpoint lists.

Source: `allenai/OLMo-core` @ fa6c5014c, `src/scripts/train/OLMo3/` (internal scripts win over the cleaned-up
official copies, and the published checkpoint list wins over both).
"""

from data.config import CorpusConfig, DataConfig, FilterConfig, TokenizerConfig
from evals.config import FAST_TASKS, EvalConfig, ParityConfig, ReferenceConfig
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
ALL = 1_000_000  # documents of a validation set or an in-loop task: as AI2 evaluates, no sample
STAGE1_PEAK = 3e-4
STAGE1_WARMUP = 2000
# ceil(5e12 / 2**22) and ceil(7e12 / 2**22): the horizons of the two parts, in steps of 4,194,304 tokens.
STAGE1_HORIZON_5T = 1_192_093
STAGE1_HORIZON_7T = 1_668_931
# Part 2 loads the checkpoint of this step; its own warmup ends 999 steps later, at 1192092 // 2 + 1000.
STAGE1_HANDOVER = 596_047
STAGE1_PART2_WARMUP = 597_046
STAGE1_STEPS = 1_413_814
# 32B: one epoch, T = floor(instances / 1024). The count of instances is not published; about 724.0 million is inferred
# from a third party, so this horizon is too. Midtraining starts from step 656,000: stage 1 was cut before its end.
STAGE1_32B_HORIZON = 707_039
STAGE1_32B_STEPS = 656_000
# Micro-batch and shard degree are in the script, the number of GPUs is not: 1024 ranks, the most a batch of 1024
# instances allows, is our reading. It matters only for batches with filtered instances.
STAGE1_32B_RANKS = 1024


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
        evals=EvalConfig(
            heldout_documents=ALL,
            loss_domain="c4_en-validation",
            items_per_task=10_000,
            inloop_tasks=FAST_TASKS,
            inloop_items=ALL,
            context=8192,
            batch_tokens=65_536,
        ),
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


def olmo3_32b_stage1() -> Recipe:
    """Stage 1 of the 32B: 5.50T tokens, grouped keys and values, one cosine over an epoch, filter on."""
    return _olmo3(
        name="olmo3_32b_stage1",
        description="OLMo 3 32B stage 1, 5.50T tokens of OLMo-mix-0925, single cosine, repetition filter on",
        size="32B",
        mix="OLMo-mix-0925-official",
        batch=1024,
        filtered=True,
        schedule=ScheduleConfig(
            parts=(SchedulePart(kind="cosine", peak=6e-4, warmup=STAGE1_WARMUP, horizon=STAGE1_32B_HORIZON),)
        ),
        history=HistoryConfig(adam_count_at_start=1),
        ranks=STAGE1_32B_RANKS,
        train=TrainConfig(
            steps=STAGE1_32B_STEPS,
            landmarks=(10_000, 100_000, 250_000, 400_000, 550_000, STAGE1_32B_STEPS),
            checkpoint_every=1000,
        ),
        published="allenai/Olmo-3-1125-32B@stage1-step{step}",
        launch=LaunchConfig(target="gke", topology="v5p:8x8x8"),
    )
