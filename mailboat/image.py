"""The image: the current bytes of one state, as a folder in checkpoint layout that only its owner writes.

It is derived and can always be rebuilt, so it never tries to repair itself: an image that was interrupted in a commit,
or that does not look right, is refused. Nothing is touched before a patch's result has been proved by sums. Bytes are
read by pread and written by pwrite; no mapping, no locks (locking between processes is the caller's).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from mailboat import canonical
from mailboat.checkpoint.declared import CONFIG, check_config
from mailboat.checkpoint.files import Checkpoint, Layout
from mailboat.checkpoint.folder import SINGLE
from mailboat.checkpoint.inventory import MAX_BYTES, Inventory
from mailboat.checkpoint.replace import put_in_place, temporary_beside
from mailboat.checkpoint.side_files import SideFile, parse_side_files, side_file
from mailboat.checkpoint.source import Bytes, TensorSource
from mailboat.checkpoint.writing import write_checkpoint
from mailboat.digest import State, measure, measure_sums
from mailboat.durable import disk_full_as_error, removed_on_failure, sync_folder, write_durably
from mailboat.errors import DigestMismatch, MailboatError, StoreError, WrongBase, listed
from mailboat.overlay import Compared, Overlaid, Overlay
from mailboat.patch.backends import kernels
from mailboat.patch.blocks import Positions
from mailboat.patch.decode import Decoder
from mailboat.patch.new_bytes import Record
from mailboat.patch.parts import Parts
from mailboat.patch.scratch import thread_count

__all__ = ["Image", "Overlay"]

FORMAT = "mailboat-image-1"
STATE_FILE = ".mailboat-image"
DIRTY_FILE = ".mailboat-dirty"
# Changes nearer than this are written in one go with what lies between them: a page is what a write costs anyway.
_GAP = 4096


class Image:
    """Bytes of one state with its known digests. One writer; `read` may be called from several threads at once."""

    def __init__(self, folder: Path, state: State) -> None:
        """Use `create` or `open`."""
        self.folder = folder
        self.state = state
        self._torn: str | None = None
        self._descriptors: list[int] = []
        try:
            self._places = self._open_files()
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, folder: Path, source: TensorSource, state: State) -> Image:
        """Copy `source` into `folder`, replacing an image there; every byte is compared with `state`'s strong digests.

        Raises StoreError (`folder` is something else than an image), DigestMismatch, InventoryMismatch,
        CheckpointError, CheckpointChanged, DiskFull; the folder then is as before.
        """
        folder = Path(folder).absolute()
        cls.require_place(folder)
        temporary = temporary_beside(folder)
        with disk_full_as_error(folder.parent), removed_on_failure(temporary):
            folder.parent.mkdir(parents=True, exist_ok=True)
            write_checkpoint(source, temporary, layout=_folder_layout(source), expect=state)
            write_durably(temporary / STATE_FILE, _state_bytes(state), mode=0o600)
            put_in_place(temporary, folder)
        return cls.open(folder)

    @staticmethod
    def require_place(folder: Path) -> None:
        """Raise StoreError unless an image may be made at `folder`: it is free, empty, or an image, whole or not."""
        if not os.path.lexists(folder):
            return
        if folder.is_dir():
            names = {entry.name for entry in os.scandir(folder)}
            if not names or names & {STATE_FILE, DIRTY_FILE}:
                return
        raise StoreError(f"{folder} holds something else than an image and is not touched; choose another folder.")

    @classmethod
    def open(cls, folder: Path) -> Image:
        """Open an image.

        Raises StoreError when it is absent, was interrupted in a commit, or is damaged: rebuild it.
        """
        folder = Path(folder).absolute()
        if (folder / DIRTY_FILE).exists():
            raise StoreError(f"The image {folder} was interrupted in a commit; rebuild it.")
        try:
            state = _parse_state((folder / STATE_FILE).read_bytes())
            return cls(folder, state)
        except OSError as error:
            raise StoreError(f"There is no image at {folder} ({error.strerror}); create it.") from None
        except MailboatError as error:
            raise StoreError(f"The image {folder} is damaged; rebuild it. ({error})") from None

    @property
    def inventory(self) -> Inventory:
        """The tensors, in the order that `read` counts them."""
        return self.state.inventory

    @property
    def side_files(self) -> tuple[SideFile, ...]:
        """The side files, sorted by path."""
        return self.state.side_files

    @property
    def digest(self) -> str:
        """The state digest that the image holds."""
        return self.state.digest

    def read(self, index: int, offset: int, out: Bytes) -> None:
        """Fill `out` with the bytes [offset, offset + len(out)) of tensor `index`. Raises StoreError."""
        if self._torn is not None:
            raise StoreError(f"The image {self.folder} was interrupted in a commit; repeat it or rebuild the image.")
        self._read(self._places[index][0], offset, out)

    def read_side(self, path: str) -> bytes:
        """Return a side file whole. Raises StoreError."""
        try:
            return (self.folder / path).read_bytes()
        except OSError as error:
            raise StoreError(f"The image's {path} can't be read ({error.strerror}); rebuild the image.") from None

    # -- preparing

    def prepare(
        self,
        parts: Sequence[Path],
        target: State,
        *,
        over: Sequence[Overlay] = (),
        threads: int | None = None,
        scratch: Path | None = None,
    ) -> Overlay:
        """Decode `parts` against the image and prove by sums that they lead to `target`; touches nothing.

        `over`: overlays to lay over the image first, one after the other; the patch starts where the last one leads
        (`Overlay.stacked` then makes one of all). `scratch`: the folder for an overlay beyond 64 MiB (default: beside
        the image). The sums find faults, not forgery: where the patch is not the publisher's own, measure `overlaid`
        before `commit`.
        Raises WrongBase, PatchError, UnknownCodec, DigestMismatch, InventoryMismatch, CheckpointError, DiskFull.
        """
        self.inventory.require_same(target.inventory)
        scratch = scratch or self.folder.parent
        base: TensorSource = self
        for layer in over:
            base = Overlaid(base, layer)
        start = over[-1].target if over else self.state
        overlay = Overlay(start.digest, target, scratch)
        try:
            with ExitStack() as stack:
                stack.enter_context(disk_full_as_error(scratch))
                patch = Parts.open(parts, self.inventory, stack)
                self._check_ends(patch, base, start, target)
                delta = self._decode(patch, base, overlay, thread_count(threads), stack)
            self._check_result(patch, overlay, start, delta)
        except BaseException:
            overlay.close()
            raise
        return overlay

    def overlaid(self, overlay: Overlay) -> TensorSource:
        """Reads as if the overlay had been committed."""
        return Overlaid(self, overlay)

    def compared(self, overlay: Overlay) -> Compared:
        """The same, counting steps of one while it is measured."""
        return Compared(self, overlay)

    def _check_ends(self, patch: Parts, base: TensorSource, start: State, target: State) -> None:
        if patch.from_digest != start.digest:
            raise WrongBase(
                f"The patch starts from the state {patch.from_digest[:16]}, but the image holds {start.digest[:16]}; "
                "take the patch that starts there."
            )
        if patch.to_digest != target.digest:
            raise DigestMismatch(
                f"The patch leads to the state {patch.to_digest[:16]}, not to {target.digest[:16]}; "
                "fetch the patch of that version."
            )
        if patch.side_files(start.side_files) != target.side_files:
            raise DigestMismatch("The patch's side files are not those that were promised; fetch it again.")
        before = {file.path for file in start.side_files}
        after = {file.path for file in target.side_files}
        carried = CONFIG in {file.path for file in patch.carried_side_files}
        if carried or CONFIG in before - after:
            check_config(
                self.inventory,
                before=base.read_side(CONFIG) if CONFIG in before else None,
                after=patch.read_side(CONFIG) if carried else None,
            )

    def _decode(self, patch: Parts, base: TensorSource, overlay: Overlay, threads: int, stack: ExitStack) -> np.ndarray:
        """Decode every changed block into the overlay; returns what that does to the sums."""
        delta = np.zeros((len(self.inventory.tensors), 2), np.uint64)
        for block in Decoder(patch, base, threads).all(stack):
            delta[block.index] += block.change
            overlay.add(block)
        for file in patch.carried_side_files:
            overlay.add_side(file.path, patch.read_side(file.path))
        overlay.finish()
        return delta

    def _check_result(self, patch: Parts, overlay: Overlay, start: State, delta: np.ndarray) -> None:
        if overlay.changed != patch.changed:
            raise DigestMismatch(
                f"The patch promises {patch.changed} changed elements and holds {overlay.changed}; fetch it again."
            )
        wrong = np.flatnonzero((start.sums + delta != overlay.target.sums).any(axis=1))
        if len(wrong):
            names = [self.inventory.tensors[index].name for index in wrong]
            raise DigestMismatch(
                f"The patch does not lead to the promised sums of {listed(names)}; "
                "scan the image and fetch the patch again."
            )

    # -- committing

    def commit(self, overlay: Overlay) -> None:
        """Write the overlay; afterwards the image holds its target. Writes what changed and no more.

        Repeating it, also after a failure, is harmless. A crash inside leaves an image that `open` refuses.
        Raises WrongBase, StoreError, DiskFull.
        """
        if self._torn is None and self.digest == overlay.target.digest:
            return
        if self.digest != overlay.base_digest or self._torn not in {None, overlay.target.digest}:
            raise WrongBase("The overlay was prepared against another state than the image holds; prepare it again.")
        with disk_full_as_error(self.folder):
            write_durably(self.folder / DIRTY_FILE, overlay.target.digest.encode(), mode=0o600)
            self._torn = overlay.target.digest
            for index, tensor in enumerate(self.inventory.tensors):
                for record in overlay.records(index, 0, tensor.nbytes):
                    self._write(index, overlay, record)
            self._write_side_files(overlay)
            for descriptor in self._descriptors:
                os.fdatasync(descriptor)
            write_durably(self.folder / STATE_FILE, _state_bytes(overlay.target), mode=0o600)
            (self.folder / DIRTY_FILE).unlink()
            sync_folder(self.folder)
        self.state = overlay.target
        self._torn = None

    def _write(self, index: int, overlay: Overlay, record: Record) -> None:
        if not record.count:
            whole = overlay.block(record, 0, record.nbytes)
            for place in self._places[index]:
                _pwrite(place, record.start, whole)
            return
        positions, elements = overlay.elements(record)
        width = record.width
        for first, last in _runs(positions, max(1, _GAP // width)):
            start, end = int(positions[first]) * width, (int(positions[last - 1]) + 1) * width
            run = np.empty(end - start, np.uint8)
            self._read(self._places[index][0], record.start + start, run)
            kernels().scatter(positions[first:last], elements[first * width : last * width], width, start, run)
            for place in self._places[index]:
                _pwrite(place, record.start + start, run)

    def _write_side_files(self, overlay: Overlay) -> None:
        kept = {file.path for file in overlay.target.side_files}
        for file in self.state.side_files:
            if file.path not in kept:
                path = self.folder / file.path
                # After a commit that failed here or later, it may be gone, or a folder may stand where it stood.
                with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                    path.unlink()
                _remove_empty(path.parent, self.folder)
        for name in overlay.side_paths:
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, overlay.read_side(name))

    # -- proving

    def verify_sums(self, *, threads: int | None = None) -> None:
        """Read everything.

        Raise DigestMismatch naming the tensors, or the side file, that are not as they should be.
        """
        wrong = np.flatnonzero((measure_sums(self, threads=threads) != self.state.sums).any(axis=1))
        if len(wrong):
            names = listed([self.inventory.tensors[index].name for index in wrong])
            raise DigestMismatch(f"The image's bytes of {names} do not have the promised sums; rebuild the image.")
        for file, actual in zip(self.side_files, self._actual_side_files(), strict=True):
            if file != actual:
                raise DigestMismatch(f"The image's {file.path} is not what was promised; rebuild the image.")

    def measure(self, *, threads: int | None = None) -> State:
        """Read everything; return the state of the bytes as they are, strong digests included."""
        return replace(measure(self, threads=threads), side_files=self._actual_side_files())

    def close(self) -> None:
        """Close the files; repeating it is harmless."""
        descriptors, self._descriptors = self._descriptors, []
        for descriptor in descriptors:
            os.close(descriptor)

    def __enter__(self) -> Image:
        """Use as a context."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _actual_side_files(self) -> tuple[SideFile, ...]:
        return tuple(side_file(file.path, self.read_side(file.path)) for file in self.side_files)

    def _open_files(self) -> list[list[_Place]]:
        """For each tensor every place where its bytes lie: its own first, then stored copies under aliases."""
        with Checkpoint.open(self.folder, aliases=self.inventory.aliases) as checkpoint:
            self.inventory.require_same(checkpoint.inventory)
            if checkpoint.side_files != self.side_files:
                raise StoreError("Its side files are not those of its state.")
            places: list[list[_Place]] = [[] for _ in self.inventory.tensors]
            for shard in checkpoint.shards:
                descriptor = os.open(shard.path, os.O_RDWR | os.O_CLOEXEC)
                self._descriptors.append(descriptor)
                for entry in shard.header.entries:
                    place = _Place(descriptor, len(shard.header.raw) + entry.begin)
                    held = places[self.inventory.index(entry.name)]
                    held.insert(len(held) if entry.name in self.inventory.aliases else 0, place)
        return places

    def _read(self, place: _Place, offset: int, out: Bytes) -> None:
        view, offset = out.data, place.start + offset
        while view:
            count = os.preadv(place.descriptor, [view], offset)
            if count == 0:
                raise StoreError(f"A file of the image {self.folder} is cut short; rebuild the image.")
            view, offset = view[count:], offset + count


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor's bytes start in an open file."""

    descriptor: int
    start: int


