"""AI2's validation mixes as the held-out set: the same documents and the same figures as OLMo-core's own LM evaluator."""

import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from data.config import CorpusConfig, TokenizerConfig
from data.mixes import lock_mix, read_mix
from evals.heldout import evaluate, read_documents, summary
from infra.errors import DataError, IdentityError, RecipeError

S, EOS, PAD = 24, 36, 35
LABELS = {"a.npy": "c4_en-validation", "b.npy": "pile-validation", "c.npy": "pile-validation"}


@pytest.fixture
def mix(tmp_path):
    """Three token files with documents of 1 token, of exactly S, of S + 1 and longer, and tails without EOS."""
    rng = np.random.default_rng(4)
    for k, name in enumerate(LABELS):
        documents = [
            np.append(rng.integers(0, 35, n - 1), EOS) for n in (1, 2, 7, S, S + 1, 60, 1, 13, 5 + k)
        ]
        if k != 1:
            documents.append(rng.integers(0, 35, 9))
        np.concatenate(documents).astype("<u4").tofile(tmp_path / name)
    (tmp_path / "mix.txt").write_text("".join(f"{label},{name}\n" for name, label in LABELS.items()))
    return tmp_path


def locked(mix):
    cfg = CorpusConfig(base_dir=str(mix), heldout_manifest=str(mix / "mix.txt"))
    assert cfg.judged == "validation"
    lock_mix(cfg, TokenizerConfig(), mix / "validation", manifest=cfg.heldout_manifest)
    return mix / "validation"


def read(folder, **options):
    defaults = {"context": S, "per_domain": 10_000, "eos_id": EOS, "byte_lengths": np.arange(37)}
    return read_documents(folder, **(defaults | options))


OLMO_CORE = """
import json, sys
import numpy as np
import torch
from olmo_core.data import DataCollator, NumpyPaddedFSLDatasetConfig, TokenizerConfig
from olmo_core.data.numpy_dataset import NumpyDatasetDType
from olmo_core.data.utils import get_labels
from olmo_core.eval.lm_evaluator import LMEvaluator

folder, labels, S, eos, pad = json.loads(sys.argv[1])
dataset = NumpyPaddedFSLDatasetConfig(
    tokenizer=TokenizerConfig(vocab_size=37, eos_token_id=eos, pad_token_id=pad),
    paths=[f"{folder}/{n}" for n in labels], metadata=[{"label": v} for v in labels.values()],
    sequence_length=S, dtype=NumpyDatasetDType.uint32, work_dir=f"{folder}/work",
).build()
evaluator = LMEvaluator.from_numpy_dataset(
    dataset, name="lm", global_batch_size=S, collator=DataCollator(pad_token_id=pad, vocab_size=37),
    device=torch.device("cpu"),
)
logits, seen = torch.from_numpy(np.load(f"{folder}/table.npy")), 0
for batch in evaluator:
    wanted = get_labels(batch)
    ce = torch.nn.functional.cross_entropy(
        logits[batch["input_ids"]].reshape(-1, 37), wanted.reshape(-1), reduction="none", ignore_index=-100
    )
    evaluator.update_metrics(batch, ce.view(wanted.shape), None)
    seen += len(wanted)
print(json.dumps([{k: float(v) for k, v in evaluator.compute_metrics().items()}, seen]))
"""


