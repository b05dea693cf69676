"""Inputs that begin alike, as rows in which every shared beginning stands once.

    rows = pack([(0, a), (1, b), (2, c)], length=256)       # inputs in lexicographic order, either direction

The inputs of a row form a trie, laid out depth first. A token's `position` is its place in its own input, its `reach` the
last column that continues it: token i sees token j where j <= i <= reach[j] (`model.attention.trie_attention`), so each input
is computed as if it stood alone. The surprising thing: a beginning is repeated only where a row is full and the next begins.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

SHORTEST = 8  # tokens in common that are worth a place in a trie
LONGEST = 1024  # longer inputs keep the platform's own attention kernel, which knows no tries


@dataclass
class Row:
    """`tokens`, `position`, `reach` int32[length]; `begins` {input: (first own column, tokens before it in the trie)}."""

    tokens: np.ndarray
    position: np.ndarray
    reach: np.ndarray
    begins: dict[int, tuple[int, int]] = field(default_factory=dict)

    def column(self, input: int, position: int) -> int:
        """Column of one of the input's own tokens, by its position."""
        start, shared = self.begins[input]
        if position < shared:
            raise ValueError(f"position {position} of input {input} belongs to an input before it")
        return start + position - shared


def common(a: np.ndarray, b: np.ndarray) -> int:
    """Tokens that two sequences begin with in common."""
    n = min(len(a), len(b))
    same = a[:n] == b[:n]
    return n if same.all() else int(np.argmin(same))


def sharers(inputs: Sequence[np.ndarray]) -> list[bool]:
    """Which of sorted inputs are short enough and begin as a neighbour does, so that a trie saves work."""
    short = [len(x) <= LONGEST for x in inputs]
    alike = [
        short[k] and short[k + 1] and common(a, b) >= SHORTEST
        for k, (a, b) in enumerate(itertools.pairwise(inputs))
    ]
    return [left or right for left, right in zip([False, *alike], [*alike, False])]


def pack(inputs: Sequence[tuple[int, np.ndarray]], length: int) -> list[Row]:
    """Rows of `length` columns that hold all (number, int32[L]) inputs; sorted, L <= length. Unused columns see themselves."""
    rows: list[Row] = []
    end, path, before = length, np.empty(0, np.int64), np.empty(0, np.int32)
    for number, x in inputs:
        shared = common(before, x)
        if not rows or end + len(x) - shared > length:
            empty = np.zeros(length, np.int32)
            rows.append(Row(empty, empty.copy(), np.arange(length, dtype=np.int32)))
            end, shared, path = 0, 0, path[:0]
        row, stop = rows[-1], end + len(x) - shared
        row.begins[number] = (end, shared)
        row.tokens[end:stop] = x[shared:]
        row.position[end:stop] = np.arange(shared, len(x))
        path = np.concatenate([path[:shared], np.arange(end, stop)])
        row.reach[path] = stop - 1
        end, before = stop, x
    return rows
