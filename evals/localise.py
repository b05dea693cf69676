"""Where two models begin to differ: every sub-block of ours, fed with the reference's own input, and the fault's name.

    found = localise(hf_dir, params, model_cfg, tokens)     # reference: transformers; ours: JAX
    print(table(found)); draw(found, "drift.png")

Because each sub-block gets the reference's input, a fault shows in its own row and nowhere else; a row's drift
is max |ours - reference| over max |reference|, and `expected` is what float32 rounding explains for it. A
drifting row is then explained: its weight is looked up among the reference's tensors (swaps, exchanged layers,
bf16 rounding), RoPE tables give back theta and scaling, and the attention core is tried with other windows.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from evals.trace import rotate, trace_hf
from model import layout
from model.config import LayerKind, ModelConfig, NumericsConfig
from model.convert.names import entries
from model.convert.safetensors_io import Tensors

EPS = 2.0**-23
# Rounding each kind of sub-block may show, in units of EPS; a product also grows with the root of its length.
ALLOWED = {
    "exact": 0.0,
    "norm": 16.0,
    "linear": 6.0,
    "table": 8.0,
    "core": 256.0,
    "product": 16.0,
    "sum": 4.0,
}
BLOCK_ALLOWED = 4096.0


class Row(NamedTuple):
    """One sub-block. `layer` -1 is outside the layers. Drift is relative to the largest reference value."""

    layer: int
    part: str
    drift: float
    expected: float
    weight: str

    @property
    def drifts(self) -> bool:
        return not self.drift <= self.expected


def localise(
    hf_dir: str | Path,
    params: Any,
    model: ModelConfig,
    tokens: np.ndarray,
    *,
    numerics: NumericsConfig | None = None,
) -> dict[str, Any]:
    """Compare our model on `params` with transformers on `hf_dir`, tokens int32[S] longer than the window.

    Returns {"ok", "first": row or None, "causes": [text], "rows": [row], "blocks": drift of each whole layer}.
    """
    top, layers = trace_hf(hf_dir, tokens)
    ours = layer_params(params, model)
    rows = outer_rows(params, model, top, tokens)
    blocks: list[Row] = []
    for i, (trace, p, kind) in enumerate(zip(layers, ours, model.layer_kinds)):  # the common ones
        rows += layer_rows(i, trace, p, model, kind)
        blocks.append(block_row(i, trace, p, model, kind, numerics or NumericsConfig()))
    rows.sort(key=lambda r: r.layer if r.part == "embedding" or r.layer >= 0 else len(layers))
    bad = [r for r in rows if r.drifts]
    causes = explain(bad, Tensors(Path(hf_dir)), params, model, layers, ours) if bad else []
    same_depth = len(layers) == model.n_layers
    if not same_depth:
        causes.insert(0, f"depth: ours has {model.n_layers} layers, the reference {len(layers)}")
    wiring = [r for r in blocks if r.drifts]
    if wiring and not bad:
        causes.append(
            f"layer {wiring[0].layer}: every sub-block agrees, but they are put together differently"
        )
    return {
        "kind": "localise",
        "ok": not bad and not wiring and same_depth,
        "first": as_dict(bad[0] if bad else wiring[0]) if bad or wiring else None,
        "causes": causes,
        "rows": [as_dict(r) for r in rows],
        "blocks": [as_dict(r) for r in blocks],
    }


def as_dict(row: Row) -> dict[str, Any]:
    """The row as JSON."""
    return {**row._asdict(), "drifts": row.drifts}


def layer_params(params: Any, model: ModelConfig) -> list[dict[str, np.ndarray]]:
    """Our weights of each layer: [{name: array}]."""
    out = []
    for i in range(model.n_layers):
        path, index = layout.layer_place(model, i)
        leaf = layout.get(params, path)
        out.append({n: np.asarray(w if index is None else w[index]) for n, w in leaf.items()})
    return out


def measure(
    layer: int, part: str, ours: Any, theirs: np.ndarray, kind: str, width: int = 1, weight: str = ""
) -> Row:
    """A row: our value against the reference's."""
    a, b = np.asarray(ours, np.float64), theirs.astype(np.float64)
    if a.shape != b.shape:
        return Row(layer, part, float("inf"), 0.0, weight)
    scale = np.abs(b).max(initial=0.0) or 1.0
    expected = ALLOWED[kind] * EPS * (np.sqrt(width) if kind == "linear" else 1.0)
    return Row(layer, part, float(np.abs(a - b).max(initial=0.0) / scale), float(expected), weight)


