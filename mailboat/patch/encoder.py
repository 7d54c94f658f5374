"""From two sources to the encoded streams of one part: diff, sums and the choice of encodings, in one pass.

Blocks are compared in order; where few elements change they wait until their coding group is complete, to be encoded
together. It must never hold a tensor in memory: what waits is the changes alone, and a group reads its base again.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from mailboat.checkpoint.source import Bytes, TensorSource
from mailboat.patch import blocks
from mailboat.patch.backends import on_device
from mailboat.patch.blocks import Encoded, is_regular
from mailboat.patch.classes import classes_of
from mailboat.patch.contextual import Codes
from mailboat.patch.format import CONTEXTUAL, GROUP_BYTES, SAME, Geometry, order_of, rice_parameter
from mailboat.patch.group import Changes, CodedGroup, encode_group
from mailboat.patch.known import KnownChanges, laid_over
from mailboat.patch.one_pass import Coded, OnePass
from mailboat.patch.runs import addresses_of
from mailboat.patch.scratch import Scratch, in_order, slots_for, source_words, workers
from mailboat.patch.streams import ChunkWriter
from mailboat.patch.table import STREAMS, Table, table_of

EncodeFor = Literal["size", "speed"]
_GROUPS_PER_THREAD = 2
_NO_STREAMS = frozenset({SAME, CONTEXTUAL})


@dataclass(frozen=True, slots=True)
class Job:
    """One block to compare. `window`: how many whole GROUP_BYTES of the part's tensors lie before its first byte."""

    index: int
    first: int
    elements: int
    window: int
    carried: bool


@dataclass(frozen=True, slots=True)
class Scanned:
    """A compared block. `old` and `new` are valid until the next one is asked for."""

    job: Job
    old: Bytes
    new: Bytes
    changed: int
    base_sums: np.ndarray
    delta: np.ndarray
    encoded: Encoded | Changes


@dataclass(slots=True)
class _Entry:
    """A block in the order of the streams, encoded or still waiting."""

    job: Job
    changed: int
    encoded: Encoded | None


@dataclass(slots=True)
class _Group:
    """Blocks that are encoded together."""

    window: int
    blocks: list[Changes] = field(default_factory=list)
    entries: list[_Entry] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Coding:
    """A group on its way."""

    entries: list[_Entry]
    scratch: Scratch
    future: Future[CodedGroup]


