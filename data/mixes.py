"""Published mixes of token files: AI2's `label,path` manifests, read as they are.

A manifest that ships in the installed `ai2-olmo-core` is named (`OLMo-mix-0625-official`), any other is a
path. Lines keep their order; blank and `#` lines are skipped; `{TOKENIZER}` becomes the folder name that
OLMo-core puts there (`data/mixes/__init__.py`, 3.0.0); a path that leaves the base directory is refused.

`lock_mix` resolves every entry before any work, from a table of sizes or from the files themselves, and
writes a token manifest, so that everything after it is as for tokens of our own. The surprising thing: an
index needs sizes only, no token; with digests (sampled or full) it also has identity.
"""

import csv
import importlib.util
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from data.config import CorpusConfig, TokenizerConfig
from data.files import join, whole_file
from data.index import FORMAT, MANIFEST
from data.token_files import byte_size, full_digest, sample_digest, token_count
from data.tokenizer import Tokenizer
from infra.errors import DataError

PUBLIC_BASE = "https://olmo-data.org"
PLACEHOLDER = "{TOKENIZER}"
DOLMA2 = "allenai/dolma2-tokenizer"
# The folder name of dolma2 tokens in a mix, where it is not the tokenizer's own name.
DOLMA2_FOLDERS = {
    "OLMo-mix-0625-official": "allenai/dolma3-tokenizer",
    "OLMo-mix-0925-official": "allenai/dolma3-tokenizer",
    "OLMo-midtraining-mix-0625-100B": "allenai/dolma3-tokenizer",
    "OLMo-midtraining-mix-0925-ingredient1-100B": "allenai/dolma3-tokenizer",
    "OLMo-midtraining-mix-0925-ingredient2-100B": "allenai/dolma3-tokenizer",
    "OLMo-longmino-mix-0625": "allenai/dolma3-tokenizer",
    "OLMo-longmino-mix-0925": "allenai/dolma3-tokenizer",
    "v3-small-ppl-validation": "dolma2-tokenizer",
    "c4-ppl-validation": "dolma2-tokenizer",
    "code-fresh-ppl-validation": "dolma2-tokenizer",
}
Digests = Literal["full", "sampled", "size"]


@dataclass(frozen=True)
class MixEntry:
    """One line of a manifest: label and path below the base directory, `{TOKENIZER}` filled in."""

    label: str
    path: str
    line: int


def shipped_mixes() -> dict[str, Path]:
    """Name -> file of every mix in the installed ai2-olmo-core (which is not imported)."""
    found = importlib.util.find_spec("olmo_core")
    roots = list(found.submodule_search_locations or []) if found is not None else []
    files = [path for root in roots for path in Path(root, "data", "mixes").glob("*.txt")]
    return {path.stem: path for path in sorted(files)}


def mix_file(manifest: str) -> Path:
    """The file of a mix, by shipped name or by path."""
    shipped = shipped_mixes()
    if manifest in shipped:
        return shipped[manifest]
    path = Path(manifest)
    if not path.is_file():
        raise DataError(
            f"there is no mix manifest {manifest!r}",
            f"give a path or one of the mixes of ai2-olmo-core: {', '.join(shipped) or 'it is not installed'}",
        )
    return path


def tokenizer_folder(manifest: str, tokenizer: TokenizerConfig) -> str:
    """What `{TOKENIZER}` stands for in this mix."""
    if tokenizer.name == DOLMA2:
        return DOLMA2_FOLDERS.get(Path(manifest).stem, DOLMA2)
    return tokenizer.name


