"""The work of each stage: plain functions (recipe, run directory) -> files. No Prefect, no records here.

Heavy imports happen inside, so that a stage pays only for what it uses. The surprising thing: training never
happens in this process; `train` launches `python -m model.train` through XManager and only watches it.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from infra.artifacts import read_json, write_bytes_atomic, write_json_atomic
from infra.errors import LaunchError, ParityError, RecipeError
from infra.memory import allocator_environment
from infra.progress import Progress

if TYPE_CHECKING:
    import numpy as np

    from data.index import InstanceIndex
    from data.loader import StepSource
    from pipelines.recipe import Recipe

PREEMPTED = 75
SIDES = ("train", "heldout")
CURVE = "reference/curve.csv"


def tokenize(recipe: "Recipe", run: Path) -> None:
    """Documents -> corpus/ and tokens/{train,heldout}/."""
    from data.corpus import build_corpus, corpus_sources
    from data.token_audit import audit_tokens
    from data.tokenize_job import tokenize as run_job

    if recipe.corpus.kind == "tokens":
        lock_published(recipe, run)
        return
    described = build_corpus(recipe.corpus, run / "corpus")
    for side in SIDES:
        sources = corpus_sources(run / "corpus", described, side)
        run_job(
            sources,
            run / "tokens" / side,
            recipe.tokenizer,
            sequence_length=recipe.data.sequence_length,
            filter=recipe.data.filter if side == "train" else None,
            max_document_mb=recipe.corpus.max_document_mb,
            runner=recipe.launch.tokenize_runner,
            processes=recipe.launch.tokenize_processes,
            options=recipe.launch.tokenize_options,
        )
        audit_tokens(sources, run / "tokens" / side, recipe.tokenizer)
    if recipe.corpus.judged == "validation":
        from data.mixes import lock_mix

        name = recipe.corpus.heldout_manifest
        lock_mix(recipe.corpus, recipe.tokenizer, run / "tokens" / "validation", manifest=name)


def lock_published(recipe: "Recipe", run: Path) -> None:
    """tokens/{train,heldout}/manifest.json of published token files: every entry resolved, sampled digests taken."""
    from data.mixes import lock_mix

    write_json_atomic(run / "corpus" / "corpus.json", {"kind": "tokens", "manifest": recipe.corpus.manifest})
    manifests = {"train": recipe.corpus.manifest, "heldout": recipe.corpus.heldout_manifest}
    for side in SIDES:
        if not manifests[side]:
            raise RecipeError(
                "corpus.heldout_manifest is empty", "name the mix of held-out tokens, or of your own"
            )
        lock_mix(recipe.corpus, recipe.tokenizer, run / "tokens" / side, manifest=manifests[side])


def order(recipe: "Recipe", run: Path) -> None:
    """tokens/train/ -> order/: the global order of one epoch, and the receipts it implies at the landmarks."""
    from data.masks import write_mask
    from data.order import open_order, write_order
    from data.receipt import expected

    # Published token files are too many to read whole before a run; their sampled digests are checked.
    index = train_index(recipe, run, verify="sampled" if recipe.corpus.kind == "tokens" else "full")
    index.require(recipe.data.global_batch_instances, recipe.train.steps)
    write_order(
        run / "order",
        index.n_instances,
        seed=recipe.data.seed,
        epoch=recipe.data.epoch,
        chunk=recipe.data.chunk,
        index_digest=index.digest,
    )
    if index.mask is not None:
        write_mask(run / "order", index.mask, recipe.data.filter, index)
    steps = recipe.train.landmark_steps
    receipts = expected(index, open_order(run / "order"), recipe.data.global_batch_instances, steps[-1])
    write_json_atomic(run / "order" / "receipts.json", {str(s): receipts[s] for s in steps})


def init(recipe: "Recipe", run: Path) -> None:
    """init/hf/: step-0 weights drawn by the reference implementation, or those of a published reference."""
    from evals.reference.init_weights import write_init

    if recipe.reference.kind == "published":
        where = recipe.reference.published_init or recipe.reference.published
        bring_step(recipe, where, 0, run / "init" / "hf", to_start=True)
        return
    write_init(recipe.reference.model, run / "init" / "hf", context_length=recipe.data.sequence_length)


def gate(recipe: "Recipe", run: Path) -> None:
    """parity/step0.json: are the logits of the step-0 weights equal in both implementations? Drift by layer with it."""
    from evals.localise import localise
    from evals.parity import logit_parity
    from model.convert.hf import import_hf

    weights = run / "init" / "hf"
    params = import_hf(weights, recipe.model, same_architecture=False)
    prompts = parity_prompts(recipe, run)
    found = logit_parity(weights, params, recipe.model, prompts, recipe.parity)
    found["localise"] = localise(weights, params, recipe.model, prompts[0])
    if not found["ok"]:
        found["causes"] = found["localise"]["causes"]
    write_json_atomic(run / "parity" / "step0.json", found)


def reference(recipe: "Recipe", run: Path) -> None:
    """reference/: OLMo-core's own trainer on the same token files, or the landmarks of a published reference."""
    from evals.reference.runner import run_reference
    from evals.reference.spec import ReferenceSpec

    if recipe.reference.kind == "published":
        keep_curve(recipe, run)
        for step in recipe.train.landmark_steps:
            place = run / "reference" / "hf" / f"step{step}"
            bring_step(recipe, recipe.reference.published, step, place)
        return
    index = train_index(recipe, run, verify="full")
    spec = ReferenceSpec.from_sections(
        reference=recipe.reference,
        data=recipe.data,
        tokenizer=recipe.tokenizer,
        train=recipe.train,
        token_files=[shard.path for shard in index.shards],
        out=run / "reference",
    )
    run_reference(spec)


