"""Files from outside, damaged at random: a named error or a good result, never a stack trace, a way out, or a bomb.

Ten readers: manifest, recipe, token file, boundaries, safetensors header, checkpoint records, OLMo-core's checkpoints, foreign
configs, W&B export, results.
FUZZ_EXAMPLES inputs each (default 150 in `make test`); `FUZZ_EXAMPLES=20000 pytest tests/campaigns/test_untrusted_input.py`
tries more.
"""

import contextlib
import copy
import gzip
import io
import json
import os
import struct
import tempfile
import time
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.boundaries import MAX_LINE, boundaries
from data.config import TokenizerConfig
from data.documents import read_documents
from data.index import FORMAT, InstanceIndex
from data.token_files import TokenShard, open_tokens, verify_shard
from evals.config import EvalConfig
from evals.logged_curve import Curve, read_wandb
from evals.report.gather import compare_landmarks, landmark_results
from infra.artifacts import digest_tree, read_json
from infra.errors import DataError, IdentityError, ReproError
from model import checkpoint
from model.config import ModelConfig
from model.convert.dcp import Checkpoint, unpickle
from model.convert.described import hf_model, olmo_core_model
from model.convert.hf import hf_config
from model.convert.safetensors_io import Tensors
from pipelines.recipe import Recipe, load_recipe, validate

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "150"))
few = settings(
    max_examples=max(20, EXAMPLES // 5), deadline=None, suppress_health_check=list(HealthCheck), database=None
)
many = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)

TEXT = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["../../etc/passwd", "/etc/passwd", "a/../../b", "gs://x/y", "\0", "-1"]),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.integers(-(2**80), 2**80), st.floats(), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)


def places(tree, at=()):
    """Every path in a JSON value."""
    yield at
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inner:
        yield from places(value, (*at, key))


@st.composite
def damaged(draw, whole):
    """`whole` with up to three places replaced, removed or added to."""
    tree = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.sampled_from(list(places(tree))))
        if not at:
            return draw(JSON)
        node = tree
        for key in at[:-1]:
            node = node[key]
        how = draw(st.sampled_from(["replace", "remove", "add"]))
        if how == "replace":
            node[at[-1]] = draw(JSON)
        elif how == "remove":
            del node[at[-1]]
        elif isinstance(node, dict):
            node[draw(TEXT)] = draw(JSON)
    return tree


@st.composite
def damaged_bytes(draw, whole):
    """`whole` cut, with bytes changed, or something else altogether."""
    if draw(st.integers(0, 4)) == 0:
        return draw(st.binary(max_size=400))
    raw = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw[: draw(st.integers(0, len(raw)))] if draw(st.booleans()) else raw)


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


TOKENS = np.arange(1, 41, dtype="<u4")
SHARD = {"path": "prose/00000.npy", "label": "prose", "tokens": 40, "sha256": "", "sample_sha256": ""}
MANIFEST = {"format": FORMAT, "shards": [SHARD], "filter": None, "base_dir": "",
            "tokenizer": TokenizerConfig().model_dump(mode="json")}  # fmt: skip


@many
@given(tree=damaged(MANIFEST))
def test_manifest(folder, tree):
    (folder / "prose").mkdir(exist_ok=True)
    TOKENS.tofile(folder / "prose" / "00000.npy")
    (folder / "manifest.json").write_text(json.dumps(tree))
    try:
        index = InstanceIndex.from_manifest(folder, 8, tokenizer=TokenizerConfig())
        index.read(np.arange(index.n_instances))
    except ReproError:
        return
    for shard in index.shards:
        assert Path(shard.path).resolve().is_relative_to(Path(tree.get("base_dir") or folder).resolve())


@pytest.mark.parametrize("path", ["../x.npy", "a/../../x.npy", "/etc/passwd", "gs://b/x.npy", ""])
def test_no_manifest_entry_leads_out(folder, path):
    (folder / "manifest.json").write_text(json.dumps({**MANIFEST, "shards": [{**SHARD, "path": path}]}))
    with pytest.raises(IdentityError, match="not one below its folder"):
        InstanceIndex.from_manifest(folder, 8)


@many
@given(tree=damaged(load_recipe("tiny").model_dump(mode="json")))
def test_recipe(tree):
    try:
        assert isinstance(validate(tree), Recipe)
    except ReproError as error:
        assert len(str(error)) < 20_000


@many
@given(
    override=st.one_of(
        TEXT, st.builds("{}={}".format, TEXT, TEXT), st.builds("model.{}={}".format, TEXT, TEXT)
    )
)
def test_override(override):
    with contextlib.suppress(ReproError):
        load_recipe("tiny", [override])


