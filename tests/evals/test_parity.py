"""Logit, training and weight parity: rounding passes, each named fault is caught.

Weights come from OLMo-core's own init with gains and weights made distinct, so that a fault cannot cancel.
"""

import json

import numpy as np
import pytest

from evals import agreement, parity
from evals.config import ParityConfig
from infra.errors import IdentityError, ParityError, RecipeError
from model.config import ModelConfig, YarnConfig
from model.convert.hf import import_hf

torch = pytest.importorskip("torch")
pytest.importorskip("olmo_core")

V, S, W = 320, 48, 12
CFG = ParityConfig()


def config(**changes) -> ModelConfig:
    fields = {
        "d_model": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 4, "head_dim": 16, "d_ff": 96,
        "vocab_size": 300, "padded_vocab_size": V, "window": W,
    }  # fmt: skip
    return ModelConfig(**{**fields, **changes})


def prompts(rows=2, length=S) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 300, (rows, length)).astype(np.int32)


def write_reference(cfg: ModelConfig, out) -> None:
    """OLMo-core's init, weights five times larger and gains spread, exported by OLMo-core's own exporter."""
    from evals.reference.olmo_core_model import build_initialised, export_hf

    model = build_initialised(cfg, S)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.copy_(1 + 0.2 * torch.randn(p.shape, generator=generator))
            else:
                p.mul_(5)
            assert name
    export_hf(model, cfg, out, context_length=S, eos_id=0, pad_id=1)


@pytest.fixture(scope="module", params=["mha", "gqa", "yarn"])
def weights(request, tmp_path_factory):
    """(HF directory, model config) for full heads, grouped heads, and YaRN on full layers."""
    cfg = {
        "mha": config(),
        "gqa": config(n_heads=8, n_kv_heads=2, head_dim=8),
        "yarn": config(rope_scaling=YarnConfig(factor=8.0, original_context=16)),
    }[request.param]
    out = tmp_path_factory.mktemp(request.param) / "hf"
    write_reference(cfg, out)
    return out, cfg


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_same_weights_agree_to_rounding(weights, attention, tmp_path):
    hf, cfg = weights
    result = parity.logit_parity(
        hf, lambda: import_hf(hf, cfg), cfg, prompts(), CFG, attention=attention, out=tmp_path / "p.json"
    )
    parity.require(result, "import")
    assert result["top1"] == result["top5"] == 1.0
    assert [(b["from"], b["to"]) for b in result["buckets"]] == [(0, 12), (12, 24), (24, 48)]
    assert json.loads((tmp_path / "p.json").read_text())["ok"] is True


def test_transformers_equals_olmo_core_bit_for_bit(tmp_path):
    """The second half of the chain: our torch side is AI2's own model, not only transformers'."""
    from evals.reference.olmo_core_model import build_initialised, export_hf

    cfg = config()
    model = build_initialised(cfg, S)
    export_hf(model, cfg, tmp_path / "hf", context_length=S, eos_id=0, pad_id=1)
    tokens = prompts(1)
    with torch.no_grad():
        core = model(torch.from_numpy(tokens.astype(np.int64)))[0].numpy()
    assert np.abs(core - parity.hf_logits(tmp_path / "hf")(tokens)).max() <= 1e-6


@pytest.mark.parametrize(
    "change", [{"window": W - 1}, {"window": W + 1}, {"rope_theta": 10_000.0}, {"norm_eps": 1e-3}]
)
def test_wrong_field_on_one_side_is_caught_past_the_window(tmp_path, change):
    cfg = config()
    write_reference(cfg, tmp_path / "hf")
    params = import_hf(tmp_path / "hf", cfg)
    result = parity.logit_parity(tmp_path / "hf", params, config(**change), prompts(), CFG)
    assert not result["ok"]
    if change == {"window": W - 1}:  # the first W-1 positions see the same keys
        assert result["buckets"][0]["max"] <= CFG.max_logit_difference < result["buckets"][1]["max"]
        assert result["worst"]["position"] >= W - 1
    with pytest.raises(ParityError, match=r"worst at prompt \d+, position \d+"):
        parity.require(result, "this model")


def test_short_prompts_are_refused():
    with pytest.raises(RecipeError, match="do not exceed 12"):
        parity.check_prompts(prompts(1, W), config())
    with pytest.raises(RecipeError, match="do not exceed 64"):
        parity.check_prompts(prompts(1, 48), config(rope_scaling=YarnConfig(factor=8.0, original_context=64)))
    with pytest.raises(RecipeError, match="outside"):
        parity.check_prompts(np.full((1, S), V, np.int32), config())


