"""The global order: which instance is read when. A pure function of (n, seed, epoch, chunk).

Bit-equal to OLMo-core's `NumpyFSLDataLoader._build_global_indices` (`data/data_loader.py`, 3.0.0): numpy's
`Generator(PCG64(seed + epoch)).shuffle` of `arange(n, uint32)`. Epochs count from 1. The number of hosts,
workers and steps are not inputs. The surprising thing: with `chunk > 1` the last `n mod chunk` instances
never appear, and a batch of step s is `order[(s-1)*B : s*B]` because steps count from 1.

`write_order` builds the same bits into a file in bounded memory: one uint32 array of n entries and nothing
else (724 million instances: 2.9 GB), see `data/shuffle.py`. `open_order` maps it in milliseconds.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data.files import whole_file
from infra.artifacts import read_json, write_json_atomic
from infra.errors import DataError, IdentityError

ALGORITHM = "olmo-core-pcg64-v1"
ORDER_FILE, ORDER_JSON = "order.u32", "order.json"
EDGE_IDS = 1000
MAX_INSTANCES = 2**32 - 1


def order_length(n: int, chunk: int = 1) -> int:
    """How many entries the order of `n` instances has: `n` less the tail that fills no chunk."""
    return n // chunk * chunk


def _check(n: int, seed: int, epoch: int, chunk: int) -> None:
    if epoch < 1:
        raise DataError(f"epoch {epoch} is not possible: epochs count from 1")
    if chunk < 1 or seed < 0:
        raise DataError(f"chunk {chunk} must be at least 1 and seed {seed} at least 0")
    if not 0 < n < MAX_INSTANCES:
        raise DataError(f"{n} instances cannot be ordered: between 1 and {MAX_INSTANCES - 1} are possible")


def global_order(n: int, seed: int, epoch: int = 1, chunk: int = 1) -> np.ndarray:
    """The order of one epoch: uint32[order_length(n, chunk)] of instance ids."""
    _check(n, seed, epoch, chunk)
    rng = np.random.Generator(np.random.PCG64(seed + epoch))
    blocks = np.arange(n // chunk, dtype=np.uint32)
    rng.shuffle(blocks)
    return expand_chunks(blocks, chunk)


def expand_chunks(blocks: np.ndarray, chunk: int) -> np.ndarray:
    """Block ids uint32[m] -> the ids inside each block, in sequence: uint32[m * chunk]."""
    if chunk == 1:
        return blocks
    return (blocks[:, None] * np.uint32(chunk) + np.arange(chunk, dtype=np.uint32)).reshape(-1)


def batch_ids(order: np.ndarray, step: int, batch: int) -> np.ndarray:
    """Instance ids of global step `step` (from 1): uint32[batch]. Raises past the last whole batch."""
    if step < 1:
        raise DataError(f"step {step} is not possible: steps count from 1")
    if step * batch > len(order):
        raise DataError(
            f"step {step} needs {step * batch} instances, the order has {len(order)} "
            f"({len(order) // batch} steps of {batch})",
            "use a larger corpus, fewer steps or a smaller batch",
        )
    return np.asarray(order[(step - 1) * batch : step * batch])


def rank_slice(batch: np.ndarray, rank: int, ranks: int) -> np.ndarray:
    """The rows of one rank: strided, order kept (OLMo-core's rule). The only place where data is split."""
    if not 0 <= rank < ranks:
        raise DataError(f"rank {rank} of {ranks} does not exist")
    return batch[rank::ranks]


def step_at(tokens_seen: int, batch_tokens: int) -> int:
    """Steps of the present batch size that `tokens_seen` amounts to (sheet section 5.5: rounded down).

    After a change of batch size the remainder is replayed, as OLMo-core does: 96 tokens seen with a batch
    of 64 resume after step 1, and 32 tokens are read again.
    """
    return tokens_seen // batch_tokens


def write_order(
    directory: str | Path,
    n: int,
    *,
    seed: int,
    epoch: int = 1,
    chunk: int = 1,
    index_digest: str = "",
) -> dict[str, Any]:
    """Build the order into `directory/order.u32` (little-endian uint32) and describe it in `order.json`.

    Written whole or not at all. Returns the description.
    """
    from data.shuffle import shuffled_blocks, write_hashed  # numba is needed to build, not to read

    _check(n, seed, epoch, chunk)
    path = Path(directory) / ORDER_FILE
    recipe = {"algorithm": ALGORITHM, "n_instances": n, "seed": seed, "epoch": epoch, "chunk": chunk}
    blocks = shuffled_blocks(n // chunk, seed + epoch)
    entries = order_length(n, chunk)
    with whole_file(path) as f:
        digest = write_hashed(f, blocks, chunk)
        edge = EDGE_IDS // chunk + 1
        head = expand_chunks(blocks[:edge], chunk)[:EDGE_IDS]
        tail = expand_chunks(blocks[-edge:], chunk)[-EDGE_IDS:]
    described = {
        **recipe,
        "entries": entries,
        "bytes": entries * 4,
        "sha256": digest,
        "edge_sha256": edge_digest(head, tail),
        "index_digest": index_digest,
    }
    write_json_atomic(path.with_name(ORDER_JSON), described)
    return described


def edge_digest(head: np.ndarray, tail: np.ndarray) -> str:
    """sha256 over the first and the last 1,000 ids: cheap to check at every start."""
    return hashlib.sha256(head.astype("<u4").tobytes() + tail.astype("<u4").tobytes()).hexdigest()


def describe_order(directory: str | Path) -> dict[str, Any]:
    """The description in `order.json`; raises on an unknown algorithm."""
    described = read_json(Path(directory) / ORDER_JSON)
    if not isinstance(described, Mapping) or described.get("algorithm") != ALGORITHM:
        name = described.get("algorithm") if isinstance(described, Mapping) else described
        raise IdentityError(
            f"{directory} holds an order made by the unknown algorithm {name!r}",
            f"this code knows {ALGORITHM}; build the order again with `repro order`",
        )
    return dict(described)


def open_order(directory: str | Path, *, n_instances: int | None = None, index_digest: str = "") -> np.memmap:
    """Map the order file: uint32[entries], read only. Milliseconds, whatever its size.

    Checks the size and the first and last 1,000 ids, and, where given, that it was made for `n_instances`
    and for the index with `index_digest`.
    """
    directory = Path(directory)
    described = describe_order(directory)
    path = directory / ORDER_FILE
    if n_instances is not None and described["n_instances"] != n_instances:
        raise IdentityError(
            f"{path} orders {described['n_instances']} instances, the index has {n_instances}",
            "build the order again with `repro order`; never train on an order of another index",
        )
    if index_digest and described["index_digest"] and described["index_digest"] != index_digest:
        raise IdentityError(
            f"{path} was made for the index {described['index_digest'][:16]}, this one is {index_digest[:16]}",
            "the tokens changed: build the order again with `repro order`",
        )
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise IdentityError(f"{path} does not exist", "build it with `repro order`") from None
    if size != described["bytes"]:
        raise IdentityError(
            f"{path} has {size} bytes, its description says {described['bytes']}",
            "it is truncated or overwritten: build it again with `repro order`",
        )
    order = np.memmap(path, dtype="<u4", mode="r")
    if edge_digest(order[:EDGE_IDS], order[-EDGE_IDS:]) != described["edge_sha256"]:
        raise IdentityError(f"{path} is not the order it is said to be", "build it again with `repro order`")
    return order
