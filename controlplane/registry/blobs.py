"""Where blobs lie: immutable bytes named by their SHA-256, apart for each run.

    runs/<run>/blobs/<sha256>        whole, verified, never written again
    runs/<run>/uploads/<upload>      bytes on their way (a file, or a prefix with one object per part)
    runs/<run>/...json, head-keys/   documents for islands that follow the store alone (registry.beside)

`store()` is the deployment's one: the folder `MAILBOAT_BLOB_ROOT`, or the object store that `MAILBOAT_BLOB_URL` names.
Whichever it is, a readable name under `blobs/` never exists before its bytes are whole and checked. A store knows no
database; `registry.services` records what is there. It must never make one run's bytes readable under another's name.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from django.conf import settings
from django.utils.module_loading import import_string

from controlplane.registry.errors import Missing, Refusal

CHUNK = 1 << 20
NAME = re.compile(r"[0-9a-f]{64}")


class OffsetMismatch(Refusal):
    """Bytes were sent for another place than the upload has reached; `offset` is the true one."""

    code = "upload_offset"

    def __init__(self, offset: int) -> None:
        super().__init__(f"The upload stands at byte {offset}; continue from there.", offset=offset)
        self.offset = offset


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of an upload that the client puts straight into the store, with an HTTP PUT of exactly these bytes."""

    index: int  # from 0
    offset: int  # in the blob
    size: int
    url: str  # valid for the time that was asked for; carries its own credential


class BlobStore(Protocol):
    """What every store can do. Blocking, except `stream`; safe to call from any thread.

    Every call may raise StorageUnavailable, those that write StorageFull. `run` is a run's key; `sha256` is checked
    with `key` (Missing for what is no name).
    """

    def check(self) -> str:
        """Empty when the store can be read and written, else one sentence for /health/ready without any secret."""
        ...

    # Whole blobs

    def size(self, run: uuid.UUID, sha256: str) -> int | None:
        """Bytes of the blob; None when it is not here."""
        ...

    def read(self, run: uuid.UUID, sha256: str) -> bytes:
        """All bytes of a (small) blob, checked against its name. Raises Missing, Refusal `blob_damaged`."""
        ...

    def open(self, run: uuid.UUID, sha256: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """The bytes from `start` to `end` (exclusive) in pieces of at most CHUNK, unchecked. Raises Missing at once."""
        ...

    def stream(self, run: uuid.UUID, sha256: str, start: int, end: int) -> AsyncIterator[bytes]:
        """The same for a download; at most a few pieces are in memory. Ends in an OSError when bytes are lacking."""
        ...

    def local(self, run: uuid.UUID, sha256: str, scratch: Path) -> Path:
        """A file with the blob's bytes, unchecked and never to be written: the store's own, or a copy in the folder
        `scratch` (made once, under the blob's name). Raises Missing.
        """
        ...

    def write(self, run: uuid.UUID, data: bytes) -> tuple[str, int]:
        """Stores bytes and returns their name and size; bytes that are here already cost nothing."""
        ...

    def write_file(self, run: uuid.UUID, source: Path) -> tuple[str, int]:
        """Stores a copy of a file and returns its name and size."""
        ...

    def remove(self, run: uuid.UUID, sha256: str) -> None:
        """Retention gives the space back. Harmless when it is gone."""
        ...

    def require_space(self, length: int) -> None:
        """Raises StorageFull early, before a client sends what can't be kept; does nothing where no limit is known."""
        ...

    # Resumable uploads through the control plane

    def upload_offset(self, run: uuid.UUID, upload: uuid.UUID) -> int:
        """How many bytes of an upload have arrived, durably enough to be confirmed."""
        ...

    def append(self, run: uuid.UUID, upload: uuid.UUID, offset: int, data: bytes | bytearray, limit: int) -> int:
        """Adds bytes at `offset` and returns the new offset.

        Two connections may feed one upload (the first one hangs, the client comes again): the store decides, the
        slower one is refused. Raises OffsetMismatch, Unacceptable `upload_too_long` (more than `limit` bytes).
        """
        ...

    def finish(self, run: uuid.UUID, upload: uuid.UUID, sha256: str, length: int) -> None:
        """Turns a whole upload into the blob. Bytes with another digest are thrown away: Unacceptable
        `digest_mismatch`. Harmless when it was done already.
        """
        ...

    def drop_upload(self, run: uuid.UUID, upload: uuid.UUID) -> None:
        """Gives the space of an upload back, parts included. Harmless when there is none."""
        ...

    # Straight from and to the store, past the control plane

    def presign_get(self, run: uuid.UUID, sha256: str, seconds: int) -> str | None:
        """An address that answers the blob's bytes (with Range) for a while; None when this store has none."""
        ...

    def presign_put_parts(
        self, run: uuid.UUID, upload: uuid.UUID, length: int, seconds: int
    ) -> tuple[Part, ...] | None:
        """The parts of an upload of `length` bytes that have not arrived yet; None when this store takes none.

        How the blob is cut depends on `length` alone, so that a client that comes again continues.
        """
        ...

    def finish_parts(self, run: uuid.UUID, upload: uuid.UUID, sha256: str, length: int) -> Sequence[int]:
        """Joins the parts, checks the digest of what is stored, and gives the blob its name.

        Returns the indices of parts that are missing or have another size (nothing was changed then); none when the
        blob is whole. Bytes with another digest are thrown away: Unacceptable `digest_mismatch`. Harmless when it was
        done already.
        """
        ...

    # Documents beside the blobs: small, under names that `registry.beside` makes

    def write_document(self, name: str, data: bytes) -> None:
        """Replaces a document: readers see the old one or the new one."""
        ...

    def read_document(self, name: str) -> bytes | None:
        """The document; None when there is none."""
        ...

    def remove_document(self, name: str) -> None:
        """Harmless when it is gone."""
        ...

    def documents(self, folder: str) -> frozenset[str]:
        """The names of the documents right below `folder`, which ends in a slash, without it."""
        ...


def store() -> BlobStore:
    """The store of this deployment."""
    return _store(settings.MAILBOAT_BLOB_URL, str(settings.MAILBOAT_BLOB_ROOT))


@lru_cache(maxsize=8)
def _store(url: str, root: str) -> BlobStore:
    if url:  # an object store, whose client is imported only where it is used
        remote: BlobStore = import_string("controlplane.registry.object_blobs.ObjectBlobs")(url)
        return remote
    from controlplane.registry.local_blobs import LocalBlobs

    return LocalBlobs(Path(root))


def key(run: uuid.UUID, sha256: str) -> str:
    """The blob's place below the root of any store. Raises Missing for what is no name."""
    if not NAME.fullmatch(sha256):
        raise Missing("A blob is named by 64 hex digits.")
    return f"runs/{run}/blobs/{sha256}"


def upload_key(run: uuid.UUID, upload: uuid.UUID) -> str:
    """Where the bytes of an upload gather."""
    return f"runs/{run}/uploads/{upload}"
