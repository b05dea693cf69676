"""OLMo-core's checkpoints, read without torch: equal to OLMo-core's own reader, safe, and continued in JAX."""

import json
import pickle
from pathlib import Path

import jax
import numpy as np
import pytest

from data.config import DataConfig
from evals.reference import trainer
from evals.reference.runner import write_spec
from evals.reference.spec import ReferenceSpec
from infra.errors import IdentityError
from model import layout
from model.config import (
    HistoryConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    NumericsConfig,
    OptimizerConfig,
    ScheduleConfig,
    SchedulePart,
    TrainConfig,
    YarnConfig,
)
from model.convert import dcp, olmo_core
from model.convert.described import olmo_core_model
from model.convert.hf import export_hf, import_hf
from model.convert.names import entries
from model.convert.safetensors_io import Tensors

torch = pytest.importorskip("torch")
pytest.importorskip("olmo_core")

V, S, B = 256, 32, 4
MODEL = ModelConfig(
    d_model=32, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=64, window=8, vocab_size=250, padded_vocab_size=V
)  # fmt: skip
SCHEDULE = ScheduleConfig(parts=(SchedulePart(kind="cosine", peak=3e-3, warmup=2, horizon=10),))


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> tuple[Path, ReferenceSpec]:
    """Six steps of OLMo-core on a grouped-head model, checkpoints at 0, 3 and 6, in a run directory."""
    run = tmp_path_factory.mktemp("run")
    write_tokens(run)
    spec = ReferenceSpec(
        model=MODEL, optimizer=OptimizerConfig(), schedule=SCHEDULE, loss=LossConfig(),
        history=HistoryConfig(adam_count_at_start=1),
        token_files=(str(run / "tokens/train/synthetic/00000.npy"),), vocab_size=250, eos_id=0, pad_id=1,
        sequence_length=S, global_batch_instances=B, seed=7, steps=6, landmarks=(3, 6), threads=1,
        micro_batch_instances=4, out=str(run / "reference"),
    )  # fmt: skip
    assert trainer.main(["--spec", str(write_spec(spec))]) == 0
    return run, spec


def write_tokens(run: Path) -> None:
    """tokens/train with its manifest, and the order of 60 instances."""
    from data.index import InstanceIndex
    from data.order import write_order
    from data.token_files import full_digest, sample_digest

    path = run / "tokens/train/synthetic/00000.npy"
    path.parent.mkdir(parents=True)
    np.random.default_rng(0).integers(0, 250, S * 60 + 3, dtype=np.uint32).astype("<u4").tofile(path)
    shard = {
        "path": "synthetic/00000.npy", "label": "synthetic", "tokens": S * 60 + 3, "bytes": path.stat().st_size,
        "sha256": full_digest(path), "sample_sha256": sample_digest(path), "min_id": 0, "max_id": 249,
    }  # fmt: skip
    (run / "tokens/train/manifest.json").write_text(
        json.dumps({"format": "olmo3-tokens-v1", "shards": [shard], "tokenizer": {"vocab_size": 100278}})
    )
    (run / "tokens/train/mix.txt").write_text("synthetic,synthetic/00000.npy\n")
    index = InstanceIndex.from_manifest(run / "tokens/train", S)
    write_order(run / "order", index.n_instances, seed=7, index_digest=index.digest)


def step_dir(run: Path, step: int) -> Path:
    return run / f"reference/checkpoints/step{step}"


def test_every_tensor_and_value_equals_olmo_cores_own_reader(reference):
    from olmo_core.distributed.checkpoint import load_state_dict

    run, _ = reference
    ours = dcp.Checkpoint(step_dir(run, 6))
    theirs = {n: torch.zeros(t.shape) for n, t in ours.tensors.items()}
    values = dict.fromkeys(ours.values())
    load_state_dict(str(step_dir(run, 6) / "model_and_optim"), theirs)
    assert len(theirs) == 47 * 4 and len(values) == 47 * 5  # sheet 7.1: 423 keys for four layers
    for name, tensor in theirs.items():
        assert np.array_equal(ours.read(name), tensor.numpy()), name
    assert ours.value("optim.param_groups.embeddings.weight.weight_decay") == 0.0
    assert ours.value("optim.param_groups.lm_head.w_out.weight.betas") == (0.9, 0.95)


def test_to_hf_equals_olmo_cores_own_exporter(reference, tmp_path):
    """OLMo-core -> ours -> HF against OLMo-core's exporter, tensor by tensor, bit for bit."""
    run, _ = reference
    params = olmo_core.read_params(step_dir(run, 6), MODEL)
    export_hf(params, MODEL, tmp_path / "hf", context_length=S, keep_padding=True, eos_id=0, pad_id=1)
    ours, theirs = Tensors(tmp_path / "hf"), Tensors(run / "reference/hf/step6")
    assert ours.names() == theirs.names()
    for name in ours.names():
        assert np.array_equal(ours.read(name), theirs.read(name)), name
    again = import_hf(tmp_path / "hf", MODEL)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, params, again)))


