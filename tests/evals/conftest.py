"""A random OLMo 3 with the real vocabulary and little else, as our tree and as HF weights; a bigram model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data.config import TokenizerConfig
from evals.scoring import Scorer
from evals.text import TextTokenizer
from model.config import ModelConfig, NumericsConfig

CONTEXT = 96


@pytest.fixture(scope="session", autouse=True)
def compile_once(tmp_path_factory):
    """Programs compiled by one test serve the others: scorers and trainers of equal shapes are built again and again here."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.1,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="session")
def model_cfg() -> ModelConfig:
    """4 layers of width 16; the window of 24 is shorter than the context of 96."""
    return ModelConfig(d_model=16, n_layers=4, n_heads=2, n_kv_heads=2, head_dim=8, d_ff=32, window=24)


def random_weights(cfg: ModelConfig, seed: int, scale: float = 0.3):
    from model.olmo3 import abstract_params

    leaves, tree = jax.tree.flatten(abstract_params(cfg))
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(tree, [(scale * rng.normal(size=s.shape)).astype(np.float32) for s in leaves])


@pytest.fixture(scope="session")
def params(model_cfg):
    """Weights large enough that the model's answers differ between tokens."""
    return random_weights(model_cfg, 0)


@pytest.fixture(scope="session")
def nearby_params(params):
    """The same weights moved a little: another training of the same model."""
    rng = np.random.default_rng(9)
    return jax.tree.map(lambda x: (x + 0.01 * rng.normal(size=x.shape)).astype(np.float32), params)


@pytest.fixture(scope="session")
def hf_dir(model_cfg, params, tmp_path_factory):
    from model.convert.hf import export_hf

    out = tmp_path_factory.mktemp("hf") / "weights"
    export_hf(params, model_cfg, out, context_length=CONTEXT, keep_padding=True)
    return out


@pytest.fixture(scope="session")
def hf_model(hf_dir):
    """transformers' own Olmo3 in fp32, the independent implementation."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    return AutoModelForCausalLM.from_pretrained(
        hf_dir, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


@pytest.fixture(scope="session")
def scorer(model_cfg) -> Scorer:
    return Scorer.for_model(model_cfg, NumericsConfig(), context=CONTEXT, batch_tokens=768)


@pytest.fixture(scope="session")
def text() -> TextTokenizer:
    return TextTokenizer(TokenizerConfig())


@pytest.fixture(scope="session")
def task_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("tasks")


@pytest.fixture
def bigram():
    """(scorer, table): logits of the next token are `table[token]`, whatever came before."""
    size = 37
    table = np.random.default_rng(0).normal(size=(size, size)).astype(np.float32)

    def make(context: int = 24, **options) -> Scorer:
        defaults = {"batch_tokens": 64, "buckets": (8, 16, context), "vocab_block": 8}
        return Scorer(
            lambda params, tokens: params[tokens], lambda params: jnp.eye(size, dtype=jnp.float32),
            context=context, **(defaults | options),
        )  # fmt: skip

    return make, table