def outer_rows(params: Any, model: ModelConfig, top: dict[str, np.ndarray], tokens: np.ndarray) -> list[Row]:
    """Embedding, final norm, head."""
    from model.olmo3 import linear, rms_norm

    embedded = np.asarray(params["embeddings"])[tokens]
    final = rms_norm(_jax(top["final_in"]), _jax(params["final_norm"]), model.norm_eps)
    logits = linear(_jax(top["final"]), _jax(params["lm_head"]))[:, : top["logits"].shape[1]]
    return [
        measure(-1, "embedding", embedded, top["embedded"], "exact", weight="embeddings"),
        measure(-1, "final norm", final, top["final"], "norm", weight="final_norm"),
        measure(-1, "head", logits, top["logits"], "linear", model.d_model, "lm_head"),
    ]


def _jax(x: Any) -> Any:
    """A NumPy array on the default device."""
    import jax.numpy as jnp

    return jnp.asarray(x)


def layer_rows(
    i: int, t: dict[str, np.ndarray], p: dict[str, np.ndarray], model: ModelConfig, kind: LayerKind
) -> list[Row]:
    """Every sub-block of layer `i`, each on the reference's input."""
    import jax

    from model import rope
    from model.olmo3 import linear, rms_norm
    from model.olmo3 import rotate as our_rotate

    def product(name: str, source: str, target: str, weight: str) -> Row:
        y = linear(_jax(t[source]), _jax(p[weight]))
        return measure(i, name, y, t[target], "linear", p[weight].shape[1], weight)

    def norm(name: str, source: str, target: str, weight: str) -> Row:
        return measure(
            i,
            name,
            rms_norm(_jax(t[source]), _jax(p[weight]), model.norm_eps),
            t[target],
            "norm",
            weight=weight,
        )

    S, half = len(t["x"]), model.head_dim // 2
    cos, sin = rope.tables(model, kind, S)
    turned = {n: rotate(t[f"{n}_normed"], t["cos"], t["sin"]) for n in ("q", "k")}
    heads = {n: _jax(t[f"{n}_normed"].reshape(1, S, -1, model.head_dim)) for n in ("q", "k")}
    their_cos, their_sin = t["cos"][:, :half], t["sin"][:, :half]
    our_turn = {n: our_rotate(heads[n], _jax(their_cos), _jax(their_sin))[0] for n in ("q", "k")}
    activated = jax.nn.silu(_jax(t["gate"])) * _jax(t["up"])
    return [
        product("q projection", "x", "q", "w_q"),
        product("k projection", "x", "k", "w_k"),
        product("v projection", "x", "v", "w_v"),
        norm("q norm", "q", "q_normed", "q_norm"),
        norm("k norm", "k", "k_normed", "k_norm"),
        measure(i, "RoPE cos", cos, their_cos, "table"),
        measure(i, "RoPE sin", sin, their_sin, "table"),
        measure(i, "RoPE rotation q", our_turn["q"], turned["q"], "product"),
        measure(i, "RoPE rotation k", our_turn["k"], turned["k"], "product"),
        measure(i, "attention core", core(t, model, window_of(model, kind)), t["core"], "core"),
        product("attention output", "core", "attention", "w_out"),
        norm("attention norm", "attention", "attention_normed", "attention_norm"),
        measure(i, "attention residual", t["x"] + t["attention_normed"], t["middle"], "sum"),
        product("gate projection", "middle", "gate", "w1"),
        product("up projection", "middle", "up", "w3"),
        measure(i, "activation", activated, t["activated"], "product"),
        product("down projection", "activated", "mlp", "w2"),
        norm("MLP norm", "mlp", "mlp_normed", "feed_forward_norm"),
        measure(i, "MLP residual", t["middle"] + t["mlp_normed"], t["out"], "sum"),
    ]


