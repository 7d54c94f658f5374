"""The overlay: a decoded patch as absolute bytes, ready to be written over the state that it was decoded against.

Absolute bytes make writing it twice harmless. It must never be written anywhere before its maker has proved it.
"""

from __future__ import annotations

from pathlib import Path

from mailboat.checkpoint.inventory import Inventory
from mailboat.checkpoint.side_files import SideFile
from mailboat.checkpoint.source import Bytes, TensorSource
from mailboat.digest import State
from mailboat.patch.new_bytes import NewBytes


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
