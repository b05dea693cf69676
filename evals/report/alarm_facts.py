"""The facts the alarms ask for, read from a run: which documents, which weights, which files were changed since.

Weights and tokens are not hashed again: their digests come from the records of the stages that made them.
"""

import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evals.report.records import SPLITS, Facts, optional, paired_steps
from infra.artifacts import differences, fingerprint, sha256_file


def alarm_facts(
    run: Path, recipe: dict[str, Any], curves: dict[str, Any], comparisons: dict[int, dict[str, Any]],
    receipts: dict[str, Any], manifests: dict[str, Any], landmarks: tuple[int, ...], outside: dict[str, Any] | None,
) -> Facts:  # fmt: skip
    """The facts the alarms ask for; what is not known is left out."""
    last = comparisons.get(landmarks[-1], {})
    facts: Facts = {
        "training_difference": [b - a for _, a, b in paired_steps(curves, "ce")]
        or (outside["difference"] if outside else []),
        "loss_bound": recipe["evals"]["bounds"]["heldout_loss"],
        "receipts": {s: r["state"] for s, r in receipts.items()},
        "landmarks": list(landmarks),
        "vocab_size": recipe["model"]["vocab_size"],
        "optimizer_dtypes": optimizer_dtypes(run, landmarks[-1]),
    }
    facts |= {
        "judged_weights": judged_weights(run, landmarks),
        "made_weights": made_weights(run, landmarks),
        "may_be_equal": bool(recipe.get("compared")),
        "spot_check": optional(run / "evals" / f"step{landmarks[-1]}" / "spot_check.json", []),
        "logged_loss": optional(run / "parity" / "logged.json", []),
        "logged_steps": len(curves["reproduced"]),
        "reference_published": recipe["reference"]["kind"] == "published",
        "changed_files": changed_files(run, recipe),
    }
    if "heldout_loss" in last:
        facts["heldout_difference"] = last["heldout_loss"]["difference"]
    if set(manifests) == set(SPLITS):
        facts["token_manifests"] = {s: m["audit"] for s, m in manifests.items() if "audit" in m}
    corpus = optional(run / "corpus" / "corpus.json", [])
    if corpus and "domains" in corpus:  # published token files have no documents to compare
        for split in SPLITS:
            facts[f"{split}_documents"] = list(document_digests(run, split, corpus))
    return facts


def document_digests(run: Path, split: str, corpus: dict[str, Any]) -> Iterator[str]:
    """sha256 of the stripped text of every document of a split."""
    for domain in corpus["domains"].values():
        for shard in domain[split]["shards"]:
            with gzip.open(run / "corpus" / shard, "rt", encoding="utf-8") as f:
                for line in f:
                    yield hashlib.sha256(json.loads(line)["text"].strip().encode()).hexdigest()


def optimizer_dtypes(run: Path, step: int) -> dict[str, str]:
    """dtype of every optimizer array of a checkpoint, from Orbax's own metadata; empty where there is none."""
    folder = run / "checkpoints" / f"step{step}" / "optimizer"
    if not folder.is_dir():
        return {}
    import jax
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.metadata(folder.resolve()).item_metadata
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(tree, "tree", tree)):
        name = jax.tree_util.keystr(path)
        dtype = str(getattr(leaf, "dtype", ""))
        if dtype and not dtype.startswith(("int", "uint", "bool")):
            found[name] = dtype
    return found


def judged_weights(run: Path, landmarks: tuple[int, ...]) -> dict[str, dict[str, str]]:
    """{step: {side: digest}}: the weights that the results of each landmark say they judged."""
    out: dict[str, dict[str, str]] = {}
    for step in landmarks:
        both = optional(run / "evals" / f"step{step}" / "token_kl.json", [])
        identity = both.get("identity") if isinstance(both, dict) else None
        digests = identity.get("weights") if isinstance(identity, dict) else None
        if isinstance(digests, list) and len(digests) == 2 and all(isinstance(d, str) for d in digests):
            out[str(step)] = dict(zip(("reference", "reproduced"), digests))
    return out


def made_weights(run: Path, landmarks: tuple[int, ...]) -> dict[str, dict[str, str]]:
    """The same digests from the records of the stages that made the weights; nothing is hashed here."""
    out: dict[str, dict[str, str]] = {str(s): {} for s in landmarks}
    for side, stage, folder, ending in (
        ("reference", "reference", "reference/hf/step{}/", ".safetensors"),
        ("reproduced", "train", "checkpoints/step{}/params/", ""),
    ):
        made = (optional(run / "stages" / f"{stage}.json", []) or {}).get("outputs", {})
        for step, sides in out.items():
            root = folder.format(step)
            files = {
                n.removeprefix(root): f["sha256"]
                for n, f in made.items()
                if n.startswith(root) and n.endswith(ending)
            }
            if files:
                sides[side] = fingerprint(files)
    return out


def changed_files(run: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    """Records and results against what the stages said when they made them: {checked, changed: [what], unrecorded: [stage]}.

    A field of recipe.json that a stage was not made with counts as a change. Weights, tokens and the rest are digested by the
    stages that read them. A file that is not here (a run is watched from another machine) is no change.
    """
    checked, changed, recorded = 0, [], set()
    for path in sorted((run / "stages").glob("*.json")):
        record = {} if path.name.endswith(".begun.json") else optional(path, []) or {}
        recorded.add(record.get("stage", ""))
        for name, made in record.get("outputs", {}).items():
            if name.endswith((".json", ".jsonl")) and (run / name).is_file():
                checked += 1
                if sha256_file(run / name) != made["sha256"]:
                    changed.append(name)
        sections = record.get("identity", {}).get("sections", {})
        found = differences(sections, {s: recipe.get(s) for s in sections})
        changed += [f"recipe.json: {field} of stage {record['stage']}" for field in found]
    # Two runs that are compared have their results from one command, which records no stages.
    needed = () if recipe.get("compared") else ("parity", "evaluate")
    return {"checked": checked, "changed": changed, "unrecorded": [s for s in needed if s not in recorded]}