def window_of(model: ModelConfig, kind: LayerKind) -> int | None:
    """The window of a layer; None for full attention."""
    return model.window if kind is LayerKind.SLIDING else None


def core(t: dict[str, np.ndarray], model: ModelConfig, window: int | None) -> np.ndarray:
    """Our attention core on the reference's rotated q, k and its v: [S,Q]."""
    from model.attention import attention

    q, k = (rotate(t[f"{n}_normed"], t["cos"], t["sin"])[None] for n in ("q", "k"))
    v = t["v"].reshape(1, len(t["v"]), -1, model.head_dim)
    return np.asarray(attention(_jax(q), _jax(k), _jax(v), window=window))[0].reshape(len(t["v"]), -1)


def block_row(
    i: int,
    t: dict[str, np.ndarray],
    p: dict[str, np.ndarray],
    model: ModelConfig,
    kind: LayerKind,
    numerics: NumericsConfig,
) -> Row:
    """The whole layer as the model runs it, on the reference's input."""
    import jax.numpy as jnp

    from model.olmo3 import Layer

    x = jnp.asarray(t["x"][None], jnp.float32 if numerics.mode == "fp32" else jnp.bfloat16)
    out = np.asarray(Layer(model, numerics, kind).apply({"params": p}, x, None)[0], np.float64)
    scale = np.abs(t["out"]).max() or 1.0
    unit = EPS if numerics.mode == "fp32" else 2.0**-8 / BLOCK_ALLOWED * 16
    return Row(i, "layer", float(np.abs(out - t["out"]).max() / scale), BLOCK_ALLOWED * unit, "")


# ---------------------------------------------------------------- names of faults


def explain(
    bad: list[Row],
    theirs: Tensors,
    params: Any,
    model: ModelConfig,
    layers: list[dict[str, np.ndarray]],
    ours: list[dict[str, np.ndarray]],
) -> list[str]:
    """One sentence per fault, in the order of the rows; repeated ones once."""
    found = exchanged_layers(bad, theirs, model)(ours)
    covered = {layer for pair, _ in found for layer in pair}
    causes = [text for _, text in found]
    for row in bad:
        if row.layer in covered:
            continue
        if row.weight:
            text = name_weight(row, theirs, params, model, layers, ours)
        elif row.part in ("RoPE cos", "RoPE sin"):
            text = name_rope(row.layer, layers[row.layer], model)
        elif row.part == "attention core":
            text = name_window(row.layer, layers[row.layer], model)
        else:
            text = f"layer {row.layer}: {row.part} differs by {row.drift:.2g}, expected {row.expected:.2g}"
        if text not in causes:
            causes.append(text)
    return causes


def reference_tensors(theirs: Tensors, model: ModelConfig) -> dict[tuple[int, str], str]:
    """(layer or -1, our short name) -> HF name, for every tensor the reference has."""
    out = {}
    for e in entries(model):
        layer = int(e.hf.split(".")[2]) if e.hf.startswith("model.layers.") else -1
        if e.hf in theirs.names():
            out[layer, e.path[-1]] = e.hf
    return out


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal shape and values (a cheap look at the first row before the whole)."""
    return a.shape == b.shape and np.array_equal(a[:1], b[:1]) and np.array_equal(a, b)


def exchanged_layers(
    bad: list[Row], theirs: Tensors, model: ModelConfig
) -> Callable[[list[dict[str, np.ndarray]]], list[tuple[tuple[int, int], str]]]:
    """A function of our layers that gives [((i, j), text)] for layers that hold each other's weights."""
    names = reference_tensors(theirs, model)
    suspects = sorted({r.layer for r in bad if r.weight and r.layer >= 0})

    def find(ours: list[dict[str, np.ndarray]]) -> list[tuple[tuple[int, int], str]]:
        out = []
        for a, i in enumerate(suspects):
            for j in suspects[a + 1 :]:
                pairs = ((i, j), (j, i))
                if all(same(ours[x][n], theirs.read(names[y, n])) for x, y in pairs for n in ours[x]):
                    out.append(((i, j), f"layers {i} and {j} are exchanged"))
        return out

    return find


