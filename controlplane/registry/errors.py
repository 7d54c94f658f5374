"""Refusals of the control plane. Each has a stable `code`, an HTTP status and one sentence that says what to do."""

from __future__ import annotations

from typing import Any


class Refusal(Exception):  # noqa: N818  a refusal is an answer, not a fault
    """A request that is understood and not done. `extra` goes into the problem document beside the sentence."""

    status = 409
    code = "conflict"

    def __init__(self, detail: str, *, code: str = "", status: int = 0, **extra: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.code = code or type(self).code
        self.status = status or type(self).status
        self.extra = extra
        self.headers: dict[str, str] = {}


class Missing(Refusal):
    """There is no such thing, or it is not the caller's to see."""

    status = 404
    code = "not_found"


class Unacceptable(Refusal):
    """The content of the request can't be accepted."""

    status = 422
    code = "invalid"


class StorageFull(Refusal):
    """The disk of the blob store is full; what was stored before is unharmed."""

    status = 507
    code = "storage_full"


class StorageUnavailable(Refusal):
    """The blob store can't be reached now; nothing was changed."""

    status = 503
    code = "storage_unavailable"


class Changed(Refusal):
    """The row is not what the caller saw any more. Nothing was changed."""

    status = 412
    code = "precondition_failed"

    def __init__(self) -> None:
        super().__init__("It was changed meanwhile, and nothing was overwritten; read it again and decide anew.")


class WrongState(Refusal):
    """A transition found its row in another state, or owned by somebody else. Nothing was changed."""

    status = 409
    code = "wrong_state"