@many
@given(raw=st.binary(max_size=64), tokens=st.integers(0, 20))
def test_token_file(folder, raw, tokens):
    path = folder / "t.npy"
    path.write_bytes(raw)
    shard = TokenShard(str(path), "x", tokens)
    try:
        verify_shard(shard)
    except ReproError:
        return
    assert len(open_tokens(shard)) == tokens


LINES = b"0,10,a,src,1\n10,25,b,src,2\n25,40,c,src,3\n"


def read_boundaries(raw):
    return list(boundaries(io.BytesIO(raw), 40, "b.csv.gz"))


def test_good_boundaries_are_read():
    assert read_boundaries(gzip.compress(LINES)) == [(0, 10, "a"), (10, 25, "b"), (25, 40, "c")]


@many
@given(plain=damaged_bytes(LINES), packed=damaged_bytes(gzip.compress(LINES)))
def test_boundaries(plain, packed):
    for raw in (gzip.compress(plain), packed):
        try:
            rows = read_boundaries(raw)
        except DataError:
            continue
        ends = [0, *(end for _, end, _ in rows)]
        assert all(0 <= low <= start < end <= 40 for low, (start, end, _) in zip(ends, rows))


@pytest.mark.parametrize("unit", [b"7", b"0,1\n", b"\n"])
def test_a_gzip_bomb_ends_in_bounded_memory(unit):
    """128 MB in 128 kB: one line, rows that do not follow each other, blank lines."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    raw = (
        b"".join(packer.compress(unit * (1 << 20)) for _ in range((1 << 27) // len(unit) >> 20))
        + packer.flush()
    )
    begun = time.monotonic()
    tracemalloc.start()
    with contextlib.suppress(DataError):
        assert read_boundaries(raw) == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * MAX_LINE and time.monotonic() - begun < 300


@pytest.mark.parametrize("unit", [b"7", b'{"text": "a"}\n', b"\n"])
def test_a_zstd_bomb_ends_in_bounded_memory(folder, unit):
    """64 MB in a few kB, through the reader of documents: one line, small documents, blank lines."""
    import resource

    import pyarrow

    times = (1 << 26) // len(unit) if unit == b"7" else 1 << 18
    (folder / "bomb.jsonl.zst").write_bytes(pyarrow.compress(unit * times, codec="zstd", asbytes=True))
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    found = sum(1 for _ in read_documents(folder / "bomb.jsonl.zst", max_bytes=1 << 20))
    assert found == (1 if unit == b"7" else times)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10  # kB
    assert time.monotonic() - begun < 120


def test_deep_and_huge_json_are_named(folder, monkeypatch):
    (folder / "deep.json").write_text("[" * 200_000)
    with pytest.raises(IdentityError, match="not valid JSON"):
        read_json(folder / "deep.json")
    monkeypatch.setattr("infra.artifacts.MAX_JSON_BYTES", 1000)
    (folder / "huge.json").write_text(json.dumps("x" * 1000))
    with pytest.raises(IdentityError, match="larger than"):
        read_json(folder / "huge.json")


HEADER = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def safetensors(header, body=bytes(32)):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def read_tensors(folder, raw):
    place = folder / "st"
    place.mkdir(exist_ok=True)
    (place / "model.safetensors").write_bytes(raw)
    try:
        found = Tensors(place)
        for name in found.names():
            assert found.read(name).nbytes <= 32
    except ReproError:
        pass


@many
@given(header=damaged(HEADER), raw=damaged_bytes(safetensors(HEADER)))
def test_safetensors_header(folder, header, raw):
    read_tensors(folder, safetensors(header))
    read_tensors(folder, raw)


RECORDS = {
    "MANIFEST.json": {"format": 1, "step": 3, "files": {"meta.json": {"sha256": "0" * 64, "bytes": 2}}},
    "meta.json": {"format": 1, "step": 3, "model": load_recipe("tiny").model.model_dump(mode="json"),
                  "receipt": {"step": 3}, "identity": {}, "position": {"step": 3}, "layout": "pattern-scan-v1"},
}  # fmt: skip


@many
@given(manifest=damaged(RECORDS["MANIFEST.json"]), meta=damaged(RECORDS["meta.json"]))
def test_checkpoint_records(folder, manifest, meta):
    place = folder / "ckpt" / "step3"
    place.mkdir(parents=True, exist_ok=True)
    (place / "meta.json").write_text(json.dumps(meta))
    size = (place / "meta.json").stat().st_size
    whole = {"format": 1, "step": 3, "files": {"meta.json": {"sha256": "0" * 64, "bytes": size}}}
    for record in (manifest, whole):
        (place / "MANIFEST.json").write_text(json.dumps(record))
        found = checkpoint.committed(folder / "ckpt")
        assert len(found.steps) + len(found.skipped) == 1
        checkpoint.latest_committed(folder / "ckpt")
        with contextlib.suppress(ReproError):
            checkpoint.restore_params(folder / "ckpt", 3, verify=False)


@pytest.fixture(scope="module")
def tiny_checkpoint(tmp_path_factory):
    """The files of a real checkpoint of a model of width 8, by name."""
    import jax.numpy as jnp

    from model.init import init_params

    whole = load_recipe("tiny").model.model_dump(mode="json")
    small = {"d_model": 8, "n_layers": 4, "n_heads": 2, "n_kv_heads": 2, "head_dim": 4, "d_ff": 16, "window": 8,
             "vocab_size": 32, "padded_vocab_size": 32}  # fmt: skip
    cfg = ModelConfig.model_validate({**whole, **small})
    root = tmp_path_factory.mktemp("ckpt")
    meta = {**RECORDS["meta.json"], "model": cfg.model_dump(mode="json")}
    state = {"params": init_params(cfg), "opt": {"count": jnp.int32(3)}, "step": jnp.int32(3)}
    place = checkpoint.write_checkpoint(root, 3, state, meta)
    return {p.relative_to(place).as_posix(): p.read_bytes() for p in place.rglob("*") if p.is_file()}


def read_checkpoint(root, files):
    """Write the files with a manifest that fits them; read everything that evaluation reads."""
    import shutil

    place = root / "step3"
    shutil.rmtree(place, ignore_errors=True)
    for name, raw in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(raw)
    (place / "MANIFEST.json").unlink()
    record = {"format": 1, "step": 3, "files": digest_tree(place)}
    (place / "MANIFEST.json").write_text(json.dumps(record))
    assert checkpoint.latest_committed(root)[0] == 3
    checkpoint.read_meta(root, 3)
    return checkpoint.restore_params(root, 3)


def test_a_good_checkpoint_is_read(folder, tiny_checkpoint):
    assert read_checkpoint(folder / "good-ckpt", tiny_checkpoint)[1].d_model == 8


@few
@given(data=st.data())
def test_checkpoint_files(folder, tiny_checkpoint, data):
    """Records, Orbax's own metadata and arrays, with a manifest made to fit: only ReproErrors come out."""
    names = sorted(
        n
        for n in tiny_checkpoint
        if n != "MANIFEST.json" and tiny_checkpoint[n] and not n.startswith("optimizer")
    )
    name = data.draw(st.sampled_from(names))
    raw = data.draw(damaged_bytes(tiny_checkpoint[name]))
    if name.endswith(("meta.json", "_METADATA", "_sharding")) and data.draw(st.booleans()):
        raw = json.dumps(data.draw(damaged(json.loads(tiny_checkpoint[name])))).encode()
    with contextlib.suppress(ReproError):
        read_checkpoint(folder / "bad-ckpt", {**tiny_checkpoint, name: raw})