def train(recipe: "Recipe", run: Path) -> None:
    """checkpoints/ and train/: our run, as its own process through XManager's local executor."""
    from infra.launch.local import run_module

    if recipe.launch.target != "local":
        raise RecipeError(
            f"launch.target is {recipe.launch.target!r}, and this stage trains on this machine",
            "use `repro launch` for a slice, or set launch.target=local",
        )
    if not read_json(run / "parity" / "step0.json")["ok"]:
        raise ParityError(
            "the step-0 weights do not give equal logits in both implementations; training is not started",
            f"see {run / 'parity' / 'step0.json'}",
        )
    threads = str(recipe.launch.threads)
    code = run_module(
        "model.train",
        ["--run", str(run)],
        name="train",
        log_dir=run / "logs",
        state_dir=run / ".xmanager",
        env={"OMP_NUM_THREADS": threads, "JAX_PLATFORMS": "cpu", **allocator_environment()},
        accept=(0, PREEMPTED),
    )
    if code == PREEMPTED:
        raise LaunchError(
            "training was preempted; its state is saved", "run the same command again: it continues"
        )


def convert(recipe: "Recipe", run: Path) -> None:
    """hf/step<k>/: every landmark as HF safetensors, fp32, padding kept for parity."""
    from model.checkpoint import restore_params
    from model.convert.hf import export_hf

    progress = Progress("convert", len(recipe.train.landmark_steps), "landmarks")
    for done, step in enumerate(recipe.train.landmark_steps):
        params, model = restore_params(run / "checkpoints", step)
        export_hf(
            params,
            model,
            run / "hf" / f"step{step}",
            context_length=recipe.data.sequence_length,
            keep_padding=True,
            eos_id=recipe.tokenizer.eos_id,
            pad_id=recipe.tokenizer.pad_id,
        )
        progress.update(done + 1)


def parity(recipe: "Recipe", run: Path) -> None:
    """parity/step<k>.json: exports against our checkpoints; training.json: step by step; logged.json: weights against logs."""
    from evals.logged_loss import Side, measure, of_log
    from evals.parity import logit_parity, training_parity
    from model.checkpoint import read_meta, restore_params

    prompts = parity_prompts(recipe, run)
    steps = recipe.train.landmark_steps
    progress = Progress("parity", len(steps), "landmarks")
    for done, step in enumerate(steps):
        params, model = restore_params(run / "checkpoints", step)
        out = run / "parity" / f"step{step}.json"
        result = logit_parity(run / "hf" / f"step{step}", params, model, prompts, recipe.parity, out=out)
        progress.update(done + 1, f"max |dlogit| {result['max']:.1e}")
    ours = run / "train" / "metrics.jsonl"
    if recipe.reference.kind == "olmo_core_local":
        training_parity(
            run / "reference" / "metrics.jsonl",
            ours,
            recipe.parity,
            steps,
            windows={s: read_meta(run / "checkpoints", s).get("skip_window") for s in steps},
            window_size=recipe.reference.optimizer.skip_step.window + 1,
            cold=recipe.reference.history.cold_window_at,
            out=run / "parity" / "training.json",
        )
    theirs = recipe.reference
    sides = {
        "reference": Side(run / "reference" / "hf", theirs.model, theirs.loss, reference_log(recipe, run)),
        "reproduced": Side(run / "hf", recipe.model, recipe.loss, of_log(ours)),
    }
    limit = recipe.parity.ce_limit(recipe.numerics.mode)
    rows = recipe.train.micro_batch_instances
    found = measure(sides, train_steps(recipe, run), steps, recipe.numerics, limit, rows)
    write_json_atomic(run / "parity" / "logged.json", found)


