"""Meshes on 8 host devices, in one process of its own: every mesh gives one device's loss and gradients.

The run on four devices also accumulates over micro-batches.

Tolerance: fp32 rounding, 1e-5 of the largest entry of each tensor.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from infra.errors import RecipeError
from model import sharding
from model.config import MeshConfig, olmo3_size

# Code for the host is not optimised: what is tested is how programs are partitioned.
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
NAMES = ["2", "4", "8", "2x2x2"]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}
    env["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    command = [
        sys.executable,
        str(Path(__file__).with_name("mesh_worker.py")),
        str(tmp_path_factory.mktemp("ck")),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().split("\n")[-1])


@pytest.mark.parametrize("name", NAMES)
def test_same_gradients_and_losses_as_one_device(result, name):
    case = result["cases"][name]
    assert case["gradient"] <= 1e-5
    for got, want in zip(case["log"], result["straight"]):
        assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_silently_replicated(result, name):
    """Each device holds its share of the parameters; only the small gains are whole everywhere."""
    case = result["cases"][name]
    fsdp, tensor = case["shards"]
    embedding = case["table"] / fsdp * (1 - 1 / tensor)  # the table is split over fsdp only
    assert case["held"] <= case["parameters"] / (fsdp * tensor) + embedding + case["gains"]


def test_elastic_run(result):
    """8 -> 2 -> 4 devices through checkpoints: losses and weights of the straight one-device run."""
    assert len(result["elastic"]) == len(result["straight"]) == 3
    for got, want in zip(result["elastic"], result["straight"]):
        assert got == pytest.approx(want, rel=1e-5)
    assert result["elastic weights"] <= 1e-3  # Adam turns rounding-size gradients into full steps


@pytest.mark.parametrize("name", ["1", *NAMES])
def test_the_whole_state_moves_from_8_devices_and_back(result, name):  # D3
    """Weights, moments, Adam count, window, step and receipt are bit-equal after 8 -> `name` -> 8 devices.

    Each device holds exactly its share: matrices over fsdp x tensor, the embedding table over fsdp, gains whole.
    """
    case, one = result["moved"][name], result["cases"]["2"]
    assert len(set(case["digests"])) == 1 and set(case["receipts"]) == {"ab" * 32}
    assert case["window"] == 2 and case["moment"] > 0
    fsdp, tensor = case["shards"]
    matrices = one["parameters"] - one["table"] - one["gains"]
    share = matrices / (fsdp * tensor) + one["table"] / fsdp + one["gains"]
    assert case["held"] == [3 * share + case["small"]] * 2
    assert case["devices"] == {"1": 1, "2": 2, "4": 4, "8": 8, "2x2x2": 8}[name]
    assert case["small"] == 4 * (2 * 129 + 1 + 1 + 1)


def test_sizes_that_do_not_fit_are_errors():
    assert sharding.mesh_shape(MeshConfig(data=2, fsdp=0, tensor=2), 8) == (2, 2, 2)
    with pytest.raises(RecipeError, match="does not match 8 devices"):
        sharding.mesh_shape(MeshConfig(data=3, fsdp=0), 8)
    with pytest.raises(RecipeError, match="two sizes 0"):
        sharding.mesh_shape(MeshConfig(data=0, fsdp=0), 8)


def test_a_size_may_be_auto():
    assert MeshConfig(fsdp="auto", data=2) == MeshConfig(fsdp=0, data=2)
    assert sharding.mesh_shape(MeshConfig(fsdp=2, tensor="auto"), 8) == (1, 2, 4)
    with pytest.raises(RecipeError, match="auto"):
        sharding.mesh_shape(MeshConfig(data="auto", fsdp="auto"), 8)
    with pytest.raises(ValueError, match="fsdp"):
        MeshConfig(fsdp="all")


def test_every_parameter_of_the_presets_has_a_rule():
    from jax.sharding import AbstractMesh

    mesh = AbstractMesh((1, 64, 1), sharding.AXES)
    for size in ("7B", "32B"):
        specs = sharding.param_specs(olmo3_size(size))
        wide = [
            s
            for s in jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, jax.sharding.PartitionSpec))
            if len(s) > 2
        ]
        assert wide and all("fsdp" in s for s in wide) and mesh.shape["fsdp"] == 64
