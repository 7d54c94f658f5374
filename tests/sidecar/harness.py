"""A sidecar in front of contract engines, moved by hand: an image, versions, and what the sync loop would do."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import urllib3

from mailboat.checkpoint.files import Checkpoint
from mailboat.checkpoint.source import ArraySource
from mailboat.checkpoint.writing import write_checkpoint
from mailboat.digest import State, measure
from mailboat.image import Image
from mailboat.island.sidecar.app import Parts, application
from mailboat.island.sidecar.assembly import EngineOptions, Sidecar
from mailboat.island.sidecar.bodies import Bodies
from mailboat.island.sidecar.gate import Gate
from mailboat.island.sidecar.metrics import Metrics
from mailboat.island.sidecar.proxy import Proxy
from mailboat.island.sidecar.serving import Address, HttpServer
from mailboat.island.sidecar.types import Applied, CommitMode, Limits, SyncView
from mailboat.island.sidecar.upstreams import Upstream, Upstreams
from mailboat.island.stop import Stop
from mailboat.patch.build import build_patch
from tests.engines.contract_engine import SHAPES, ContractEngine
from tests.waiting import PATIENCE


class Versions:
    """A run of versions that differ in some elements and say which they are in `model.norm.weight`."""

    def __init__(self, folder: Path, *, seed: int = 3) -> None:
        self.random = np.random.default_rng(seed)
        self.folder = folder
        self.arrays = {name: self.random.integers(0, 1 << 15, shape, np.uint16) for name, shape in SHAPES.items()}
        self.arrays["model.norm.weight"][0] = 0
        self.number = 0

    def source(self) -> ArraySource:
        return ArraySource(self.arrays, dtypes=dict.fromkeys(self.arrays, "BF16"), side_files={"config.json": b"{}"})

    def state(self) -> State:
        return measure(self.source())

    def next(self, changes: int = 3) -> tuple[Path, State]:
        """A patch to the next version, with so many changed elements in each tensor where it has them."""
        before = ArraySource(
            {k: v.copy() for k, v in self.arrays.items()},
            dtypes=dict.fromkeys(self.arrays, "BF16"),
            side_files={"config.json": b"{}"},
        )
        self.number += 1
        for weight in self.arrays.values():
            flat = weight.reshape(-1)
            where = self.random.choice(flat.size, min(changes, flat.size), replace=False)
            flat[where] ^= self.random.integers(1, 1 << 15, where.size, np.uint16)
        self.arrays["model.norm.weight"][0] = self.number
        path = self.folder / f"{self.number}.mbp"
        built = build_patch(before, self.source(), path)
        return path, built.target_state


class Station:
    """A sidecar whose versions the test moves."""

    def __init__(self, engines: list[ContractEngine], folder: Path, **options: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.versions = Versions(folder)
        self.engines = engines
        self.lines: list[str] = []
        limits = Limits(**{key: options.pop(key) for key in ("queued", "wait", "drain", "give_ups") if key in options})
        kind = engines[0].kind if engines else "checkpoint"
        serving = EngineOptions(
            kind, tuple(engine.url for engine in engines), "127.0.0.1:0",
            options.pop("mode", CommitMode.IN_PLACE), limits,
        )  # fmt: skip
        self.stop = Stop()
        self.sidecar = Sidecar(serving, stop=self.stop, say=self.lines.append)
        self.pool = urllib3.PoolManager(maxsize=64, retries=False)
        self.image: Image | None = None
        assert self.sidecar.url
        self.url = self.sidecar.url

    @property
    def engine(self) -> ContractEngine:
        return self.engines[0]

    def applied(self, **other: Any) -> Applied:
        given = Applied("voyage", "id-of-voyage", 0, self.versions.number, self.versions.state().digest)
        return replace(given, **other)

    def seed(self) -> None:
        """The first version: image, then engines."""
        place = self.folder / "checkpoint"
        write_checkpoint(self.versions.source(), place)
        with Checkpoint.open(place) as checkpoint:
            self.image = Image.create(self.folder / "image", checkpoint, measure(checkpoint))
        self.sidecar.engine.load(self.image, self.applied())

    def step(self, **other: Any) -> None:
        """The next version, or what came in its way."""
        patch, state = self.versions.next()
        self.retry = (patch, state)
        self.commit(patch, state, **other)

    def commit(self, patch: Path, state: State, **other: Any) -> None:
        assert self.image is not None
        overlay = self.image.prepare([patch], state)
        try:
            self.sidecar.engine.commit(self.image, overlay, self.applied(**other))
        finally:
            overlay.close()

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any, dict[str, str]]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = self.pool.request(
            "POST",
            self.url + path,
            body=raw,
            headers={"Content-Type": "application/json", **(headers or {})},
            timeout=PATIENCE,
        )
        try:
            decoded = json.loads(answer.data)
        except ValueError:
            decoded = answer.data
        return answer.status, decoded, {key.lower(): value for key, value in answer.headers.items()}

    def complete(self, tokens: int = 4, **body: Any) -> tuple[int, Any, dict[str, str]]:
        path = "/v1/completions"
        return self.post(path, {"prompt": "hello", "max_tokens": tokens, **body})

    def get(self, path: str) -> tuple[int, bytes]:
        answer = self.pool.request("GET", self.url + path, timeout=PATIENCE)
        return answer.status, answer.data

    def close(self) -> None:
        self.sidecar.close()
        if self.image is not None:
            self.image.close()


class Stream:
    """A streaming completion whose events are read one by one."""

    def __init__(self, station: Station, tokens: int = 50, *, path: str = "/v1/completions", **body: Any) -> None:
        host = station.url.removeprefix("http://")
        self.connection = http.client.HTTPConnection(host, timeout=PATIENCE)
        fields = {"stream": True, **body}
        fields |= (
            {"text": "hello", "sampling_params": {"max_new_tokens": tokens}}
            if path == "/generate"
            else {"prompt": "hello", "max_tokens": tokens}
        )
        self.connection.request("POST", path, json.dumps(fields), {"Content-Type": "application/json"})
        self.response = self.connection.getresponse()
        self.events: list[Any] = []

    @property
    def start(self) -> int:
        return int(self.response.headers["Mailboat-Version-Start"])

    def one(self) -> Any:
        """The next event, None at the end."""
        while line := self.response.readline():
            if line.startswith(b"data:"):
                self.events.append(line[5:].strip())
                return self.events[-1]
        return None

    def rest(self) -> list[Any]:
        while self.one() is not None:
            pass
        return self.events

    def close(self) -> None:
        """Goes away in the middle."""
        self.response.close()
        self.connection.close()


@contextlib.contextmanager
def station(engines: list[ContractEngine], folder: Path, **options: Any) -> Iterator[Station]:
    with contextlib.ExitStack() as stack:
        for engine in engines:
            stack.enter_context(engine.serving())
        running = Station(engines, folder, **options)
        stack.callback(running.close)
        running.seed()
        yield running


@contextlib.contextmanager
def bare(urls: list[str], bodies: Bodies | None = None) -> Iterator[int]:
    """The port of a sidecar before engines that nobody moves or watches."""
    upstreams = Upstreams([Upstream(url, fence="") for url in urls])
    gate = Gate(Limits())
    gate.applied = Applied("voyage", "id", 0, 0, "")
    proxy = Proxy(gate, upstreams, salted=None, bodies=bodies)
    parts = (gate, upstreams, proxy, Metrics(gate, upstreams), CommitMode.IN_PLACE, SyncView, lambda: None)
    server = HttpServer("sidecar", Address("127.0.0.1", 0), grace=1)
    server.start(lambda started: application(Parts(*parts, started)))
    try:
        yield server.port
    finally:
        server.stop()


def in_background(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Runs something beside the test; its result or error lands in the list."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:  # noqa: BLE001 - for the test to look at
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, result
