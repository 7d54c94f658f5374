"""How small changes can get, in bytes: entropies of positions and steps, with and without the old element's class."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from mailboat.checkpoint.inventory import Tensor
from mailboat.patch.classes import classes_of
from mailboat.patch.format import ORDER_FLOAT, ORDER_SIGNED, order_of


def binary(elements: int, changed: int) -> float:
    """Bits to say which of the elements changed: n times the entropy of the share."""
    if changed in {0, elements}:
        return 0.0
    share = changed / elements
    return -elements * (share * math.log2(share) + (1 - share) * math.log2(1 - share))


def symbols(values: np.ndarray) -> float:
    """Bits of values given their frequencies."""
    _, counts = np.unique(values, return_counts=True)
    return float(-(counts * np.log2(counts / max(1, values.size))).sum())


def ranks(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Ranks of bit patterns (docs/format/patch.md), modulo the width."""
    top = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    order = order_of(dtype)
    if order == ORDER_FLOAT:
        return np.where(bits & top, ~bits, bits | top)
    return bits ^ top if order == ORDER_SIGNED else bits


def bounds(tensors: Iterable[tuple[Tensor, np.ndarray, np.ndarray]]) -> dict[str, int]:
    """`contextual`: positions and steps given class and tensor; `no_context`: given the tensor alone. Whole bytes."""
    plain = given = 0.0
    for tensor, old, new in tensors:
        classes = classes_of(tensor.dtype)
        where = np.flatnonzero(old != new)
        before = old[where]
        steps = (ranks(new[where], tensor.dtype) - ranks(before, tensor.dtype)).view(f"i{old.itemsize}")
        plain += binary(old.size, where.size) + symbols(steps)
        shift, mask = old.dtype.type(classes.shift), old.dtype.type(classes.mask)
        every = np.bincount(((old >> shift) & mask).astype(np.uint8), minlength=256)
        kinds = ((before >> shift) & mask).astype(np.uint8)
        moved = np.bincount(kinds, minlength=256)
        given += sum(binary(n, k) for n, k in zip(every.tolist(), moved.tolist(), strict=True))
        given += sum(symbols(steps[kinds == kind]) for kind in np.flatnonzero(moved))
    return {"no_context": math.ceil(plain / 8), "contextual": math.ceil(given / 8)}
