"""The blob store in an object store: S3 and what speaks like it, Google Cloud Storage, Azure, or a folder by `file://`.

A small blob is created conditionally, so that what has a name is never written again; a large one becomes readable
when its multipart upload is completed, which happens only after the digest of the bytes that were sent was right. An
upload is a prefix with one object per piece, named by where it begins. Whatever the store's client says goes into the
log and never into an answer: it may name keys. The layout and what each call promises stand in `registry.blobs`.
"""

from __future__ import annotations

import hashlib
import secrets
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import obstore
import structlog
from obstore import exceptions as problems
from obstore.store import from_url

from controlplane.registry import blobs
from controlplane.registry.blobs import CHUNK, OffsetMismatch, Part
from controlplane.registry.errors import Missing, Refusal, StorageUnavailable, Unacceptable

log = structlog.get_logger(__name__)

AT_ONCE = 8 << 20  # blobs up to this are written by one conditional PUT
PIECE = 8 << 20  # of a multipart upload
PART = 64 << 20  # that a client puts straight into the store
MOST_PARTS = 2000
SIGNING = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss")


class _Mismatch(Exception):  # noqa: N818
    """Raised inside an upload so that the store throws it away."""


class ObjectBlobs:
    """The store at `url`: `s3://bucket/prefix`, `gs://...`, `az://...` or `file:///folder`.

    Credentials come from the client's usual environment variables (`AWS_ACCESS_KEY_ID`, ...); its settings may stand
    in the URL: `?endpoint=...&region=...`.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        config: Any = dict(parse_qsl(parts.query))
        options: Any = {"allow_http": True} if config.get("endpoint", "").startswith("http://") else {}
        address = parts._replace(query="", fragment="").geturl()
        if parts.scheme == "file":
            self._store = from_url(address, mkdir=True)
        else:
            self._store = from_url(address, config=config, client_options=options)
        self._signs = parts.scheme in SIGNING

    def check(self) -> str:
        """Empty when a small object can be written and read back."""
        token = secrets.token_bytes(8)
        with _refused():
            obstore.put(self._store, "health", token)
            obstore.get(self._store, "health").bytes()  # another process may have written meanwhile
        return ""

    # Whole blobs

    def size(self, run: uuid.UUID, sha256: str) -> int | None:
        """Bytes of the blob; None when it is not here."""
        return self._size(blobs.key(run, sha256))

    def read(self, run: uuid.UUID, sha256: str) -> bytes:
        """All bytes of a (small) blob, checked against its name. Raises Missing, Refusal `blob_damaged`."""
        key = blobs.key(run, sha256)
        with _refused(sha256):
            data = bytes(obstore.get(self._store, key).bytes())
        if hashlib.sha256(data).hexdigest() != sha256:
            raise Refusal(
                f"The blob {sha256} is damaged in the store; upload it again.", code="blob_damaged", status=500
            )
        return data

    def open(self, run: uuid.UUID, sha256: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """The bytes from `start` to `end` in pieces. Raises Missing."""
        size = self.size(run, sha256)
        if size is None:
            raise _missing(sha256)
        return self._range(blobs.key(run, sha256), start, size if end is None else end)

    async def stream(self, run: uuid.UUID, sha256: str, start: int, end: int) -> AsyncIterator[bytes]:
        """The bytes from `start` to `end`; an object that turns out shorter breaks the connection off."""
        if start >= end:
            return
        with _refused(sha256):
            found = await obstore.get_async(self._store, blobs.key(run, sha256), options={"range": (start, end)})
            async for piece in found.stream(min_chunk_size=CHUNK // 4):
                data = bytes(piece)
                start += len(data)
                yield data
        if start != end:
            raise OSError(f"{sha256} ended early")

    def local(self, run: uuid.UUID, sha256: str, scratch: Path) -> Path:
        """A copy in `scratch`, made once. Raises Missing."""
        target = scratch / sha256
        if not target.exists():
            fresh = scratch / f".{secrets.token_hex(8)}.part"
            try:
                with fresh.open("wb") as file:
                    for piece in self.open(run, sha256):
                        file.write(piece)
                fresh.replace(target)
            finally:
                fresh.unlink(missing_ok=True)
        return target

    def write(self, run: uuid.UUID, data: bytes) -> tuple[str, int]:
        """Stores bytes and returns their name and size."""
        sha256 = hashlib.sha256(data).hexdigest()
        self._create(run, sha256, len(data), lambda: iter([data]))
        return sha256, len(data)

    def write_file(self, run: uuid.UUID, source: Path) -> tuple[str, int]:
        """Stores a copy of a file and returns its name and size."""
        digest, length = hashlib.sha256(), 0
        for piece in _file(source):
            digest.update(piece)
            length += len(piece)
        sha256 = digest.hexdigest()
        self._create(run, sha256, length, lambda: _file(source))
        return sha256, length

    def remove(self, run: uuid.UUID, sha256: str) -> None:
        """Gives the blob's space back."""
        self._delete([blobs.key(run, sha256)])

    def require_space(self, length: int) -> None:
        """An object store knows no limit."""

    # Resumable uploads through the control plane

    def upload_offset(self, run: uuid.UUID, upload: uuid.UUID) -> int:
        """How many bytes lie there without a gap."""
        return sum(size for _, size in self._pieces(run, upload))

    def append(self, run: uuid.UUID, upload: uuid.UUID, offset: int, data: bytes | bytearray, limit: int) -> int:
        """Adds a piece that is named by its offset; creating it decides between two who bring the same one. Raises
        OffsetMismatch, Unacceptable.
        """
        if offset + len(data) > limit:
            raise Unacceptable(f"More than the announced {limit} bytes were sent.", code="upload_too_long")
        if not data:
            return offset
        truth = self.upload_offset(run, upload)
        if truth != offset:
            raise OffsetMismatch(truth)
        with _refused():
            try:
                obstore.put(self._store, f"{blobs.upload_key(run, upload)}/{offset:016x}", bytes(data), mode="create")
            except problems.AlreadyExistsError:
                raise OffsetMismatch(self.upload_offset(run, upload)) from None
        return offset + len(data)

    def finish(self, run: uuid.UUID, upload: uuid.UUID, sha256: str, length: int) -> None:
        """Joins the pieces into the blob. Raises Unacceptable `digest_mismatch`."""
        self._join(run, upload, sha256, length, [key for key, _ in self._pieces(run, upload)])

    def drop_upload(self, run: uuid.UUID, upload: uuid.UUID) -> None:
        """Gives the space of an upload back."""
        self._delete(list(self._sizes(f"{blobs.upload_key(run, upload)}/")))

    # Straight from and to the store

    def presign_get(self, run: uuid.UUID, sha256: str, seconds: int) -> str | None:
        """An address that answers the blob's bytes for a while; None for `file://`."""
        return self._sign("GET", blobs.key(run, sha256), seconds)

    def presign_put_parts(
        self, run: uuid.UUID, upload: uuid.UUID, length: int, seconds: int
    ) -> tuple[Part, ...] | None:
        """The parts that are not there whole; None for `file://`, and for an upload begun through the control plane."""
        if not self._signs or self.upload_offset(run, upload):
            return None
        there = self._sizes(f"{blobs.upload_key(run, upload)}/")
        missing = []
        for index, key, offset, size in _parts(run, upload, length):
            if there.get(key) != size:
                missing.append(Part(index, offset, size, self._sign("PUT", key, seconds) or ""))
        return tuple(missing)

    def finish_parts(self, run: uuid.UUID, upload: uuid.UUID, sha256: str, length: int) -> Sequence[int]:
        """Joins the parts; returns the indices of those that are not there whole. Raises Unacceptable."""
        if self.size(run, sha256) == length:
            self.drop_upload(run, upload)
            return ()
        there = self._sizes(f"{blobs.upload_key(run, upload)}/")
        parts = _parts(run, upload, length)
        missing = [index for index, key, _, size in parts if there.get(key) != size]
        if not missing:
            self._join(run, upload, sha256, length, [key for _, key, _, _ in parts])
        return missing

    # Documents

    def write_document(self, name: str, data: bytes) -> None:
        """Replaces a document."""
        with _refused():
            obstore.put(self._store, name, data)

    def read_document(self, name: str) -> bytes | None:
        """The document; None when there is none."""
        try:
            with _refused("document"):
                return bytes(obstore.get(self._store, name).bytes())
        except Missing:
            return None

    def remove_document(self, name: str) -> None:
        """Harmless when it is gone."""
        self._delete([name])

    def documents(self, folder: str) -> frozenset[str]:
        """The names of the documents right below `folder`."""
        names = (key.removeprefix(folder) for key in self._sizes(folder))
        return frozenset(name for name in names if "/" not in name)

    # The store itself

    def _size(self, key: str) -> int | None:
        with _refused():
            try:
                return int(obstore.head(self._store, key)["size"])
            except (FileNotFoundError, problems.NotFoundError):
                return None

    def _sizes(self, prefix: str) -> dict[str, int]:
        """Keys under a prefix with their sizes."""
        with _refused():
            return {item["path"]: item["size"] for batch in obstore.list(self._store, prefix) for item in batch}

    def _range(self, key: str, start: int, end: int) -> Iterator[bytes]:
        with _refused(key.rpartition("/")[2]):
            while start < end:
                piece = bytes(obstore.get_range(self._store, key, start=start, end=min(end, start + CHUNK)))
                if not piece:
                    raise OSError("the blob ended early")
                start += len(piece)
                yield piece

    def _create(self, run: uuid.UUID, sha256: str, length: int, pieces: Callable[[], Iterable[bytes]]) -> None:
        """Gives bytes their name, unless they have it. Raises _Mismatch when they are others than they should be."""
        key = blobs.key(run, sha256)
        found = self._size(key)
        if found == length:
            return
        with _refused():
            if length > AT_ONCE:
                # A writer that is not closed leaves nothing that can be read, so wrong bytes never get the name.
                writer = obstore.open_writer(self._store, key, buffer_size=PIECE, max_concurrency=2)
                for piece in _checked(pieces(), sha256):
                    writer.write(piece)
                writer.close()
                return
            data = b"".join(_checked(pieces(), sha256))
            try:
                # What has another size there is damaged: it alone may be written over.
                obstore.put(self._store, key, data, mode="create" if found is None else "overwrite")
            except problems.AlreadyExistsError:
                if self._size(key) != length:
                    raise

    def _pieces(self, run: uuid.UUID, upload: uuid.UUID) -> list[tuple[str, int]]:
        """The pieces of an upload through the control plane that lie there without a gap, in order."""
        prefix = f"{blobs.upload_key(run, upload)}/"
        found = self._sizes(prefix)
        offset, chain = 0, []
        while (key := f"{prefix}{offset:016x}") in found:
            chain.append((key, found[key]))
            offset += found[key]
        return chain

    def _join(self, run: uuid.UUID, upload: uuid.UUID, sha256: str, length: int, keys: Sequence[str]) -> None:
        def content() -> Iterator[bytes]:
            for key in keys:
                yield from self._range(key, 0, self._size(key) or 0)

        try:
            self._create(run, sha256, length, content)
        except _Mismatch:
            self.drop_upload(run, upload)
            raise Unacceptable(
                "The bytes do not have the announced SHA-256; they were thrown away, so send them again from 0.",
                code="digest_mismatch",
            ) from None
        self.drop_upload(run, upload)

    def _delete(self, keys: Sequence[str]) -> None:
        with _refused():
            for key in keys:
                try:
                    obstore.delete(self._store, key)
                except (FileNotFoundError, problems.NotFoundError):
                    continue

    def _sign(self, method: str, key: str, seconds: int) -> str | None:
        if not self._signs:
            return None
        with _refused():
            return str(obstore.sign(self._store, method, key, timedelta(seconds=seconds)))  # type: ignore[call-overload]


