"""Changes of blocks against a base, replaced as further patches are laid over it: in a file, however many there are."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mailboat.checkpoint.source import Bytes
from mailboat.patch.backends import kernels
from mailboat.patch.blocks import Positions

Block = tuple[int, int]  # inventory index, number of the block in its tensor
_POSITION_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Kept:
    """`count` changes (positions, then elements) or, when it is 0, the whole block: `nbytes` bytes of the file."""

    count: int
    at: int
    nbytes: int


class KeptChanges:
    """One entry per block. Any number of threads may put and lay; a block is not put by two at once."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._size = 0
        self._held: dict[Block, _Kept] = {}

    def version(self, block: Block) -> object:
        """Another object whenever something of the block was put."""
        return self._held.get(block)

    def put(self, block: Block, positions: Positions, elements: Bytes, width: int) -> None:
        """Keep new elements at positions besides what is kept, or, where there are no positions, a whole new block."""
        earlier = self._held.get(block)
        if earlier is not None and positions.size:
            data = self._read(earlier.at, earlier.nbytes)
            if earlier.count:
                positions, elements = _last_wins([_split(data, earlier.count), (positions, elements)], width)
            else:
                kernels().scatter(positions, elements, width, 0, data)
                positions, elements = positions[:0], data
        self._write(block, positions, elements)

    def _write(self, block: Block, positions: Positions, elements: Bytes) -> None:
        data = np.concatenate([positions.view(np.uint8), elements])
        with self._lock:
            at = self._size
            self._size += data.size
        view, done = data.data, 0
        while done < data.size:
            done += os.pwrite(self._descriptor, view[done:], at + done)
        self._held[block] = _Kept(positions.size, at, data.size)

    def lay(self, block: Block, width: int, offset: int, out: Bytes) -> None:
        """Write what is kept of a block into `out`, whose first byte lies `offset` bytes after the block's."""
        kept = self._held.get(block)
        if kept is None:
            return
        if kept.count:
            positions, elements = _split(self._read(kept.at, kept.nbytes), kept.count)
            kernels().scatter(positions, elements, width, offset, out)
            return
        start, end = max(0, offset), min(kept.nbytes, offset + out.size)
        out[start - offset : end - offset] = self._read(kept.at + start, end - start)

    def _read(self, at: int, nbytes: int) -> Bytes:
        out = np.empty(nbytes, np.uint8)
        view = out.data
        while view:
            count = os.preadv(self._descriptor, [view], at)
            if count == 0:
                raise EOFError("the file of kept changes is short")
            view, at = view[count:], at + count
        return out


def _split(data: Bytes, count: int) -> tuple[Positions, Bytes]:
    edge = count * _POSITION_BYTES
    return data[:edge].view(np.uint32), data[edge:]


def _last_wins(pieces: Sequence[tuple[Positions, Bytes]], width: int) -> tuple[Positions, Bytes]:
    """Positions, ascending, and elements of all pieces; where several name a position the last one's element."""
    positions = np.concatenate([piece[0] for piece in pieces])
    elements = np.concatenate([piece[1] for piece in pieces]).reshape(-1, width)
    order = np.argsort(positions, kind="stable")
    last = np.append(positions[order][1:] != positions[order][:-1], True)
    return positions[order][last], elements[order][last].reshape(-1)
