"""Stage switch against OLMo-core itself: its optimizer config, its scheduler, torch's state-dict functions (O10, O11)."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infra.errors import IdentityError, RecipeError
from model import checkpoint, skip_step, stage
from model import step as step_lib
from model.config import (
    HistoryConfig,
    LossConfig,
    MeshConfig,
    NumericsConfig,
    OptimizerConfig,
    PreviousStage,
    ScheduleConfig,
    SchedulePart,
)  # fmt: skip
from model.schedule import learning_rate
from model.sharding import make_mesh
from model.train import Trainer, TrainSpec, train

OLD = OptimizerConfig(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
NEW = OptimizerConfig(betas=(0.8, 0.99), eps=1e-4, weight_decay=0.5, max_grad_norm=0.7)
FIRST = ScheduleConfig(parts=(SchedulePart(kind="cosine", peak=1e-2, warmup=2, horizon=8),))
SECOND = ScheduleConfig(parts=(SchedulePart(kind="linear", peak=5e-2, warmup=0, horizon=6, alpha_f=0.0),))


def gradient(step):
    rng = np.random.default_rng(step)
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in (("embeddings", (5, 3)), ("w", (4, 3)))}


def test_switch_follows_olmo_core():
    """Five steps, switch with other betas, eps, decay and peak, four more steps: same weights, counter and groups."""
    import torch
    import torch.distributed.checkpoint.state_dict as sd
    from olmo_core.optim import OptimGroupOverride, SkipStepAdamWConfig
    from olmo_core.optim.scheduler import LinearWithWarmup

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embeddings = torch.nn.Embedding(5, 3)
            self.w = torch.nn.Linear(3, 4, bias=False)

    def build(cfg, peak):
        model = Two()
        config = SkipStepAdamWConfig(
            lr=peak, betas=cfg.betas, eps=cfg.eps, weight_decay=cfg.weight_decay,
            group_overrides=[OptimGroupOverride(params=["embeddings.weight"], opts={"weight_decay": 0.0})],
        )  # fmt: skip
        return model, config.build(model)

    def steps(model, optimizer, cfg, rates, offset):
        for s, rate in enumerate(rates, 1):
            g = gradient(offset + s)
            norm = np.sqrt(sum((x.astype(np.float64) ** 2).sum() for x in g.values()))
            scale = np.float32(min(1.0, cfg.max_grad_norm / (norm + 1e-6)))
            for name, p in (("embeddings", model.embeddings.weight), ("w", model.w.weight)):
                p.grad = torch.tensor(g[name] * scale)
            for group in optimizer.param_groups:
                group["lr"] = rate(group)
            optimizer.latest_loss, optimizer.latest_grad_norm = torch.tensor(3.0), torch.tensor(1.0)
            optimizer.step()

    model, optimizer = build(OLD, 1e-2)
    start = {
        "embeddings": model.embeddings.weight.detach().numpy().copy(),
        "w": model.w.weight.detach().numpy().copy(),
    }
    steps(model, optimizer, OLD, [lambda _g, s=s: learning_rate(FIRST, s) for s in range(1, 6)], 0)
    options = sd.StateDictOptions(flatten_optimizer_state_dict=True)
    saved = sd.get_optimizer_state_dict(model, optimizer, options=options)
    later, second = build(NEW, 5e-2)
    later.load_state_dict(model.state_dict())
    sd.set_optimizer_state_dict(later, second, saved, options=options)
    group = second.param_groups[-1]
    scheduler = LinearWithWarmup(warmup=0, alpha_f=0.0)
    steps(
        later, second, NEW, [lambda g, s=s: scheduler.get_lr(g["initial_lr"], s, 6) for s in range(1, 5)], 5
    )

    def ours(state, cfg, schedule, count, offset):
        apply = jax.jit(functools.partial(skip_step.apply, cfg))
        for s in range(1, count + 1):
            numbers = step_lib.control(schedule, cfg, HistoryConfig(), s)
            params, opt, _ = apply(
                gradient(offset + s), state["opt"], state["params"],
                loss=jnp.float32(3.0), lr=numbers[0], lr_decay=numbers[1],
            )  # fmt: skip
            state = {"params": params, "opt": opt, "step": state["step"] + 1}
        return state

    params = {k: jnp.asarray(v) for k, v in start.items()}
    state = {"params": params, "opt": skip_step.init(OLD, params), "step": jnp.int32(0)}
    state, used, overruled = stage.enter(ours(state, OLD, FIRST, 5, 0), OLD, NEW)
    assert (used.betas, used.eps, used.weight_decay) == (group["betas"], group["eps"], group["weight_decay"])
    assert group["initial_lr"] == 5e-2 and used.max_grad_norm == 0.7  # the new peak; clipping is in no group
    assert [o.split(":")[0] for o in overruled] == ["betas", "eps", "weight_decay"]
    assert float(state["opt"]["count"]) == 5 and int(state["opt"]["window"]["seen"]) == 0
    assert int(state["step"]) == 0
    state = ours(state, used, SECOND, 4, 5)
    assert float(state["opt"]["count"]) == float(second.state[later.w.weight]["step"]) == 9  # O11
    for name, p in (("embeddings", later.embeddings), ("w", later.w)):
        np.testing.assert_allclose(state["params"][name], p.weight.detach().numpy(), rtol=2e-6, atol=2e-7)
        np.testing.assert_allclose(
            state["opt"]["v"][name], second.state[p.weight]["exp_avg_sq"].numpy(), rtol=2e-6
        )


def test_from_a_checkpoint(tmp_path, golden_cfg, golden_params):
    """What the trainer writes is enough; moments and counter are bit-equal, the new window may be of another size."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    old = step_lib.StepSpec(golden_cfg, OLD, LossConfig(), NumericsConfig(), mesh)
    state = step_lib.new_state(old, golden_params, HistoryConfig(adam_count_at_start=1))
    state["opt"]["m"] = jax.tree.map(lambda x: x + 0.5, state["opt"]["m"])
    meta = {
        "model": golden_cfg.model_dump(mode="json"),
        "identity": {"optimizer": OLD.model_dump(mode="json")},
    }
    checkpoint.write_checkpoint(tmp_path / "checkpoints", 7, {**state, "step": np.int32(7)}, meta)
    new = NEW.model_copy(update={"skip_step": NEW.skip_step.model_copy(update={"window": 16})})
    none = tmp_path / "no record"
    entry = stage.find(PreviousStage(run=str(tmp_path), step=7), new, none)
    spec = step_lib.StepSpec(golden_cfg, entry.optimizer, LossConfig(), NumericsConfig(), mesh)
    got = stage.load(entry, spec)
    for part in ("m", "v", "count"):
        assert checkpoint.state_digest(got["opt"][part]) == checkpoint.state_digest(state["opt"][part])
    assert checkpoint.state_digest(got["params"]) == checkpoint.state_digest(state["params"])
    assert entry.optimizer.weight_decay == 0.1 and got["opt"]["window"]["losses"].shape == (17,)
    later = {**state, "step": np.int32(8)}
    checkpoint.write_checkpoint(tmp_path / "checkpoints", 8, later, {"model": meta["model"]})
    with pytest.raises(IdentityError, match="which optimizer"):
        stage.find(PreviousStage(run=str(tmp_path), step=8), new, none)