class Encoder:
    """Encodes one part into spools: iterate over `scan`, then call `finish`."""

    def __init__(
        self,
        base: TensorSource,
        target: TensorSource,
        carried: frozenset[int],
        *,
        with_base_sums: bool,
        encode_for: EncodeFor,
        threads: int,
        folder: Path,
        stack: ExitStack,
        carried_only: bool = False,
    ) -> None:
        self._base, self._target, self._carried = base, target, carried
        self._known = target if isinstance(target, KnownChanges) else None
        self._sides = base, target
        self._addresses = addresses_of(base)
        self._with_base_sums = with_base_sums
        self._carried_only = carried_only
        self._for_size = encode_for == "size"
        self._threads = threads
        self._tensors = base.inventory.tensors
        self.geometries = [Geometry.of(tensor) for tensor in self._tensors]
        one_pass = encode_for == "size" and self._known is None and on_device() is None and self._addresses.any()
        self._one_pass = (
            OnePass(self._tensors, self.geometries, self._addresses, addresses_of(target)) if one_pass else None
        )
        self._seeds = [blocks.seeds_of(tensor) for tensor in self._tensors]
        self._directory: dict[int, list[tuple[int, int, int, int]]] = {index: [] for index in sorted(carried)}
        self.spools: dict[str, BinaryIO] = {
            name: stack.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115 - the stack closes it
            for name in ("positions", *STREAMS, "contextual")
        }
        self._pool = stack.enter_context(workers(threads))
        self._writers = {
            name: ChunkWriter(name, self.spools[name], self._pool, for_size=self._for_size) for name in STREAMS
        }
        self._group_words: list[int] = []
        self._queue: deque[_Entry] = deque()
        self._group: _Group | None = None
        self._coding: deque[_Coding] = deque()
        self._scratches = [Scratch() for _ in range(_GROUPS_PER_THREAD * threads)]

    def scan(self) -> Iterator[Scanned]:
        """Compare every block once (with `carried_only` those alone), in order, and encode what is carried."""
        width = max((geometry.width for geometry in self.geometries), default=1)
        slots = slots_for(width, self._threads)
        if self._one_pass is None:
            yield from self._scan(slots, self._jobs())
            return
        groups = (list(jobs) for _, jobs in groupby(self._jobs(), key=attrgetter("window")))
        for jobs, coded in in_order(self._pool, slots, groups, self._encode):
            if coded is None:
                yield from self._scan(slots, jobs)
            else:
                yield from self._coded(jobs, coded)

    def _scan(self, slots: int, jobs: Iterable[Job]) -> Iterator[Scanned]:
        """In two passes: a block waits, as its changes, until its group is complete."""
        for block in in_order(self._pool, slots, jobs, self._compare):
            yield block
            if block.job.carried:
                self._take(block)
        self._close_group()
        while self._coding:
            self._settle()

    def _encode(self, scratch: Scratch, jobs: list[Job]) -> tuple[list[Job], Coded | None]:
        """A group in one pass, if it is one for that."""
        if self._one_pass is None or not all(job.carried for job in jobs):
            return jobs, None
        return jobs, self._one_pass.encode(scratch, [(job.index, job.first, job.elements) for job in jobs])

    def _coded(self, jobs: list[Job], coded: Coded) -> Iterator[Scanned]:
        """The blocks of a group that is encoded already."""
        scratch = Scratch()
        for job, changed, delta in zip(jobs, coded.changed.tolist(), coded.change, strict=True):
            encoded = blocks.CODED if changed else blocks.UNCHANGED
            old, new = (
                source_words(scratch, name, side, job.index, self._span(job))[1]
                for name, side in zip(("old", "new"), self._sides, strict=True)
            )
            yield Scanned(job, old, new, changed, self._sums_of(scratch, job, old), delta, encoded)
            self._write(_Entry(job, changed, encoded))
        self._append(coded.words)

    def finish(self) -> Table:
        """Write what is pending; returns the table."""
        for writer in self._writers.values():
            writer.finish()
        return table_of(
            [(index, self.geometries[index], rows) for index, rows in self._directory.items()],
            {name: writer.sizes for name, writer in self._writers.items()},
            self._group_words,
        )

    def _jobs(self) -> Iterator[Job]:
        before = 0
        for index, geometry in enumerate(self.geometries):
            carried = index in self._carried
            if self._carried_only and not carried:
                continue
            for first, elements in geometry:
                window = (before + first * geometry.width) // GROUP_BYTES
                yield Job(index, first, elements, window, carried)
            if carried:
                before += geometry.elements * geometry.width

    def _compare(self, scratch: Scratch, job: Job) -> Scanned:
        tensor, geometry, seed = self._tensors[job.index], self.geometries[job.index], self._seeds[job.index]
        width = geometry.width
        span = self._span(job)
        old, old_bytes = source_words(scratch, "old", self._base, job.index, span)
        known = None if self._known is None else self._known.changed(job.index, job.first, job.elements)
        if known is None:
            new, new_bytes = source_words(scratch, "new", self._target, job.index, span)
            positions = None
        else:
            new, new_bytes, positions = laid_over(scratch, old, old_bytes, known, width)
        piece = geometry.piece(job.first, job.elements)
        classes = classes_of(tensor.dtype) if self._for_size and job.carried else None
        found = blocks.compare(
            scratch, old, new, positions, elements=job.elements, width=width, piece=piece, seed=seed, classes=classes
        )
        base_sums = self._sums_of(scratch, job, old_bytes)
        if not job.carried:
            encoded: Encoded | Changes = blocks.UNCHANGED
        elif found.few and not is_regular(scratch, found.positions):
            encoded = self._changes(scratch, job, found)
        else:
            order = order_of(tensor.dtype)
            encoded = blocks.encode(scratch, old, new, found.positions, elements=job.elements, width=width, order=order)
        return Scanned(job, old_bytes, new_bytes, found.positions.size, base_sums, found.delta, encoded)

    def _span(self, job: Job) -> tuple[int, int]:
        width = self.geometries[job.index].width
        return job.first * width, (job.first + job.elements) * width

    def _sums_of(self, scratch: Scratch, job: Job, old: Bytes) -> np.ndarray:
        """What the block adds to the base's sums, where those are asked for."""
        sums = np.zeros(2, np.uint64)
        if self._with_base_sums:
            piece = self.geometries[job.index].piece(job.first, job.elements)
            scratch.kernels.sum_rows(old, *piece, *self._seeds[job.index], sums)
        return sums

    @staticmethod
    def _changes(scratch: Scratch, job: Job, found: blocks.Found) -> Changes:
        """What a block keeps until its group is coded."""
        positions = found.positions.copy()
        elements = np.zeros(-(-found.elements.size // 8), np.uint64)
        elements.view(np.uint8)[: found.elements.size] = found.elements
        bits = scratch.kernels.rice_bits(positions, rice_parameter(job.elements, positions.size))
        return Changes(job.index, job.first, job.elements, positions, elements, found.counts, -(-int(bits) // 8))

    # -- the streams, in order

    def _take(self, block: Scanned) -> None:
        if self._group is not None and self._group.window != block.job.window:
            self._close_group()
        if isinstance(block.encoded, Encoded):
            if self._queue:
                self._queue.append(_Entry(block.job, block.changed, block.encoded.owned()))
            else:
                self._write(_Entry(block.job, block.changed, block.encoded))
            return
        if self._group is None:
            self._group = _Group(block.job.window)
        entry = _Entry(block.job, block.changed, None)
        self._queue.append(entry)
        self._group.blocks.append(block.encoded)
        self._group.entries.append(entry)

    def _close_group(self) -> None:
        """Have the group encoded; wait for the oldest one where enough are on their way."""
        group, self._group = self._group, None
        if group is None:
            return
        if not self._scratches:
            self._settle()
        scratch = self._scratches.pop()
        future = self._pool.submit(encode_group, scratch, self._base, self._addresses, self._tensors, group.blocks)
        self._coding.append(_Coding(group.entries, scratch, future))

    def _settle(self) -> None:
        coding = self._coding.popleft()
        coded = coding.future.result()
        self._scratches.append(coding.scratch)
        if coded.words.size:
            self._append(coded.words)
        for entry, encoded in zip(coding.entries, coded.blocks, strict=True):
            entry.encoded = encoded
        while self._queue and self._queue[0].encoded is not None:
            self._write(self._queue.popleft())

    def _append(self, words: Codes) -> None:
        self.spools["contextual"].write(words.data)
        self._group_words.append(words.size)

    def _write(self, entry: _Entry) -> None:
        encoded = entry.encoded
        if encoded is None:
            return
        if encoded.encoding not in _NO_STREAMS:
            self.spools["positions"].write(encoded.positions.data)
            for name in STREAMS:
                self._writers[name].append(getattr(encoded, name))
        width = self.geometries[entry.job.index].width
        self._directory[entry.job.index].append(
            (encoded.encoding, entry.changed, encoded.positions.size, encoded.literals.size // width)
        )
