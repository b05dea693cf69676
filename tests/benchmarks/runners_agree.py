"""500 MB of real text through both runners that run here; all files must be equal.

python tests/benchmarks/runners_agree.py [MEGABYTES]
"""

import hashlib
import os
import shutil
import sys
import time
from pathlib import Path

from real_text import write_shards

from data.config import FilterConfig, TokenizerConfig
from data.tokenize_job import tokenize

CACHE = Path(os.environ.get("BENCH_CACHE", ".cache/bench"))


def tree_digest(root: Path) -> tuple[str, int]:
    """sha256 over the names and bytes of all files below `root`, and how many there are."""
    digest = hashlib.sha256()
    files = sorted(p for p in root.rglob("*") if p.is_file())
    for path in files:
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        with open(path, "rb") as f:
            digest.update(hashlib.file_digest(f, "sha256").digest())
    return digest.hexdigest(), len(files)


def main(megabytes: float) -> int:
    shards = write_shards(CACHE / f"text-{megabytes:g}", megabytes)
    found = {}
    for runner in ("direct", "dask"):
        out = CACHE / f"agree-{runner}"
        shutil.rmtree(out, ignore_errors=True)
        start = time.perf_counter()
        manifest = tokenize(
            [("text", p) for p in shards], out, TokenizerConfig(), filter=FilterConfig(enabled=True), runner=runner,
            processes=2,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        size = sum(d["text_bytes"] for d in manifest["domains"].values()) / 1e6
        found[runner] = tree_digest(out)
        audit = manifest["audit"]
        print(f"{runner}: {size:.1f} MB of text in {seconds:.1f} s, {audit['tokens']} tokens, {audit['literal_eos']} "
              f"literal EOS, {found[runner][1]} files, sha256 {found[runner][0]}")  # fmt: skip
    return 0 if found["direct"] == found["dask"] else 1


if __name__ == "__main__":
    raise SystemExit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 520))
