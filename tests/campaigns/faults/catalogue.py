"""Every fault of the campaign. The list is the product: read it as a table.

A fault sits on our side only; the reference's artifacts are those of the control. It is either a recipe override (`sets`) or one
function of ours replaced for the duration (`patch`: "module:name" or "module:Class.name", and what makes the new one from the
real one). `redo` is the first stage made again. Only faults of `tokenize` reach the reference too, since both sides train on
the same token files: the reference is then trained again, unpatched.

`traps` are ids of the recipe sheet, section 8 (docs/traps.md); empty: a mistake that users reported and the sheet does not
list. `alike` says why the outcome is the same with the fault: only a check
that compares bits can see such a fault (`unit_test` where it stands in no run, but in the test suite), and its effect on the
outcome is measured and shown.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from faults import inject as do
from faults import inject_training as training


@dataclass(frozen=True)
class Fault:
    """One mistake a plausible re-implementation makes."""

    name: str
    section: str  # data, model, loss, optimizer, conversion, evaluation
    traps: tuple[str, ...]
    words: str
    redo: str  # first stage that is made again
    sets: tuple[str, ...] = ()  # recipe overrides of our side
    patch: tuple[str, Callable[[Any], Any]] | None = None
    during: str = ""  # the one stage in which the patch is on; empty: in all of them
    interrupted: bool = False  # training is stopped once and goes on
    alike: str = ""
    unit_test: str = ""  # file::test, run with the fault on


DATA = (
    Fault("epoch_from_zero", "data", ("D1",), "epochs count from 0, so the shuffle takes another seed", "order",
          patch=("data.shuffle:shuffled_blocks", do.seed_less_one)),
    Fault("other_generator", "data", ("D1", "M1"), "the order comes from RandomState, not PCG64", "order",
          patch=("data.shuffle:shuffled_blocks", do.random_state)),
    Fault("double_sharding", "data", ("D2",), "a host's rows are sharded a second time: half of the data is read twice", "train",
          patch=("data.loader:StepSource.ids", do.double_sharding)),
    Fault("contiguous_split", "data", ("D2", "M2"), "each of two hosts takes one contiguous half of the shuffled list", "train",
          patch=("data.loader:StepSource.ids", do.contiguous_split)),
    Fault("rows_permuted", "data", ("D2",), "the rows of every batch in reverse order", "train",
          patch=("data.loader:StepSource.ids", do.rows_reversed),
          alike="the mean over a batch does not depend on the order of its rows"),
    Fault("sorted_manifest", "data", ("D5",), "token files in sorted order, not in manifest order", "order",
          patch=("data.index:read_manifest", do.sorted_shards)),
    Fault("files_concatenated", "data", ("D4",), "all files are joined before they are cut into instances", "order",
          patch=("data.index:InstanceIndex.from_manifest", do.concatenated)),
    Fault("header_skipped", "data", ("D3",), "128 bytes of a NumPy header that is not there are skipped", "train",
          patch=("data.index:open_tokens", do.header_skipped)),
    Fault("instances_dropped", "data", ("L4",), "instances the filter rejects are dropped, not masked", "train",
          patch=("data.loader:StepSource.ids", do.drop_masked)),
    Fault("filter_not_as_reference", "data", ("L5", "M3"), "the repetition filter is set otherwise than the reference's", "train",
          patch=("data.index:InstanceIndex.instance_mask", do.filter_off)),
    Fault("documents_masked", "data", ("D6",), "attention stops at document ends, as in stage 3 only", "train",
          patch=("model.step:gradients", do.document_mask)),
    Fault("batch_repeated_on_resume", "data", ("D7",), "after a restart the last batch is read again", "train",
          patch=("data.loader:batches", do.resume_shifted(+1)), interrupted=True),
    Fault("batch_lost_on_resume", "data", ("D7",), "after a restart one batch is skipped", "train",
          patch=("data.loader:batches", do.resume_shifted(-1)), interrupted=True),
    Fault("eos_missing", "data", (), "no EOS is written between documents", "tokenize",
          patch=("data.shard_writer:encode_documents", do.without_eos)),
    Fault("other_tokenizer", "data", (), "the tokens are those of another tokenizer (it lower-cases)", "tokenize",
          patch=("data.tokenizer:Tokenizer.encode_flat", do.lower_case)),
    Fault("heldout_trained_on", "data", ("M15",), "held-out documents are in the training set too", "tokenize",
          patch=("data.corpus:_Domain.add", do.heldout_also_trained)),
)  # fmt: skip

MODEL = (
    Fault("window_one_more", "model", ("A1", "M14"), "a query sees one key more than the window", "gate",
          sets=("model.window=33",)),
    Fault("window_one_less", "model", ("A1",), "a query sees one key less than the window", "gate",
          sets=("model.window=31",)),
    Fault("full_layer_first", "model", ("A2",), "layer i is full at i%4==0, not at i%4==3", "gate",
          sets=('model.layer_pattern=["full","sliding","sliding","sliding"]', "model.last_layer_full=false")),
    Fault("last_layer_sliding", "model", ("A2", "M16"), "the last layer slides like the others", "gate",
          sets=('model.layer_pattern=["sliding","sliding","sliding","sliding"]', "model.last_layer_full=false")),
    Fault("qk_norm_per_head", "model", ("A3",), "q and k are normalised head by head", "gate",
          patch=("model.olmo3:attention_branch", training.per_head_norm)),
    Fault("pre_norm", "model", ("A4",), "the norm stands before each branch, not behind it", "gate",
          patch=("model.olmo3:layer", training.pre_norm)),
    Fault("double_norm", "model", ("A4",), "the attention input is normalised as well as its output", "gate",
          patch=("model.olmo3:attention_branch", training.input_normed)),
    Fault("norm_eps", "model", ("A5",), "epsilon 1e-5 (the class default of the export), not 1e-6", "gate",
          sets=("model.norm_eps=1e-5",)),
    Fault("gain_after_cast", "model", ("A5", "M10"), "RMSNorm rounds to bf16 before it multiplies the gain", "gate",
          patch=("model.olmo3:rms_norm", training.cast_before_gain)),
    Fault("rope_interleaved", "model", ("A6",), "RoPE pairs (2j, 2j+1), not (j, j+K/2)", "gate",
          patch=("model.olmo3:rotate", training.interleaved)),
    Fault("rope_theta", "model", ("A6",), "theta 10,000, not 500,000", "gate", sets=("model.rope_theta=10000",)),
    Fault("rope_tables_bf16", "model", ("A6", "M11"), "sin and cos are rounded to bf16", "gate",
          patch=("model.rope:tables", training.bf16_tables)),
    Fault("yarn_everywhere", "model", ("A7", "M9"), "YaRN on the sliding layers too", "gate",
          patch=("model.rope:layer_scaling", training.yarn_on_all)),
    Fault("yarn_factor_once", "model", ("A7",), "the attention factor acts once, not on q and on k", "gate",
          patch=("model.rope:attention_factor", training.square_root)),
    Fault("own_init", "model", ("A8",), "training starts from our own draw, not from the reference's weights", "train",
          patch=("model.convert.hf:import_hf", training.own_weights), during="train"),
    Fault("start_rounded", "model", ("A10",), "training starts from weights that went through bf16", "train",
          patch=("model.convert.hf:import_hf", training.rounded_weights), during="train"),
)  # fmt: skip

LOSS = (
    Fault("denominator_all_positions", "loss", ("L1",), "the loss is divided by B*S, the unlabelled positions included", "train",
          patch=("model.step:token_weights", training.over_all_positions)),
    Fault("masked_leave_denominator", "loss", ("L1", "M5"), "masked instances leave the denominator", "train",
          patch=("model.step:token_weights", training.over_counted)),
    Fault("last_label_wrapped", "loss", ("L2",), "the last position is asked for the first token of its row", "train",
          patch=("model.step:token_weights", training.wrapped_label)),
    Fault("z_loss_ten_times", "loss", ("L3",), "z-loss multiplier 1e-4 (a common default), not 1e-5", "train",
          sets=("loss.z_loss_multiplier=1e-4",)),
    Fault("z_loss_left_out", "loss", ("L3",), "no z-loss", "train", sets=("loss.z_loss_multiplier=0",)),
    Fault("softmax_over_exported_rows", "loss", ("A9", "M12"), "softmax over 100,278 classes, not 100,352", "train",
          patch=("model.loss:head_loss", training.exported_rows_only)),
)  # fmt: skip

OPTIMIZER = (
    Fault("first_rate_zero", "optimizer", ("O1", "M7"), "the rate of step s is that of step s-1, so the first is 0", "train",
          patch=("model.schedule:part_rate", training.one_step_late)),
    Fault("single_cosine", "optimizer", ("O1", "M8"), "one cosine over the whole run, no hand-over", "train",
          sets=('schedule.parts=[{"kind":"cosine","peak":3e-3,"warmup":4,"horizon":24}]',)),
    Fault("rate_frozen_on_skip", "optimizer", ("O2", "M7"), "the schedule counts the optimizer's own steps", "train",
          patch=("model.skip_step:apply", training.rate_by_count)),
    Fault("count_advances_on_skip", "optimizer", ("O3",), "Adam's counter moves on when a step is skipped", "train",
          patch=("model.skip_step:apply", training.count_always)),
    Fault("adam_count_from_zero", "optimizer", ("O11",), "Adam's counter starts at 0; the reference's step-0 checkpoint left 1", "train",
          sets=("history.adam_count_at_start=0",)),
    Fault("skip_std_biased", "optimizer", ("O4",), "the skip rule's deviation divides by n, not n-1", "train",
          patch=("model.skip_step:_within", training.biased_std)),
    Fault("skip_includes_latest", "optimizer", ("O4",), "the newest value is part of its own history", "train",
          patch=("model.skip_step:_within", training.latest_included)),
    Fault("skip_on_total_loss", "optimizer", ("O4", "M6"), "the skip rule sees CE plus z-loss", "train",
          patch=("model.step:train_step", training.skip_on_total)),
    Fault("skip_on_clipped_norm", "optimizer", ("O4", "M6"), "the skip rule sees the norm after clipping", "train",
          patch=("model.skip_step:decide", training.clipped_norm)),
    Fault("skip_window_kept", "optimizer", ("O5", "M7b"), "the skip window survives a restart at which the reference lost it", "train",
          sets=("history.cold_window_at=[]",)),
    Fault("skip_window_lost_on_resume", "optimizer", ("O5",), "a restart of ours forgets the skip window", "train",
          patch=("model.checkpoint:restore", training.forget_window), interrupted=True),
    Fault("decay_on_embeddings", "optimizer", ("O7",), "weight decay on the embeddings too", "train",
          patch=("model.layout:NO_DECAY", lambda real: ())),
    Fault("no_decay_on_norms", "optimizer", ("O7",), "no weight decay on the norm gains", "train",
          patch=("model.skip_step:_name", training.norms_as_embeddings)),
    Fault("eps_inside_root", "optimizer", ("O8",), "Adam's epsilon stands inside the square root", "train",
          patch=("model.skip_step:apply", training.eps_inside)),
    Fault("decay_in_gradient", "optimizer", ("O8",), "weight decay is added to the gradient", "train",
          patch=("model.skip_step:apply", training.coupled_decay)),
    Fault("beta2_default", "optimizer", (), "betas (0.9, 0.999), the library's default", "train",
          sets=("optimizer.betas=[0.9,0.999]",)),
    Fault("no_clipping", "optimizer", (), "gradients are not clipped", "train", sets=("optimizer.max_grad_norm=1e9",)),
    Fault("clip_without_1e-6", "optimizer", ("O9", "M13"), "the clip divides by the norm without adding 1e-6", "train",
          patch=("model.skip_step:global_norm", training.less_1e_6),
          alike="one part in a million of a clipped gradient, and Adam does not see the gradient's scale",
          unit_test="tests/model/test_skip_step.py::test_clip_adds_1e_6"),
    Fault("moments_bf16", "optimizer", (), "Adam's moments are kept in bf16", "train",
          sets=("optimizer.moments_dtype=bfloat16",)),
)  # fmt: skip

CONVERSION = (
    Fault("qk_gains_swapped", "conversion", (), "q_norm and k_norm trade places on export", "convert",
          patch=("model.convert.names:LAYER", do.trade("q_norm", "k_norm")), during="convert"),
    Fault("gate_up_swapped", "conversion", (), "gate_proj and up_proj trade places, on import and export alike", "gate",
          patch=("model.convert.names:LAYER", do.trade("w1", "w3"))),
    Fault("layers_exchanged", "conversion", (), "layers 1 and 2 trade places on export", "convert",
          patch=("model.layout:layer_place", do.exchange_layers), during="convert"),
    Fault("padding_rows_zeroed", "conversion", ("A9", "A10"), "the 74 rows beyond the tokenizer are trimmed, then filled with zeros", "convert",
          patch=("model.convert.hf:_rows", do.zero_padding), during="convert"),
    Fault("rows_off_by_one", "conversion", (), "vocabulary rows are cut one too early", "convert",
          patch=("model.convert.hf:_rows", do.rows_shifted), during="convert"),
    Fault("export_rounded", "conversion", ("A10",), "weights are rounded to bf16 on the way, and called fp32", "convert",
          patch=("model.convert.hf:_rows", do.rounded_rows), during="convert"),
    Fault("stale_landmark_exported", "conversion", (), "the export of the last landmark holds the weights of the first", "convert",
          patch=("model.checkpoint:restore_params", do.first_landmark), during="convert"),
    Fault("stale_state_saved", "conversion", (), "every checkpoint holds the state of the save before it", "train",
          sets=("train.checkpoint_every=6",), patch=("model.checkpoint:Saver.save", do.late_save())),
    Fault("stale_weights_saved", "conversion", (), "every checkpoint holds the weights of the save before it, all else is right", "train",
          sets=("train.checkpoint_every=6",), patch=("model.checkpoint:Saver.save", do.late_save("params"))),
)  # fmt: skip

EVALUATION = (
    Fault("bos_added", "evaluation", (), "a BOS is put in front of every prompt, on both sides", "evaluate",
          patch=("evals.text:TextTokenizer.encode", do.with_bos)),
    Fault("boundary_off_by_one", "evaluation", (), "the first token of every answer is not scored, on both sides", "evaluate",
          patch=("evals.lm_eval_model:JaxLM.request_of", do.one_token_late)),
    Fault("mean_over_tokens", "evaluation", ("E1",), "loss is divided by L tokens, not by L-1 predictions, on both sides", "evaluate",
          patch=("evals.heldout:Document.predictions", lambda real: property(lambda d: len(d.tokens)))),
    Fault("padding_scored", "evaluation", (), "held-out documents are padded, and the padding is scored, on both sides", "evaluate",
          patch=("evals.evaluate:read_documents", do.padded_documents)),
    Fault("scored_in_bf16", "evaluation", ("E2",), "logits are rounded to bf16 before they are scored, on both sides", "evaluate",
          patch=("evals.scoring:block_logits", do.low_logits)),
    Fault("wrong_landmark", "evaluation", (), "our first landmark is judged in place of the last", "evaluate",
          patch=("evals.evaluate:find_weights", do.wrong_landmark)),
    Fault("compared_with_itself", "evaluation", (), "the reference's weights are judged as ours", "evaluate",
          patch=("evals.evaluate:find_weights", do.reference_twice)),
)  # fmt: skip

FAULTS = (*DATA, *MODEL, *LOSS, *OPTIMIZER, *CONVERSION, *EVALUATION)
BY_NAME = {f.name: f for f in FAULTS}
SECTIONS = ("data", "model", "loss", "optimizer", "conversion", "evaluation")

# The verdict expected of each fault: INCONCLUSIVE for these, by the reason; FAITHFUL for BITS_FAITHFUL; NOT FAITHFUL for all others.
INCONCLUSIVE = {
    "tokens both sides share are wrong: the comparison is fair, but not with what was meant": (
        "eos_missing",
        "other_tokenizer",
        "heldout_trained_on",
    ),
    "training differs step by step, the surfaces of so short a run do not leave their bounds": (
        "documents_masked",
        "start_rounded",
        "denominator_all_positions",
        "last_label_wrapped",
        "z_loss_ten_times",
        "z_loss_left_out",
        "softmax_over_exported_rows",
        "rate_frozen_on_skip",
        "count_advances_on_skip",
        "decay_on_embeddings",
        "no_decay_on_norms",
        "no_clipping",
        "moments_bf16",
    ),
    "the rule's inputs or decisions differ, the weights hardly do": (
        "skip_std_biased",
        "skip_on_total_loss",
        "skip_on_clipped_norm",
    ),
    "training stops: there are no later landmarks to judge": (
        "stale_state_saved",
    ),
    "the ruler is wrong on both sides: nothing is measured": (
        "bos_added",
        "boundary_off_by_one",
        "mean_over_tokens",
        "padding_scored",
        "scored_in_bf16",
        "compared_with_itself",
    ),
}  # fmt: skip
BITS_FAITHFUL = ("clip_without_1e-6",)


def expected(name: str) -> str:
    """The verdict that a fault must get."""
    if name in BITS_FAITHFUL:
        return "FAITHFUL"
    return "INCONCLUSIVE" if any(name in names for names in INCONCLUSIVE.values()) else "NOT FAITHFUL"


# Traps of the sheet that no fault of the campaign stands for, and why. Each has its test in docs/traps.md.
NOT_INJECTED = {
    "O6": "a NaN ends the reference run: there is nothing to compare with afterwards",
    "O10": "the chain of the campaign does not go from one training stage to the next",
    "D9": "packed instances are for stage 3, which the chain of the campaign does not train",
    "D10": "packed instances are for stage 3, which the chain of the campaign does not train",
    "D8": "packed instances are for stage 3, which the chain of the campaign does not train",
    "E3": "two names of one number: nothing can differ",
    "S1": "concerns the long-context stage, which is not trained here",
    "S2": "an open question about the published seed; either value is a recipe field",
    "S3": "32B from stage 1 to 3 without stage 2: the chain of the campaign does not go from one stage to the next",
    "S4": "an open question about the published seed; either value is a recipe field",
    "M4": "a fault of another filter; ours is compared with OLMo-core's on every instance",
}
