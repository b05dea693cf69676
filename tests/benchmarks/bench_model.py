"""Training step, fp32, CPU, 2 threads: ours against OLMo-core in PyTorch, side by side.

    python tests/benchmarks/bench_model.py [--shape tiny wide] [--steps 4] [--rounds 3] [--memory] [--profile]

Both run at their best: allocator tuned (ours in huge pages, as training is launched; theirs keeps freed blocks), OLMo-core
with the fastest of the micro-batches 1, 2, 4, 8.
Each side runs in its own process; the sides alternate in rounds. The figure of a side is the median over rounds of its
median step (the first step is left out), in wall and in CPU seconds. A loaded machine spoils both: wall for everybody, CPU
for torch, whose threads spin while they wait. Look at `load_average` before a ratio. `--memory` adds peak
memory at sequence 8192, one step each (a side is stopped at 16 GB), `--profile` where our step's time goes.
Prints one JSON object per shape.
"""

import argparse
import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# name -> d_model, heads, head_dim, d_ff, window, batch, sequence
SHAPES = {
    "tiny": (64, 4, 16, 256, 64, 8, 192),
    "wide": (512, 8, 64, 1536, 64, 8, 256),
    "long": (64, 4, 16, 256, 4096, 1, 8192),
}
VOCAB = 100352
MICRO = (1, 2, 4, 8)


def config(shape: str) -> Any:
    from model.config import ModelConfig

    d, heads, head_dim, ff, window, _, _ = SHAPES[shape]
    return ModelConfig(
        d_model=d, n_layers=4, n_heads=heads, n_kv_heads=heads, head_dim=head_dim, d_ff=ff, window=window
    )


class Steps:
    """Wall and CPU seconds and page faults of each step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def __enter__(self) -> None:
        self.faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def __exit__(self, *_: object) -> None:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - self.faults
        wall, cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        self.rows.append({"wall": wall, "cpu": cpu, "faults": faults})


def our_spec(shape: str) -> Any:
    from model import step as lib
    from model.config import LossConfig, MeshConfig, NumericsConfig, OptimizerConfig
    from model.sharding import make_mesh

    remat = "block" if SHAPES[shape][6] > 4096 else "none"
    return lib.StepSpec(
        config(shape), OptimizerConfig(), LossConfig(), NumericsConfig(remat=remat), make_mesh(MeshConfig())
    )


def ours(shape: str, steps: int) -> Steps:
    import jax
    import numpy as np

    from model import step as lib
    from model.config import HistoryConfig, ScheduleConfig, SchedulePart
    from model.init import init_params

    batch, sequence = SHAPES[shape][5:]
    spec = our_spec(shape)
    state = lib.new_state(spec, init_params(spec.model), HistoryConfig())
    program = (
        lib.jit_step(spec)
        .lower(lib.abstract_state(spec), lib.abstract_batch(spec, batch, sequence))
        .compile()
    )
    schedule = ScheduleConfig(parts=(SchedulePart(kind="cosine", peak=1e-3, warmup=10, horizon=100),))
    times = Steps()
    for s in range(1, steps + 1):
        tokens = np.random.default_rng(s).integers(0, 100278, (batch, sequence))
        host = lib.host_batch(
            tokens, np.ones(batch, bool), lib.control(schedule, spec.optimizer, HistoryConfig(), s)
        )
        placed = jax.device_put(host, lib.batch_shardings(spec))
        with times:
            state, metrics = program(state, placed)
            jax.block_until_ready((state, metrics))
    return times


def theirs(shape: str, steps: int, micro: int) -> Steps:
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
    times = Steps()
    for s in range(1, steps + 1):
        ids = torch.randint(0, 100278, (batch, sequence), generator=torch.Generator().manual_seed(s))
        with times:
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
    return times


def profile(shape: str, repeats: int = 3) -> dict[str, float]:
    """CPU seconds of the parts of our step, each compiled alone: the three head products, all of the head, the step."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from model.loss import head_loss

    spec = our_spec(shape)
    rows, length = SHAPES[shape][5:]
    d, tokens, size = spec.model.d_model, rows * length, spec.numerics.loss_slice_tokens
    x = jnp.asarray(np.random.default_rng(0).standard_normal((tokens, d)), jnp.float32)
    head = jnp.asarray(np.random.default_rng(1).standard_normal((VOCAB, d)) * 0.02, jnp.float32)

    def products(x: Any, head: Any) -> Any:
        """logits, d/dx and d/dhead of every slice, and nothing else."""

        def body(total: Any, xc: Any) -> Any:
            logit = xc @ head.T
            return total + logit.T @ xc, logit @ head

        return jax.lax.scan(body, jnp.zeros_like(head), x.reshape(-1, size, d))

    labels, weights = jnp.zeros((rows, length), jnp.int32), jnp.full((rows, length), 1 / tokens)

    def whole_head(x: Any, head: Any) -> Any:
        def loss(x: Any, head: Any) -> Any:
            return head_loss(x.reshape(rows, length, d), head, labels, weights, 1e-5, size, None)[0]

        return jax.grad(loss, (0, 1))(x, head)

    found = {}
    for name, f in (("head products alone", products), ("head and loss", whole_head)):
        program, times = jax.jit(f).lower(x, head).compile(), Steps()
        for _ in range(repeats + 1):
            with times:
                jax.block_until_ready(program(x, head))
        found[name] = statistics.median(t["cpu"] for t in times.rows[1:])
    found["step"] = statistics.median(t["cpu"] for t in ours(shape, repeats + 1).rows[1:])
    return found


