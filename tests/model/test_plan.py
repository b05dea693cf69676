"""The plan: a small step compiled by XLA:TPU for a slice that exists; NOT FIT, refusals, cache, sweep.

Each compile here is one layer kind over 256 tokens (about 8 CPU seconds); the full-size ones are `make plan`.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from infra.artifacts import sealed
from infra.errors import RecipeError
from infra.topology import parse
from model import plan
from model.config import (
    LayerKind,
    LossConfig,
    MeshConfig,
    ModelConfig,
    NumericsConfig,
    OptimizerConfig,
    TrainConfig,
)
from model.layout import count_params
from model.sharding import check_batch

SMALL = ModelConfig(d_model=256, n_layers=4, n_heads=2, n_kv_heads=2, head_dim=128, d_ff=512, window=128, vocab_size=1024,
                    padded_vocab_size=1024, layer_pattern=(LayerKind.FULL,))  # fmt: skip
REQUEST = plan.PlanRequest(SMALL, OptimizerConfig(), LossConfig(), NumericsConfig(mode="mixed"), MeshConfig(),
                           TrainConfig(steps=1000), 256, 8)  # fmt: skip
SLICE = parse("v5e:2x2")
WORKER = """
import json, sys
from tests_plan import REQUEST, SLICE, SMALL, plan
import dataclasses
small = plan.make_plan(REQUEST, SLICE, price_per_chip_hour=1.2, cache=plan.Path(sys.argv[1]))
wide = SMALL.model_copy(update={"vocab_size": 8_000_000, "padded_vocab_size": 8_000_000})
large = plan.make_plan(dataclasses.replace(REQUEST, model=wide), SLICE)
print(json.dumps([small, large]))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """(plan that fits, plan that does not, the cache directory), made in a process of its own: libtpu stays out of this one."""
    where = tmp_path_factory.mktemp("plan")
    (where / "tests_plan.py").write_text(Path(__file__).read_text())
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": f"{where}:{Path(__file__).resolve().parents[2]}",
    }
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(where / "cache")], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    small, large = json.loads(done.stdout.strip().split("\n")[-1])
    return small, large, where / "cache"


def test_splash_attention_is_in_the_compiled_program(compiled):
    """One kernel forward and one (fused) backward; the loop over layers holds them once."""
    small = compiled[0]
    assert small["splash_calls_compiled"] == small["splash_calls"] == 2


def test_memory_is_the_state_split_over_the_devices(compiled):
    """fp32 weights and two moments over 4 devices, within 2%: gains, window and batch are whole or small."""
    small = compiled[0]
    assert small["fits"] and small["devices"] == 4 and small["mesh"] == {"data": 1, "fsdp": 4, "tensor": 1}
    assert small["argument_bytes"] == pytest.approx(12 * count_params(SMALL) / 4, rel=0.02)
    assert small["argument_bytes"] < small["bytes_per_device"] < small["memory_per_device"] == 16 * 2**30
    assert small["alias_bytes"] == pytest.approx(small["argument_bytes"], rel=0.01)  # donated


def test_figures_of_the_plan(compiled):
    """By hand: 6 FLOPs per weight and token, 197 TFLOP/s per chip, four chips, 1.2 USD per chip and hour."""
    small = compiled[0]
    products = 4 * (4 * 256 * 256 + 3 * 256 * 512) + 256 * 1024
    assert small["model_flops"] == pytest.approx(
        6 * products * 2048 + 3 * 4 * 4 * 256 * 128.5 * 2048, rel=1e-12
    )
    assert small["roofline"]["compute"] == pytest.approx(small["model_flops"] / (4 * 197e12), rel=1e-12)
    assert small["traced_over_formula"] == pytest.approx(1, abs=0.02)
    assert small["price"] == pytest.approx(small["days"] * 24 * 4 * 1.2)
    assert small["days"] == pytest.approx(small["step_seconds"] * 1000 / 86400)
    assert "fits" in plan.text(small, 1000) and "NOT FIT" not in plan.text(small, 1000)


