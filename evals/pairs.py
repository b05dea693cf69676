"""`parity A B` for any two checkpoints in any two implementations, the noise floor, and the gate of exports.

    a = side("RUN/reference/checkpoints/step48", "olmo-core")
    b = side("RUN/checkpoints/step48", "jax")
    compare(a, b, prompts, ParityConfig())

Implementations: `jax` (ours), `transformers`, `olmo-core`. Modes: `fp32`, with the recipe's limits, and `bf16`,
whose limit is measured: A in bf16 against A in fp32, times BF16_MARGIN. The surprising thing: an export in bf16
is still gated at fp32 limits, by rounding our weights the same way first.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from evals.agreement import LogitFunction
from evals.config import ParityConfig
from evals.parity import check_prompts, compare_functions, describe_worst, hf_logits, jax_logits, require
from infra.errors import RecipeError
from model.config import ModelConfig, NumericsConfig
from model.convert import stream
from model.convert.names import entries
from model.convert.ours import read_tree

Implementation = Literal["jax", "transformers", "olmo-core"]
Mode = Literal["fp32", "bf16"]
BF16_MARGIN = 2.0


class Side(NamedTuple):
    """One side of a comparison. `logits(mode)` builds its function."""

    name: str
    model: ModelConfig
    logits: Callable[[Mode], LogitFunction]


def side(path: str | Path, implementation: Implementation, model: ModelConfig | None = None) -> Side:
    """The checkpoint in `path` (ours, HF or OLMo-core, recognised by its files) in `implementation`.

    `model`: needed only for an OLMo-core checkpoint without its own config.json.
    """
    path = Path(path)
    source = stream.open_source(path, model)
    builders: dict[str, Callable[[Mode], LogitFunction]] = {
        "jax": lambda mode: in_jax(source, mode),
        "transformers": lambda mode: in_transformers(source, mode),
        "olmo-core": lambda mode: in_olmo_core(source, mode),
    }
    if implementation not in builders:
        raise RecipeError(f"unknown implementation {implementation!r}", f"known: {', '.join(builders)}")
    return Side(f"{path} ({source.kind} in {implementation})", source.model, builders[implementation])


def params_of(source: stream.Source) -> dict[str, Any]:
    """Our tree; padding rows that the source lacks are zeros, and their columns are not compared."""
    return read_tree(source, fill_missing_rows=True)


def in_jax(source: stream.Source, mode: Mode) -> LogitFunction:
    """Our model; rows the source lacks are cut from its logits."""
    run = jax_logits(
        params_of(source), source.model, NumericsConfig(mode="fp32" if mode == "fp32" else "mixed")
    )
    return lambda tokens: run(tokens)[:, : source.rows]


@contextlib.contextmanager
def as_hf(source: stream.Source) -> Iterator[Path]:
    """An HF directory of the source: itself, or one written to a temporary place, in fp32 with every row."""
    if source.kind == "hf" and source.path is not None:
        yield source.path
        return
    with tempfile.TemporaryDirectory() as folder:
        stream.convert(
            source, Path(folder) / "hf", dtype="float32", keep_padding=True, eos_id=None, pad_id=None
        )
        yield Path(folder) / "hf"


def in_transformers(source: stream.Source, mode: Mode) -> LogitFunction:
    """transformers; a checkpoint of another form is written as HF first."""
    with as_hf(source) as folder:
        return hf_logits(folder, dtype="float32" if mode == "fp32" else "bfloat16")


def in_olmo_core(source: stream.Source, mode: Mode) -> LogitFunction:
    """AI2's own model. bf16 there means weights and activations in bf16, as under its mixed precision."""
    import torch

    from evals.reference.olmo_core_model import olmo_core_config

    model = olmo_core_config(source.model).build(init_device="cpu")
    state = model.state_dict()
    for e in entries(source.model):
        array = np.zeros(e.shape, np.float32)
        read = source.read(e)
        array[: len(read)] = read
        state[e.olmo_core] = torch.from_numpy(array)
    model.load_state_dict(state, strict=True)
    model = model.to(torch.float32 if mode == "fp32" else torch.bfloat16).eval()

    def run(tokens: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return model(torch.from_numpy(np.asarray(tokens, np.int64)))[0].float().numpy()[:, : source.rows]

    return run


def compare(
    a: Side,
    b: Side,
    prompts: np.ndarray,
    cfg: ParityConfig,
    *,
    mode: Mode = "fp32",
) -> dict[str, Any]:
    """A against B over prompts int32[P,S] longer than the window. Returns the figures, limits and `ok`."""
    check_prompts(prompts, a.model)
    found = compare_functions(a.logits(mode), b.logits(mode), prompts, a.model.window)
    kl = max(found["kl_max"], found["reverse_kl_max"])
    limits = {"max_logit_difference": cfg.max_logit_difference, "max_kl": cfg.max_kl}
    if mode == "bf16":
        floor = compare_functions(a.logits("fp32"), a.logits("bf16"), prompts, a.model.window)
        limits = {
            "max_logit_difference": BF16_MARGIN * floor["max"],
            "max_kl": BF16_MARGIN * max(floor["kl_max"], floor["reverse_kl_max"]),
        }
    return {
        "kind": "logits",
        "ok": found["max"] <= limits["max_logit_difference"] and kl <= limits["max_kl"],
        "first": a.name,
        "second": b.name,
        "mode": mode,
        "shape": list(prompts.shape),
        "window": a.model.window,
        "limits": limits,
        **found,
        "where": describe_worst(found),
    }


def noise_floor(
    path: str | Path, prompts: np.ndarray, model: ModelConfig | None = None
) -> dict[str, dict[str, Any]]:
    """The checkpoint in `path` in transformers, against itself: eager against fused attention in fp32, and bf16 against fp32."""
    source = stream.open_source(path, model)
    check_prompts(prompts, source.model)
    W = source.model.window
    with as_hf(source) as folder:
        exact = hf_logits(folder)
        pairs = {
            "transformers fp32: eager against sdpa": hf_logits(folder, attention="eager"),
            "transformers: bf16 against fp32": hf_logits(folder, dtype="bfloat16"),
        }
    return {name: compare_functions(exact, other, prompts, W) for name, other in pairs.items()}


def export_checked(
    source: str | Path,
    out: str | Path,
    prompts: np.ndarray,
    cfg: ParityConfig,
    *,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    keep_padding: bool = False,
    context_length: int = 8192,
    eos_id: int | None = 100257,
    pad_id: int | None = 100277,
    no_parity: bool = False,
    model: ModelConfig | None = None,
    origin: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Export `source` to the HF directory `out`, which appears only if transformers reproduces our logits.

    A source in HF's form must also have the logits that transformers gives itself: a config that we misread would
    otherwise be judged by our own reading. `origin`: where the source came from (`model.convert.sources.resolve`), kept
    in the lineage. `no_parity` skips the gate and leaves that in `out/conversion.json`, where the report finds it.
    Returns the lineage. Raises ParityError (and leaves nothing at `out`) when the gate fails.
    """
    found = stream.open_source(source, model)
    if not no_parity:
        check_prompts(prompts, found.model)

    def finish(staged: Path) -> dict[str, Any]:
        came = {"origin": origin} if origin is not None else {}
        if no_parity:
            return {**came, "parity": {"checked": False, "why": "exported with --no-parity"}}
        return {**came, "parity": gate(found, staged, prompts, cfg, rounded=dtype == "bfloat16")}

    return stream.convert(
        found, out, dtype=dtype, keep_padding=keep_padding, context_length=context_length, eos_id=eos_id, pad_id=pad_id,
        finish=finish,
    )  # fmt: skip


def gate(
    source: stream.Source, staged: Path, prompts: np.ndarray, cfg: ParityConfig, *, rounded: bool
) -> dict[str, Any]:
    """Parity of the export in `staged` with its source, for the lineage. Raises ParityError where there is none."""
    params = params_of(source)
    if rounded:
        params = map_leaves(lambda w: w.astype(ml_dtypes.bfloat16).astype(np.float32), params)
    sides = {"ours": jax_logits(params, source.model)}
    if source.kind == "hf" and source.path is not None:
        sides["source"] = hf_logits(source.path, rounded=rounded)
    exported, worst = hf_logits(staged), {"max": 0.0, "kl_max": 0.0}
    for name, side in sides.items():
        figures = compare_functions(exported, side, prompts, source.model.window)
        kl = max(figures["kl_max"], figures["reverse_kl_max"])
        verdict = {
            **figures,
            "kind": "logits",
            "ok": figures["max"] <= cfg.max_logit_difference and kl <= cfg.max_kl,
            "where": describe_worst(figures),
        }
        require(
            verdict,
            f"the export of {source.path}" + (" (against it in transformers)" if name == "source" else ""),
            "convert it with --no-parity, then `repro parity OUT SOURCE --localise` names the first block that drifts",
        )
        worst = {"max": max(worst["max"], figures["max"]), "kl_max": max(worst["kl_max"], kl)}
    return {"checked": True, "against": sorted(sides), **worst, "prompts": list(prompts.shape)}


def map_leaves(fn: Callable[[np.ndarray], np.ndarray], tree: dict[str, Any]) -> dict[str, Any]:
    """`fn` on every array of a tree of dicts."""
    return {k: map_leaves(fn, v) if isinstance(v, dict) else fn(np.asarray(v)) for k, v in tree.items()}
