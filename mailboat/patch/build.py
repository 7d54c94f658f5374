"""Building a patch part: one streaming pass over base and target, block by block.

Must never hold a tensor in memory, and never leave a readable file name before the part is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mailboat.checkpoint.source import TensorSource
from mailboat.digest import State


@dataclass(frozen=True, slots=True)
class PartSpec:
    """Which part of a patch to write: `index` of `count`, carrying the inventory `indices` (sorted, no repeats)."""

    index: int
    count: int
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BuiltPatch:
    """A finished part file and the two states that it joins; `changed` counts this part's changed elements."""

    path: Path
    size: int
    sha256: str
    base_state: State
    target_state: State
    changed: int
    elements: int


def build_patch(
    base: TensorSource,
    target: TensorSource,
    out: Path,
    *,
    base_state: State | None = None,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
    part: PartSpec | None = None,
) -> BuiltPatch:
    """Write the patch (or one part of it) that turns `base` into `target`. `progress` is told bytes of target done.

    Raises InventoryMismatch, CheckpointError, CheckpointChanged, DiskFull.
    """
    raise NotImplementedError
