"""The island's store: base (never written), log (append-only), marker; everything else in it can be rebuilt.

    STORE/base/NNNNNN-<digest>/   a full checkpoint, complete before it has this name
    STORE/log/NNNNNN-<digest>/    one patch: its parts, complete before the folder has this name
    STORE/log/documents/<sha256>  manifests, inventories and digests, so that a restart works without the network
    STORE/incoming/               downloads under way; continued after a crash, never read as anything else
    STORE/rewrite/                the next base, while it is written from the image; of no use after a crash
    STORE/marker.json             which base and how much of the log make the version held
    STORE/intent.json             where a commit under way leads, so that a restart finishes it
    STORE/credential.json (0600) · STORE/serial.json · STORE/report.json · STORE/image.json · STORE/lock

It must never write inside a base or a log entry, never let two processes use one store, and never lie inside a
checkpoint, whose state it would change.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mailboat.checkpoint.replace import put_in_place
from mailboat.checkpoint.side_files import INDEX_FILE, TENSOR_FILE
from mailboat.durable import (
    disk_full_as_error,
    lock_file,
    remove,
    rename_durably,
    sync_folder,
    unlock_file,
    write_durably,
)
from mailboat.errors import StoreError
from mailboat.island.marker import Base, LogEntry, Marker
from mailboat.island.shared_memory import SharedPlace
from mailboat.manifest import BlobRef
from mailboat.transfer import file_blob


class Store:
    """A store in ``root``, locked for this process until `close`.

    Raises StoreError when another process uses it, or when it would lie inside a checkpoint; then nothing was made.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        _require_no_checkpoint(Path(os.path.realpath(self.root)))
        with disk_full_as_error(self.root):
            for folder in (self.root, self.base_folder, self.log_folder, self.documents, self.incoming):
                folder.mkdir(parents=True, exist_ok=True)
        self._shared: SharedPlace | None = None
        self._lock = lock_file(
            self.root / "lock", f"Another process uses the store {self.root}; stop it or choose another --store."
        )

    @property
    def base_folder(self) -> Path:
        """Holds the bases."""
        return self.root / "base"

    @property
    def log_folder(self) -> Path:
        """Holds the log entries."""
        return self.root / "log"

    @property
    def documents(self) -> Path:
        """Holds documents by SHA-256."""
        return self.root / "log" / "documents"

    @property
    def incoming(self) -> Path:
        """Holds downloads under way."""
        return self.root / "incoming"

    @property
    def rewrite(self) -> Path:
        """Holds the next base while it is written."""
        return self.root / "rewrite"

    def close(self) -> None:
        """Lets another process use the store."""
        if self._shared is not None:
            self._shared.close()
        unlock_file(self._lock)

    def require_outside(self, folder: Path) -> None:
        """Raises StoreError for a folder that is the store, holds it, or lies where it keeps what it can't rebuild."""
        place = Path(os.path.realpath(folder))
        root = Path(os.path.realpath(self.root))
        kept = [root / inside.name for inside in (self.base_folder, self.log_folder, self.incoming, self.rewrite)]
        if place == root or place in root.parents or any(place == inside or inside in place.parents for inside in kept):
            raise StoreError(f"{folder} overlaps the store {self.root}; choose another folder.")

    # -- marker

    def marker(self) -> Marker | None:
        """The marker, or None. Raises StoreError when it is damaged."""
        return Marker.read(self.root / "marker.json")

    def set_marker(self, marker: Marker) -> None:
        """Makes ``marker`` the truth."""
        marker.write(self.root / "marker.json")

    def intent(self) -> Marker | None:
        """The marker that a commit under way leads to, or None. Everything that it names is durable and proven."""
        return Marker.read(self.root / "intent.json")

    def set_intent(self, marker: Marker) -> None:
        """Notes durably where a commit leads, before it touches anything."""
        marker.write(self.root / "intent.json")

    def drop_intent(self) -> None:
        """The commit ended, or was given up."""
        (self.root / "intent.json").unlink(missing_ok=True)

    def forget(self) -> None:
        """Removes the marker: the island then seeds itself again. Base and log go when the next marker is collected
        for.
        """
        self.drop_intent()
        (self.root / "marker.json").unlink(missing_ok=True)
        sync_folder(self.root)

    def collect(self, marker: Marker) -> None:
        """Removes bases, log entries and documents that ``marker`` does not name."""
        kept_log = {entry.name for entry in marker.log} | {"documents"}
        for folder in self.log_folder.iterdir():
            if folder.name not in kept_log:
                remove(folder)
        for folder in self.base_folder.iterdir():
            if folder != self.base_path(marker.base):
                remove(folder)
        kept = {marker.manifest, marker.inventory, marker.digests} | {
            sha256 for entry in marker.log for sha256 in (entry.manifest, entry.inventory, entry.digests)
        }
        for document in self.documents.iterdir():
            if document.name not in kept:
                remove(document)

    # -- base

    def base_name(self, version: int, state: str) -> Path:
        """Where the base of a version has its place."""
        return self.base_folder / f"{version:06d}-{state[:16]}"

    def base_path(self, base: Base) -> Path:
        """Where a base lies: inside the store, which may be moved as a whole, or where a reference points."""
        return self.root / base.path

    def own_base(self, version: int, state: str) -> Base:
        """The base of a version inside this store."""
        return Base(str(self.base_name(version, state).relative_to(self.root)), version, state)

    def adopt_base(self, folder: Path, version: int, state: str) -> Base:
        """Gives a complete, verified checkpoint of this store its place as a base; what stood there goes in the same
        step.
        """
        _sync_tree(folder)
        put_in_place(folder, self.base_name(version, state))
        sync_folder(folder.parent)
        return self.own_base(version, state)

    # -- log

    def entry_name(self, version: int, parts: tuple[BlobRef, ...]) -> str:
        """The name of a log entry: its version and a digest of its parts, so that two routes never share a folder."""
        digest = hashlib.sha256("".join(part.sha256 for part in parts).encode()).hexdigest()
        return f"{version:06d}-{digest[:16]}"

    def part_paths(self, entry: LogEntry) -> tuple[Path, ...]:
        """The files of an entry in the log."""
        return tuple(self.log_folder / entry.name / f"part-{index}.mbp" for index in range(len(entry.parts)))

    def has_entry(self, entry: LogEntry) -> bool:
        """Whether the log holds an entry with the right bytes; one with wrong bytes is removed."""
        paths = self.part_paths(entry)
        if not (self.log_folder / entry.name).is_dir():
            return False
        if all(path.is_file() and file_blob(path) == part for path, part in zip(paths, entry.parts, strict=True)):
            return True
        remove(self.log_folder / entry.name)
        return False

    def append(self, entry: LogEntry, folder: Path) -> None:
        """Makes an entry whose verified parts lie in ``folder`` durable."""
        place = self.log_folder / entry.name
        remove(place)
        sync_folder(folder)
        rename_durably(folder, place)

    # -- documents

    def document(self, sha256: str) -> bytes | None:
        """A document with its digest checked again, or None."""
        path = self.documents / sha256
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        if hashlib.sha256(data).hexdigest() != sha256:
            remove(path)
            return None
        return data

    def keep_document(self, sha256: str, data: bytes) -> None:
        """Keeps a document durably."""
        write_durably(self.documents / sha256, data)

    # -- small notes

    def note(self, name: str) -> dict[str, Any] | None:
        """A small JSON note (credential, serial, report), or None when absent or unreadable."""
        try:
            body = json.loads((self.root / f"{name}.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return body if isinstance(body, dict) else None

    def set_note(self, name: str, body: Mapping[str, Any] | None) -> None:
        """Writes a note durably, readable by its owner alone; None removes it."""
        path = self.root / f"{name}.json"
        if body is None:
            path.unlink(missing_ok=True)
        else:
            write_durably(path, json.dumps(body, sort_keys=True).encode(), mode=0o600)

    def make_room(self, kept: Path) -> None:
        """Removes bases, log entries and downloads other than ``kept``: for an island that holds nothing and has no
        room for what it fetches.
        """
        for folder in (self.base_folder, self.log_folder, self.incoming, self.rewrite):
            for path in folder.iterdir() if folder.is_dir() else ():
                if path not in {kept, self.documents}:
                    remove(path)

    def drop_incoming(self) -> None:
        """Throws away what earlier downloads left."""
        for path in self.incoming.iterdir():
            remove(path)

    # -- image

    def image_folder(self, chosen: Path | None, needed: int) -> Path:
        """Where the image lies: ``chosen``, else shared memory when ``needed`` bytes fit, else inside the store.

        An image that exists already stays where it is.
        """
        if chosen is not None:
            return chosen.absolute()
        here = self.root / "image"
        if here.exists():
            return here
        if self._shared is None:
            self._shared = SharedPlace(self.root)
        return self._shared.folder if self._shared.folder and self._shared.fits(needed) else here

    def has_place(self, folder: Path) -> bool:
        """Whether a folder is one of the store's own places for an image, where nobody else keeps anything."""
        return folder == self.root / "image" or (self._shared is not None and folder == self._shared.folder)


def _require_no_checkpoint(root: Path) -> None:
    """A checkpoint's side files are all files in and below its folder: a store in there would become part of it."""
    for folder in (root, *root.parents):
        if not folder.is_dir():
            continue
        names = {entry.name for entry in os.scandir(folder)}
        tensors = any(name.endswith(TENSOR_FILE) for name in names)
        # A lone file of tensors somewhere above, in /tmp say, makes no checkpoint of everything below.
        if tensors and (folder == root or "config.json" in names or any(name.endswith(INDEX_FILE) for name in names)):
            raise StoreError(f"{folder} is a checkpoint and stays as it is; choose a --store outside of it.")


def _sync_tree(folder: Path) -> None:
    for parent, _, _ in os.walk(folder):
        sync_folder(Path(parent))
