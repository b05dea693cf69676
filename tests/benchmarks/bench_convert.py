"""Conversion: peak memory and seconds, streamed, against loading everything and saving, and against copying the bytes.

    python tests/benchmarks/bench_convert.py [--size 1B] [--rounds 3] [--real] [--skip-load] [--folder /big/disk]

From an fp32 HF directory of the named shape to bf16, published vocabulary (100,278 rows). The source is made of sparse
zeros unless `--real` writes random bytes: a hole costs no disk read, so seconds with zeros are those of conversion and
writing alone. `copy` writes the bytes of the result once more and fsyncs them, the least that any converter must do. Each case runs in
a process of its own, in turn, `--rounds` times; medians are printed. `--size 7B` needs 15 GB of disk with zeros (44 GB with `--real`) and
28 GB of memory for the load-everything case; `--skip-load` leaves that case out.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from model.config import ModelConfig, olmo3_size
from model.convert import stream
from model.convert.hf import hf_config
from model.convert.names import entries

SLAB = 32 << 20


def make_source(cfg: ModelConfig, out: Path, *, real: bool) -> int:
    """An fp32 HF directory of the shape; returns its bytes."""
    out.mkdir(parents=True)
    config = hf_config(
        cfg, context_length=8192, dtype="float32", keep_padding=True, eos_id=100257, pad_id=100277
    )
    (out / "config.json").write_text(json.dumps(config))
    rows = cfg.padded_vocab_size
    groups = stream.split(entries(cfg), rows, 4, stream.FILE_BYTES)
    weight_map, total = {}, 0
    rng = np.random.default_rng(0)
    for i, group in enumerate(groups, 1):
        name = f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        header, body = stream.header_of(group, rows, "float32")
        with (out / name).open("wb") as f:
            f.write(header)
            if real:
                for start in range(0, body, SLAB):
                    f.write(rng.standard_normal(min(SLAB, body - start) // 4, np.float32).tobytes())
            f.truncate(len(header) + body)
        weight_map.update({e.hf: name for e in group})
        total += body
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def streamed(source: Path, out: Path) -> None:
    """Ours."""
    stream.convert(source, out, dtype="bfloat16")


def load_and_save(source: Path, out: Path) -> None:
    """All tensors into memory, cast, saved by safetensors in one file: what the plain converters do."""
    import ml_dtypes
    from safetensors.numpy import load_file, save_file

    state = {k: v for p in sorted(source.glob("*.safetensors")) for k, v in load_file(p).items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = state[name][:100278]
    out.mkdir()
    state = {k: v.astype(ml_dtypes.bfloat16) for k, v in state.items()}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    sync(out)


def copy(source: Path, out: Path) -> None:
    """The bytes of a finished conversion, written again."""
    out.mkdir()
    for path in sorted(source.iterdir()):
        with path.open("rb") as a, (out / path.name).open("wb") as b:
            shutil.copyfileobj(a, b, SLAB)
    sync(out)


def sync(folder: Path) -> None:
    """fsync of every file, as the streamed conversion does."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


CASES = {"streamed": streamed, "load everything, save": load_and_save, "copy of the result": copy}


def child(case: str, source: Path, out: Path) -> None:
    """One case in this process; prints its seconds and peak memory."""
    start, cpu = time.perf_counter(), time.process_time()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    CASES[case](source, out)
    print(
        json.dumps(
            {
                "seconds": time.perf_counter() - start,
                "cpu_seconds": time.process_time() - cpu,
                "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                "start_mb": before / 1024,
            }
        )
    )


def main() -> None:
    """Rounds of all cases in turn; one JSON line per case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="1B")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--real", action="store_true", help="random weights instead of sparse zeros")
    parser.add_argument("--skip-load", action="store_true", help="leave out the case that holds everything")
    parser.add_argument("--folder", default="", help="where to write (default: the temporary directory)")
    parser.add_argument("--child", nargs=3, metavar=("CASE", "SOURCE", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child[0], Path(args.child[1]), Path(args.child[2]))
        return
    cfg = olmo3_size(args.size)
    largest = max(np.prod(e.shape) for e in entries(cfg)) * 4
    with tempfile.TemporaryDirectory(dir=args.folder or None) as folder:
        root = Path(folder)
        size = make_source(cfg, root / "source", real=args.real)
        print(json.dumps({"shape": args.size, "source_gb": round(size / 1e9, 2), "largest_tensor_mb": round(largest / 2**20),
                          "data": "random" if args.real else "sparse zeros", "load": os.getloadavg()}), flush=True)  # fmt: skip
        results: dict[str, list[dict[str, float]]] = {}
        for _ in range(args.rounds):
            for case in CASES:
                if case.startswith("load") and args.skip_load:
                    continue
                source = root / ("streamed" if case.startswith("copy") else "source")
                out = root / ("streamed" if case == "streamed" else "other")
                shutil.rmtree(out, ignore_errors=True)
                argv = [sys.executable, __file__, "--child", case, str(source), str(out)]
                done = subprocess.run(
                    argv, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "."}
                )
                results.setdefault(case, []).append(json.loads(done.stdout.splitlines()[-1]))
        for case, rows in results.items():
            middle = {k: round(statistics.median(r[k] for r in rows), 1) for k in rows[0]}
            print(json.dumps({"case": case, "rounds": len(rows), **middle}))
        a, b = (
            statistics.median(r["seconds"] for r in results[c]) for c in ("streamed", "copy of the result")
        )
        print(json.dumps({"seconds_of_copy_per_second_of_ours": round(b / a, 2), "load": os.getloadavg()}))


if __name__ == "__main__":
    main()
