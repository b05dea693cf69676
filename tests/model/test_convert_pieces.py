"""HF and OLMo-core -> our Orbax checkpoint, streamed: what Orbax restores, how much memory it takes, what a failure leaves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from infra.errors import IdentityError
from model import checkpoint, layout
from model.config import ModelConfig
from model.convert import pieces, stream
from model.convert.hf import export_hf
from model.convert.ours import read_tree, to_checkpoint
from model.init import init_params

# Six layers: one whole repeat of the pattern and a tail of two, grouped heads.
CFG = ModelConfig(
    d_model=32, n_layers=6, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, vocab_size=120, padded_vocab_size=128, window=8,
)  # fmt: skip
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(np.asarray, init_params(CFG))


@pytest.fixture(scope="module")
def hf(params, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("hf") / "weights"
    export_hf(params, CFG, out, context_length=64, keep_padding=True, eos_id=0, pad_id=1)
    return out


def leaves(tree):
    return {jax.tree_util.keystr(k): v for k, v in jax.tree_util.tree_leaves_with_path(tree)}


def plain_restore(directory: Path):
    """By Orbax alone: no abstract tree, no handler of ours, numpy arrays as stored."""
    with ocp.StandardCheckpointer() as reader:
        return jax.tree.map(np.asarray, reader.restore(directory.absolute()))


@pytest.mark.parametrize("slab", [pieces.SLAB_BYTES, 600])
def test_orbax_restores_the_same_bits_as_from_memory(params, hf, tmp_path, monkeypatch, slab):
    """Against the tree held in memory and written by Orbax's own handler; slabs of 600 bytes cut every matrix."""
    monkeypatch.setattr(pieces, "SLAB_BYTES", slab)
    streamed = to_checkpoint(hf, tmp_path / "streamed", 3, model=CFG)
    held = read_tree(stream.open_source(hf, CFG))
    meta = {"format": 1, "step": 3, "model": CFG.model_dump(mode="json")}
    whole = checkpoint.write_checkpoint(tmp_path / "held", 3, {"params": held, "step": np.int32(3)}, meta)
    for tree in ("params", "optimizer"):
        a, b = leaves(plain_restore(streamed / tree)), leaves(plain_restore(whole / tree))
        assert a.keys() == b.keys()
        assert all(a[k].dtype == b[k].dtype and np.array_equal(a[k], b[k]) for k in a), tree
        one, two = (json.loads((d / tree / "_METADATA").read_text()) for d in (streamed, whole))
        assert one == two  # the same names and types, written by Orbax
    again, cfg = checkpoint.restore_params(tmp_path / "streamed", 3)  # to jax arrays, digests checked
    assert cfg == CFG and all(jax.tree.leaves(jax.tree.map(np.array_equal, params, again)))


def test_slabs_are_whole_chunks(hf, tmp_path, monkeypatch):
    """Else each slab would read and rewrite a chunk. The stored chunk shape is read back from the files."""
    monkeypatch.setattr(pieces, "SLAB_BYTES", 600)
    path = to_checkpoint(hf, tmp_path, 0, model=CFG)
    tree = pieces.pieces_tree(CFG, lambda e: np.zeros(e.shape, np.float32))
    for name, leaf in leaves(tree).items():
        stored = stream.open_array(path / "params", name.replace("']['", ".").strip("[]'"))
        assert stored.chunk_layout.write_chunk.shape == leaf.chunks, name
        for place, slab in leaf.slabs():
            assert all(p.start % c == 0 for p, c in zip(place, leaf.chunks)) and slab.nbytes <= 600, (
                name,
                place,
            )
            assert tuple(p.stop - p.start for p in place) == slab.shape[: len(place)]
    assert layout.get(tree, ("blocks", "layer_0", "w1")).chunks == (
        1,
        4,
        32,
    )  # 600 bytes hold four rows of 32


