"""Floating-point operations of a training step: by formula, and by walking the traced program.

    counted = step_flops(cfg, sequence=8192, instances=512)      # by formula
    traced = traced_matmul_flops(jax.make_jaxpr(step)(...))      # by walking, scans times their length

Two independent counts, because XLA's own cost analysis counts the body of a loop once. A multiply-add is two
operations; a backward pass is twice its forward pass. `model` excludes recomputation (that is what MFU is
defined on: PaLM, https://arxiv.org/abs/2204.02311, appendix B); `hardware` adds what rematerialisation repeats.

The surprising thing: causal and sliding attention are counted as what a query can see, not as S x S.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

from model import layout
from model.config import LayerKind, ModelConfig

MATERIAL = ("dot_general", "scan", "shard_map", "gather", "pallas_call", "all_gather")  # not fused away


class StepFlops(NamedTuple):
    """Operations of one step over the whole global batch."""

    matmul: float
    attention: float
    recomputed: float
    recomputed_matmul: float = 0.0  # of `recomputed`, without attention

    @property
    def model(self) -> float:
        """Without recomputation: the numerator of MFU."""
        return self.matmul + self.attention

    @property
    def hardware(self) -> float:
        """What the chips execute."""
        return self.model + self.recomputed


def layer_matmul_params(cfg: ModelConfig) -> int:
    """Weights of one layer that take part in a matrix product."""
    heads = (2 * cfg.n_heads + 2 * cfg.n_kv_heads) * cfg.head_dim
    return cfg.d_model * (heads + 3 * cfg.d_ff)


def visible_keys(kind: LayerKind, window: int, sequence: int) -> float:
    """Keys a query sees, on average over a sequence: its own position included."""
    w = min(window, sequence) if kind is LayerKind.SLIDING else sequence
    return (w * (w + 1) / 2 + (sequence - w) * w) / sequence


def forwards_again(cfg: ModelConfig, remat: str) -> list[int]:
    """How often the backward pass repeats the forward pass of each layer, first layer first.

    none, dots: never (dots repeats attention alone). block, offload: once. full: once for the inputs of the pattern
    block's layers and once for each layer itself; the first is not needed for a last layer that stands alone.
    """
    if remat != "full":
        return [int(remat in ("block", "offload"))] * cfg.n_layers
    kinds, repeats, tail = layout.pattern(cfg)

    def of(block: tuple[LayerKind, ...]) -> list[int]:
        alone = len(block) == 1 or block[-1] != block[-2]
        return [2] * (len(block) - 1) + [1 if alone else 2]

    return of(kinds) * repeats + (of(tail) if tail else [])


def step_flops(cfg: ModelConfig, sequence: int, instances: int, remat: str = "none") -> StepFlops:
    """Operations of a forward and backward pass over `instances` x `sequence` tokens.

    What `remat` repeats is in `forwards_again`; `dots` keeps the products and repeats only attention.
    """
    tokens = sequence * instances
    layers = 2.0 * tokens * layer_matmul_params(cfg) * cfg.n_layers
    head = 2.0 * tokens * cfg.d_model * cfg.padded_vocab_size
    cores = [
        4.0 * tokens * cfg.n_heads * cfg.head_dim * visible_keys(kind, cfg.window, sequence)
        for kind in cfg.layer_kinds
    ]
    core, times = sum(cores), forwards_again(cfg, remat)
    again = core if remat == "dots" else sum(times) / cfg.n_layers * layers
    core_again = sum(n * c for n, c in zip(times, cores))
    return StepFlops(3 * (layers + head), 3 * core, again + core_again, 0.0 if remat == "dots" else again)


def traced_matmul_flops(jaxpr: Any) -> float:
    """Operations of every `dot_general` of a (closed) jaxpr, loops times their length, kernels left out.

    Raises ValueError on a `while` loop whose length the program does not state.
    """
    total = 0.0
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            lhs = eqn.invars[0].aval.shape
            total += 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(lhs[d] for d in contract)
            continue
        if name == "pallas_call":
            continue
        inner = sum(traced_matmul_flops(sub) for sub in _subprograms(eqn.params))
        if name == "while" and inner:
            raise ValueError("a while loop of unknown length holds matrix products")
        total += inner * _times(eqn)
    return total


def _times(eqn: Any) -> int:
    """How often an equation's inner program runs: a scan its length, a shard_map once per device of its mesh."""
    if eqn.primitive.name == "scan":
        return int(eqn.params["length"])
    return int(eqn.params["mesh"].size) if eqn.primitive.name == "shard_map" else 1


def largest_arrays(jaxpr: Any, devices: int, top: int = 8) -> list[dict[str, Any]]:
    """The largest results of products, loops, look-ups and kernels of a traced step, for a step that does not fit.

    `bytes` are per device: as written inside a shard_map, elsewhere an even split over `devices`. A compiler may
    keep fewer of them at once, so they are where to look and not a sum. Each place and shape is named once.
    """
    from jax._src import source_info_util

    found: dict[tuple[str, str], dict[str, Any]] = {}
    here = f"{Path(__file__).resolve().parent.parent}/"

    def walk(jaxpr: Any, split: int) -> None:
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            name = eqn.primitive.name
            for sub in _subprograms(eqn.params):
                walk(sub, 1 if name == "shard_map" else split)
            if name not in MATERIAL:
                continue
            where = (
                source_info_util.summarize(eqn.source_info).rpartition("site-packages/")[2].removeprefix(here)
            )
            for var in eqn.outvars:
                size = math.prod(var.aval.shape) * var.aval.dtype.itemsize // split
                key = (var.aval.str_short(), where)
                if key not in found or size > found[key]["bytes"]:
                    found[key] = {"bytes": size, "array": key[0], "made_by": name, "where": where}

    walk(jaxpr, devices)
    return sorted(found.values(), key=lambda f: -f["bytes"])[:top]


def _subprograms(params: dict[str, Any]) -> list[Any]:
    found = []
    for value in params.values():
        for item in value if isinstance(value, list | tuple) else (value,):
            if hasattr(item, "eqns") or hasattr(item, "jaxpr"):
                found.append(item)
    return found
