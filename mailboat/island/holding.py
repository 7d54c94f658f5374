"""What the island holds: base, log, marker, image and engine, moved together from one published version to the next.

The order of a move: parts durable in the log, decoded and proven against the image, intent durable, bytes written,
everything scanned, marker. A kill between any two of them is finished or taken back by `recover`. It must never write
anything before the overlay was proven, and never claim a version that was not scanned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mailboat.checkpoint.files import Checkpoint, Layout
from mailboat.digest import State
from mailboat.durable import disk_full_as_error, remove, require_space
from mailboat.errors import ApiError, DiskFull, MailboatError, StoreError, Unreachable
from mailboat.image import Image, Overlay
from mailboat.island.engines.engine import Weights
from mailboat.island.marker import Base, LogEntry, Marker
from mailboat.island.members.roster import Alone, Members
from mailboat.island.sidecar.gate import CommitDeferred
from mailboat.island.sidecar.types import Applied
from mailboat.island.store import Store
from mailboat.manifest import Manifest
from mailboat.patch.new_bytes import IN_MEMORY
from mailboat.route import Documents, open_proven, prove, published
from mailboat.snapshot import Snapshot

Say = Callable[[str], None]
IMAGE_NOTE = "image"  # which folder is the image that was made last


@dataclass(frozen=True, slots=True)
class Step:
    """One patch of a route: a log entry, and the version that it leads to. ``signed``: the manifest says what the
    publisher says.
    """

    manifest: Manifest
    target: State
    entry: LogEntry
    signed: bool = True


class Prepared:
    """A route of patches that was decoded and proven as one overlay, ready to be committed or dropped."""

    def __init__(self, marker: Marker, overlay: Overlay, target: State) -> None:
        self.marker = marker
        self.overlay = overlay
        self.target = target

    def close(self) -> None:
        """Gives the overlay's memory back."""
        self.overlay.close()


