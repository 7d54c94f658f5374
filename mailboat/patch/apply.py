"""Applying a patch to a checkpoint on disk: the result appears whole and verified, or not at all.

Base and result are digested in the one pass that writes the result; it must never write the base, and never believe a
patch: both states have to be right before the result gets a name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3

from mailboat.checkpoint.declared import CONFIG, check_config
from mailboat.checkpoint.files import Checkpoint
from mailboat.checkpoint.inventory import Inventory
from mailboat.checkpoint.side_files import SideFile
from mailboat.checkpoint.source import Bytes
from mailboat.checkpoint.writing import write_checkpoint
from mailboat.digest import measure, state_digest
from mailboat.durable import disk_full_as_error
from mailboat.errors import CheckpointError, DigestMismatch, PatchError, WrongBase
from mailboat.patch import blocks
from mailboat.patch.blocks import BlockCode
from mailboat.patch.decode import Decoder
from mailboat.patch.format import CONTEXTUAL, Geometry
from mailboat.patch.new_bytes import NewBytes
from mailboat.patch.parts import Parts, largest_width
from mailboat.patch.scratch import Scratch, in_order, slots_for, thread_count, workers


def apply_patch(base: Checkpoint, parts: Sequence[Path], out: Path, *, threads: int | None = None) -> str:
    """Write to `out` what the parts make of `base`, in the base's shard layout; returns the state digest.

    Both are digested while the result is written under a hidden name; an existing `out` is replaced only when both are
    right. Raises WrongBase, PatchError, UnknownCodec, InventoryMismatch, DigestMismatch, CheckpointChanged,
    CheckpointError, DiskFull.
    """
    with ExitStack() as stack:
        patch = Parts.open(parts, base.inventory, stack)
        if any(os.path.realpath(out) == os.path.realpath(part) for part in parts):
            raise CheckpointError(f"{out} is the patch, which is read and never written; choose another place.")
        try:
            count = thread_count(threads)
            contextual = NewBytes(len(base.inventory.tensors), Path(out).absolute().parent)
            stack.callback(contextual.close)
            with ExitStack() as decoding, disk_full_as_error(Path(out).absolute().parent):
                for block in Decoder(patch, base, count).contextual(decoding):
                    contextual.add(block)
                contextual.finish()
            source = _Patched(base, patch, contextual, threads=count, stack=stack)
            write_checkpoint(source, Path(out), layout=base.layout)
        except PatchError:
            # Against other bytes than it was made for, a sound patch looks damaged.
            _require_base(patch, measure(base, threads=threads).digest)
            raise
        return patch.to_digest


def _require_base(patch: Parts, held: str) -> None:
    if held != patch.from_digest:
        raise WrongBase(
            f"The patch starts from the state {patch.from_digest[:16]}, but the base is {held[:16]}; "
            "apply it to the version that it was built from."
        )


@dataclass(frozen=True, slots=True)
class _Job:
    """A block in the order of the files; `code` is None where the patch leaves it as it is."""

    index: int
    start: int
    nbytes: int
    code: BlockCode | None


@dataclass(frozen=True, slots=True)
class _Block:
    """A block's old and new bytes, one array where nothing changed; views of the scratch."""

    index: int
    start: int
    old: Bytes
    new: Bytes