def name_weight(
    row: Row,
    theirs: Tensors,
    params: Any,
    model: ModelConfig,
    layers: list[dict[str, np.ndarray]],
    ours: list[dict[str, np.ndarray]],
) -> str:
    """Why a row with a weight drifts: which reference tensor ours really is, or a norm's epsilon."""
    import ml_dtypes

    names = reference_tensors(theirs, model)
    where = f"layer {row.layer}: " if row.layer >= 0 else ""
    mine = np.asarray(ours[row.layer][row.weight] if row.layer >= 0 else params[row.weight])
    its = np.asarray(theirs.read(names[row.layer, row.weight]), np.float32)
    if row.layer < 0:
        mine = mine[: len(its)]
    if same(mine, its):
        if row.part.endswith("norm"):
            return f"{where}{row.part}: the gains are equal, so epsilon or the order of rounding differs ({name_epsilon(row, layers, its, model)})"
        return f"{where}{row.part}: the weights are equal, the product is not ({row.drift:.2g})"
    if same(mine, its.astype(ml_dtypes.bfloat16).astype(np.float32)):
        return f"{where}{row.weight} is the reference's rounded to bf16"
    if same(its, mine.astype(ml_dtypes.bfloat16).astype(np.float32)):
        return f"{where}the reference's {row.weight} is ours rounded to bf16"
    near = sorted(names, key=lambda key: (key[0] != row.layer, key[1] != row.weight, key))
    for layer, name in near:
        if (layer, name) == (row.layer, row.weight) or theirs.shape(names[layer, name]) != mine.shape:
            continue
        if same(mine, theirs.read(names[layer, name])):
            other = f"{name}" if layer == row.layer else f"{name} of layer {layer}"
            return swap_text(where, row, layer, name, other, theirs, names, ours)
    if mine.ndim == 2 and mine.shape == its.shape[::-1] and same(mine, np.ascontiguousarray(its.T)):
        return f"{where}{row.weight} is transposed"
    gap = np.linalg.norm((mine.astype(np.float64) - its).ravel()) / max(float(np.linalg.norm(its)), 1e-300)
    return f"{where}{row.weight} differs from the reference's by {gap:.3g} (relative L2)"


def swap_text(
    where: str,
    row: Row,
    layer: int,
    name: str,
    other: str,
    theirs: Tensors,
    names: Any,
    ours: list[dict[str, np.ndarray]],
) -> str:
    """`a and b are swapped` when both hold each other, else `a holds b`."""
    pretty = {"w1": "w1 (gate)", "w3": "w3 (up)", "w2": "w2 (down)"}
    a, b = pretty.get(row.weight, row.weight), pretty.get(name, other)
    if layer == row.layer and layer >= 0 and same(ours[layer][name], theirs.read(names[layer, row.weight])):
        first, second = sorted((a, b))
        return f"{where}{first} and {second} are swapped"
    return f"{where}{a} holds the reference's {other}"


def name_epsilon(row: Row, layers: list[dict[str, np.ndarray]], gain: np.ndarray, model: ModelConfig) -> str:
    """The epsilon that explains a norm, looked for among the usual ones."""
    from model.olmo3 import rms_norm

    part = {"q norm": ("q", "q_normed"), "k norm": ("k", "k_normed"), "attention norm": ("attention", "attention_normed"),
            "MLP norm": ("mlp", "mlp_normed")}.get(row.part)  # fmt: skip
    for eps in (1e-5, 1e-6, 1e-8, 1e-12):
        if part and eps != model.norm_eps:
            t = layers[row.layer]
            if not measure(0, "", rms_norm(_jax(t[part[0]]), _jax(gain), eps), t[part[1]], "norm").drifts:
                return f"the reference's is {eps:g}, ours {model.norm_eps:g}"
    return f"ours is {model.norm_eps:g}"