def test_renamed_key_is_a_failed_load(tmp_path):
    """transformers would only warn and initialise the weight anew (user issue A7)."""
    from safetensors.torch import load_file, save_file

    write_reference(config(), tmp_path / "hf")
    path = tmp_path / "hf/model.safetensors"
    state = load_file(path)
    state["model.layers.0.self_attn.q_normal.weight"] = state.pop("model.layers.0.self_attn.q_norm.weight")
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(ParityError, match="q_norm"):
        parity.hf_logits(tmp_path / "hf")


def test_prompts_are_spread_over_the_held_out_tokens():
    class Index:
        n_instances = 10

        def read(self, ids):
            return np.stack([np.arange(8, dtype=np.uint32) + 100 * i for i in ids])

    found = parity.pick_prompts(Index(), ParityConfig(prompts=2, prompt_tokens=12), 8)
    assert found.tolist() == [[*range(8), *range(100, 104)], [*range(400, 408), *range(500, 504)]]
    with pytest.raises(RecipeError, match="give 10 prompts"):
        parity.pick_prompts(Index(), ParityConfig(prompts=11), 8)


# ---------------------------------------------------------------- figures


def test_figures_against_plain_float64():
    rng = np.random.default_rng(0)
    a = rng.standard_normal((30, 50)).astype(np.float32)
    b = (a + 0.1 * rng.standard_normal(a.shape)).astype(np.float32)
    found = agreement.compare_logits([(a, b)], window=8)
    p, q = (np.exp(x.astype(np.float64)) for x in (a, b))
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    kl, reverse = (p * np.log(p / q)).sum(1), (q * np.log(q / p)).sum(1)
    gap = np.abs(a.astype(np.float64) - b)
    assert found["max"] == gap.max() and found["mean"] == pytest.approx(gap.mean(), rel=1e-12)
    assert found["kl_max"] == pytest.approx(kl.max(), rel=1e-9)
    assert found["kl_mean"] == pytest.approx(kl.mean(), rel=1e-9)
    assert found["reverse_kl_mean"] == pytest.approx(reverse.mean(), rel=1e-9)
    assert found["top1"] == pytest.approx((a.argmax(1) == b.argmax(1)).mean())
    five = [set(np.argsort(x)[-5:]) == set(np.argsort(y)[-5:]) for x, y in zip(a, b)]
    assert found["top5"] == pytest.approx(np.mean(five))
    row, token = np.unravel_index(gap.argmax(), gap.shape)
    assert (found["worst"]["position"], found["worst"]["token"]) == (row, token)
    assert [b["positions"] for b in found["buckets"]] == [8, 8, 14]


def test_kl_keeps_its_digits_near_zero():
    """A difference of 1e-6 in one of two equal classes: KL = d^2/8 = 1.25e-13, far below float64's naive noise."""
    a = np.zeros((1, 2))
    found = agreement.row_figures(a, a + [[0, 1e-6]])
    assert found.kl[0] == pytest.approx(1.25e-13, rel=1e-4)
    assert agreement.row_figures(a, a).kl[0] == 0.0


def test_values_that_are_not_finite_are_named():
    a = np.zeros((3, 4), np.float32)
    b = a.copy()
    b[2, 1] = np.nan
    with pytest.raises(ParityError, match="second side gives nan at prompt 0, position 2, token 1"):
        agreement.compare_logits([(a, b)], window=2)


def test_trimmed_vocabulary_compares_the_common_rows():
    a = np.random.default_rng(0).standard_normal((4, 10)).astype(np.float32)
    found = agreement.compare_logits([(a, a[:, :8])], window=2)
    assert found["max"] == found["kl_max"] == 0.0 and found["columns"] == [10, 8]


# ---------------------------------------------------------------- training


def rows(**at) -> list[dict]:
    """Twelve plausible steps; `at` maps a key to {step: value}."""
    out = []
    for s in range(1, 13):
        row = {"step": s, "ce": 5.0 - 0.01 * s, "z_loss": 1e-3, "grad_norm": 1.0, "grad_norm_f64": 1.0,
               "lr": 1e-4 * s, "skipped": 0.0, "receipt": f"{s:064x}"}  # fmt: skip
        for key, changes in at.items():
            if s in changes:
                row[key] = changes[s]
        out.append(row)
    return out


def judge(tmp_path, ours, landmarks=(6, 12), **options):
    for name, content in (("r", rows()), ("p", ours)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in content))
    return parity.training_parity(
        tmp_path / "r.jsonl", tmp_path / "p.jsonl", CFG, landmarks, out=tmp_path / "out.json", **options
    )


