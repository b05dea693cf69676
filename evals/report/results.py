"""Is a file of results what it says it is? Checked before anything is computed from it.

    why = problem("reference.heldout", record)      # '' or what is wrong

A result is read back from disk, perhaps from another machine, and a damaged one must become a named gap in the report and
not a stack trace. Only what the comparison reads is checked; everything else in a result is shown as it stands.
"""

import math
from collections.abc import Mapping
from typing import Any

LOSSES = {"nll": float, "predictions": int}
KLS = {"kl_forward": float, "kl_backward": float, "predictions": int}


def problem(name: str, record: Any) -> str:
    """What is wrong with the result called `name`; '' when it can be compared."""
    if not isinstance(record, Mapping):
        return "is no object"
    kind = name.rpartition(".")[2]
    if kind == "heldout":
        return _documents(record, LOSSES) or _mapping(record, "domains") or _mapping(record, "pooled")
    if kind == "token_kl":
        pooled = record.get("pooled")
        if not isinstance(pooled, Mapping) or not _number(pooled.get("top1_agreement"), float):
            return "has no pooled top1_agreement"
        return _documents(record, KLS)
    if kind == "downstream":
        return _mapping(record, "tasks") or _tasks(record["tasks"])
    return ""


def _mapping(record: Mapping[str, Any], field: str) -> str:
    found = record.get(field)
    bad = (
        not isinstance(found, Mapping) or not found or not all(isinstance(v, Mapping) for v in found.values())
    )
    if field == "pooled":
        bad = not isinstance(found, Mapping)
    return f"has no {field}" if bad else ""


def _documents(record: Mapping[str, Any], fields: Mapping[str, type]) -> str:
    rows = record.get("documents")
    if not isinstance(rows, list) or not rows:
        return "has no documents"
    for k, row in enumerate(rows):
        if not isinstance(row, Mapping) or not all(isinstance(row.get(f), str) for f in ("id", "domain")):
            return f"has no id and domain in document {k}"
        for field, kind in fields.items():
            if not _number(row.get(field), kind) or (kind is int and row[field] < 1):
                return f"has {field} = {str(row.get(field))[:40]} in document {k}"
    domains = record.get("domains")
    if isinstance(domains, Mapping) and {r["domain"] for r in rows} != set(domains):
        return "has documents of other domains than it names"
    return ""


def _tasks(tasks: Mapping[str, Any]) -> str:
    for name, task in tasks.items():
        items = task.get("items")
        if not _number(task.get("acc"), float) or not isinstance(items, list) or not items:
            return f"has no accuracy or no items of {name}"
        for k, item in enumerate(items):
            good = isinstance(item, Mapping) and all(
                _number(item.get(f), int) for f in ("id", "gold", "correct")
            )
            scores = item.get("loglikelihoods") if good else None
            if not isinstance(scores, list) or not scores or not all(_number(x, float) for x in scores):
                return f"has a damaged item {k} of {name}"
            if item["correct"] not in (0, 1):
                return f"has correct = {item['correct']} in item {k} of {name}"
    return ""


def _number(value: Any, kind: type) -> bool:
    """A finite float, or an int of sane size; never a bool."""
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return abs(value) < 1 << 53
    return kind is float and isinstance(value, float) and math.isfinite(value)