def olmo_cores_figures(mix, table):
    """CE and perplexity by label of OLMo-core's LMEvaluator over its padded dataset, one instance a batch (none dropped).

    In a process of its own: OLMo-core forks to find the documents, and JAX has threads here.
    """
    pytest.importorskip("olmo_core")
    np.save(mix / "table.npy", table)
    arguments = json.dumps([str(mix), LABELS, S, EOS, PAD])
    run = subprocess.run(
        [sys.executable, "-c", OLMO_CORE, arguments], capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_figures_equal_olmo_cores_own_lm_evaluator(mix, bigram):
    make, table = bigram
    theirs, instances = olmo_cores_figures(mix, table)
    heldout = read(locked(mix))
    found = summary(heldout, evaluate(make(context=S), jnp.asarray(table), heldout))
    # Two documents of one token in each file: they predict nothing and count in OLMo-core's denominator.
    assert heldout.singles == {"c4_en-validation": 2, "pile-validation": 4}
    assert instances == len(heldout.documents) + 6
    assert found["rules"]["documents"] == str(mix / "mix.txt")
    for label in set(LABELS.values()):
        ours = found["domains"][label]
        assert ours["reference"] == pytest.approx(theirs[f"{label}/CE loss"], rel=2e-6), label
        assert np.exp(ours["reference"]) == pytest.approx(theirs[f"{label}/PPL"], rel=1e-5), label
        assert ours["per_prediction"] > ours["reference"] * 1.02  # the two definitions are told apart here
    total = sum(theirs[f"{n}/CE loss"] * found["domains"][n]["tokens"] for n in set(LABELS.values()))
    assert found["pooled"]["reference"] == pytest.approx(total / found["pooled"]["tokens"], rel=2e-6)


def test_a_sample_does_not_count_documents_it_does_not_judge(mix):
    few = read(locked(mix), per_domain=3)
    assert (
        few.singles == {}
        and few.left_out["without_a_prediction"] == 6
        and few.left_out["beyond_the_limit"] == 15
    )
    assert few.digest != read(mix / "validation").digest


def test_changed_or_foreign_tokens_are_refused(mix):
    folder = locked(mix)
    with pytest.raises(DataError, match=r"a.npy holds the token id 36, the model has 30 rows"):
        read(folder, byte_lengths=np.arange(30))
    tokens = np.fromfile(mix / "b.npy", "<u4")
    tokens[3] = (tokens[3] + 1) % 35
    tokens.tofile(mix / "b.npy")
    with pytest.raises(IdentityError, match=r"b.npy has the digest"):
        read(folder)
    (mix / "b.npy").unlink()
    with pytest.raises(DataError, match=r"b.npy does not exist"):
        read(folder)


def test_remote_files_give_the_same_documents(mix):
    """The same files behind an address, with and without their boundaries file."""
    import gzip

    import fsspec

    here = read(locked(mix))
    memory = fsspec.filesystem("memory")
    for name in LABELS:
        memory.pipe(f"/mix/{name}", (mix / name).read_bytes())
    tokens = np.fromfile(mix / "a.npy", "<u4")
    ends = (np.flatnonzero(tokens == EOS) + 1).tolist()
    lines = "".join(f"{a},{b},,f,{k}\n" for k, (a, b) in enumerate(zip([0, *ends], ends)))
    memory.pipe("/mix/a.csv.gz", gzip.compress(lines.encode()))
    manifest = json.loads((mix / "validation/manifest.json").read_text()) | {"base_dir": "memory://mix"}
    (mix / "remote").mkdir()
    (mix / "remote/manifest.json").write_text(json.dumps(manifest))
    there = read(mix / "remote")
    assert there.digest == here.digest and there.singles == here.singles


def test_a_recipe_chooses_its_mix_by_one_field(tmp_path):
    from evals.evaluate import EvaluateSpec
    from pipelines.recipe import load_recipe

    plain = EvaluateSpec.from_recipe(load_recipe("tiny").model_dump(mode="json"))
    assert plain.heldout == "heldout"
    fields = ["corpus.heldout_manifest=c4-ppl-validation", "corpus.base_dir=https://olmo-data.org"]
    mixed = load_recipe("tiny", fields)
    assert EvaluateSpec.from_recipe(mixed.model_dump(mode="json")).heldout == "validation"
    with pytest.raises(RecipeError, match=r"needs corpus\.base_dir"):
        load_recipe("tiny", fields[:1])


def test_the_recipes_judge_on_ai2s_sets_and_tasks():
    """v3-small with its eleven labels, C4 as the held-out loss, and the 26 tasks of OLMo-core's own list."""
    from evals.inloop import FAST_TASKS
    from pipelines.recipe import load_recipe

    groups = pytest.importorskip("olmo_core.eval.task_groups")
    for name in ("olmo3_190m", "olmo3_7b_stage1", "olmo3_32b_stage1"):
        recipe = load_recipe(name)
        labels = [e.label for e in read_mix(recipe.corpus.heldout_manifest, recipe.tokenizer)]
        assert recipe.corpus.judged == "heldout" and len(labels) == 11
        assert recipe.evals.loss_domain in labels and recipe.evals.loss_domain.startswith("c4_en")
        (c4,) = read_mix("c4-ppl-validation", recipe.tokenizer)
        assert (c4.label, c4.path) in [
            (e.label, e.path) for e in read_mix(recipe.corpus.heldout_manifest, recipe.tokenizer)
        ]
        assert set(recipe.evals.inloop_tasks) == set(groups.FAST_TASKS) == set(FAST_TASKS)
