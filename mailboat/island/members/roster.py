"""The leader's side of an island of several hosts: what each member said last, and the order that is in force.

The decision to move is one durable note, written before any member hears of it: until then a move is given up without a
trace, afterwards it is finished, by whoever starts again. It must never let the engine go on before every member holds
the version, and never take an old word of a member for an answer to a new order.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mailboat.island.engines.engine import EngineError
from mailboat.island.marker import Marker
from mailboat.island.members.order import ERROR, PREPARED, SILENT, Order, Word
from mailboat.island.sidecar.gate import CommitDeferred
from mailboat.island.store import Store

NOTE = "decision"
SILENCE = 5.0  # seconds without a word after which a member counts as away; they speak every second
ANSWER = 2.0  # seconds in which a member that is ready says so again
PATIENCE = 30.0  # seconds in which all must have followed a decision while the engine stands still


class Members(Protocol):
    """The other hosts of an island, as its holding and its engine see them."""

    alone: bool

    def prepare(self, marker: Marker) -> None:
        """Returns when all are ready for a version. Raises CommitDeferred when one is away or in trouble."""

    def require_ready(self, state: str) -> None:
        """Raises CommitDeferred unless all are ready for a state, as of this moment."""

    def require_at(self, state: str) -> None:
        """Raises CommitDeferred unless all hold a state, as of this moment."""

    def commit(self) -> None:
        """Decides for what was prepared; returns when all hold it. Raises EngineError: the decision stays."""

    def align(self, marker: Marker) -> None:
        """Decides for a version, prepared or not; returns when all hold it. Raises CommitDeferred."""

    def rebased(self, marker: Marker) -> None:
        """The version held starts from another base from now on: who seeds itself is given that one."""

    def decided(self, marker: Marker) -> bool:
        """Whether a move that was under way was decided."""

    def rows(self) -> list[dict[str, Any]]:
        """Name, version, phase and reason of each."""


class Alone:
    """An island of one host."""

    alone = True

    def prepare(self, marker: Marker) -> None:
        """Nobody needs to."""

    def require_ready(self, state: str) -> None:
        """Nobody is asked."""

    def require_at(self, state: str) -> None:
        """Nobody is asked."""

    def commit(self) -> None:
        """Nobody is told."""

    def align(self, marker: Marker) -> None:
        """Nobody is told."""

    def rebased(self, marker: Marker) -> None:
        """Nobody is told."""

    def decided(self, marker: Marker) -> bool:  # noqa: ARG002
        """What was begun here is finished here."""
        return True

    def rows(self) -> list[dict[str, Any]]:
        """None."""
        return []


@dataclass
class _Seat:
    """One member as the leader knows it."""

    word: Word
    heard: float | None = None


class Roster:
    """The members of an island, by name. ``image``: where all must keep their image, where an engine reads it."""

    alone = False

    def __init__(
        self,
        names: Sequence[str],
        store: Store,
        *,
        image: str | None,
        check: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seats = {name: _Seat(Word()) for name in names}
        self._store = store
        self._image = image
        self._check = check  # raises when the island is told to stop
        self._clock = clock
        self._leader = secrets.token_hex(8)
        self._order = Order(self._leader, 0, None, None)
        self._change = threading.Condition()
        self._ended = False

    def knows(self, name: str) -> bool:
        """Whether a member of that name is expected."""
        return name in self._seats

    @property
    def goals(self) -> list[Marker]:
        """The versions that members may have to fetch now."""
        with self._change:
            return [marker for marker in (self._order.at, self._order.coming) if marker is not None]

    # -- for the door

    def note(self, name: str, word: Word) -> None:
        """A member said something."""
        with self._change:
            seat = self._seats[name]
            seat.word, seat.heard = word, self._clock()
            self._change.notify_all()

    def order_after(self, leader: str, serial: int, wait: float) -> Order:
        """The order in force, at once when it is another than the one known, else after at most ``wait`` seconds."""
        with self._change:
            known = (leader, serial)
            self._change.wait_for(lambda: self._ended or (self._order.leader, self._order.serial) != known, wait)
            return self._order

    def end(self) -> None:
        """Whoever waits for another order hears that there is none: the door closes."""
        with self._change:
            self._ended = True
            self._change.notify_all()

    # -- for holding and engine

    def prepare(self, marker: Marker) -> None:
        """See Members."""
        with self._change:
            before = self._order
        self._give(before.at, marker)
        self._await(lambda word: word.ready == marker.state, f"ready for version {marker.version}")

    def require_ready(self, state: str) -> None:
        """See Members."""
        with self._change:
            at, coming = self._order.at, self._order.coming
        if coming is not None and coming.state == state:
            self._give(at, coming)  # the same again: who answers is there
            self._await(lambda word: word.ready == state, "ready any more", ANSWER)

    def require_at(self, state: str) -> None:
        """See Members."""
        with self._change:
            for name, seat in self._seats.items():
                if self._away(seat) or seat.word.state != state:
                    raise CommitDeferred(f"The member {name} does not hold the island's version; it is waited for.")

    def commit(self) -> None:
        """See Members."""
        with self._change:
            coming = self._order.coming
        if coming is None:
            return
        try:
            self._decide(coming, PATIENCE)
        except CommitDeferred as stayed:
            raise EngineError(str(stayed)) from stayed

    def align(self, marker: Marker) -> None:
        """See Members."""
        self._decide(marker, None)

    def rebased(self, marker: Marker) -> None:
        """See Members."""
        with self._change:
            at = self._order.at
        if at is not None and at.state == marker.state:
            self._give(marker, None)  # what was coming led from the old base; it is prepared anew

    def _decide(self, marker: Marker, limit: float | None) -> None:
        decision = {"version": marker.version, "state": marker.state}
        if self._store.note(NOTE) != decision:
            self._store.set_note(NOTE, decision)  # durable before anyone hears of it
        with self._change:
            at = self._order.at
        if at != marker:
            self._give(marker, None)
        held = (marker.version, marker.state)
        self._await(lambda word: (word.version, word.state) == held, f"at version {marker.version}", limit)

    def decided(self, marker: Marker) -> bool:
        """See Members."""
        return self._store.note(NOTE) == {"version": marker.version, "state": marker.state}

    def rows(self) -> list[dict[str, Any]]:
        """See Members."""
        with self._change:
            return [
                {
                    "name": name,
                    "version": seat.word.version,
                    "phase": SILENT if self._away(seat) else PREPARED if seat.word.ready else seat.word.phase,
                    "reason": self._silence(seat) if self._away(seat) else seat.word.reason,
                }
                for name, seat in self._seats.items()
            ]

    # -- steps

    def _give(self, at: Marker | None, coming: Marker | None) -> None:
        with self._change:
            self._order = Order(self._leader, self._order.serial + 1, at, coming)
            self._change.notify_all()

    def _await(self, done: Callable[[Word], bool], what: str, limit: float | None = None) -> None:
        """Returns when all are `done`; patient with those that work, not with those that are away or in trouble."""
        started = self._clock()
        with self._change:
            while missing := [
                name for name, seat in self._seats.items() if not (self._answers(seat) and done(seat.word))
            ]:
                if limit is None:  # else the engine stands still, and a stop has to wait
                    self._check()
                for name in missing:
                    seat = self._seats[name]
                    if self._away(seat) and self._clock() - started > SILENCE:
                        raise CommitDeferred(f"The member {name} is not {what}: {self._silence(seat)}")
                    if self._answers(seat) and seat.word.phase == ERROR:
                        raise CommitDeferred(f"The member {name} is not {what}: {seat.word.reason}")
                    if self._image and seat.word.image and seat.word.image != self._image:
                        raise CommitDeferred(
                            f"The member {name} keeps its image in {seat.word.image}, but the engine reads "
                            f"{self._image} on every host; start it with --image {self._image}."
                        )
                if limit is not None and self._clock() - started > limit:
                    raise CommitDeferred(f"The member {missing[0]} was not {what} within {limit:g} s.")
                self._change.wait(0.25)

    def _answers(self, seat: _Seat) -> bool:
        return (seat.word.leader, seat.word.order) == (self._leader, self._order.serial)

    def _away(self, seat: _Seat) -> bool:
        return seat.heard is None or self._clock() - seat.heard > SILENCE

    def _silence(self, seat: _Seat) -> str:
        if seat.heard is None:
            return "it has not been heard of since the leader's start."
        return f"it has not been heard of for {self._clock() - seat.heard:.0f} s."
