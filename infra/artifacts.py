"""Identity of what a run made: strict fingerprints, digests, atomic writes, stage records.

A stage is done when its record `stages/<name>.json` stands. The record holds the key of what made it:
recipe section, input digests, the digest of the code it depends on, library versions. A directory listing
is never truth. The surprising thing: a record whose key differs is an error that names the part that
differs, not a silent rebuild, because the stage may have taken weeks.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from infra.errors import IdentityError, ReproError
from infra.leftovers import is_dead, sibling

MAX_JSON_BYTES = 1 << 30
HASHING_THREADS = 2


def canonical(value: Any, where: str = "value") -> Any:
    """`value` as plain JSON types that serialise the same way every time.

    Accepts None, bool, int, finite float, str, lists, tuples, string-keyed dicts and pydantic models.
    Raises IdentityError for anything else (sets, paths, arrays, NaN): no key is better than an unstable one.
    """
    if isinstance(value, BaseModel):
        return canonical(value.model_dump(mode="json"), where)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise IdentityError(f"{where} is {value}, which has no stable JSON form")
        return value
    if isinstance(value, list | tuple):
        return [canonical(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise IdentityError(f"{where} has the key {key!r}, which is not a string")
        return {k: canonical(value[k], f"{where}.{k}") for k in sorted(value)}
    raise IdentityError(
        f"{where} is a {type(value).__name__}, which cannot be serialised the same way twice",
        "pass plain values: strings, numbers, lists, dicts or recipe sections",
    )


def fingerprint(value: Any) -> str:
    """sha256 (hex) of the canonical JSON of `value`."""
    text = json.dumps(canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_file(path: str | Path) -> str:
    """sha256 (hex) of a file's bytes."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def sha256_files(paths: Iterable[str | Path]) -> list[str]:
    """sha256 (hex) of every file, in order. Two at a time: hashing lets go of the interpreter."""
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        return list(pool.map(sha256_file, paths))


def digest_tree(root: Path) -> dict[str, dict[str, Any]]:
    """`{relative path: {"sha256", "bytes"}}` of every file below `root`, or of `root` itself if it is a file."""
    if root.is_file():
        return {"": {"sha256": sha256_file(root), "bytes": root.stat().st_size}}
    files = sorted(p for p in root.rglob("*") if p.is_file())
    return {
        p.relative_to(root).as_posix(): {"sha256": d, "bytes": p.stat().st_size}
        for p, d in zip(files, sha256_files(files))
    }


def versions(*distributions: str) -> dict[str, str]:
    """Installed version of each distribution; `absent` where there is none."""
    found = {}
    for name in distributions:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def write_bytes_atomic(path: str | Path, content: bytes) -> None:
    """Write through a temporary sibling and `os.replace`: readers see the old file or the new, never half."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = sibling(path)
    try:
        with tmp.open("xb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise


def write_json_atomic(path: str | Path, value: Any) -> None:
    """`value` as indented JSON with sorted keys, written atomically. Refuses NaN."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_bytes_atomic(path, (text + "\n").encode())


def read_json(path: str | Path, remedy: str = "delete it and run its stage again") -> Any:
    """The JSON value in `path`. Raises IdentityError that names the file if it is missing or broken (then `remedy`)."""
    try:
        if Path(path).stat().st_size > MAX_JSON_BYTES:
            raise IdentityError(f"{path} is larger than {MAX_JSON_BYTES >> 20} MB: it is no record of ours")
        return json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise IdentityError(f"{path} does not exist", "run the stage that makes it first") from None
    except (ValueError, RecursionError) as e:
        raise IdentityError(f"{path} is not valid JSON: {e}", remedy) from None


@contextlib.contextmanager
def atomic_dir(path: str | Path) -> Iterator[Path]:
    """Yield a temporary sibling directory that becomes `path` on success and is removed on error.

    An existing `path` is replaced. Leftovers of killed writers are removed first.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for stale in path.parent.glob(f".{path.name}.tmp-*"):
        if is_dead(stale.name):
            shutil.rmtree(stale, ignore_errors=True)
    tmp = sibling(path)
    tmp.mkdir()
    try:
        yield tmp
        if path.exists():
            old = sibling(path)
            os.replace(path, old)
            os.replace(tmp, path)
            shutil.rmtree(old)
        else:
            os.replace(tmp, path)
    except BaseException:
        shutil.rmtree(tmp, ignore_errors=True)
        raise


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with the digest of all else in it: one that is damaged is told from one that speaks of damaged files."""
    open_record = {k: v for k, v in record.items() if k != "seal"}
    return {**open_record, "seal": fingerprint(open_record)}


