"""The control side of an engine's HTTP server: short JSON calls, each bounded in time.

It must never repeat a call by itself: whether a call may have been carried out is for the caller to judge.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

from mailboat.island.engines.engine import EngineError, EngineRefused, EngineUnreachable

QUICK = 5.0  # seconds for a call that only asks or flips a switch
LEASE = 600.0  # seconds that a call may work on weights before the engine is given up
LARGEST = 64 << 20  # bytes of an answer; the longest, sums, take some 50 for each tensor on each rank


class NoSuchRoute(EngineRefused):
    """The engine does not know the call: a feature that this build lacks."""


class Control:
    """Calls to one engine."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._parts = urlsplit(self.url)
        self._under_way: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._abandoned = False

    def get(self, path: str, *, seconds: float = QUICK) -> Any:
        """A GET; the decoded JSON, or None for an empty or other body."""
        return _decoded(self._call("GET", path, None, seconds))

    def text(self, path: str, *, seconds: float = QUICK) -> str:
        """A GET whose answer is text."""
        return self._call("GET", path, None, seconds).decode(errors="replace")

    def post(
        self, path: str, body: Any = None, *, query: Mapping[str, str] | None = None, seconds: float = QUICK
    ) -> Any:
        """A POST with a JSON body."""
        return _decoded(self._call("POST", f"{path}?{urlencode(query)}" if query else path, body, seconds))

    def abandon(self) -> None:
        """Ends the calls under way and all later ones: EngineUnreachable, at once."""
        with self._lock:
            self._abandoned = True
            for sock in self._under_way:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)  # wakes the thread that reads from it, TLS or not

    def _call(self, method: str, path: str, body: Any, seconds: float) -> bytes:
        headers = {"Connection": "close"} | ({} if body is None else {"Content-Type": "application/json"})
        try:
            with self._connection(seconds) as connection:
                connection.request(method, path, None if body is None else json.dumps(body).encode(), headers)
                response = connection.getresponse()
                data = self._read(response, seconds)
        except (OSError, http.client.HTTPException, UnicodeError) as error:  # the last from names that are none
            if self._abandoned:
                raise EngineUnreachable(f"The engine at {self.url} is not waited for: the island stops.") from error
            raise EngineUnreachable(
                f"The engine at {self.url} does not answer {path} ({type(error).__name__}); look at its log.",
                hung=isinstance(error, TimeoutError),
            ) from error
        if response.status in {404, 405}:
            raise NoSuchRoute(f"The engine at {self.url} has no {path}.")
        if response.status >= 500:
            raise EngineError(f"The engine at {self.url} failed in {path} ({response.status}): {_excerpt(data)}")
        if response.status >= 300:  # also one that points elsewhere: nothing was done
            raise EngineRefused(f"The engine at {self.url} refused {path} ({response.status}): {_excerpt(data)}")
        return data

    def _read(self, response: http.client.HTTPResponse, seconds: float) -> bytes:
        """The body; one that does not end in time counts as one that does not come."""
        pieces, size, end = [], 0, time.monotonic() + seconds
        while piece := response.read1(1 << 16):
            pieces.append(piece)
            size += len(piece)
            if size > LARGEST:
                raise EngineError(f"The engine at {self.url} answers with more than {LARGEST >> 20} MiB.")
            if time.monotonic() > end:
                raise TimeoutError
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)
        return b"".join(pieces)

    @contextlib.contextmanager
    def _connection(self, seconds: float) -> Iterator[http.client.HTTPConnection]:
        """One of its own for each call: after an error engines close theirs, and a call must not run into that."""
        make = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        with contextlib.closing(make(self._parts.netloc, timeout=min(5.0, seconds))) as connection:
            connection.connect()
            sock = connection.sock
            sock.settimeout(seconds)
            with self._lock:
                if self._abandoned:
                    raise ConnectionAbortedError
                self._under_way.add(sock)
            try:
                yield connection
            finally:
                with self._lock:
                    self._under_way.discard(sock)


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data) if data else None
    except (ValueError, RecursionError):
        return None


def _excerpt(data: bytes) -> str:
    return " ".join(data[:200].decode(errors="replace").split()) or "no reason given"
