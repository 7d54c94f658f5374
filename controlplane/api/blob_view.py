"""Downloads of blobs: ranges, strong ETags, immutable caching, and never more than a chunk of a file in memory."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse

from controlplane.accounts.principals import FOLLOWERS
from controlplane.api import plain
from controlplane.api.authentication import principal_of
from controlplane.api.permissions import require_role, run_for
from controlplane.registry import blobs, selectors
from controlplane.registry.errors import Refusal

CHUNK = 256 * 1024
_RANGE = re.compile(r"bytes=([0-9]{0,19})-([0-9]{0,19})")


@dataclass(frozen=True, slots=True)
class Found:
    """Where the bytes are."""

    path: Path
    size: int


@plain.in_database
def find(request: HttpRequest, project: str, run: str, sha256: str) -> Found:
    """A blob of a run that the caller may see. Raises Missing, Refusal `blob_damaged`."""
    caller = principal_of(request, project)
    require_role(caller, FOLLOWERS)
    row = selectors.blob(run_for(caller, run), sha256)
    if blobs.size(row.run_id, sha256) != row.size:
        raise Refusal(
            "The blob is damaged in the store; the publisher must upload it again.", code="blob_damaged", status=500
        )
    return Found(blobs.path(row.run_id, sha256), row.size)


@plain.view("GET", "HEAD")
async def blob(request: HttpRequest, *, project: str, run: str, sha256: str) -> HttpResponseBase:
    """The bytes of a blob, or the one range that is asked for."""
    found = await find(request, project, run, sha256)
    etag = f'"{sha256}"'
    headers = {"ETag": etag, "Accept-Ranges": "bytes", "Cache-Control": "private, max-age=31536000, immutable"}
    if etag in request.headers.get("If-None-Match", ""):
        return HttpResponse(status=304, headers=headers)
    asked = request.headers.get("Range", "") if request.headers.get("If-Range", etag) == etag else ""
    start, end, status = 0, found.size, 200
    if _is_range(asked):
        span = range_of(asked, found.size)
        if span is None:
            headers["Content-Range"] = f"bytes */{found.size}"
            return HttpResponse(status=416, headers=headers)
        start, end, status = *span, 206
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{found.size}"
    headers["Content-Length"] = str(end - start)
    if request.method == "HEAD" or start == end:
        return HttpResponse(status=status, headers=headers, content_type="application/octet-stream")
    body = stream(found.path, start, end)
    return StreamingHttpResponse(body, status=status, headers=headers, content_type="application/octet-stream")


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


async def stream(path: Path, start: int, end: int) -> AsyncIterator[bytes]:
    """The bytes of a file from `start` to `end`. A file that turns out shorter breaks the connection off."""
    handle = await asyncio.to_thread(os.open, path, os.O_RDONLY)
    try:
        while start < end:
            chunk = await asyncio.to_thread(os.pread, handle, min(CHUNK, end - start), start)
            if not chunk:
                raise OSError(f"{path.name} ended early")
            start += len(chunk)
            yield chunk
    finally:
        os.close(handle)
