"""The loop of an island: enrol, recover, follow the channel, move from version to version, report.

A failure leaves the island on its version and is retried in the same process: first with the downloads fetched again,
then with the image rebuilt from the store (unless the download was what failed), then from the anchor. It must never
count a version as held before everything was scanned, and never give up while it may go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mailboat.client import Api
from mailboat.errors import (
    ApiError,
    Conflict,
    DamagedDownload,
    DigestMismatch,
    DiskFull,
    MailboatError,
    ManifestError,
    NotFound,
    StoreError,
    Unauthorised,
    Unreachable,
)
from mailboat.island.bucket import BucketApi
from mailboat.island.engines.engine import EngineError
from mailboat.island.enrolment import credential
from mailboat.island.export import Export
from mailboat.island.heads import HeadRefused, Heads
from mailboat.island.heartbeat import ERROR, IDLE, PREPARING, Heartbeat, Status
from mailboat.island.holding import Holding, Say
from mailboat.island.keys import Credentials
from mailboat.island.link import EmulatedLink
from mailboat.island.members.lead import Lead, LeadOptions
from mailboat.island.outbox import Outbox
from mailboat.island.sidecar.assembly import EngineOptions, Sidecar
from mailboat.island.sidecar.gate import CommitDeferred
from mailboat.island.sidecar.types import SyncView
from mailboat.island.stop import Stop, Stopped
from mailboat.island.store import Store
from mailboat.island.trip import Means, Trip
from mailboat.island.trust import Trust, Untrusted
from mailboat.island.upkeep import Upkeep, UpkeepOptions
from mailboat.manifest import Envelope, Head
from mailboat.patience import pause_before
from mailboat.replies import Enrolment
from mailboat.route import Documents
from mailboat.sizes import size

POLL_SECONDS = 30.0
LONGEST_BACKOFF = 30.0
OTHER_CHANNEL = "other_channel"
FETCH_AGAIN, REBUILD, AFRESH, CYCLE = 1, 2, 3, 8  # failures (modulo CYCLE) after which each remedy is used


@dataclass(frozen=True)
class IslandOptions:
    """How an island is run. ``image``, ``base`` and ``export`` are folders; ``link_mbit`` emulates a slower link;
    ``publisher_keys`` (hex) are the only ones whose versions it takes; ``blob_url`` is the store that it follows alone
    while the control plane is away.
    """

    server: str
    project: str
    store: Path
    token: str | None = None
    image: Path | None = None
    base: Path | None = None
    export: Path | None = None
    once: bool = False
    link_mbit: float | None = None
    ca_file: str | None = None
    poll_seconds: float = POLL_SECONDS
    publisher_keys: tuple[str, ...] = ()
    blob_url: str | None = None
    upkeep: UpkeepOptions = UpkeepOptions()  # noqa: RUF009 - frozen
    serving: EngineOptions = EngineOptions()  # noqa: RUF009 - frozen
    members: LeadOptions = LeadOptions()  # noqa: RUF009 - frozen


class NewerHead(Exception):  # noqa: N818 - a change of mind, not an error
    """A newer head appeared while an update was prepared."""


def run_island(options: IslandOptions, *, stop: Stop, say: Say) -> None:
    """Runs an island until it is told to stop, or after a catch-up with ``once``.

    Raises MailboatError for what no retry can mend: a token that is used up, a store in use, a certificate that is not
    trusted.
    """
    store = Store(options.store)
    api = _client(options, stop)
    sidecar = lead = None
    try:
        shared = str(options.image.absolute()) if options.serving.urls and options.image else None
        lead = Lead(options.members, store, image=shared, stop=stop, say=say)
        sidecar = Sidecar(options.serving, stop=stop, say=say, members=lead.members)
        enrolled = credential(store, api, options.token, once=options.once, engine=sidecar.engine, stop=stop, say=say)
        api.token = enrolled.credential
        if isinstance(api, BucketApi):
            api.run_id = enrolled.run_id
        credentials = Credentials(store, api)
        island = Island(
            options, store, api, sidecar=sidecar, enrolled=enrolled, credentials=credentials, stop=stop, say=say
        )
        try:
            island.run()
        finally:
            island.close()
    except Stopped:
        say("stopped")
    finally:
        if sidecar is not None:
            sidecar.close()
        if lead is not None:
            lead.close()
        store.close()
        api.close()


def _client(options: IslandOptions, stop: Stop) -> Api:
    server, project, ca_file = options.server, options.project, options.ca_file
    if options.blob_url is None:
        return Api(server, project, ca_file=ca_file, sleep=stop.sleep)
    return BucketApi(server, project, ca_file=ca_file, sleep=stop.sleep, blob_url=options.blob_url)


class Island:
    """An enrolled island from its start to its stop."""

    def __init__(
        self,
        options: IslandOptions,
        store: Store,
        api: Api,
        *,
        sidecar: Sidecar,
        enrolled: Enrolment,
        credentials: Credentials,
        stop: Stop,
        say: Say,
    ) -> None:
        self._options = options
        self._api = api
        self._store = store
        self._enrolled = enrolled
        self._stop = stop
        self._say = say
        self._status = Status(phase=PREPARING)
        self._trust = Trust(store, enrolled.run_id, options.publisher_keys, ask=self._ask, say=say)
        if enrolled.keys is not None:
            self._trust.heard(enrolled.keys)
        documents = self._documents = Documents(api, enrolled.run, enrolled.run_id, store, self._trust)
        link = EmulatedLink(options.link_mbit, sleep=stop.sleep) if options.link_mbit else None
        self._sidecar = sidecar
        sidecar.view = self._view
        self._holding = Holding(store, sidecar.engine, documents, options.image, say, members=sidecar.members)
        self._means = Means(api, documents, store, self._holding, self._status, stop, link, options.base, say)
        self._channel = enrolled.channel
        self._heads = Heads(store, enrolled.run_id, enrolled.channel, trust=self._trust)
        self._outbox = Outbox(store, api, enrolled.island)
        self._export = Export(options.export) if options.export else None
        self._upkeep = Upkeep(store, self._holding, self._status, options.upkeep, stop=stop, say=say)
        self._heartbeat = Heartbeat(
            api,
            enrolled.island,
            self._holding,
            self._status,
            serving=sidecar,
            credentials=credentials,
            trust=self._trust,
            outbox=self._outbox,
            channel=enrolled.channel,
            seconds=enrolled.heartbeat_seconds,
            stop=stop,
            say=say,
        )
        self._head: tuple[Envelope, str] | None = None
        self._trip: Trip | None = None
        self._moved = False
        self._failures = 0  # decide the remedy
        self._troubles = 0  # decide the pause
        self._suspected = False  # whether the last failure may come of what is held
        self._told: tuple[int | None, str] | None = None

    def run(self) -> None:
        """Recovers, then follows the channel. Raises Stopped when told to stop."""
        options, enrolled = self._options, self._enrolled
        self._say(
            f"island {enrolled.name} follows {enrolled.run}/{enrolled.channel} of {options.project} at {options.server}"
        )
        self._heartbeat.start()
        try:
            with self._stop.interruptible():
                self._judge_store()
                self._holding.recover()
                if self._trust.changed:
                    self._holding.doubt()
            self._status.phase = IDLE
        except MailboatError as error:
            self._fail(error)
        if held := self._holding.held:
            self._say(f"version {held.version}  held and verified after the start")
            self._outbox.after_start(held)
            self._write_export()
        self._heartbeat.wake()
        if not options.once:
            self._upkeep.start()
        while not (self._follow() and options.once):
            self._stop.check()
        with self._stop.interruptible():
            self._upkeep.finish()

    def close(self) -> None:
        """Ends the heartbeat and lets go of the image."""
        self._stop.set()
        self._upkeep.join(1.0)
        self._heartbeat.join(1.0)
        self._holding.close()

    # -- keys

    def _ask(self, purpose: str, public_key: str) -> Envelope | None:
        """The document that vouches for a key, as the control plane has it."""
        return self._api.key_document(self._enrolled.run, purpose, public_key)

    def _judge_store(self) -> None:
        """Where whoever starts the island names the publishers, gives up what none of them has signed: it was accepted
        by other keys, or none.
        """
        for read in (self._store.intent, self._store.marker) if self._trust.given else ():
            try:
                marker = read()
                if marker is not None and marker.run == self._enrolled.run_id:
                    self._documents.manifest(marker.manifest, number=marker.version, held=True)
            except StoreError:
                continue  # damaged: `recover` says so
            except (ManifestError, NotFound) as error:
                self._say(f"what is held is given up: {error}")
                self._store.forget()

    # -- following the channel

    def _follow(self) -> bool:
        """Waits for news once and acts on it; whether the island caught up and said so."""
        try:
            with self._stop.interruptible():
                self._send_reports()
                self._turn()
                self._upkeep.settle()
                self._read_head(self._patience())
                self._send_reports()  # a control plane that is back hears what is held before the next move is tried
                self._upkeep.settle()
            if not self._heartbeat.enabled:
                with self._stop.interruptible():
                    self._stop.sleep(min(1.0, self._options.poll_seconds))
                return False
            if self._head is None:
                return False
            self._move()
            with self._stop.interruptible():
                self._send_reports()
                self._audit()
        except Conflict as error:
            if error.code != OTHER_CHANNEL:
                self._fail(error)
            else:  # pinned or set free a moment ago: the next heartbeat says where to go
                self._heartbeat.wake()
                with self._stop.interruptible():
                    self._stop.sleep(0.2)
            return False
        except (MailboatError, OSError) as error:
            self._fail(error)
            return False
        return True

    def _send_reports(self) -> None:
        """Sends what is kept. Where the blob store stands in for the control plane, it waits until that is back."""
        if not isinstance(self._api, BucketApi):
            self._outbox.send()
        elif not self._api.away:
            try:
                self._outbox.send()
            except Unreachable:
                self._api.away = True

    def _turn(self) -> None:
        """Follows the channel that the control plane named last. What is held stays until that channel's head is
        read.
        """
        if self._channel == self._heartbeat.channel:
            return
        self._channel = self._heartbeat.channel
        home = self._channel == self._enrolled.channel
        self._heads = Heads(self._store, self._enrolled.run_id, self._channel, trust=self._trust, home=home)
        self._head = None

    def _patience(self) -> float:
        """How long to wait for a newer head: after a failure only until the next try."""
        if self._head is None or self._troubles == 0:
            return self._options.poll_seconds
        return min(LONGEST_BACKOFF, self._options.poll_seconds, 2.0 ** min(self._troubles - 1, 5) - 1)

    def _read_head(self, wait: float) -> bool:
        """Reads the channel's head; whether it is news. A refused one raises, and what is held stays."""
        serial = Head.from_bytes(self._head[0].payload).serial if self._head else None
        etag = self._head[1] if self._head else None
        answer = self._api.head(self._enrolled.run, self._channel, after=serial, wait=wait, etag=etag)
        if answer is None:
            if self._head is None and wait:
                self._stop.sleep(min(1.0, wait))  # a server that has no head yet may answer at once
            return False
        self._sidecar.note_head(self._heads.accept(answer[0]).version)
        self._head = answer
        return True

    def _move(self) -> None:
        """Goes to the newest head; when a newer one appears before the first commit, goes there instead, once."""
        try:
            self._go(self._look_again)
        except NewerHead:
            self._go(None)
        if self._trip is not None or self._troubles:
            self._heartbeat.wake()
        self._failures = self._troubles = 0
        self._told = self._trip = None
        self._status.phase, self._status.reason, self._status.alarm = IDLE, "", ""

    def _go(self, look_again: Callable[[], None] | None) -> None:
        assert self._head is not None  # noqa: S101 - _follow reads it first
        head = self._heads.accept(self._head[0])  # again: it may have expired while a failure was waited out
        self._remedy()
        held = self._holding.held
        target = (head.run, head.epoch, head.version, head.state)
        if held is not None and (held.run, held.epoch, held.version, held.state) == target:
            return
        afresh = self._failures % CYCLE == AFRESH
        trip = self._trip = Trip(self._means, head, afresh=afresh, look_again=look_again)
        trip.go()
        self._outbox.put(trip.report())
        self._moved = True
        self._holding.tidy()
        self._upkeep.wake()
        self._write_export()
        self._sidecar.note_bytes(trip.bytes)
        self._say(f"version {head.version}  {size(trip.bytes)}  {trip.total:.2f} s  verified")

    def _look_again(self) -> None:
        """Raises NewerHead; a control plane that is away does not hold a commit up."""
        assert self._trip is not None  # noqa: S101 - called from within a trip
        try:
            newer = self._read_head(0)
        except (Unreachable, ApiError, HeadRefused):
            return
        if newer and self._head and Head.from_bytes(self._head[0].payload).manifest != self._trip.head.manifest:
            raise NewerHead

    def _remedy(self) -> None:
        """What earlier failures ask for before the next try; also brings a dropped image back."""
        step = self._failures % CYCLE
        if step == FETCH_AGAIN:
            self._store.drop_incoming()
        with self._stop.interruptible():
            if step == REBUILD and self._suspected:
                self._holding.discard_image()
            if step == AFRESH:
                self._holding.doubt()
            if self._holding.image is None and self._holding.marker is not None:
                self._status.phase = PREPARING
                self._holding.recover()
                if held := self._holding.held:  # it may have finished what a failed commit began
                    self._outbox.after_start(held)

    # -- afterwards

    def _audit(self) -> None:
        """Scans the engine's live memory after a move, when the report is out and requests run again."""
        if self._moved:
            self._moved = False
            self._holding.audit()

    def _write_export(self) -> None:
        """Exports the version held; a failure is said and tried again with the next version or start."""
        held, image = self._holding.held, self._holding.image
        if self._export is None or held is None or image is None:
            return
        try:
            with self._stop.interruptible():
                self._export.write(held, image)
        except (MailboatError, OSError) as error:
            self._say(f"export of version {held.version}: {error}")

    def _fail(self, error: Exception) -> None:
        """Notes a failure, says and reports it once, and waits. With ``once`` it is raised when the remedies are used
        up.
        """
        sentence = str(error)
        waits = (Unreachable, DiskFull, HeadRefused, Untrusted, ApiError, EngineError, CommitDeferred)
        passing = isinstance(error, waits)
        # A passing trouble is waited out and keeps what was downloaded; anything else calls for the next remedy.
        self._failures += 0 if passing else 1
        self._troubles += 1
        self._suspected = not isinstance(error, DamagedDownload)
        self._status.phase, self._status.reason = ERROR, sentence
        if isinstance(error, (ManifestError, DigestMismatch)):
            self._status.alarm = sentence
        self._heartbeat.wake()
        trip = self._trip
        news = (None if trip is None else trip.head.version, sentence)
        if self._told != news:
            self._told = news
            self._say(f"failed: {sentence}")
            if trip is not None and not isinstance(error, Unreachable):
                self._outbox.try_send(trip.report(error=sentence))
        if self._options.once and (isinstance(error, Unauthorised) or self._troubles > self._api.attempts):
            raise error
        with self._stop.interruptible():
            self._nap(pause_before(min(self._troubles, 8)))

    def _nap(self, seconds: float) -> None:
        """Sleeps, unless a request for a newer version wakes the loop."""
        self._sidecar.wake.clear()
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._sidecar.wake.is_set():
            self._stop.sleep(min(0.05, left))

    def _view(self) -> SyncView:
        return SyncView(self._status.phase, self._status.reason)
