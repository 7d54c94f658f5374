"""The local blob store: a folder, on one machine.

A file under `blobs/` never has its name before its bytes are whole, checked and on the disk; one that has a name is
never written again. The layout and what each call promises stand in `registry.blobs`.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from controlplane.registry import blobs
from controlplane.registry.blobs import CHUNK, OffsetMismatch, Part
from controlplane.registry.errors import Missing, Refusal, StorageFull, Unacceptable

FULL = (errno.ENOSPC, errno.EDQUOT)
PIECE = 256 * 1024  # of a download


@dataclass(frozen=True, slots=True)
class LocalBlobs:
    """The store in the folder `root`."""

    root: Path

    def check(self) -> str:
        """Empty when the folder can be written."""
        self.root.mkdir(parents=True, exist_ok=True)
        return "" if os.access(self.root, os.R_OK | os.W_OK | os.X_OK) else "The blob store can't be written."

    def path(self, run: uuid.UUID, sha256: str) -> Path:
        """Where the blob is, or would be."""
        return self.root / blobs.key(run, sha256)

    def upload_path(self, run: uuid.UUID, upload: uuid.UUID) -> Path:
        """Where the bytes of an upload gather."""
        return self.root / blobs.upload_key(run, upload)

    def document_path(self, name: str) -> Path:
        """Where a document lies."""
        return self.root / name

    def size(self, run: uuid.UUID, sha256: str) -> int | None:
        """Bytes of the blob; None when it is not here."""
        try:
            return self.path(run, sha256).stat().st_size
        except FileNotFoundError:
            return None

    def read(self, run: uuid.UUID, sha256: str) -> bytes:
        """All bytes of a (small) blob, checked against its name. Raises Missing, Refusal `blob_damaged`."""
        try:
            data = self.path(run, sha256).read_bytes()
        except FileNotFoundError:
            raise _missing(sha256) from None
        if hashlib.sha256(data).hexdigest() != sha256:
            raise Refusal(
                f"The blob {sha256} is damaged in the store; upload it again.", code="blob_damaged", status=500
            )
        return data

    def open(self, run: uuid.UUID, sha256: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """The bytes from `start` to `end` in pieces. Raises Missing."""
        try:
            file = self.path(run, sha256).open("rb")
        except FileNotFoundError:
            raise _missing(sha256) from None
        return _pieces(file, start, os.fstat(file.fileno()).st_size if end is None else end)

    async def stream(self, run: uuid.UUID, sha256: str, start: int, end: int) -> AsyncIterator[bytes]:
        """The bytes from `start` to `end`. A file that turns out shorter breaks the connection off."""
        handle = await asyncio.to_thread(os.open, self.path(run, sha256), os.O_RDONLY | os.O_CLOEXEC)
        try:
            while start < end:
                piece = await asyncio.to_thread(os.pread, handle, min(PIECE, end - start), start)
                if not piece:
                    raise OSError(f"{sha256} ended early")
                start += len(piece)
                yield piece
        finally:
            os.close(handle)

    def local(self, run: uuid.UUID, sha256: str, scratch: Path) -> Path:  # noqa: ARG002  nothing has to be copied
        """The blob's own file. Raises Missing."""
        path = self.path(run, sha256)
        if not path.exists():
            raise _missing(sha256)
        return path

    def write(self, run: uuid.UUID, data: bytes) -> tuple[str, int]:
        """Stores bytes and returns their name and size."""
        sha256 = hashlib.sha256(data).hexdigest()
        if self.size(run, sha256) != len(data):
            target = self.path(run, sha256)
            with _full_disk_is_said(), _temporary(target) as (handle, temporary):
                _write_all(handle, data)
                _publish(handle, temporary, target)
        return sha256, len(data)

    def write_file(self, run: uuid.UUID, source: Path) -> tuple[str, int]:
        """Stores a copy of a file and returns its name and size."""
        digest, length = hashlib.sha256(), 0
        near = self.root / "runs" / str(run) / "blobs" / "new"
        with _full_disk_is_said(), source.open("rb") as file, _temporary(near) as (handle, temporary):
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                length += len(chunk)
                _write_all(handle, chunk)
            sha256 = digest.hexdigest()
            if self.size(run, sha256) != length:
                _publish(handle, temporary, self.path(run, sha256))
        return sha256, length

    def remove(self, run: uuid.UUID, sha256: str) -> None:
        """Gives the blob's space back."""
        self.path(run, sha256).unlink(missing_ok=True)

    def require_space(self, length: int) -> None:
        """Raises StorageFull when the disk has less room."""
        self.root.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(self.root).free < length:
            raise StorageFull(
                f"The disk of the blob store has no room for {length} more bytes; free space there and try again."
            )

    def upload_offset(self, run: uuid.UUID, upload: uuid.UUID) -> int:
        """How many bytes of an upload have arrived."""
        try:
            return self.upload_path(run, upload).stat().st_size
        except FileNotFoundError:
            return 0

    def append(self, run: uuid.UUID, upload: uuid.UUID, offset: int, data: bytes | bytearray, limit: int) -> int:
        """Adds bytes at `offset`; the file's length decides under a lock. Raises OffsetMismatch, Unacceptable."""
        target = self.upload_path(run, upload)
        with _full_disk_is_said(), _locked(target) as handle:
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

    def finish(self, run: uuid.UUID, upload: uuid.UUID, sha256: str, length: int) -> None:
        """Turns a whole upload into the blob; the digest is taken of what is on the disk now, however many connections
        wrote it. Raises Unacceptable `digest_mismatch`.
        """
        source, target = self.upload_path(run, upload), self.path(run, sha256)
        with _full_disk_is_said(), _locked(source) as handle:  # an empty blob has had no byte to create the file
            if self.size(run, sha256) == length:  # another connection finished it while this one waited for the lock
                source.unlink(missing_ok=True)
                return
            if _digest(handle) != sha256:
                source.unlink()
                raise Unacceptable(
                    "The bytes do not have the announced SHA-256; they were thrown away, so send them again from 0.",
                    code="digest_mismatch",
                )
            _publish(handle, source, target)

    def drop_upload(self, run: uuid.UUID, upload: uuid.UUID) -> None:
        """Gives the space of an upload back."""
        self.upload_path(run, upload).unlink(missing_ok=True)

    def presign_get(self, run: uuid.UUID, sha256: str, seconds: int) -> str | None:  # noqa: ARG002
        """None: a folder answers through the control plane alone."""
        return None

    def presign_put_parts(
        self,
        run: uuid.UUID,  # noqa: ARG002
        upload: uuid.UUID,  # noqa: ARG002
        length: int,  # noqa: ARG002
        seconds: int,  # noqa: ARG002
    ) -> tuple[Part, ...] | None:
        """None: a folder takes no parts."""
        return None

    def finish_parts(self, run: uuid.UUID, upload: uuid.UUID, sha256: str, length: int) -> Sequence[int]:
        """What arrived through the control plane is all there is."""
        self.finish(run, upload, sha256, length)
        return ()

    def write_document(self, name: str, data: bytes) -> None:
        """Replaces a document."""
        target = self.document_path(name)
        with _full_disk_is_said(), _temporary(target) as (handle, temporary):
            _write_all(handle, data)
            _publish(handle, temporary, target)

    def read_document(self, name: str) -> bytes | None:
        """The document; None when there is none."""
        try:
            return self.document_path(name).read_bytes()
        except FileNotFoundError:
            return None

    def remove_document(self, name: str) -> None:
        """Harmless when it is gone."""
        self.document_path(name).unlink(missing_ok=True)

    def documents(self, folder: str) -> frozenset[str]:
        """The names of the documents right below `folder`."""
        try:
            found = (path.name for path in (self.root / folder).iterdir())
            return frozenset(name for name in found if not name.startswith("."))
        except FileNotFoundError:
            return frozenset()


def _missing(sha256: str) -> Missing:
    return Missing(f"The blob {sha256} is not in the store.")


def _pieces(file: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    with file:
        while start < end:
            piece = os.pread(file.fileno(), min(CHUNK, end - start), start)
            if not piece:
                raise OSError("the blob ended early")
            start += len(piece)
            yield piece


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The file, made when it is not there, held by one process at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)


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
