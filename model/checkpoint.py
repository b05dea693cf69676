"""Checkpoints: one directory holds everything a run needs to go on, committed atomically, saved in the background.

    step<k>/params/ optimizer/   Orbax trees (weights; moments, Adam count, skip window, global step)
    step<k>/meta.json            step, data position and identity, receipt, model config, recipe, versions
    step<k>/MANIFEST.json        sha256 and size of every file above; written last

A directory without a fitting manifest is not a checkpoint: it is named, skipped and never deleted by a reader.
Several processes write one checkpoint together: each its own parts, process 0 the manifest, once all parts are there.
The surprising thing: the state is copied on the devices before `save` returns, because the next step reuses (donates)
its buffers while the writer still works.
"""

import dataclasses
import itertools
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from infra.artifacts import digest_tree, read_json, sha256_files, versions, write_json_atomic
from infra.errors import IdentityError, ReproError
from model.config import ModelConfig

MANIFEST, META, FORMAT = "MANIFEST.json", "meta.json", 1
CONTENTS = ("params", "optimizer", META)
WRITING, DELETED, ASIDE = ".writing-", ".deleted-", "set-aside-"
WEIGHTS = ("params", META)  # the parts that whoever only reads the weights needs
LAYOUT = "pattern-scan-v1"  # how layers are stacked in the tree; named in meta.json
STEP = re.compile(r"^step(0|[1-9]\d*)$")
BARRIER_SECONDS = 1800  # hosts wait so long for each other's parts, and for the digests
_saves = itertools.count()  # every process counts alike, so a barrier's name is never used twice


@dataclasses.dataclass(frozen=True)
class Found:
    """The committed checkpoints of a directory, increasing, and what was passed over with the reason."""

    steps: tuple[int, ...]
    skipped: tuple[tuple[str, str], ...]


def step_dir(root: Path, step: int) -> Path:
    """Directory of a step's checkpoint."""
    return Path(root) / f"step{step}"


def problem(directory: Path, verify: bool = False, parts: tuple[str, ...] = ()) -> str | None:
    """Why `directory` is not a committed checkpoint; None if it is one.

    `verify` also checks every digest. `parts`: only these files and folders are looked at, so that a copy of the weights
    alone will do for a reader of weights; never for going on with training.
    """
    if not (directory / MANIFEST).is_file():
        return "no manifest: half-written"
    named = STEP.match(directory.name)
    try:
        manifest = read_json(directory / MANIFEST)
        files = manifest["files"]
        if manifest["format"] != FORMAT:
            return f"format {manifest['format']}, this code reads {FORMAT}"
        if named and manifest["step"] != int(named.group(1)):
            return f"its manifest is that of step {manifest['step']}"
        for part in CONTENTS:
            if not any(name.split("/")[0] == part for name in files):
                return f"broken manifest: it lists no {part}"
        for name, entry in files.items():
            if name.startswith("/") or ".." in name.split("/") or "\0" in name:
                return f"broken manifest: {name!r} lies outside the checkpoint"
            if not isinstance(entry["sha256"], str) or not isinstance(entry["bytes"], int):
                return f"broken manifest: no digest and size of {name}"
    except (ReproError, KeyError, TypeError, AttributeError) as e:
        return f"broken manifest: {e}"
    try:
        for name, entry in files.items():
            if parts and name.split("/")[0] not in parts:
                continue
            path = directory / name
            if not path.is_file() or path.stat().st_size != entry["bytes"]:
                return f"{name} is missing or has another size"
    except (OSError, ValueError) as e:  # no name that a file can have
        return f"broken manifest: {name[:80]!r}: {e.__class__.__name__}"
    if verify:
        names = [n for n in files if not parts or n.split("/")[0] in parts]
        for name, digest in zip(names, sha256_files(directory / n for n in names)):
            if digest != files[name]["sha256"]:
                return f"{name} is corrupt: its digest differs from the manifest"
    return None