@pytest.mark.parametrize(
    "size",
    ["d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab_size", "padded_vocab_size"],
)
@pytest.mark.parametrize("value", [0, -1, 2**62])
def test_a_checkpoint_of_an_absurd_model_is_refused_at_once(tmp_path, size, value):
    """2^62 layers would fill the memory with the list of their kinds."""
    meta = copy.deepcopy(RECORDS["meta.json"])
    meta["model"][size] = value
    place = tmp_path / "step3"
    place.mkdir()
    (place / "meta.json").write_text(json.dumps(meta))
    for name in ("params", "optimizer"):
        (place / name).write_bytes(b"")
    (place / "MANIFEST.json").write_text(json.dumps({"format": 1, "step": 3, "files": digest_tree(place)}))
    begun = time.monotonic()
    with pytest.raises(ReproError, match=size):
        checkpoint.restore_params(tmp_path, 3, verify=False)
    assert time.monotonic() - begun < 5


@pytest.fixture(scope="module")
def olmo_core_checkpoint(tmp_path_factory):
    """A checkpoint of torch's, by file name: two tensors and a value."""
    import torch
    from torch.distributed import checkpoint as torch_checkpoint

    place = tmp_path_factory.mktemp("dcp")
    state = {"model.a": torch.ones(2, 3), "optim.b": torch.ones(4), "optim.lr": 0.1}
    torch_checkpoint.save(state, checkpoint_id=place, no_dist=True)
    return {p.name: p.read_bytes() for p in place.iterdir()}


def read_olmo_core(place, files):
    place.mkdir(exist_ok=True)
    for name, raw in files.items():
        (place / name).write_bytes(raw)
    found = Checkpoint(place)
    tensors = {name: found.read(name) for name in found.tensors}
    return tensors, {name: found.value(name) for name in found.values()}


def test_a_good_olmo_core_checkpoint_is_read(tmp_path, olmo_core_checkpoint):
    tensors, values = read_olmo_core(tmp_path, olmo_core_checkpoint)
    assert tensors["model.a"].tolist() == [[1.0] * 3] * 2 and tensors["optim.b"].shape == (4,)
    assert values == {"optim.lr": 0.1}


