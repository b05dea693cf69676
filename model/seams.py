"""`train/seams.json`: from which step on a run trained on which mesh. A run that never moved has one entry.

On the same mesh a resumed run is bit-equal; on another one it agrees within rounding, and the report says where.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.artifacts import read_json, write_json_atomic
from infra.errors import IdentityError

if TYPE_CHECKING:
    from jax.sharding import Mesh

FILE = "seams.json"


def note(path: Path, first_step: int, mesh: "Mesh") -> None:
    """Record that steps from `first_step` on run on `mesh`, unless the steps before it did too.

    Entries from `first_step` on are dropped: after a roll-back those steps are trained again.
    """
    here = {
        "first_step": first_step,
        "mesh": dict(mesh.shape),
        "devices": mesh.size,
        "kind": mesh.devices.flat[0].device_kind,
    }
    kept = [s for s in seams(path) if s["first_step"] < first_step]
    if kept and all(kept[-1][k] == here[k] for k in ("mesh", "devices", "kind")):
        here = kept.pop()
    write_json_atomic(path, [*kept, here])


def seams(path: Path) -> list[dict[str, Any]]:
    """The entries, by first step; none where the run has no such file. Raises IdentityError for a damaged one."""
    if not path.exists():
        return []
    found = read_json(path)
    fields = {"first_step": int, "mesh": dict, "devices": int, "kind": str}
    for entry in found if isinstance(found, list) else [None]:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(k), t) for k, t in fields.items()):
            raise IdentityError(f"{path} is no list of meshes", "train again: `repro train --redo`")
    return found