def committed(root: str | Path) -> Found:
    """All committed checkpoints below `root`, by manifest and file sizes."""
    steps, skipped = [], []
    root = Path(root)
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        match = STEP.match(path.name)
        if not path.is_dir() or path.name.startswith((DELETED, ASIDE)):
            continue
        other = "half-written: never committed" if path.name.startswith(WRITING) else "not a step directory"
        why = problem(path) if match else other
        if match and why is None:
            steps.append(int(match.group(1)))
        else:
            skipped.append((path.name, str(why)))
    return Found(tuple(sorted(steps)), tuple(skipped))


def latest_committed(root: str | Path, verify: bool = True) -> tuple[int | None, tuple[tuple[str, str], ...]]:
    """(newest step that is whole, what was passed over and why). `verify` checks the digests of that one.

    A newer checkpoint that is half-written or corrupt is passed over for the one before it.
    """
    found = committed(root)
    skipped = list(found.skipped)
    for step in reversed(found.steps):
        why = problem(step_dir(Path(root), step), verify=True) if verify else None
        if why is None:
            return step, tuple(skipped)
        skipped.append((f"step{step}", why))
    return None, tuple(skipped)


def make_room(root: Path, step: int) -> list[str]:
    """Before a run goes on from `step`: what its writer left behind is removed, what stands in its way is set aside.

    Removed: checkpoints that were never committed or were being deleted. Set aside, with its new name returned: any
    step beyond `step`; it was passed over, and would be counted among the checkpoints to keep. Only the owner of the
    run's lease calls this.
    """
    aside = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        match = STEP.match(path.name)
        if path.name.startswith((WRITING, DELETED)):
            shutil.rmtree(path)
        elif match and int(match.group(1)) > step:
            aside.append(set_aside(path).name)
    return aside


def set_aside(path: Path) -> Path:
    """Rename the directory of a step out of the way; its new place."""
    new, n = path.with_name(f"{ASIDE}{path.name}"), 0
    while new.exists():
        n += 1
        new = path.with_name(f"{ASIDE}{path.name}-{n}")
    os.replace(path, new)
    return new


def read_meta(root: str | Path, step: int, parts: tuple[str, ...] = ()) -> dict[str, Any]:
    """The meta record of a committed checkpoint, or of one of which only `parts` need be here."""
    directory = step_dir(Path(root), step)
    why = problem(directory, parts=parts)
    if why is not None:
        raise IdentityError(f"{directory} is not a committed checkpoint: {why}", "choose another step")
    return _meta(directory)


def _meta(directory: Path) -> dict[str, Any]:
    """The record beside the arrays."""
    meta = read_json(directory / META)
    if not isinstance(meta, dict):
        raise IdentityError(f"{directory / META} is no object", "choose another step")
    return meta


def restore(root: str | Path, step: int, abstract: Any, *, verify: bool = True) -> tuple[Any, dict[str, Any]]:
    """(state, meta). `abstract`: tree of ShapeDtypeStructs with shardings, `{"params", "opt", "step"}` or a part.

    Always restores to the shapes and shardings given, so the saving mesh does not matter. Only `params` in
    `abstract`: only they are read. A parameter that the checkpoint lacks or has in another shape is an error.
    """
    directory = step_dir(Path(root), step)
    why = problem(directory, verify, () if "opt" in abstract else WEIGHTS)
    if why is not None:
        raise IdentityError(
            f"{directory} cannot be restored: {why}", "use an older checkpoint, or save it again"
        )
    meta = _meta(directory)
    if meta.get("layout", LAYOUT) != LAYOUT:
        raise IdentityError(
            f"{directory} holds layers in the layout {meta['layout']!r}, this code reads {LAYOUT!r}",
            "export it with the version of this code that wrote it",
        )
    out = {"params": _read_tree(directory / "params", abstract["params"])}
    if "opt" in abstract:
        rest = _read_tree(directory / "optimizer", {k: v for k, v in abstract.items() if k != "params"})
        out.update(rest)
    return out, meta


