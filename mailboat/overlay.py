"""The overlay: a decoded patch as absolute bytes, ready to be written over the state that it was decoded against.

Absolute bytes make writing it twice harmless. It must never be written anywhere before its maker has proved it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mailboat.checkpoint.inventory import Inventory
from mailboat.checkpoint.side_files import SideFile
from mailboat.checkpoint.source import Bytes, TensorSource
from mailboat.digest import State
from mailboat.patch.backends import kernels
from mailboat.patch.blocks import Positions
from mailboat.patch.format import ORDER_FLOAT, order_of
from mailboat.patch.new_bytes import NewBytes, Record


class Overlay(NewBytes):
    """Absolute bytes that turn the state `base_digest` into `target`, side files included."""

    def __init__(self, base_digest: str, target: State, scratch: Path) -> None:
        super().__init__(len(target.inventory.tensors), scratch)
        self.base_digest = base_digest
        self.target = target
        self._side: dict[str, tuple[int, int]] = {}

    @property
    def side_paths(self) -> tuple[str, ...]:
        """Paths of the side files that the overlay carries whole."""
        return tuple(self._side)

    def add_side(self, path: str, content: bytes) -> None:
        """Record a side file."""
        self._side[path] = (self._spool.append(content), len(content))

    def read_side(self, path: str) -> bytes:
        """A side file; KeyError when the overlay does not carry it."""
        return self._spool.read(*self._side[path]).tobytes()

    @classmethod
    def stacked(cls, layers: Sequence[Overlay], scratch: Path) -> Overlay:
        """One overlay that does what `layers` do one after the other: each element is written once, as the last leaves
        it. `changed` counts the elements that it writes. The layers stay the caller's to close. Raises DiskFull.
        """
        result = cls(layers[0].base_digest, layers[-1].target, scratch)
        try:
            for index, tensor in enumerate(result.target.inventory.tensors):
                blocks: dict[int, list[tuple[Overlay, Record]]] = {}
                for layer in layers:
                    for record in layer.records(index, 0, tensor.nbytes):
                        blocks.setdefault(record.start, []).append((layer, record))
                for written in blocks.values():
                    result._stack(index, written)
            kept = {file.path for file in result.target.side_files}
            for path in dict.fromkeys(path for layer in layers for path in layer.side_paths if path in kept):
                carrier = next(layer for layer in reversed(layers) if path in layer.side_paths)
                result.add_side(path, carrier.read_side(path))
            result.finish()
        except BaseException:
            result.close()
            raise
        return result

    @classmethod
    def undoing(cls, forward: Overlay, base: TensorSource, start: State, scratch: Path) -> Overlay:
        """What takes `forward` back: the bytes of `base`, at the state `start`, where it writes. Raises DiskFull."""
        result = cls(forward.target.digest, start, scratch)
        try:
            for index, tensor in enumerate(start.inventory.tensors):
                for record in forward.records(index, 0, tensor.nbytes):
                    old = np.empty(record.nbytes, np.uint8)
                    base.read(index, record.start, old)
                    positions = np.empty(0, np.uint32)
                    if record.count:
                        positions = forward.elements(record)[0]
                        old = old.reshape(-1, record.width)[positions].reshape(-1)
                    result._keep(index, (record.start, record.nbytes, record.width), positions, old)
                    result.changed += old.size // record.width
            same = set(forward.target.side_files)
            for file in start.side_files:
                if file not in same:
                    result.add_side(file.path, base.read_side(file.path))
            result.finish()
        except BaseException:
            result.close()
            raise
        return result

    def _stack(self, index: int, written: list[tuple[Overlay, Record]]) -> None:
        record = written[0][1]
        place = record.start, record.nbytes, record.width
        whole = max((number for number, (_, one) in enumerate(written) if not one.count), default=None)
        if whole is not None:
            layer, one = written[whole]
            new = layer.block(one, 0, one.nbytes)
            for layer, one in written[whole + 1 :]:
                kernels().scatter(*layer.elements(one), one.width, 0, new)
            self._keep(index, place, np.empty(0, np.uint32), new)
            self.changed += record.nbytes // record.width
            return
        pieces = [layer.elements(one) for layer, one in written]
        positions, elements = pieces[0]
        if len(pieces) > 1:
            positions, elements = _last_wins(pieces, record.width)
        self._keep(index, place, positions, elements)
        self.changed += positions.size


def _last_wins(pieces: list[tuple[Positions, Bytes]], width: int) -> tuple[Positions, Bytes]:
    """Positions, ascending, and elements of all pieces; where several name a position the last one's element."""
    positions = np.concatenate([piece[0] for piece in pieces])
    elements = np.concatenate([piece[1].reshape(-1, width) for piece in pieces])
    order = np.argsort(positions, kind="stable")
    last = np.append(positions[order][1:] != positions[order][:-1], True)
    return positions[order][last], elements[order][last].reshape(-1)


