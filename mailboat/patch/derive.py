"""Patches made from patches: several steps merged into one, and a step reversed.

The ends of the result are put together from the base and what the patches change, never written out, and encoded like
any two states: so the result is byte for byte the patch that would be built between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path

from mailboat.checkpoint.files import Checkpoint
from mailboat.checkpoint.inventory import Inventory
from mailboat.checkpoint.side_files import SideFile
from mailboat.checkpoint.source import Bytes, TensorSource
from mailboat.digest import State, measure
from mailboat.errors import DigestMismatch, PatchError, WrongBase
from mailboat.patch.build import BuiltPatch, build_patch
from mailboat.patch.container import PatchFile
from mailboat.patch.decode import Decoder
from mailboat.patch.new_bytes import NewBytes
from mailboat.patch.parts import Parts
from mailboat.patch.scratch import thread_count


def merge_patches(base: Checkpoint, patches: Sequence[Path], out: Path, *, threads: int | None = None) -> BuiltPatch:
    """Write the one patch that does what `patches` do one after the other; `base` is what the first one starts from.

    Parts of one patch stand next to each other. Elements that return to their old bits drop out.
    Raises WrongBase, PatchError, UnknownCodec, DigestMismatch, CheckpointError, CheckpointChanged, DiskFull.
    """
    with ExitStack() as stack:
        state, end, promised = _applied(base, patches, out.absolute().parent, thread_count(threads), stack)
        return _promised(build_patch(base, end, out, base_state=state, threads=threads), promised, out)


def reverse_patch(base: Checkpoint, patch: Sequence[Path], out: Path, *, threads: int | None = None) -> BuiltPatch:
    """Write the patch that leads back to `base`, which `patch` (all its parts) starts from.

    Raises as `merge_patches`.
    """
    with ExitStack() as stack:
        state, end, promised = _applied(base, patch, out.absolute().parent, thread_count(threads), stack)
        after = measure(end, threads=threads)
        if after.digest != promised:
            raise _mismatch(after.digest, promised)
        return _promised(build_patch(end, base, out, base_state=after, threads=threads), state.digest, out)


def _promised(built: BuiltPatch, digest: str, out: Path) -> BuiltPatch:
    if built.target_state.digest != digest:
        out.unlink()
        raise _mismatch(built.target_state.digest, digest)
    return built


def _mismatch(got: str, promised: str) -> DigestMismatch:
    return DigestMismatch(
        f"The patches lead to the state {got[:16]}, not to {promised[:16]} as they say; fetch them again."
    )


def _applied(
    base: Checkpoint, patches: Sequence[Path], folder: Path, threads: int, stack: ExitStack
) -> tuple[State, TensorSource, str]:
    """The base's state, what the patches make of it, and the state digest that the last one promises."""
    state = measure(base, threads=threads)
    held = state.digest
    end: TensorSource = base
    for _, files in groupby(patches, key=_ends):
        parts = Parts.open(list(files), base.inventory, stack)
        if parts.from_digest != held:
            raise WrongBase(
                f"A patch starts from the state {parts.from_digest[:16]}, but what lies before it is {held[:16]}; "
                "give the patches in order, and the base of the first one."
            )
        end, held = _Laid(end, parts, folder, threads, stack), parts.to_digest
    if end is base:
        raise PatchError("There is no patch to derive one from; name at least one.")
    return state, end, held


def _ends(path: Path) -> tuple[str, str]:
    with PatchFile.open(path) as part:
        return part.from_digest, part.to_digest


class _Laid:
    """A source with a decoded patch laid over it."""

    def __init__(self, base: TensorSource, patch: Parts, folder: Path, threads: int, stack: ExitStack) -> None:
        self._base, self._patch = base, patch
        self._side_files = patch.side_files(base.side_files)
        self._carried = {file.path for file in patch.carried_side_files}
        self._new = NewBytes(len(base.inventory.tensors), folder)
        stack.callback(self._new.close)
        with ExitStack() as decoding:
            for block in Decoder(patch, base, threads).all(decoding):
                self._new.add(block)
        self._new.finish()

    @property
    def inventory(self) -> Inventory:
        """The base's."""
        return self._base.inventory

    @property
    def side_files(self) -> tuple[SideFile, ...]:
        """The result's."""
        return self._side_files

    def read(self, index: int, offset: int, out: Bytes) -> None:
        """Fill `out` with bytes of the result."""
        self._base.read(index, offset, out)
        self._new.lay_over(index, offset, out)

    def read_side(self, path: str) -> bytes:
        """A side file of the result."""
        return self._patch.read_side(path) if path in self._carried else self._base.read_side(path)