def restore_params(root: str | Path, step: int, *, verify: bool = True) -> tuple[dict[str, Any], ModelConfig]:
    """(weights as float32 numpy arrays, the model config stored with them): the checkpoint describes itself."""
    from model.olmo3 import abstract_params

    cfg = _stored_model(read_meta(root, step, WEIGHTS), step_dir(Path(root), step))
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), abstract_params(cfg)
    )
    state, _ = restore(root, step, {"params": abstract}, verify=verify)
    return jax.tree.map(np.asarray, state["params"]), cfg


def _stored_model(meta: Any, directory: Path) -> ModelConfig:
    """The model config in a checkpoint's meta record."""
    try:
        return ModelConfig.model_validate(meta["model"])
    except (KeyError, TypeError, ValueError) as e:
        raise IdentityError(
            f"{directory / META} does not describe a model: {str(e)[:300]}", "choose another step"
        ) from None


def _read_tree(path: Path, abstract: Any) -> Any:
    import orbax.checkpoint as ocp

    if not path.is_dir():
        raise IdentityError(
            f"{path} does not exist: the checkpoint holds no such part", "choose another step"
        )
    with ocp.StandardCheckpointer() as reader:
        saved = _guarded(path, lambda: reader.metadata(path.absolute()).item_metadata.tree)
        have = {
            jax.tree_util.keystr(k): tuple(v.shape) for k, v in jax.tree_util.tree_leaves_with_path(saved)
        }
        want = {
            jax.tree_util.keystr(k): tuple(v.shape) for k, v in jax.tree_util.tree_leaves_with_path(abstract)
        }
        wrong = [f"{k} is {have.get(k, 'absent')}, wanted {want.get(k, 'not at all')}"
                 for k in sorted(have.keys() | want.keys()) if have.get(k) != want.get(k)]  # fmt: skip
        if wrong:
            raise IdentityError(
                f"{path} holds another model: {'; '.join(wrong[:5])}",
                "restore with the model config in its meta.json",
            )
        return _guarded(path, lambda: reader.restore(path.absolute(), abstract))


def _guarded(path: Path, read: Callable[[], Any]) -> Any:
    """`read()`; what Orbax and tensorstore raise over damaged files of their own becomes one named error."""
    try:
        return read()
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, OSError) as e:
        raise IdentityError(
            f"{path} cannot be read: {type(e).__name__}: {str(e)[:300]}",
            "choose another step, or copy the checkpoint again",
        ) from e


def state_digest(tree: Any) -> str:
    """sha256 over names and bytes of all leaves: equal means bit-equal."""
    import hashlib

    h = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        h.update(jax.tree_util.keystr(path).encode())
        h.update(np.ascontiguousarray(jax.device_get(leaf)).tobytes())
    return h.hexdigest()


