"""Parity: same weights in two implementations, same training in two frameworks, two sets of weights.

    logit_parity(RUN/init/hf, params, model_cfg, prompts, ParityConfig())      # transformers against JAX
    training_parity(RUN/reference/metrics.jsonl, RUN/train/metrics.jsonl, ParityConfig(), landmarks)
    weights_difference(RUN/reference/hf/step96, RUN/hf/step96, base=RUN/init/hf)

Each returns a plain dict with `ok`, the figures, the thresholds and the worst place by name. Prompts must
exceed the sliding window (and the old context when RoPE is scaled): a shorter one cannot see the commonest
faults. `transformers` with `sdpa` is bit-equal to OLMo-core in fp32 on CPU (platform notes, section 6).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from evals.agreement import LogitFunction, compare_logits
from evals.config import ParityConfig
from infra.artifacts import versions, write_json_atomic
from infra.errors import IdentityError, ParityError, RecipeError
from model.config import ModelConfig, NumericsConfig

GRAD_NORM_RELATIVE = 1e-3  # torch's fp32 norm on CPU is the inaccurate side: 2e-4 off its float64 value
GRAD_NORM_F64_RELATIVE = 1e-6  # at step 1, where both sides hold the same weights
Z_LOSS_RELATIVE = 1e-5  # fp32 rounding; a z-loss left out moves a young model's CE by less than its limit
LEARNING_RATE_RELATIVE = 1e-9


# ---------------------------------------------------------------- logits


def check_prompts(prompts: np.ndarray, model: ModelConfig) -> None:
    """Raise RecipeError unless `prompts` [P, S] are long enough to see a wrong window or wrong RoPE scaling."""
    needed = model.window
    if model.rope_scaling is not None:
        needed = max(needed, model.rope_scaling.original_context)
    if prompts.ndim != 2 or prompts.shape[1] <= needed:
        raise RecipeError(
            f"parity prompts of shape {prompts.shape} do not exceed {needed} tokens (window or old RoPE context)",
            "raise parity.prompt_tokens: a shorter prompt cannot see a wrong window or wrong scaling",
        )
    if prompts.min() < 0 or prompts.max() >= model.padded_vocab_size:
        raise RecipeError(
            f"parity prompts hold a token outside 0..{model.padded_vocab_size - 1}",
            "name a run whose tokens are of this model's tokenizer with --run-dir",
        )


def pick_prompts(tokens: Any, cfg: ParityConfig, sequence_length: int) -> np.ndarray:
    """`cfg.prompts` prompts, spread evenly over an index of instances: int32[P, prompt_tokens].

    `tokens` has `n_instances` and `read(ids) -> uint32[B, S]` (data.index.InstanceIndex of the held-out tokens).
    A prompt longer than one instance is made of consecutive instances.
    """
    length = cfg.prompt_tokens or sequence_length
    each = -(-length // sequence_length)
    groups = tokens.n_instances // each
    if groups < cfg.prompts:
        raise RecipeError(
            f"the held-out tokens give {groups} prompts of {length} tokens, parity.prompts wants {cfg.prompts}",
            "hold out more documents or ask for fewer prompts",
        )
    starts = (np.arange(cfg.prompts) * groups // cfg.prompts) * each
    rows = [tokens.read(np.arange(s, s + each, dtype=np.uint32)).reshape(-1)[:length] for s in starts]
    return np.stack(rows).astype(np.int32)


def jax_logits(params: Any, model: ModelConfig, numerics: NumericsConfig | None = None) -> LogitFunction:
    """Our JAX model as a function of tokens int32[1, S] -> float32[S, V]; `params` is our tree."""
    import jax
    import jax.numpy as jnp

    from model import olmo3

    numerics = numerics or NumericsConfig()
    forward = jax.jit(olmo3.logits, static_argnums=(1, 2))
    placed = jax.tree.map(jnp.asarray, params)

    def run(tokens: np.ndarray) -> np.ndarray:
        return np.asarray(forward(placed, model, numerics, jnp.asarray(tokens, jnp.int32))[0], np.float32)

    return run


def hf_logits(
    hf_dir: str | Path,
    *,
    attention: Literal["sdpa", "eager"] = "sdpa",
    dtype: str = "float32",
    rounded: bool = False,
) -> LogitFunction:
    """transformers' `Olmo3ForCausalLM` from a local directory, as a function like `jax_logits`.

    `rounded`: every weight goes through bf16 first. Raises ParityError if loading leaves any weight missing, unexpected or misshaped: transformers only warns.
    """
    import torch
    from transformers import Olmo3ForCausalLM
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        loaded: Any = Olmo3ForCausalLM.from_pretrained(
            str(hf_dir),
            attn_implementation=attention,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    finally:
        if bars:
            logging.enable_progress_bar()
    model, info = loaded
    wrong = {k: sorted(map(str, v)) for k, v in info.items() if v}
    if wrong:
        raise ParityError(
            f"{hf_dir} does not load completely: {wrong}",
            "export it again; a newly initialised weight is no weight",
        )
    model.eval()
    if rounded:
        for p in model.parameters():
            p.data = p.data.bfloat16().to(p.dtype)

    def run(tokens: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return (
                model(torch.from_numpy(np.asarray(tokens, np.int64)), use_cache=False)
                .logits[0]
                .float()
                .numpy()
            )

    return run


def compare_functions(
    first: LogitFunction, second: LogitFunction, prompts: np.ndarray, window: int
) -> dict[str, Any]:
    """Agreement of two logit functions over prompts int32[P, S], one prompt in memory at a time."""

    def pairs() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for row in prompts:
            yield first(row[None]), second(row[None])

    return compare_logits(pairs(), window)


def logit_parity(
    hf_dir: str | Path,
    params: Any | Callable[[], Any],
    model: ModelConfig,
    prompts: np.ndarray,
    cfg: ParityConfig,
    *,
    attention: Literal["sdpa", "eager"] = "sdpa",
    numerics: NumericsConfig | None = None,
    out: str | Path | None = None,
) -> dict[str, Any]:
    """transformers on `hf_dir` against our JAX model on `params` (a tree, or a function that gives one).

    `ok` when max |difference| and the largest KL of any position, both ways, are within `cfg`. Writes the
    result to `out` when given. Never raises for a mere difference: `require` does.
    """
    check_prompts(prompts, model)
    theirs = hf_logits(hf_dir, attention=attention)
    ours = jax_logits(params() if callable(params) else params, model, numerics)
    found = compare_functions(theirs, ours, prompts, model.window)
    limits = {"max_logit_difference": cfg.max_logit_difference, "max_kl": cfg.max_kl}
    kl = max(found["kl_max"], found["reverse_kl_max"])
    result = {
        "kind": "logits",
        "ok": found["max"] <= cfg.max_logit_difference and kl <= cfg.max_kl,
        "first": f"transformers fp32 {attention}, {Path(hf_dir).name}",
        "second": "jax fp32",
        "shape": list(prompts.shape),
        "window": model.window,
        "limits": limits,
        **found,
        "where": describe_worst(found),
        "versions": versions("torch", "transformers", "jax", "flax"),
    }
    if out is not None:
        write_json_atomic(out, result)
    return result


def describe_worst(found: dict[str, Any]) -> str:
    """The worst place in words."""
    w = found["worst"]
    low, high = next((b["from"], b["to"]) for b in found["buckets"] if b["from"] <= w["position"] < b["to"])
    return (
        f"prompt {w['prompt']}, position {w['position']} (bucket {low}..{high - 1}), token {w['token']}: "
        f"{w['first']:.7g} against {w['second']:.7g}"
    )


LOCALISE = "`repro parity A B --localise` names the first block that drifts"


def require(result: dict[str, Any], what: str, remedy: str = LOCALISE) -> dict[str, Any]:
    """`result` if it is ok; otherwise ParityError that says how far off and where."""
    if result["ok"]:
        return result
    if result["kind"] == "logits":
        kl = max(result["kl_max"], result["reverse_kl_max"])
        text = f"max |difference| {result['max']:.3g}, KL {kl:.3g}; worst at {result['where']}"
    else:
        text = "; ".join(result["failures"])
    raise ParityError(f"{what} fails parity: {text}", remedy)


# ---------------------------------------------------------------- training


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; step k must be row k."""
    rows = []
    for k, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            raise IdentityError(
                f"{path}: line {k} is not JSON", "it is damaged: make its stage again"
            ) from None
    for k, row in enumerate(rows, 1):
        if row.get("step") != k:
            raise IdentityError(
                f"{path}: line {k} is step {row.get('step')}", "each step must stand once, in order"
            )
    return rows


