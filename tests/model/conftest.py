"""Helpers shared by the model tests: the tiny model of sheet section 9.1, and one cache of compiled programs.

Compilation is most of the time of these tests. A program that was compiled once in a session, in whatever test or
subprocess, is read back from a directory that lives as long as the session.
"""

import os

import jax
import numpy as np
import pytest

from model import layout
from model.config import ModelConfig
from model.convert.names import entries

GOLDEN = ModelConfig(
    d_model=64, n_layers=4, n_heads=4, n_kv_heads=4, head_dim=16, d_ff=256, vocab_size=256, padded_vocab_size=256,
    window=4,
)  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def compiled_programs(tmp_path_factory):
    """jax's persistent compilation cache, in a directory of this session, for this process and its children."""
    values = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
        "jax_persistent_cache_min_compile_time_secs": 0.2,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {k: getattr(jax.config, k) for k in values}
    for name, value in values.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
        del os.environ[name.upper()]


def stack(cfg, tensors):
    """Our tree from {entry index: array} in OLMo-core's order; independent of model.convert.hf."""
    tree: dict = {}
    for e, t in zip(entries(cfg), tensors):
        if e.index is None:
            layout.put(tree, e.path, t)
        else:
            try:
                layout.get(tree, e.path).append(t)
            except KeyError:
                layout.put(tree, e.path, [t])
    return jax.tree.map(
        lambda x: np.stack(x) if isinstance(x, list) else x, tree, is_leaf=lambda x: isinstance(x, list)
    )


@pytest.fixture
def golden_cfg():
    return GOLDEN


@pytest.fixture
def golden_params():
    tensors = []
    for k, e in enumerate(entries(GOLDEN)):
        if len(e.shape) == 1:
            tensors.append(np.ones(e.shape, np.float32))
        else:
            draw = np.random.Generator(np.random.PCG64(k)).standard_normal(int(np.prod(e.shape)))
            tensors.append((0.02 * draw).astype(np.float32).reshape(e.shape))
    return stack(GOLDEN, tensors)


def write_run(run, *, model=GOLDEN, steps=12, batch=4, sequence=16, instances=200, seed=0, **sections):
    """A run directory with synthetic tokens, order, init/hf and recipe.json. Sections override the defaults."""
    from data.index import InstanceIndex
    from data.order import write_order
    from data.token_files import full_digest, sample_digest
    from infra.artifacts import write_json_atomic
    from model.convert.hf import export_hf
    from model.init import init_params

    tokens = run / "tokens" / "train"
    (tokens / "synthetic").mkdir(parents=True)
    rng = np.random.default_rng(seed)
    base = rng.integers(0, model.vocab_size, 64)
    raw = np.where(rng.random(instances * sequence + 3) < 0.5, rng.integers(0, model.vocab_size, instances * sequence + 3),
                   np.resize(base, instances * sequence + 3)).astype("<u4")  # fmt: skip
    path = tokens / "synthetic" / "00000.npy"
    path.write_bytes(raw.tobytes())
    shard = {"path": "synthetic/00000.npy", "label": "synthetic", "tokens": len(raw), "sha256": full_digest(path),
             "sample_sha256": sample_digest(path), "max_id": int(raw.max())}  # fmt: skip
    write_json_atomic(
        tokens / "manifest.json",
        {"format": "olmo3-tokens-v1", "shards": [shard], "tokenizer": {"vocab_size": model.vocab_size}},
    )
    index = InstanceIndex.from_manifest(tokens, sequence, 1, verify="size")
    write_order(run / "order", index.n_instances, seed=34521, index_digest=index.digest)
    export_hf(init_params(model), model, run / "init" / "hf", context_length=sequence, keep_padding=True,
              eos_id=None, pad_id=None)  # fmt: skip
    part = {"kind": "cosine", "peak": 1e-3, "warmup": 2, "horizon": steps}
    recipe = {
        "data": {"sequence_length": sequence, "global_batch_instances": batch},
        "model": model.model_dump(mode="json"),
        "optimizer": {}, "schedule": {"parts": [part]}, "loss": {}, "history": {}, "numerics": {}, "mesh": {},
        "train": {"steps": steps, "checkpoint_every": 4},
    }  # fmt: skip
    for name, value in sections.items():
        recipe[name] = {**recipe[name], **value}
    write_json_atomic(run / "recipe.json", recipe)
    return run


@pytest.fixture(scope="session")
def write_run_at():
    return write_run


@pytest.fixture
def make_run(tmp_path):
    count = iter(range(100))
    return lambda **kw: write_run(tmp_path / f"run{next(count)}", **kw)


def random_params(cfg, seed=0, scale=0.05):
    """Random weights with gains away from 1, so that a gain in the wrong place shows."""
    rng = np.random.default_rng(seed)

    def draw(path, axes, shape):
        one = len([a for a in axes if a != "repeats"]) == 1
        return ((1 + 0.2 * rng.standard_normal(shape)) if one else scale * rng.standard_normal(shape)).astype(
            np.float32
        )

    return layout.map_axes(draw, cfg)


def core_config(cfg):
    """OLMo-core's own config of the same model."""
    from olmo_core.nn.attention import AttentionBackendName, SlidingWindowAttentionConfig
    from olmo_core.nn.feed_forward import FeedForwardConfig
    from olmo_core.nn.rope import YaRNRoPEScalingConfig
    from olmo_core.nn.transformer import TransformerBlockType, TransformerConfig

    pattern = [cfg.window if k == "sliding" else -1 for k in cfg.layer_pattern]
    config = TransformerConfig.llama_like(
        d_model=cfg.d_model, vocab_size=cfg.padded_vocab_size, n_layers=cfg.n_layers, n_heads=cfg.n_heads,
        n_kv_heads=cfg.n_kv_heads if cfg.n_kv_heads != cfg.n_heads else None,
        head_dim=cfg.head_dim, qk_norm=True, layer_norm_eps=1e-6, rope_theta=int(cfg.rope_theta),
        block_name=TransformerBlockType.reordered_norm, attn_backend=AttentionBackendName.torch,
        feed_forward=FeedForwardConfig(hidden_size=cfg.d_ff, bias=False),
        sliding_window=SlidingWindowAttentionConfig(
            force_full_attention_on_first_layer=False, force_full_attention_on_last_layer=True, pattern=pattern
        ),
    )  # fmt: skip
    if cfg.rope_scaling is not None:
        y = cfg.rope_scaling
        config = config.with_rope_scaling(
            YaRNRoPEScalingConfig(
                factor=y.factor,
                beta_fast=int(y.beta_fast),
                beta_slow=int(y.beta_slow),
                old_context_len=y.original_context,
            )
        )
    return config


def core_model(cfg, params):
    """OLMo-core's torch model holding our weights; loading is strict."""
    import torch

    model = core_config(cfg).build(init_device="cpu")
    state = {}
    for e in entries(cfg):
        leaf = layout.get(params, e.path)
        state[e.olmo_core] = torch.tensor(np.asarray(leaf if e.index is None else leaf[e.index]))
    model.load_state_dict(state, strict=True)
    return model


def core_weights(cfg, model):
    """Our tree with the weights of an OLMo-core model."""
    state = model.state_dict()
    return stack(cfg, [state[e.olmo_core].detach().float().numpy() for e in entries(cfg)])


@pytest.fixture
def ref():
    """The helpers above, for tests."""
    from types import SimpleNamespace

    return SimpleNamespace(
        random_params=random_params,
        core_model=core_model,
        core_config=core_config,
        core_weights=core_weights,
        stack=stack,
    )
