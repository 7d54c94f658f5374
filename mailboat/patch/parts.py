"""All parts of one patch as one: which part carries which tensor, and any block decoded on demand.

It reads; it never writes. What the parts do not carry between them, or carry twice, is refused before anything is
decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mailboat.checkpoint.inventory import Inventory
from mailboat.checkpoint.side_files import SideFile
from mailboat.checkpoint.source import Bytes
from mailboat.errors import PatchError
from mailboat.patch.blocks import BlockCode
from mailboat.patch.container import PatchFile
from mailboat.patch.format import CONTEXTUAL, SAME, Geometry, order_of
from mailboat.patch.runs import Columns, Numbers, Run, in_runs, runs_of
from mailboat.patch.streams import ChunkReader

_NOTHING = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor's blocks are: a part, the tensor's place in its table, and its first block's number there."""

    part: PatchFile
    place: int
    first_block: int
    changed: int


@dataclass(frozen=True, slots=True)
class Group:
    """A coding group of a part, and its blocks as (inventory index, first element, elements, changed elements)."""

    part: PatchFile
    number: int
    blocks: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class RunCode:
    """A run, and its bytes of the streams."""

    run: Run
    codes: Bytes
    values: Bytes
    literals: Bytes


class Parts:
    """The opened parts of a patch, consistent among themselves and with the inventory."""

    def __init__(self, parts: Sequence[PatchFile], inventory: Inventory) -> None:
        """Use `open`."""
        self.parts = tuple(sorted(parts, key=lambda part: part.part))
        self.inventory = inventory
        _check_set(self.parts)
        first = self.parts[0]
        self.from_digest, self.to_digest = first.from_digest, first.to_digest
        self.removed, self.carried_side_files = first.removed, first.side_files
        self.changed = sum(part.changed for part in self.parts)
        if first.inventory_digest != inventory.digest:
            raise PatchError("The patch was made for another inventory; take the patch of this model and epoch.")
        told = (first.tensors, first.elements, first.full_bytes)
        if told != (len(inventory.tensors), inventory.elements, inventory.full_bytes):
            raise PatchError("The patch's sizes are not those of its inventory; fetch or build it again.")
        self._columns = Columns.of(inventory)
        self.places = self._carried()
        self._streams: dict[tuple[int, str], ChunkReader] = {}
        # As lists: a block is looked up by single numbers, which arrays give slowly.
        self._starts = [{name: starts.tolist() for name, starts in part.table.starts.items()} for part in self.parts]

    @classmethod
    def open(cls, paths: Sequence[Path], inventory: Inventory, stack: ExitStack) -> Parts:
        """Open all parts, to be closed by `stack`. Raises PatchError, UnknownCodec."""
        return cls([stack.enter_context(PatchFile.open(path)) for path in paths], inventory)

    def codes(self, addresses: Numbers) -> Iterator[tuple[int, int, BlockCode]]:
        """(inventory index, first element, code) of each changed block that is neither contextual nor in a run."""
        for part in self.parts:
            table = part.table
            alone = (table.encoding != SAME) & (table.encoding != CONTEXTUAL) & ~in_runs(table, addresses)
            for block in np.flatnonzero(alone).tolist():
                index, first, _, _ = self._described(part, block)
                yield index, first, self._code(part, block, index)

    def runs(self, addresses: Numbers) -> Iterator[RunCode]:
        """The runs of all parts, where the tensors lie at `addresses` (0: elsewhere)."""
        for part in self.parts:
            starts = self._starts[part.part]
            for run in runs_of(part.table, self._columns, addresses):
                first, last = int(run.numbers[0]), int(run.numbers[-1]) + 1
                start, end = starts["positions"][first], starts["positions"][last]
                values, literals = (
                    self._read(part, name, starts[name][first], starts[name][last]) for name in ("values", "literals")
                )
                yield RunCode(run, part.read_positions(start, end - start), values, literals)

    def groups(self) -> Iterator[Group]:
        """The coding groups that have contextual blocks."""
        for part in self.parts:
            for number in range(part.table.groups):
                yield self._group(part, number)

    def group_of(self, index: int, number: int) -> Group | None:
        """The coding group that a block of a tensor is in; None where it is not contextual."""
        place = self.places[index]
        group = int(place.part.table.block_group[place.first_block + number])
        return None if group < 0 else self._group(place.part, group)

    def is_changed(self, index: int, number: int) -> bool:
        """Whether a block of a tensor changes."""
        place = self.places[index]
        return bool(place.changed) and place.part.table.encoding[place.first_block + number] != SAME

    def code(self, index: int, number: int) -> BlockCode:
        """One block's encoded bytes, with nothing decoded but the chunks that they lie in. Not thread safe."""
        place = self.places[index]
        return self._code(place.part, place.first_block + number, index)

    def _code(self, part: PatchFile, at: int, index: int) -> BlockCode:
        table = part.table
        spans = {name: (starts[at], starts[at + 1]) for name, starts in self._starts[part.part].items()}
        tensor = self.inventory.tensors[index]
        position_start, position_end = spans["positions"]
        size = position_end - position_start
        return BlockCode(
            encoding=int(table.encoding[at]),
            elements=int(table.block_elements[at]),
            width=Geometry.of(tensor).width,
            order=order_of(tensor.dtype),
            changed=int(table.block_changed[at]),
            positions=part.read_positions(position_start, size) if size else _NOTHING,
            **{name: self._read(part, name, *spans[name]) for name in ("values", "literals", "dense")},
        )

    def side_files(self, base: Sequence[SideFile]) -> tuple[SideFile, ...]:
        """The side files of the result. Raises PatchError when a removed one is not in the base."""
        after = {file.path: file for file in base}
        for path in self.removed:
            if after.pop(path, None) is None:
                raise PatchError(
                    f"The patch removes the side file {path}, which its base does not have; fetch it again."
                )
        after |= {file.path: file for file in self.carried_side_files}
        return tuple(after[path] for path in sorted(after))

    def read_side(self, path: str) -> bytes:
        """A carried side file; KeyError when it is not carried."""
        return self.parts[0].read_side(path)

    def _read(self, part: PatchFile, name: str, start: int, end: int) -> Bytes:
        if start == end:
            return _NOTHING
        key = (part.part, name)
        if key not in self._streams:
            self._streams[key] = part.stream(name)
        out = np.empty(end - start, np.uint8)
        self._streams[key].read(start, out)
        return out

    def _group(self, part: PatchFile, number: int) -> Group:
        table = part.table
        start, end = table.group_blocks[number : number + 2].tolist()
        inside = table.contextual_blocks[start:end].tolist()
        return Group(part, number, tuple(self._described(part, block) for block in inside))

    def _described(self, part: PatchFile, block: int) -> tuple[int, int, int, int]:
        """(inventory index, first element, elements, changed elements) of a block by its number in a part's table."""
        table = part.table
        place = int(table.block_tensor[block])
        first, elements = int(table.block_first[block]), int(table.block_elements[block])
        return int(table.index[place]), first, elements, int(table.block_changed[block])

    def _carried(self) -> list[Place]:
        tensors = self.inventory.tensors
        carried = np.concatenate([part.table.index for part in self.parts])
        if len(carried) != len(tensors) or len(np.unique(carried)) != len(tensors):
            raise PatchError("The patch's parts do not carry each tensor exactly once; fetch all parts of one patch.")
        places: list[Place | None] = [None] * len(tensors)
        for part in self.parts:
            table = part.table
            told = np.stack([table.elements, table.row_elements, table.width.astype(np.uint64)], axis=1)
            wrong = np.flatnonzero((told != self._columns.geometries[table.index]).any(axis=1))
            if len(wrong):
                name = tensors[int(table.index[wrong[0]])].name
                raise PatchError(f"The patch does not fit the shape of {name}; fetch or build it again.")
            columns = (table.index.tolist(), table.block_start[:-1].tolist(), table.changed.tolist())
            for at, (index, first_block, changed) in enumerate(zip(*columns, strict=True)):
                places[index] = Place(part, at, first_block, changed)
        return [place for place in places if place is not None]


def _check_set(parts: Sequence[PatchFile]) -> None:
    if not parts:
        raise PatchError("A patch needs at least one part; give its file.")
    if [part.part for part in parts] != list(range(parts[0].parts)):
        raise PatchError(
            f"The patch has {parts[0].parts} parts, and these are {', '.join(str(p.part) for p in parts[:20])}; "
            "give each part once."
        )
    same = {
        (p.from_digest, p.to_digest, p.inventory_digest, p.parts, p.tensors, p.elements, p.full_bytes) for p in parts
    }
    if len(same) != 1:
        raise PatchError("These parts belong to different patches; give the parts of one.")


def largest_width(inventory: Inventory) -> int:
    """The widest coding element of an inventory."""
    return max((tensor.width for tensor in inventory.tensors), default=1)