class Saver:
    """Writes checkpoints of one run in a background thread, one at a time.

    A failed save raises from the next call (`save`, `check` or `wait`) with its path. `keep`: landmark steps that
    stay; of the others the last `keep_last` committed stay. Use as a context manager: leaving it waits.
    """

    def __init__(self, root: str | Path, keep: Iterable[int] = (), keep_last: int = 2):
        self.root, self.keep, self.keep_last = Path(root), frozenset(keep), keep_last
        self._thread: threading.Thread | None = None
        self._error: tuple[Path, BaseException] | None = None
        self._copy: Any = None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: Any, error: Any, tb: Any) -> None:
        if error is None:
            self.wait()
        elif self._thread is not None:
            self._thread.join()

    def prepare(self, abstract: Any) -> None:
        """Compile the copy of the state ahead of time, so that saving never compiles inside the loop."""
        shardings = jax.tree.map(lambda s: s.sharding, abstract)
        copy = jax.jit(
            lambda t: jax.tree.map(jnp.copy, t), in_shardings=(shardings,), out_shardings=shardings
        )
        self._copy = copy.lower(abstract).compile()

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Start saving `state` as `step`. Waits for an earlier save; returns once the state is copied."""
        self.wait()
        copied = self._copy(state) if self._copy is not None else jax.tree.map(jnp.copy, state)
        jax.block_until_ready(copied)
        record = {
            "format": FORMAT,
            "step": step,
            "versions": versions("jax", "flax", "orbax-checkpoint"),
            **meta,
        }
        self._thread = threading.Thread(
            target=self._run, args=(step, copied, record), name=f"save-step{step}"
        )
        self._thread.start()

    def check(self) -> None:
        """Raise the error of a failed save, if there was one."""
        if self._error is not None:
            path, error = self._error
            self._error = None
            if isinstance(error, ReproError):
                raise ReproError(f"saving {path} failed: {error.what}", error.remedy) from error
            raise ReproError(
                f"saving the checkpoint {path} failed: {type(error).__name__}: {error}",
                "free disk space or fix the permissions; the run continues from the checkpoint before it",
            ) from error

    def wait(self) -> None:
        """Wait for the save in progress; raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _run(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        path = step_dir(self.root, step)
        try:
            write_checkpoint(self.root, step, state, meta)
        except Exception as e:
            self._error = (path, e)
            return
        if jax.process_index() == 0:
            self._retire(step)

    def _retire(self, newest: int) -> None:
        """Delete committed checkpoints up to `newest` that are neither landmarks nor among the last `keep_last`.

        `newest` has just been written, and stays. One that cannot be deleted is no reason to stop training.
        """
        others = [s for s in committed(self.root).steps if s not in self.keep and s <= newest]
        for step in others[: -self.keep_last]:
            doomed = self.root / f"{DELETED}step{step}"
            try:
                if doomed.exists():
                    shutil.rmtree(doomed)
                os.replace(step_dir(self.root, step), doomed)
                shutil.rmtree(doomed)
            except OSError as e:
                print(f"the old checkpoint step{step} was not deleted: {e}", file=sys.stderr)


def write_checkpoint(
    root: Path, step: int, state: Any, meta: dict[str, Any], *, checkpointer: Any = None
) -> Path:
    """Write and commit one checkpoint: everything into a hidden directory, manifest last, then one rename.

    A directory in the way (a broken one, or one from before a roll-back) is set aside, not deleted. Every process of
    the run calls this; none returns before process 0 has committed. It may run in a background thread: processes wait
    for each other through jax's coordination service, never through the devices, which belong to the training loop.
    `checkpointer`: another of Orbax's than the standard one, for leaves that are read while they are written.
    """
    import orbax.checkpoint as ocp

    stands_at = int(jax.device_get(state["step"]))
    if stands_at != step:
        raise IdentityError(
            f"the state to be saved as step {step} is that of step {stands_at}",
            "nothing was written; report this",
        )
    lead, name = jax.process_index() == 0, f"checkpoint{next(_saves)}-step{step}"
    wait = ocp.multihost.get_barrier_sync_fn()
    final, tmp = step_dir(root, step), root / f"{WRITING}step{step}"
    if lead:
        root.mkdir(parents=True, exist_ok=True)
        if tmp.exists():
            shutil.rmtree(tmp)
        tmp.mkdir()
    wait(key=f"{name}-begun", timeout_ms=BARRIER_SECONDS * 1000)
    together = ocp.options.MultiprocessingOptions()
    if jax.process_count() > 1:
        everyone = set(range(jax.process_count()))
        together = ocp.options.MultiprocessingOptions(active_processes=everyone, barrier_sync_key_prefix=name)
    with checkpointer or ocp.StandardCheckpointer(multiprocessing_options=together) as writer:
        writer.save((tmp / "params").absolute(), state["params"])
        writer.save((tmp / "optimizer").absolute(), {k: v for k, v in state.items() if k != "params"})
        writer.wait_until_finished()
    wait(key=f"{name}-written", timeout_ms=BARRIER_SECONDS * 1000)
    if lead:
        _commit(root, step, tmp, final, meta)
    wait(key=f"{name}-committed", timeout_ms=BARRIER_SECONDS * 1000)
    return final


def _commit(root: Path, step: int, tmp: Path, final: Path, meta: dict[str, Any]) -> None:
    write_json_atomic(tmp / META, meta)
    write_json_atomic(tmp / MANIFEST, {"format": FORMAT, "step": step, "files": digest_tree(tmp)})
    if final.exists():
        set_aside(final)
    os.replace(tmp, final)
