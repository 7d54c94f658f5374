"""Every error that the library raises on purpose.

Each has a stable `code` (what the API sends and programs compare) and a text of one sentence that says what is wrong
and what to do about it.  Nothing here may import the rest of the library.
"""

# ruff: noqa: N818 - the names are those of the design and say what happened

from __future__ import annotations

from collections.abc import Sequence

_NAMES_SHOWN = 5


class MailboatError(Exception):
    """Base of all errors with a sentence for people; anything else that escapes is a defect."""

    code = "error"


class CheckpointError(MailboatError):
    """A checkpoint is damaged, incomplete or of a kind that can't be read or written."""

    code = "checkpoint_invalid"


class CheckpointChanged(CheckpointError):
    """A checkpoint's files changed while they were read."""

    code = "checkpoint_changed"


class InventoryMismatch(MailboatError):
    """Two inventories differ; `names` holds every tensor concerned, the text the first few."""

    code = "inventory_mismatch"

    def __init__(self, sentence: str, names: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        super().__init__(sentence)


class PatchError(MailboatError):
    """A patch file is damaged or hostile."""

    code = "patch_invalid"


class UnknownCodec(PatchError):
    """A patch needs a codec that this version of Mailboat doesn't know."""

    code = "unknown_codec"


class WrongBase(MailboatError):
    """A patch doesn't start from the state that is held."""

    code = "wrong_base"


class DigestMismatch(MailboatError):
    """Bytes don't have the digest that was promised."""

    code = "digest_mismatch"


class DamagedDownload(DigestMismatch):
    """A blob arrived with other bytes, twice: what is held has nothing to do with it."""


class ManifestError(MailboatError):
    """A manifest, head or envelope isn't well formed."""

    code = "manifest_invalid"


class DiskFull(MailboatError):
    """No space is left where something had to be written; nothing visible was changed."""

    code = "storage_full"


class StoreError(MailboatError):
    """An island's store or image is missing, damaged or in use."""

    code = "store_invalid"


class DeviceUnavailable(MailboatError):
    """The device that was asked for isn't there, or what it needs isn't installed."""

    code = "device_unavailable"


class Unreachable(MailboatError):
    """The control plane can't be reached; trying again later is right."""

    code = "unreachable"


class Misaddressed(Unreachable):
    """What answers is not the control plane, or can't be trusted: the address or the certificate has to be mended."""


class ApiError(MailboatError):
    """The control plane refused a request: HTTP `status`, stable `code`, and its sentence in `detail`. `retry_after`:
    the seconds that it asks to wait, or 0.
    """

    def __init__(self, status: int, code: str, detail: str, retry_after: float = 0.0) -> None:
        self.retry_after = retry_after
        self.status = status
        self.code = code
        self.detail = detail
        super().__init__(detail)


class Unauthorised(ApiError):
    """401 or 403: the token is missing, wrong, expired, revoked or of the wrong role."""


class NotFound(ApiError):
    """404: it doesn't exist, or this token may not see it."""


class Conflict(ApiError):
    """409: the request doesn't fit the present state."""


def listed(names: Sequence[str]) -> str:
    """Return the first five names and how many more there are, for a sentence."""
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
