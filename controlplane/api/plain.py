"""What the plain asynchronous views share: database work on the request's thread, and refusals as problem documents."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

from asgiref.sync import sync_to_async
from django.db import connections
from django.http import HttpRequest, HttpResponseBase, HttpResponseNotAllowed

from controlplane.api import problems

P = ParamSpec("P")
T = TypeVar("T")
View = Callable[..., Any]  # the stubs know only synchronous views


def release() -> None:
    """Closes this thread's connections, except inside a transaction (that of a test)."""
    for connection in connections.all(initialized_only=True):
        if not connection.in_atomic_block:
            connection.close()


def in_database(function: Callable[P, T]) -> Callable[P, Awaitable[T]]:
    """Runs a synchronous function on the request's thread and gives its connection back at once, not when the request
    ends.
    """

    @functools.wraps(function)
    def released(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        finally:
            release()

    return sync_to_async(released)


def view(*methods: str) -> Callable[[View], View]:
    """An asynchronous view for these methods whose refusals are answered with problem documents."""

    def decorate(inner: View) -> View:
        @functools.wraps(inner)
        async def outer(request: HttpRequest, **kwargs: Any) -> HttpResponseBase:
            if request.method not in methods:
                return HttpResponseNotAllowed(methods)
            try:
                response: HttpResponseBase = await inner(request, **kwargs)
                return response
            except Exception as error:
                answer = problems.response(error)
                if answer is None:
                    raise
                return answer

        return outer

    return decorate
