"""Conversion: peak memory and seconds, streamed, against holding everything and saving, and against copying the bytes.

    python tests/benchmarks/bench_convert.py [--size 1B] [--rounds 3] [--to hf ours] [--skip-load] [--folder /big/disk]

`hf`: fp32 to bf16 safetensors of the published vocabulary (100,278 rows). `ours`: fp32 to an Orbax checkpoint. The weights are made
tensor by tensor (a seeded block of 64 MB normal numbers, begun at another place for each tensor), so that the source needs no disk
and its bytes do not compress. `copy` writes the bytes of the result once more and fsyncs them, the least that any converter must do;
it deletes what it has copied, file by file, so that the disk holds the result once. Each case runs in a process of its own, in
turn, `--rounds` times; medians are printed; every streamed result is read back and compared with the weights outside the timed part.

`--size 7B` needs 17 GB of disk for `hf` and 31 GB for `ours`, and 30 to 60 GB of memory for the case that holds
everything; `--skip-load` leaves that case out.
"""

import argparse
import hashlib
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from model import layout
from model.config import ModelConfig, olmo3_size
from model.convert import stream
from model.convert.names import Entry, entries

SLAB = 32 << 20
BLOCK = 16 << 20  # float32 numbers


def generated(cfg: ModelConfig) -> stream.Source:
    """A source of random weights without files: the same bytes in every process."""
    block = (0.02 * np.random.default_rng(0).standard_normal(BLOCK, np.float32)).astype(np.float32)

    def read(e: Entry) -> np.ndarray:
        out = np.empty(math.prod(e.shape), np.float32)
        at = int.from_bytes(hashlib.sha256(e.hf.encode()).digest()[:4]) % BLOCK
        done = 0
        while done < len(out):
            n = min(len(out) - done, BLOCK - at)
            out[done : done + n] = block[at : at + n]
            done, at = done + n, 0
        return out.reshape(e.shape)

    return stream.Source("generated", cfg, cfg.padded_vocab_size, read, {"seed": "0"})


def hf_streamed(source: stream.Source, out: Path) -> None:
    """Ours, to HF."""
    stream.convert(source, out, dtype="bfloat16")


def hf_held(source: stream.Source, out: Path) -> None:
    """All tensors into memory, cast, saved by safetensors in one file: what the plain converters do."""
    import ml_dtypes
    from safetensors.numpy import save_file

    state = {e.hf: source.read(e) for e in entries(source.model)}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = state[name][:100278]
    out.mkdir()
    state = {k: v.astype(ml_dtypes.bfloat16) for k, v in state.items()}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    for path in out.iterdir():
        sync(path)


def ours_streamed(source: stream.Source, out: Path) -> None:
    """To an Orbax checkpoint, layer by layer."""
    from model.convert.ours import to_checkpoint

    to_checkpoint(source, out, 0)


def ours_held(source: stream.Source, out: Path) -> None:
    """The whole tree in memory, written by Orbax's own handler."""
    from model.checkpoint import write_checkpoint
    from model.convert.ours import read_tree

    meta = {"format": 1, "step": 0, "model": source.model.model_dump(mode="json")}
    write_checkpoint(out, 0, {"params": read_tree(source), "step": np.int32(0)}, meta)


def copy(done: Path, out: Path) -> None:
    """The bytes of a finished conversion, written again; each file is deleted once it is copied."""
    for path in sorted(p for p in done.rglob("*") if p.is_file()):
        target = out / path.relative_to(done)
        target.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as a, target.open("wb") as b:
            shutil.copyfileobj(a, b, SLAB)
        sync(target)
        path.unlink()


def sync(path: Path) -> None:
    """fsync of a file, as the streamed conversions do."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def verify(kind: str, source: stream.Source, out: Path) -> int:
    """Compare the first, a middle and the last tensors with the weights, bit for bit; returns how many."""
    found = stream.open_source(out if kind == "hf" else out / "step0", source.model)
    table = entries(source.model)
    chosen = [*table[:3], *table[len(table) // 2 : len(table) // 2 + 11], *table[-2:]]
    for e in chosen:
        have = found.read(e)
        wanted = source.read(e)[: len(have)].astype(have.dtype)
        if not np.array_equal(have.view(np.uint8), wanted.view(np.uint8)):
            raise SystemExit(f"{e.hf} differs after the conversion to {kind}")
    return len(chosen)


CASES: dict[str, dict[str, Any]] = {
    "hf": {"streamed": hf_streamed, "hold everything, save": hf_held},
    "ours": {"streamed": ours_streamed, "hold everything, save": ours_held},
}


def child(kind: str, case: str, size: str, out: Path) -> None:
    """One case in this process; prints its seconds and peak memory."""
    source = generated(olmo3_size(size))
    start, cpu = time.perf_counter(), time.process_time()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if case == "copy":
        copy(out, out.with_name("copied"))
    else:
        CASES[kind][case](source, out)
    figures = {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "start_mb": before / 1024,
        "tensors_compared": verify(kind, source, out) if case == "streamed" else 0,
    }
    print(json.dumps(figures))


def run(kind: str, case: str, size: str, out: Path) -> dict[str, float]:
    """One case in a process of its own."""
    argv = [sys.executable, __file__, "--child", kind, case, size, str(out)]
    env = {**os.environ, "PYTHONPATH": ".", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, env=env)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Rounds of all cases in turn; one JSON line per case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="1B")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--to", nargs="+", choices=sorted(CASES), default=sorted(CASES))
    parser.add_argument("--skip-load", action="store_true", help="leave out the case that holds everything")
    parser.add_argument("--folder", default="", help="where to write (default: the temporary directory)")
    parser.add_argument("--child", nargs=4, metavar=("KIND", "CASE", "SIZE", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*args.child[:3], Path(args.child[3]))
        return
    cfg = olmo3_size(args.size)
    weights = 4 * layout.count_params(cfg)
    largest = max(math.prod(e.shape) for e in entries(cfg)) * 4
    with tempfile.TemporaryDirectory(dir=args.folder or None) as folder:
        root = Path(folder)
        needed = weights * (1.06 if "ours" in args.to else 0.5) + stream.FILE_BYTES
        if (free := shutil.disk_usage(root).free) < needed:
            raise SystemExit(f"{root} has {free / 1e9:.0f} GB free, {needed / 1e9:.0f} GB are needed")
        print(json.dumps({"shape": args.size, "weights_gb": round(weights / 1e9, 2), "largest_tensor_mb": round(largest / 2**20),
                          "bound_mb": round(2 * largest / 2**20) + 1024, "load": os.getloadavg()}), flush=True)  # fmt: skip
        for kind in args.to:
            results: dict[str, list[dict[str, float]]] = {}
            for _ in range(args.rounds):
                for case in ("hold everything, save", "streamed", "copy"):
                    if case.startswith("hold") and args.skip_load:
                        continue
                    if case != "copy":
                        shutil.rmtree(root / "out", ignore_errors=True)
                    results.setdefault(case, []).append(run(kind, case, args.size, root / "out"))
                    shutil.rmtree(root / "copied", ignore_errors=True)
            for case, rows in results.items():
                middle = {k: round(statistics.median(r[k] for r in rows), 1) for k in rows[0]}
                print(json.dumps({"to": kind, "case": case, "rounds": len(rows), **middle}), flush=True)
            a, b = (statistics.median(r["seconds"] for r in results[c]) for c in ("streamed", "copy"))
            print(json.dumps({"to": kind, "seconds_of_copy_per_second_of_streamed": round(b / a, 2), "load": os.getloadavg()}))  # fmt: skip


if __name__ == "__main__":
    main()