def training_parity(
    reference: str | Path,
    trained: str | Path,
    cfg: ParityConfig,
    landmarks: tuple[int, ...],
    *,
    windows: Mapping[int, Any] | None = None,
    window_size: int = 0,
    cold: tuple[int, ...] = (),
    out: str | Path | None = None,
) -> dict[str, Any]:
    """Two metrics files step by step: CE, z-loss, gradient norm, learning rate, skips, receipts at landmarks.

    `windows`: what our skip rule had seen at each landmark, from the checkpoints' records. The reference's rule has seen its
    last `window_size` steps, but none before the last of the steps `cold`, after which it forgot them.
    """
    theirs, ours = read_metrics(reference), read_metrics(trained)
    failures = []
    if len(theirs) != len(ours):
        failures.append(f"the reference has {len(theirs)} steps, the reproduction {len(ours)}")
    steps = min(len(theirs), len(ours))
    theirs, ours = theirs[:steps], ours[:steps]
    curves = {key: (column(theirs, key), column(ours, key)) for key in ("ce", "z_loss", "grad_norm", "lr")}
    figures = {
        "ce": largest(np.abs(curves["ce"][0] - curves["ce"][1])),
        "z_loss": largest(np.abs(curves["z_loss"][0] - curves["z_loss"][1])),
        "z_loss_relative": largest(relative(*curves["z_loss"])),
        "grad_norm_relative": largest(relative(*curves["grad_norm"])),
        "lr_relative": largest(relative(*curves["lr"])),
    }
    bounds = {
        "ce": cfg.max_ce_difference,
        "z_loss_relative": Z_LOSS_RELATIVE,
        "grad_norm_relative": GRAD_NORM_RELATIVE,
        "lr_relative": LEARNING_RATE_RELATIVE,
    }
    if steps and "grad_norm_f64" in theirs[0]:
        gaps = relative(column(theirs, "grad_norm_f64"), curves["grad_norm"][1])
        figures["grad_norm_f64_relative"] = largest(gaps)
        figures["grad_norm_f64_relative_step1"] = {"value": finite(gaps[0]), "step": 1}
        bounds["grad_norm_f64_relative_step1"] = GRAD_NORM_F64_RELATIVE
    for name, bound in bounds.items():
        value, step = figures[name]["value"], figures[name]["step"]
        if value is None or value > bound:
            shown = "not finite" if value is None else f"{value:.3g}"
            failures.append(f"{name} is {shown} at step {step}, allowed {bound:g}")
    skips = [r["step"] for r, o in zip(theirs, ours) if bool(r["skipped"]) != bool(o["skipped"])]
    if skips:
        failures.append(f"skip decisions differ at steps {skips[:5]}")
    failures += window_failures(theirs, windows or {}, window_size, cold, cfg)
    receipts = {}
    for step in landmarks:
        same = step <= steps and theirs[step - 1]["receipt"] == ours[step - 1]["receipt"]
        receipts[str(step)] = same
    broken = [s for s, same in receipts.items() if not same]
    if broken:
        first = next((r["step"] for r, o in zip(theirs, ours) if r["receipt"] != o["receipt"]), None)
        failures.append(
            f"receipts differ at landmarks {', '.join(broken)}; the first step that differs is {first}"
        )
    result = {
        "kind": "training",
        "ok": not failures,
        "steps": steps,
        "failures": failures,
        "limits": bounds,
        **figures,
        "ce_mean": finite(np.abs(curves["ce"][0] - curves["ce"][1]).mean()) if steps else None,
        "skipped_steps": [r["step"] for r in theirs if r["skipped"]],
        "receipts": receipts,
    }
    if out is not None:
        write_json_atomic(out, result)
    return result


