"""Benchmarks of the data plane beside the reference, in one run: `make bench`, or

    python tests/benchmarks/bench_data.py [filter] [loader] [tokenize] [order] [--rounds 3]

Every figure is the median of `--rounds` interleaved rounds (ours, theirs, ours, ...). Text is real (this
environment's own files). What is measured: `filter`, verdicts of 8192-token instances on one core; `loader`,
shuffled batches of 64 x 8192 in host memory, files in the page cache; `tokenize`, jsonl.gz to token files
and manifest, the start of processes included; `order`, 724 million instances to a file, peak memory of the
process. dolma needs an environment of its own: DOLMA_PYTHON names its interpreter (see dolma_toolkit.py).
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from real_text import write_shards

from data.config import DataConfig, FilterConfig, TokenizerConfig
from data.index import InstanceIndex

S, B = 8192, 64
CACHE = Path(os.environ.get("BENCH_CACHE", ".cache/bench"))
ROWS: list[dict[str, Any]] = []


def rounds(count: int, **sides: Callable[[], float]) -> dict[str, list[float]]:
    """Run each side once per round, interleaved; {side: values}."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(count):
        for name, run in sides.items():
            found[name].append(run())
    return found


def report(what: str, unit: str, found: dict[str, list[float]], base: str) -> None:
    """Print the medians, all values, and the ratio to `base`."""
    reference = statistics.median(found[base])
    for name, values in found.items():
        median = statistics.median(values)
        shown = ", ".join(f"{v:.4g}" for v in values)
        print(f"| {what} | {name} | {median:.4g} {unit} | {median / reference:.3g} | {shown} |", flush=True)
        ROWS.append({"what": what, "side": name, "unit": unit, "median": median, "values": values})


def tokens_dir(megabytes: int) -> Path:
    """Token files of `megabytes` of real text, made once."""
    from data.tokenize_job import tokenize

    out = CACHE / f"tokens-{megabytes}"
    if not (out / "manifest.json").exists():
        shards = write_shards(CACHE / f"text-{megabytes}", megabytes)
        tokenize([("text", path) for path in shards], out, TokenizerConfig())
    return out


def bench_filter(count: int) -> None:
    from olmo_core.data.utils import find_periodic_sequences

    from data.repetition import accepted

    index = InstanceIndex.from_manifest(tokens_dir(240), S)
    rows = index.read(np.arange(min(6000, index.n_instances)))
    wide = rows.astype(np.int64)
    cfg = FilterConfig(enabled=True)
    accepted(rows[:2], cfg)
    verdicts: dict[str, np.ndarray] = {}

    def ours() -> float:
        start = time.perf_counter()
        verdicts["ours"] = accepted(rows, cfg)
        return len(rows) / (time.perf_counter() - start)

    def theirs() -> float:
        start = time.perf_counter()
        verdicts["theirs"] = np.array(
            [all(m.times < 32 for m in find_periodic_sequences(row, max_period=13)) for row in wide]
        )
        return len(rows) / (time.perf_counter() - start)

    found = rounds(count, ours=ours, **{"OLMo-core": theirs})
    assert (verdicts["ours"] == verdicts["theirs"]).all()
    report(f"filter, {len(rows)} instances", "instances/s", found, "OLMo-core")


def olmo_core_loader(index: InstanceIndex, workers: int, filtered: bool) -> Any:
    from olmo_core.data import (
        DataCollator,
        InstanceFilterConfig,
        NumpyDataLoaderConfig,
        NumpyFSLDatasetConfig,
    )
    from olmo_core.data import TokenizerConfig as TheirTokenizer
    from olmo_core.data.numpy_dataset import NumpyDatasetDType

    work = str(CACHE / "olmo-core")
    dataset = NumpyFSLDatasetConfig(
        tokenizer=TheirTokenizer.dolma2(), paths=[s.path for s in index.shards], sequence_length=S,
        dtype=NumpyDatasetDType.uint32, work_dir=work,
        instance_filter_config=InstanceFilterConfig(
            repetition_min_period=1, repetition_max_period=13, repetition_max_count=32
        ) if filtered else None,
    ).build()  # fmt: skip
    dataset.prepare()
    loader = NumpyDataLoaderConfig(
        global_batch_size=B * S, seed=34521, work_dir=work, num_workers=workers,
        prefetch_factor=4 if workers else None,
    ).build(dataset, collator=DataCollator(pad_token_id=100277, vocab_size=100278), dp_process_group=None)  # fmt: skip
    loader.reshuffle(epoch=1)
    return loader


def instance_per_element(index: InstanceIndex, order: np.ndarray, filtered: bool) -> Any:
    """MaxText's design: one Grain element is one instance, checked when read, then batched."""
    import grain

    from data.repetition import accepted

    cfg = FilterConfig(enabled=True)

    class Source:
        def __len__(self) -> int:
            return len(order)

        def __getitem__(self, k: int) -> dict[str, np.ndarray]:
            tokens = np.array(index.read(order[k : k + 1])[0], dtype=np.int32)
            keep = accepted(tokens[None], cfg)[0] if filtered else True
            return {"inputs": tokens, "targets": np.append(tokens[1:], 0), "keep": np.bool_(keep)}

    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return iter(grain.MapDataset.source(Source()).batch(B).to_iter_dataset(options))


