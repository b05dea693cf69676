"""Recipe sections of the judgement: the reference, parity, surfaces and bounds."""

from typing import Literal

from pydantic import Field, field_validator

from infra.section import Section
from model.config import HistoryConfig, LossConfig, ModelConfig, OptimizerConfig, ScheduleConfig

EIGHT_TASKS = (
    "arc_easy", "arc_challenge", "boolq", "hellaswag", "openbookqa", "piqa", "sciq", "winogrande",
)  # fmt: skip
# AI2's in-loop set of the official scripts, by the names of olmo-eval (sheet section 6.2).
FAST_TASKS = (
    "arc_challenge_test_bpb_5shot", "arc_challenge_test_mc_5shot_fast", "arc_easy_test_bpb_5shot", "arc_easy_test_mc_5shot_fast",
    "hellaswag_bpb_5shot", "mmlu_humanities_test_bpb_5shot", "mmlu_humanities_test_mc_5shot_fast", "mmlu_other_test_bpb_5shot",
    "mmlu_other_test_mc_5shot_fast", "mmlu_social_sciences_test_bpb_5shot", "mmlu_social_sciences_test_mc_5shot_fast",
    "mmlu_stem_test_bpb_5shot", "mmlu_stem_test_mc_5shot_fast", "basic_skills_arithmetic_rc_5shot", "basic_skills_coding_rc_5shot",
    "basic_skills_common_knowledge_rc_5shot", "basic_skills_logical_reasoning_rc_5shot", "basic_skills_pattern_rc_5shot",
    "basic_skills_string_operations_rc_5shot", "codex_humaneval_gold_bpb_3shot", "codex_mbpp_gold_bpb_3shot",
    "mt_mbpp_cpp_gold_bpb_3shot", "mt_mbpp_java_gold_bpb_3shot", "mt_mbpp_rust_gold_bpb_3shot", "minerva_math_500_gold_bpb_0shot",
    "copycolors_10way_fast",
)  # fmt: skip


class ReferenceConfig(Section):
    """What the reference trained, stated apart from what we train.

    `olmo_core_local` runs OLMo-core's own trainer on CPU on the same token files; `published` brings checkpoints that were
    made elsewhere, and `curve_csv` its log. The fields repeat the
    recipe's on purpose: an override of `model.rope_theta` changes our side only, and the report lists it.
    """

    kind: Literal["olmo_core_local", "published"] = "olmo_core_local"
    model: ModelConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    loss: LossConfig
    history: HistoryConfig
    threads: int = Field(2, ge=1)
    micro_batch_instances: int = Field(2, ge=1)
    published: str = Field(
        "",
        description="published: where its checkpoints are, with {step}: a directory, gs://, or NAME@REVISION",
    )
    published_init: str = Field(
        "", description="published: the same for step 0, in fp32 with all rows; empty: as `published`"
    )
    curve_csv: str = Field(
        "", description="W&B CSV export of the reference's curve, relative to the run directory"
    )
    curve_run: str = Field("", description="run to read in that export; empty: its only one")
    curve_smoothing: int = Field(
        0, ge=0, description="half width in steps; 0: a hundredth of the run, at least 5"
    )


class ParityConfig(Section):
    """Logit parity in fp32: same weights, two implementations."""

    prompts: int = Field(2, ge=1)
    prompt_tokens: int = Field(0, ge=0, description="0: the sequence length; must exceed the window")
    max_logit_difference: float = Field(2e-5, gt=0)
    max_kl: float = Field(1e-9, gt=0)
    max_ce_difference: float = Field(2e-5, gt=0, description="per training step in fp32, nat")
    max_ce_difference_mixed: float = Field(
        2e-3, gt=0, description="same weights and batch in bf16, nat: far below the spread between batches"
    )

    def ce_limit(self, numerics: str) -> float:
        """Allowed |difference| of the CE that the same weights give on the same batch, in a numerics mode."""
        return self.max_ce_difference if numerics == "fp32" else self.max_ce_difference_mixed


class BoundsConfig(Section):
    """Equivalence bounds of the verdict, per surface: the interval of the difference must lie inside."""

    heldout_loss: float = Field(0.01, gt=0, description="nat per prediction")
    domain_loss: float = Field(0.01, gt=0, description="nat per prediction, every domain")
    macro_accuracy: float = Field(0.005, gt=0)
    token_kl: float = Field(1.5e-3, gt=0, description="nat per prediction")
    alpha: float = Field(0.05, gt=0, lt=0.5)
    bootstrap: int = Field(2000, ge=200)
    seed: int = 0


class EvalConfig(Section):
    """The four surfaces."""

    heldout_documents: int = Field(32, ge=2, description="per domain")
    context: int = Field(0, ge=0, description="tokens; 0: the training sequence length")
    tasks: tuple[str, ...] = Field(EIGHT_TASKS, min_length=1)
    items_per_task: int = Field(100, ge=1)
    inloop_tasks: tuple[str, ...] = Field((), description="AI2's in-loop tasks by name; shown, never judged")
    inloop_items: int = Field(100, ge=1, description="documents per in-loop task")
    batch_tokens: int = Field(8192, ge=1)
    loss_domain: str = Field("", description="domain of the held-out loss; empty: all documents pooled")
    max_cut_share: float = Field(0.25, ge=0, le=1, description="share of a task's requests that may be cut")
    spot_items: int = Field(
        2, ge=0, description="items per task and documents per domain scored again by lm-eval; 0: unchecked"
    )
    torch_documents: int = Field(2, ge=0, description="documents per domain for the 2x2 in PyTorch; 0: none")
    bounds: BoundsConfig = BoundsConfig()

    @field_validator("tasks")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        from evals.tasks import known

        for name in names:
            known(name)
        if len(set(names)) < len(names):
            raise ValueError(f"evals.tasks names a task twice: {', '.join(names)}")
        return names
