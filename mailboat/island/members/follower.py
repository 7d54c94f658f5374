"""A member host: holds what the leader's order says, and nothing else. It has no credential, no channel and no engine
of its own; the engine's workers on its host read its image.

It follows orders in whatever state it was left: killed at any point it asks for the order again and goes on from its
own store. It must never touch its image for a version that the leader has not decided for.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mailboat.client import Api
from mailboat.durable import remove
from mailboat.errors import MailboatError, StoreError, Unauthorised
from mailboat.island.engines.checkpoint import CheckpointEngine
from mailboat.island.heartbeat import Status
from mailboat.island.holding import Holding, Prepared, Say, Step
from mailboat.island.marker import Base, LogEntry, Marker
from mailboat.island.members.order import COMMITTING, ERROR, IDLE, PREPARING, Order, Word
from mailboat.island.stop import Stop, Stopped
from mailboat.island.store import Store
from mailboat.island.upkeep import Upkeep, UpkeepOptions
from mailboat.patience import pause_before
from mailboat.replies import AnchorFile, AnchorStep, PatchStep
from mailboat.route import Documents, fetch_anchor, fetch_parts, open_proven

SPEAK_SECONDS = 1.0
LISTEN_SECONDS = 10.0


@dataclass(frozen=True)
class MemberOptions:
    """How a member is run: whom it follows, by which name and secret, and its folders."""

    leader: str
    name: str
    secret: str
    store: Path
    image: Path | None = None
    ca_file: str | None = None
    upkeep: UpkeepOptions = UpkeepOptions()  # noqa: RUF009 - frozen


def run_member(options: MemberOptions, *, stop: Stop, say: Say) -> None:
    """Follows the leader until told to stop. Raises MailboatError for what no retry can mend."""
    store = Store(options.store)
    api = Api(options.leader, "island", options.secret, ca_file=options.ca_file, sleep=stop.sleep)
    member = Member(options, store, api, stop=stop, say=say)
    try:
        member.run()
    except Stopped:
        say("stopped")
    finally:
        stop.set()
        member.close()
        store.close()
        api.close()


class Member:
    """A member from its start to its stop. The main thread acts; one thread listens, one speaks."""

    def __init__(self, options: MemberOptions, store: Store, api: Api, *, stop: Stop, say: Say) -> None:
        self._options = options
        self._store = store
        self._api = api
        self._stop = stop
        self._say = say
        self._change = threading.Condition()
        self._newest: Order | None = None
        self._word = Word(image=str(options.image.absolute()) if options.image else "")
        self._said: Word | None = None
        self._status = Status()  # its finding is the upkeep's
        self._holding: Holding | None = None
        self._upkeep: Upkeep | None = None
        self._upkeep_stop = Stop()
        self._documents: Documents | None = None
        self._ready: tuple[Marker, Prepared | Marker | None] | None = None  # a version, and what leads there
        self._told = ""
        self._threads = [
            threading.Thread(target=self._listen, name="orders", daemon=True),
            threading.Thread(target=self._speak, name="words", daemon=True),
        ]

    def run(self) -> None:
        """Follows. Raises Stopped when told to stop."""
        self._say(f"member {self._options.name} follows {self._options.leader}")
        for thread in self._threads:
            thread.start()
        done: Order | None = None
        failures = 0
        while True:
            order = self._next(done if failures == 0 else None)
            try:
                self._obey(order, failures)
                done, failures = order, 0
            except (MailboatError, OSError) as error:
                failures += 1
                self._tell(f"failed: {error}")
                self._set(phase=ERROR, reason=str(error))
                with self._stop.interruptible():
                    self._stop.sleep(pause_before(min(failures, 6)))

    def close(self) -> None:
        """Lets go of the image."""
        with self._change:
            self._change.notify_all()
        self._let_go()

    def _let_go(self) -> None:
        self._forget_ready()
        self._upkeep_stop.set()
        if self._upkeep is not None:
            self._upkeep.join(1.0)
        if self._holding is not None:
            self._holding.close()

    # -- listening and speaking

    def _next(self, done: Order | None) -> Order:
        """The newest order, when it is another than the one carried out, or upkeep found what may change that."""
        with self._stop.interruptible():
            while True:
                self._stop.check()
                with self._change:
                    order = self._newest
                    if order is not None and (order != done or (self._upkeep is not None and self._upkeep.has_news)):
                        return order
                    self._change.wait(0.5)

    def _listen(self) -> None:
        failures = 0
        while not self._stop.is_set:
            known = self._newest
            query = {"leader": known.leader, "serial": known.serial, "wait": LISTEN_SECONDS} if known else {}
            try:
                response = self._api.request(
                    "GET", f"members/{self._options.name}/order", query=query, retry=False, timeout=LISTEN_SECONDS + 5
                )
                order = Order.parse(json.loads(response.data))
                failures = 0
            except (MailboatError, ValueError) as error:
                failures += 1
                if isinstance(error, Unauthorised) or failures == 3:
                    self._tell(str(error))
                self._stop.wait(pause_before(min(failures, 4)))
                continue
            with self._change:
                self._newest = order
                self._change.notify_all()

    def _speak(self) -> None:
        while not self._stop.is_set:
            with self._change:
                word = self._word
            with contextlib.suppress(MailboatError):  # the next word comes in a second; `_listen` says what is wrong
                said = replace(word, reason=word.reason or self._status.finding)
                body = json.dumps(said.as_json()).encode()
                headers = {"Content-Type": "application/json"}
                path = f"members/{self._options.name}/word"
                self._api.request("POST", path, body=body, headers=headers, retry=False, timeout=5.0)
            with self._change:
                self._said = word
                self._change.wait_for(lambda: self._word != self._said or self._stop.is_set, SPEAK_SECONDS)

    def _set(self, **changes: Any) -> None:
        held = self._holding.held if self._holding is not None else None
        version, state = (None, "") if held is None else (held.version, held.state)
        with self._change:
            self._word = replace(self._word, version=version, state=state, **changes)
            self._change.notify_all()

    def _tell(self, line: str) -> None:
        if self._told != line:
            self._told = line
            self._say(line)

    # -- acting

    def _obey(self, order: Order, failures: int) -> None:
        """Makes the order true."""
        self._set(leader=order.leader, order=order.serial, phase=PREPARING, reason="", ready="")
        self._settle()
        run = next((marker.run for marker in (order.at, order.coming) if marker is not None), None)
        if run is not None:
            holding = self._holding_of(run)
            if failures >= 3:
                holding.discard_image()
            if holding.image is None:
                self._forget_ready()
                with self._stop.interruptible():
                    holding.recover()
        if order.at is not None and not self._holds(order.at):
            self._become(order.at)
        if order.coming is not None:
            self._get_ready(order.coming)
        self._told = ""
        self._set(phase=IDLE, reason="", ready=order.coming.state if order.coming else "")

    def _settle(self) -> None:
        """Takes what upkeep found or finished. What was prepared before leads from a base or image that goes."""
        if self._upkeep is not None and self._upkeep.has_news:
            self._forget_ready()
            with self._stop.interruptible():
                self._upkeep.settle()

    def _holding_of(self, run: str) -> Holding:
        if self._holding is None or self._documents is None or self._documents.run_id != run:
            self._let_go()
            options, self._upkeep_stop = self._options, Stop()
            self._documents = Documents(self._api, "island", run, self._store)
            self._holding = Holding(self._store, CheckpointEngine(), self._documents, options.image, self._say)
            self._upkeep = Upkeep(
                self._store, self._holding, self._status, options.upkeep, stop=self._upkeep_stop, say=self._say
            )
            self._upkeep.start()
        return self._holding

    @property
    def _own(self) -> Holding:
        assert self._holding is not None  # noqa: S101 - _obey makes it first
        return self._holding

    def _holds(self, marker: Marker) -> bool:
        held = self._own.held
        return held is not None and (held.run, held.epoch, held.version, held.state) == (
            marker.run, marker.epoch, marker.version, marker.state,
        )  # fmt: skip

    def _become(self, marker: Marker) -> None:
        """Holds a version that the leader has decided for. A kill in the middle is finished at the next start."""
        started = time.monotonic()
        self._get_ready(marker)
        self._set(phase=COMMITTING)
        assert self._ready is not None and self._documents is not None  # noqa: S101 - as _get_ready left it
        way = self._ready[1]
        if isinstance(way, Prepared):
            self._own.commit(way)
            self._own.confirm(way)
        elif isinstance(way, Marker):
            self._store.set_intent(way)
            self._own.recover()
        if not self._holds(marker):
            manifest = self._documents.manifest(marker.manifest, number=marker.version)
            self._own.relabel(manifest, marker.serial)  # raises unless it is the same state under another number
        self._forget_ready()
        self._own.tidy()
        if self._upkeep is not None:
            self._upkeep.wake()
        self._say(f"version {marker.version}  held and verified in {time.monotonic() - started:.2f} s")

    def _forget_ready(self) -> None:
        if self._ready is not None and isinstance(self._ready[1], Prepared):
            self._ready[1].close()
        self._ready = None

    def _get_ready(self, marker: Marker) -> None:
        """Fetches and proves what leads to a version; what is held is not touched."""
        if self._ready is not None and self._ready[0] == marker:
            return
        self._forget_ready()
        held = self._own.held
        if held is not None and held.state == marker.state:
            self._ready = marker, None
            return
        with self._stop.interruptible():
            entries = _after(held.state, marker) if held is not None else None
            if entries is not None:
                steps = [self._fetch(entry) for entry in entries]
                self._ready = marker, self._own.prepare(steps, marker.serial)
            else:
                self._ready = marker, self._whole(marker, held)

    def _whole(self, marker: Marker, held: Marker | None) -> Marker:
        """What the store needs to make the version from a base: its own where that leads there, else the leader's."""
        if held is not None:
            for count in range(len(held.log) + 1):
                at = held.log[count - 1].state if count else held.base.state
                if at == marker.state:
                    self._documents_of(marker)
                    return replace(marker, base=held.base, log=held.log[:count])
        for entry in marker.log:
            self._fetch(entry)
        self._documents_of(marker)
        return replace(marker, base=self._fetch_base(marker))

    def _documents_of(self, marker: Marker) -> None:
        assert self._documents is not None  # noqa: S101 - made with the holding
        self._documents.state(self._documents.manifest(marker.manifest, number=marker.version))

    def _fetch(self, entry: LogEntry) -> Step:
        """One patch, durable in the log."""
        assert self._documents is not None  # noqa: S101 - made with the holding
        manifest = self._documents.manifest(entry.manifest, number=entry.version)
        if not self._store.has_entry(entry):
            folder = self._store.incoming / entry.name
            step = PatchStep(0, entry.version, entry.manifest, entry.parts)
            fetch_parts(self._documents, step, folder)
            self._store.append(entry, folder)
        return Step(manifest, self._documents.state(manifest), entry)

    def _fetch_base(self, marker: Marker) -> Base:
        """The leader's base, proven by strong digests."""
        assert self._documents is not None  # noqa: S101 - made with the holding
        base = marker.base
        manifest = self._documents.manifest(marker.manifest, number=marker.version)
        aliases = self._documents.state(manifest).inventory.aliases
        place = self._store.base_name(base.version, base.state)
        if place.is_dir():
            try:
                open_proven(place, aliases, base.state)[0].close()
                return self._store.own_base(base.version, base.state)
            except (MailboatError, OSError) as error:
                self._say(f"The base {place} is damaged ({error}); it is fetched again.")
                remove(place)
        body = json.loads(self._api.request("GET", f"base/{base.state}", timeout=600).data)
        if not isinstance(body, list):
            raise StoreError("The leader's list of its base's files can't be understood; run the same release on both.")
        files = tuple(AnchorFile.parse(file) for file in body)
        incoming = self._store.incoming / f"base-{place.name}"
        fetch_anchor(self._documents, AnchorStep(base.version, marker.manifest, files), incoming)
        open_proven(incoming, aliases, base.state)[0].close()
        with self._stop.shielded():
            return self._store.adopt_base(incoming, base.version, base.state)


def _after(state: str, marker: Marker) -> tuple[LogEntry, ...] | None:
    """The patches that lead from a state to a version, None when its log does not pass there."""
    for count, entry in enumerate(marker.log):
        if entry.origin == state:
            return marker.log[count:]
    return None