def read_mix(manifest: str, tokenizer: TokenizerConfig) -> list[MixEntry]:
    """The entries of a mix in file order. A shipped mix must name the tokenizer in every path."""
    path = mix_file(manifest)
    shipped = manifest in shipped_mixes()
    folder = tokenizer_folder(manifest, tokenizer)
    entries = []
    for number, raw in enumerate(path.read_text().splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        label, comma, relative = line.partition(",")
        where = f"{path.name} line {number}"
        if not comma or not label or not relative or "," in relative:
            raise DataError(f"{where} is not `label,path`: {line[:80]!r}", "correct the manifest")
        if shipped and PLACEHOLDER not in relative:
            raise DataError(
                f"{where} has no {PLACEHOLDER} in its path", "the manifest is not one of AI2's mixes"
            )
        relative = relative.replace(PLACEHOLDER, folder)
        if (
            "://" in relative
            or PurePosixPath(relative).is_absolute()
            or ".." in PurePosixPath(relative).parts
        ):
            raise DataError(
                f"{where} leaves the base directory: {relative}", "paths must be relative and without .."
            )
        entries.append(MixEntry(label, relative, number))
    if not entries:
        raise DataError(f"the mix {path} has no entry", "a manifest has lines of the form `label,path`")
    return entries


def read_sizes(table: str | Path) -> dict[str, int]:
    """A table of sizes, `path,bytes` lines: relative path -> bytes."""
    sizes = {}
    with open(table, newline="") as f:
        for number, row in enumerate(csv.reader(f), 1):
            if not row or row[0].startswith("#"):
                continue
            if len(row) != 2 or not row[1].strip().isdigit():
                raise DataError(f"{table} line {number} is not `path,bytes`", "correct the table of sizes")
            sizes[row[0]] = int(row[1])
    return sizes


def _sizes(
    entries: Sequence[MixEntry], base: str, known: Mapping[str, int] | None, threads: int
) -> list[int]:
    """The size of every entry, or one error that names the first missing one and how many there are."""

    def find(entry: MixEntry) -> int | str:
        if known is not None:
            return known.get(entry.path, "is not in the table of sizes")
        try:
            return byte_size(join(base, entry.path))
        except (DataError, OSError) as e:
            return f"cannot be found: {e}" if not isinstance(e, DataError) else "does not exist"

    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(find, entries))
    missing = [(entry, why) for entry, why in zip(entries, found) if isinstance(why, str)]
    if missing:
        entry, why = missing[0]
        raise DataError(
            f"line {entry.line} of the mix: {join(base, entry.path)} {why} "
            f"({len(missing)} of {len(entries)} entries are missing)",
            "check corpus.base_dir and the manifest; a run on another set of files is not the same run",
        )
    sizes = [size for size in found if isinstance(size, int)]
    for entry, size in zip(entries, sizes):
        token_count(join(base, entry.path), size)
    return sizes


def lock_mix(
    cfg: CorpusConfig,
    tokenizer: TokenizerConfig,
    out: str | Path,
    *,
    sizes: Mapping[str, int] | None = None,
    digests: Digests = "sampled",
    threads: int = 16,
    manifest: str = "",
) -> dict[str, Any]:
    """Resolve every entry of the mix and write `out/manifest.json`; returns it.

    `sizes`: relative path -> bytes, instead of asking the files. `digests`: full or sampled reads the files
    and makes them identifiable; size does not, and the manifest says so. `manifest` replaces
    `cfg.manifest` (for the held-out side).
    """
    name = manifest or cfg.manifest
    entries = read_mix(name, tokenizer)
    found = _sizes(entries, cfg.base_dir, sizes, threads)
    reader = {"full": full_digest, "sampled": sample_digest, "size": lambda _: ""}[digests]
    with ThreadPoolExecutor(threads) as pool:
        marks = list(pool.map(lambda entry: reader(join(cfg.base_dir, entry.path)), entries))
    described = {
        "format": FORMAT,
        "dtype": "<u4",
        "mix": name,
        "base_dir": cfg.base_dir,
        "identity": digests,
        "tokenizer": {**Tokenizer.identity(tokenizer)},
        "filter": None,
        "shards": [
            {
                "path": entry.path,
                "label": entry.label,
                "tokens": size // 4,
                "sha256": mark if digests == "full" else "",
                "sample_sha256": mark if digests == "sampled" else "",
            }
            for entry, size, mark in zip(entries, found, marks)
        ],
    }
    with whole_file(join(out, MANIFEST)) as f:
        f.write((json.dumps(described, indent=1, sort_keys=True) + "\n").encode())
    return described