def evaluate(recipe: "Recipe", run: Path) -> None:
    """evals/step<k>/: four surfaces for both sides at every landmark."""
    from evals.evaluate import evaluate_run

    evaluate_run(run, cache=run / ".cache" / "evals")


def report(recipe: "Recipe", run: Path) -> None:
    """report/: verdict.json, index.html, report.md, report.json from whatever stands."""
    from evals.report.build import build

    build(run)


def parity_prompts(recipe: "Recipe", run: Path) -> "np.ndarray":
    """Held-out tokens as parity prompts: int32[prompts, prompt_tokens]."""
    from data.index import InstanceIndex
    from evals.parity import pick_prompts

    heldout = InstanceIndex.from_manifest(
        run / "tokens" / "heldout", recipe.data.sequence_length, tokenizer=recipe.tokenizer
    )
    return pick_prompts(heldout, recipe.parity, recipe.data.sequence_length)


def train_index(recipe: "Recipe", run: Path, verify: str = "sampled") -> "InstanceIndex":
    """The index of the run's training tokens, with its repetition mask if the filter is on."""
    from data.index import InstanceIndex

    return InstanceIndex.from_manifest(
        run / "tokens" / "train",
        recipe.data.sequence_length,
        chunk=recipe.data.chunk,
        tokenizer=recipe.tokenizer,
        filter=recipe.data.filter,
        verify=verify,
    )


def train_steps(recipe: "Recipe", run: Path) -> "StepSource":
    """The batches of the run by step, as its trainer reads them: element k is the batch of step k + 1."""
    from data.index import InstanceIndex
    from data.loader import StepSource
    from data.masks import open_mask
    from data.order import open_order

    data = recipe.data
    index = InstanceIndex.from_manifest(
        run / "tokens" / "train", data.sequence_length, data.chunk, verify="sampled"
    )
    if data.filter.enabled:
        index.set_mask(open_mask(run / "order", index, data.filter))
    return StepSource(index, open_order(run / "order"), data.global_batch_instances)


def bring_step(recipe: "Recipe", pattern: str, step: int, out: Path, *, to_start: bool = False) -> None:
    """One checkpoint of a published reference as an HF directory."""
    from evals.reference.published import bring

    if (out / "config.json").is_file():
        return  # it came whole before an interruption
    tokens = recipe.tokenizer
    bring(
        pattern, step, out, recipe.reference.model, context_length=recipe.data.sequence_length,
        eos_id=tokens.eos_id, pad_id=tokens.pad_id, to_start=to_start,
    )  # fmt: skip


def keep_curve(recipe: "Recipe", run: Path) -> None:
    """reference/curve.csv: the published curve, whose content belongs to the run from here on. Read before anything is fetched."""
    if not recipe.reference.curve_csv:
        return
    path = run / recipe.reference.curve_csv  # an absolute path stays one
    if not path.is_file():
        raise RecipeError(
            f"reference.curve_csv: there is no file {path}", "give the W&B export of the reference's run"
        )
    write_bytes_atomic(run / CURVE, path.read_bytes())
    reference_log(recipe, run)


def reference_log(recipe: "Recipe", run: Path) -> dict[int, float]:
    """{step: CE in nat} as the reference logged it: of our own run of it, or of its published curve (perhaps nothing)."""
    from evals.logged_curve import read_wandb
    from evals.logged_loss import of_curve, of_log

    if recipe.reference.kind == "olmo_core_local":
        return of_log(run / "reference" / "metrics.jsonl")
    if not recipe.reference.curve_csv:
        return {}
    named, tokens = recipe.reference.curve_run, recipe.data.global_batch_tokens
    return of_curve(read_wandb(run / CURVE, run_name=named, tokens_per_step=tokens))
