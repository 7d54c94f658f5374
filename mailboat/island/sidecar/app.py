"""The ASGI application of a sidecar: its own few routes, and the proxy for everything else."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route

from mailboat.island.sidecar.gate import Gate
from mailboat.island.sidecar.metrics import CONTENT_TYPE, Metrics
from mailboat.island.sidecar.proxy import Proxy
from mailboat.island.sidecar.types import CommitMode, SyncView
from mailboat.island.sidecar.upstreams import Upstreams


@dataclass(frozen=True)
class Parts:
    """What an application is wired from."""

    gate: Gate
    upstreams: Upstreams
    proxy: Proxy
    metrics: Metrics
    mode: CommitMode
    sync: Callable[[], SyncView]
    wake: Callable[[], None]
    started: Callable[[], None] = lambda: None


def application(parts: Parts) -> Starlette:
    """The application."""
    gate, upstreams = parts.gate, parts.upstreams

    def unready() -> str:
        return gate.reason or upstreams.reason

    async def live(_request: Request) -> Response:
        return PlainTextResponse("alive\n")

    async def ready(_request: Request) -> Response:
        reason = unready()
        return JSONResponse({"ready": not reason, "reason": reason}, status_code=503 if reason else 200)

    async def server_info(_request: Request) -> Response:
        applied, sync = gate.applied, parts.sync()
        return JSONResponse(
            {
                "ready": not unready(),
                "applied": applied and applied.label,
                "sync_state": sync.state.upper(),
                "reason": sync.reason or unready(),
                "run_id": applied and applied.run_id,
                "commit_mode": str(parts.mode),
                "prefix_cache": "salted" if parts.mode is CommitMode.IN_PLACE else "reset",
                "active_requests": len(gate.active),
                "engines": [
                    {"url": member.url, "fence": member.fence, "active": member.busy} for member in upstreams.members
                ],
                "metrics": parts.metrics.summary(),
            }
        )

    async def wake(_request: Request) -> Response:
        parts.wake()
        return JSONResponse({"woken": True}, status_code=202)

    async def metrics(_request: Request) -> Response:
        return Response(parts.metrics.text(), media_type=CONTENT_TYPE)

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        await parts.proxy.start()
        parts.started()
        yield
        await parts.proxy.close()

    routes = [
        Route("/health/live", live),
        Route("/health", ready),
        Route("/health/ready", ready),
        Route("/server_info", server_info),
        Route("/wake", wake, methods=["POST"]),
        Route("/metrics", metrics),
        Mount("/", app=parts.proxy),
    ]
    return Starlette(routes=routes, lifespan=lifespan)