def window_failures(
    theirs: list[dict[str, Any]],
    windows: Mapping[int, Any],
    size: int,
    cold: tuple[int, ...],
    cfg: ParityConfig,
) -> list[str]:
    """Where our skip rule has seen other values than the reference logged: equal decisions may be chance.

    The rule sees CE without z-loss and the norm before clipping. A window that holds a value which is not finite is left out,
    since what stays of it is a matter of `nan_policy`.
    """
    out = []
    for step, window in windows.items():
        start = max((c for c in cold if c < step), default=0)
        rows = theirs[max(start, step - size) : step]
        if window is None or len(window["losses"]) != len(rows):
            held = "no" if window is None else len(window["losses"])
            out.append(f"skip window at step {step} holds {held} values, the reference's {len(rows)}")
            continue
        seen = {k: np.array(window[k], np.float64) for k in ("losses", "norms")}
        gaps = np.abs(column(rows, "ce") - seen["losses"]), relative(column(rows, "grad_norm"), seen["norms"])
        limits = cfg.max_ce_difference, GRAD_NORM_RELATIVE
        for what, gap, limit in zip(("CE", "gradient norm"), gaps, limits):
            if np.isfinite(gap).all() and gap.max(initial=0.0) > limit:
                at = int(gap.argmax())
                out.append(
                    f"skip window at step {step}: our rule saw a {what} at step {rows[at]['step']} that is {gap[at]:.3g} off "
                    f"the reference's, allowed {limit:g}"
                )
    return out


