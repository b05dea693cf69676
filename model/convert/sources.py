"""Addresses of checkpoints: local paths, gs://, hub names with a pinned revision, AI2's published list.

    resolve("allenai/Olmo-3-1025-7B@stage1-step0")     -> local snapshot, with the commit and digests for the lineage
    published("stage1/step100000")                     -> the address of AI2's fp32 original

A hub name without a revision is refused: `main` moves. What arrives is checked against the digests that the hub or the
bucket gives: the hub's own client compares sizes only. The surprising thing: in the list the third stage is
called `stage_3_longcontext` while its folder is `stage3`, and stage 1 has a step 0 while the others have none.
Source: `allenai/OLMo-core`, `src/scripts/official/OLMo3/OLMo-3-1025-7B.csv`.
"""

import csv
import hashlib
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from infra.artifacts import atomic_dir, fingerprint, sha256_file
from infra.errors import IdentityError, RecipeError

HUB_NAME = re.compile(r"^(?P<repo>[\w.-]+/[\w.-]+)@(?P<revision>[\w./-]+)$")
STAGE_STEP = re.compile(r"^(?:(?P<model>Olmo-3-[\w-]+):)?stage(?P<stage>[123])/step(?P<step>\d+)$")
WANTED = ("*.safetensors", "*.json")
BASE = "https://olmo-checkpoints.org/ai2-llm/Olmo-3-1025-7B"
# stage -> (name in the list, first step, last step); every 1000 steps between, and the last.
STAGES_7B = {
    1: ("stage1_pretraining", 0, 1_413_814),
    2: ("stage2_midtraining", 1_000, 47_684),
    3: ("stage_3_longcontext", 1_000, 11_921),
}


class Resolved(NamedTuple):
    """A local directory and where it came from, for the lineage."""

    path: Path
    lineage: dict[str, Any]


def resolve(address: str | Path, cache: str | Path | None = None) -> Resolved:
    """`address` as a local directory. Hub and gs:// directories are fetched into `cache` (default: the hub's)."""
    text = str(address)
    if text.startswith("gs://"):
        return fetch(text, Path(cache or "~/.cache/olmo3-repro").expanduser())
    if Path(text).is_dir():
        return Resolved(Path(text), {"kind": "local", "path": str(Path(text).resolve())})
    match = HUB_NAME.match(text)
    if match:
        return snapshot(match["repo"], match["revision"], cache)
    if re.match(r"^[\w.-]+/[\w.-]+$", text) and not STAGE_STEP.match(text):
        raise RecipeError(
            f"{text} names no directory here, and as a hub name it lacks a revision",
            f"pin one: {text}@stage1-step1413814 (a branch such as main moves)",
        )
    if STAGE_STEP.match(text):
        raise RecipeError(
            f"{text} is published at {published(text)} as an OLMo-core checkpoint",
            "download that directory (it is 88 GB with optimizer state) and give its local path",
        )
    raise IdentityError(f"{text} is no directory", "give a local path, gs://..., or NAME@REVISION")


