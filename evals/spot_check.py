"""A few of our scores made again by code that is not ours: lm-eval's own HF model, and transformers' own loss.

    found = measure(sides, results, suite, tokens_dir, tokenizer, context=256, items=2)

Both sides of a comparison are scored by one program of ours, so a mistake in it (a BOS in front, a continuation cut one
token early, padding that is scored) falls on both alike and cancels in every paired difference. Here the first items of each
task and the first documents of each domain are scored again from the HF exports, with the tokenizer's own JSON, by lm-eval and
transformers. The surprising thing: held-out documents are cut from the token file here a second time, on purpose.
"""

import csv
import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.config import TokenizerConfig
from infra.artifacts import read_json
from infra.errors import IdentityError

# fp32 sums of two implementations: rounding of single logits, and of a sum of some hundred nat.
ITEM_ABSOLUTE, ITEM_RELATIVE = 1e-4, 1e-6
PER_PREDICTION = 2e-5

Result = Mapping[str, Any]


def measure(
    sides: Mapping[str, Path],
    results: Mapping[str, Mapping[str, Result]],
    suite: Any,
    tokens_dir: Path,
    tokenizer: TokenizerConfig,
    *,
    context: int,
    items: int,
) -> dict[str, Any]:
    """Compare our scores with theirs. `sides`: {side: HF directory}; `results`: {side: {"heldout", "downstream"}}.

    Returns {"ok", "failures", "sides": {side: figures}}; never raises for a mere difference.
    """
    out: dict[str, Any] = {}
    failures: list[str] = []
    for side, directory in sides.items():
        model = load_model(directory)
        out[side] = {
            "downstream": items_again(model, results[side]["downstream"], suite, tokenizer, context, items),
            "heldout": documents_again(
                model, results[side]["heldout"], tokens_dir, tokenizer, context, items
            ),
        }
        failures += [f"{side}: {text}" for part in out[side].values() for text in part["failures"]]
    return {"ok": bool(out) and not failures, "failures": failures, "sides": out}


def load_model(directory: Path) -> Any:
    """transformers' causal model of an HF directory in fp32, as lm-eval would load it."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        str(directory), dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )
    return loaded.eval()


def lm_eval_model(model: Any, cfg: TokenizerConfig, context: int) -> Any:
    """lm-eval's HF model around `model`, with the tokenizer made from its JSON as OLMo-core makes it."""
    from lm_eval.models.huggingface import HFLM
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from data.tokenizer import tokenizer_file
    from evals.tasks import quiet

    path = str(tokenizer_file(cfg))
    names = Tokenizer.from_file(path)
    fast = PreTrainedTokenizerFast(
        tokenizer_file=path, eos_token=names.id_to_token(cfg.eos_id), pad_token=names.id_to_token(cfg.pad_id),
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    with quiet():
        return HFLM(pretrained=model, tokenizer=fast, batch_size=4, max_length=context, device="cpu")


def items_again(
    model: Any, ours: Result, suite: Any, cfg: TokenizerConfig, context: int, items: int
) -> dict[str, Any]:
    """The first `items` items of every task, by lm-eval: largest difference of a log-likelihood, and every one too large."""
    from evals.tasks import quiet

    rows = {(name, r["id"]): r for name, task in ours["tasks"].items() for r in task["items"][:items]}
    chosen = [item for item in suite.items if (item.task, item.number) in rows]
    with quiet():
        asked = [i for item in chosen for i in item.instances]
        answers = iter(
            [x for x, _ in lm_eval_model(model, cfg, context).loglikelihood(asked, disable_tqdm=True)]
        )
    worst, failures = 0.0, []
    for item in chosen:
        for k, mine in enumerate(rows[item.task, item.number]["loglikelihoods"]):
            theirs = next(answers)
            gap = abs(mine - theirs)
            worst = max(worst, gap)
            if not gap <= ITEM_ABSOLUTE + ITEM_RELATIVE * abs(theirs):
                failures.append(
                    f"{item.task} item {item.number}, answer {k}: ours {mine:.6f}, lm-eval's {theirs:.6f}"
                )
    return {"items": len(chosen), "largest_difference": worst, "failures": failures[:8]}


def documents_again(
    model: Any, ours: Result, tokens_dir: Path, cfg: TokenizerConfig, context: int, documents: int
) -> dict[str, Any]:
    """The first documents of every domain, by transformers' own loss on tokens cut from the file here."""
    import torch

    worst, failures, seen = 0.0, [], 0
    for domain in ours["domains"]:
        for row in [r for r in ours["documents"] if r["domain"] == domain][:documents]:
            ids = document_tokens(tokens_dir, row["id"], cfg.eos_id)[:context].astype(np.int64)
            batch = torch.from_numpy(ids)[None]
            with torch.inference_mode():
                theirs = float(model(input_ids=batch, labels=batch, use_cache=False).loss)
            mine = row["nll"] / row["predictions"]
            seen += 1
            if row["predictions"] != len(ids) - 1:
                failures.append(
                    f"{row['id']}: {row['predictions']} predictions, its tokens allow {len(ids) - 1}"
                )
                continue
            worst = max(worst, abs(mine - theirs))
            if not abs(mine - theirs) <= PER_PREDICTION:
                failures.append(
                    f"{row['id']}: ours {mine:.6f} nat per prediction, transformers' {theirs:.6f}"
                )
    return {"documents": seen, "largest_difference": worst, "failures": failures[:8]}


def document_tokens(tokens_dir: Path, name: str, eos_id: int) -> np.ndarray:
    """Tokens of the document `path#id`, from behind the EOS before it to its own EOS: uint32[L]."""
    import fsspec

    path, _, wanted = name.rpartition("#")
    place = f"{read_json(tokens_dir / 'manifest.json').get('base_dir') or tokens_dir}/{path}"
    files, key = fsspec.core.url_to_fs(place)
    tokens = np.frombuffer(files.cat_file(key), "<u4")
    boundaries = f"{key.removesuffix('.npy')}.csv.gz"
    if not files.exists(boundaries):
        ends = np.flatnonzero(tokens == eos_id) + 1
        k = int(wanted)
        return tokens[ends[k - 1] if k else 0 : ends[k]]
    with files.open(boundaries, "rb") as raw, gzip.open(raw, "rt", newline="") as f:
        for k, row in enumerate(csv.reader(f)):
            start, end, named = int(row[0]), int(row[1]), (row[2] if len(row) > 2 and row[2] else str(k))
            if named == wanted and tokens[end - 1] == eos_id and (start == 0 or tokens[start - 1] == eos_id):
                return tokens[start:end]
    raise IdentityError(f"{place} has no document {wanted!r} between two EOS tokens")


def exported(run: Path, step: int, sides: Sequence[str]) -> dict[str, Path]:
    """The HF exports of a landmark that lie on this machine: {side: directory}."""
    places = {
        "reference": run / "reference" / "hf" / f"step{step}",
        "reproduced": run / "hf" / f"step{step}",
    }
    return {s: places[s] for s in sides if (places[s] / "config.json").is_file()}
