"""Skip-step AdamW against the sheet's goldens, OLMo-core's optimizer, and a plain NumPy re-statement (hypothesis)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model import skip_step
from model.config import OptimizerConfig, SkipStepConfig


def oracle(losses, norms, window=128, sigma=6.0):
    """Section 3.3 in NumPy: 1 = take, 0 = skip, for each call. NaN stays, as in the reference."""
    out, L, G = [], [], []
    with np.errstate(invalid="ignore"):
        for loss, norm in zip(losses, norms):
            L, G = (L + [loss])[-(window + 1) :], (G + [norm])[-(window + 1) :]
            if len(L) < max(2, window // 2):
                out.append(1)
                continue
            ok = all(x[-1] - np.mean(x[:-1]) <= sigma * np.std(x[:-1], ddof=1) for x in (L, G))
            out.append(int(ok))
    return out


@functools.lru_cache
def decider(cfg):
    def body(window, x):
        take, window = skip_step.decide(cfg, window, x[0], x[1])
        return window, take

    return jax.jit(lambda xs: jax.lax.scan(body, skip_step.empty_window(cfg), xs)[1])


def decide_all(losses, norms=None, **cfg):
    norms = np.ones(len(losses)) if norms is None else norms
    xs = np.stack([losses, norms], axis=1).astype(np.float32)
    return [int(t) for t in decider(SkipStepConfig(**cfg))(xs)]


def golden_losses(n=240):
    return np.array([3 + 0.01 * ((7 * t % 11) - 5) for t in range(n)])


@pytest.mark.parametrize("call,skipped", [(62, False), (63, False), (64, True), (65, True), (101, True)])
def test_first_possible_skip(call, skipped):
    losses = golden_losses()
    losses[call - 1] = 50.0
    taken = decide_all(losses)
    assert taken[call - 1] == (0 if skipped else 1)
    assert sum(1 - t for t in taken) == int(skipped)


def test_skipped_values_widen_the_window():
    losses = golden_losses()
    losses[100], losses[101], losses[102] = 50.0, 30.0, 30.0
    taken = decide_all(losses)
    assert taken[100:103] == [0, 1, 1]


@pytest.mark.parametrize("call,skipped", [(129, False), (130, True)])
def test_a_value_leaves_after_the_window(call, skipped):
    losses = golden_losses()
    losses[0] = 1000.0
    losses[call - 1] = 50.0
    assert decide_all(losses)[call - 1] == (0 if skipped else 1)


def test_constant_history():
    value = np.float32(3.1)
    same = np.full(100, value)
    assert decide_all(same) == [1] * 100
    above = same.copy()
    above[-1] = np.nextafter(value, np.float32(10))
    assert decide_all(above)[-1] == 0


def test_downward_spikes_never_skip():
    losses = golden_losses()
    losses[150] = -100.0
    assert decide_all(losses) == [1] * len(losses)


def test_mean_is_subtracted():  # user-issues A8: mean 2.5, std 0.01: 2.57 skipped, 2.55 not
    history = 2.5 + 0.01 * np.random.default_rng(0).standard_normal(128)
    history = 2.5 + (history - history.mean()) / history.std(ddof=1) * 0.01
    assert decide_all([*history, 2.57])[-1] == 0
    assert decide_all([*history, 2.55])[-1] == 1


def test_nan_stays_129_calls_with_the_reference_policy():  # O6
    losses = golden_losses(260)
    losses[80] = np.nan  # call 81
    taken = decide_all(losses, nan_policy="reference")
    assert [i + 1 for i, t in enumerate(taken) if not t] == list(range(81, 210))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("call", [3, 81])
def test_nan_is_exactly_one_skip_with_the_safe_policy(bad, call):  # user-issues A9
    losses = golden_losses(260)
    losses[call - 1] = bad
    taken = decide_all(losses, nan_policy="safe")
    assert [i + 1 for i, t in enumerate(taken) if not t] == [call]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.sampled_from([0, 0, 0, 0, 1, 5, 50])), min_size=60, max_size=160
    ),
    st.integers(0, 2**31),
)
def test_against_numpy(moves, seed):
    """Random walks with spikes: same decisions wherever float64 is not within rounding of the threshold."""
    noise = np.random.default_rng(seed).standard_normal((2, len(moves))) * 0.02
    losses = np.float32([3 + m / 100 + s for m, s in moves] + noise[0]).astype(np.float64)
    norms = np.float32([1 + s / 7 for _, s in moves] + noise[1]).astype(np.float64)
    padded_l, padded_n = np.resize(losses, 160), np.resize(norms, 160)
    got, want = decide_all(padded_l, padded_n, nan_policy="reference"), oracle(padded_l, padded_n)
    tight = oracle(padded_l, padded_n, sigma=6 * (1 - 1e-4)), oracle(padded_l, padded_n, sigma=6 * (1 + 1e-4))
    for g, w, a, b in zip(got, want, *tight):
        assert g == w or a != b


def run_apply(grads, losses, lr=0.01, wd=0.1, name="w", p0=1.0, cfg=None, **kw):
    cfg = cfg or OptimizerConfig(weight_decay=wd, max_grad_norm=1e9, skip_step=SkipStepConfig(**kw))
    p = {name: jnp.full((1,), p0, jnp.float32)}
    state = skip_step.init(cfg, p)
    step = jax.jit(functools.partial(skip_step.apply, cfg))
    infos = []
    for g, loss in zip(grads, losses):
        p, state, info = step(
            {name: jnp.full((1,), g, jnp.float32)}, state, p,
            loss=jnp.float32(loss), lr=jnp.float32(lr), lr_decay=jnp.float32(lr * wd),
        )  # fmt: skip
        infos.append(info)
    return float(p[name][0]), state, infos


def test_golden_trajectory():  # O8
    p, state, _ = run_apply([0.5, -0.25, 1, 0.125, -2], [3.0] * 5)
    np.testing.assert_allclose(p, 0.9720543622970581, rtol=1e-7)
    np.testing.assert_allclose(float(state["m"]["w"][0]), -0.09317000955343246, rtol=1e-6)
    np.testing.assert_allclose(float(state["v"]["w"][0]), 0.2587278187274933, rtol=1e-6)
    assert float(state["count"]) == 5


def test_golden_with_a_skip():  # O3
    losses = golden_losses(72)
    losses[69] = 50.0
    grads = [((3 * t % 7) - 3) / 4 for t in range(72)]
    p, state, infos = run_apply(grads, losses)
    assert [i for i, info in enumerate(infos) if float(info.skipped)] == [69]
    np.testing.assert_allclose(p, 0.9517742991447449, rtol=1e-6)
    np.testing.assert_allclose(float(state["m"]["w"][0]), -0.06995905190706253, rtol=1e-5)
    np.testing.assert_allclose(float(state["v"]["w"][0]), 0.2459016740322113, rtol=1e-5)
    assert float(state["count"]) == 71


@pytest.mark.parametrize("bad", [50.0, np.nan])
def test_skipped_step_changes_nothing(bad):  # user-issues A10, X5
    cfg = OptimizerConfig()
    p = {"w": jnp.arange(4.0) - 0.0, "z": jnp.full((2,), -0.0)}
    state = skip_step.init(cfg, p)
    step = jax.jit(functools.partial(skip_step.apply, cfg))
    numbers = {"lr": jnp.float32(0.01), "lr_decay": jnp.float32(0.001)}
    for t, loss in enumerate(golden_losses(70)):
        g = jax.tree.map(lambda x, t=t: jnp.sin(x + t), p)
        p, state, _ = step(g, state, p, loss=jnp.float32(loss), **numbers)
    g = jax.tree.map(lambda x: jnp.full_like(x, np.nan if np.isnan(bad) else 1.0), p)
    p2, state2, info = step(g, state, p, loss=jnp.float32(bad), **numbers)
    assert float(info.skipped) == 1
    for a, b in zip(jax.tree.leaves((p, state["m"], state["v"], state["count"])),
                    jax.tree.leaves((p2, state2["m"], state2["v"], state2["count"]))):  # fmt: skip
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_decay_on_everything_but_the_embedding():  # O7
    for name, decayed in (("embeddings", False), ("lm_head", True), ("final_norm", True)):
        p, _, _ = run_apply([0.0], [3.0], name=name)
        np.testing.assert_allclose(p, 1 - 0.001 if decayed else 1.0, rtol=1e-7)


def test_clip_adds_1e_6():  # O9: norm exactly 1: the gradient is still scaled
    cfg = OptimizerConfig(betas=(0.0, 0.95), weight_decay=0.0)
    _, state, _ = run_apply([1.0], [3.0], wd=0.0, cfg=cfg)
    assert float(state["m"]["w"][0]) == np.float32(1) / (np.float32(1) + np.float32(1e-6)) < 1


def test_window_counts_pre_clip_norm():  # O4
    norms = np.ones(80)
    norms[70] = 100.0
    taken = decide_all(golden_losses(80), norms)
    assert taken[70] == 0
    _, _, infos = run_apply([5.0], [3.0], cfg=OptimizerConfig())
    assert float(infos[0].grad_norm) == 5.0


def test_against_olmo_core_optimizer():
    """OLMo-core's own SkipStepAdamW, foreach as in the recipe, 100 calls with a spike, two parameter groups."""
    import torch
    from olmo_core.optim.adamw import SkipStepAdamW

    rng = np.random.default_rng(0)
    first = {"embeddings": rng.standard_normal((5, 3)), "w": rng.standard_normal((4, 3))}
    torch_p = {k: torch.nn.Parameter(torch.tensor(v, dtype=torch.float32)) for k, v in first.items()}
    groups = [{"params": [torch_p["embeddings"]], "weight_decay": 0.0}, {"params": [torch_p["w"]]}]
    theirs = SkipStepAdamW(groups, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    cfg = OptimizerConfig()
    p = {k: jnp.asarray(v, jnp.float32) for k, v in first.items()}
    state = skip_step.init(cfg, p)
    step = jax.jit(functools.partial(skip_step.apply, cfg))
    losses = golden_losses(100)
    losses[80] = 9.0
    for t in range(100):
        g = {k: (rng.standard_normal(v.shape) * (1 + t % 3)).astype(np.float32) for k, v in first.items()}
        norm = np.sqrt(sum((x.astype(np.float64) ** 2).sum() for x in g.values()))
        lr = 0.01 * (1 - t / 200)
        for k, q in torch_p.items():
            q.grad = torch.tensor(g[k]) * min(1.0, 1.0 / (norm + 1e-6))
        for group in theirs.param_groups:
            group["lr"] = lr
        theirs.latest_loss, theirs.latest_grad_norm = (
            torch.tensor(losses[t]).float(),
            torch.tensor(norm).float(),
        )
        theirs.step()
        p, state, info = step(
            g, state, p, loss=jnp.float32(losses[t]), lr=jnp.float32(lr), lr_decay=jnp.float32(lr * 0.1)
        )
        assert float(info.skipped) == float(theirs.step_skipped)
    for k in first:
        np.testing.assert_allclose(p[k], torch_p[k].detach().numpy(), atol=2e-6)
    assert float(state["count"]) == float(theirs.state[torch_p["w"]]["step"]) == 99


def test_optax_form_equals_apply():
    cfg = OptimizerConfig()
    opt = skip_step.skip_step_adamw(cfg)
    p = {"w": jnp.arange(4.0)}
    state, g = opt.init(p), {"w": jnp.ones(4)}
    updates, _ = opt.update(g, state, p, loss=3.0, lr=0.01)
    want, _, _ = skip_step.apply(cfg, g, skip_step.init(cfg, p), p, loss=jnp.float32(3), lr=jnp.float32(0.01),
                                 lr_decay=jnp.float32(0.001))  # fmt: skip
    np.testing.assert_allclose(optax.apply_updates(p, updates)["w"], want["w"], rtol=1e-6)


def test_moments_are_float32_unless_asked():
    p = {"w": jnp.zeros((2, 2), jnp.float32)}
    assert skip_step.init(OptimizerConfig(), p)["m"]["w"].dtype == jnp.float32
    assert skip_step.init(OptimizerConfig(moments_dtype="bfloat16"), p)["v"]["w"].dtype == jnp.bfloat16


def test_norm_is_accurate():
    """float32 norm of a million entries within 1e-6 of float64."""
    g = {"a": np.random.default_rng(0).standard_normal((1000, 1003)).astype(np.float32)}
    want = np.linalg.norm(g["a"].astype(np.float64))
    np.testing.assert_allclose(float(jax.jit(skip_step.global_norm)(g)), want, rtol=1e-6)
