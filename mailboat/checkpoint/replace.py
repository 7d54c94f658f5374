"""Give a finished file or folder its name in one step, whatever stood there before.

A reader must see the old checkpoint or the new one, never a mixture and never nothing.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from pathlib import Path

from mailboat.durable import remove, sync_folder

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM}


def temporary_beside(out: Path) -> Path:
    """Return a hidden name beside `out` that nobody uses."""
    return out.with_name(f".{out.name}.{secrets.token_hex(6)}.tmp")


def exchange(first: Path, second: Path) -> None:
    """Swap two names atomically (Linux renameat2); raise OSError, ENOSYS where there is no such call."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        call = libc.renameat2
    except AttributeError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    if call(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(second))


def put_in_place(finished: Path, out: Path) -> None:
    """Rename `finished` (complete and synced, beside `out`) to `out`, replacing what is there, durably.

    A file replaces a file, and a folder takes a free name, by rename. Otherwise the two names are exchanged and the old
    one is removed. Where the file system can't exchange names, the old one is moved aside first: a reader may then find
    nothing for an instant, and a crash in that instant leaves the old one under a hidden name beside it.
    """
    is_folder = finished.is_dir()
    if not os.path.lexists(out) or not (is_folder or _is_folder(out)):
        finished.replace(out)
        sync_folder(out.parent)
        return
    try:
        exchange(finished, out)
    except OSError as problem:
        if problem.errno not in _NO_EXCHANGE:
            raise
        _move_aside(finished, out)
        return
    sync_folder(out.parent)
    remove(finished)


def _move_aside(finished: Path, out: Path) -> None:
    old = temporary_beside(out)
    out.rename(old)
    try:
        finished.rename(out)
    except BaseException:
        old.rename(out)
        raise
    sync_folder(out.parent)
    remove(old)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
