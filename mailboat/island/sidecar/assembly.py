"""Wires gate, proxy, engines and HTTP server together for one island, as its options say.

The parts know nothing of each other beyond their own page; only here they meet. An island without `--listen` gets the
engine alone and needs none of the sidecar's packages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from mailboat.errors import MailboatError
from mailboat.image import Image, Overlay
from mailboat.island.engines.checkpoint import CheckpointEngine
from mailboat.island.engines.engine import Server, Weights
from mailboat.island.members.roster import Alone, Members
from mailboat.island.sidecar.types import Applied, CommitMode, Limits, SyncView
from mailboat.island.stop import Stop

if TYPE_CHECKING:
    from mailboat.island.sidecar.gate import ThreadDoor
    from mailboat.island.sidecar.metrics import Metrics
    from mailboat.island.sidecar.served import Served
    from mailboat.island.sidecar.serving import HttpServer

Say = Callable[[str], None]
ENGINES = ("checkpoint", "local", "vllm", "sglang")


class EngineOptionsError(MailboatError):
    """Options of the engine that do not go together."""

    code = "engine_options"


@dataclass(frozen=True)
class EngineOptions:
    """Which engine, where, and how commits meet requests. ``listen`` is HOST:PORT; None: no sidecar."""

    engine: str = "checkpoint"
    urls: tuple[str, ...] = ()
    listen: str | None = None
    mode: CommitMode = CommitMode.IN_PLACE
    limits: Limits = field(default_factory=Limits)

    def check(self) -> None:
        """Raises EngineOptionsError."""
        if self.engine in {"vllm", "sglang"} and not self.urls:
            raise EngineOptionsError(
                f"--engine {self.engine} needs the engine's address: --engine-url http://127.0.0.1:8000"
            )
        if self.engine not in {"vllm", "sglang"} and self.urls:
            raise EngineOptionsError(f"--engine {self.engine} has no address of its own; leave --engine-url out.")
        addresses = [_address(url) for url in self.urls]
        for number, address in enumerate(addresses):
            if address in addresses[:number]:
                raise EngineOptionsError(f"--engine-url {self.urls[number]} is given twice; name each engine once.")
        if self.engine != "checkpoint" and self.listen is None:
            raise EngineOptionsError(
                f"--engine {self.engine} answers requests: say where, with --listen 127.0.0.1:8200"
            )


def _address(url: str) -> tuple[str, str, int]:
    """Scheme, host and port of an engine. Raises EngineOptionsError for whatever else an address may be."""
    example = "give scheme, host and port alone: --engine-url http://127.0.0.1:8000"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise EngineOptionsError(f"--engine-url {url!r} is no address ({error}); {example}") from None
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise EngineOptionsError(f"--engine-url {url!r} is no http address; {example}")
    if parts.username is not None:  # not shown: there may be a password
        raise EngineOptionsError(f"--engine-url has a user in it, which engines don't know; {example}")
    if parts.path not in {"", "/"} or parts.query or parts.fragment:
        raise EngineOptionsError(f"--engine-url {url!r} has more than an engine's address; {example}")
    return parts.scheme, parts.hostname, port or (80 if parts.scheme == "http" else 443)


class Sidecar:
    """What an island has beside its sync loop. Without ``listen`` only the engine."""

    def __init__(self, options: EngineOptions, *, stop: Stop, say: Say, members: Members | None = None) -> None:
        options.check()
        self.members: Members = members or Alone()
        self.engine: Weights = CheckpointEngine(self.members)
        self.wake = threading.Event()
        self.view: Callable[[], SyncView] | None = None
        self._door: ThreadDoor | None = None
        self._metrics: Metrics | None = None
        self._served: Served | None = None
        self._servers: list[HttpServer] = []
        self._closers: list[Callable[[], None]] = []
        if options.listen is not None:
            try:
                self._assemble(options, options.listen, stop, say)
            except ImportError as error:
                raise EngineOptionsError(
                    f"The sidecar needs more packages ({error.name}): pip install 'mailboat[sidecar]'"
                ) from None
            except BaseException:
                self.close()
                raise

    @property
    def url(self) -> str | None:
        """Where it listens."""
        return self._servers[0].url if self._servers else None

    @property
    def fence(self) -> str:
        """Why nothing is served; empty when something is or nothing is meant to be."""
        return self.engine.fence

    @property
    def active(self) -> int:
        """Requests under way."""
        return 0 if self._door is None else len(self._door.gate.active)

    def rest(self, reason: str | None) -> None:
        """Takes no new requests while an operator drains the island; None: takes them again."""
        if self._door is not None:
            self._door.gate.resting = reason

    def note_head(self, version: int) -> None:
        """The channel's version, for the skew."""
        if self._metrics is not None:
            self._metrics.head = version

    def note_bytes(self, count: int) -> None:
        """Bytes received."""
        if self._metrics is not None:
            self._metrics.bytes.inc(count)

    def close(self) -> None:
        """Lets running requests end, then stops everything. The engines are not watched meanwhile."""
        if self._served is not None:
            self._served.close()
        for server in self._servers:
            server.stop()
        for close in self._closers:
            close()

    def _assemble(self, options: EngineOptions, listen: str, stop: Stop, say: Say) -> None:
        from mailboat.island.sidecar.app import Parts, application
        from mailboat.island.sidecar.gate import Gate, ThreadDoor
        from mailboat.island.sidecar.metrics import Metrics
        from mailboat.island.sidecar.proxy import Proxy
        from mailboat.island.sidecar.served import Berth, Served
        from mailboat.island.sidecar.serving import Address, HttpServer
        from mailboat.island.sidecar.upstreams import Upstream, Upstreams

        def view() -> SyncView:
            return self.view() if self.view is not None else SyncView()

        http = HttpServer("sidecar", Address.parse(listen))
        self._servers.append(http)
        berths = [Berth(server, Upstream(server.url)) for server in self._engines(options, say)]
        upstreams = Upstreams([berth.upstream for berth in berths])
        gate = Gate(options.limits, wake=self.wake.set, why=lambda: view().reason or upstreams.told)
        metrics = self._metrics = Metrics(gate, upstreams)
        salted = options.engine if options.mode is CommitMode.IN_PLACE else None
        proxy = Proxy(gate, upstreams, salted=salted, failed=self._suspect)

        http.start(
            lambda started: application(
                Parts(gate, upstreams, proxy, metrics, options.mode, view, self.wake.set, started)
            )
        )
        assert http.loop is not None  # noqa: S101 - start waits for it
        door = self._door = ThreadDoor(gate, http.loop)
        say(f"sidecar listens on {http.url}, in front of {', '.join(options.urls) or options.engine}")
        if berths:
            served = self._served = Served(
                berths, door, metrics, mode=options.mode, say=say, stop=stop, members=self.members
            )
            self.engine = served
            served.start()
        else:
            self.engine = _Announced(door, self.members)

    def _engines(self, options: EngineOptions, say: Say) -> list[Server]:
        if options.engine == "vllm":
            from mailboat.island.engines.vllm import VllmServer

            found = [VllmServer(url, say) for url in options.urls]
            self._closers.extend(server.close for server in found)
            return list(found)
        if options.engine == "sglang":
            from mailboat.island.engines.sglang import SglangServer

            return [SglangServer(url) for url in options.urls]
        if options.engine == "local":
            from mailboat.island.engines.local import LocalServer

            local = LocalServer()
            self._closers.append(local.close)
            return [local]
        return []

    def _suspect(self, upstream: object, why: str) -> None:
        if self._served is not None:
            self._served.suspect(upstream, why)


class _Announced(CheckpointEngine):
    """A mirror that says over HTTP which version it holds."""

    def __init__(self, door: ThreadDoor, members: Members) -> None:
        super().__init__(members)
        self._door = door

    def load(self, image: Image, applied: Applied) -> None:  # noqa: ARG002
        """Says so."""
        self._door.flip(applied)

    def commit(self, image: Image, overlay: Overlay, applied: Applied) -> None:
        """Writes, then says so."""
        super().commit(image, overlay, applied)
        self._door.flip(applied)

    def relabel(self, image: Image, applied: Applied) -> None:  # noqa: ARG002
        """Says so."""
        self._door.flip(applied)