def test_bf16_sources_and_missing_rows(params, tmp_path):
    """A published form, bf16 and trimmed: refused for training; with zeros it is the rounded weights and 8 zero rows."""
    import ml_dtypes

    out = tmp_path / "published"
    export_hf(params, CFG, out, context_length=64, dtype="bfloat16", eos_id=0, pad_id=1)
    with pytest.raises(IdentityError, match="120 of 128 vocabulary rows; 8 are missing"):
        to_checkpoint(out, tmp_path, 1, model=CFG)
    assert not list(tmp_path.glob("*step1*"))  # refused before anything is written
    to_checkpoint(out, tmp_path, 1, model=CFG, fill_missing_rows=True)
    again, _ = checkpoint.restore_params(tmp_path, 1)
    for name in ("embeddings", "lm_head"):
        assert np.array_equal(
            again[name][:120], params[name][:120].astype(ml_dtypes.bfloat16).astype(np.float32)
        )
        assert not again[name][120:].any()


def test_a_source_that_breaks_leaves_nothing_that_looks_whole(hf, tmp_path):
    """The 40th tensor fails: no step directory, nothing committed; the next try succeeds over the remains."""
    found = stream.open_source(hf, CFG)
    seen = []

    def read(e):
        seen.append(e.hf)
        if len(seen) == 40:
            raise IdentityError(f"{e.hf} is cut short")
        return found.read(e)

    with pytest.raises(IdentityError, match="is cut short"):
        to_checkpoint(found._replace(read=read), tmp_path, 2)
    assert checkpoint.committed(tmp_path).steps == () and not (tmp_path / "step2").exists()
    to_checkpoint(found, tmp_path, 2)
    assert checkpoint.committed(tmp_path).steps == (2,)
    assert checkpoint.problem(tmp_path / "step2", verify=True) is None


def test_killed_while_writing_leaves_nothing_that_looks_whole(hf, tmp_path):
    program = (
        "import os, sys\n"
        "from model.convert import stream\n"
        "from model.convert.ours import to_checkpoint\n"
        "found, n = stream.open_source(sys.argv[1]), []\n"
        "def read(e):\n"
        "    n.append(e)\n"
        "    if len(n) == 30: os.kill(os.getpid(), 9)\n"
        "    return found.read(e)\n"
        "to_checkpoint(found._replace(read=read), sys.argv[2], 7)\n"
    )
    run = child(program, hf, tmp_path)
    assert run.returncode == -9, run.stderr
    assert (tmp_path / ".writing-step7/params").parent.is_dir()  # it had begun
    assert checkpoint.committed(tmp_path).steps == () and not (tmp_path / "step7").exists()
    to_checkpoint(hf, tmp_path, 7, model=CFG)
    assert checkpoint.committed(tmp_path).steps == (7,)


def test_wrong_shapes_from_a_source_are_refused(tmp_path):
    source = stream.Source("forged", CFG, 128, lambda e: np.zeros((*e.shape[:-1], e.shape[-1] + 1)), {})
    with pytest.raises(IdentityError, match="came as"):
        to_checkpoint(source, tmp_path, 0)


def test_memory_stays_below_two_largest_tensors_and_a_gigabyte(tmp_path, peak_kb):
    """2.1 GB of weights, no tensor above 34 MB, stacks of up to 134 MB: all of it would break the bound. Own process."""
    cfg = ModelConfig(
        d_model=1024, n_layers=32, n_heads=8, n_kv_heads=8, head_dim=128, d_ff=4096, vocab_size=8192, padded_vocab_size=8192,
    )  # fmt: skip
    total = 4 * layout.count_params(cfg)
    largest = 8192 * 1024 * 4
    assert total > 2 * largest + (1 << 30) + (900 << 20)
    program = (
        "import sys\n"
        "import numpy as np\n"
        "from model.config import ModelConfig\n"
        "from model.convert.ours import to_checkpoint\n"
        "from model.convert.stream import Source\n"
        "cfg = ModelConfig.model_validate_json(sys.argv[1])\n"
        "to_checkpoint(Source('ones', cfg, cfg.padded_vocab_size, lambda e: np.ones(e.shape, np.float32), {}), sys.argv[2], 0)\n"
        "print(peak_kb())\n"
    )
    run = child(peak_kb + program, cfg.model_dump_json(), tmp_path)
    assert run.returncode == 0, run.stderr
    peak = int(run.stdout) * 1024
    assert peak <= 2 * largest + (1 << 30), f"peak {peak >> 20} MB, weights {total >> 20} MB"
    array = stream.open_array(tmp_path / "step0/params", "blocks.layer_2.w2")
    assert array.shape == (8, 1024, 4096) and (np.asarray(array[7, 1023].read().result()) == 1).all()


def child(program: str, *arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
