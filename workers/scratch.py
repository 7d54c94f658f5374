"""Folders for what an attempt at a job needs while it lasts; those of killed workers are found and removed.

A folder is in use as long as its lock is held, and a lock ends with its process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from django.conf import settings


class Scratch:
    """A new folder under `MAILBOAT_HOME/scratch`, in use until `close`."""

    def __init__(self, name: str) -> None:
        parent = _parent()
        parent.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent))
        self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Give the space back."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def clear_abandoned() -> int:
    """Remove the folders that no process holds; how many there were."""
    removed = 0
    with contextlib.suppress(FileNotFoundError):
        for folder in list(_parent().iterdir()):
            removed += _remove_if_abandoned(folder)
    return removed


def _remove_if_abandoned(folder: Path) -> bool:
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # its owner was quicker
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _parent() -> Path:
    return Path(settings.MAILBOAT_HOME) / "scratch"
