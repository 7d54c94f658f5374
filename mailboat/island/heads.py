"""Heads: which version the channel names, and why an island may refuse to believe it.

A head of another run, one that the control plane has not signed, an expired one, or one that lies before what was seen
already is refused; the island goes on serving what it holds. It must never forget the highest (generation, serial):
a replayed head would be taken for news.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mailboat.errors import ManifestError
from mailboat.island.store import Store
from mailboat.island.trust import Trust
from mailboat.manifest import HEAD_TYPE, Envelope, Head

NOTE = "serial"
CLOCK_TOLERANCE = 300  # seconds by which an island's clock may be wrong


class HeadRefused(ManifestError):  # noqa: N818 - as the library's other errors, named for what happened
    """A head that must not be followed; the version held goes on being served."""

    code = "head_refused"


class Heads:
    """Checks the heads of one channel and keeps the highest (generation, serial) durably in the store: for the channel
    that the island enrolled with (``home``) and for the one that it follows while it is pinned apart.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        channel: str,
        *,
        trust: Trust | None = None,
        home: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._trust = trust
        self._store = store
        self._run_id = run_id
        self._channel = channel
        self._clock = clock
        self._note = NOTE if home else f"{NOTE}-{channel}"
        seen = store.note(self._note) or {}
        belongs = seen.get("run") == run_id and seen.get("channel") == channel
        self._seen: dict[str, Any] = seen if belongs else {}

    def accept(self, envelope: Envelope) -> Head:
        """The head in ``envelope`` when it may be followed; raises HeadRefused or ManifestError."""
        head = Head.from_bytes(envelope.open(HEAD_TYPE))
        if head.run != self._run_id or head.channel != self._channel:
            raise HeadRefused("The head belongs to another run or channel; it is refused.")
        if self._trust is not None and (problem := self._trust.head_problem(envelope)):
            raise HeadRefused(problem)
        now = self._clock()
        if now > head.expires + CLOCK_TOLERANCE:
            late = int(now - head.expires)
            raise HeadRefused(
                f"The head expired {late} s ago by this island's clock; check the clock and the control plane."
            )
        if head.issued > now + CLOCK_TOLERANCE:
            early = int(head.issued - now)
            raise HeadRefused(f"The head was issued {early} s in the future by this island's clock; check the clock.")
        before = (self._seen.get("generation", 0), self._seen.get("serial", -1))
        place = (head.generation, head.serial)
        if place < before:
            raise HeadRefused(f"The head has serial {head.serial}, older than {before[1]} seen before; it is refused.")
        names = {"version": head.version, "epoch": head.epoch, "manifest": head.manifest, "state": head.state}
        if place == before and any(self._seen.get(key) != value for key, value in names.items()):
            raise HeadRefused(f"Two different heads have the serial {head.serial}; the second is refused.")
        if place > before:
            place_note = {"generation": head.generation, "serial": head.serial}
            self._seen = {"run": head.run, "channel": head.channel, **place_note, **names}
            self._store.set_note(self._note, self._seen)
        return head
