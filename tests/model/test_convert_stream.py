"""Streaming conversion: equal to the plain exporter, resumable, atomic, bounded memory, honest about padding."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from infra.errors import IdentityError, LeaseError
from model import checkpoint
from model.config import ModelConfig, YarnConfig
from model.convert import stream
from model.convert.described import hf_model
from model.convert.hf import export_hf, import_hf
from model.convert.names import entries
from model.convert.safetensors_io import Tensors
from model.init import init_params

CFG = ModelConfig(
    d_model=32, n_layers=6, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, vocab_size=120, padded_vocab_size=128,
    window=8, rope_scaling=YarnConfig(),
)  # fmt: skip


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(np.asarray, init_params(CFG))


@pytest.fixture(scope="module")
def ours(params, tmp_path_factory) -> Path:
    """One of our checkpoints, step 5."""
    root = tmp_path_factory.mktemp("ours") / "checkpoints"
    meta = {"format": 1, "step": 5, "model": CFG.model_dump(mode="json")}
    return checkpoint.write_checkpoint(root, 5, {"params": params, "step": np.int32(5)}, meta)


def equal(a: Path, b: Path) -> bool:
    x, y = Tensors(a), Tensors(b)
    return x.names() == y.names() and all(
        x.read(n).dtype == y.read(n).dtype and np.array_equal(x.read(n), y.read(n)) for n in x.names()
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("keep", [True, False])
def test_equals_the_plain_exporter(params, ours, tmp_path, dtype, keep):
    export_hf(
        params, CFG, tmp_path / "plain", context_length=64, dtype=dtype, keep_padding=keep, eos_id=0, pad_id=1
    )
    stream.convert(
        ours, tmp_path / "streamed", dtype=dtype, keep_padding=keep, context_length=64, eos_id=0, pad_id=1,
        max_file_bytes=20_000,
    )  # fmt: skip
    assert len(list((tmp_path / "streamed").glob("*.safetensors"))) > 3
    assert equal(tmp_path / "plain", tmp_path / "streamed")
    for name in ("config.json", "generation_config.json"):
        a, b = (json.loads((tmp_path / d / name).read_text()) for d in ("plain", "streamed"))
        assert a == b


def test_round_trip_is_bit_equal(params, ours, tmp_path):
    """Ours -> HF -> ours, and HF -> HF."""
    stream.convert(ours, tmp_path / "a", dtype="float32", keep_padding=True, max_file_bytes=30_000)
    again = import_hf(tmp_path / "a", CFG)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, params, again)))
    stream.convert(tmp_path / "a", tmp_path / "b", model=CFG, dtype="float32", keep_padding=True)
    assert equal(tmp_path / "a", tmp_path / "b")


def test_hf_to_ours_and_back(params, ours, tmp_path):
    """HF -> Orbax keeps every bit, and the checkpoint describes itself (user issue B1)."""
    from model.convert.ours import to_checkpoint

    stream.convert(ours, tmp_path / "hf", dtype="float32", keep_padding=True, max_file_bytes=30_000)
    to_checkpoint(tmp_path / "hf", tmp_path / "checkpoints", 3, model=CFG)
    again, cfg = checkpoint.restore_params(tmp_path / "checkpoints", 3)
    assert cfg == CFG and all(jax.tree.leaves(jax.tree.map(np.array_equal, params, again)))
    stream.convert(ours, tmp_path / "trimmed", dtype="float32")
    with pytest.raises(IdentityError, match="120 of 128 vocabulary rows; 8 are missing"):
        to_checkpoint(tmp_path / "trimmed", tmp_path / "checkpoints", 4, model=CFG)
    to_checkpoint(tmp_path / "trimmed", tmp_path / "checkpoints", 4, model=CFG, fill_missing_rows=True)
    assert checkpoint.read_meta(tmp_path / "checkpoints", 4)["missing_vocab_rows"] == 8


def test_interrupted_conversion_goes_on_and_leaves_nothing_whole(ours, tmp_path, monkeypatch):
    out, written = tmp_path / "hf", []
    real = stream.write_file

    def dies_at_third(target, *rest):
        if len(written) == 2:
            target.with_name(target.name + ".tmp").write_bytes(b"half")
            raise KeyboardInterrupt
        written.append(target.name)
        real(target, *rest)

    monkeypatch.setattr(stream, "write_file", dies_at_third)
    with pytest.raises(KeyboardInterrupt):
        stream.convert(ours, out, dtype="float32", max_file_bytes=20_000)
    assert not out.exists() and not (tmp_path / "hf.partial/config.json").exists()
    again = []
    monkeypatch.setattr(
        stream, "write_file", lambda target, *rest: (again.append(target.name), real(target, *rest))
    )
    stream.convert(ours, out, dtype="float32", max_file_bytes=20_000)
    assert not set(again) & set(written) and not (tmp_path / "hf.partial").exists()
    monkeypatch.setattr(stream, "write_file", real)
    stream.convert(ours, tmp_path / "straight", dtype="float32", max_file_bytes=20_000)
    assert equal(out, tmp_path / "straight") and not list(out.glob("*.tmp"))


def test_another_plan_never_continues_old_files(ours, tmp_path, monkeypatch):
    """fp32 leftovers must not end up in a bf16 directory."""
    (tmp_path / "hf.partial").mkdir()
    (tmp_path / "hf.partial/plan.json").write_text("{}")
    (tmp_path / "hf.partial/model.safetensors").write_bytes(b"x")
    stream.convert(ours, tmp_path / "hf", dtype="bfloat16")
    assert Tensors(tmp_path / "hf").dtype("lm_head.weight") == "BF16"


def test_a_source_replaced_in_between_is_not_mixed(ours, params, tmp_path, monkeypatch):
    """The same header and size, other weights: half of each would be no model at all."""
    first, second, src = (tmp_path / n for n in ("first", "second", "src"))
    stream.convert(ours, first, dtype="float32", keep_padding=True)
    export_hf(jax.tree.map(lambda w: w + 1, params), CFG, second, context_length=64, keep_padding=True)
    shutil.copytree(first, src)
    real, calls = stream.write_file, []

    def dies_at_third(*args):
        calls.append(args[0].name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        real(*args)

    monkeypatch.setattr(stream, "write_file", dies_at_third)
    with pytest.raises(KeyboardInterrupt):
        stream.convert(src, tmp_path / "hf", dtype="float32", keep_padding=True, max_file_bytes=20_000)
    shutil.copy(second / "model.safetensors", src)
    stream.convert(src, tmp_path / "hf", dtype="float32", keep_padding=True, max_file_bytes=20_000)
    assert equal(tmp_path / "hf", second)


def test_a_source_written_while_it_is_read_is_refused(ours, tmp_path, monkeypatch):
    stream.convert(ours, tmp_path / "src", dtype="float32", keep_padding=True)
    weights = tmp_path / "src/model.safetensors"
    monkeypatch.setattr(stream, "write_files", lambda *a: (weights.write_bytes(weights.read_bytes()), 0)[1])
    with pytest.raises(IdentityError, match="changed while it was read"):
        stream.convert(tmp_path / "src", tmp_path / "hf", dtype="float32", keep_padding=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]


def test_a_flipped_bit_in_our_weights_is_refused(ours, tmp_path):
    """Only the weights are held to their digests: the moments are not read."""
    for part, refused in (("params", True), ("optimizer", False)):
        copy = tmp_path / part
        shutil.copytree(ours, copy)
        file = max((p for p in (copy / part).rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
        if refused:
            with pytest.raises(IdentityError, match=r"params/.* is corrupt: its digest differs"):
                stream.convert(copy, tmp_path / "hf")
        else:
            stream.convert(copy, tmp_path / "hf")


def test_nothing_that_stands_is_overwritten(ours, tmp_path):
    """OUT may be absent or an empty directory; anything else is kept, above all the source."""
    stream.convert(ours, tmp_path / "hf", dtype="float32", keep_padding=True)
    before = (tmp_path / "hf/model.safetensors").read_bytes()
    (tmp_path / "file").write_text("x")
    for out, said in (("hf", "is not empty"), ("file", "is a file"), ("file/out", "is a file, so")):
        with pytest.raises(IdentityError, match=said):
            stream.convert(tmp_path / "hf", tmp_path / out)
    assert (tmp_path / "hf/model.safetensors").read_bytes() == before
    assert (tmp_path / "file").read_text() == "x"
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    stream.convert(ours, tmp_path / "link")
    stream.convert(ours, tmp_path / "a/b/c")
    assert (tmp_path / "empty/config.json").is_file() and (tmp_path / "a/b/c/config.json").is_file()


def test_a_folder_that_happens_to_be_named_so_is_kept(ours, tmp_path):
    (tmp_path / "hf.partial").mkdir()
    (tmp_path / "hf.partial/notes.txt").write_text("x")
    with pytest.raises(IdentityError, match="is no interrupted conversion"):
        stream.convert(ours, tmp_path / "hf")
    assert [p.name for p in (tmp_path / "hf.partial").iterdir()] == ["notes.txt"]


def test_two_at_once_do_not_share_a_place(ours, tmp_path):
    """The second is refused while the first works, and the first is not disturbed."""

    def second(_):
        with pytest.raises(LeaseError, match=r"in use by a conversion .*\n.*another OUT"):
            stream.convert(ours, tmp_path / "hf")
        return {"first": True}

    assert stream.convert(ours, tmp_path / "hf", finish=second)["first"]
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_a_config_that_its_tensors_do_not_fit_is_refused(ours, tmp_path):
    """transformers would not load it, though each fits the model: rows trimmed in one and not in the other."""
    stream.convert(ours, tmp_path / "hf", dtype="float32")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    for changes, said in (
        ({"vocab_size": 128}, r"lm_head.weight has shape \(120, 32\), expected \(128, 32\)"),
        ({"vocab_size": 64}, "vocab_size is 64, expected 120 or 128"),
        ({"rms_norm_eps": 1e-5}, "norm_eps is 1e-05, ours 1e-06"),
    ):
        (tmp_path / "hf/config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(IdentityError, match=said):
            stream.open_source(tmp_path / "hf", CFG)


def test_missing_padding_rows_are_said(ours, tmp_path):
    stream.convert(ours, tmp_path / "trimmed", dtype="float32", context_length=64)
    assert json.loads((tmp_path / "trimmed/conversion.json").read_text())["dropped_rows"] == 8
    with pytest.raises(IdentityError, match=r"120 of 128 vocabulary rows: the 8 padding rows .* 6.5e-02 nat"):
        stream.convert(tmp_path / "trimmed", tmp_path / "x", model=CFG, keep_padding=True)
    with pytest.raises(IdentityError, match="is no checkpoint"):
        stream.convert(tmp_path, tmp_path / "x")


def test_hf_config_describes_the_model(ours, tmp_path):
    stream.convert(ours, tmp_path / "hf", dtype="float32", keep_padding=True, context_length=64)
    read = hf_model(tmp_path / "hf")
    assert read.layer_kinds == CFG.layer_kinds
    fields = {"layer_pattern", "vocab_size", "init_seed", "init_std"}
    assert read.model_dump(exclude=fields) == CFG.model_dump(exclude=fields)


def test_memory_stays_below_two_largest_tensors(tmp_path, peak_kb):
    """A sparse source of 1.4 GB with a largest tensor of 134 MB, converted in its own process."""
    cfg = ModelConfig(
        d_model=1024, n_layers=16, n_heads=8, n_kv_heads=8, head_dim=128, d_ff=4096, vocab_size=32768,
        padded_vocab_size=32768,
    )  # fmt: skip
    sparse_hf(cfg, tmp_path / "in")
    source_bytes = (tmp_path / "in/model.safetensors").stat().st_size
    assert source_bytes > 1.2e9
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from model.convert import stream\n"
        "stream.open_source(sys.argv[1])\n"
        "before = peak_kb()\n"
        "stream.convert(sys.argv[1], sys.argv[2])\n"
        "print(peak_kb() - before)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", peak_kb + program, str(tmp_path / "in"), str(tmp_path / "out")],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) * 1024 <= 2 * 32768 * 1024 * 4 + (128 << 20), (
        f"{int(run.stdout) / 1024:.0f} MB more"
    )


def sparse_hf(cfg: ModelConfig, out: Path) -> None:
    """An HF directory of zeros that takes no disk: header and a hole."""
    from model.convert.hf import hf_config

    out.mkdir()
    (out / "config.json").write_text(json.dumps(hf_config(cfg, context_length=64, keep_padding=True)))
    header, body = stream.header_of(entries(cfg), cfg.padded_vocab_size, "float32")
    with (out / "model.safetensors").open("wb") as f:
        f.write(header)
        f.truncate(len(header) + body)


def test_a_view_is_stored_as_itself_and_not_as_what_it_is_cut_from(tmp_path):
    """User issue A14: slices of arrays ten times larger must not carry their storage into checkpoint or export."""
    rng = np.random.default_rng(0)
    shapes = jax.tree.map(np.asarray, init_params(CFG))
    views = jax.tree.map(lambda x: rng.normal(size=(10, *x.shape)).astype(np.float32)[3], shapes)
    size = sum(x.nbytes for x in jax.tree.leaves(views))
    meta = {"format": 1, "step": 1, "model": CFG.model_dump(mode="json")}
    place = checkpoint.write_checkpoint(tmp_path, 1, {"params": views, "step": np.int32(1)}, meta)
    stored = sum(p.stat().st_size for p in place.rglob("*") if p.is_file())
    assert size * 0.8 < stored < size * 1.3 + 100_000, (size, stored)  # 100 kB: manifests and indexes
    export_hf(views, CFG, tmp_path / "hf", context_length=64, keep_padding=True, eos_id=0, pad_id=1)
    assert (tmp_path / "hf/model.safetensors").stat().st_size < size + 50_000
