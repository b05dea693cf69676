"""numpy's PCG64 shuffle of `arange(n, uint32)`, in numba, in n * 4 bytes of memory.

The same bits as `numpy.random.Generator(PCG64(seed)).shuffle(numpy.arange(n, dtype=numpy.uint32))`; the
tests compare them. Numpy's loop is Fisher-Yates from the end: j in [0, i] is drawn by masked rejection on
32-bit halves of the generator's words, low half first (`numpy/random/src/distributions/distributions.c`,
`random_interval`). Here the draws of a block are made first and the swaps follow, so that the processor
overlaps the cache misses. The surprising thing: that is all that makes it faster than numpy's own loop.
"""

import hashlib
import mmap
from typing import BinaryIO

import numba
import numpy as np

BLOCK = 1 << 14
WORDS = 1 << 15
WRITE = 1 << 22


@numba.njit(cache=True, nogil=True)
def _draw(words: np.ndarray, used: int, top: int, js: np.ndarray) -> tuple[int, int]:
    """Fill `js` with j for i = top, top-1, ... as long as `words` last.

    `words` uint64 from the generator, `used` 32-bit halves are spent. Returns (draws made, halves used).
    """
    halves = 2 * len(words)
    made = 0
    i = top
    while made < len(js) and i > 0:
        mask = np.uint32(i)
        mask |= mask >> np.uint32(1)
        mask |= mask >> np.uint32(2)
        mask |= mask >> np.uint32(4)
        mask |= mask >> np.uint32(8)
        mask |= mask >> np.uint32(16)
        bound = np.uint32(i)
        found = False
        while used < halves:
            word = words[used >> 1]
            half = np.uint32(word >> np.uint64(32)) if used & 1 else np.uint32(word & np.uint64(0xFFFFFFFF))
            used += 1
            value = half & mask
            if value <= bound:
                js[made] = value
                found = True
                break
        if not found:
            break
        made += 1
        i -= 1
    return made, used


@numba.njit(cache=True, nogil=True)
def _swap(values: np.ndarray, top: int, js: np.ndarray, count: int) -> None:
    for k in range(count):
        i = top - k
        j = js[k]
        kept = values[i]
        values[i] = values[j]
        values[j] = kept


def _array(n: int) -> np.ndarray:
    """Uninitialised uint32[n] in huge pages where the system has them: fewer TLB misses in the shuffle."""
    size = max(n * 4, 1)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= 1 << 22 and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint32, count=n)


def shuffled_blocks(n: int, seed: int) -> np.ndarray:
    """`arange(n)` shuffled as numpy's `Generator(PCG64(seed)).shuffle` does: uint32[n]."""
    values = _array(n)
    for start in range(0, n, WRITE):
        stop = min(start + WRITE, n)
        values[start:stop] = np.arange(start, stop, dtype=np.uint32)
    bits = np.random.PCG64(seed)
    js = np.empty(BLOCK, dtype=np.uint32)
    words = bits.random_raw(min(WORDS, n + 64))
    used = 0
    top = n - 1
    while top > 0:
        made, used = _draw(words, used, top, js)
        _swap(values, top, js, made)
        top -= made
        if used == 2 * len(words):
            words = bits.random_raw(min(WORDS, top + 64))
            used = 0
    return values


def write_hashed(out: BinaryIO, blocks: np.ndarray, chunk: int) -> str:
    """Write the order (blocks expanded by `chunk`) little-endian to `out`; returns its sha256."""
    inner = np.arange(chunk, dtype=np.uint32)
    digest = hashlib.sha256()
    for start in range(0, len(blocks), WRITE):
        part = blocks[start : start + WRITE]
        if chunk > 1:
            part = (part[:, None] * np.uint32(chunk) + inner).reshape(-1)
        raw = np.ascontiguousarray(part.astype("<u4", copy=False)).data
        digest.update(raw)
        out.write(raw)
    return digest.hexdigest()
