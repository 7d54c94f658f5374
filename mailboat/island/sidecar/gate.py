"""The admission gate: which requests may go to the engines, and how a commit gets a quiet moment.

It knows versions and requests, and nothing of engines or of how versions arrive. All of it runs in one event loop and
needs no locks; `from_thread` is the door for the sync loop. It must never admit a request under one version and let it
begin under another, and never stay closed after a commit ended, however it ended.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

from mailboat.errors import MailboatError
from mailboat.island.sidecar.types import Applied, CommitMode, Constraint, Limits, NotReady, Unavailable


class CommitDeferred(MailboatError):  # noqa: N818 - nothing went wrong: the moment was not right
    """A commit that was given up before anything was touched; it is tried again."""

    code = "commit_deferred"


@dataclass(eq=False)
class Ticket:
    """An admitted request. ``start``: the version that it was dispatched under. ``cut`` ends it from outside."""

    constraint: Constraint
    start: Applied
    number: int
    engine: object | None = None
    cut: Callable[[str], None] | None = None
    cut_reason: str = ""

    @property
    def pinned(self) -> bool:
        """Whether it must end before the version changes."""
        return self.constraint.pinned


@dataclass
class Counts:
    """What the gate saw, for the metrics."""

    admitted: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    given_up: int = 0

    def reject(self, why: str) -> None:
        """Counts a refusal."""
        self.rejected[why] = self.rejected.get(why, 0) + 1


class Gate:
    """The gate of one island. ``wake`` is called when a request asks for a version that is not there yet; ``why`` says
    what keeps the first version away, as far as anybody knows.
    """

    def __init__(
        self, limits: Limits, *, wake: Callable[[], None] = lambda: None, why: Callable[[], str] = lambda: ""
    ) -> None:
        self.limits = limits
        self.counts = Counts()
        self.applied: Applied | None = None
        self.resting: str | None = None  # why no new request is taken although everything is well
        self.active: dict[int, Ticket] = {}
        self._wake = wake
        self._why = why
        self._closed = False
        self._hurried = False
        self._queue: deque[asyncio.Future[None]] = deque()
        self._numbers = itertools.count()
        self._left = asyncio.Event()  # set whenever a request ends
        self._give_ups = 0
        self._taken_back = -1  # the highest version that was held here before one with a lower number

    @property
    def closed(self) -> bool:
        """Whether requests wait at the moment."""
        return self._closed

    @property
    def reason(self) -> str:
        """Why no request is let in; empty when they are."""
        if self.resting is not None:
            return self.resting
        return (self._why() or "The island has not caught up with its channel yet.") if self.applied is None else ""

    @property
    def queued(self) -> int:
        """How many wait."""
        return len(self._queue)

    # -- requests

    async def admit(self, constraint: Constraint) -> Ticket:
        """Lets a request in, at once or after the commit under way. Raises NotReady or Unavailable.

        Whoever got a ticket gives it back with `leave`.
        """
        deadline = asyncio.get_running_loop().time() + self.limits.wait
        while self._closed:  # again when the next commit was quicker than this request
            await self._wait_in_line(deadline)
        applied = self._fits(constraint)
        ticket = Ticket(constraint, applied, next(self._numbers))
        self.active[ticket.number] = ticket
        self.counts.admitted += 1
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """The request ended; repeating it is harmless."""
        if self.active.pop(ticket.number, None) is not None:
            self._left.set()

    async def _wait_in_line(self, deadline: float) -> None:
        if len(self._queue) >= self.limits.queued:
            raise Unavailable(f"An update is being committed and {len(self._queue)} requests wait already; try again.")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            async with asyncio.timeout_at(deadline):
                await turn
        except TimeoutError:
            raise Unavailable(f"An update was not committed within {self.limits.wait:g} s; try again.") from None
        finally:
            if turn in self._queue:
                self._queue.remove(turn)

    def _fits(self, constraint: Constraint) -> Applied:
        applied = self.applied
        if applied is None or self.resting is not None:
            raise Unavailable(self.reason)
        if constraint.pinned and self._give_ups >= self.limits.give_ups:
            raise Unavailable("Requests pinned to a version hold an update up; they are refused until it is committed.")
        if constraint.run is not None and constraint.run not in {applied.run, applied.run_id}:
            raise NotReady(
                f"This island serves the run {applied.run}, not {constraint.run[:100]}.",
                target=constraint.exact if constraint.exact is not None else constraint.minimum or 0,
                applied=applied.version,
            )
        target = constraint.exact if constraint.exact is not None else constraint.minimum
        if target is None or target == applied.version or (not constraint.pinned and target < applied.version):
            return applied
        if target < applied.version:
            message = (
                f"Version {target} can't be served here any more: the island holds version {applied.version} and does "
                "not go back for a request; ask for a newer version or another island."
            )
        elif target <= self._taken_back:
            message = (
                f"Version {target} is not served any more: it was taken back, and the island holds version "
                f"{applied.version}; ask for that one or a newer one."
            )
        else:
            self._wake()
            message = f"Version {target} is not here yet: the island holds version {applied.version}; try again."
        raise NotReady(message, target=target, applied=applied.version)

    # -- commits

    @asynccontextmanager
    async def quiet(self, target: Applied, mode: CommitMode) -> AsyncIterator[None]:
        """Closes the gate and waits for the requests that may not run across the commit; opens it again at the end.

        Raises CommitDeferred at the drain limit. At the third time in a row those that hold it up are cut instead.
        """
        if self._closed:
            raise CommitDeferred("Another commit is under way.")
        self._closed = True  # before the drain, or new requests would keep it from ever ending
        try:
            await self._drain(target, mode)
            self._give_ups = 0
            yield
        finally:
            self._open()

    async def _drain(self, target: Applied, mode: CommitMode) -> None:
        everything = mode is CommitMode.DRAIN or self.applied is None or self.applied.moves_lineage(target)

        def staying() -> list[Ticket]:
            return [ticket for ticket in self.active.values() if everything or ticket.pinned]

        if await self._emptied(staying, self.limits.drain):
            return
        if self._hurried:
            raise CommitDeferred(f"The island stops; version {target.version} waits.")
        self._give_ups += 1
        count = len(staying())
        if self._give_ups < self.limits.give_ups:
            self.counts.given_up += 1
            raise CommitDeferred(
                f"{count} requests did not end within {self.limits.drain:g} s; version {target.version} is tried again."
            )
        for ticket in staying():
            self.cut(ticket, f"The request held the update to version {target.version} up for too long; send it again.")
        if not await self._emptied(staying, 5.0):
            self.counts.given_up += 1
            raise CommitDeferred(f"{len(staying())} requests could not be ended; version {target.version} waits.")

    async def _emptied(self, staying: Callable[[], list[Ticket]], seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while staying() and not self._hurried:
                    self._left.clear()
                    await self._left.wait()
        return not staying()

    def cut(self, ticket: Ticket, reason: str) -> None:
        """Ends a request from outside: 503 when its answer has not begun, else a connection that breaks off."""
        ticket.cut_reason = reason
        if ticket.cut is not None:
            ticket.cut(reason)

    async def flip(self, applied: Applied) -> None:
        """Makes ``applied`` the version held. Called while the engines stand still, before they go on.

        What they had said before is read first: it belongs to the version before.
        """
        for _ in range(3):  # a poll of the sockets, the readers, their writers
            await asyncio.sleep(0)
        before, self.applied = self.applied, applied
        if before is not None and before.version > applied.version:
            self._taken_back = max(self._taken_back, before.version)

    def hurry(self) -> None:
        """No commit waits for requests any more: the island stops."""
        self._hurried = True
        self._left.set()

    def _open(self) -> None:
        self._closed = False
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)


class ThreadDoor:
    """The gate for a thread outside its event loop."""

    def __init__(self, gate: Gate, loop: asyncio.AbstractEventLoop) -> None:
        self.gate = gate
        self._loop = loop

    @contextmanager
    def quiet(self, target: Applied, mode: CommitMode) -> Iterator[None]:
        """`Gate.quiet`."""
        closing = self.gate.quiet(target, mode)
        asyncio.run_coroutine_threadsafe(closing.__aenter__(), self._loop).result()
        try:
            yield
        finally:
            asyncio.run_coroutine_threadsafe(closing.__aexit__(None, None, None), self._loop).result()

    def flip(self, applied: Applied) -> None:
        """`Gate.flip`."""
        asyncio.run_coroutine_threadsafe(self.gate.flip(applied), self._loop).result()

    def hurry(self) -> None:
        """`Gate.hurry`."""
        self._loop.call_soon_threadsafe(self.gate.hurry)

    def cut_all(self, engine: object, reason: str) -> None:
        """Ends every request that ``engine`` answers."""

        def cut() -> None:
            for ticket in list(self.gate.active.values()):
                if ticket.engine is engine:
                    self.gate.cut(ticket, reason)

        self._loop.call_soon_threadsafe(cut)