def test_two_stages_through_the_trainer(make_run, tmp_path):
    """Stage two trains, is killed and goes on, also after stage one is gone; the report's record says what was overruled."""
    first, second = make_run(steps=4), make_run(steps=6)
    train(TrainSpec.from_run(first))
    path = second / "recipe.json"
    recipe = json.loads(path.read_text())
    recipe["train"].update(steps=4, enter_from={"run": str(first), "step": 4})
    recipe["optimizer"]["weight_decay"] = 0.7
    path.write_text(json.dumps(recipe))
    spec = TrainSpec.from_run(second)
    trainer = Trainer(spec)
    done, state, _ = trainer.start()
    before, _ = checkpoint.restore(
        first / "checkpoints", 4, step_lib.abstract_state(TrainSpec.from_run(first).step_spec())
    )
    assert done == 0 and float(state["opt"]["count"]) == float(before["opt"]["count"]) >= 4
    for part in ("m", "v"):
        assert checkpoint.state_digest(state["opt"][part]) == checkpoint.state_digest(before["opt"][part])
    assert checkpoint.state_digest(state["params"]) == checkpoint.state_digest(before["params"])
    train(spec)
    meta = checkpoint.read_meta(second / "checkpoints", 4)
    assert meta["identity"]["optimizer"]["weight_decay"] == 0.1 and meta["identity"]["entered_from"]
    record = json.loads((second / "train" / "entered.json").read_text())
    assert record["overruled"] == ["weight_decay: 0.7 -> 0.1"]
    first.rename(tmp_path / "gone")
    recipe["train"]["steps"] = 6
    path.write_text(json.dumps(recipe))
    assert train(TrainSpec.from_run(second))["resumed_from"] == 4
    recipe["train"]["enter_from"]["step"] = 2
    path.write_text(json.dumps(recipe))
    with pytest.raises(RecipeError, match=r"(?s)entered from step4 of .*FRESH=1"):
        train(TrainSpec.from_run(second))


def test_moments_of_another_dtype_are_refused():
    with pytest.raises(RecipeError, match=r"moments are float32, optimizer\.moments_dtype is bfloat16"):
        stage.optimizer_in_force(OLD, OptimizerConfig(moments_dtype="bfloat16"))


def test_weights_that_are_not_float32_never_become_master_weights(golden_cfg, golden_params):
    """bf16 moments exist only by name, and no dtype of the incoming weights brings them in."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    spec = step_lib.StepSpec(golden_cfg, OptimizerConfig(), LossConfig(), NumericsConfig(mode="mixed"), mesh)
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), golden_params)
    with pytest.raises(RecipeError, match="bfloat16"):
        step_lib.new_state(spec, half, HistoryConfig())
    kinds = {str(x.dtype) for x in jax.tree.leaves(step_lib.abstract_state(spec)["opt"]["m"])}
    assert kinds == {"float32"}
    with pytest.raises(ValueError, match="moments_dtype"):
        OptimizerConfig(moments_dtype="float16")
    named = OptimizerConfig(moments_dtype="bfloat16")
    assert {str(x.dtype) for x in jax.tree.leaves(skip_step.init(named, golden_params)["v"])} == {"bfloat16"}
