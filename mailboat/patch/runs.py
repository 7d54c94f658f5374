"""Positional blocks that follow one another in a part, as numbers for one call of compiled code.

Where the base lies in memory, what a block costs beyond its changes would else be half of what applying takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from mailboat.checkpoint.inventory import Inventory
from mailboat.checkpoint.source import ArraySource, TensorSource
from mailboat.patch import blocks
from mailboat.patch.format import POSITIONAL, Geometry, order_of, rice_parameters
from mailboat.patch.scratch import address_of
from mailboat.patch.table import Table

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
POSITION_BYTES = 4
# A run ends where it has so many changes: small beside a block's buffers, large beside what a call costs.
_CHANGES = 1 << 14
_KEPT = 4


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks by their numbers in a part's table, ascending: of each the inventory index, the first element, the seeds
    of its tensor's sums, and a row of what `compiled.decode_positional` takes.
    """

    numbers: Numbers
    index: Numbers
    first: Numbers
    seeds: npt.NDArray[np.uint64]
    rows: Numbers


@dataclass(frozen=True, slots=True)
class Columns:
    """An inventory's tensors as arrays: geometries (elements, elements of a row, width), orders, seeds of sums."""

    geometries: npt.NDArray[np.uint64]
    orders: Numbers
    seeds: npt.NDArray[np.uint64]

    @staticmethod
    @lru_cache(_KEPT)
    def of(inventory: Inventory) -> Columns:
        """Worked out once for an inventory: every patch of a model asks for the same."""
        tensors = inventory.tensors
        found = [Geometry.of(tensor) for tensor in tensors]
        return Columns(
            np.array([(one.elements, one.row_elements, one.width) for one in found], np.uint64).reshape(-1, 3),
            np.array([order_of(tensor.dtype) for tensor in tensors], np.int64),
            np.array([blocks.seeds_of(tensor) for tensor in tensors], np.uint64).reshape(-1, 2),
        )


def addresses_of(base: TensorSource) -> Numbers:
    """Where each tensor's bytes begin in memory, 0 where they can't be read in place."""
    count = len(base.inventory.tensors)
    if not isinstance(base, ArraySource):
        return np.zeros(count, np.int64)
    held = (base.words(index) for index in range(count))
    return np.array([0 if words is None else address_of(words) for words in held], np.int64)


def address_in(addresses: Numbers, geometry: Geometry, index: int, first: int, elements: int) -> int:
    """Where a block's bytes lie in memory; 0 where they have to be read."""
    start, nbytes = first * geometry.width, elements * geometry.width
    address = int(addresses[index])
    return address + start if address and not (start | nbytes) % 8 else 0


def in_runs(table: Table, addresses: Numbers) -> Mask:
    """Which blocks are decoded in runs: positional ones in place, whose changes take less memory one by one."""
    place = table.block_tensor
    width = table.width.astype(np.int64)[place]
    nbytes = table.block_elements * width
    few = table.block_changed.astype(np.int64) * (POSITION_BYTES + width) < nbytes
    whole = (table.block_first * width | nbytes) % 8 == 0
    found: Mask = (table.encoding == POSITIONAL) & few & whole & (addresses[table.index[place]] != 0)
    return found


def runs_of(table: Table, columns: Columns, addresses: Numbers) -> Iterator[Run]:
    """The runs of a part: in the streams, the bytes of a run's blocks follow one another."""
    inside = in_runs(table, addresses)
    numbers = np.flatnonzero(inside)
    if not len(numbers):
        return
    changed = table.block_changed.astype(np.int64)[numbers]
    # Positional blocks between two of them have bytes between theirs; no other block has.
    others = np.cumsum((table.encoding == POSITIONAL) & ~inside)[numbers]
    cuts = np.flatnonzero((np.diff(np.cumsum(changed) // _CHANGES) > 0) | (np.diff(others) > 0)) + 1
    place = table.block_tensor[numbers]
    index = table.index[place].astype(np.int64)
    elements, first = table.block_elements[numbers], table.block_first[numbers]
    row_elements, width = table.row_elements[place].astype(np.int64), table.width[place].astype(np.int64)
    row, column = np.divmod(first, row_elements)
    rows = np.stack(
        [
            addresses[index] + first * width, elements * width >> 3, elements, width, columns.orders[index], changed,
            rice_parameters(elements, changed), table.position_bytes[numbers].astype(np.int64),
            table.literals[numbers].astype(np.int64) * width, np.minimum(row_elements, elements) * width, row,
            column * width >> 3,
        ],
        axis=1,
    )  # fmt: skip
    for part in np.split(np.arange(len(numbers)), cuts):
        yield Run(numbers[part], index[part], first[part], columns.seeds[index[part]], rows[part])
