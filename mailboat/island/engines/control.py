"""The control side of an engine's HTTP server: short JSON calls, each bounded in time.

It must never repeat a call by itself: whether a call may have been carried out is for the caller to judge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import urllib3
from urllib3.exceptions import HTTPError, TimeoutError

from mailboat.island.engines.engine import EngineError, EngineRefused, EngineUnreachable

QUICK = 5.0  # seconds for a call that only asks or flips a switch
LEASE = 600.0  # seconds that a call may work on weights before the engine is given up


class NoSuchRoute(EngineRefused):
    """The engine does not know the call: a feature that this build lacks."""


class Control:
    """Calls to one engine."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._pool = urllib3.PoolManager(maxsize=4, retries=False)

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

    def close(self) -> None:
        """Closes idle connections."""
        self._pool.clear()

    def _call(self, method: str, path: str, body: Any, seconds: float) -> bytes:
        timeout = urllib3.Timeout(connect=min(5.0, seconds), read=seconds)
        # A connection of its own for each call: after an error engines close theirs, and a call must not run into that.
        headers = {"Connection": "close"} | ({} if body is None else {"Content-Type": "application/json"})
        try:
            response = self._pool.request(
                method, self.url + path, body=None if body is None else json.dumps(body).encode(), timeout=timeout,
                headers=headers,
            )  # fmt: skip
            data = response.data
        except HTTPError as error:
            raise EngineUnreachable(
                f"The engine at {self.url} does not answer {path} ({type(error).__name__}); look at its log.",
                hung=isinstance(error, TimeoutError),
            ) from error
        if response.status in {404, 405}:
            raise NoSuchRoute(f"The engine at {self.url} has no {path}.")
        if response.status >= 500:
            raise EngineError(f"The engine at {self.url} failed in {path} ({response.status}): {_excerpt(data)}")
        if response.status >= 400:
            raise EngineRefused(f"The engine at {self.url} refused {path} ({response.status}): {_excerpt(data)}")
        return data


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data) if data else None
    except ValueError:
        return None


def _excerpt(data: bytes) -> str:
    return " ".join(data[:200].decode(errors="replace").split()) or "no reason given"
