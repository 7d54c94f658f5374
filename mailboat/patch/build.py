"""Building a patch part: one streaming pass over base and target, block by block.

It must never hold a tensor in memory, and never leave a readable file name before the part is complete.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from blake3 import blake3

from mailboat.checkpoint.files import Checkpoint
from mailboat.checkpoint.side_files import SideFile, side_file
from mailboat.checkpoint.source import Bytes, TensorSource
from mailboat.digest import State
from mailboat.durable import disk_full_as_error, removed_on_failure, sync_folder
from mailboat.errors import CheckpointChanged, InventoryMismatch, PatchError
from mailboat.patch import blocks
from mailboat.patch.backends import kernels
from mailboat.patch.container import Metadata, header_bytes
from mailboat.patch.format import MAX_HEADER_BYTES, SAME, SIDE_PREFIX, Geometry, order_of
from mailboat.patch.scratch import Scratch, in_order, slots_for, thread_count, workers
from mailboat.patch.streams import ChunkWriter, compress_table
from mailboat.patch.table import STREAMS, table_of

_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PartSpec:
    """Which part of a patch to write: `index` of `count`, carrying the inventory `indices` (ascending, no repeats)."""

    index: int
    count: int
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BuiltPatch:
    """A finished part file and the two states that it joins; `changed` and `elements` count what this part carries."""

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
    """Write the patch (or one part of it) that turns `base` into `target`; its bytes do not depend on `threads`.

    With `base_state` (the verified digests of `base`) the base isn't digested again. `progress` is called with the bytes of
    target read since its last call. Both states are measured whole even where only one part is written.
    Raises InventoryMismatch, CheckpointError, CheckpointChanged, DiskFull.
    """
    base.inventory.require_same(target.inventory)
    if base_state is not None:
        base_state.inventory.require_same(base.inventory)
    out = Path(out)
    with ExitStack() as stack:
        stack.enter_context(disk_full_as_error(out.parent))
        builder = _Builder(base, target, base_state, thread_count(threads), part or _whole(base), out.parent, stack)
        builder.scan(progress or (lambda _: None))
        for source in (base, target):
            if isinstance(source, Checkpoint):
                source.check_unchanged()
        return builder.write(out)


def _whole(base: TensorSource) -> PartSpec:
    return PartSpec(0, 1, tuple(range(len(base.inventory.tensors))))


@dataclass(frozen=True, slots=True)
class _Job:
    index: int
    number: int
    first: int
    elements: int
    carried: bool


@dataclass(frozen=True, slots=True)
class _Scanned:
    job: _Job
    old: Bytes
    new: Bytes
    changed: int
    encoded: blocks.Encoded
    base_sums: np.ndarray
    delta: np.ndarray


class _Builder:
    """The running state of one build; `scan` once, then `write` once."""

    def __init__(
        self,
        base: TensorSource,
        target: TensorSource,
        base_state: State | None,
        threads: int,
        part: PartSpec,
        folder: Path,
        stack: ExitStack,
    ) -> None:
        self.base, self.target, self.base_state = base, target, base_state
        self.inventory = base.inventory
        self.threads = threads
        self.part = part
        self.carried = frozenset(part.indices)
        if not 0 <= part.index < part.count or not self.carried <= set(range(len(self.inventory.tensors))):
            raise InventoryMismatch(
                "The part names tensors that the inventory does not have; derive it from the inventory."
            )
        self.geometries = [Geometry.of(tensor) for tensor in self.inventory.tensors]
        self.seeds = [blocks.seeds_of(tensor) for tensor in self.inventory.tensors]
        self.orders = [order_of(tensor.dtype) for tensor in self.inventory.tensors]
        self.directory: dict[int, list[tuple[int, int, int, int]]] = {index: [] for index in sorted(self.carried)}
        count = len(self.inventory.tensors)
        self.base_sums = np.zeros((count, 2), np.uint64) if base_state is None else base_state.sums
        self.delta = np.zeros((count, 2), np.uint64)
        self.base_strong = np.zeros((count, 32), np.uint8) if base_state is None else base_state.strong
        self.strong = np.zeros((count, 32), np.uint8)
        self.spools: dict[str, BinaryIO] = {
            name: stack.enter_context(tempfile.TemporaryFile(dir=folder)) for name in ("positions", *STREAMS)
        }
        self.pool = stack.enter_context(workers(threads))
        self.writers = {name: ChunkWriter(name, self.spools[name], self.pool) for name in STREAMS}

    def scan(self, progress: Callable[[int], None]) -> None:
        """Read every block once, in order."""
        width = max((geometry.width for geometry in self.geometries), default=1)
        current, old_hash, new_hash = -1, blake3(), blake3()
        for block in in_order(self.pool, slots_for(width, self.threads), self._jobs(), self._scan_block):
            if block.job.index != current:
                self._digest(current, old_hash, new_hash)
                current = block.job.index
                old_hash, new_hash = blake3(max_threads=self.threads), blake3(max_threads=self.threads)
            new_hash.update(block.new.data)
            if self.base_state is None:
                old_hash.update(block.old.data)
                self.base_sums[current] += block.base_sums
            self.delta[current] += block.delta
            self._append(block)
            progress(block.new.size)
        self._digest(current, old_hash, new_hash)
        for index, geometry in enumerate(self.geometries):
            if geometry.elements == 0:
                self._digest(index, blake3(), blake3())

    def _digest(self, index: int, old_hash: blake3, new_hash: blake3) -> None:
        if index >= 0:
            self.strong[index] = np.frombuffer(new_hash.digest(), np.uint8)
            if self.base_state is None:
                self.base_strong[index] = np.frombuffer(old_hash.digest(), np.uint8)

    def _jobs(self) -> Iterator[_Job]:
        for index, geometry in enumerate(self.geometries):
            for number, (first, elements) in enumerate(geometry):
                yield _Job(index, number, first, elements, index in self.carried)

    def _scan_block(self, scratch: Scratch, job: _Job) -> _Scanned:
        geometry = self.geometries[job.index]
        width = geometry.width
        old, old_bytes = scratch.words("old", job.elements * width)
        new, new_bytes = scratch.words("new", job.elements * width)
        self.base.read(job.index, job.first * width, old_bytes)
        self.target.read(job.index, job.first * width, new_bytes)
        positions = blocks.changes(scratch, old, new, width)
        base_sums = np.zeros(2, np.uint64)
        piece, seed = geometry.piece(job.first, job.elements), self.seeds[job.index]
        if self.base_state is None:
            kernels().sum_rows(old_bytes, *piece, *seed, base_sums)
        delta = blocks.sum_change(old_bytes, new_bytes, positions, width, piece, seed)
        if job.carried:
            encoded = blocks.encode(scratch, old, new, positions, job.elements, width, self.orders[job.index])
        else:
            encoded = blocks.UNCHANGED
        return _Scanned(job, old_bytes, new_bytes, positions.size, encoded, base_sums, delta)

    def _append(self, block: _Scanned) -> None:
        if not block.job.carried:
            return
        encoded = block.encoded
        if encoded.encoding != SAME:
            self.spools["positions"].write(encoded.positions.data)
            for name in STREAMS:
                self.writers[name].append(getattr(encoded, name))
        width = self.geometries[block.job.index].width
        self.directory[block.job.index].append(
            (encoded.encoding, block.changed, encoded.positions.size, encoded.literals.size // width)
        )

    def write(self, out: Path) -> BuiltPatch:
        """Assemble the file from the spools and give it its name."""
        base_state = self.base_state or State(self.inventory, self.base_sums, self.base_strong, self.base.side_files)
        target_state = State(self.inventory, base_state.sums + self.delta, self.strong, self.target.side_files)
        for writer in self.writers.values():
            writer.finish()
        table = table_of(
            [(index, self.geometries[index], rows) for index, rows in self.directory.items()],
            {name: writer.sizes for name, writer in self.writers.items()},
        )
        raw_table = table.to_bytes()
        packed_table = compress_table(raw_table)
        carried, removed = self._side_files()
        changed = sum(table.changed.tolist())
        metadata = Metadata(
            from_digest=base_state.digest, to_digest=target_state.digest, inventory_digest=self.inventory.digest,
            codecs=table.codecs(), part=self.part.index, parts=self.part.count, tensors=len(self.inventory.tensors),
            elements=self.inventory.elements, full_bytes=self.inventory.full_bytes, changed=changed, removed=removed,
            table_bytes=len(raw_table),
        )  # fmt: skip
        sizes = {"table": len(packed_table)} | {name: spool.tell() for name, spool in self.spools.items()}
        entries = [(name, size) for name, size in sizes.items() if size]
        entries += [(SIDE_PREFIX + file.path, file.size) for file in carried]
        header = header_bytes(metadata.to_strings(), entries)
        if len(header) > MAX_HEADER_BYTES:
            raise PatchError(
                "The checkpoint changes more side files than a patch can carry; remove what is not needed."
            )
        size, sha256 = self._write_file(out, [header, packed_table], carried)
        return BuiltPatch(out, size, sha256, base_state, target_state, changed, sum(table.elements.tolist()))

    def _side_files(self) -> tuple[list[SideFile], tuple[str, ...]]:
        """(side files to carry, names that are gone); only the first part carries any."""
        if self.part.index:
            return [], ()
        before = {file.path: file for file in self.base.side_files}
        after = {file.path: file for file in self.target.side_files}
        carried = [file for path, file in sorted(after.items()) if before.get(path) != file]
        return carried, tuple(sorted(before.keys() - after.keys()))

    def _write_file(self, out: Path, head: list[bytes], carried: list[SideFile]) -> tuple[int, str]:
        temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
        digest = hashlib.sha256()
        with removed_on_failure(temporary):
            with temporary.open("wb") as file:
                for piece in self._pieces(head, carried):
                    digest.update(piece)
                    file.write(piece)
                size = file.tell()
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(out)
        sync_folder(out.parent)
        return size, digest.hexdigest()

    def _pieces(self, head: list[bytes], carried: list[SideFile]) -> Iterator[bytes]:
        yield from head
        for spool in self.spools.values():
            spool.seek(0)
            while piece := spool.read(_COPY_BYTES):
                yield piece
        for file in carried:
            content = self.target.read_side(file.path)
            if side_file(file.path, content) != file:
                raise CheckpointChanged(
                    f"The file {file.path} changed while it was read; publish it once it is complete."
                )
            yield content
