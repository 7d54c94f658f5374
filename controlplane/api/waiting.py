"""Wakes requests that wait for a head. One LISTEN connection per process serves every waiter; a waiter holds none.

Notifications are only wake-ups: whoever is woken reads the database again, where possible all together. While the
listening connection is down (PostgreSQL restarts), waiters look by themselves every few seconds, and all are woken when
it is back, since some may have been missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import weakref
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import psycopg
import structlog
from django.db import connections

from controlplane.registry.heads import NOTIFICATION

log = structlog.get_logger(__name__)

LOOK_EVERY = 2.0  # seconds, while nothing is listened to
LONGEST_PAUSE = 5.0


class Waiting:
    """The waiters of one event loop."""

    def __init__(self) -> None:
        self.listening = False
        self.wakes = 0  # rises with every wake-up: whoever saw the same number twice has missed nothing in between
        self._events: dict[str, dict[asyncio.Event, Any]] = defaultdict(dict)
        self._task: asyncio.Task[None] | None = None
        self._looks: dict[str, tuple[int, asyncio.Task[Any]]] = {}

    def begin(self) -> None:
        """Starts to listen, unless that is being done."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._listen(), name="heads")

    @contextlib.contextmanager
    def subscribe(self, key: str, who: Any = None) -> Iterator[asyncio.Event]:
        """An event that is set when the head `run/channel` may have moved. Subscribe first, then look, then wait."""
        self.begin()
        event = asyncio.Event()
        self._events[key][event] = who
        try:
            yield event
        finally:
            del self._events[key][event]
            if not self._events[key]:
                del self._events[key]

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        """True when the event was set; False when it is time to look again, at the latest after `seconds`."""
        longest = seconds if self.listening else min(seconds, LOOK_EVERY)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), longest)
        woken = event.is_set()
        event.clear()
        return woken

    async def together(self, key: str, look: Callable[[list[Any]], Awaitable[Any]]) -> Any:
        """What `look` finds for everybody (`who`) that waits for `key`: once after each wake-up, for all who ask."""
        wake, task = self._looks.get(key, (-1, None))
        if task is None or wake != self.wakes:
            task = asyncio.ensure_future(look([who for who in self._events[key].values() if who is not None]))
            task.add_done_callback(lambda done: self._forget(key, done))
            self._looks[key] = self.wakes, task
        return await asyncio.shield(task)

    def _forget(self, key: str, task: asyncio.Task[Any]) -> None:
        if self._looks.get(key, (-1, None))[1] is task:
            del self._looks[key]

    async def close(self) -> None:
        """Ends the listening connection."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _listen(self) -> None:
        pause = 0.1
        while True:
            try:
                async with await psycopg.AsyncConnection.connect(**_parameters(), autocommit=True) as connection:
                    await connection.execute(f"LISTEN {NOTIFICATION}")
                    self.listening, pause = True, 0.1
                    self._wake_all()  # what moved before the LISTEN was not heard
                    async for notification in connection.notifies():
                        self.wakes += 1
                        for event in list(self._events.get(notification.payload, ())):
                            event.set()
            except (psycopg.Error, OSError) as error:
                log.warning("not listening for heads; trying again", error=str(error).strip())
            finally:
                self.listening = False
                self._wake_all()
            await asyncio.sleep(pause * (0.5 + random.random() / 2))  # noqa: S311  jitter
            pause = min(LONGEST_PAUSE, pause * 2)

    def _wake_all(self) -> None:
        self.wakes += 1
        for events in self._events.values():
            for event in events:
                event.set()


_of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Waiting] = weakref.WeakKeyDictionary()


def waiting() -> Waiting:
    """The waiters of the running event loop."""
    loop = asyncio.get_running_loop()
    return _of_loop.setdefault(loop, Waiting())


def _parameters() -> dict[str, Any]:
    """How to reach the database that Django uses (in tests: the test database)."""
    settings = connections["default"].settings_dict
    names = {"HOST": "host", "PORT": "port", "NAME": "dbname", "USER": "user", "PASSWORD": "password"}
    found = {name: settings[key] for key, name in names.items() if settings[key]}
    keepalive = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3}
    return {**settings.get("OPTIONS", {}), **keepalive, **found, "application_name": "mailboat heads"}
