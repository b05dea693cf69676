"""Several processes that train one model together: who leads, who reads which rows, what they tell each other.

    with leading(Lease(...)):            # process 0 holds it; refused there is refused everywhere
        hosts = Hosts(mesh)
        told = hosts.tell(digest, stop)  # dispatched with the step
        digest, stop = hosts.heard(told) # read one step later: the sum over all hosts, and whether any wants to stop

Process 0 leads: it holds the lease, writes log and report lines, chooses and verifies the checkpoint to go on from, and
commits new ones. Every process reads its own rows and writes its own parts of a checkpoint.

The surprising thing: a SIGTERM reaches one host at a moment of its own, and a checkpoint is written by all of them at
one step. So nobody acts on a signal directly: it travels with the receipt's digests in one tiny all-gather per step, and
all hosts read the same answer at the same step. On an accelerator nothing waits for it, since it is read when the step's log is.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from data.receipt import combine
from infra.errors import LeaseError, RecipeError
from infra.lease import Lease

WORDS = 8  # a digest of 256 bits as uint32; one more word says "stop"


def lead() -> bool:
    """Whether this process leads the run; true when it is alone."""
    return jax.process_index() == 0


def from_lead(value: int) -> int:
    """The lead's `value`, on every process. Waits for all of them."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


@contextlib.contextmanager
def leading(lease: Lease) -> Iterator[None]:
    """Hold `lease` on the lead. When it is refused there, LeaseError everywhere."""
    refused: LeaseError | None = None
    with contextlib.ExitStack() as stack:
        if lead():
            try:
                stack.enter_context(lease)
            except LeaseError as e:
                refused = e
        held = from_lead(int(refused is None))
        if refused is not None:
            raise refused
        if not held:
            raise LeaseError(
                "process 0 did not get the lease of the run directory", "its message says who has it"
            )
        yield


def row_groups(owners: np.ndarray) -> dict[int, int]:
    """Process -> number of its group of rows. `owners` int[batch shards, devices of a shard]: process of each device.

    Processes that hold the same batch shards (a tensor axis over several hosts) are one group and read the same rows.
    Raises RecipeError when groups overlap or differ in size: their rows could not be read without reading some twice.
    """
    held: dict[int, set[int]] = {}
    for shard, row in enumerate(owners):
        for process in row:
            held.setdefault(int(process), set()).add(shard)
    groups = sorted({tuple(sorted(s)) for s in held.values()})
    if sum(map(len, groups)) != len(owners) or len({len(g) for g in groups}) > 1:
        raise RecipeError(
            f"the mesh gives processes unequal or overlapping parts of the batch: {[list(g) for g in groups]}",
            "choose mesh.tensor so that it divides the devices of a host, or the other way round",
        )
    return {process: groups.index(tuple(sorted(s))) for process, s in held.items()}


def _send(local: np.ndarray, where: NamedSharding, shape: tuple[int, ...]) -> jax.Array:
    """`local`, this process's part of `shape`, to its devices. jax's transfer guard counts this as implicit; it is meant."""
    with jax.transfer_guard_host_to_device("allow"):
        return jax.make_array_from_process_local_data(where, local, shape)


class Hosts:
    """This process among those that run `mesh`. `group` of `groups` says which rows of a batch it reads."""

    def __init__(self, mesh: Mesh):
        self.count = jax.process_count()
        processes = np.vectorize(lambda d: d.process_index, otypes=[int])(mesh.devices)
        groups = row_groups(processes.reshape(-1, mesh.shape["tensor"]))
        self.group, self.groups = groups[jax.process_index()], max(groups.values()) + 1
        # Of the processes that read the same rows, one counts them in the receipt.
        self.counts = jax.process_index() == min(p for p, g in groups.items() if g == self.group)
        if self.count > 1:
            devices = np.array(jax.devices()).reshape(self.count, -1)
            around = Mesh(devices, ("process", "local"))
            self._split = NamedSharding(around, PartitionSpec("process"))
            all_of_it = NamedSharding(around, PartitionSpec())
            shape = jax.ShapeDtypeStruct((self.count, WORDS + 1), np.uint32, sharding=self._split)
            self._gather = jax.jit(lambda x: x, out_shardings=all_of_it).lower(shape).compile()

    def positions(self, rows: int) -> np.ndarray:
        """Places in the global batch of this process's `rows` rows: int32[rows]."""
        return (self.group + self.groups * np.arange(rows)).astype(np.int32)

    def place(self, local: Any, where: NamedSharding, rows: int) -> jax.Array:
        """A global array from the rows of this process (`where` splits axis 0 of `rows`), or from a whole array."""
        return _send(local, where, (rows, *local.shape[1:]) if any(where.spec) else local.shape)

    def tell(self, digest: int, stop: bool, after: Any = ()) -> Any:
        """Send this process's digest and wish to stop to all; the answer is for `heard`.

        Accelerators run programs in the order they are given, so this does not wait. A CPU runs them side by side on
        few threads, where two programs that wait for other processes can block each other for ever: there it waits for
        the arrays `after` first, and for its own end.
        """
        if self.count == 1:
            return digest, stop
        in_order = jax.default_backend() != "cpu"
        if not in_order:
            jax.block_until_ready(after)
        raw = (digest if self.counts else 0).to_bytes(4 * WORDS, "little")
        words = np.append(np.frombuffer(raw, "<u4"), np.uint32(stop)).astype(np.uint32)
        told = self._gather(_send(words[None], self._split, (self.count, WORDS + 1)))
        return told if in_order else jax.block_until_ready(told)

    def heard(self, told: Any) -> tuple[int, bool]:
        """(digest of the whole global batch, whether any process wants to stop); the same on every process."""
        if self.count == 1:
            digest, stop = told
            return digest, stop
        table = np.asarray(jax.device_get(told))
        parts = (int.from_bytes(row[:WORDS].astype("<u4").tobytes(), "little") for row in table)
        return combine(parts), bool(table[:, WORDS].any())
