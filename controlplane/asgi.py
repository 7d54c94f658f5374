"""The ASGI application: who answers what.

Uploads and the heads that islands wait for have handlers below Django; views that are coroutines run the way Django
runs them under ASGI; everything else takes a thread of the lane. Bodies are bounded before anybody looks at them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from typing import Any

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
django = get_asgi_application()

from asgiref.sync import iscoroutinefunction  # noqa: E402  only after the applications are loaded
from django.conf import settings  # noqa: E402
from django.urls import Resolver404, resolve  # noqa: E402

from controlplane.api import head_view, problems, uploads  # noqa: E402
from controlplane.api.uploads import Message, Receive, Scope, Send  # noqa: E402
from controlplane.api.waiting import waiting  # noqa: E402
from controlplane.lane import lane  # noqa: E402


class _TooLarge(Exception):  # noqa: N818
    """More bytes came than Django may spool to the disk."""


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Entry point of the server."""
    if scope["type"] == "lifespan":
        await _lifespan(receive, send)
    elif scope["type"] == "http" and uploads.PATH.fullmatch(scope["path"]):
        await uploads.application(scope, receive, send)
    elif scope["type"] == "http" and head_view.below(scope):
        await head_view.application(scope, receive, send)
    else:
        await _bounded(django if _waits(scope["path"]) else lane(), scope, receive, send)


def _waits(path: str) -> bool:
    """Whether the view at this address is a coroutine: it streams, or waits for something."""
    try:
        return iscoroutinefunction(resolve(path).func)
    except Resolver404:
        return False


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.shutdown":
            await waiting().close()
            await asyncio.to_thread(lane().close)
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def _bounded(handler: Any, scope: Scope, receive: Receive, send: Send) -> None:
    """Django writes a body to the disk before any check of the caller: no more than a JSON document may be long."""
    limit = settings.DATA_UPLOAD_MAX_MEMORY_SIZE + 1
    taken, started = 0, False

    async def counted() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > limit:
            raise _TooLarge
        return message

    async def noted(message: Message) -> None:
        nonlocal started
        started = True
        await send(message)

    try:
        await handler(scope, counted, noted)
    except _TooLarge:
        if not started:
            await _refuse(send, limit - 1)


async def _refuse(send: Send, limit: int) -> None:
    body = json.dumps(problems.document(413, "too_large", f"The body is longer than {limit} bytes.")).encode()
    headers = [
        (b"content-type", problems.CONTENT_TYPE.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    with contextlib.suppress(OSError):
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": body})
