"""The sidecar's HTTP server: uvicorn in a thread of its own, beside the sync loop.

Stopping closes the door first and lets what runs end; it must never cut an answer while it may still end in time.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn
from starlette.applications import Starlette

from mailboat.errors import MailboatError

GRACE_SECONDS = 30


class ListenError(MailboatError):
    """The address can't be listened on."""

    code = "listen_failed"


@dataclass(frozen=True, slots=True)
class Address:
    """HOST:PORT; port 0 takes a free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Reads HOST:PORT. Raises ListenError."""
        host, _, port = text.rpartition(":")
        host = host.strip("[]")
        if not host or not port.isdigit() or int(port) > 65535:
            raise ListenError(f"{text!r} is no address to listen on; write HOST:PORT, for example 127.0.0.1:8200.")
        return cls(host, int(port))


class HttpServer:
    """Serves one application on one address until `stop`."""

    def __init__(
        self, name: str, address: Address, *, grace: int = GRACE_SECONDS, tls: tuple[str, str] | None = None
    ) -> None:
        if tls is not None:
            _require_usable(*tls)
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            self._socket = socket.create_server((address.host, address.port), family=family, backlog=2048)
        except OSError as error:
            raise ListenError(f"{address.host}:{address.port} can't be listened on: {error.strerror}.") from None
        self.port: int = self._socket.getsockname()[1]
        host = f"[{address.host}]" if family == socket.AF_INET6 else address.host
        self.url = f"{'http' if tls is None else 'https'}://{host}:{self.port}"
        self._tls = tls  # certificate and key, PEM files
        self._name = name
        self._grace = grace
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._started = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None

    def start(self, build: Callable[[Callable[[], None]], Starlette]) -> None:
        """Serves what ``build`` makes; it gets what to call once the event loop runs. Returns when it does."""

        def started() -> None:
            self.loop = asyncio.get_running_loop()
            self._started.set()

        certificate, key = self._tls or (None, None)
        config = uvicorn.Config(
            build(started), log_level="warning", access_log=False, lifespan="on", server_header=False,
            date_header=False, timeout_graceful_shutdown=self._grace, timeout_keep_alive=75, loop="auto", ws="none",
            ssl_certfile=certificate, ssl_keyfile=key,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()
        self._started.wait(30)
        if self.loop is None:
            raise ListenError(f"The {self._name} did not start; see the log above.")

    def _run(self) -> None:
        assert self._server is not None  # noqa: S101 - set by start
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """Takes no new connections, waits for what runs up to the grace period, ends."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(self._grace + 5)
        self._socket.close()


def _require_usable(certificate: str, key: str) -> None:
    """Raises ListenError unless two PEM files belong together, before anybody waits for a server that can't start."""
    try:
        # A key with a password would be asked for at the terminal; a service has none.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        raise ListenError(
            f"The certificate {certificate} and the key {key} can't be used ({error}); give two PEM files that belong "
            "together, the key without a password."
        ) from None
