"""Real text for benchmarks and long proofs: documents of this environment as jsonl.gz shards.

python tests/benchmarks/real_text.py OUT MEGABYTES     (about 780 MB are there)
"""

import gzip
import json
import sys
from pathlib import Path

from data.documents import Document, read_documents
from data.environment import environment_files


def write_shards(out: Path, megabytes: float, shard_megabytes: float = 8.0) -> list[Path]:
    """Write up to `megabytes` of text below `out` (kept when it stands already); returns the shards."""
    done = out / "done.json"
    wanted = {"megabytes": megabytes, "shard_megabytes": shard_megabytes}
    if done.exists() and json.loads(done.read_text())["wanted"] == wanted:
        return sorted(out.glob("*.jsonl.gz"))
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*"):
        old.unlink()
    files = sorted((f for group in environment_files().values() for f in group), key=lambda f: f.name)
    total = in_shard = number = 0
    handle = None
    for file in files:
        for found in read_documents(file.path, format="txt", max_bytes=2_000_000, name=file.name):
            if not isinstance(found, Document):
                continue
            if handle is None or in_shard > shard_megabytes * 1e6:
                if handle is not None:
                    handle.close()
                handle = gzip.open(out / f"{number:05d}.jsonl.gz", "wt", compresslevel=1, encoding="utf-8")  # noqa: SIM115
                number, in_shard = number + 1, 0
            handle.write(json.dumps({"id": found.id, "text": found.text}, ensure_ascii=False) + "\n")
            size = len(found.text.encode())
            total, in_shard = total + size, in_shard + size
        if total > megabytes * 1e6:
            break
    if handle is not None:
        handle.close()
    done.write_text(json.dumps({"wanted": wanted, "text_bytes": total}))
    return sorted(out.glob("*.jsonl.gz"))


if __name__ == "__main__":
    made = write_shards(Path(sys.argv[1]), float(sys.argv[2]))
    print(f"{len(made)} shards in {sys.argv[1]}: {json.loads((Path(sys.argv[1]) / 'done.json').read_text())}")
