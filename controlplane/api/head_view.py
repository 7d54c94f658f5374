"""The head of a channel, with a long poll that holds neither a thread nor a database connection while it waits.

Islands, which send a bearer token, are answered below Django (`application`): hundreds of them wait at once. People
with a session get the same answers through Django (`head`).
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from django.http import HttpRequest, HttpResponse, HttpResponseBase, HttpResponseNotAllowed, JsonResponse, QueryDict
from rest_framework.exceptions import ValidationError

from controlplane.accounts import principals
from controlplane.accounts.principals import FOLLOWERS, Principal, Stamp
from controlplane.api import plain, problems
from controlplane.api.authentication import bearer, principal, principal_of
from controlplane.api.permissions import channel_for, require_role, run_for
from controlplane.api.waiting import waiting
from controlplane.audit import middleware
from controlplane.lane import Receive, Scope, Send, lane
from controlplane.registry import heads
from controlplane.registry.models import Channel

PATH = re.compile(r"/api/v1/projects/([-\w]{1,50})/runs/([-\w]{1,80})/channels/([-\w]{1,40})/head", re.ASCII)
LONGEST_WAIT = 60
BIG = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Seen:
    """What one look at the database found."""

    key: str
    serial: int
    body: bytes | None
    caller: Stamp | None = None  # what the decision to answer rested on; None: nobody who sent a token

    @property
    def etag(self) -> str:
        """Strong: of the exact bytes."""
        return f'"{hashlib.sha256(self.body or b"").hexdigest()}"'


Look = Callable[[], Awaitable[Seen]]


def below(scope: Scope) -> bool:
    """Whether `application` answers this request."""
    return bool(PATH.fullmatch(scope["path"])) and any(name == b"authorization" for name, _ in scope["headers"])


async def application(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001  a head takes no body
    """The head for whoever sends a token."""
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
    number = middleware.begin(headers.get("x-request-id", ""))
    match = PATH.fullmatch(scope["path"])
    if match is None:
        raise ValueError("the caller asks `below` first")
    address, authorization = match.groups(), headers.get("authorization", "")

    async def look() -> Seen:
        return await lane().look(_look_with_token, authorization, *address)

    try:
        response = await _answer(scope["method"], QueryDict(scope["query_string"]), headers, look)
    except asyncio.CancelledError:  # the server ends, and does not wait for those who wait
        body = problems.document(503, "unavailable", "The server restarts; ask again.")
        response = JsonResponse(body, status=503, content_type=problems.CONTENT_TYPE, headers={"Retry-After": "1"})
    response.headers[middleware.HEADER] = number
    await lane().send_response(response, send)  # type: ignore[arg-type]


async def head(request: HttpRequest, *, project: str, run: str, channel: str) -> HttpResponseBase:
    """The head for whoever has a session."""

    @plain.in_database
    def look() -> Seen:
        return _look(principal_of(request, project), run, channel)

    headers = {name.lower(): value for name, value in request.headers.items()}
    return await _answer(str(request.method), request.GET, headers, look)


async def _answer(method: str, query: QueryDict, headers: Mapping[str, str], look: Look) -> HttpResponseBase:
    if method not in {"GET", "HEAD"}:
        return HttpResponseNotAllowed(["GET", "HEAD"])
    try:
        return await _head(query, headers.get("if-none-match", ""), look)
    except Exception as error:
        answer = problems.response(error)
        if answer is None:
            raise
        return answer


async def _head(query: QueryDict, known: str, look: Look) -> HttpResponse:
    """The envelope; 304 when the ETag still matches, 204 when there is no head yet.

    With `after` (a serial) and `wait` (seconds), the answer waits until the channel has moved past that serial.
    """
    after, seconds = _number(query, "after", None, BIG), _number(query, "wait", 0, LONGEST_WAIT) or 0
    if seconds:
        waiting().begin()
    wakes = waiting().wakes
    seen = await look()
    if seconds and (seen.body is None or (after is not None and seen.serial <= after)):
        seen = await _wait(seen, wakes, look, after or 0, seconds)
    if seen.body is None:
        return HttpResponse(status=204)
    headers = {"ETag": seen.etag, "Cache-Control": "private, no-cache"}
    if seen.etag in known:
        return HttpResponse(status=304, headers=headers)
    headers["Content-Length"] = str(len(seen.body))
    return HttpResponse(seen.body, content_type="application/json", headers=headers)


async def _wait(seen: Seen, wakes: int, look: Look, after: int, seconds: int) -> Seen:
    """Until the head has moved past `after`; `wakes` is how often the hub had been woken when `seen` was looked up."""
    hub, deadline = waiting(), time.monotonic() + seconds
    with hub.subscribe(seen.key, None if seen.caller is None else seen.caller[0]) as event:
        if hub.wakes != wakes:  # it may have moved between the look and the subscription
            event.set()
        while (left := deadline - time.monotonic()) > 0:
            woken = await hub.wait(event, left)
            seen = await _again(seen, look) if woken else await look()
            if seen.body is not None and seen.serial > after:
                break
    return seen


async def _again(seen: Seen, look: Look) -> Seen:
    """Looks again after a wake-up. Hundreds are woken at once: one look serves all about whom nothing has changed."""
    if seen.caller is None:
        return await look()
    found = await waiting().together(seen.key, lambda tokens: lane().look(_look_for_all, seen.key, tokens))
    head: Seen = found[0]
    return replace(head, caller=seen.caller) if seen.caller in found[1] else await look()


def _look_for_all(key: str, tokens: list[int]) -> tuple[Seen, frozenset[Stamp]]:
    """The head, and what a decision about these tokens rests on now, of those that still open anything."""
    run, _, name = key.partition("/")
    row = Channel.objects.get(run=uuid.UUID(run), name=name)
    return _seen(row), principals.stamps(tokens)


def _look_with_token(authorization: str, project: str, run: str, channel: str) -> Seen:
    token = bearer(authorization)
    caller = principal(project, token, None)
    seen = _look(caller, run, channel)
    return seen if token is None else replace(seen, caller=principals.stamp(token, caller.island))


def _look(caller: Principal, run: str, channel: str) -> Seen:
    """The caller is found again with every look, so that a credential revoked meanwhile ends the wait."""
    require_role(caller, FOLLOWERS)
    return _seen(channel_for(caller, run_for(caller, run), channel))


def _seen(row: Channel) -> Seen:
    body = None if row.head_envelope is None else heads.encoded(row.head_envelope)
    return Seen(f"{row.run_id}/{row.name}", row.serial, body)


def _number(query: QueryDict, name: str, default: int | None, high: int) -> int | None:
    raw = query.get(name, "")
    if not raw:
        return default
    if not raw.isascii() or not raw.isdecimal() or len(raw) > 19 or int(raw) > high:
        raise ValidationError({name: f"It must be a whole number from 0 to {high}."})
    return int(raw)