def test_optimizer_state_is_carried(reference):
    run, _ = reference
    state = olmo_core.read_state(step_dir(run, 6), MODEL, OptimizerConfig(), 6)
    assert float(state["opt"]["count"]) == 7.0  # six steps, and one from the step-0 checkpoint
    moments = torch.distributed.checkpoint.FileSystemReader(str(step_dir(run, 6) / "model_and_optim"))
    assert moments.read_metadata()
    raw = dcp.Checkpoint(step_dir(run, 6))
    for e in entries(MODEL):
        leaf = layout.get(state["opt"]["v"], e.path)
        assert np.array_equal(
            leaf if e.index is None else leaf[e.index], raw.read(f"optim.state.{e.olmo_core}.exp_avg_sq")
        )


def test_a_streamed_state_restores_to_the_same_bits(reference, tmp_path):
    """Weights, both moments, counter and window, read while Orbax writes, against the state held in memory."""
    import orbax.checkpoint as ocp

    from model.checkpoint import write_checkpoint
    from model.convert import pieces

    run, _ = reference
    trees = []
    for streamed in (False, True):
        state = olmo_core.read_state(step_dir(run, 6), MODEL, OptimizerConfig(), 6, streamed=streamed)
        is_piece = [isinstance(x, pieces.Pieces) for x in jax.tree.leaves(state)]
        assert any(is_piece) == streamed
        writer = pieces.writer() if streamed else None
        path = write_checkpoint(tmp_path / str(streamed), 6, state, {"step": 6}, checkpointer=writer)
        with ocp.StandardCheckpointer() as reader:
            trees.append({t: reader.restore((path / t).absolute()) for t in ("params", "optimizer")})
    for (name, a), (other, b) in zip(*map(jax.tree_util.tree_leaves_with_path, trees), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert name == other and a.dtype == b.dtype and np.array_equal(a, b), jax.tree_util.keystr(name)
    assert float(np.asarray(trees[1]["optimizer"]["opt"]["count"])) == 7.0


def test_step_three_of_the_reference_is_continued_in_jax(reference, tmp_path):
    """Adopt step 3, train to 6 in JAX: CE, norm and receipts follow OLMo-core; so the moments are in place."""
    from model.train import Trainer, TrainSpec

    run, _spec = reference
    train = TrainSpec(
        run, DataConfig(sequence_length=S, global_batch_instances=B, seed=7), MODEL, OptimizerConfig(), SCHEDULE,
        LossConfig(), HistoryConfig(adam_count_at_start=1), NumericsConfig(), MeshConfig(), TrainConfig(steps=6, landmarks=(3, 6)),
    )  # fmt: skip
    olmo_core.adopt(train, step_dir(run, 3), 3)
    (run / "train").mkdir()
    theirs = trainer.read_rows(run / "reference")
    (run / "train/metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in theirs[:3]))
    Trainer(train).run()
    ours = [json.loads(line) for line in (run / "train/metrics.jsonl").read_text().splitlines()]
    for a, b in zip(theirs[3:], ours[3:], strict=True):
        assert a["receipt"] == b["receipt"] and a["step"] == b["step"]
        assert abs(a["ce"] - b["ce"]) <= 5e-6, a["step"]
        assert abs(a["grad_norm_f64"] / b["grad_norm"] - 1) <= 1e-5, a["step"]


@pytest.mark.parametrize("yarn", [None, YarnConfig(factor=8.0, original_context=64)])
def test_model_config_is_read_back(tmp_path, yarn):
    from evals.reference.olmo_core_model import olmo_core_config

    cfg = MODEL.model_copy(update={"rope_scaling": yarn, "vocab_size": V})
    (tmp_path / "config.json").write_text(json.dumps({"model": olmo_core_config(cfg).as_config_dict()}))
    assert olmo_core_model(tmp_path) == cfg
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["model"]["block"]["name"] = "default"
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(IdentityError, match=r"block\.name is 'default', not 'reordered_norm'"):
        olmo_core_model(tmp_path)


def test_wrong_model_is_named(reference):
    run, _ = reference
    with pytest.raises(IdentityError, match=r"missing model.blocks.4.attention.k_norm"):
        olmo_core.read_params(step_dir(run, 3), MODEL.model_copy(update={"n_layers": 5}))
    with pytest.raises(IdentityError, match=r"unexpected model.blocks.3"):
        olmo_core.read_params(step_dir(run, 3), MODEL.model_copy(update={"n_layers": 3}))
    with pytest.raises(IdentityError, match=r"w1.weight.* has shape \(64, 32\), expected \(96, 32\)"):
        olmo_core.read_params(step_dir(run, 3), MODEL.model_copy(update={"d_ff": 96}))


# ---------------------------------------------------------------- several chunks, and hostile files


def forged(
    folder: Path, size=(4, 3), chunks=(((0, 0), (2, 3)), ((2, 0), (2, 3))), path="__0_0.distcp"
) -> Path:
    """A checkpoint of one tensor `t` = 0..11 stored in `chunks`, written by torch's own classes."""
    from olmo_core.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint import metadata as m

    folder.mkdir(parents=True, exist_ok=True)
    whole = torch.arange(12.0).reshape(4, 3)
    places = {}
    with (folder / "__0_0.distcp").open("wb") as f:
        for i, (offset, sizes) in enumerate(chunks):
            start = f.tell()
            piece = whole[tuple(slice(o, o + s) for o, s in zip(offset, sizes))].clone()
            torch.save(piece, f)
            key = m.MetadataIndex("t", torch.Size(offset), i)
            places[key] = _StorageInfo(path, start, f.tell() - start)
    entry = m.TensorStorageMetadata(
        m.TensorProperties(dtype=torch.float32), torch.Size(size),
        [m.ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in chunks],
    )  # fmt: skip
    (folder / ".metadata").write_bytes(pickle.dumps(m.Metadata({"t": entry}, storage_data=places)))
    return folder


def test_chunks_are_put_together(tmp_path):
    found = dcp.Checkpoint(forged(tmp_path)).read("t")
    assert found.tolist() == np.arange(12.0).reshape(4, 3).tolist()
    quarters = [((0, 0), (2, 2)), ((0, 2), (2, 1)), ((2, 0), (2, 2)), ((2, 2), (2, 1))]
    found = dcp.Checkpoint(forged(tmp_path / "q", chunks=quarters)).read("t")
    assert found.tolist() == np.arange(12.0).reshape(4, 3).tolist()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"path": "../__0_0.distcp"}, "points outside its directory"),
        ({"path": "/etc/passwd"}, "points outside its directory"),
        ({"path": "absent.distcp"}, "does not exist"),
        ({"size": (5, 3)}, "do not cover"),
        ({"size": (10**12, 10**6)}, "do not cover"),
        ({"chunks": (((0, 0), (3, 3)), ((2, 0), (1, 3)))}, "overlap"),
        ({"chunks": (((0, 0), (4, 3)), ((2, 0), (2, 3)))}, "do not cover"),
        ({"size": (3, 3), "chunks": (((0, 0), (2, 3)), ((2, 0), (2, 3)))}, "outside the shape"),
    ],
)
def test_hostile_tables_are_refused(tmp_path, changes, said):
    with pytest.raises(IdentityError, match=said):
        dcp.Checkpoint(forged(tmp_path, **changes))


