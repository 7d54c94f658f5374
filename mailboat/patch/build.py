"""Building a patch part: one streaming pass over base and target, block by block.

It must never hold a tensor in memory, and never leave a readable file name before the part is complete.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3

from mailboat.checkpoint.files import Checkpoint
from mailboat.checkpoint.side_files import SideFile, side_file
from mailboat.checkpoint.source import TensorSource
from mailboat.digest import State
from mailboat.durable import disk_full_as_error, removed_on_failure, sync_folder
from mailboat.errors import CheckpointChanged, CheckpointError, InventoryMismatch, PatchError
from mailboat.patch.container import Metadata, header_bytes
from mailboat.patch.encoder import EncodeFor, Encoder
from mailboat.patch.format import MAX_HEADER_BYTES, SIDE_PREFIX
from mailboat.patch.scratch import thread_count
from mailboat.patch.streams import compress_table

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
    encode_for: EncodeFor = "size",
    approve: Callable[[State, State], None] | None = None,
) -> BuiltPatch:
    """Write the patch (or one part of it) that turns `base` into `target`; its bytes do not depend on `threads`.

    `encode_for`: "size" takes the smallest encodings, "speed" only those that are applied without scanning the base.
    With `base_state` (the verified digests of `base`) the base isn't digested again. `progress` is called with the
    bytes of target read since its last call. Both states are measured whole even where only one part is written;
    `approve` gets them before anything is at `out`, and may raise.
    Raises InventoryMismatch, CheckpointError (also where `out` would touch what is read), CheckpointChanged, DiskFull.
    """
    base.inventory.require_same(target.inventory)
    if base_state is not None:
        base_state.inventory.require_same(base.inventory)
    out = Path(out)
    _check_out(out, [source for source in (base, target) if isinstance(source, Checkpoint)])
    with ExitStack() as stack:
        stack.enter_context(disk_full_as_error(out.parent))
        builder = _Builder(
            base,
            target,
            part or _whole(base),
            base_state=base_state,
            encode_for=encode_for,
            threads=thread_count(threads),
            folder=out.parent,
            stack=stack,
        )
        builder.scan(progress or (lambda _: None))
        for source in (base, target):
            if isinstance(source, Checkpoint):
                source.check_unchanged()
        target_state = builder.measured()
        if approve is not None:
            approve(builder.before(), target_state)
        return builder.write(out, target_state)


@contextmanager
def part_builder(
    base: TensorSource,
    target: TensorSource,
    out: Path,
    part: PartSpec,
    *,
    base_state: State,
    encode_for: EncodeFor = "size",
) -> Iterator[PartBuilder]:
    """Build one part where nobody has all of `target`: `scan` reads only what the part carries and gives the digests
    of that; whoever joins those of all parts gives the whole target state to `write`. Raises as `build_patch`.
    """
    base.inventory.require_same(target.inventory)
    base_state.inventory.require_same(base.inventory)
    _check_out(out, [])
    with ExitStack() as stack:
        stack.enter_context(disk_full_as_error(out.parent))
        threads = thread_count(None)
        builder = _Builder(
            base, target, part, base_state=base_state, encode_for=encode_for, threads=threads, folder=out.parent,
            stack=stack, carried_only=True,
        )  # fmt: skip
        yield PartBuilder(builder, out)


class PartBuilder:
    """One part on its way; use `part_builder`. `scan` once, then `write` once."""

    def __init__(self, builder: _Builder, out: Path) -> None:
        self._builder, self._out = builder, out

    def scan(self) -> State:
        """Read what the part carries. Of the state only the rows of that are right: join them with the others'."""
        self._builder.scan(lambda _: None)
        return self._builder.measured()

    def write(self, target_state: State) -> BuiltPatch:
        """Write the part of the patch that leads to `target_state`."""
        return self._builder.write(self._out, target_state)


