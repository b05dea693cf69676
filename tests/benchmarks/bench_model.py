"""Training step, fp32, CPU, 2 threads: ours against OLMo-core in PyTorch, side by side.

    python tests/benchmarks/bench_model.py [--shape tiny|wide] [--steps 4] [--memory]

OLMo-core runs at its best: allocator tuned (glibc reuses freed blocks) and the fastest of the micro-batches tried. Each
side runs in its own process, the two alternate, and the figure is the fastest step of all rounds, which is the least
disturbed one on a shared machine. `--memory` compares peak memory at sequence 8192 instead. Prints one JSON line.
"""

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# name -> d_model, heads, head_dim, d_ff, window, batch, sequence
SHAPES = {
    "tiny": (64, 4, 16, 256, 64, 8, 256),
    "wide": (512, 8, 64, 1536, 64, 8, 256),
    "long": (64, 4, 16, 256, 4096, 1, 8192),
}
VOCAB = 100352


def config(shape: str) -> Any:
    from model.config import ModelConfig

    d, heads, head_dim, ff, window, _, _ = SHAPES[shape]
    return ModelConfig(
        d_model=d, n_layers=4, n_heads=heads, n_kv_heads=heads, head_dim=head_dim, d_ff=ff, window=window
    )


def ours(shape: str, steps: int) -> list[float]:
    import jax
    import numpy as np

    from model import step as lib
    from model.config import (
        HistoryConfig,
        LossConfig,
        MeshConfig,
        NumericsConfig,
        OptimizerConfig,
        ScheduleConfig,
        SchedulePart,
    )  # fmt: skip
    from model.init import init_params
    from model.sharding import make_mesh

    batch, sequence = SHAPES[shape][5:]
    remat = "block" if sequence > 4096 else "none"
    spec = lib.StepSpec(
        config(shape), OptimizerConfig(), LossConfig(), NumericsConfig(remat=remat), make_mesh(MeshConfig())
    )
    state = lib.new_state(spec, init_params(spec.model), HistoryConfig())
    program = (
        lib.jit_step(spec)
        .lower(lib.abstract_state(spec), lib.abstract_batch(spec, batch, sequence))
        .compile()
    )
    schedule = ScheduleConfig(parts=(SchedulePart(kind="cosine", peak=1e-3, warmup=10, horizon=100),))
    times = []
    for s in range(1, steps + 1):
        tokens = np.random.default_rng(s).integers(0, 100278, (batch, sequence))
        host = lib.host_batch(
            tokens, np.ones(batch, bool), lib.control(schedule, spec.optimizer, HistoryConfig(), s)
        )
        placed = jax.device_put(host, lib.batch_shardings(spec))
        begun = time.perf_counter()
        state, metrics = program(state, placed)
        jax.block_until_ready((state, metrics))
        times.append(time.perf_counter() - begun)
    return times


def theirs(shape: str, steps: int, micro: int) -> list[float]:
    libc = ctypes.CDLL(None)
    libc.mallopt(-4, 0)
    libc.mallopt(-1, 2**31 - 1)
    import torch
    from olmo_core.data.utils import get_labels
    from olmo_core.nn.attention import AttentionBackendName, SlidingWindowAttentionConfig
    from olmo_core.nn.feed_forward import FeedForwardConfig
    from olmo_core.nn.transformer import TransformerBlockType, TransformerConfig
    from olmo_core.optim.adamw import SkipStepAdamW

    torch.set_num_threads(2)
    d, heads, head_dim, ff, window, batch, sequence = SHAPES[shape]
    model = TransformerConfig.llama_like(
        d_model=d, vocab_size=VOCAB, n_layers=4, n_heads=heads, head_dim=head_dim, qk_norm=True, layer_norm_eps=1e-6,
        block_name=TransformerBlockType.reordered_norm, attn_backend=AttentionBackendName.torch,
        feed_forward=FeedForwardConfig(hidden_size=ff, bias=False),
        sliding_window=SlidingWindowAttentionConfig(
            force_full_attention_on_first_layer=False, pattern=[window, window, window, -1]
        ),
    ).build(init_device="cpu")  # fmt: skip
    model.init_weights(device=torch.device("cpu"), max_seq_len=sequence)
    opt = SkipStepAdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    times = []
    for s in range(1, steps + 1):
        ids = torch.randint(0, 100278, (batch, sequence), generator=torch.Generator().manual_seed(s))
        begun = time.perf_counter()
        labels = get_labels({"input_ids": ids})
        count, ce = (labels != -100).sum(), torch.tensor(0.0)
        for i in range(0, batch, micro):
            out = model(ids[i : i + micro], labels=labels[i : i + micro], ignore_index=-100, loss_reduction="sum",
                        z_loss_multiplier=1e-5, loss_div_factor=count, return_logits=False)  # fmt: skip
            ce += out.ce_loss.detach()
            out.loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        opt.latest_loss, opt.latest_grad_norm = ce, norm
        opt.step()
        opt.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - begun)
    return times


def child(side: str, shape: str, steps: int, micro: int) -> dict[str, Any]:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        __file__,
        "--child",
        side,
        "--shape",
        shape,
        "--steps",
        str(steps),
        "--micro",
        str(micro),
    ]
    return json.loads(
        subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    )


def compare(shape: str, steps: int) -> dict[str, Any]:
    batch, sequence = SHAPES[shape][5:]
    micros = [m for m in (1, 2) if m <= batch]
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], **{f"olmo-core micro {m}": [] for m in micros}}
    for _ in range(2):
        runs["ours"].append(child("ours", shape, steps, 0))
        for m in micros:
            runs[f"olmo-core micro {m}"].append(child("theirs", shape, steps, m))
    best = {k: min(min(r["times"][1:]) for r in v) for k, v in runs.items()}
    memory = {k: max(r["rss_gb"] for r in v) for k, v in runs.items()}
    rival = min((k for k in best if k != "ours"), key=best.__getitem__)
    lean = min(v for k, v in memory.items() if k != "ours")
    return {
        "shape": shape, "tokens_per_step": batch * sequence, "seconds": best, "peak_rss_gb": memory,
        "speed_ratio": best[rival] / best["ours"], "memory_ratio": memory["ours"] / lean, "load": os.getloadavg()[0],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--child", choices=["ours", "theirs"])
    parser.add_argument("--micro", type=int, default=1)
    args = parser.parse_args()
    if args.child:
        times = (
            ours(args.shape, args.steps)
            if args.child == "ours"
            else theirs(args.shape, args.steps, args.micro)
        )
        print(
            json.dumps({"times": times, "rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20})
        )
        return
    print(
        json.dumps(compare("long" if args.memory else args.shape, 2 if args.memory else args.steps), indent=2)
    )


if __name__ == "__main__":
    main()
