"""Downloads of blobs: ranges, strong ETags, immutable caching, and never more than a chunk of a file in memory."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse

from controlplane.accounts import limits
from controlplane.accounts.principals import FOLLOWERS, ISLAND
from controlplane.api import plain
from controlplane.api.authentication import principal_of
from controlplane.api.permissions import require_role, run_for
from controlplane.registry import blobs, selectors
from controlplane.registry.errors import Missing, Refusal
from controlplane.registry.models import Version

DIRECT_SECONDS = 900
_RANGE = re.compile(r"bytes=([0-9]{0,19})-([0-9]{0,19})")


@dataclass(frozen=True, slots=True)
class Found:
    """Whose bytes they are, and how many."""

    run: uuid.UUID
    sha256: str
    size: int


@plain.in_database
def find(request: HttpRequest, project: str, run: str, sha256: str) -> Found:
    """A blob of a run that the caller may see. Raises Missing, Refusal `blob_damaged`."""
    caller = principal_of(request, project)
    require_role(caller, FOLLOWERS)
    if caller.role == ISLAND:
        limits.take(limits.PULL, f"{caller.project.pk} {caller.actor}")
    row = selectors.blob(run_for(caller, run), sha256)
    if blobs.store().size(row.run_id, sha256) != row.size:
        raise Refusal(
            "The blob is damaged in the store; the publisher must upload it again.", code="blob_damaged", status=500
        )
    return Found(row.run_id, sha256, row.size)


@plain.in_database
def find_statistics(request: HttpRequest, project: str, run: str, number: int) -> Found:
    """The per-tensor statistics of a version. Raises Missing."""
    caller = principal_of(request, project)
    require_role(caller, FOLLOWERS)
    version = selectors.version(run_for(caller, run), number)
    if version.statistics is None:
        if version.state == Version.State.RETIRED:
            raise Missing(f"Version {number} has no statistics any more: retention removed them with its patch.")
        raise Missing(f"Version {number} has no statistics: they are made of a patch, when it is validated.")
    return Found(version.run_id, version.statistics.sha256, version.statistics.size)


@plain.view("GET", "HEAD")
async def blob(request: HttpRequest, *, project: str, run: str, sha256: str) -> HttpResponseBase:
    """The bytes of a blob, or the one range that is asked for.

    With `direct=1`, where the blob store has addresses of its own: a redirect to one that is valid for a while.
    """
    found = await find(request, project, run, sha256)
    if request.GET.get("direct") == "1" and (address := await presigned(found)):
        return HttpResponse(status=307, headers={"Location": address, "Cache-Control": "no-store"})
    return _answer(request, found, "application/octet-stream", "immutable")


@plain.view("GET", "HEAD")
async def statistics(request: HttpRequest, *, project: str, run: str, number: int) -> HttpResponseBase:
    """Changes per tensor, columns in one blob: docs/format/statistics.md."""
    found = await find_statistics(request, project, run, number)
    return _answer(request, found, "application/vnd.mailboat.statistics", "must-revalidate")


@plain.in_database
def presigned(found: Found) -> str | None:
    """An address of the blob store's own, when it has such."""
    return blobs.store().presign_get(found.run, found.sha256, DIRECT_SECONDS)


def _answer(request: HttpRequest, found: Found, content_type: str, caching: str) -> HttpResponseBase:
    etag = f'"{found.sha256}"'
    headers = {"ETag": etag, "Accept-Ranges": "bytes", "Cache-Control": f"private, max-age=31536000, {caching}"}
    if etag in request.headers.get("If-None-Match", ""):
        return HttpResponse(status=304, headers=headers)
    asked = request.headers.get("Range", "") if request.headers.get("If-Range", etag) == etag else ""
    start, end, status = 0, found.size, 200
    if _is_range(asked):
        span = range_of(asked, found.size)
        if span is None:
            headers["Content-Range"] = f"bytes */{found.size}"
            return HttpResponse(status=416, headers=headers, content_type=content_type)
        start, end, status = *span, 206
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{found.size}"
    headers["Content-Length"] = str(end - start)
    if request.method == "HEAD" or start == end:
        return HttpResponse(status=status, headers=headers, content_type=content_type)
    body = blobs.store().stream(found.run, found.sha256, start, end)
    return StreamingHttpResponse(body, status=status, headers=headers, content_type=content_type)


def _is_range(header: str) -> bool:
    """Whether it is one range of bytes. Several, other units and malformed ones are ignored, as RFC 9110 allows."""
    match = _RANGE.fullmatch(header)
    return (
        match is not None
        and bool(match[1] or match[2])
        and not (match[1] and match[2] and int(match[2]) < int(match[1]))
    )


def range_of(header: str, size: int) -> tuple[int, int] | None:
    """First byte and end (exclusive) of one range; None when nothing of it is there."""
    match = _RANGE.fullmatch(header)
    if match is None:
        return 0, size
    if not match[1]:
        length = min(int(match[2]), size)
        return (size - length, size) if length else None
    start = int(match[1])
    end = min(int(match[2]) + 1, size) if match[2] else size
    return (start, end) if start < size else None
