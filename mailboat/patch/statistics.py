"""What a patch does to each tensor, as columns: changed elements, bytes, steps of one and encodings.

`docs/format/statistics.md` is the same in words. Made from the tables of a patch's parts, where nothing is decoded, and
from a count of steps, which `mailboat.overlay.Compared` takes along where old and new bytes meet anyway.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from mailboat.errors import PatchError
from mailboat.patch.container import PatchFile
from mailboat.patch.format import CHUNK_BYTES, ENCODING_NAMES, MAX_TENSORS, SAME
from mailboat.patch.table import STREAMS, Table

MAGIC = b"MBSTAT1\n"
HEADER = len(MAGIC) + 8
ROW = 8 + 8 + 8 + 1  # bytes per tensor, over all columns
BITS = {number: 1 << place for place, number in enumerate(ENCODING_NAMES)}  # encoding -> its bit in a mask

Column = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Statistics:
    """One entry per tensor of the inventory, in its order.

    `changed`: coding elements that the patch changes, uint64. `sizes`: the tensor's share of the patch's streams,
    uint64. `unit_steps`: changed elements that go to the next rank above or below, uint64. `encodings`: which encodings
    its blocks use, uint8, as a sum of `BITS`; 0 for a tensor that stays the same.
    """

    changed: Column
    sizes: Column
    unit_steps: Column
    encodings: Column

    def to_bytes(self) -> bytes:
        """The blob."""
        head = MAGIC + len(self.changed).to_bytes(8, "little")
        counts = (column.astype("<u8").tobytes() for column in (self.changed, self.sizes, self.unit_steps))
        return b"".join([head, *counts, self.encodings.tobytes()])

    @classmethod
    def from_bytes(cls, raw: bytes) -> Statistics:
        """Parses a blob. Raises PatchError."""
        if len(raw) < HEADER or raw[: len(MAGIC)] != MAGIC:
            _refuse("it has another format")
        count = int.from_bytes(raw[len(MAGIC) : HEADER], "little")
        if count > MAX_TENSORS or len(raw) != HEADER + ROW * count:
            _refuse("its length does not fit its count")
        found = cls(
            np.frombuffer(raw, "<u8", count, HEADER),
            np.frombuffer(raw, "<u8", count, HEADER + 8 * count),
            np.frombuffer(raw, "<u8", count, HEADER + 16 * count),
            np.frombuffer(raw, np.uint8, count, HEADER + 24 * count),
        )
        if (found.unit_steps > found.changed).any():
            _refuse("more steps than changes")
        if (found.encodings > sum(BITS.values())).any():
            _refuse("an unknown encoding")
        return found


def measure(parts: Iterable[PatchFile], unit_steps: Column) -> Statistics:
    """The statistics of a patch whose `unit_steps` were counted, one for each tensor of its inventory. A tensor may be
    spread over parts.
    """
    tensors = len(unit_steps)
    changed, size = np.zeros(tensors, np.uint64), np.zeros(tensors, np.uint64)
    encodings = np.zeros(tensors, np.uint8)
    for part in parts:
        index = part.table.index
        if len(index) and int(index[-1]) >= tensors:
            raise PatchError("The patch names a tensor beyond its inventory; build it again.")
        np.add.at(changed, index, part.table.changed.astype(np.uint64))
        np.add.at(size, index, shares(part).astype(np.uint64))
        np.bitwise_or.at(encodings, index, masks(part))
    return Statistics(changed, size, unit_steps, encodings)


def shares(part: PatchFile) -> Column:
    """For each tensor that the part carries the bytes of the streams that are its own, int64."""
    table = part.table
    starts = table.block_start
    taken = np.diff(table.starts["positions"][starts])
    for name in STREAMS:
        taken = taken + np.diff(_packed_offsets(table.starts[name][starts], table.chunks[name]))
    result: Column = taken + _contextual(table)
    return result


def _contextual(table: Table) -> Column:
    """For each carried tensor its share of the coding groups' words, by changes."""
    found = np.zeros(len(table.index), np.int64)
    inside = table.block_group >= 0
    groups, changed = table.block_group[inside], table.block_changed[inside].astype(np.int64)
    totals = np.zeros(table.groups, np.int64)
    np.add.at(totals, groups, changed)
    sizes = np.diff(table.group_start)
    np.add.at(found, table.block_tensor[inside], changed * sizes[groups] // totals[groups])
    return found


def masks(part: PatchFile) -> Column:
    """For each tensor that the part carries the encodings of its blocks, uint8."""
    table = part.table
    bits = np.zeros(256, np.uint8)
    for number, bit in BITS.items():
        if number != SAME:
            bits[number] = bit
    found = np.zeros(len(table.index), np.uint8)
    np.bitwise_or.at(found, table.block_tensor, bits[table.encoding])
    return found


def names(mask: int) -> tuple[str, ...]:
    """The encodings of a mask, in the order of their numbers."""
    return tuple(ENCODING_NAMES[number] for number, bit in BITS.items() if mask & bit)


def _packed_offsets(raw: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Where raw stream offsets fall in the compressed stream, in proportion inside a chunk."""
    if not len(sizes):
        return np.zeros(len(raw), np.int64)
    last = int(raw[-1]) - (len(sizes) - 1) * CHUNK_BYTES
    lengths = np.full(len(sizes), CHUNK_BYTES, np.int64)
    lengths[-1] = last
    packed = sizes.astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(packed)])
    chunk = np.minimum(raw // CHUNK_BYTES, len(sizes) - 1)
    result: np.ndarray = offsets[chunk] + (raw - chunk * CHUNK_BYTES) * packed[chunk] // lengths[chunk]
    return result


def _refuse(what: str) -> NoReturn:
    raise PatchError(f"These are no sound statistics ({what}); replay the version to see what its patch does.")