def read_record(run: Path, stage: str) -> dict[str, Any]:
    """The record of a finished stage, as it was written. Raises IdentityError that names a damaged one; records from before the seal pass."""
    path = Path(run) / "stages" / f"{stage}.json"
    remedy = (
        f"what stage {stage} made may be intact: restore this file from a copy; without one, delete it and run "
        f"`repro {stage}` (training goes on from its last checkpoint, other stages are made again)"
    )
    record = read_json(path, remedy)
    if not isinstance(record, dict) or not isinstance(record.get("outputs"), Mapping):
        raise IdentityError(f"{path} is no record of a stage", remedy)
    if "seal" in record and sealed(record) != record:
        raise IdentityError(f"{path} is damaged: it is not as it was written", remedy)
    return record


def check_outputs(run: Path, stage: str, record: Mapping[str, Any]) -> None:
    """Hold every output of a stage against its record. Raises IdentityError that names a file that is gone or changed."""
    remedy = f"run `repro {stage} --redo` to make it again, or FRESH=1 to start over"
    for relative, expected in record["outputs"].items():
        actual = run / relative
        if not actual.is_file():
            raise IdentityError(f"{actual} is missing, but stage {stage} is recorded as done", remedy)
        if actual.stat().st_size != expected["bytes"] or sha256_file(actual) != expected["sha256"]:
            raise IdentityError(
                f"{actual} changed since stage {stage} made it (it is not what stages/{stage}.json says)",
                remedy,
            )


class StageRecord:
    """The record of one stage in a run directory: begun, committed, verified.

    `identity` holds everything the result depends on, in readable form; its fingerprint is the key.
    `outputs` are paths relative to the run directory.
    """

    def __init__(self, run: Path, name: str, identity: Mapping[str, Any]):
        self.run, self.name = Path(run), name
        self.identity = canonical(identity, name)
        self.key = fingerprint(self.identity)
        self.path = self.run / "stages" / f"{name}.json"
        self.begun_path = self.run / "stages" / f"{name}.begun.json"

    def standing(self) -> dict[str, Any] | None:
        """The committed record if it matches and its outputs are intact, else None (not committed).

        Raises IdentityError when a record stands with another key, or an output changed on disk.
        """
        if not self.path.exists():
            return None
        record = read_record(self.run, self.name)
        self._same_key(record, "was made")
        check_outputs(self.run, self.name, record)
        return record

    def begin(self) -> None:
        """Write down what is about to be made. A half-made result of another key is an error."""
        if self.begun_path.exists():
            self._same_key(read_json(self.begun_path), "was begun")
        else:
            write_json_atomic(
                self.begun_path, {"stage": self.name, "key": self.key, "identity": self.identity}
            )

    def commit(self, outputs: list[str], facts: Mapping[str, Any]) -> dict[str, Any]:
        """Digest `outputs` and write the record, last and atomically."""
        digests: dict[str, Any] = {}
        for relative in outputs:
            root = self.run / relative
            if not root.exists():
                raise ReproError(f"stage {self.name} did not write {root}")
            for inner, d in digest_tree(root).items():
                digests[f"{relative}/{inner}".rstrip("/")] = d
        record = sealed(
            {
                "stage": self.name,
                "key": self.key,
                "identity": self.identity,
                "outputs": digests,
                "digest": fingerprint({k: v["sha256"] for k, v in digests.items()}),
                **facts,
            }
        )
        write_json_atomic(self.path, record)
        return record

    def forget(self) -> None:
        """Remove the record, so that the stage counts as not made."""
        self.path.unlink(missing_ok=True)
        self.begun_path.unlink(missing_ok=True)

    def _same_key(self, record: Mapping[str, Any], verb: str) -> None:
        if record.get("key") == self.key:
            return
        parts = ", ".join(differences(record.get("identity", {}), self.identity)[:6]) or "the record itself"
        raise IdentityError(
            f"stage {self.name} in {self.run} {verb} with another identity; different: {parts}",
            f"FRESH=1 starts over; `repro {self.name} --redo` makes this stage and all after it again; "
            "RUN_DIR=... keeps both",
        )


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """Dotted paths at which two JSON values differ, with both values: `model.rope_theta (500000.0 -> 10000.0)`."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        found = []
        for key in sorted(old.keys() | new.keys()):
            found += differences(
                old.get(key, "absent"), new.get(key, "absent"), f"{where}.{key}" if where else key
            )
        return found
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [d for i, (a, b) in enumerate(zip(old, new)) for d in differences(a, b, f"{where}.{i}")]
    if old == new:
        return []
    return [f"{where} ({_short(old)} -> {_short(new)})"]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else text[:16] + "..."