def bench_loader(count: int) -> None:
    from data.loader import batches
    from data.masks import scan_index
    from data.order import global_order

    index = InstanceIndex.from_manifest(tokens_dir(240), S)
    order = global_order(index.n_instances, 34521)
    steps = index.n_instances // B
    for filtered in (False, True):
        index.mask = scan_index(index, FilterConfig(enabled=True)) if filtered else None
        limit = steps if not filtered else max(4, steps // 4)

        def consume(stream: Any, limit: int = limit) -> float:
            """Tokens per second between the first and the last batch (start of processes not counted)."""
            first = None
            done = 0
            for done, _ in enumerate(stream):
                if first is None:
                    first = time.perf_counter()
                if done == limit:
                    break
            assert first is not None
            return done * B * S / (time.perf_counter() - first) / 1e6

        def ours(workers: int, prefetch: int, kind: str = "thread") -> Callable[[], float]:
            cfg = DataConfig.model_validate(
                {"sequence_length": S, "global_batch_instances": B, "workers": workers, "prefetch": prefetch,
                 "worker_kind": kind}
            )  # fmt: skip
            return lambda: consume(batches(index, order, cfg))

        def theirs(workers: int, filtered: bool = filtered) -> Callable[[], float]:
            return lambda: consume(iter(olmo_core_loader(index, workers, filtered)))

        def gather() -> float:
            start = time.perf_counter()
            for step in range(steps):
                index.read(order[step * B : (step + 1) * B])
            return steps * B * S / (time.perf_counter() - start) / 1e6

        name = f"loader, filter {'on' if filtered else 'off'}"
        sides = {
            "ours, 0 workers": ours(0, 0),
            "OLMo-core, 0 workers": theirs(0),
            "one instance per element": lambda filtered=filtered: consume(
                instance_per_element(index, order, filtered)
            ),
            "plain gather": gather,
        }
        report(name, "Mtok/s", rounds(count, **sides), "OLMo-core, 0 workers")
        sides = {
            "ours, 2 threads": ours(2, 4),
            "ours, 2 processes": ours(2, 4, "process"),
            "OLMo-core, 2 workers": theirs(2),
        }
        report(name, "Mtok/s", rounds(count, **sides), "OLMo-core, 2 workers")


TOKENIZE = """
import json, sys, time
from data.config import TokenizerConfig
from data.tokenize_job import tokenize
if __name__ == "__main__":
    out, *shards = sys.argv[1:]
    tokenize([("text", p) for p in shards], out, TokenizerConfig(), processes=2)
"""


def bench_tokenize(count: int) -> None:
    shards = [str(p) for p in write_shards(CACHE / "text-240", 240)]
    sizes = json.loads((CACHE / "text-240" / "done.json").read_text())["text_bytes"] / 1e6

    def timed(command: list[str], out: Path, megabytes: float) -> float:
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(f"{out}-meta", ignore_errors=True)
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        return megabytes / (time.perf_counter() - start)

    script = CACHE / "tokenize_bench.py"
    script.write_text(TOKENIZE)
    mine = CACHE / "ours"
    sides = {
        "ours, 2 processes": lambda: timed([sys.executable, str(script), str(mine), *shards], mine, sizes)
    }
    dolma = os.environ.get("DOLMA_PYTHON")
    base = "ours, 2 processes"
    if dolma:
        from dolma_toolkit import command

        base = "dolma tokens, 2 processes"
        out = CACHE / "dolma"
        few = shards[:6]
        part = sizes * len(few) / len(shards)
        sides[base] = lambda: timed(command(dolma, few, out, processes=2), out, part)
    else:
        print("(tokenize: DOLMA_PYTHON is not set, so dolma is not measured)")
    report("tokenize + pack", "MB/s", rounds(count, **sides), base)


ORDER = {
    "ours": "from data.order import write_order\nwrite_order({out!r}, {n}, seed=34521)",
    "OLMo-core": (
        "from types import SimpleNamespace\nfrom pathlib import Path\nimport numpy as np\n"
        "from olmo_core.data.data_loader import NumpyFSLDataLoader as L\n"
        "from olmo_core.data.utils import memmap_to_write\n"
        "x = L._build_global_indices(SimpleNamespace(dataset=range({n}), shuffle=True, seed=34521, epoch=1,"
        " chunk_size=1))\n"
        "with memmap_to_write(Path({out!r}) / 'order.npy', shape=x.shape, dtype=np.uint32) as m:\n    m[:] = x"
    ),
    "opening ours": "from data.order import open_order\nopen_order({out!r})",
}


def bench_order(count: int, n: int = 723_900_000) -> None:
    out = str(CACHE / "order")
    Path(out).mkdir(parents=True, exist_ok=True)
    peaks: dict[str, list[float]] = {name: [] for name in ORDER}

    def run(name: str) -> Callable[[], float]:
        code = ORDER[name].format(out=out, n=n)
        imports, _, body = code.partition("\n") if name != "OLMo-core" else ("", "", code)
        whole = (
            f"import resource, time\n{imports}\nstart = time.perf_counter()\n{body}\n"
            "print('seconds', time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )

        def once() -> float:
            text = subprocess.run(
                [sys.executable, "-c", whole], check=True, capture_output=True, text=True
            ).stdout
            seconds, peak = re.findall(r"seconds (\S+) (\d+)", text)[0]
            peaks[name].append(int(peak) / 1e6)
            return float(seconds)

        return once

    found = rounds(count, **{name: run(name) for name in ORDER})
    report(f"order of {n} instances", "s", found, "OLMo-core")
    report(f"order of {n} instances, peak memory", "GB", peaks, "OLMo-core")


BENCHES: dict[str, Callable[[int], None]] = {
    "filter": bench_filter,
    "loader": bench_loader,
    "tokenize": bench_tokenize,
    "order": bench_order,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="benchmarks of the data plane beside the reference")
    parser.add_argument("which", nargs="*", choices=[*BENCHES, []], default=[])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    print("| what | side | median | ratio | rounds |\n|---|---|---|---|---|")
    for name in args.which or BENCHES:
        BENCHES[name](args.rounds)
    (CACHE / "data.json").write_text(json.dumps(ROWS, indent=1))


if __name__ == "__main__":
    main()