class Holding:
    """The island's weights. One thread moves them; others may read under `lock`, when `image` is not None."""

    def __init__(
        self,
        store: Store,
        engine: Weights,
        documents: Documents,
        image: Path | None,
        say: Say,
        *,
        members: Members | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.marker: Marker | None = None
        self.image: Image | None = None
        self._store = store
        self._engine = engine
        self._documents = documents
        self._snapshot: Snapshot | None = None
        self._chosen = image and image.absolute()
        self._say = say
        self._members = members or Alone()
        if self._chosen is not None:
            store.require_outside(self._chosen)
            self._require_place(self._chosen)

    def close(self) -> None:
        """Closes the image; its bytes stay for the next start."""
        with self.lock:
            self._drop_image()

    @property
    def held(self) -> Marker | None:
        """The version held and scanned, or None."""
        return self.marker if self.image is not None else None

    # -- after a start, and after damage

    def recover(self) -> None:
        """Brings marker and image together again: from the image when it is whole, else from base and log, else nothing
        is held.

        Needs no network when the store is whole. Raises DiskFull, Unreachable or ApiError when waiting may help: then
        nothing is given up.
        """
        with self.lock:
            self._drop_image()
            candidates = self._candidates()
            self.marker = candidates[-1] if candidates else None
            for marker in candidates:
                if self._open_image(marker) or self._rebuild(marker):
                    self._store.set_marker(marker)
                    self.marker = marker
                    self._store.drop_intent()
                    self._load()
                    return
            self._store.forget()
            self.marker = None

    def _load(self) -> None:
        """Brings the engine to what was recovered; while it can't be, nothing is claimed."""
        if self.image is None or self.marker is None:
            return
        try:
            self._members.align(self.marker)
            self._engine.load(self.image, self._applied(self.marker))
        except BaseException:
            self._drop_image()
            raise

    def _candidates(self) -> list[Marker]:
        """What may be held, best first: where a commit was going, then the marker. Another run's is dropped."""
        found = []
        for read in (self._store.intent, self._store.marker):
            try:
                marker = read()
            except StoreError as error:
                self._say(str(error))
                continue
            if marker is not None and marker.run != self._documents.run_id:
                self._say("The store holds another run's version; the island seeds itself again.")
            elif marker is not None and (read == self._store.marker or self._members.decided(marker)):
                found.append(marker)
        return found

    def _open_image(self, marker: Marker) -> bool:
        folder = self._store.image_folder(self._chosen, 0)
        if not folder.exists():
            return False
        try:
            image = Image.open(folder)
        except MailboatError:
            return False  # interrupted in a commit: base and log make it again
        try:
            if image.digest == marker.state:
                self._engine.verify(image)
                self.image = image
                return True
        except MailboatError as error:
            self._say(f"The image is damaged ({error}) and is rebuilt.")
        image.close()
        return False

    def _rebuild(self, marker: Marker) -> bool:
        """Makes the image again from base and log."""
        started = time.monotonic()
        try:
            manifest = self._documents.manifest(marker.manifest, number=marker.version, held=True)
            aliases = self._documents.state(manifest).inventory.aliases
            checkpoint, state = open_proven(self._store.base_path(marker.base), aliases, marker.base.state)
            with checkpoint:
                image = self._create_image(checkpoint, state)
            try:
                for entry in marker.log:
                    self._replay(image, entry)
                self._engine.verify(image)
            except BaseException:
                image.close()
                raise
        except (DiskFull, Unreachable, ApiError):
            raise
        except (MailboatError, OSError) as error:
            self._say(f"Version {marker.version} can't be rebuilt from the store: {error}")
            return False
        self.image = image
        self._say(f"version {marker.version}  rebuilt from the store in {time.monotonic() - started:.2f} s")
        return True

    def _replay(self, image: Image, entry: LogEntry) -> None:
        if not self._store.has_entry(entry):
            raise StoreError(f"The log entry {entry.name} is missing or damaged.")
        # These very parts led to what was proven when they were applied, from a base that was proven again just now.
        target = self._documents.state(self._documents.waypoint(entry.manifest, number=entry.version)[0])
        overlay = image.prepare(self._store.part_paths(entry), target, scratch=self._store.incoming)
        try:
            image.commit(overlay)
        finally:
            overlay.close()

    # -- moving

    def seed(self, manifest: Manifest, serial: int, checkpoint: Checkpoint, state: State, base: Base) -> None:
        """Starts from a full checkpoint whose strong digests were compared with the manifest."""
        marker = self._marker_of(manifest, serial, base, ())
        with self.lock:
            self._store.set_intent(marker)
            self._drop_image()
            self._members.align(marker)
            image = self._create_image(checkpoint, state)
            try:
                self._engine.verify(image)
                self._engine.load(image, self._applied(marker))
            except BaseException:
                image.close()
                raise
            self._store.set_marker(marker)
            self._store.drop_intent()
            self.marker, self.image = marker, image

    def prepare(self, steps: Sequence[Step], serial: int) -> Prepared:
        """Decodes a route of log entries against the image, as one overlay, and proves the result; nothing is
        touched.
        """
        held, image = self.held, self.image
        if held is None or image is None or not steps:
            raise StoreError("Nothing is held that a patch could be applied to.")
        scratch, at, own = self._store.incoming, held.state, True
        layers: list[Overlay] = []
        try:
            for step in steps:
                parts = self._store.part_paths(step.entry)
                layers.append(image.prepare(parts, step.target, over=layers, scratch=scratch))
                own = own and step.signed and published(step.manifest, at, step.entry.parts)
                at = step.manifest.state
                if sum(layer.nbytes for layer in layers[1:]) > IN_MEMORY:
                    layers = [_stacked(layers, scratch)]
            if len(layers) > 1:
                layers = [_stacked(layers, scratch)]
            if not own:
                prove(image, layers[0], steps[-1].target)
            log = (*held.log, *(step.entry for step in steps))
            marker = self._marker_of(steps[-1].manifest, serial, held.base, log)
            self._members.prepare(marker)
        except BaseException:
            for layer in layers:
                layer.close()
            raise
        return Prepared(marker, layers[0], steps[-1].target)

    def commit(self, prepared: Prepared) -> None:
        """Writes a prepared patch to engine and image. If it fails the image is dropped: `recover` finishes the commit
        or takes it back. CommitDeferred says that nothing was touched.
        """
        if self.image is None:
            raise StoreError("Nothing is held that a patch could be applied to.")
        with self.lock:
            self._store.set_intent(prepared.marker)
            if self._snapshot is not None:
                self._snapshot.before(prepared.overlay)
            try:
                self._engine.commit(self.image, prepared.overlay, self._applied(prepared.marker))
            except CommitDeferred:
                self._store.drop_intent()
                raise
            except BaseException:
                self._drop_image()
                raise

    def confirm(self, prepared: Prepared) -> None:
        """Scans everything that is held, then moves the marker. Until then the old version is what is claimed."""
        if self.image is None:
            raise StoreError("The image is gone; it is rebuilt.")
        try:
            self._engine.verify(self.image)
        except (MailboatError, OSError):
            # Bytes that do not match: neither this image nor the way that led to it is trusted.
            with self.lock:
                self._drop_image()
            self._store.drop_intent()
            raise
        with self.lock:
            self._store.set_marker(prepared.marker)
            self._store.drop_intent()
            self.marker = prepared.marker

    def relabel(self, manifest: Manifest, serial: int) -> None:
        """Moves to a version with the very same state: nothing travels, but the bytes are scanned before the label
        moves.
        """
        held, image = self.held, self.image
        if held is None or image is None or held.state != manifest.state:
            raise StoreError("Another state is held than the one to be labelled.")
        self._engine.verify(image)
        marker = self._marker_of(manifest, serial, held.base, held.log)
        with self.lock:
            self._members.align(marker)
            self._engine.relabel(image, self._applied(marker))
            self._store.set_marker(marker)
            self.marker = marker

    def tidy(self) -> None:
        """Removes from the store what the marker does not need."""
        if self.marker is not None:
            self._store.collect(self.marker)
            self._store.drop_incoming()

    # -- a new base

    def snapshot(self) -> tuple[Marker, Snapshot, Layout] | None:
        """The version held, its bytes as they stay readable while the island moves on, and how they lie in files.

        None when nothing is held, or a commit is not confirmed yet. `end_snapshot` gives back what it costs.
        """
        with self.lock:
            held, image = self.held, self.image
            if held is None or image is None or image.digest != held.state:
                return None
            with Checkpoint.open(image.folder, aliases=image.inventory.aliases) as files:
                layout = files.layout
            self._snapshot = Snapshot(image, self.lock, self._store.incoming)
            return held, self._snapshot, layout

    def end_snapshot(self, snapshot: Snapshot) -> None:
        """Gives back what the snapshot kept."""
        with self.lock:
            snapshot.close()
            self._snapshot = None

    def rebase(self, origin: Marker, folder: Path) -> bool:
        """Makes the proven checkpoint of ``origin``'s version in ``folder`` the base, and lets go of the old one and of
        the log up to there. False, with the checkpoint removed, when the island has been seeded anew meanwhile.
        """
        with self.lock:
            held = self.marker
            if held is None or held.base != origin.base or held.log[: len(origin.log)] != origin.log:
                remove(folder)
                return False
            base = self._store.adopt_base(folder, origin.version, origin.state)
            marker = replace(held, base=base, log=held.log[len(origin.log) :])
            self._store.set_marker(marker)
            self.marker = marker
            self._members.rebased(marker)
            self._store.collect(marker)
            return True

    def _marker_of(self, manifest: Manifest, serial: int, base: Base, log: tuple[LogEntry, ...]) -> Marker:
        return Marker(
            run=manifest.run,
            epoch=manifest.epoch,
            version=manifest.number,
            state=manifest.state,
            manifest=manifest.sha256,
            inventory=manifest.inventory.sha256,
            digests=manifest.digests.sha256,
            serial=serial,
            base=base,
            log=log,
        )

    def _create_image(self, checkpoint: Checkpoint, state: State) -> Image:
        needed = state.inventory.full_bytes
        folder = self._store.image_folder(self._chosen, needed)
        with disk_full_as_error(folder.parent):
            folder.parent.mkdir(parents=True, exist_ok=True)
            self._require_place(folder)
            try:
                require_space(folder.parent, needed, "The image")
            except DiskFull:
                # Nothing is held while an image is made, so an old one there is of no use: it makes room.
                remove(folder)
                require_space(folder.parent, needed, "The image")
            image = Image.create(folder, checkpoint, state)
            self._store.set_note(IMAGE_NOTE, _identity(folder))
            return image

    def _require_place(self, folder: Path) -> None:
        """Raises StoreError when something else than an image lies there. A folder that was made here and has lost the
        file by which images are known is no use to anybody and goes.
        """
        try:
            Image.require_place(folder)
        except StoreError:
            if not self._store.has_place(folder) and self._store.note(IMAGE_NOTE) != _identity(folder):
                raise
            remove(folder)

    def audit(self) -> None:
        """Scans live memory, when nothing waits for it any more."""
        if self.image is not None:
            self._engine.audit(self.image)

    def _applied(self, marker: Marker) -> Applied:
        return Applied(self._documents.run, marker.run, marker.epoch, marker.version, marker.state)

    def _drop_image(self) -> None:
        if self._snapshot is not None:
            self._snapshot.spoil("another image took its place")
        if self.image is not None:
            self._engine.let_go()
            self.image.close()
            self.image = None

    def discard_image(self) -> None:
        """Removes the image's files: the next `recover` rebuilds it."""
        with self.lock:
            self._drop_image()
            folder = self._store.image_folder(self._chosen, 0)
            self._require_place(folder)
            remove(folder)

    def doubt(self) -> None:
        """Compares what is held by strong digests; bytes that differ, in spite of right sums, are given up for a new
        seed.
        """
        held, image = self.held, self.image
        if held is not None and image is not None and image.measure().digest != held.state:
            self._say(f"Version {held.version} has right sums but other bytes; the island seeds itself again.")
            with self.lock:
                self._drop_image()
                self._store.forget()
                self.marker = None


def _identity(folder: Path) -> dict[str, Any]:
    """The very folder, not another one that took its name; empty for a file."""
    status = folder.stat()
    if not folder.is_dir() or folder.is_symlink():
        return {}
    return {"folder": str(folder), "device": status.st_dev, "inode": status.st_ino}


def _stacked(layers: list[Overlay], scratch: Path) -> Overlay:
    with disk_full_as_error(scratch):
        whole = Overlay.stacked(layers, scratch)
    for layer in layers:
        layer.close()
    return whole
