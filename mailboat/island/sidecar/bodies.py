"""Requests' bodies in memory: read whole, within limits of size, sum and time.

Clients must not be able to fill the memory before the gate has let anybody in, nor hold it by sending nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.types import Message, Receive

from mailboat.island.sidecar.types import Slow, TooLarge, Unavailable


class ClientGone(Exception):  # noqa: N818 - an event
    """The client closed its connection."""


@dataclass
class Bodies:
    """The limits: bytes of one body, bytes of all that are held at a time, seconds without a byte."""

    largest: int = 64 << 20
    total: int = 512 << 20
    patience: float = 60.0
    held: int = field(default=0, init=False)  # bytes

    @asynccontextmanager
    async def whole(self, receive: Receive) -> AsyncIterator[bytes]:
        """A request's body, counted as held until the block ends.

        Raises TooLarge, Slow, Unavailable (too much is held already) and ClientGone.
        """
        body, counted, more = bytearray(), 0, True
        try:
            while more:
                message = await self._next(receive)
                piece = message.get("body", b"")
                if counted + len(piece) > self.largest:
                    raise TooLarge(f"The body is larger than {self.largest >> 20} MiB.")
                if self.held + len(piece) > self.total:
                    raise Unavailable("Too many large requests are under way; try again.")
                self.held += len(piece)
                counted += len(piece)
                body += piece
                more = message.get("more_body", False)
            whole = bytes(body)
            body.clear()
            yield whole
        finally:
            self.held -= counted

    async def _next(self, receive: Receive) -> Message:
        try:
            async with asyncio.timeout(self.patience):
                message = await receive()
        except TimeoutError:
            raise Slow(f"Nothing of the body came for {self.patience:g} s; send the request again.") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message