def column(rows: list[dict[str, Any]], key: str) -> np.ndarray:
    """float64[steps]; a null (a value that was not finite) becomes NaN."""
    return np.array([np.nan if row[key] is None else row[key] for row in rows], np.float64)


def relative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|a-b| / |a|, 0 where both are 0."""
    return np.where(a == b, 0.0, np.abs(a - b) / np.maximum(np.abs(a), np.finfo(np.float64).tiny))


def largest(values: np.ndarray) -> dict[str, Any]:
    """The largest entry and its step (from 1). A NaN counts as larger than anything."""
    if not len(values):
        return {"value": None, "step": 0}
    at = int(np.argmax(np.where(np.isnan(values), np.inf, values)))
    return {"value": finite(values[at]), "step": at + 1}


def finite(value: float) -> float | None:
    """A float that JSON can hold."""
    return float(value) if np.isfinite(value) else None


# ---------------------------------------------------------------- weights


def weights_difference(
    hf_dir_a: str | Path,
    hf_dir_b: str | Path,
    *,
    base: str | Path | None = None,
    out: str | Path | None = None,
) -> dict[str, Any]:
    """Relative L2 difference |a-b|/|a| of every tensor of two HF directories; the worst is named.

    With `base` (the common starting weights) also |a-b|/|a-base|: the difference against the way travelled.
    """
    from model.convert.safetensors_io import Tensors

    a, b = Tensors(Path(hf_dir_a)), Tensors(Path(hf_dir_b))
    start = Tensors(Path(base)) if base is not None else None
    odd = sorted(a.names() ^ b.names())
    if odd:
        raise IdentityError(f"{hf_dir_a} and {hf_dir_b} do not hold the same tensors: {', '.join(odd[:6])}")
    tensors = {}
    for name in sorted(a.names()):
        if a.shape(name) != b.shape(name):
            raise IdentityError(
                f"{name} has shape {a.shape(name)} in {hf_dir_a} and {b.shape(name)} in {hf_dir_b}"
            )
        x, y = a.read(name), b.read(name)
        gap, size, biggest = difference_norms(x, y)
        tensors[name] = {"relative": gap / size if size else gap, "max": biggest}
        if start is not None:
            way = difference_norms(x, start.read(name))[0]
            tensors[name]["of_way"] = gap / way if way else gap
    worst = max(tensors, key=lambda n: tensors[n]["relative"])
    result: dict[str, Any] = {
        "kind": "weights",
        "equal": all(t["max"] == 0.0 for t in tensors.values()),
        "worst": {"name": worst, **tensors[worst]},
        "tensors": tensors,
    }
    if start is not None:
        far = max(tensors, key=lambda n: tensors[n]["of_way"])
        result["worst_of_way"] = {"name": far, **tensors[far]}
    if out is not None:
        write_json_atomic(out, result)
    return result


def difference_norms(x: np.ndarray, y: np.ndarray, rows: int = 4096) -> tuple[float, float, float]:
    """(|x-y|, |x|, max|x-y|) in float64, a slab of rows at a time."""
    gap = size = biggest = 0.0
    for i in range(0, len(x), rows):
        p, q = np.asarray(x[i : i + rows], np.float64), np.asarray(y[i : i + rows], np.float64)
        gap += float(np.square(p - q).sum())
        size += float(np.square(p).sum())
        biggest = max(biggest, float(np.abs(p - q).max(initial=0.0)))
    return gap**0.5, size**0.5, biggest
