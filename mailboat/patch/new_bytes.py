"""New bytes of blocks, kept until they are written: in memory while they are few, else in a file without a name.

They are absolute, so laying them over the old bytes twice is harmless. Nothing here knows a patch or a state.
"""

from __future__ import annotations

import os
import tempfile
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from mailboat.checkpoint.source import Bytes
from mailboat.patch.backends import kernels
from mailboat.patch.blocks import Positions
from mailboat.patch.decode import Decoded

IN_MEMORY = 64 << 20
_POSITION_BYTES = 4


class _Spool:
    """Bytes appended once and read at any place: in memory up to a size, beyond that in an unlinked file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._memory = bytearray()
        self._file: IO[bytes] | None = None
        self.size = 0

    def append(self, data: Bytes | bytes) -> int:
        """Add bytes; returns where they start."""
        start = self.size
        view = memoryview(data if isinstance(data, bytes) else data.data).cast("B")
        self.size += len(view)
        if self._file is None and self.size > IN_MEMORY:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - lives as long as the overlay
            self._file.write(self._memory)
            self._memory = bytearray()
        if self._file is None:
            self._memory += view
        else:
            self._file.write(view)
        return start

    def finish(self) -> None:
        """Make everything readable."""
        if self._file is not None:
            self._file.flush()

    def read(self, start: int, size: int) -> Bytes:
        """A copy of bytes; safe from several threads after `finish`."""
        out = np.empty(size, np.uint8)
        if self._file is None:
            out[:] = np.frombuffer(self._memory, np.uint8, size, start)
            return out
        view = out.data
        while view:
            count = os.preadv(self._file.fileno(), [view], start)
            if count == 0:
                raise EOFError("the overlay's own file is short")
            view, start = view[count:], start + count
        return out

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._memory, self.size = None, bytearray(), 0


@dataclass(frozen=True, slots=True)
class Record:
    """New bytes inside one block: `count` elements at positions, or the whole block when `count` is 0.

    `start` and `nbytes`: the block's bytes within its tensor; `at`: where the record's data lie in the spool.
    """

    start: int
    nbytes: int
    width: int
    count: int
    at: int


class NewBytes:
    """What changes in `tensors` tensors: `changed` elements, `nbytes` held.

    Memory up to 64 MiB, beyond that an unlinked file in `scratch`. Close it to give either back.
    """

    def __init__(self, tensors: int, scratch: Path) -> None:
        self.changed = 0
        self._spool = _Spool(scratch)
        self._records: list[list[Record]] = [[] for _ in range(tensors)]

    @property
    def nbytes(self) -> int:
        """Bytes held, in memory or on disk."""
        return self._spool.size

    def add(self, block: Decoded) -> None:
        """Record a block."""
        self.changed += block.changed
        self._keep(block.index, (block.start, block.nbytes, block.width), block.positions, block.new)

    def _keep(self, index: int, place: tuple[int, int, int], positions: Positions, new: Bytes) -> None:
        """Record new elements of a block at `place` (start, bytes, width), or all of it where `positions` is empty."""
        at = self._spool.append(positions.view(np.uint8))
        self._spool.append(new)
        self._records[index].append(Record(*place, positions.size, at))

    def finish(self) -> None:
        """Nothing more is added."""
        for records in self._records:
            records.sort(key=lambda record: record.start)
        self._spool.finish()

    def records(self, index: int, start: int, end: int) -> Iterator[Record]:
        """The records of a tensor that touch its bytes [start, end)."""
        records = self._records[index]
        first = max(0, bisect_right(records, start, key=lambda record: record.start) - 1)
        for record in records[first:]:
            if record.start >= end:
                return
            if record.start + record.nbytes > start:
                yield record

    def elements(self, record: Record) -> tuple[Positions, Bytes]:
        """Positions within the block, and the new elements, of a record that has a count."""
        data = self._spool.read(record.at, record.count * (_POSITION_BYTES + record.width))
        split = record.count * _POSITION_BYTES
        return data[:split].view(np.uint32), data[split:]

    def block(self, record: Record, start: int, end: int) -> Bytes:
        """Bytes [start, end) of the block of a record without a count."""
        return self._spool.read(record.at + start, end - start)

    def lay_over(self, index: int, offset: int, out: Bytes) -> None:
        """Write into `out`, which holds the base's bytes of a tensor from `offset`, what the overlay changes there."""
        for record in self.records(index, offset, offset + out.size):
            if record.count:
                positions, elements = self.elements(record)
                kernels().scatter(positions, elements, record.width, offset - record.start, out)
            else:
                start, end = max(offset, record.start), min(offset + out.size, record.start + record.nbytes)
                out[start - offset : end - offset] = self.block(record, start - record.start, end - record.start)

    def close(self) -> None:
        """Give the memory or the file back; repeating it is harmless."""
        self._spool.close()
        self._records = []
