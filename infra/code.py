"""The digest of the code a stage depends on: its module and all of our modules that it imports.

Imports are read from the source (also those inside functions), so nothing is executed. The surprising
thing: editing a helper three imports away changes the digest, editing a module that is not reached does not.
"""

import ast
import hashlib
import threading
from functools import lru_cache
from pathlib import Path

from infra.errors import ReproError

PACKAGES = ("pipelines", "evals", "model", "data", "infra")
ROOT = Path(__file__).resolve().parent.parent
_parsing = threading.Lock()  # CPython 3.11's ast.parse fails in two threads at once (python/cpython#106905)


def module_file(name: str) -> Path | None:
    """The source file of one of our modules, or None if `name` is not a module of ours."""
    if name.split(".")[0] not in PACKAGES:
        return None
    base = ROOT.joinpath(*name.split("."))
    for candidate in (base.with_suffix(".py"), base / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


@lru_cache
def _imports(path: Path) -> frozenset[str]:
    names: set[str] = set()
    with _parsing:
        tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
            names |= {f"{node.module}.{a.name}" for a in node.names}
    return frozenset(n for n in names if module_file(n) is not None)


def closure(*modules: str) -> dict[str, Path]:
    """`{module: file}` of the given modules and everything of ours they import, transitively."""
    found: dict[str, Path] = {}
    todo = list(modules)
    while todo:
        name = todo.pop()
        if name in found:
            continue
        path = module_file(name)
        if path is None:
            raise ReproError(f"{name} is not a module of this project")
        found[name] = path
        parents = name.split(".")
        todo += [".".join(parents[:i]) for i in range(1, len(parents))]
        todo += _imports(path)
    return found


def code_digest(*modules: str) -> dict[str, str]:
    """`{module: first 16 hex of sha256}` over the closure; put it in a stage's identity."""
    return {n: hashlib.sha256(p.read_bytes()).hexdigest()[:16] for n, p in sorted(closure(*modules).items())}
