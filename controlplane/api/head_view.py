"""The head of a channel, with a long poll that holds no database connection while it waits."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

from django.http import HttpRequest, HttpResponse
from rest_framework.exceptions import ValidationError

from controlplane.accounts.principals import FOLLOWERS
from controlplane.api import plain
from controlplane.api.authentication import principal_of
from controlplane.api.permissions import require_role, run_for
from controlplane.api.waiting import waiting
from controlplane.registry import heads, selectors

LONGEST_WAIT = 60
BIG = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Seen:
    """What one look at the database found."""

    key: str
    serial: int
    body: bytes | None

    @property
    def etag(self) -> str:
        """Strong: of the exact bytes."""
        return f'"{hashlib.sha256(self.body or b"").hexdigest()}"'


@plain.in_database
def look(request: HttpRequest, project: str, run: str, channel: str) -> Seen:
    """The caller is checked with every look, so that a credential revoked meanwhile ends the wait."""
    caller = principal_of(request, project)
    require_role(caller, FOLLOWERS)
    row = selectors.channel(run_for(caller, run), channel)
    body = None if row.head_envelope is None else heads.encoded(row.head_envelope)
    return Seen(f"{row.run_id}/{row.name}", row.serial, body)


@plain.view("GET", "HEAD")
async def head(request: HttpRequest, *, project: str, run: str, channel: str) -> HttpResponse:
    """The envelope; 304 when the ETag still matches, 204 when there is no head yet.

    With `after` (a serial) and `wait` (seconds), the answer waits until the channel has moved past that serial.
    """
    after, seconds = _number(request, "after", None, BIG), _number(request, "wait", 0, LONGEST_WAIT) or 0
    seen = await look(request, project, run, channel)
    if seconds and (seen.body is None or (after is not None and seen.serial <= after)):
        seen = await _wait(request, project, run, channel, seen, after or 0, seconds)
    if seen.body is None:
        return HttpResponse(status=204)
    headers = {"ETag": seen.etag, "Cache-Control": "private, no-cache"}
    if seen.etag in request.headers.get("If-None-Match", ""):
        return HttpResponse(status=304, headers=headers)
    return HttpResponse(seen.body, content_type="application/json", headers=headers)


async def _wait(  # noqa: PLR0917  the address of a head has three parts
    request: HttpRequest, project: str, run: str, channel: str, seen: Seen, after: int, seconds: int
) -> Seen:
    hub, deadline = waiting(), time.monotonic() + seconds
    with hub.subscribe(seen.key) as event:
        while True:
            seen = await look(request, project, run, channel)  # after subscribing: nothing falls between look and wait
            left = deadline - time.monotonic()
            if left <= 0 or (seen.body is not None and seen.serial > after):
                return seen
            await hub.wait(event, left)


def _number(request: HttpRequest, name: str, default: int | None, high: int) -> int | None:
    raw = request.GET.get(name, "")
    if not raw:
        return default
    if not raw.isascii() or not raw.isdecimal() or len(raw) > 19 or int(raw) > high:
        raise ValidationError({name: f"It must be a whole number from 0 to {high}."})
    return int(raw)
