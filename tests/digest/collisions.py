"""Other bytes with the very same sums: Wagner's generalised birthday over 128 words, in seconds.

Each word may take many values, and each value moves both 64-bit sums by a known amount; a tree of merges finds a value
per word such that the amounts cancel, 16 bits per level. It shows what the sums are worth against whoever can choose
bytes: nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.vectors.plain import CONSTANTS, MASK, seeds

Words = np.ndarray[tuple[int], np.dtype[np.uint64]]
WORDS = 128
CHOICES = 1 << 17  # values of a word, and sums that a merge keeps
LEVELS = 7


def collide(words: Words, name: str, dtype: str, *, component: str = "target", seed: int = 0) -> Words:
    """Other words of a tensor of one word per row, with equal sums: all of the first 128 differ."""
    shape = [words.size, 8 // {"BF16": 2, "F32": 4}[dtype]]
    keys = seeds(component, name, dtype, shape)
    rng = np.random.default_rng(seed)
    while True:
        choices = [rng.integers(0, 1 << 63, CHOICES, np.uint64) for _ in range(WORDS)]

        def moved(index: int, choices: list[Words] = choices) -> tuple[Words, Words]:
            before = words[index : index + 1]
            moves = [
                _mix(which, choices[index], key, index) - _mix(which, before, key, index)
                for which, key in zip("ab", keys, strict=True)
            ]
            return moves[0], moves[1]

        found = _solve(moved)
        if found is not None:
            other = words.copy()
            other[:WORDS] = [choices[index][choice] for index, choice in enumerate(found)]
            return other


def _mix(which: str, words: Words, seed: int, row: int) -> Words:
    per_row, _, first, second = (np.uint64(value & MASK) for value in CONSTANTS[which])
    with np.errstate(over="ignore"):
        x = words ^ (np.uint64(seed) + np.uint64(row) * per_row)
        x = (x ^ (x >> np.uint64(32))) * first
        x = (x ^ (x >> np.uint64(29))) * second
        return x ^ (x >> np.uint64(32))


class _Node:
    """Sums of some words' moves, and which two sums of the children each came from."""

    def __init__(self, a: Words, b: Words, parts: tuple[_Node, np.ndarray, _Node, np.ndarray] | None) -> None:
        self.a, self.b, self.parts = a, b, parts

    def choices(self, at: int) -> list[int]:
        """The choice for each word below."""
        if self.parts is None:
            return [at]
        left, left_at, right, right_at = self.parts
        return left.choices(int(left_at[at])) + right.choices(int(right_at[at]))


def _solve(moved: Callable[[int], tuple[Words, Words]]) -> list[int] | None:
    def node(level: int, index: int) -> _Node:
        if level == 0:
            return _Node(*moved(index), None)
        half = 1 << (level - 1)
        return _merge(node(level - 1, index), node(level - 1, index + half), level)

    root = node(LEVELS, 0)
    return root.choices(0) if root.a.size else None


def _merge(left: _Node, right: _Node, level: int) -> _Node:
    """Sums whose next 16 bits (at the last level the last 32) are zero."""
    width = np.uint64(32 if level == LEVELS else 16)
    shift = np.uint64(16 * (level - 1) % 64)
    mask = np.uint64((1 << int(width)) - 1)
    x, y = (left.a, right.a) if level <= 4 else (left.b, right.b)
    with np.errstate(over="ignore"):
        wanted = ((np.uint64(0) - x) >> shift) & mask
    keys = (y >> shift) & mask
    order = np.argsort(keys, kind="stable")
    sorted_keys = keys[order]
    first = np.searchsorted(sorted_keys, wanted, "left")
    count = np.searchsorted(sorted_keys, wanted, "right") - first
    left_at = np.repeat(np.arange(x.size), count)[:CHOICES]
    offset = np.arange(left_at.size) - np.repeat(np.cumsum(count) - count, count)[:CHOICES]
    right_at = order[first[left_at] + offset]
    with np.errstate(over="ignore"):
        a, b = left.a[left_at] + right.a[right_at], left.b[left_at] + right.b[right_at]
    thin = (left_at.astype(np.uint32), right_at.astype(np.uint32))
    for child in (left, right):  # only the way back is needed from here on
        child.a = child.b = child.a[:0]
    return _Node(a, b, (left, thin[0], right, thin[1]))
