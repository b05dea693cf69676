"""Scores of one small model on 1 and on 8 devices, in a process of its own; prints them as JSON. Used by test_devices.py."""

import json
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from evals.scoring import Request, Scorer
from model.config import ModelConfig, NumericsConfig
from model.olmo3 import abstract_params

CFG = ModelConfig(
    d_model=16, n_layers=4, n_heads=2, n_kv_heads=2, head_dim=8, d_ff=32, window=8, vocab_size=500, padded_vocab_size=512
)  # fmt: skip


def run(devices: int) -> None:
    """Scores with the weights spread over so many devices, as one JSON line."""
    leaves, tree = jax.tree.flatten(abstract_params(CFG))
    rng = np.random.default_rng(0)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("fsdp",))

    def put(shape: tuple[int, ...]) -> jax.Array:
        value = (0.3 * rng.normal(size=shape)).astype(np.float32)
        spec = [None] * len(shape)
        if devices > 1 and shape[-1] % devices == 0:
            spec[-1] = "fsdp"
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))

    params = jax.tree.unflatten(tree, [put(s.shape) for s in leaves])
    scorer = Scorer.for_model(CFG, NumericsConfig(), context=32, batch_tokens=128)
    requests = [Request(rng.integers(0, 500, n).astype(np.int32), 1) for n in (5, 17, 33, 33, 20)]
    scored = scorer.score(params, requests)
    used = len({d for leaf in jax.tree.leaves(params) for d in leaf.sharding.device_set})
    print(json.dumps({"devices": used, "totals": [s.total for s in scored]}))


def main() -> None:
    """One line per number of devices in argv."""
    for devices in sys.argv[1:]:
        run(int(devices))


if __name__ == "__main__":
    main()
