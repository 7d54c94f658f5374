"""The local blob store: immutable files named by their SHA-256, apart for each run.

    <root>/runs/<run>/blobs/<sha256>        whole, verified, never written again
    <root>/runs/<run>/uploads/<upload>      bytes that arrived so far
    <root>/runs/<run>/channels/<name>.json  the head of a channel, so that islands can follow the store alone

A readable name under `blobs/` never exists before its bytes are whole, checked and on the disk. Nothing here knows the
database; `registry.services` records what is here.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from django.conf import settings

from controlplane.registry.errors import Missing, Refusal, StorageFull, Unacceptable

CHUNK = 1 << 20
NAME = re.compile(r"[0-9a-f]{64}")
FULL = (errno.ENOSPC, errno.EDQUOT)


class OffsetMismatch(Refusal):
    """Bytes were sent for another place than the upload has reached; `offset` is the true one."""

    code = "upload_offset"

    def __init__(self, offset: int) -> None:
        super().__init__(f"The upload stands at byte {offset}; continue from there.", offset=offset)
        self.offset = offset


def path(run: uuid.UUID, sha256: str) -> Path:
    """Where the blob is, or would be."""
    if not NAME.fullmatch(sha256):
        raise Missing("A blob is named by 64 hex digits.")
    return _folder(run, "blobs") / sha256


def upload_path(run: uuid.UUID, upload: uuid.UUID) -> Path:
    """Where the bytes of an upload gather."""
    return _folder(run, "uploads") / str(upload)


def head_path(run: uuid.UUID, channel: str) -> Path:
    """Where a channel's head lies for those who read the store alone."""
    return _folder(run, "channels") / f"{channel}.json"


def size(run: uuid.UUID, sha256: str) -> int | None:
    """Bytes of the blob; None when it is not here."""
    try:
        return path(run, sha256).stat().st_size
    except FileNotFoundError:
        return None


def read(run: uuid.UUID, sha256: str) -> bytes:
    """All bytes of a (small) blob, checked against its name. Raises Missing."""
    try:
        data = path(run, sha256).read_bytes()
    except FileNotFoundError:
        raise Missing(f"The blob {sha256} is not in the store.") from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise Refusal(f"The blob {sha256} is damaged in the store; upload it again.", code="blob_damaged", status=500)
    return data


def write(run: uuid.UUID, data: bytes) -> tuple[str, int]:
    """Stores bytes and returns their name and size; bytes that are here already cost nothing."""
    sha256 = hashlib.sha256(data).hexdigest()
    if size(run, sha256) != len(data):
        with _full_disk_is_said(), _temporary(path(run, sha256)) as (handle, temporary):
            _write_all(handle, data)
            _publish(handle, temporary, path(run, sha256))
    return sha256, len(data)


def write_file(run: uuid.UUID, source: Path) -> tuple[str, int]:
    """Stores a copy of a file and returns its name and size."""
    digest, length = hashlib.sha256(), 0
    with (
        _full_disk_is_said(),
        source.open("rb") as file,
        _temporary(_folder(run, "blobs") / "new") as (handle, temporary),
    ):
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            length += len(chunk)
            _write_all(handle, chunk)
        sha256 = digest.hexdigest()
        if size(run, sha256) != length:
            _publish(handle, temporary, path(run, sha256))
    return sha256, length


def upload_offset(run: uuid.UUID, upload: uuid.UUID) -> int:
    """How many bytes of an upload have arrived."""
    try:
        return upload_path(run, upload).stat().st_size
    except FileNotFoundError:
        return 0


def append(run: uuid.UUID, upload: uuid.UUID, offset: int, data: bytes | bytearray, limit: int) -> int:
    """Adds bytes at `offset` and returns the new offset.

    Two connections may feed one upload (the first one hangs, the client comes again): the file's length decides under a
    lock, the slower one is refused. Raises OffsetMismatch, Unacceptable (more bytes than announced), StorageFull.
    """
    target = upload_path(run, upload)
    with _full_disk_is_said():
        target.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(target, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            length = os.fstat(handle).st_size
            if length != offset:
                raise OffsetMismatch(length)
            if length + len(data) > limit:
                raise Unacceptable(f"More than the announced {limit} bytes were sent.", code="upload_too_long")
            try:
                _write_all(handle, data, offset)
            except OSError:
                os.ftruncate(handle, length)  # half a chunk is given back: the offset stays what the client knows
                raise
            return length + len(data)
        finally:
            os.close(handle)


def finish(run: uuid.UUID, upload: uuid.UUID, sha256: str, length: int) -> None:
    """Turns a whole upload into the blob. Bytes with another digest are thrown away: raises Unacceptable.

    The digest is taken of what is on the disk now, however many connections wrote it. Harmless when it was done
    already.
    """
    source, target = upload_path(run, upload), path(run, sha256)
    with _full_disk_is_said():
        source.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(source, os.O_RDWR | os.O_CREAT, 0o600)  # an empty blob has had no byte to create it
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if size(run, sha256) == length:  # another connection finished it while this one waited for the lock
                source.unlink(missing_ok=True)
                return
            if _digest(handle) != sha256:
                source.unlink()
                raise Unacceptable(
                    "The bytes do not have the announced SHA-256; they were thrown away, so send them again from 0.",
                    code="digest_mismatch",
                )
            _publish(handle, source, target)
        finally:
            os.close(handle)


def require_space(length: int) -> None:
    """Raises StorageFull early, before a client sends what can't be kept."""
    root = Path(settings.MAILBOAT_BLOB_ROOT)
    root.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(root).free < length:
        raise StorageFull(
            f"The disk of the blob store has no room for {length} more bytes; free space there and try again."
        )


def drop_upload(run: uuid.UUID, upload: uuid.UUID) -> None:
    """Gives the space of an upload back."""
    upload_path(run, upload).unlink(missing_ok=True)


def write_head(run: uuid.UUID, channel: str, envelope: bytes) -> None:
    """Replaces the head of a channel beside the blobs: readers see the old one or the new one."""
    target = head_path(run, channel)
    with _full_disk_is_said(), _temporary(target) as (handle, temporary):
        _write_all(handle, envelope)
        _publish(handle, temporary, target)


def _folder(run: uuid.UUID, kind: str) -> Path:
    return Path(settings.MAILBOAT_BLOB_ROOT) / "runs" / str(run) / kind


@contextmanager
def _temporary(near: Path) -> Iterator[tuple[int, Path]]:
    """A new file beside `near`; gone afterwards unless it was given a name."""
    near.parent.mkdir(parents=True, exist_ok=True)
    temporary = near.parent / f".{secrets.token_hex(8)}.part"
    handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        yield handle, temporary
    finally:
        os.close(handle)
        temporary.unlink(missing_ok=True)


def _publish(handle: int, temporary: Path, target: Path) -> None:
    """Gives complete bytes their name so that they outlive a power cut."""
    target.parent.mkdir(parents=True, exist_ok=True)
    os.fsync(handle)
    temporary.replace(target)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write_all(handle: int, data: bytes | bytearray, offset: int | None = None) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.write(handle, view[done:]) if offset is None else os.pwrite(handle, view[done:], offset + done)


def _digest(handle: int) -> str:
    digest, offset = hashlib.sha256(), 0
    while chunk := os.pread(handle, CHUNK, offset):
        digest.update(chunk)
        offset += len(chunk)
    return digest.hexdigest()


@contextmanager
def _full_disk_is_said() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise StorageFull("The disk of the blob store is full; free space there and try again.") from error
        raise
