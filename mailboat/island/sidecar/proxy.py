"""Forwards requests to the engines, streaming in both directions, and stamps what comes back.

Back-pressure is the sockets': nothing is read from one side before the other took what came before. A client that goes
away takes its generation with it. A request is sent again only when an engine never got it, or once when a connection
that had served another request before died without a byte of an answer: engines close theirs after an error, and
whoever comes next must not suffer for it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from types import SimpleNamespace

import aiohttp
from multidict import CIMultiDict
from starlette.types import Receive, Scope, Send
from yarl import URL

from mailboat.island.sidecar.bodies import Bodies, ClientGone
from mailboat.island.sidecar.gate import Gate, Ticket
from mailboat.island.sidecar.requests import JsonRequest
from mailboat.island.sidecar.routes import KEYS, ROUTES, Cache, Kind, kind
from mailboat.island.sidecar.stamps import EventStamps, stamped
from mailboat.island.sidecar.types import BadConstraint, Blocked, Constraint, Keyless, Malformed, Refusal, Unavailable
from mailboat.island.sidecar.upstreams import Upstream, Upstreams

LARGEST_ANSWER = 64 << 20  # bytes held in memory to stamp them
# Named by RFC 9110, or ours: never passed on.
_HOP = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer", b"upgrade",
        b"transfer-encoding", b"host", b"content-length", b"expect",
        b"mailboat-min-version", b"mailboat-exact-version",
    }
)  # fmt: skip
_NOT_BACK = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"trailer", b"upgrade"})

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Forward:
    """What is sent to an engine."""

    method: str
    path: str  # raw, with its query
    headers: CIMultiDict[str]
    body: Callable[[], bytes | AsyncIterator[bytes] | None]
    repeatable: bool
    keyed: str = ""  # the route, where only some builds of an engine take a key of the prefix cache


@dataclass(slots=True)
class _Journey:
    """How a request goes out and how far it came: over a used connection, up to the head of its answer."""

    session: aiohttp.ClientSession | None
    reused: bool = False
    answered: bool = False


class Proxy:
    """The forwarding half of the sidecar. ``salted`` is the kind of engine whose prefix cache outlives commits, or None
    where none does.
    """

    def __init__(
        self,
        gate: Gate,
        upstreams: Upstreams,
        *,
        salted: str | None,
        failed: Callable[[Upstream, str], None] = lambda _upstream, _why: None,
        bodies: Bodies | None = None,
    ) -> None:
        self.gate = gate
        self.upstreams = upstreams
        self._salted = salted
        self._failed = failed
        self._bodies = bodies or Bodies()
        self._pooled: aiohttp.ClientSession | None = None
        self._single: aiohttp.ClientSession | None = None  # a connection of its own for each request

    async def start(self) -> None:
        """Opens the clients, inside the event loop that they will run in."""
        # Kept shorter than the engines' five seconds, so as not to write into a closing connection.
        self._pooled = _session(aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0))
        self._single = _session(aiohttp.TCPConnector(limit=0, force_close=True))

    async def close(self) -> None:
        """Closes all connections to engines."""
        for session in (self._pooled, self._single):
            if session is not None:
                await session.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, as an ASGI application."""
        exchange = Exchange(send)
        try:
            await self._treat(scope, receive, exchange)
        except Refusal as refusal:
            await self._refuse(exchange, refusal)
        except BadConstraint as bad:
            await self._refuse(exchange, Malformed(str(bad)))
        except ClientGone:
            return

    async def _refuse(self, exchange: Exchange, refusal: Refusal) -> None:
        if not exchange.started:
            self.gate.counts.reject(refusal.reason)
            await exchange.refuse(refusal)

    # -- kinds of requests

    async def _treat(self, scope: Scope, receive: Receive, exchange: Exchange) -> None:
        method, path = scope["method"], scope["path"]
        if (_header(scope, b"upgrade") or "").lower() == "websocket":
            raise Blocked("WebSockets are not passed on: their answers could not say which version made them.")
        treatment = kind(method, path, scope.get("raw_path") or b"")
        if treatment is Kind.BLOCKED:
            raise Blocked(f"{method} {path[:100]} is not open to clients of this island.")
        if treatment is Kind.OPEN:
            forward, watch = _streamed(scope, receive)
            await self._guarded(watch, lambda: self._send_on(exchange, forward, None))
            return
        cache = ROUTES[path].cache(self._salted)
        if cache is Cache.KEYLESS:
            raise Keyless(path)
        if treatment is Kind.UPLOAD:
            forward, watch = _streamed(scope, receive)
            await self._admitted(exchange, _header_constraint(scope), watch, lambda _ticket: forward)
        else:
            await self._whole(scope, receive, exchange, cache)

    async def _whole(self, scope: Scope, receive: Receive, exchange: Exchange, cache: Cache) -> None:
        """A request that is read before it is sent on."""
        path = scope["path"]
        stamps = exchange.stamps = ROUTES[path].kind is Kind.VERSIONED
        key = None if cache is Cache.UNUSED else KEYS[self._salted or ""]
        read = JsonRequest.versioned if stamps else JsonRequest.unversioned
        async with self._bodies.whole(receive) as raw:
            request = read(raw, _header_constraint(scope))

            def forward(ticket: Ticket) -> Forward:
                body = request.for_engine(ticket.start, key)
                headers = _passed_on(scope, plain=stamps)
                keyed = path if cache is Cache.DECLARED else ""
                return Forward("POST", _target(scope), headers, lambda: body, repeatable=True, keyed=keyed)

            await self._admitted(exchange, request.constraint, lambda: _gone(receive), forward)

    async def _admitted(
        self,
        exchange: Exchange,
        constraint: Constraint,
        watch: Callable[[], Awaitable[None]],
        forward: Callable[[Ticket], Forward],
    ) -> None:
        async def work() -> None:
            ticket = await self.gate.admit(constraint)
            try:
                ticket.cut = _canceller()
                await self._send_on(exchange, forward(ticket), ticket)
            except asyncio.CancelledError:
                if ticket.cut_reason:
                    raise Unavailable(ticket.cut_reason) from None
                raise
            finally:
                self.gate.leave(ticket)

        await self._guarded(watch, work)

    async def _guarded(self, watch: Callable[[], Awaitable[None]], work: Callable[[], Awaitable[None]]) -> None:
        """Works until done or until the client is gone, whichever comes first."""
        working, watching = asyncio.ensure_future(work()), asyncio.ensure_future(watch())
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientGone
            await working
        finally:
            for task in (working, watching):
                task.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    # -- the way there and back

    async def _send_on(self, exchange: Exchange, forward: Forward, ticket: Ticket | None) -> None:
        tried: frozenset[Upstream] = frozenset()
        session = self._pooled if forward.repeatable else self._single
        while True:
            journey = _Journey(session)
            upstream = self.upstreams.choose(tried, keyed=forward.keyed)
            if ticket is not None:
                ticket.engine = upstream
            upstream.busy += 1
            try:
                await self._one_engine(journey, upstream, exchange, forward, ticket)
                return
            except aiohttp.ClientConnectorError as error:
                self._failed(upstream, f"The engine at {upstream.url} can't be reached.")
                tried |= {upstream}
                if not forward.repeatable or len(tried) == len(self.upstreams.members):
                    raise Unavailable("The engine can't be reached; try again.") from error
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                if forward.repeatable and journey.reused and not journey.answered:
                    session = self._single  # which is never reused: this happens once
                    continue
                self._failed(upstream, f"The engine at {upstream.url} broke a connection off.")
                raise Unavailable("The engine broke the connection off; send the request again.") from error
            finally:
                upstream.busy -= 1

    async def _one_engine(
        self, journey: _Journey, upstream: Upstream, exchange: Exchange, forward: Forward, ticket: Ticket | None
    ) -> None:
        assert journey.session is not None  # noqa: S101 - started with the server
        url = URL(upstream.url + forward.path, encoded=True)
        async with journey.session.request(
            forward.method, url, headers=forward.headers, data=forward.body(), allow_redirects=False,
            trace_request_ctx=journey,
        ) as response:  # fmt: skip
            journey.answered = True
            try:
                await self._answer(exchange, response, ticket)
            except BaseException:
                response.close()  # not back into the pool: closing is what aborts the generation
                raise

    async def _answer(self, exchange: Exchange, response: aiohttp.ClientResponse, ticket: Ticket | None) -> None:
        headers: Headers = [(key.lower(), value) for key, value in response.raw_headers if key.lower() not in _NOT_BACK]
        length = response.headers.get("Content-Length")
        if ticket is None:
            await self._stream(exchange, response, headers, length, None)
            return
        headers.append((b"mailboat-version-start", b"%d" % ticket.start.version))
        plain = response.headers.get("Content-Encoding", "identity") == "identity"
        content_type = response.content_type
        if content_type == "text/event-stream":
            stamps = EventStamps(ticket.start.version, self._version) if exchange.stamps and plain else None
            await self._stream(exchange, response, headers, None if stamps else length, stamps)
        elif exchange.stamps and (length is None or int(length) <= LARGEST_ANSWER):
            body = await _read(response)
            if body is None:
                raise Unavailable("The engine's answer is too large to be stamped.")
            end = self._version()
            headers.append((b"mailboat-version-end", b"%d" % end))
            if plain and content_type == "application/json" and response.status < 400:
                body = stamped(body, ticket.start.version, end)
            headers.append((b"content-length", b"%d" % len(body)))
            await exchange.start(response.status, headers)
            await exchange.body(body, more=False)
        else:
            await self._stream(exchange, response, headers, length, None)

    async def _stream(
        self,
        exchange: Exchange,
        response: aiohttp.ClientResponse,
        headers: Headers,
        length: str | None,
        stamps: EventStamps | None,
    ) -> None:
        if length is not None:
            headers.append((b"content-length", length.encode()))
        await exchange.start(response.status, headers)
        async for piece in response.content.iter_any():
            out = piece if stamps is None else stamps.feed(piece)
            if out:
                await exchange.body(out, more=True)
        await exchange.body(stamps.end() if stamps else b"", more=False)

    def _version(self) -> int:
        applied = self.gate.applied
        return -1 if applied is None else applied.version


