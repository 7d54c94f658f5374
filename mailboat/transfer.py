"""Bulk bytes to and from the blob store: resumed at the byte where they stopped, and verified by SHA-256.

It must never leave unverified bytes under the name that the caller asked for: a download grows in a neighbouring
`.part` file, which survives a crash and is continued, and takes its name only after its digest was checked.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol

from urllib3.exceptions import HTTPError
from urllib3.response import BaseHTTPResponse

from mailboat.client import MAX_DOCUMENT, Api
from mailboat.durable import rename_durably
from mailboat.errors import (
    ApiError,
    CheckpointChanged,
    Conflict,
    DamagedDownload,
    DiskFull,
    MailboatError,
    NotFound,
    Unreachable,
)
from mailboat.manifest import BlobRef
from mailboat.patience import FIRST_PAUSE
from mailboat.replies import Upload

Read = Callable[[int, int], bytes]  # offset, length

PIECE = 256 << 10  # bytes read, hashed and written at a time
SENT_AT_ONCE = 8 << 20  # bytes of one PATCH: what a broken connection costs at most
STRAIGHT_FROM = 1 << 20  # smaller blobs are not worth the second request
JOIN_PAUSE = 1.0  # seconds between two looks at a large upload that is being joined
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class Link(Protocol):
    """Something that makes downloads wait for their bandwidth."""

    def take(self, count: int) -> None:
        """Waits until ``count`` more bytes may pass."""


class WrongBytes(MailboatError):  # noqa: N818 - as the library's other errors, named for what happened
    """The server sent something else than the blob: other bytes, another length, another object."""

    code = "wrong_bytes"


def file_blob(path: Path) -> BlobRef:
    """SHA-256 and size of a file, read once."""
    hasher = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            hasher.update(piece)
            size += len(piece)
    return BlobRef(sha256=hasher.hexdigest(), size=size)


def bytes_blob(data: bytes) -> BlobRef:
    """SHA-256 and size of bytes."""
    return BlobRef(sha256=hashlib.sha256(data).hexdigest(), size=len(data))


# -- upload


def upload_file(api: Api, run: str, blob: BlobRef, path: Path) -> int:
    """Uploads a file; returns the bytes sent (0 when the run has the blob)."""

    def read(offset: int, length: int) -> bytes:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(length)
        if len(data) != length:
            raise CheckpointChanged(f"{path} became shorter while it was uploaded; publish it when nothing writes it.")
        return data

    return _upload(api, run, blob, read)


def upload_bytes(api: Api, run: str, data: bytes) -> BlobRef:
    """Uploads bytes and returns their blob."""
    blob = bytes_blob(data)
    _upload(api, run, blob, lambda offset, length: data[offset : offset + length])
    return blob


def _upload(api: Api, run: str, blob: BlobRef, read: Read) -> int:
    """Sends what is missing, straight to the blob store where it takes parts, else through the control plane."""
    sent, tries = 0, api.tries()
    while True:
        before = sent
        upload = api.begin_upload(run, blob.sha256, blob.size, direct=_straight(api, blob))
        if upload.exists:
            return sent
        try:
            steps = _send_parts if upload.parts is not None else _send_pieces
            for count in steps(api, run, upload, blob, read):
                sent += count
            return sent
        except (Unreachable, ApiError) as error:
            if sent > before:
                tries.gained()
            # NotFound: the upload was completed, or collected, meanwhile; Conflict: it stands elsewhere. Ask again.
            if not tries.another(error, passing=isinstance(error, NotFound | Conflict)):
                raise


def _straight(api: Api, blob: BlobRef) -> bool:
    """Whether it is worth going past the control plane."""
    return blob.size >= STRAIGHT_FROM and api.direct.usable


def _send_pieces(api: Api, run: str, upload: Upload, blob: BlobRef, read: Read) -> Iterator[int]:
    """Through the control plane, from where the upload stands; yields the bytes that have arrived each time."""
    offset = upload.offset
    while True:
        after = api.send_piece(run, upload.id, offset, read(offset, min(SENT_AT_ONCE, blob.size - offset)))
        yield max(0, after - offset)
        offset = after
        if offset >= blob.size:
            return


def _send_parts(api: Api, run: str, upload: Upload, blob: BlobRef, read: Read) -> Iterator[int]:
    """Straight into the store, those that are missing; then the control plane joins and checks them. A part that is
    there whole is never sent again, whoever sent it.
    """
    for part in upload.parts or ():
        if not 0 <= part.offset <= part.offset + part.size <= blob.size:
            raise MailboatError("The server asks for a part that lies outside the blob; its release is another one.")
        api.direct.put(part, _Stretch(read, part.offset, part.offset + part.size))
        yield part.size
    while not api.complete_upload(run, upload.id):
        api.sleep(JOIN_PAUSE)


class _Stretch:
    """A part as a file that is read once, a piece at a time."""

    def __init__(self, read: Read, start: int, end: int) -> None:
        self._read, self._at, self._end = read, start, end

    def read(self, count: int = -1, /) -> bytes:
        left = self._end - self._at
        data = self._read(self._at, left if count < 0 else min(count, left))
        self._at += len(data)
        return data


# -- download


def download_bytes(api: Api, run: str, sha256: str, *, limit: int = MAX_DOCUMENT) -> bytes:
    """A small blob (at most ``limit`` bytes) as verified bytes; fetched again once when wrong bytes came."""
    wrong, tries = 0, api.tries()
    while True:
        try:
            response = api.open_blob(run, sha256)
            try:
                data = response.read(limit + 1, decode_content=False)
            except (HTTPError, OSError) as error:
                raise Unreachable(f"The download of blob {sha256[:16]} broke off; try again.") from error
            finally:
                response.close()
            if hashlib.sha256(data).hexdigest() == sha256:
                return data
            wrong += 1
            if wrong > 1:
                raise DamagedDownload(
                    f"The server's bytes for blob {sha256[:16]} have another digest; its copy is damaged."
                )
            api.sleep(FIRST_PAUSE)
        except (Unreachable, ApiError) as error:
            if not tries.another(error):
                raise


def download(
    api: Api,
    run: str,
    blob: BlobRef,
    out: Path,
    *,
    link: Link | None = None,
    open_at: Callable[[int], BaseHTTPResponse] | None = None,
) -> int:
    """Downloads a blob to ``out``; returns the bytes that travelled. A whole, right ``out`` is kept and costs nothing.
    ``open_at`` opens it from a byte on; None: in the run's store.

    What an earlier try left in ``out``'s `.part` is continued. A lost connection is resumed while it makes progress;
    wrong, truncated or changed bytes are fetched once more from zero, then refused with DamagedDownload. On a full disk
    the partial file is removed and DiskFull raised.
    """
    if out.is_file() and file_blob(out) == blob:
        return 0
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(out.name + ".part")
    travelled = wrong = 0
    failed, tries = False, api.tries()
    while True:
        before, straight = _size(part), open_at is None and _straight(api, blob)
        opened = open_at or partial(_open, api, run, blob, straight)
        try:
            travelled += _fetch(opened, blob, part, link, straight=straight)
            rename_durably(part, out)
            return travelled
        except WrongBytes as error:
            travelled += max(0, _size(part) - before)
            part.unlink(missing_ok=True)
            if straight:
                api.direct.failed()  # whatever is wrong there, the control plane may have it right
            wrong += 1
            if wrong > 1:
                raise DamagedDownload(f"{error}; the copy on the server, or something between, is damaged.") from error
            api.sleep(FIRST_PAUSE)
        except (Unreachable, ApiError) as error:
            gained = max(0, _size(part) - before)
            travelled += gained
            if straight and failed and not gained:
                api.direct.failed()  # it opens there, and no byte comes
            failed = True
            if gained:
                tries.gained()
            if not tries.another(error):
                raise
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise
            part.unlink(missing_ok=True)
            raise DiskFull(f"The disk of {out.parent} is full; {blob.size:,} bytes are needed there.") from error


def _open(api: Api, run: str, blob: BlobRef, straight: bool, start: int) -> BaseHTTPResponse:
    return api.open_blob(run, blob.sha256, start=start, direct=straight)


def _fetch(
    open_at: Callable[[int], BaseHTTPResponse], blob: BlobRef, part: Path, link: Link | None, *, straight: bool
) -> int:
    """One connection's worth: continues ``part`` to its end and checks it; returns the bytes received."""
    hasher = hashlib.sha256()
    with part.open("a+b") as file:
        held = _hash_held(file, hasher, blob.size)
        received = 0
        if held < blob.size or blob.size == 0:
            response = open_at(held)
            try:
                if _start_of(response, blob, held, straight=straight) == 0 and held:
                    hasher, held = hashlib.sha256(), 0
                    file.truncate(0)
                received = _receive(response, file, hasher, blob.size - held, link)
            finally:
                response.close()
        file.flush()
        os.fsync(file.fileno())
    if hasher.hexdigest() != blob.sha256:
        raise WrongBytes(f"The bytes received for blob {blob.sha256[:16]} have another digest")
    return received


