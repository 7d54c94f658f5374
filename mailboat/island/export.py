"""Exports: each version as a complete checkpoint folder for readers on the same host, and a link to the newest.

    DIR/v000007    complete before it has this name; DIR/current -> v000007, switched atomically; the last two are kept

It must never write inside a folder that readers may have open: every version gets a new one.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from mailboat.checkpoint.files import Checkpoint
from mailboat.checkpoint.writing import write_checkpoint
from mailboat.durable import disk_full_as_error, remove, removed_on_failure, rename_durably, sync_folder
from mailboat.errors import StoreError
from mailboat.image import Image
from mailboat.island.marker import Marker

KEPT = 2
NOTE = ".mailboat.json"  # dot names do not belong to a checkpoint's state
_NAME = re.compile(r"v\d{6,}")


class Export:
    """Writes versions under ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    def write(self, held: Marker, image: Image) -> Path:
        """Makes the version held readable; does nothing when it is there already. Raises DiskFull, with the space given
        back.
        """
        note = {"run": held.run, "epoch": held.epoch, "version": held.version, "state": held.state}
        place = self.folder / f"v{held.version:06d}"
        if self._note(place) != note:
            with disk_full_as_error(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                self._clear_partial()
                self._write_new(place, image, note)
        self._point_at(place)
        self._prune(place)
        return place

    def _write_new(self, place: Path, image: Image, note: dict[str, Any]) -> None:
        partial = self.folder / f".partial-{place.name}-{os.getpid()}"
        with removed_on_failure(partial):
            with Checkpoint.open(image.folder, aliases=image.inventory.aliases) as shards:
                write_checkpoint(image, partial, layout=shards.layout, expect=image.state)
            (partial / NOTE).write_text(json.dumps(note))
            if os.path.lexists(place):  # another epoch's or run's version of that number
                if self._note(place) is None:
                    raise StoreError(f"{place} is not an export and is not touched; choose another --export.")
                old = self.folder / f".partial-old-{place.name}-{os.getpid()}"
                rename_durably(place, old)
                remove(old)
            rename_durably(partial, place)

    def _point_at(self, place: Path) -> None:
        link = self.folder / "current"
        if link.is_symlink() and link.readlink().name == place.name:
            return
        if os.path.lexists(link) and not (link.is_symlink() and _NAME.fullmatch(str(link.readlink()))):
            raise StoreError(f"{link} is not an export's link and is not touched; choose another --export.")
        temporary = self.folder / f".partial-current-{os.getpid()}"
        remove(temporary)
        temporary.symlink_to(place.name)
        temporary.replace(link)
        sync_folder(self.folder)

    def _prune(self, newest: Path) -> None:
        """Keeps what `current` names and the version before it; after a rollback higher numbers go as well."""
        others = [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name) and path != newest]
        others = [path for path in others if self._note(path) is not None]  # not a trainer's own folders
        others.sort(key=lambda path: path.stat().st_mtime_ns)
        for path in others[: max(0, len(others) - (KEPT - 1))]:
            remove(path)

    def _clear_partial(self) -> None:
        for path in self.folder.glob(".partial-*"):
            remove(path)

    def _note(self, place: Path) -> Any:
        try:
            return json.loads((place / NOTE).read_text())
        except (OSError, ValueError):
            return None
