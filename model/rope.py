"""RoPE tables, built on the host in numpy and handed to the model as constants.

The surprising thing: `theta ** x` under `jit` on CPU is constant-folded to other bits, and one ulp of an
inverse frequency is 3e-4 rad at position 8191. So nothing here is jax, and `inv_freq_hash` is checked in tests
against the bits torch produces. Formulas: sheet sections 1.4 and 1.7; `allenai/OLMo-core` @ fa6c5014c `nn/rope.py`.
"""

import hashlib
import math

import numpy as np

from model.config import LayerKind, ModelConfig, YarnConfig


def inv_freq(head_dim: int, theta: float, scaling: YarnConfig | None = None) -> np.ndarray:
    """float32[head_dim/2] inverse frequencies; with `scaling`, YaRN's blend of plain and divided ones."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # The power is correctly rounded (through float64), which is what torch's CPU kernel gives.
    power = np.power(float(theta), exponent.astype(np.float64)).astype(np.float32)
    plain = np.float32(1.0) / power
    if scaling is None:
        return plain

    def dim_of(rotations: float) -> float:
        return (
            head_dim * math.log(scaling.original_context / (rotations * 2 * math.pi)) / (2 * math.log(theta))
        )

    low = max(math.floor(dim_of(scaling.beta_fast)), 0)
    high = min(math.ceil(dim_of(scaling.beta_slow)), head_dim // 2 - 1)
    index = np.arange(head_dim // 2, dtype=np.float32)
    ramp = np.clip((index - np.float32(low)) / np.float32(max(high - low, 1e-3)), 0, 1).astype(np.float32)
    return (plain / np.float32(scaling.factor)) * ramp + plain * (np.float32(1) - ramp)


def attention_factor(scaling: YarnConfig | None) -> float:
    """What cos and sin are multiplied by (so attention scores grow by its square)."""
    return 1.0 if scaling is None else 0.1 * math.log(scaling.factor) + 1.0


def layer_scaling(cfg: ModelConfig, kind: LayerKind) -> YarnConfig | None:
    """The scaling of a layer: YaRN touches full-attention layers only."""
    return cfg.rope_scaling if kind == LayerKind.FULL else None


def tables(cfg: ModelConfig, kind: LayerKind, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin), each float32[length, head_dim/2], for layers of `kind`; angles are rounded to float32 first."""
    scaling = layer_scaling(cfg, kind)
    freq = inv_freq(cfg.head_dim, cfg.rope_theta, scaling)
    angle = (np.arange(length, dtype=np.float32)[:, None] * freq[None, :]).astype(np.float64)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    factor = np.float32(attention_factor(scaling))
    return cos * factor, sin * factor


def inv_freq_hash(freq: np.ndarray) -> str:
    """First 16 hex digits of sha256 over the little-endian float32 bytes."""
    return hashlib.sha256(np.ascontiguousarray(freq, dtype="<f4").tobytes()).hexdigest()[:16]