def _hash_held(file: BinaryIO, hasher: hashlib._Hash, size: int) -> int:
    """Hashes what an earlier try left; more than the blob's size can't be a part of it and is dropped."""
    if file.seek(0, os.SEEK_END) > size:
        file.truncate(0)
    file.seek(0)
    held = 0
    while piece := file.read(1 << 20):
        hasher.update(piece)
        held += len(piece)
    return held


def _start_of(response: BaseHTTPResponse, blob: BlobRef, held: int, *, straight: bool) -> int:
    """Where the answer's bytes start: ``held`` or 0. Another object, length or range than asked for is refused."""
    etag = response.headers.get("ETag", "").removeprefix("W/").strip('"')
    theirs = straight and not _DIGEST.fullmatch(etag)  # object stores have tags of their own making
    if etag and etag != blob.sha256 and not theirs:
        raise WrongBytes(f"The server sent another object for blob {blob.sha256[:16]}")
    if response.status == 416:
        raise WrongBytes(f"The server holds fewer bytes of blob {blob.sha256[:16]} than were announced")
    if response.status == 206:
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if not match or (int(match[1]), int(match[3])) != (held, blob.size):
            raise WrongBytes(f"The server sent another range of blob {blob.sha256[:16]} than the one asked for")
        return held
    length = response.headers.get("Content-Length", "")
    if length.isdigit() and int(length) != blob.size:
        raise WrongBytes(f"Blob {blob.sha256[:16]} has {length} bytes on the server instead of {blob.size}")
    return 0


def _receive(
    response: BaseHTTPResponse,
    file: BinaryIO,
    hasher: hashlib._Hash,
    wanted: int,
    link: Link | None,
) -> int:
    received = 0
    while True:
        try:
            piece = response.read1(PIECE, decode_content=False)
        except (HTTPError, OSError) as error:
            raise Unreachable("The connection broke off during a download; try again, it is resumed.") from error
        if not piece:
            break
        received += len(piece)
        if received > wanted:
            raise WrongBytes("The server sent more bytes than were announced")
        if link:
            link.take(len(piece))
        hasher.update(piece)
        file.write(piece)
    if received < wanted:
        raise Unreachable("The connection broke off during a download; try again, it is resumed.")
    return received


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
