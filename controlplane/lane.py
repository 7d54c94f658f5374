"""Django on a few threads: how the server answers whatever does not wait or stream.

Django's own way under ASGI gives each request a thread and, since connections belong to threads, a database connection
of its own, and crosses between thread and event loop once per middleware. With hundreds of islands that costs more
than the answers themselves. Here a request takes one thread of a fixed set once, runs the whole synchronous middleware
there, and finds the thread's connection open. Requests that find no thread free wait their turn on the event loop.
Looks at a head (`look`) have threads of their own: when a version is announced hundreds come at once, and must not
stand before others.

Nothing that waits for a client or an event may run here: it would hold a thread (see `api.head_view`, `api.uploads`).
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from django.core import signals
from django.core.exceptions import RequestAborted
from django.core.handlers.asgi import ASGIHandler, get_script_prefix
from django.core.handlers.base import BaseHandler
from django.db import close_old_connections, connections
from django.http import HttpResponseBase, StreamingHttpResponse
from django.urls import set_script_prefix

P = ParamSpec("P")
T = TypeVar("T")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

THREADS = 10  # and as many connections; the interpreter runs one of them at a time
LOOKERS = 1
# How long a thread may compute while another waits for the interpreter. A request waits for the database half a dozen
# times, and at Python's 5 ms it would stand behind every busy thread each time.
SWITCH_SECONDS = 0.0005
KEEP_SECONDS = 300  # then a connection is made anew, so that a server process of PostgreSQL does not grow for ever


class Lane(ASGIHandler):
    """Django's handler with synchronous middleware, on threads of its own."""

    def __init__(self) -> None:
        BaseHandler.__init__(self)
        self.load_middleware(is_async=False)
        self._executors: dict[int, ThreadPoolExecutor] = {}
        sys.setswitchinterval(SWITCH_SECONDS)
        self._connections: list[Any] = []

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a synchronous function on one of the threads, with the caller's logging context. Its connection is
        checked first: one that broke or grew old is replaced."""
        return await self._call(THREADS, functools.partial(function, *args, **kwargs))

    async def look(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same on the few threads that stand apart."""
        return await self._call(LOOKERS, functools.partial(function, *args, **kwargs))

    async def _call(self, size: int, call: Callable[[], T]) -> T:
        executor = self._executors.get(size)
        if executor is None:
            executor = self._executors[size] = ThreadPoolExecutor(size, f"django{size}", initializer=self._prepare)
        call = functools.partial(contextvars.copy_context().run, call)
        return await asyncio.get_running_loop().run_in_executor(executor, _with_connection, call)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reads the body, answers on a thread, sends the answer."""
        try:
            body = await self.read_body(receive)
        except RequestAborted:
            return
        try:
            response = await self.run(self._respond, scope, body)
            if response.streaming and not response.is_async:  # type: ignore[attr-defined]
                self._stream(response)  # type: ignore[arg-type]
            try:
                await self.send_response(response, send)  # type: ignore[arg-type]
            finally:
                await self.run(response.close)
        finally:
            body.close()

    def close(self) -> None:
        """Ends the threads and their connections; a later request starts new ones."""
        while self._executors:
            self._executors.popitem()[1].shutdown()
        while self._connections:
            self._connections.pop().close()

    def _respond(self, scope: Scope, body: Any) -> HttpResponseBase:
        set_script_prefix(get_script_prefix(scope))
        signals.request_started.send(sender=type(self), scope=scope)
        request, refusal = self.create_request(scope, body)
        if request is None:
            assert refusal is not None  # noqa: S101  one of the two
            return refusal
        response = self.get_response(request)
        response._handler_class = type(self)  # type: ignore[attr-defined]  # the sender of request_finished
        return response

    def _stream(self, response: StreamingHttpResponse) -> None:
        """The pieces of a synchronous iterator, each made on a thread when the client has taken the one before."""
        pieces: Iterator[bytes] = iter(response.streaming_content)  # type: ignore[arg-type]

        async def hop() -> AsyncIterator[bytes]:
            while (piece := await self.run(next, pieces, None)) is not None:
                yield piece

        response.streaming_content = hop()

    def _prepare(self) -> None:
        connection = connections["default"]
        connection.settings_dict = {
            **connection.settings_dict, "CONN_MAX_AGE": KEEP_SECONDS, "CONN_HEALTH_CHECKS": True,
        }  # fmt: skip
        connection.inc_thread_sharing()  # so that `close` may end it
        self._connections.append(connection)


def _with_connection(call: Callable[[], T]) -> T:
    close_old_connections()
    try:
        return call()
    finally:
        close_old_connections()


@functools.cache
def lane() -> Lane:
    """The one of this process."""
    return Lane()