def _parts(run: uuid.UUID, upload: uuid.UUID, length: int) -> list[tuple[int, str, int, int]]:
    """(index, key, offset, size) of the parts of a blob; they depend on its length alone."""
    part = max(PART, -(-length // MOST_PARTS))
    prefix = blobs.upload_key(run, upload)
    offsets = range(0, length, part)
    return [(i, f"{prefix}/part-{i:05}", offset, min(part, length - offset)) for i, offset in enumerate(offsets)]


def _checked(pieces: Iterable[bytes], sha256: str) -> Iterator[bytes]:
    """The pieces as they are; ends in _Mismatch instead of ending when they were the wrong ones."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
        yield piece
    if digest.hexdigest() != sha256:
        raise _Mismatch


def _file(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            yield piece


def _missing(sha256: str) -> Missing:
    return Missing(f"The blob {sha256} is not in the store.")


@contextmanager
def _refused(sha256: str = "") -> Iterator[None]:
    """Says what the store's client says in our words. With a name, an object that is not there is Missing."""
    try:
        yield
    except (FileNotFoundError, problems.NotFoundError) as error:
        if sha256:
            raise _missing(sha256) from None
        raise _unavailable(error) from error
    except (problems.BaseError, ConnectionError, TimeoutError, PermissionError) as error:
        raise _unavailable(error) from error


def _unavailable(error: Exception) -> StorageUnavailable:
    log.warning("object store", error=str(error)[:2000])
    return StorageUnavailable("The blob store does not answer as it should; try again. The server's log says more.")
