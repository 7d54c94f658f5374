"""Uploads of blobs, below Django: an ASGI application for `.../blobs/uploads/{id}`.

Django spools a whole body to a temporary file before a view runs, and throws it away when the connection breaks. Here
each megabyte goes straight to the upload's file as it arrives: memory stays flat, a broken connection loses nothing,
and the client continues at the offset that it is told. It must never answer before the bytes that it confirms are
written.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import structlog
from asgiref.sync import ThreadSensitiveContext
from rest_framework.exceptions import ValidationError

from controlplane.accounts.principals import PUBLISHERS
from controlplane.api import plain, problems
from controlplane.api.authentication import bearer, principal
from controlplane.api.permissions import require_role, run_for
from controlplane.audit import middleware
from controlplane.registry import blobs, selectors, services
from controlplane.registry.blobs import OffsetMismatch
from controlplane.registry.models import Upload

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

log = structlog.get_logger(__name__)

PATH = re.compile(r"/api/v1/projects/([-\w]{1,50})/runs/([-\w]{1,80})/blobs/uploads/([0-9a-f-]{36})", re.ASCII)
CHUNK = 1 << 20
DRAINED = 16 << 20  # bytes read and dropped before a refusal, so that the client sees the answer and not a broken pipe


@dataclass(frozen=True, slots=True)
class Target:
    """The upload that a request feeds, and the offset at which it wants to."""

    upload: Upload
    offset: int


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """PATCH adds bytes, HEAD tells the offset."""
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
    number = middleware.begin(headers.get("x-request-id", ""))
    body_of = _Body(receive)
    async with ThreadSensitiveContext():
        try:
            status, body, more = await _answer(scope, headers, body_of)
        except _Gone:
            return
        except Exception as error:  # noqa: BLE001  every error is answered, and logged when it is a fault
            status, body, more = _problem(error)
            await body_of.drain()
    content = b"" if body is None else json.dumps(body).encode()
    answer = {"content-length": str(len(content)), "x-request-id": number, **more}
    if body is not None:
        answer["content-type"] = problems.CONTENT_TYPE
    if scope["method"] == "HEAD":
        content = b""
    if status == 204:
        del answer["content-length"]
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": content})


Answer = tuple[int, dict[str, Any] | None, dict[str, str]]


class _Gone(Exception):  # noqa: N818
    """The client has left; nobody reads an answer."""


class _Body:
    """The body of a request, piece by piece; knows when there is no more to ask for."""

    def __init__(self, receive: Receive) -> None:
        self.receive = receive
        self.more = True
        self.gone = False

    async def piece(self) -> bytes:
        """The next piece; empty when the client has left."""
        message = await self.receive()
        self.gone = message["type"] == "http.disconnect"
        self.more = not self.gone and bool(message.get("more_body", False))
        return bytes(message.get("body", b""))

    async def drain(self) -> None:
        """Reads and drops a reasonable rest."""
        left = DRAINED
        while self.more and left > 0:
            left -= len(await self.piece())


async def _answer(scope: Scope, headers: dict[str, str], body: _Body) -> Answer:
    match = PATH.fullmatch(scope["path"])
    if match is None or scope["method"] not in {"PATCH", "HEAD"}:
        return (
            405,
            problems.document(405, "method_not_allowed", "An upload answers PATCH and HEAD."),
            {"allow": "PATCH, HEAD"},
        )
    target = await _find(match[1], match[2], match[3], headers, scope["method"] == "PATCH")
    offset = target.offset
    if scope["method"] == "PATCH":
        offset = await _receive_all(target, body)
    return 204, None, {"upload-offset": str(offset), "cache-control": "no-store"}


@plain.in_database
def _find(project: str, run: str, key: str, headers: dict[str, str], feeding: bool) -> Target:
    """The upload of a publisher's request, with the offset that the client names checked against the truth."""
    caller = principal(project, bearer(headers.get("authorization", "")), None)
    require_role(caller, PUBLISHERS)
    row = run_for(caller, run)
    try:
        upload = selectors.upload(row, uuid.UUID(key))
    except ValueError:
        upload = selectors.upload(row, None)
    truth = blobs.store().upload_offset(row.pk, upload.pk)
    if feeding:
        said = headers.get("upload-offset", "")
        if not said.isascii() or not said.isdecimal() or len(said) > 19:
            raise ValidationError({"Upload-Offset": "Send the byte at which this body begins as a whole number."})
        if int(said) != truth:
            raise OffsetMismatch(truth)
    return Target(upload, truth)


@plain.in_database
def _append(upload: Upload, offset: int, data: bytearray) -> int:
    return blobs.store().append(upload.run_id, upload.pk, offset, data, upload.size)


@plain.in_database
def _stop(upload: Upload, offset: int) -> None:
    """Records where the upload stands, and finishes it when it is whole."""
    if offset == upload.size:
        services.finish_upload(upload)
    else:
        Upload.objects.filter(pk=upload.pk).update(offset=offset)


async def _receive_all(target: Target, body: _Body) -> int:
    """Writes the body as it comes; whatever arrived stays, even when the client leaves in the middle."""
    upload, offset, buffer = target.upload, target.offset, bytearray()
    while body.more:
        buffer += await body.piece()
        if len(buffer) >= CHUNK or (buffer and not body.more):
            offset = await _append(upload, offset, buffer)
            buffer = bytearray()
    await _stop(upload, offset)
    if body.gone:
        raise _Gone
    return offset


def _problem(error: Exception) -> Answer:
    answer = problems.of(error)
    if answer is None:
        log.error("upload failed", exc_info=error)
        return 500, problems.document(500, "internal_error", "Something is wrong on the server; its log says what."), {}
    status, body, headers = answer
    more = {name.lower(): value for name, value in headers.items()}
    if isinstance(error, OffsetMismatch):
        more["upload-offset"] = str(error.offset)
    return status, body, more
