"""Where members knock: orders, their words, and the bytes of the versions that they have to fetch, all from the
leader's own store, so that a version crosses the link to the site once.

Every call carries the island's secret. It must never hand out anything but documents, parts and bases of the versions
that the order in force names.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from mailboat.island.marker import Base
from mailboat.island.members.order import BadWord, Word
from mailboat.island.members.roster import Roster
from mailboat.island.sidecar.serving import Address, HttpServer
from mailboat.island.store import Store
from mailboat.manifest import BlobRef
from mailboat.transfer import file_blob

PREFIX = "/api/v1/projects/island"  # as the control plane's, so that members use the same client
LONGEST_WAIT = 20.0
LARGEST_WORD = 64 << 10


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificate and key files (PEM) of the door."""

    certificate: str
    key: str


class Door:
    """The HTTP server for members, until `close`."""

    def __init__(self, listen: str, secret: str, roster: Roster, store: Store, tls: Tls | None) -> None:
        self._secret = secret.encode()
        self._roster = roster
        self._store = store
        self._bases: dict[Base, list[tuple[str, Path, BlobRef]]] = {}
        self._reading = threading.Lock()
        files = None if tls is None else (tls.certificate, tls.key)
        self._server = HttpServer("members' door", Address.parse(listen), grace=2, tls=files)
        self.url = self._server.url
        self._server.start(self._application)

    def close(self) -> None:
        """Ends it; members that wait for an order are not waited for."""
        self._roster.end()
        self._server.stop()

    def _application(self, started: Callable[[], None]) -> Starlette:
        @contextlib.asynccontextmanager
        async def lifespan(_app: Starlette) -> AsyncIterator[None]:
            started()
            yield

        routes = [
            Route(f"{PREFIX}/members/{{name}}/order", self._guarded(self._order)),
            Route(f"{PREFIX}/members/{{name}}/word", self._guarded(self._word), methods=["POST"]),
            Route(f"{PREFIX}/base/{{state}}", self._guarded(self._base)),
            Route(f"{PREFIX}/runs/{{run}}/blobs/{{sha256}}", self._guarded(self._blob)),
        ]
        return Starlette(routes=routes, lifespan=lifespan)

    def _guarded(self, call: Callable[[Request, bytes], Response]) -> Callable[[Request], Any]:
        """Checks secret and name, reads the body, answers in a thread."""

        async def guarded(request: Request) -> Response:
            given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
            if not hmac.compare_digest(given, self._secret):
                return _problem(401, "bad_secret", "The secret is not this island's; give both sides the same file.")
            name = request.path_params.get("name")
            if name is not None and not self._roster.knows(name):
                return _problem(403, "unknown_member", f"The leader expects no member {name!r}; name it with --member.")
            body = b""
            async for piece in request.stream():
                body += piece
                if len(body) > LARGEST_WORD:
                    return _problem(413, "too_large", "A member's word is never that long.")
            return await run_in_threadpool(call, request, body)

        return guarded

    # -- calls

    def _order(self, request: Request, _body: bytes) -> Response:
        query = request.query_params
        try:
            serial, wait = int(query.get("serial", "-1")), float(query.get("wait", "0"))
        except ValueError:
            return _problem(400, "bad_request", "serial and wait must be numbers.")
        order = self._roster.order_after(query.get("leader", ""), serial, min(LONGEST_WAIT, max(0.0, wait)))
        return JSONResponse(order.as_json())

    def _word(self, request: Request, body: bytes) -> Response:
        try:
            word = Word.parse(json.loads(body))
        except (ValueError, BadWord) as error:
            return _problem(400, "bad_word", str(error))
        self._roster.note(request.path_params["name"], word)
        return JSONResponse({})

    def _base(self, request: Request, _body: bytes) -> Response:
        """The files of the base that a version asked for starts from."""
        state = request.path_params["state"]
        base = next((marker.base for marker in self._roster.goals if marker.base.state == state), None)
        if base is None:
            return _problem(404, "not_found", "No version asked for starts from that base.")
        try:
            files = self._files_of(base)
        except OSError as error:
            return _problem(404, "not_found", f"The leader's base can't be read ({error.strerror}).")
        return JSONResponse([{"path": name, "sha256": blob.sha256, "size": blob.size} for name, _, blob in files])

    def _blob(self, request: Request, _body: bytes) -> Response:
        sha256 = request.path_params["sha256"]
        for marker in self._roster.goals:
            entries = marker.log
            documents = {marker.manifest, marker.inventory, marker.digests}
            documents |= {one for entry in entries for one in (entry.manifest, entry.inventory, entry.digests)}
            if sha256 in documents and (data := self._store.document(sha256)) is not None:
                return Response(data, media_type="application/octet-stream")
            for entry in entries:
                for part, path in zip(entry.parts, self._store.part_paths(entry), strict=True):
                    if part.sha256 == sha256 and path.is_file():
                        return _file(path, sha256)
            for _, path, blob in self._bases.get(marker.base, ()):
                if blob.sha256 == sha256 and path.is_file():
                    return _file(path, sha256)
        return _problem(404, "not_found", "The leader has no such blob among the versions asked for.")

    def _files_of(self, base: Base) -> list[tuple[str, Path, BlobRef]]:
        with self._reading:
            if base not in self._bases:
                place = self._store.base_path(base)
                found = [("model.safetensors", place)] if place.is_file() else _visible(place)
                self._bases = {base: [(name, path, file_blob(path)) for name, path in found]}
            return self._bases[base]


def _visible(folder: Path) -> list[tuple[str, Path]]:
    """Every file of a checkpoint folder but those with dot names."""
    files = ((path.relative_to(folder), path) for path in sorted(folder.rglob("*")) if path.is_file())
    return [(name.as_posix(), path) for name, path in files if not any(part.startswith(".") for part in name.parts)]


def _file(path: Path, sha256: str) -> Response:
    return FileResponse(path, media_type="application/octet-stream", headers={"ETag": f'"{sha256}"'})


def _problem(status: int, code: str, detail: str) -> Response:
    return JSONResponse({"status": status, "code": code, "detail": detail}, status_code=status)
