"""The heartbeat: a thread that says what the island holds and does, and carries out the commands that come back.

It must never stop because of an answer: a control plane that is away or refuses is tried again at the next beat.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any, Protocol

from mailboat.client import Api
from mailboat.errors import MailboatError, Unauthorised
from mailboat.island.challenge import answer
from mailboat.island.holding import Holding, Say
from mailboat.island.keys import Credentials
from mailboat.island.marker import Marker
from mailboat.island.members.roster import Members
from mailboat.island.outbox import Outbox
from mailboat.island.stop import Stop
from mailboat.island.trust import Trust
from mailboat.replies import HeartbeatReply

IDLE, FETCHING, PREPARING, COMMITTING, ERROR = "idle", "fetching", "preparing", "committing", "error"
FENCED = "fenced"


@dataclass
class Status:
    """What the island is doing: a phase and, in `error`, the reason in a sentence; and what upkeep found damaged or
    could not do.
    """

    phase: str = IDLE
    reason: str = ""
    finding: str = ""
    alarm: str = ""  # what was refused as forged, replayed or expired, until something sound was accepted


class Serving(Protocol):
    """What stands in front of the engine."""

    @property
    def fence(self) -> str:
        """Why nothing is served; empty when something is or nothing is meant to be."""

    @property
    def active(self) -> int:
        """Requests under way."""

    @property
    def members(self) -> Members:
        """The island's other hosts."""

    def rest(self, reason: str | None) -> None:
        """Takes no new requests, for that reason; None: takes them again."""


class Heartbeat:
    """Beats every ``seconds`` (the server may change it) and at once after `wake`."""

    def __init__(
        self,
        api: Api,
        island: str,
        holding: Holding,
        status: Status,
        *,
        serving: Serving,
        credentials: Credentials,
        trust: Trust,
        outbox: Outbox,
        channel: str,
        seconds: float,
        stop: Stop,
        say: Say,
    ) -> None:
        self.enabled = True
        self.channel = channel  # the one to follow: its own while the island is pinned
        self.draining = False
        self._home = channel
        self._serving = serving
        self._credentials = credentials
        self._trust = trust
        self._outbox = outbox
        self._unreported: tuple[int, str] | None = None  # what a report was missing for at the last beat
        self._speaks_of_keys = False  # a control plane of the release before knows no such words
        self.refused = ""
        self._api = api
        self._island = island
        self._holding = holding
        self._status = status
        self._seconds = seconds
        self._stop = stop
        self._say = say
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Starts beating."""
        self._thread.start()

    def wake(self) -> None:
        """Beats now."""
        self._wake.set()

    def join(self, timeout: float) -> None:
        """Waits for the thread after the stop was asked for."""
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stop.is_set:
            self._wake.clear()
            try:
                self._beat()
                self.refused = ""
            except Unauthorised as error:
                if error.status == 401 and self._credentials.refused():
                    self._say("the new credential is not accepted; the old one stays")
                    continue
                self._note_refusal(error)
            except MailboatError as error:
                self._note_refusal(error)
            except Exception as error:  # noqa: BLE001 - a defect here must not make the island look lost
                self._note_refusal(error)
            self._wake.wait(self._seconds)

    def _note_refusal(self, error: Exception) -> None:
        if self.refused != str(error):
            self.refused = str(error)
            self._say(f"heartbeat: {error}")

    def _beat(self) -> None:
        held = self._holding.held
        phase, reason = self._status.phase, self._status.reason or self._status.finding
        if held is not None and phase in {IDLE, ERROR} and (fence := self._serving.fence):
            phase, reason = FENCED, fence
        body: dict[str, Any] = {
            "version": held and held.version,
            "digest": held and held.state,
            "epoch": held and held.epoch,
            "phase": phase,
            "reason": reason,
            "time": time.time(),
            "active_requests": self._serving.active,
        }
        if rows := self._serving.members.rows():
            body["members"] = rows
        if self._speaks_of_keys:
            body |= {"alarm": self._status.alarm, "trusted_keys": self._trust.publishers}
        reply = self._api.heartbeat(self._island, body)
        self._credentials.accepted()
        if reply.keys is not None:
            self._trust.heard(reply.keys)
            self._speaks_of_keys = True
        self._seconds = max(0.05, reply.heartbeat_seconds)
        if reply.enabled != self.enabled:
            self.enabled = reply.enabled
            self._say(
                "following the channel again" if reply.enabled else "disabled by the control plane: holding still"
            )
        self._obey(reply)
        self._make_up(held if reply.unreported else None)
        for command in reply.challenges:
            self._api.answer_challenge(self._island, command.challenge, answer(self._holding, command))

    def _make_up(self, held: Marker | None) -> None:
        """Reports again what two beats in a row found unreported: after one, the report may be on its way."""
        unreported = None if held is None else (held.version, held.state)
        if held is not None and unreported == self._unreported:
            self._outbox.repeat(held)
        self._unreported = unreported

    def _obey(self, reply: HeartbeatReply) -> None:
        """Takes the orders that came with the answer."""
        channel = reply.channel or self._home
        if channel != self.channel:
            self.channel = channel
            self._say(
                "pinned: following a channel of its own" if channel != self._home else f"following {channel} again"
            )
        if (reply.drain is not None) != self.draining:
            self.draining = reply.drain is not None
            why = f": {reply.drain}" if reply.drain else ""
            self._serving.rest(f"An operator drains this island{why}." if self.draining else None)
            self._say(f"draining{why}" if self.draining else "draining no more")
        if reply.credential is not None:
            self._credentials.offered(reply.credential)
            self._say("got a new credential")
            self._wake.set()  # tries it at once