def name_rope(layer: int, t: dict[str, np.ndarray], model: ModelConfig) -> str:
    """Theta and scaling, read off the reference's table at position 1 and ours."""
    from model import rope

    kind = model.layer_kinds[layer]
    theirs = read_table(t["cos"][1], t["sin"][1], model.head_dim)
    cos, sin = rope.tables(model, kind, 2)
    mine = read_table(cos[1], sin[1], model.head_dim)
    where = f"layer {layer} ({kind} attention)"
    if abs(theirs["factor"] - mine["factor"]) > 1e-4:
        side, other = (
            ("the reference", "ours") if theirs["factor"] > mine["factor"] else ("ours", "the reference")
        )
        return (
            f"{where}: YaRN is applied by {side} and not by {other} "
            f"(attention factor {theirs['factor']:.4f} against {mine['factor']:.4f})"
        )
    if abs(theirs["theta"] / mine["theta"] - 1) > 1e-3:
        return f"rope_theta is {mine['theta']:.6g}, the reference's {theirs['theta']:.6g}, {kind} attention layers"
    return f"{where}: RoPE frequencies differ otherwise (another scaling)"


def read_table(cos: np.ndarray, sin: np.ndarray, head_dim: int) -> dict[str, float]:
    """Theta and attention factor of a table, from its row at position 1."""
    half = head_dim // 2
    factor = float(np.hypot(np.float64(cos[0]), np.float64(sin[0])))
    angle = float(np.arctan2(np.float64(sin[1]), np.float64(cos[1])))  # pair 1: the least touched by scaling
    return {"factor": factor, "theta": angle ** (-half) if angle > 0 else float("nan")}


def name_window(layer: int, t: dict[str, np.ndarray], model: ModelConfig) -> str:
    """The window that explains the reference's attention core, looked for around ours, and full attention."""
    kind = model.layer_kinds[layer]
    mine = window_of(model, kind)
    W = model.window
    for window in (W - 1, W + 1, W, None, W - 2, W + 2, W // 2, W * 2):
        if window == mine or (window is not None and window < 1):
            continue
        if not measure(layer, "", core(t, model, window), t["core"], "core").drifts:
            mine_text = "full attention" if mine is None else f"a window of {mine}"
            their_text = "full attention" if window is None else f"a window of {window}"
            off = mine is not None and window is not None and abs(mine - window) == 1
            return (
                f"{kind} attention layers: "
                + ("window off by one: " if off else "")
                + f"ours has {mine_text}, the reference {their_text}"
            )
    return f"layer {layer}: the attention core differs and no window explains it"


# ---------------------------------------------------------------- presentation


def table(found: dict[str, Any], only_drifting: bool = True) -> str:
    """The result as text."""
    lines = [f"{'layer':>5}  {'part':<20} {'drift':>9}  {'expected':>9}"]
    for r in found["rows"]:
        if r["drifts"] or not only_drifting:
            mark = "  <-- drifts" if r["drifts"] else ""
            lines.append(f"{r['layer']:>5}  {r['part']:<20} {r['drift']:>9.2e}  {r['expected']:>9.2e}{mark}")
    return "\n".join([*lines, *(f"cause: {c}" for c in found["causes"] or ["none: the models agree"])])


def draw(found: dict[str, Any], path: str | Path) -> None:
    """A picture: drift per layer and part on a logarithmic scale, with what rounding explains."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    parts = list(dict.fromkeys(r["part"] for r in found["rows"] if r["layer"] >= 0))
    for part in parts:
        rows = [r for r in found["rows"] if r["part"] == part and r["layer"] >= 0]
        bad = any(r["drifts"] for r in rows)
        axes.semilogy(
            [r["layer"] for r in rows], [max(r["drift"], 1e-9) for r in rows],
            marker="o" if bad else "", color=None if bad else "0.75", label=part if bad else None, zorder=3 if bad else 1,
        )  # fmt: skip
    blocks = found["blocks"]
    axes.semilogy(
        [b["layer"] for b in blocks], [max(b["drift"], 1e-9) for b in blocks], "k--", label="whole layer"
    )
    axes.set(xlabel="layer", ylabel="drift (relative to the largest value)", title="Drift per sub-block")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