class _Patched:
    """The result as a source that is read once, from the first byte of the layout to the last.

    Blocks are read and decoded ahead on several threads. `write_checkpoint` calls `check_unchanged` when it has read
    everything and before the result gets its name: that is where the digests are compared.
    """

    def __init__(self, base: Checkpoint, patch: Parts, contextual: NewBytes, *, threads: int, stack: ExitStack) -> None:
        self._base, self._patch, self._contextual = base, patch, contextual
        self._side_files = patch.side_files(base.side_files)
        self._carried = {file.path for file in patch.carried_side_files}
        self._check_config()
        tensors = base.inventory.tensors
        self._geometries = [Geometry.of(tensor) for tensor in tensors]
        self._digests = _Digests(len(tensors))
        pool = stack.enter_context(workers(threads))
        slots = slots_for(largest_width(base.inventory), threads)
        self._blocks = stack.enter_context(closing(in_order(pool, slots, self._jobs(), self._decode)))
        self._left: Bytes = np.empty(0, np.uint8)  # of the block that was begun

    @property
    def inventory(self) -> Inventory:
        """The base's inventory: a patch never changes it."""
        return self._base.inventory

    @property
    def side_files(self) -> tuple[SideFile, ...]:
        """The result's side files."""
        return self._side_files

    def read_side(self, path: str) -> bytes:
        """A side file of the result."""
        return self._patch.read_side(path) if path in self._carried else self._base.read_side(path)

    def read(self, index: int, offset: int, out: Bytes) -> None:
        """Fill `out` with the next bytes of the result; raises PatchError."""
        done = 0
        while done < out.size:
            if self._left.size == 0:
                self._left = self._next(index, offset + done)
            piece = self._left[: out.size - done]
            out[done : done + piece.size] = piece
            self._left = self._left[piece.size :]
            done += piece.size

    def check_unchanged(self) -> None:
        """Raise unless the base still stands as it was, and both states are those that the patch names."""
        self._base.check_unchanged()
        old, new = self._digests.finish()
        _require_base(self._patch, state_digest(self.inventory, old, self._base.side_files))
        got = state_digest(self.inventory, new, self._side_files)
        if got != self._patch.to_digest:
            raise DigestMismatch(
                f"The patch leads to the state {got[:16]} and not to {self._patch.to_digest[:16]} as it says; "
                "nothing was written, fetch or build the patch again."
            )

    def _check_config(self) -> None:
        held = {file.path for file in self._base.side_files}
        after = {file.path for file in self._side_files}
        if CONFIG in self._carried or CONFIG in held - after:
            check_config(
                self.inventory,
                before=self._base.read_side(CONFIG) if CONFIG in held else None,
                after=self.read_side(CONFIG) if CONFIG in after else None,
            )

    def _jobs(self) -> Iterator[_Job]:
        for shard in self._base.shards:
            for entry in shard.header.entries:
                index = self.inventory.index(entry.name)
                geometry = self._geometries[index]
                for number, (first, elements) in enumerate(geometry):
                    code = self._patch.code(index, number) if self._patch.is_changed(index, number) else None
                    yield _Job(index, first * geometry.width, elements * geometry.width, code)

    def _decode(self, scratch: Scratch, job: _Job) -> _Block:
        old, old_bytes = scratch.words("old", job.nbytes)
        self._base.read(job.index, job.start, old_bytes)
        if job.code is None:
            return _Block(job.index, job.start, old_bytes, old_bytes)
        if job.code.encoding == CONTEXTUAL:
            new = scratch.bytes("new", job.nbytes)
            new[:] = old_bytes
            self._contextual.lay_over(job.index, job.start, new)
        else:
            new = blocks.decode(scratch, old, job.code).view(np.uint8)[: job.nbytes]
        return _Block(job.index, job.start, old_bytes, new)

    def _next(self, index: int, offset: int) -> Bytes:
        block = next(self._blocks)
        if (block.index, block.start) != (index, offset):
            raise ValueError("the result of a patch is read in the order of the base's files")
        self._digests.add(block)
        return block.new


class _Digests:
    """Strong digests of all tensors before and after, fed block by block; what did not change is hashed once."""

    def __init__(self, count: int) -> None:
        nothing = np.frombuffer(blake3().digest(), np.uint8)
        self._old, self._new = np.tile(nothing, (count, 1)), np.tile(nothing, (count, 1))
        self._index = -1
        self._seen: set[int] = set()
        self._before = self._after = blake3()

    def add(self, block: _Block) -> None:
        """Hash the next block; a tensor that is stored again under another name is hashed the first time."""
        if block.start == 0:
            self._close()
            self._index = block.index
            self._before = self._after = blake3()
        if block.index in self._seen:
            return
        if block.new is not block.old and self._after is self._before:
            self._after = self._before.copy()
        self._before.update(block.old.data)
        if self._after is not self._before:
            self._after.update(block.new.data)

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """(old, new), uint8 (N, 32) each."""
        self._close()
        self._index = -1
        return self._old, self._new

    def _close(self) -> None:
        if self._index >= 0 and self._index not in self._seen:
            self._old[self._index] = np.frombuffer(self._before.digest(), np.uint8)
            self._new[self._index] = np.frombuffer(self._after.digest(), np.uint8)
            self._seen.add(self._index)