def child(side: str, shape: str, steps: int, micro: int = 0, tuned: bool = False) -> dict[str, Any]:
    """One side in its own process."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    if tuned:
        from infra.memory import allocator_environment

        env.update(allocator_environment())
    options = {"--child": side, "--shape": shape, "--steps": str(steps), "--micro": str(micro)}
    command = [sys.executable, __file__, *(word for pair in options.items() for word in pair)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{side} {shape} ended with {done.returncode} (-9: out of memory?): {done.stderr[-2000:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def compare(shape: str, steps: int, rounds: int) -> dict[str, Any]:
    """All sides, `rounds` times in turn."""
    batch, sequence = SHAPES[shape][5:]
    sides: dict[str, dict[str, Any]] = {
        "ours": {"side": "ours", "tuned": True},
        "ours, plain allocator": {"side": "ours"},
        **{f"olmo-core micro {m}": {"side": "theirs", "micro": m} for m in MICRO if m <= batch},
    }
    runs: dict[str, list[Any]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, arguments in sides.items():
            runs[name].append(child(shape=shape, steps=steps, **arguments))

    def median(name: str, key: str) -> float:
        later = [run["steps"][1:] or run["steps"] for run in runs[name]]
        return statistics.median(statistics.median(s[key] for s in run) for run in later)

    table = {
        name: {
            "wall": round(median(name, "wall"), 3),
            "cpu": round(median(name, "cpu"), 3),
            "faults": int(median(name, "faults")),
            "peak_gb": round(max(run["rss_gb"] for run in runs[name]), 3),
        }
        for name in sides
    }
    rivals = [name for name in table if name.startswith("olmo-core")]
    fastest = {key: min(rivals, key=lambda name, key=key: table[name][key]) for key in ("wall", "cpu")}
    return {
        "shape": shape, "tokens_per_step": batch * sequence, "rounds": rounds, "steps": steps, "sides": table,
        "fastest_rival": fastest,
        "speed_ratio_wall": round(table[fastest["wall"]]["wall"] / table["ours"]["wall"], 3),
        "speed_ratio_cpu": round(table[fastest["cpu"]]["cpu"] / table["ours"]["cpu"], 3),
        "memory_ratio": round(table["ours"]["peak_gb"] / min(table[name]["peak_gb"] for name in rivals), 3),
        "threads_we_keep_busy": round(table["ours"]["cpu"] / table["ours"]["wall"], 2),
        "load_average": os.getloadavg()[0],
    }  # fmt: skip


def memory(shape: str = "long", limit_gb: float = 16.0) -> dict[str, Any]:
    """Peak memory of one step of both sides; a side that passes `limit_gb` is stopped there, before the kernel does it."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    peaks, stopped = {}, []
    for side in ("ours", "theirs"):
        command = [
            sys.executable,
            __file__,
            "--child",
            side,
            "--shape",
            shape,
            "--steps",
            "1",
            "--micro",
            "1",
        ]
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        peaks[side] = 0.0
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            high = next((line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")), "0")
            peaks[side] = max(peaks[side], int(high) / 2**20)
            if peaks[side] > limit_gb:
                stopped.append(side)
                process.kill()
                process.wait()
            time.sleep(0.02)
        if process.returncode and side not in stopped:
            raise SystemExit(f"{side} {shape} ended with {process.returncode}")
    return {"shape": shape, "sequence": SHAPES[shape][6], "peak_gb": peaks, "stopped_at_the_limit": stopped,
            "memory_ratio": round(peaks["ours"] / peaks["theirs"], 3)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["tiny", "wide"])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--child", choices=["ours", "theirs", "profile"])
    parser.add_argument("--micro", type=int, default=1)
    args = parser.parse_args()
    if args.child == "profile":
        print(json.dumps(profile(args.shape[0])))
    elif args.child:
        shape, steps = args.shape[0], args.steps
        rows = (ours(shape, steps) if args.child == "ours" else theirs(shape, steps, args.micro)).rows
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps({"steps": rows, "rss_gb": peak}))
    else:
        for shape in args.shape:
            print(json.dumps(compare(shape, args.steps, args.rounds), indent=2), flush=True)
            if args.profile:
                print(json.dumps({"shape": shape, "profile_cpu_seconds": child("profile", shape, 4)}))
        if args.memory:
            print(json.dumps(memory(), indent=2))


if __name__ == "__main__":
    main()