class Exchange:
    """The answering side of one request."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self.stamps = False

    async def start(self, status: int, headers: Headers) -> None:
        """Sends status and headers."""
        self.started = True
        await self._say({"type": "http.response.start", "status": status, "headers": headers})

    async def body(self, data: bytes, *, more: bool) -> None:
        """Sends a piece of the body."""
        await self._say({"type": "http.response.body", "body": data, "more_body": more})

    async def refuse(self, refusal: Refusal) -> None:
        """Answers with a refusal. Where an answer had begun nothing more may come: the server breaks the connection
        off, so that nobody takes it for whole.
        """
        body = json.dumps(refusal.body()).encode()
        headers: Headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if refusal.retry_after is not None:
            headers.append((b"retry-after", b"%d" % refusal.retry_after))
        await self.start(refusal.status, headers)
        await self.body(body, more=False)

    async def _say(self, message: dict[str, object]) -> None:
        try:
            await self._send(message)
        except OSError as error:
            raise ClientGone from error


def _session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    async def note(_session: object, context: SimpleNamespace, _params: object) -> None:
        context.trace_request_ctx.reused = True

    tracing = aiohttp.TraceConfig()
    tracing.on_connection_reuseconn.append(note)
    return aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0), auto_decompress=False,
        skip_auto_headers={"User-Agent", "Accept"}, cookie_jar=aiohttp.DummyCookieJar(), read_bufsize=1 << 16,
        trace_configs=[tracing],
    )  # fmt: skip


def _canceller() -> Callable[[str], None]:
    task = asyncio.current_task()

    def cut(reason: str) -> None:
        if task is not None:
            task.cancel(reason)

    return cut


# -- reading and writing headers and bodies


def _header(scope: Scope, name: bytes) -> str | None:
    values = [value for key, value in scope["headers"] if key == name]
    if len(values) > 1:
        raise Malformed(f"The header {name.decode()} is given twice; send it once.")
    return values[0].decode("latin-1") if values else None


def _header_constraint(scope: Scope) -> Constraint:
    return Constraint.of_headers(_header(scope, b"mailboat-min-version"), _header(scope, b"mailboat-exact-version"))


def _target(scope: Scope) -> str:
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope.get("query_string") or b""
    return (raw.split(b"?", 1)[0] + (b"?" + query if query else b"")).decode("latin-1")


def _passed_on(scope: Scope, *, plain: bool) -> CIMultiDict[str]:
    named = {
        part.strip().lower() for key, value in scope["headers"] if key == b"connection" for part in value.split(b",")
    }
    headers: CIMultiDict[str] = CIMultiDict()
    for key, value in scope["headers"]:
        if key not in _HOP and key not in named and not (plain and key == b"accept-encoding"):
            headers.add(key.decode("latin-1"), value.decode("latin-1"))
    headers["Accept-Encoding"] = headers.get("Accept-Encoding", "identity")  # else the client library adds its own
    return headers


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _streamed(scope: Scope, receive: Receive) -> tuple[Forward, Callable[[], Awaitable[None]]]:
    """A request whose body is passed on as it comes, and how to wait for its client to go."""
    headers = _passed_on(scope, plain=False)
    length = _header(scope, b"content-length")
    chunked = _header(scope, b"transfer-encoding") is not None
    done = asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError("the client went away")
            if piece := message.get("body", b""):
                yield piece
            more = message.get("more_body", False)
        done.set()

    async def watch() -> None:
        await done.wait()
        await _gone(receive)

    has_body = chunked or (length or "0") != "0"
    if not has_body:
        done.set()
    elif length is not None:
        headers["Content-Length"] = length
    body = pieces if has_body else lambda: None
    forward = Forward(scope["method"], _target(scope), headers, body, repeatable=not has_body)
    return forward, watch


async def _read(response: aiohttp.ClientResponse) -> bytes | None:
    pieces, size = [], 0
    async for piece in response.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > LARGEST_ANSWER:
            return None
    return b"".join(pieces)