class Overlaid:
    """A base with an overlay laid over it: reads as if the overlay had been committed."""

    def __init__(self, base: TensorSource, overlay: Overlay) -> None:
        self._base, self._overlay = base, overlay

    @property
    def inventory(self) -> Inventory:
        """The inventory, the same before and after."""
        return self._overlay.target.inventory

    @property
    def side_files(self) -> tuple[SideFile, ...]:
        """The side files of the result."""
        return self._overlay.target.side_files

    def read(self, index: int, offset: int, out: Bytes) -> None:
        """Fill `out` with bytes of the result."""
        self._base.read(index, offset, out)
        self._overlay.lay_over(index, offset, out)

    def read_side(self, path: str) -> bytes:
        """A side file of the result."""
        return self._overlay.read_side(path) if path in self._overlay.side_paths else self._base.read_side(path)


class Compared(Overlaid):
    """The same, counting on the way how many changed elements of each tensor go to the next rank above or below.

    Each byte has to be read once, in whole elements, and each tensor by one thread at a time: as `digest.measure` does.
    """

    def __init__(self, base: TensorSource, overlay: Overlay) -> None:
        super().__init__(base, overlay)
        self.unit_steps = np.zeros(len(overlay.target.inventory.tensors), np.uint64)

    def read(self, index: int, offset: int, out: Bytes) -> None:
        """Fill `out` with bytes of the result, and count."""
        self._base.read(index, offset, out)
        tensor = self.inventory.tensors[index]
        for record in self._overlay.records(index, offset, offset + out.size):
            start, end = max(offset, record.start), min(offset + out.size, record.start + record.nbytes)
            old = out[start - offset : end - offset].view(f"<u{record.width}")
            if record.count:
                positions, elements = self._overlay.elements(record)
                first = (start - record.start) // record.width
                inside = (positions >= first) & (positions < first + old.size)
                at = positions[inside] - np.uint32(first)
                new = elements.view(old.dtype)[inside]
                self.unit_steps[index] += _unit_steps(old[at], new, order_of(tensor.dtype))
                old[at] = new
            else:
                new = self._overlay.block(record, start - record.start, end - record.start).view(old.dtype)
                self.unit_steps[index] += _unit_steps(old, new, order_of(tensor.dtype))
                old[:] = new


def _unit_steps(old: np.ndarray, new: np.ndarray, order: int) -> np.uint64:
    """Elements whose rank (docs/format/patch.md, section 5) goes up or down by one. Turning the sign bit of integers
    around changes no difference, so only floats have to be ranked for it.
    """
    if order == ORDER_FLOAT:
        old, new = _float_ranks(old), _float_ranks(new)
    up = new - old
    return np.uint64(np.count_nonzero((up == 1) | (up == np.iinfo(up.dtype).max)))


def _float_ranks(bits: np.ndarray) -> np.ndarray:
    """Ranks of bit patterns that are floats."""
    top = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    result: np.ndarray = np.where(bits & top, ~bits, bits | top)
    return result
