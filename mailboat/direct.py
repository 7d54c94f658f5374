"""Straight to and from the object store, past the control plane, at addresses that it hands out for an hour.

What arrives is verified by `mailboat.transfer` like everything else; this module only moves bytes. The control plane's
token never goes to such an address, the address (which carries a credential of its own) never into an error's text,
and with a control plane behind TLS only addresses behind TLS are taken. Whatever goes wrong here is an Unreachable:
the control plane is always the other way.
"""

from __future__ import annotations

import os
import ssl
import time
import urllib.request
from typing import Any, Protocol
from urllib.parse import urlsplit

import urllib3
from urllib3.exceptions import HTTPError
from urllib3.response import BaseHTTPResponse

from mailboat.errors import MailboatError, Unreachable
from mailboat.replies import Part

REST_SECONDS = 600.0  # after a failure everything goes through the control plane for a while
AZURE = ".blob.core.windows.net"


class Source(Protocol):
    """Bytes to send, read piece by piece."""

    def read(self, count: int = -1, /) -> bytes:
        """The next bytes, at most ``count``; empty at the end."""
        ...


class Direct:
    """The way past one control plane. Safe to use from several threads."""

    def __init__(self, server_scheme: str, ca_file: str | os.PathLike[str] | None, timeout: float) -> None:
        self._schemes = {"https"} if server_scheme == "https" else {"http", "https"}
        self._ca_file = ca_file
        self._timeout = urllib3.Timeout(connect=min(10.0, timeout), read=timeout)
        self._pools: dict[tuple[str, bool], urllib3.PoolManager] = {}
        self._rests_until = 0.0

    @property
    def usable(self) -> bool:
        """Whether it is worth a try."""
        return time.monotonic() >= self._rests_until

    def failed(self) -> None:
        """Goes through the control plane for a while."""
        self._rests_until = time.monotonic() + REST_SECONDS

    def close(self) -> None:
        """Closes idle connections."""
        for pool in list(self._pools.values()):
            pool.clear()

    def put(self, part: Part, source: Source) -> None:
        """Sends one part of an upload, whole. Raises Unreachable."""
        headers = {"Content-Length": str(part.size)}
        if (urlsplit(part.url).hostname or "").endswith(AZURE):
            headers["x-ms-blob-type"] = "BlockBlob"
        response = self._request("PUT", part.url, headers, source, accept=range(200, 300))
        response.drain_conn()
        response.release_conn()

    def get(self, url: str, start: int) -> BaseHTTPResponse:
        """Opens a blob from byte ``start``; the status is 200, 206 or 416. Raises Unreachable."""
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
        return self._request("GET", url, headers, None, accept=(200, 206, 416))

    def _request(
        self, method: str, url: str, headers: dict[str, str], body: Any, accept: range | tuple[int, ...]
    ) -> BaseHTTPResponse:
        try:
            response = self._pool(url).request(
                method, url, body=body, headers=headers, timeout=self._timeout, retries=False, redirect=False,
                preload_content=False,
            )  # fmt: skip
        except (HTTPError, OSError, ValueError) as error:
            self.failed()
            raise Unreachable(f"The blob store can't be reached ({type(error).__name__}).") from None
        if response.status in accept:
            return response
        response.close()
        self.failed()
        raise Unreachable(f"The blob store answered {response.status}.")

    def _pool(self, url: str) -> urllib3.PoolManager:
        address = urlsplit(url)
        if address.scheme not in self._schemes or not address.hostname:
            raise ValueError("no address to use")
        proxy = urllib.request.getproxies().get(address.scheme)
        proxied = bool(proxy) and not urllib.request.proxy_bypass(address.hostname)
        key = (address.scheme, proxied)
        if key not in self._pools:
            options: dict[str, Any] = {"maxsize": 4, "block": False, "ssl_context": _trust(self._ca_file)}
            self._pools[key] = (
                urllib3.ProxyManager(str(proxy), **options) if proxied else urllib3.PoolManager(**options)
            )
        return self._pools[key]


def _trust(ca_file: str | os.PathLike[str] | None) -> ssl.SSLContext:
    """The system's authorities, and the one of the control plane: the store may stand behind either."""
    context = ssl.create_default_context()
    if ca_file is not None:
        try:
            context.load_verify_locations(cafile=os.fspath(ca_file))
        except (OSError, ssl.SSLError) as error:
            raise MailboatError(f"The CA file {os.fspath(ca_file)!r} can't be used ({error}).") from error
    return context
