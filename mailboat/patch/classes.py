"""Classes of old elements, and the profile that says how likely each class is to change (docs/format/contextual.md).

Only integers: equal counts give equal profiles on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import isqrt

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
# A level is worth sending only where it saves more bits than it takes: changes coded with a hazard that is off by a
# factor 2^(d/8) cost about 0.0054 d^2 bits too much each, and a level takes about three bits.
_WORTH = 512
# From so many changes on a sample of them says enough (a level that is off by as much as it then may be costs a bit or
# so); below, all are counted.
_SAMPLED_FROM = 1 << 14
_FRACTION_BITS = 54


@dataclass(frozen=True, slots=True)
class Classes:
    """The class of an element with the bits `u` is (u >> shift) & mask."""

    shift: int
    mask: int

    @property
    def count(self) -> int:
        """How many classes there are."""
        return self.mask + 1

    @property
    def place(self) -> tuple[np.uint64, np.uint64]:
        """Shift and mask as the kernels take them."""
        return np.uint64(self.shift), np.uint64(self.mask)


_NONE = Classes(0, 0)
_BYTE = Classes(0, 255)
_CODE = Classes(0, 127)
_CLASSES = {
    "BF16": Classes(7, 255), "F16": Classes(10, 31), "F32": Classes(23, 255), "F64": Classes(52, 255),
    "F8_E4M3": _CODE, "F8_E5M2": _CODE, "F8_E4M3FNUZ": _CODE, "F8_E5M2FNUZ": _CODE,
    "F8_E8M0": _NONE, "BOOL": _NONE, "I8": _NONE, "I16": _NONE, "U16": _NONE, "I32": _NONE, "U32": _NONE,
    "I64": _NONE, "U64": _NONE, "C64": _NONE,
}  # fmt: skip


def classes_of(dtype: str) -> Classes:
    """The classes of a dtype; bytes that hold packed codes (U8, F4, unknown dtypes) are their own class."""
    return _CLASSES.get(dtype, _BYTE)


@dataclass(frozen=True, slots=True)
class Profile:
    """Levels (uint8) of the classes `first` ... `last`, in an array over all 256; the others have level 0."""

    levels: npt.NDArray[np.uint8]
    first: int
    last: int


def sampled_enough(counts: Counts) -> bool:
    """Whether a sample's counts, of elements and of changed ones by class, will do for a profile."""
    return int(counts[1].sum()) >= _SAMPLED_FROM


def profile_of(counts: Counts) -> Profile:
    """The profile for counts of elements (row 0) and of changed elements (row 1) by class; some must have changed."""
    from mailboat.compiled import FIRST_LEVEL, hazard_of  # who only reads about patches does not wait for Numba

    changed = counts[1]
    elements = np.maximum(counts[0], changed)
    shares = (changed << 32) // np.maximum(elements, 1)
    wanted = np.searchsorted(_limits(), shares, side="right").tolist()
    used = np.flatnonzero(changed)
    first, last = int(used[0]), int(used[-1])
    levels = np.zeros(256, np.uint8)
    held = FIRST_LEVEL
    for place in range(first, last + 1):
        seen, level = int(changed[place]), wanted[place]
        loss = seen * (level - held) ** 2
        if not seen:
            # Nothing changed: what the held level costs is its hazard over the elements, in units of 0.0054 bit.
            loss = int(elements[place]) * (hazard_of(held) >> 32) * 185 >> 22
        keep = loss < _WORTH
        held = held if keep else level
        levels[place] = held
    return Profile(levels, first, last)


@cache
def _limits() -> Counts:
    """For each two neighbouring levels the share of changes in 2^-32, above which the higher one fits better."""
    from mailboat.compiled import HAZARDS, hazard_of

    return np.array([_share(hazard_of(level, 1)) for level in range(HAZARDS - 1)], np.int64)


def _share(hazard: int) -> int:
    """1 - 2^-x in 2^-32, for a hazard x in 2^-54 bit."""
    left, root = 1 << 64, 1 << 63
    whole, fraction = divmod(hazard, 1 << _FRACTION_BITS)
    for bit in range(_FRACTION_BITS - 1, -1, -1):
        root = isqrt(root << 64)
        if fraction >> bit & 1:
            left = left * root >> 64
    return (1 << 32) - (left >> 32 >> whole)
