"""Writes that survive a power cut: temporary file, fsync, rename, fsync of the folder.

A reader sees the old bytes or the new ones, never a mixture. It must never be used for bulk data in a loop: each call
waits for the disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from mailboat.errors import DiskFull, StoreError


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable (where the file system can)."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replaces a small file atomically and durably. Raises DiskFull, with the temporary file removed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_full_as_error(path.parent), removed_on_failure(temporary):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        temporary.replace(path)
    sync_folder(path.parent)


def rename_durably(source: Path, target: Path) -> None:
    """Gives a complete file or folder its name. ``target`` must not exist as a non-empty folder."""
    source.replace(target)
    sync_folder(target.parent)
    if source.parent != target.parent:
        sync_folder(source.parent)


def remove(path: Path) -> None:
    """Removes a file or a folder with everything in it; absent is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def require_space(folder: Path, needed: int, what: str) -> None:
    """Raises DiskFull, before a byte is written, when ``needed`` bytes for ``what`` have no room on the disk of
    ``folder``.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DiskFull(
            f"{what} needs {needed:,} bytes on the disk of {folder}, where {free >> 20:,} MiB are free; "
            "free some space there."
        )


@contextlib.contextmanager
def removed_on_failure(path: Path) -> Iterator[None]:
    """Gives the space of ``path`` back when the block fails."""
    try:
        yield
    except BaseException:
        remove(path)
        raise


@contextlib.contextmanager
def disk_full_as_error(folder: Path) -> Iterator[None]:
    """Turns the system's "no space left" inside the block into DiskFull naming ``folder``."""
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        raise DiskFull(f"The disk of {folder} is full; free some space there.") from error


def lock_file(path: Path, taken: str) -> int:
    """Locks a file for this process until `unlock_file`; raises StoreError with the sentence ``taken`` when another has
    it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in {errno.EWOULDBLOCK, errno.EACCES}:
            raise
        raise StoreError(taken) from error
    return descriptor


def unlock_file(descriptor: int) -> None:
    """Lets another process lock it."""
    os.close(descriptor)
