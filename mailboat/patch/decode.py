"""Decoding a whole patch against its base: every changed block as new bytes, and what it does to the sums.

It must never write: whoever asks keeps the new bytes until their sums, or stronger proof, are right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from mailboat.checkpoint.inventory import Tensor
from mailboat.checkpoint.source import Bytes, TensorSource
from mailboat.patch import blocks
from mailboat.patch.blocks import BlockCode, Positions, Sums
from mailboat.patch.contextual import GroupDecoder, OldBlock, in_calls
from mailboat.patch.format import POSITIONAL, Geometry
from mailboat.patch.parts import Group, Parts, RunCode, largest_width
from mailboat.patch.runs import POSITION_BYTES, address_in, addresses_of
from mailboat.patch.scratch import Scratch, Words, address_of, in_order, slots_for, source_words, workers

_EVERYWHERE = np.empty(0, np.uint32)


@dataclass(frozen=True, slots=True)
class Decoded:
    """A changed block: `new` elements of `width` bytes at `positions`; where `positions` is empty, the whole new block.

    `start`, `nbytes`: the block's bytes within its tensor; `change`: what it adds to the tensor's two sums.
    """

    index: int
    start: int
    nbytes: int
    width: int
    changed: int
    positions: Positions
    new: Bytes
    change: Sums


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a block of `elements` lies in its tensor."""

    tensor: Tensor
    geometry: Geometry
    index: int
    first: int
    elements: int

    @property
    def block(self) -> tuple[int, int, int]:
        return self.index, self.first, self.elements

    @property
    def start(self) -> int:
        return self.first * self.geometry.width

    @property
    def nbytes(self) -> int:
        return self.elements * self.geometry.width

    @property
    def piece(self) -> tuple[int, int, int]:
        return self.geometry.piece(self.first, self.elements)

    def is_small(self, changed: int) -> bool:
        """Whether changes take less memory one by one than the whole block does."""
        return changed * (POSITION_BYTES + self.geometry.width) < self.nbytes

    def decoded(self, changed: int, positions: Positions, new: Bytes, change: Sums) -> Decoded:
        return Decoded(self.index, self.start, self.nbytes, self.geometry.width, changed, positions, new, change)


class Decoder:
    """A patch laid against the base that it starts from."""

    def __init__(self, patch: Parts, base: TensorSource, threads: int) -> None:
        self._patch, self._base, self._threads = patch, base, threads
        self._addresses = addresses_of(base)
        self._tensors = base.inventory.tensors

    def all(self, stack: ExitStack) -> Iterator[Decoded]:
        """Every changed block, in no order; arrays are valid until the next one is asked for. Raises PatchError."""
        yield from self.contextual(stack)
        pool = stack.enter_context(workers(self._threads))
        slots = slots_for(largest_width(self._base.inventory), self._threads)
        for run in in_order(pool, slots, self._patch.runs(self._addresses), self.run):
            yield from run
        yield from in_order(pool, slots, self._patch.codes(self._addresses), self.block)

    def contextual(self, stack: ExitStack) -> Iterator[Decoded]:
        """The contextual blocks alone."""
        pool = stack.enter_context(workers(self._threads))
        for group in in_order(pool, self._threads, self._patch.groups(), self.group):
            yield from group

    def block(self, scratch: Scratch, job: tuple[int, int, BlockCode]) -> Decoded:
        """One block that isn't contextual; the result's arrays are views of the scratch. Raises PatchError."""
        index, first, code = job
        place = self._place(index, first, code.elements)
        old, old_bytes = self._old(scratch, place)
        if code.encoding == POSITIONAL:
            seed = blocks.seeds_of(place.tensor)
            positions, elements, change = blocks.decode_changes(scratch, old, code, piece=place.piece, seed=seed)
            kept = elements.view(np.uint8)[: positions.size * code.width]
            if place.is_small(positions.size):
                return place.decoded(positions.size, positions, kept, change)
            new, new_bytes = scratch.words("new", place.nbytes)
            new[:] = old
            scratch.kernels.scatter(positions, kept, code.width, 0, new_bytes)
            return place.decoded(positions.size, _EVERYWHERE, new_bytes, change)
        positions, new = blocks.decode_planes(scratch, old, code)
        new_bytes = new.view(np.uint8)[: place.nbytes]
        seed = blocks.seeds_of(place.tensor)
        change = blocks.sum_change(
            scratch, old_bytes, new_bytes, positions, width=code.width, piece=place.piece, seed=seed
        )
        if place.is_small(positions.size):
            kept = scratch.bytes("elements", positions.size * code.width)
            scratch.kernels.gather(new_bytes, positions, code.width, kept)
            return place.decoded(positions.size, positions, kept, change)
        return place.decoded(positions.size, _EVERYWHERE, new_bytes, change)

    def run(self, scratch: Scratch, code: RunCode) -> list[Decoded]:
        """The blocks of a run; the results' arrays are views of the scratch. Raises PatchError."""
        run = code.run
        changed, width, rows = run.rows[:, 5], run.rows[:, 3], len(run.rows)
        ends, words = np.cumsum(changed), np.cumsum((changed * width + 7) >> 3)
        positions = scratch.positions(int(ends[-1]))
        new, new_bytes = scratch.words("elements", int(words[-1]) * 8)
        change = np.zeros((rows, 2), np.uint64)
        blocks.require_sound(
            scratch.kernels.decode_positional(
                run.rows, run.seeds, code.codes, code.values, code.literals, positions, new, change
            )
        )
        starts, nbytes = run.first * width, run.rows[:, 2] * width
        columns = (column.tolist() for column in (run.index, starts, nbytes, width, changed, ends, words))
        return [
            Decoded(index, start, size, w, k, positions[end - k : end], new_bytes[at : at + k * w], change[number])
            for number, (index, start, size, w, k, end, word) in enumerate(zip(*columns, strict=True))
            for at in (8 * (word - (k * w + 7 >> 3)),)
        ]

    def group(self, scratch: Scratch, group: Group) -> list[Decoded]:
        """The blocks of a coding group. Raises PatchError."""
        decoder = GroupDecoder(group.part.read_group(group.number))
        found: list[Decoded] = []
        placed = [(self._place(index, first, elements), changed) for index, first, elements, changed in group.blocks]
        held = [address_in(self._addresses, place.geometry, *place.block) for place, _ in placed]
        for dtype, numbers in in_calls(held, [place.tensor.dtype for place, _ in placed]):
            asked = [
                OldBlock(
                    place.index, held[number] or address_of(self._old(scratch, place)[0]), place.elements, changed,
                    place.piece, blocks.seeds_of(place.tensor),
                )
                for number in numbers
                for place, changed in placed[number : number + 1]
            ]  # fmt: skip
            width = placed[numbers[0]][0].geometry.width
            taken, at, word = decoder.take(dtype, width, asked), 0, 0
            for number, change in zip(numbers, taken.change, strict=True):
                place, changed = placed[number]
                # A quarter at most changes: one by one, in memory of their own, since the whole group is handed on.
                new = taken.new[word:].view(np.uint8)[: changed * width]
                found.append(place.decoded(changed, taken.positions[at : at + changed], new, change))
                at, word = at + changed, word + -(-changed * width // 8)
        decoder.finish()
        return found

    def _place(self, index: int, first: int, elements: int) -> _Place:
        tensor = self._tensors[index]
        return _Place(tensor, Geometry.of(tensor), index, first, elements)

    def _old(self, scratch: Scratch, place: _Place) -> tuple[Words, Bytes]:
        span = place.start, place.start + place.nbytes
        return source_words(scratch, "old", self._base, place.index, span)