def window(first, last, **add):
    """What a skip rule has seen in steps first..last of `rows()`."""
    steps = range(first, last + 1)
    return {
        "losses": [5.0 - 0.01 * s + add.get("ce", 0.0) for s in steps],
        "norms": [1.0 + add.get("norm", 0.0) for _ in steps],
    }


def test_the_skip_rule_saw_what_the_reference_logged(tmp_path):
    """The whole history, the last five steps, and the steps since a cold window."""
    for found, options in (
        ({6: window(1, 6), 12: window(1, 12)}, {"window_size": 129}),
        ({6: window(2, 6), 12: window(8, 12)}, {"window_size": 5}),
        ({6: window(1, 6), 12: window(7, 12)}, {"window_size": 129, "cold": (6,)}),
    ):
        assert judge(tmp_path, rows(), windows=found, **options)["ok"]


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (window(1, 12, ce=1e-3), "saw a CE at step 1 that is 0.001 off"),
        (window(1, 12, norm=-0.5), "saw a gradient norm at step 1"),
        (window(9, 12), "holds 4 values, the reference's 12"),
        (None, "holds no values"),
    ],
    ids=["total loss", "clipped norm", "lost on a restart", "not recorded"],
)
def test_a_skip_rule_that_saw_something_else_is_named(tmp_path, seen, said):
    """No decision differs, and every logged figure is equal."""
    result = judge(tmp_path, rows(), windows={12: seen}, window_size=129)
    assert not result["ok"] and said in result["failures"][0]


def test_equal_training_passes(tmp_path):
    result = judge(
        tmp_path, rows(ce={3: 5.0 - 0.03 + 1.5e-5}, z_loss={4: 1e-3 * (1 + 5e-6)}, grad_norm={5: 1.0005})
    )
    assert result["ok"], result["failures"]
    assert result["ce"]["step"] == 3 and result["ce"]["value"] == pytest.approx(1.5e-5)
    assert result["grad_norm_relative"] == {"value": pytest.approx(5e-4), "step": 5}
    assert result["receipts"] == {"6": True, "12": True}
    assert json.loads((tmp_path / "out.json").read_text())["ok"] is True


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ce": {7: 5.0 - 0.07 + 3e-5}}, "ce is 3e-05 at step 7"),
        ({"grad_norm": {4: 1.002}}, "grad_norm_relative is 0.002 at step 4"),
        ({"grad_norm": {1: 1.00001}}, "grad_norm_f64_relative_step1"),
        ({"z_loss": dict.fromkeys(range(1, 13), 0.0)}, "z_loss_relative is 1 at step 1"),
        ({"z_loss": {6: 1e-3 * (1 + 2e-5)}}, "z_loss_relative is 2e-05 at step 6"),
        ({"lr": {2: 2.1e-4}}, "lr_relative"),
        ({"skipped": {9: 1.0}}, "skip decisions differ at steps [9]"),
        (
            {"receipt": dict.fromkeys(range(8, 13), "0" * 64)},
            "landmarks 12; the first step that differs is 8",
        ),
        ({"ce": {5: None}}, "ce is not finite at step 5"),
    ],
)
def test_every_deviation_is_named(tmp_path, changes, said):
    result = judge(tmp_path, rows(**changes))
    assert not result["ok"] and any(said in f for f in result["failures"]), result["failures"]


def test_short_or_disordered_metrics_never_pass(tmp_path):
    result = judge(tmp_path, rows()[:8])
    assert not result["ok"] and result["receipts"]["12"] is False
    assert "the reference has 12 steps, the reproduction 8" in result["failures"]
    with pytest.raises(IdentityError, match="line 3 is step 2"):
        judge(tmp_path, [*rows()[:2], *rows()[1:]])


# ---------------------------------------------------------------- weights


def test_weights_difference_names_the_worst(tmp_path):
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    base = {f"t{i}": rng.standard_normal((40, 8)).astype(np.float32) for i in range(3)}
    a = {k: v + 0.1 for k, v in base.items()}
    b = {**a, "t1": a["t1"] + np.float32(0.001)}
    for name, tensors in (("base", base), ("a", a), ("b", b)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    found = parity.weights_difference(tmp_path / "a", tmp_path / "b", base=tmp_path / "base")
    assert found["worst"]["name"] == "t1" and not found["equal"]
    gap = np.linalg.norm((a["t1"].astype(np.float64) - b["t1"]).ravel())
    assert found["worst"]["relative"] == pytest.approx(
        gap / np.linalg.norm(a["t1"].astype(np.float64)), rel=1e-12
    )
    assert found["worst_of_way"]["of_way"] == pytest.approx(0.01, rel=1e-3)
    assert parity.weights_difference(tmp_path / "a", tmp_path / "a")["equal"]
