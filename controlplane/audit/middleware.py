"""Gives every request a number that its log lines, audit entries and answer share."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable

import structlog
from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.http import HttpRequest, HttpResponseBase

HEADER = "X-Request-ID"
_ACCEPTABLE = re.compile(r"[A-Za-z0-9._-]{8,64}")


def begin(offered: str) -> str:
    """Starts the logging context of one request; a sensible number that the caller offers is kept."""
    number = offered if _ACCEPTABLE.fullmatch(offered) else uuid.uuid4().hex
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(request_id=number)
    return number


def current() -> str:
    """The number of the request or job that is being worked on; empty outside one."""
    return str(structlog.contextvars.get_contextvars().get("request_id", ""))


def request_id(get_response: Callable[[HttpRequest], HttpResponseBase]) -> Callable[[HttpRequest], HttpResponseBase]:
    """Django middleware for synchronous and asynchronous views alike."""
    if iscoroutinefunction(get_response):

        async def asynchronous(request: HttpRequest) -> HttpResponseBase:
            number = begin(request.headers.get(HEADER, ""))
            response: HttpResponseBase = await get_response(request)
            response.headers[HEADER] = number
            return response

        return markcoroutinefunction(asynchronous)  # type: ignore[return-value]

    def synchronous(request: HttpRequest) -> HttpResponseBase:
        number = begin(request.headers.get(HEADER, ""))
        response = get_response(request)
        response.headers[HEADER] = number
        return response

    return synchronous


request_id.sync_capable = True  # type: ignore[attr-defined]
request_id.async_capable = True  # type: ignore[attr-defined]
