"""A place in shared memory for the image of one store, locked while it is used and cleared when its store is gone.

    /dev/shm/mailboat-<uid>/<hash of the store's path>         the image /dev/shm/mailboat-<uid>/<hash of the store's
    path>.store   the store's path; locked by the island that uses the image

It must never remove an image that a living process may use: not even one whose store lies in another container, out of
sight.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from mailboat.durable import lock_file, remove, unlock_file
from mailboat.errors import StoreError

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - tmpfs by that name on Linux; the folder inside is 0700
SPARE = 64 << 20  # bytes left free for others


class SharedPlace:
    """The place of one store's image. `folder` is None where there is no shared memory, or another island uses the
    place.
    """

    def __init__(self, store: Path) -> None:
        self.folder: Path | None = None
        self._lock: int | None = None
        parent = SHARED_MEMORY / f"mailboat-{os.getuid()}"
        if not SHARED_MEMORY.is_dir():
            return
        try:
            parent.mkdir(mode=0o700, exist_ok=True)
            if parent.stat().st_uid != os.getuid():
                return
            _clear_orphans(parent)
            folder = parent / hashlib.sha256(os.fsencode(store)).hexdigest()[:16]
            note = folder.with_suffix(".store")
            self._lock = lock_file(note, "Another island uses this place in shared memory.")
            note.write_bytes(os.fsencode(store))
        except (OSError, StoreError):
            return
        self.folder = folder

    def fits(self, needed: int) -> bool:
        """Whether an image of ``needed`` bytes has room, or lies there already."""
        if self.folder is None:
            return False
        return self.folder.exists() or shutil.disk_usage(SHARED_MEMORY).free >= needed + SPARE

    def close(self) -> None:
        """Lets go of the place; the image stays for the next start."""
        if self._lock is not None:
            unlock_file(self._lock)
            self._lock = None


def _clear_orphans(parent: Path) -> None:
    """Removes images whose store was removed and that nobody has locked."""
    for note in parent.glob("*.store"):
        store = os.fsdecode(note.read_bytes())
        if not store or Path(store).exists():
            continue
        try:
            lock = lock_file(note, "in use")
        except (OSError, StoreError):
            continue
        remove(note.with_suffix(""))
        remove(note)
        unlock_file(lock)