def test_a_step_that_does_not_fit_names_its_largest_buffers(compiled):
    large = compiled[1]
    assert not large["fits"] and not large["compiled"]
    shown = plan.text(large, 1000)
    assert "NOT FIT" in shown and "exceeds available HBM" in shown
    first = large["largest_arrays"][
        0
    ]  # bf16 logits of one slice of 512 tokens over 8 million classes, or as large
    assert "8000000" in first["array"] and first["bytes"] == 512 * 8_000_000 * 2
    assert "model/" in first["where"] and first["where"] in shown


def test_the_same_request_is_not_compiled_twice(compiled, monkeypatch):
    small, _, cache = compiled
    monkeypatch.setattr(plan, "compile_step", lambda *a: pytest.fail("compiled again"))
    again = plan.make_plan(REQUEST, SLICE, price_per_chip_hour=2.4, cache=cache)
    assert again["price"] == pytest.approx(2 * small["price"])
    assert {k: v for k, v in again.items() if k != "price"} == {
        k: v for k, v in small.items() if k != "price"
    }


def test_a_batch_that_does_not_divide_is_refused_before_compiling():
    with pytest.raises(RecipeError, match=r"6 instances .* 4 batch shards"):
        check_batch(6, 0, 4)
    with pytest.raises(RecipeError, match="micro-batch of 3"):
        check_batch(8, 3, 1)
    with pytest.raises(RecipeError, match="no mesh of 4 devices"):
        plan.sweep(dataclasses.replace(REQUEST, global_batch_instances=3), SLICE)


def test_a_sweep_ranks_what_fits_by_time_and_goes_on_after_a_refusal(monkeypatch):
    """With a stand-in compiler: `none` does not fit, tensor 2 is refused."""

    def compiler(request, slice_):
        if request.mesh.tensor == 2:
            raise RecipeError("d_model does not divide")
        fits = request.numerics.remat != "none"
        sizes = dict.fromkeys(
            ("argument_bytes", "temporary_bytes", "output_bytes", "alias_bytes", "program_bytes"), 1
        )
        return {
            "compiled": fits,
            "why": "",
            "mesh": {"data": 1, "fsdp": 4, "tensor": 1},
            "traced_matmul_flops": 1.0,
            "largest_arrays": [],
            **sizes,
        }

    monkeypatch.setattr(plan, "compile_step", compiler)
    plans, refused = plan.sweep(REQUEST, SLICE)
    assert len(refused) == 8 and all("does not divide" in why for _, why in refused)
    fits = [p["fits"] for p in plans]
    assert fits == sorted(fits, reverse=True) and set(fits) == {True, False}
    times = [p["step_seconds"] for p in plans if p["fits"]]
    assert times == sorted(times)
    assert {p["remat"] for p in plans} == {"none", "dots", "block", "full"}


def test_links_by_hand():
    """SMALL on data 2, fsdp 2, tensor 2 of eight v5e chips; block; 8 instances of 256 tokens in two micro-batches."""
    request = REQUEST.with_choice(MeshConfig(data=2, fsdp=2, tensor=2), "block", 4)
    found = plan.roofline(request, parse("v5e:2x4"), {"data": 2, "fsdp": 2, "tensor": 2}, 1.0, 1_000_000)
    by_fsdp = 500_000 * (1 / 2) * (3 * 2 + 4)
    by_data = 2 * (1 / 2) * 250_000 * 4
    one_all_reduce = 2 * (1 / 2) * 256 * 256 * 2  # one instance of 256 tokens on each batch shard, bf16
    by_tensor = 4 * 6 * one_all_reduce  # four layers, six each
    assert found["links"] == pytest.approx(2 * (by_fsdp + by_data + by_tensor) / 200e9)
    alone = plan.roofline(request, SLICE, {"data": 1, "fsdp": 4, "tensor": 1}, 1.0, 1_000_000)
    assert alone["links"] == pytest.approx(2 * 1_000_000 * (3 / 4) * 10 / 200e9)


