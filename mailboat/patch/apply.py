"""Applying a patch to a checkpoint on disk: the result appears whole and verified, or not at all.

It must never write the base, and never believe a patch: the result's own bytes are digested before they get a name.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from blake3 import blake3

from mailboat.checkpoint.files import Checkpoint
from mailboat.checkpoint.inventory import Inventory
from mailboat.checkpoint.side_files import SideFile
from mailboat.checkpoint.source import Bytes
from mailboat.checkpoint.writing import write_checkpoint
from mailboat.digest import measure, state_digest
from mailboat.durable import disk_full_as_error
from mailboat.errors import DigestMismatch, WrongBase
from mailboat.patch import blocks
from mailboat.patch.decode import Decoder
from mailboat.patch.format import CONTEXTUAL, SAME, Geometry
from mailboat.patch.new_bytes import NewBytes
from mailboat.patch.parts import Parts
from mailboat.patch.scratch import Scratch, thread_count


def apply_patch(base: Checkpoint, parts: Sequence[Path], out: Path, *, threads: int | None = None) -> str:
    """Write to `out` what the parts make of `base`, in the base's shard layout; returns the state digest.

    The base is digested first, the result while it is written; an existing `out` is replaced only when both are right.
    Raises WrongBase, PatchError, UnknownCodec, DigestMismatch, CheckpointChanged, CheckpointError, DiskFull.
    """
    with ExitStack() as stack:
        patch = Parts.open(parts, base.inventory, stack)
        held = measure(base, threads=threads).digest
        if held != patch.from_digest:
            raise WrongBase(
                f"The patch starts from the state {patch.from_digest[:16]}, but the base is {held[:16]}; "
                "apply it to the version that it was built from."
            )
        count = thread_count(threads)
        contextual = NewBytes(len(base.inventory.tensors), Path(out).absolute().parent)
        stack.callback(contextual.close)
        stack.enter_context(disk_full_as_error(Path(out).parent))
        for block in Decoder(patch, base, count).contextual(stack):
            contextual.add(block)
        contextual.finish()
        source = _Patched(base, patch, contextual, count)
        write_checkpoint(source, Path(out), layout=base.layout)
        return patch.to_digest


class _Patched:
    """The result as a source; each tensor is digested as it is read from start to end.

    `write_checkpoint` calls `check_unchanged` after it has read everything and before the result gets its name: that is
    where the digests are compared.
    """

    def __init__(self, base: Checkpoint, patch: Parts, contextual: NewBytes, threads: int) -> None:
        self._base, self._patch, self._contextual, self._threads = base, patch, contextual, threads
        self._side_files = patch.side_files(base.side_files)
        self._carried = {file.path for file in patch.carried_side_files}
        tensors = base.inventory.tensors
        self._geometries = [Geometry.of(tensor) for tensor in tensors]
        self._strong = np.zeros((len(tensors), 32), np.uint8)
        self._hashing, self._hashed, self._digest = -1, 0, blake3()
        self._scratch = Scratch()
        self._held = (-1, -1)
        self._block: Bytes = np.empty(0, np.uint8)
        for index, tensor in enumerate(tensors):
            if tensor.nbytes == 0:
                self._strong[index] = np.frombuffer(blake3().digest(), np.uint8)

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
        """Fill `out` with bytes of the result; raises PatchError."""
        geometry = self._geometries[index]
        done = 0
        while done < out.size:
            number = geometry.block_at((offset + done) // geometry.width)
            first, elements = geometry.block(number)
            start = first * geometry.width
            skip = offset + done - start
            piece = out[done : done + elements * geometry.width - skip]
            encoding = self._patch.encoding(index, number)
            if encoding in {SAME, CONTEXTUAL}:
                self._base.read(index, start + skip, piece)
            else:
                piece[:] = self._decoded(index, number, start)[skip : skip + piece.size]
            if encoding == CONTEXTUAL:
                self._contextual.lay_over(index, start + skip, piece)
            done += piece.size
        self._hash(index, offset, out)

    def check_unchanged(self) -> None:
        """Raise unless the base still stands as it was and what was read has the digest that the patch promises."""
        self._base.check_unchanged()
        got = state_digest(self.inventory, self._strong, self._side_files)
        if got != self._patch.to_digest:
            raise DigestMismatch(
                f"The patch leads to the state {got[:16]} and not to {self._patch.to_digest[:16]} as it says; "
                "nothing was written, fetch or build the patch again."
            )

    def _decoded(self, index: int, number: int, start: int) -> Bytes:
        if self._held != (index, number):
            code = self._patch.code(index, number)
            old, old_bytes = self._scratch.words("old", code.elements * code.width)
            self._base.read(index, start, old_bytes)
            self._block = blocks.decode(self._scratch, old, code).view(np.uint8)
            self._held = (index, number)
        return self._block

    def _hash(self, index: int, offset: int, out: Bytes) -> None:
        if offset == 0:
            self._hashing, self._hashed, self._digest = index, 0, blake3(max_threads=self._threads)
        if (index, offset) != (self._hashing, self._hashed):
            return
        self._digest.update(out.data)
        self._hashed += out.size
        if self._hashed == self.inventory.tensors[index].nbytes:
            self._strong[index] = np.frombuffer(self._digest.digest(), np.uint8)