def _check_out(out: Path, read: Sequence[Checkpoint]) -> None:
    """Refuse an `out` that is or lies in what is read, has no folder, or stands where something else than a file is."""
    if not out.name or not out.parent.is_dir():
        raise CheckpointError(f"{out} can't be written: its folder does not exist.")
    if out.exists() and not out.is_file():
        raise CheckpointError(f"{out} can't be written: it is not a file; give the name of a file.")
    place = Path(os.path.realpath(out))
    for checkpoint in read:
        for path in (checkpoint.path, *(shard.path for shard in checkpoint.shards)):
            source = Path(os.path.realpath(path))
            if source == place or source in place.parents:
                raise CheckpointError(f"{out} overlaps {path}, which is read and never written; choose another place.")


def _whole(base: TensorSource) -> PartSpec:
    return PartSpec(0, 1, tuple(range(len(base.inventory.tensors))))


class _Builder:
    """The running state of one build; `scan` once, then `write` once."""

    def __init__(
        self,
        base: TensorSource,
        target: TensorSource,
        part: PartSpec,
        *,
        base_state: State | None,
        encode_for: EncodeFor,
        threads: int,
        folder: Path,
        stack: ExitStack,
        carried_only: bool = False,
    ) -> None:
        self.base, self.target, self.base_state = base, target, base_state
        self.inventory = base.inventory
        self.threads = threads
        self.part = part
        carried = frozenset(part.indices)
        count = len(self.inventory.tensors)
        if not 0 <= part.index < part.count or not carried <= set(range(count)):
            raise InventoryMismatch(
                "The part names tensors that the inventory does not have; derive it from the inventory."
            )
        self.base_sums = np.zeros((count, 2), np.uint64) if base_state is None else base_state.sums
        self.delta = np.zeros((count, 2), np.uint64)
        self.base_strong = np.zeros((count, 32), np.uint8) if base_state is None else base_state.strong
        self.strong = np.zeros((count, 32), np.uint8)
        self.encoder = Encoder(
            base, target, carried, with_base_sums=base_state is None, encode_for=encode_for, threads=threads,
            folder=folder, stack=stack, carried_only=carried_only,
        )  # fmt: skip

    def scan(self, progress: Callable[[int], None]) -> None:
        """Read every block once, in order."""
        current, old_hash, new_hash = -1, blake3(), blake3()
        for block in self.encoder.scan():
            if block.job.index != current:
                self._digest(current, old_hash, new_hash)
                current = block.job.index
                old_hash, new_hash = blake3(max_threads=self.threads), blake3(max_threads=self.threads)
            new_hash.update(block.new.data)
            if self.base_state is None:
                old_hash.update(block.old.data)
                self.base_sums[current] += block.base_sums
            self.delta[current] += block.delta
            progress(block.new.size)
        self._digest(current, old_hash, new_hash)
        for index, tensor in enumerate(self.inventory.tensors):
            if tensor.nbytes == 0:
                self._digest(index, blake3(), blake3())

    def _digest(self, index: int, old_hash: blake3, new_hash: blake3) -> None:
        if index >= 0:
            self.strong[index] = np.frombuffer(new_hash.digest(), np.uint8)
            if self.base_state is None:
                self.base_strong[index] = np.frombuffer(old_hash.digest(), np.uint8)

    def before(self) -> State:
        """The base's state, once it was read."""
        return self.base_state or State(self.inventory, self.base_sums, self.base_strong, self.base.side_files)

    def measured(self) -> State:
        """The target's state, once it was read."""
        return State(self.inventory, self.before().sums + self.delta, self.strong, self.target.side_files)

    def write(self, out: Path, target_state: State) -> BuiltPatch:
        """Assemble the file from the spools and give it its name."""
        base_state = self.before()
        table = self.encoder.finish()
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
        sizes = {"table": len(packed_table)} | {name: spool.tell() for name, spool in self.encoder.spools.items()}
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
        for spool in self.encoder.spools.values():
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