def one_cpu(monkeypatch):
    """compile_step with this process's CPU in the place of libtpu's devices."""
    import jax
    from jax.experimental import topologies

    monkeypatch.setattr(plan, "QUIET_LIBTPU", {})
    one = SimpleNamespace(devices=jax.devices()[:1])
    monkeypatch.setattr(topologies, "get_topology_desc", lambda **options: one)


def test_a_step_without_the_kernel_is_no_plan(monkeypatch):
    one_cpu(monkeypatch)
    request = dataclasses.replace(REQUEST, numerics=NumericsConfig(attention="xla"))
    with pytest.raises(RecipeError, match="no splash attention kernel"):
        plan.compile_step(request, parse("v5e:1x1"))


def test_devices_that_are_not_those_of_the_slice_are_named(monkeypatch):
    one_cpu(monkeypatch)
    with pytest.raises(RecipeError, match="gives v5e:2x2 1 devices, the table 4"):
        plan.compile_step(REQUEST, SLICE)


@pytest.mark.parametrize("damage", ["{}", "no JSON", '{"compiled": true, "mesh": 3}', "[" * 100_000])
def test_a_damaged_cached_plan_is_compiled_again(damage, tmp_path, capsys):
    (tmp_path / "plan.json").write_text(damage)
    assert plan.read_compiled(tmp_path / "plan.json") is None
    assert "is damaged: the step is compiled again" in capsys.readouterr().err
    assert plan.read_compiled(tmp_path / "none.json") is None


def test_a_changed_number_in_a_cached_plan_is_noticed(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(sealed({"temporary_bytes": 3862})))
    assert plan.read_compiled(path) == {"temporary_bytes": 3862}
    path.write_text(path.read_text().replace("3862", "1862"))
    assert plan.read_compiled(path) is None


def test_only_the_known_failure_is_kept_off_the_screen(capfd):
    import jax

    for text, shown in (("async-update instruction", False), ("something else", True)):
        with pytest.raises(jax.errors.JaxRuntimeError, match=text), plan.stderr_without("async-update"):
            os.write(2, b"a stack trace")
            raise jax.errors.JaxRuntimeError(text)
        assert ("a stack trace" in capfd.readouterr().err) == shown
    with plan.stderr_without("async-update"):
        os.write(2, b"a warning")
    assert capfd.readouterr().err == "a warning"


SWEEP = """
import json
from tests_plan import REQUEST, SLICE, plan
plans, refused = plan.sweep(REQUEST, SLICE, plan.Range((1, 2), ("none", "block", "full"), (1, 4)))
print(json.dumps([plans, [why for _, why in refused]]))
"""


@pytest.mark.slow_proof
def test_a_sweep_with_the_real_compiler(tmp_path):
    """Nine choices by XLA:TPU: a tensor axis of 2 or none, three policies, one or four micro-batches where these divide.

    What must hold whatever the compiler does: all fit, keeping everything takes the most temporary memory, recomputing
    takes the most operations, and the first of the ranking is the fastest.
    """
    (tmp_path / "tests_plan.py").write_text(Path(__file__).read_text())
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": f"{tmp_path}:{Path(__file__).resolve().parents[2]}",
    }
    done = subprocess.run([sys.executable, "-c", SWEEP], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    plans, refused = json.loads(done.stdout.strip().split("\n")[-1])
    assert refused == [] and len(plans) == 9 and all(p["fits"] for p in plans)
    times = [p["step_seconds"] for p in plans]
    assert times == sorted(times)
    by = {(p["mesh"]["tensor"], p["remat"], p["micro_batch_instances"]): p for p in plans}
    for tensor in (1, 2):
        kept, again = by[tensor, "none", 8], by[tensor, "full", 8]
        assert kept["temporary_bytes"] > again["temporary_bytes"]
        assert (
            kept["hardware_flops"] < again["hardware_flops"] and kept["model_flops"] == again["model_flops"]
        )
    assert by[2, "none", 2]["temporary_bytes"] < by[2, "none", 8]["temporary_bytes"]
    assert all(p["splash_calls"] >= 2 for p in plans)
