"""A coding group compared and encoded in one pass, where both sides lie in the CPU's memory and its blocks are as most
are: of one dtype, and no more of them changed than contextual blocks may be. For others there is the encoder's way, in
two passes, which gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mailboat.checkpoint.inventory import Tensor
from mailboat.patch.blocks import Sums, seeds_of
from mailboat.patch.classes import classes_of, profile_of, sampled_enough
from mailboat.patch.contextual import Codes, GroupEncoder
from mailboat.patch.format import BLOCK_ELEMENTS, Geometry, rice_parameters
from mailboat.patch.runs import Numbers
from mailboat.patch.scratch import Scratch

Place = tuple[int, int, int]  # of a block: its tensor's inventory index, its first element, its elements
# Words are 4 bytes; one more says how many a group has.
_WORD_BYTES = 4
# A group that takes more than half a bit for each element is one for the other way.
_ELEMENTS_PER_WORD = 64


@dataclass(frozen=True, slots=True)
class Coded:
    """A group's words, and of each block the changes and what they do to the two sums."""

    words: Codes
    changed: Numbers
    change: Sums


class OnePass:
    """Encodes groups of the tensors that both sources share; use from several threads at once."""

    def __init__(self, tensors: Sequence[Tensor], geometries: Sequence[Geometry], old: Numbers, new: Numbers) -> None:
        """`old`, `new`: addresses of both sides' tensors, as from `addresses_of`."""
        self._tensors, self._geometries = tensors, geometries
        self._old, self._new = old.tolist(), new.tolist()

    def encode(self, scratch: Scratch, blocks: Sequence[Place]) -> Coded | None:
        """The group of these blocks; None where it has to go the other way."""
        tensors = [self._tensors[index] for index, _, _ in blocks]
        dtype, width = tensors[0].dtype, tensors[0].width
        rows = np.array([self._row(*block) for block in blocks], np.int64)
        in_place = rows[:, :2].all() and not (rows[:, :2] % 8).any() and not (rows[:, 3] * width % 8).any()
        if not in_place or any(tensor.dtype != dtype for tensor in tensors):
            return None
        counts, positions = np.zeros((2, 256), np.int64), scratch.positions(BLOCK_ELEMENTS)
        scratch.kernels.sample_classes(rows, width, *classes_of(dtype).place, positions, counts)
        if not sampled_enough(counts):
            return None
        seeds = np.array([seeds_of(tensor) for tensor in tensors], np.uint64)
        encoder = GroupEncoder({dtype: profile_of(counts)}, int(rows[:, 3].sum()) // _ELEMENTS_PER_WORD)
        changed, change = np.zeros(len(rows), np.int64), np.zeros((len(rows), 2), np.uint64)
        if not encoder.compare(
            dtype, width, rows, seeds, counts=counts, positions=positions, changed=changed, change=change
        ):
            return None
        words = encoder.finish()
        if (words.size + 1) * _WORD_BYTES > _least(rows[:, 3], changed):
            return None
        return Coded(words.copy(), changed, change)

    def _row(self, index: int, first: int, elements: int) -> tuple[int, ...]:
        """As `compiled.compare_and_encode` takes it; addresses are 0 where a side can't be read in place."""
        geometry = self._geometries[index]
        start = first * geometry.width
        old, new = (address and address + start for address in (self._old[index], self._new[index]))
        return old, new, elements * geometry.width >> 3, elements, index, *geometry.piece(first, elements)


def _least(elements: Numbers, changed: Numbers) -> int:
    """Bytes that positions of these blocks take at the very least."""
    elements, changed = elements[changed > 0], changed[changed > 0]
    return int((changed * (1 + rice_parameters(elements, changed))).sum()) // 8
