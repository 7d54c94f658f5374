"""The publisher's copy of the last ready version: what every patch is made against.

It must never be taken for another version than the one whose digest it has: it moves only to versions that are ready.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mailboat.checkpoint.source import TensorSource
from mailboat.client import Api
from mailboat.digest import State
from mailboat.durable import disk_full_as_error, lock_file, remove, unlock_file
from mailboat.errors import DigestMismatch, MailboatError, ManifestError, StoreError
from mailboat.image import Image
from mailboat.manifest import Manifest
from mailboat.patience import pause_before
from mailboat.replies import AnchorStep, PatchStep, ReadyVersion
from mailboat.route import Documents, Memory, fetch_anchor, fetch_parts, open_proven, plan_route, prove

Fetched = TypeVar("Fetched")

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of our own, 0700, is made in it
ROOM = 3  # times the full size: image, patch and spare


@dataclass(frozen=True)
class Candidate:
    """A committed version's patch (all its parts), kept until it is known whether the version becomes ready."""

    base: str
    state: State
    parts: tuple[Path, ...]


class LocalCopy:
    """An image in ``folder``, or in a temporary folder that ends with the process."""

    def __init__(self, folder: Path | None) -> None:
        self._temporary: Path | None = None
        self._folder = folder
        self._lock: int | None = None
        self._candidates: list[Candidate] = []
        self.image: Image | None = None
        if folder is not None:
            with disk_full_as_error(folder):
                folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock_file(folder / "lock", f"Another publisher uses the folder {folder}; give each its own.")
            self._open()

    def close(self) -> None:
        """Lets go of the copy; a temporary one is removed."""
        if self.image is not None:
            self.image.close()
            self.image = None
        for candidate in self._candidates:
            _remove_all(candidate.parts)
        self._candidates.clear()
        if self._lock is not None:
            unlock_file(self._lock)
            self._lock = None
        if self._temporary is not None:
            remove(self._temporary)
            self._temporary = None

    def folder(self, needed: int) -> Path:
        """Where the copy lies. A temporary place is chosen once, in shared memory when there is room for ``needed``
        bytes.
        """
        if self._folder is not None:
            return self._folder
        if self._temporary is None:
            roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > ROOM * needed
            parent = str(SHARED_MEMORY) if roomy else None
            self._temporary = Path(tempfile.mkdtemp(prefix="mailboat-publisher-", dir=parent))
        return self._temporary

    def replace(self, source: TensorSource, state: State) -> Image:
        """Makes the copy anew from the bytes of a state."""
        if self.image is not None:
            self.image.close()
            self.image = None
        folder = self.folder(state.inventory.full_bytes)
        with disk_full_as_error(folder):
            self.image = Image.create(folder / "image", source, state)
        return self.image

    def keep(self, candidate: Candidate) -> None:
        """Remembers a committed patch."""
        self._candidates.append(candidate)

    def bring_to(self, ready: ReadyVersion, api: Api, run: str, run_id: str) -> Image:
        """The copy, moved to a ready version: by a patch of our own, else along the route that islands take."""
        self.settle(ready.state_digest)
        if self.image is None or self.image.digest != ready.state_digest:
            self._fetch(ready, api, run, run_id)
        if self.image is None or self.image.digest != ready.state_digest:
            raise StoreError(f"The copy could not be brought to version {ready.number}.")
        return self.image

    def settle(self, ready: str) -> None:
        """Moves to the ready state by a patch that was kept, when there is one; other patches are dropped."""
        for candidate in self._candidates:
            wanted = candidate.state.digest == ready
            if self.image is not None and wanted and self.image.digest == candidate.base:
                try:
                    self._apply(self.image, candidate.parts, candidate.state)
                except (MailboatError, OSError):
                    # The copy is uncertain; the route of the islands gives a sound one.
                    self._drop()
            _remove_all(candidate.parts)
        self._candidates.clear()

    def _fetch(self, ready: ReadyVersion, api: Api, run: str, run_id: str) -> None:
        held = self.image.digest if self.image is not None else None
        documents = Documents(api, run, run_id, Memory())
        plan = plan_route(api, run, held=held, to=ready.number)
        incoming = self.folder(plan.bytes) / "incoming"
        try:
            for step in plan.steps:
                if isinstance(step, AnchorStep):
                    self._fetch_anchor(step, documents, incoming / f"anchor-{step.version}")
                else:
                    self._fetch_patch(step, documents, incoming / f"patch-{step.to}")
        except MailboatError:
            if held is not None:
                self._drop()  # next time from the anchor
            raise
        remove(incoming)

    def _fetch_anchor(self, step: AnchorStep, documents: Documents, folder: Path) -> None:
        def fetch() -> tuple[Manifest, State]:
            fetch_anchor(documents, step, folder)
            manifest = documents.manifest(step.manifest, number=step.version)
            return manifest, documents.state(manifest)

        manifest, promised = _patiently(documents.api, fetch)
        checkpoint, state = open_proven(folder, promised.inventory.aliases, manifest.state)
        with checkpoint:
            self.replace(checkpoint, state)
        remove(folder)

    def _fetch_patch(self, step: PatchStep, documents: Documents, folder: Path) -> None:
        if self.image is None:
            raise ManifestError("The plan starts with a patch, but nothing is held; it is refused.")

        def fetch() -> tuple[tuple[Path, ...], State]:
            parts, _ = fetch_parts(documents, step, folder)
            return parts, documents.state(documents.manifest(step.manifest, number=step.to))

        self._apply(self.image, *_patiently(documents.api, fetch), proven=False)
        remove(folder)

    def _apply(self, image: Image, parts: tuple[Path, ...], target: State, *, proven: bool = True) -> None:
        overlay = image.prepare(parts, target)
        try:
            if not proven:
                prove(image, overlay, target)
            image.commit(overlay)
        finally:
            overlay.close()

    def _open(self) -> None:
        """Opens what an earlier process left; anything but a whole image with right sums is left for `bring_to` to
        replace.
        """
        assert self._folder is not None  # noqa: S101
        try:
            image = Image.open(self._folder / "image")
        except MailboatError:
            return
        try:
            image.verify_sums()
        except MailboatError:
            image.close()
            return
        self.image = image

    def _drop(self) -> None:
        if self.image is not None:
            self.image.close()
            self.image = None


def _remove_all(paths: tuple[Path, ...]) -> None:
    for path in paths:
        remove(path)


def _patiently(api: Api, fetch: Callable[[], Fetched]) -> Fetched:
    """A download whose bytes are damaged again and again is tried like a connection that fails: whoever repairs the
    store meanwhile saves the trainer's run.
    """
    for attempt in range(1, api.attempts):
        try:
            return fetch()
        except DigestMismatch:
            api.sleep(pause_before(attempt))
    return fetch()
