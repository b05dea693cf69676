"""`repro plan`: what cannot be planned is named before the compiler is even loaded."""

import pytest

from model import plan
from pipelines.cli import main

PLAN = ["plan", "olmo3_7b_stage1", "--topology"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["v5p:3x7x13"], "the topology 'v5p:3x7x13' does not exist"),
        (["v9:2x2"], "known types: v4, v5e, v5p, v6e, tpu7x"),
        (
            ["v5p:4x4x4", "--set", "train.micro_batch_instances=32"],
            "a micro-batch of 32 instances (global batch 512)",
        ),
        (["v5p:8x8x16"], "does not divide over 1024 batch shards"),
        (["v5p:4x4x4", "--set", "mesh.tensor=3"], "does not match 64 devices"),
        (["v5p:4x4x4", "--sweep", "--remats", "block,half"], "unknown policy half"),
        (["v5p:4x4x4", "--sweep", "--splits", "0"], "must be numbers from 1 on"),
        (["v5p:4x4x4", "--sweep", "--tensors", "5"], "no mesh of 64 devices divides"),
    ],
)
def test_what_cannot_be_planned_is_named(arguments, said, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(plan, "compile_step", lambda *a: pytest.fail("the compiler was called"))
    assert main([*PLAN, *arguments, "--cache", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_places_and_prices_are_checked_before_the_compiler(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(plan, "compile_step", lambda *a: pytest.fail("the compiler was called"))
    (tmp_path / "file").write_text('{"v5p": NaN}')
    file = str(tmp_path / "file")
    for flags, said in (
        (["--out", str(tmp_path)], f"--out {tmp_path} is no place"),
        (["--cache", file], "--cache"),
        (["--prices", file], "v5p is 'nan'"),
    ):
        assert main([*PLAN, "v5p:4x4x4", "--cache", str(tmp_path / "cache"), *flags]) == 2
        assert said in capsys.readouterr().err


def test_a_sweep_tries_what_it_is_told(monkeypatch, tmp_path, capsys):
    tried = []

    def compiler(request, slice_):
        tried.append((request.mesh.tensor, request.numerics.remat, request.train.micro_batch_instances))
        return {"compiled": False, "why": "too large", "mesh": {"data": 1, "fsdp": 64, "tensor": 1},
                "traced_matmul_flops": 1.0, "largest_arrays": [{"bytes": 2**34, "array": "bf16[8,8192]", "made_by": "scan",
                "where": "model/olmo3.py:1"}], "compile_seconds": 1.0, "compile_cpu_seconds": 1.0}  # fmt: skip

    monkeypatch.setattr(plan, "compile_step", compiler)
    flags = [
        "--sweep",
        "--tensors",
        "1",
        "--remats",
        "block,full",
        "--splits",
        "1,2",
        "--cache",
        str(tmp_path),
    ]
    assert main([*PLAN, "v5p:4x4x4", *flags]) == 1  # nothing fits
    assert tried == [(1, "block", 0), (1, "block", 256), (1, "full", 0), (1, "full", 256)]
    shown = capsys.readouterr().out
    assert shown.count("NOT FIT") == 4 and "16.00 GiB  bf16[8,8192]  scan at model/olmo3.py:1" in shown