def _folder_layout(source: TensorSource) -> Layout | None:
    if not isinstance(source, Checkpoint):
        return None
    layout = source.layout
    if layout.is_folder:
        return layout
    return replace(layout, is_folder=True, shards=tuple(replace(shard, name=SINGLE) for shard in layout.shards))


def _runs(positions: Positions, gap: int) -> Iterator[tuple[int, int]]:
    """Cut ascending positions into runs [first, last) whose neighbours are less than `gap` apart."""
    cuts = np.flatnonzero(np.diff(positions) > gap) + 1
    edges = [0, *cuts.tolist(), positions.size]
    return pairwise(edges)


def _pwrite(place: _Place, offset: int, data: Bytes) -> None:
    view, offset = data.data, place.start + offset
    while view:
        count = os.pwrite(place.descriptor, view, offset)
        view, offset = view[count:], offset + count


def _remove_empty(folder: Path, root: Path) -> None:
    while folder != root and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent


def _state_bytes(state: State) -> bytes:
    """The state file: a line of canonical JSON, inventory, digests, and the SHA-256 of all that."""
    inventory, digests = state.inventory.to_bytes(), state.digests_bytes()
    head = canonical.encode(
        {
            "digests": len(digests),
            "format": FORMAT,
            "inventory": len(inventory),
            "side_files": [file.to_json() for file in state.side_files],
            "state": state.digest,
        }
    )
    raw = head + b"\n" + inventory + digests
    return raw + hashlib.sha256(raw).digest()


def _parse_state(data: bytes) -> State:
    raw, checksum = data[:-32], data[-32:]
    line, found, rest = raw.partition(b"\n")
    if not found or hashlib.sha256(raw).digest() != checksum:
        raise StoreError("Its state file is damaged.")
    head = canonical.decode(line, what="The image's state file", error=StoreError, max_bytes=MAX_BYTES)
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise StoreError(f"Its state file is not of the format {FORMAT}.")
    split = head["inventory"]
    try:
        side_files = parse_side_files(head["side_files"])
    except ValueError as problem:
        raise StoreError(f"Its state file is damaged: {problem}.") from None
    state = State.from_parts(Inventory.from_bytes(rest[:split]), rest[split:], side_files)
    if state.digest != head["state"]:
        raise StoreError("Its state file does not have the digest that it names.")
    return state
