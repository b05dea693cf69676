"""The data receipt: a rolling digest of everything a training run has consumed.

For each row of a global batch
    h = blake2b-256(le u64 step, le u64 position in the global batch, le u64 instance id, le u32 token bytes)
The digest of a step is the sum of its h (little-endian integers) mod 2^256, so hosts can add up their rows.
The receipt rolls over steps: R_s = sha256(R_{s-1} || le u64 s || le u256 step digest), R_0 = 32 zero bytes.

`expected` computes the same from index and order, without a loader. Equal receipts at step k prove that
steps 1..k saw exactly those rows, in that order. The surprising thing: the position is hashed, so rows that
are merely permuted inside a batch already change the receipt.
"""

import hashlib
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np

from data.order import batch_ids
from infra.errors import DataError, IdentityError

MODULUS = 1 << 256
ALGORITHM = "blake2b-sum-sha256-v1"


def step_digest(step: int, ids: np.ndarray, tokens: np.ndarray, host: int = 0, hosts: int = 1) -> int:
    """Sum of the row digests of one step, mod 2^256.

    ids [b] and tokens [b, S] are the rows of `host`: position k of them is position host + k*hosts of the
    global batch. Digests of all hosts add up (mod 2^256) to the digest of the whole batch.
    """
    rows = np.ascontiguousarray(np.asarray(tokens).astype("<u4", copy=False))
    if len(rows) != len(ids):
        raise DataError(f"step {step}: {len(ids)} ids but {len(rows)} rows of tokens")
    total = 0
    for k, instance in enumerate(np.asarray(ids).tolist()):
        h = hashlib.blake2b(struct.pack("<QQQ", step, host + k * hosts, instance), digest_size=32)
        h.update(memoryview(rows[k]).cast("B"))
        total += int.from_bytes(h.digest(), "little")
    return total % MODULUS


def combine(digests: Iterable[int]) -> int:
    """The digest of a step from the digests of its hosts."""
    return sum(digests) % MODULUS


class Receipt:
    """The rolling digest after `step` steps. Feed every step once, in order, from step 1."""

    def __init__(self, step: int = 0, value: bytes = bytes(32)):
        self.step = step
        self._value = value

    def update(self, step: int, ids: np.ndarray, tokens: np.ndarray) -> None:
        """Consume the whole global batch of `step`: ids [B], tokens [B, S]."""
        self.push(step, step_digest(step, ids, tokens))

    def push(self, step: int, digest: int) -> None:
        """Consume the digest of `step` (see `step_digest` and `combine`). Steps must follow each other."""
        if step != self.step + 1:
            raise DataError(
                f"the receipt stands at step {self.step} and was given step {step}",
                "a batch was repeated or lost: resume the loader at the receipt's step + 1",
            )
        body = self._value + struct.pack("<Q", step) + digest.to_bytes(32, "little")
        self._value = hashlib.sha256(body).digest()
        self.step = step

    def hexdigest(self) -> str:
        return self._value.hex()

    def to_json(self) -> dict[str, Any]:
        return {"algorithm": ALGORITHM, "step": self.step, "digest": self.hexdigest()}

    @classmethod
    def from_json(cls, value: Any) -> "Receipt":
        """The receipt that `to_json` described. Refuses another algorithm."""
        if not isinstance(value, dict) or value.get("algorithm") != ALGORITHM:
            raise IdentityError(f"this is no receipt of the kind {ALGORITHM}: {str(value)[:80]}")
        return cls(int(value["step"]), bytes.fromhex(value["digest"]))


def expected(
    index: Any, order: np.ndarray, batch: int, upto_step: int, start: Receipt | None = None
) -> dict[int, str]:
    """The receipt after each step up to `upto_step`, from index and order alone: {step: hex}.

    `start` continues a receipt that was checked before. Reads each batch once, one batch in memory.
    """
    receipt = Receipt() if start is None else Receipt(start.step, bytes.fromhex(start.hexdigest()))
    found = {}
    for step in range(receipt.step + 1, upto_step + 1):
        ids = batch_ids(order, step, batch)
        receipt.update(step, ids, index.read(ids))
        found[step] = receipt.hexdigest()
    return found