def snapshot(repo: str, revision: str, cache: str | Path | None = None) -> Resolved:
    """Weights and configuration of a hub repository at a revision: safetensors and JSON only, never code."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RevisionNotFoundError

    try:
        path = Path(snapshot_download(repo, revision=revision, cache_dir=cache, allow_patterns=list(WANTED)))
    except RevisionNotFoundError:
        raise IdentityError(
            f"{repo} has no revision {revision!r}",
            "see its list of branches; steps are named stage1-step1413814",
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, httpx.HTTPError, OSError) as e:
        raise IdentityError(
            f"{repo}@{revision} is not in the cache and cannot be fetched: {str(e).splitlines()[0]}",
            "check the name and the revision, and the network if HF_HUB_OFFLINE is not set; what has arrived is kept",
        ) from None
    files = {p.name: blob_digest(p) for p in sorted(path.iterdir()) if p.suffix in (".safetensors", ".json")}
    return Resolved(
        path, {"kind": "hub", "repo": repo, "revision": revision, "commit": path.name, "files": files}
    )


def blob_digest(path: Path) -> str:
    """sha256 of a file in a hub cache. Its blob is named by content, and content that does not fit is refused.

    Large files are named by sha256, small ones by git's blob id (sha1 over `blob <size>` and the bytes).
    """
    blob = path.resolve()
    found = sha256_file(blob)
    if re.fullmatch(r"[0-9a-f]{64}", blob.name):
        wanted, actual = blob.name, found
    elif re.fullmatch(r"[0-9a-f]{40}", blob.name):
        data = blob.read_bytes()
        wanted, actual = blob.name, hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    else:
        return found
    if wanted != actual:
        raise IdentityError(
            f"{path.name} arrived with the digest {actual[:16]}, the hub says {wanted[:16]}",
            f"delete {blob} and fetch it again",
        )
    return found


def fetch(url: str, cache: Path) -> Resolved:
    """Copy a gs:// (or other fsspec) directory into `cache`, once; the copy appears whole or not at all.

    Objects of gs:// are checked by CRC32C and pinned to the generation that was listed.
    """
    if url.startswith("gs://"):
        return _fetch_bucket(url, cache)
    import fsspec

    system, root = fsspec.core.url_to_fs(url.rstrip("/"))
    listing = {name: info for name, info in system.find(root, detail=True).items() if info["type"] == "file"}
    if not listing:
        raise IdentityError(f"{url} holds no file", "check the address and the permissions")
    sizes = {str(Path(n).relative_to(root)): info["size"] for n, info in sorted(listing.items())}
    target = cache / f"{Path(root).name}-{fingerprint({'url': url, 'sizes': sizes})[:16]}"
    if not target.is_dir():
        with atomic_dir(target) as tmp:
            for name in listing:
                place = tmp / Path(name).relative_to(root)
                place.parent.mkdir(parents=True, exist_ok=True)
                system.get_file(name, os.fspath(place))
                if place.stat().st_size != listing[name]["size"]:
                    raise IdentityError(f"{name} arrived with {place.stat().st_size} bytes", "fetch it again")
    return Resolved(target, {"kind": "remote", "url": url, "sizes": sizes})


def _fetch_bucket(url: str, cache: Path) -> Resolved:
    from infra.storage import open_url

    bucket, prefix = open_url(url)
    listed = {n.removeprefix(prefix): e for n, e in bucket.list(prefix).items() if not n.endswith("/")}
    if not listed:
        raise IdentityError(f"{url} holds no file", "check the address and the permissions")
    outside = [n for n in listed if ".." in Path(n).parts or Path(n).is_absolute()]
    if outside:
        raise IdentityError(f"{url} holds a name that leads elsewhere: {outside[0]!r}", "do not fetch it")
    objects = {
        n: {"bytes": e.size, "crc32c": e.crc32c, "generation": e.generation}
        for n, e in sorted(listed.items())
    }
    name = Path(prefix).name or bucket.name
    target = cache / f"{name}-{fingerprint({'url': url, 'objects': objects})[:16]}"
    if not target.is_dir():
        with atomic_dir(target) as tmp:
            bucket.download([(e, tmp / n) for n, e in listed.items()])
    return Resolved(target, {"kind": "remote", "url": url, "objects": objects})


def published(text: str, table: str | Path | None = None) -> str:
    """The address of a published step, as `stage1/step100000`. `table`: a CSV of AI2's form for another model.

    Raises RecipeError that names the nearest published steps.
    """
    match = STAGE_STEP.match(text)
    if match is None:
        raise RecipeError(f"{text!r} is no published step", "write it as stage1/step100000")
    stage, step = int(match["stage"]), int(match["step"])
    if table is None and match["model"] not in (None, "Olmo-3-1025-7B"):
        raise RecipeError(f"the list of {match['model']} is not built in", "give AI2's CSV of that model")
    steps = read_table(table)[stage] if table is not None else steps_7b(stage)
    if step not in steps:
        near = sorted(steps, key=lambda s: abs(s - step))[:2]
        raise RecipeError(
            f"stage {stage} has no published step {step}",
            f"nearest: {' and '.join(str(s) for s in sorted(near))}",
        )
    return steps[step]


def steps_7b(stage: int) -> dict[int, str]:
    """{step: address} of one stage of the 7B."""
    _, first, last = STAGES_7B[stage]
    return {s: f"{BASE}/stage{stage}/step{s}/" for s in [*range(first, last, 1000), last]}


def read_table(path: str | Path) -> dict[int, dict[int, str]]:
    """{stage: {step: address}} of a CSV `Stage,Step,Checkpoint Directory`."""
    out: dict[int, dict[int, str]] = {1: {}, 2: {}, 3: {}}
    with Path(path).open(newline="") as f:
        reader = csv.DictReader(f)
        if reader.fieldnames != ["Stage", "Step", "Checkpoint Directory"]:
            raise IdentityError(
                f"{path} has the columns {reader.fieldnames}", "give AI2's list of checkpoints"
            )
        for row in reader:
            digit = re.match(r"stage_?([123])", row["Stage"])
            if digit is None:
                raise IdentityError(f"{path}: unknown stage {row['Stage']!r}")
            out[int(digit[1])][int(row["Step"])] = row["Checkpoint Directory"]
    return out