class Bomb:
    """Pickles to a call of os.system."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        import os

        return os.system, (self.command,)


def test_code_in_a_pickle_never_runs(tmp_path):
    forged(tmp_path)
    mark = tmp_path / "ran"
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"x": Bomb(f"touch {mark}")}))
    with pytest.raises(IdentityError, match=r"asks for (posix|os)\.system"):
        dcp.Checkpoint(tmp_path)
    assert not mark.exists()


def test_code_in_a_tensor_never_runs(tmp_path):
    forged(tmp_path)
    mark = tmp_path / "ran"
    buffer = tmp_path / "__0_0.distcp"
    sizes = buffer.stat().st_size
    torch.save(Bomb(f"touch {mark}"), tmp_path / "bomb")
    blob = (tmp_path / "bomb").read_bytes()
    assert len(blob) <= sizes
    table = pickle.loads((tmp_path / ".metadata").read_bytes())
    for info in table.storage_data.values():
        info.offset, info.length = 0, len(blob)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(table))
    buffer.write_bytes(blob)
    with pytest.raises(IdentityError, match=r"asks for (posix|os)\.system"):
        dcp.Checkpoint(tmp_path).read("t")
    assert not mark.exists()


def test_cut_file_and_swapped_bytes_are_refused(tmp_path):
    forged(tmp_path)
    path = tmp_path / "__0_0.distcp"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(IdentityError, match="cut short"):
        dcp.Checkpoint(tmp_path)
    path.write_bytes(b"\0" * len(whole))
    with pytest.raises(IdentityError, match="no torch archive"):
        dcp.Checkpoint(tmp_path).read("t")
    (tmp_path / ".metadata").write_bytes(b"\x80\x04nonsense")
    with pytest.raises(IdentityError, match="cannot be read"):
        dcp.Checkpoint(tmp_path)