@many
@given(data=st.data())
def test_olmo_core_checkpoint(folder, olmo_core_checkpoint, data):
    name = data.draw(st.sampled_from(sorted(olmo_core_checkpoint)))
    raw = data.draw(damaged_bytes(olmo_core_checkpoint[name]))
    with contextlib.suppress(ReproError):
        tensors, _ = read_olmo_core(folder / "dcp", {**olmo_core_checkpoint, name: raw})
        assert sum(t.nbytes for t in tensors.values()) <= 1000


@pytest.mark.parametrize(
    "bomb",
    [
        b"\x80\x02K\x01r\xff\xff\xff\x7f.",  # remembered as number 2^31: C's unpickler makes a table that long
        b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"x.",  # a string of 2^40 bytes
        b"\x80\x02)" + b"q\x00h\x00\x86" * 60 + b"q\x00}h\x00K\x01s.",  # a key of 2^60 leaves
    ],
)
def test_a_pickle_bomb_ends_at_once(bomb):
    begun = time.monotonic()
    tracemalloc.start()
    with contextlib.suppress(IdentityError):
        unpickle(bomb, "bomb")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20 and time.monotonic() - begun < 5


HF_CONFIG = hf_config(load_recipe("tiny").model, context_length=64, eos_id=0, pad_id=1)


@many
@given(tree=damaged(HF_CONFIG), core=st.data())
def test_foreign_configs(folder, tree, core):
    from evals.reference.olmo_core_model import olmo_core_config

    whole = json.loads(json.dumps({"model": olmo_core_config(load_recipe("tiny").model).as_config_dict()}))
    for config, read in ((tree, hf_model), (core.draw(damaged(whole)), olmo_core_model)):
        (folder / "config.json").write_text(json.dumps(config))
        with contextlib.suppress(ReproError):
            assert isinstance(read(folder), ModelConfig)


CSV = 'Step,"run - train/CE loss","run - train/CE loss__MIN","run - optim/LR (group 0)"\n1,11.5,11.5,1e-4\n2,11.4,11.4,2e-4\n3,,,\n'


@many
@given(raw=damaged_bytes(CSV.encode()), cells=st.lists(TEXT, max_size=4))
def test_wandb_export(folder, raw, cells):
    for text in (raw, CSV.encode() + ",".join(cells).encode("utf-8", "surrogatepass") + b"\n"):
        path = folder / "curve.csv"
        path.write_bytes(text)
        try:
            curve = read_wandb(path)
        except ReproError:
            continue
        assert isinstance(curve, Curve) and (np.diff(curve.steps) > 0).all()


def result_files():
    documents = [{"id": f"d{k}", "domain": "prose", "predictions": 9 + k, "nll": 90.0 + k, "tokens": 10 + k, "bytes": 40,
                  "cut": False, "kl_forward": 1e-9, "kl_backward": 1e-9, "agree": 9.0, "kl_max": 1e-8} for k in range(4)]  # fmt: skip
    heldout = {"documents": documents, "domains": {"prose": {}}, "pooled": {}, "fingerprint": "f"}
    items = [{"id": k, "gold": 1, "loglikelihoods": [-3.0, -2.0], "correct": 1} for k in range(4)]
    downstream = {
        "tasks": {"piqa": {"acc": 1.0, "items": items}},
        "digests": {"piqa": {}},
        "macro_accuracy": 1.0,
    }
    kl = {**heldout, "pooled": {"top1_agreement": 1.0}}
    return {"reference.heldout": heldout, "reproduced.heldout": heldout, "token_kl": kl,
            "reference.downstream": downstream, "reproduced.downstream": downstream}  # fmt: skip


@many
@given(data=st.data(), name=st.sampled_from(sorted(result_files())))
def test_results(folder, data, name):
    """What `repro report` reads of a landmark: compared, or listed as missing or refused."""
    place = folder / "evals" / "step3"
    place.mkdir(parents=True, exist_ok=True)
    files = result_files()
    files[name] = data.draw(damaged(files[name]))
    for file, record in files.items():
        (place / f"{file}.json").write_text(json.dumps(record))
    cfg, missing = EvalConfig(bounds={"bootstrap": 200}), []
    found = landmark_results(folder, 3, missing, cfg)
    comparisons, refused = compare_landmarks({3: found}, cfg, 1)
    assert missing or refused or comparisons[3]


def test_good_results_are_compared(folder):
    place = folder / "good" / "evals" / "step3"
    place.mkdir(parents=True)
    for file, record in result_files().items():
        (place / f"{file}.json").write_text(json.dumps(record))
    missing = []
    found = landmark_results(folder / "good", 3, missing, EvalConfig())
    comparisons, refused = compare_landmarks({3: found}, EvalConfig(bounds={"bootstrap": 200}), 1)
    assert len(comparisons[3]) == 4 and not refused and not missing
