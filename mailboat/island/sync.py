"""The loop of an island: enrol, recover, follow the channel, move from version to version, report.

A failure leaves the island on its version and is retried in the same process: first the same route again, then with the image
rebuilt from the store, then from the anchor. It must never count a version as held before everything was scanned, and never
give up while it may go on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mailboat.checkpoint.files import Checkpoint
from mailboat.client import Api, pause_before
from mailboat.digest import measure
from mailboat.errors import ApiError, DiskFull, MailboatError, ManifestError, StoreError, Unauthorised, Unreachable
from mailboat.island import heartbeat as beats
from mailboat.island.engines.checkpoint import CheckpointEngine
from mailboat.island.enrolment import credential
from mailboat.island.export import Export
from mailboat.island.heads import HeadRefused, Heads
from mailboat.island.holding import Holding, Prepared, Say
from mailboat.island.link import EmulatedLink
from mailboat.island.marker import Base
from mailboat.island.outbox import Outbox
from mailboat.island.stop import Stop, Stopped
from mailboat.island.store import Store
from mailboat.manifest import Envelope, Head, Manifest
from mailboat.replies import AnchorStep, PatchStep
from mailboat.route import Documents, fetch_anchor, fetch_parts, open_proven, plan_route

POLL_SECONDS = 30
LONGEST_BACKOFF = 30
SAME_ROUTE, REBUILT, ANCHOR = 1, 2, 3  # failures after which the next, stronger remedy is used


@dataclass(frozen=True)
class IslandOptions:
    """How an island is run. ``image``, ``base`` and ``export`` are folders; ``link_mbit`` emulates a slower link."""

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


@dataclass
class Trip:
    """One move to a head: where from, what travelled, which way, seconds per phase."""

    head: Head
    origin: int | None
    bytes: int = 0
    route: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the block's time to a phase."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started

    def report(self, *, outcome: str, verified: bool, error: str | None) -> dict[str, Any]:
        """The body of a sync report."""
        total = time.monotonic() - self.started
        return {
            "from_version": self.origin,
            "version": self.head.version,
            "digest": self.head.state,
            "outcome": outcome,
            "verified": verified,
            "error": error,
            "bytes": self.bytes,
            "seconds": {name: round(value, 4) for name, value in {**self.seconds, "total": total}.items()},
            "route": self.route,
        }


class NewerHead(Exception):  # noqa: N818 - a change of mind, not an error
    """A newer head appeared while an update was prepared."""


class Island:
    """An island from its start to its stop. `run` returns when it was told to stop, or after a catch-up with ``once``."""

    def __init__(self, options: IslandOptions, *, stop: Stop, say: Say) -> None:
        self.options = options
        self.stop = stop
        self.say = say
        self.status = beats.Status()
        self.engine = CheckpointEngine()
        self.store = Store(options.store)
        self.api = Api(options.server, options.project, ca_file=options.ca_file, sleep=stop.sleep)
        self.link = EmulatedLink(options.link_mbit, sleep=stop.sleep) if options.link_mbit else None
        self.export = Export(options.export) if options.export else None
        self._head: tuple[Envelope, str] | None = None
        self._failures = 0
        self._last_failure: tuple[int, str] | None = None

    # -- start and stop

    def run(self) -> None:
        """Runs until told to stop. Raises MailboatError for what no retry can mend (a used token, a store in use)."""
        try:
            self._start()
            self._follow()
        except Stopped:
            self.say("stopped")
        finally:
            self.close()

    def close(self) -> None:
        """Ends the heartbeat and lets go of image and store."""
        self.stop.set()
        if hasattr(self, "heartbeat"):
            self.heartbeat.join(1.0)
        if hasattr(self, "holding"):
            self.holding.close()
        self.store.close()
        self.api.close()

    def _start(self) -> None:
        options = self.options
        enrolled = credential(self.store, self.api, options.token, self.engine, self.stop, self.say)
        self.enrolled = enrolled
        self.api.token = enrolled.credential
        self.documents = Documents(self.api, enrolled.run, enrolled.run_id, self.store)
        self.heads = Heads(self.store, enrolled.run_id, enrolled.channel)
        self.holding = Holding(self.store, self.engine, self.documents, options.image, self.say)
        self.heartbeat = beats.Heartbeat(
            self.api, enrolled.island, self.holding, self.status, enrolled.heartbeat_seconds, self.stop, self.say
        )
        self.outbox = Outbox(self.store, self.api, enrolled.island)
        self.say(f"island {enrolled.name} follows {enrolled.run}/{enrolled.channel} of {options.project} at {options.server}")
        self.status.phase = beats.PREPARING
        self.heartbeat.start()
        with self.stop.interruptible():
            self.holding.recover()
        self.status.phase = beats.IDLE
        if held := self.holding.held:
            self.say(f"version {held.version}  held and verified after the start")
            self.outbox.after_start(held)
            self._export()
        self.heartbeat.wake()

    # -- following the channel

    def _follow(self) -> None:
        away = 0
        while True:
            try:
                self.stop.check()
                with self.stop.interruptible():
                    self.outbox.send()
                    news = self._read_head(self._patience())
                away = 0
            except (Unreachable, ApiError) as error:
                away = self._stay_away(error, away)
                continue
            except MailboatError as error:
                self._fail(error)
                news = None
            if not self.heartbeat.enabled:
                self.stop.sleep(min(1.0, self.options.poll_seconds))
                continue
            if (news or self._failures) and self._head is not None and self._move() and self.options.once:
                return

    def _patience(self) -> float:
        """How long to wait for a newer head: at most until the next retry after a failure."""
        if self._head is None or self._failures == 0:
            return self.options.poll_seconds
        return min(LONGEST_BACKOFF, self.options.poll_seconds, 2.0 ** (self._failures - 1) - 1)

    def _stay_away(self, error: MailboatError, away: int) -> int:
        """Waits after a refused or failed call; the version held goes on being served."""
        if away == 0:
            self.say(f"control plane: {error}")
        if self.options.once and (isinstance(error, Unauthorised) or away + 1 >= self.api.attempts):
            raise error
        self.status.reason = str(error)
        self.stop.sleep(pause_before(away + 1))
        return away + 1

    def _read_head(self, wait: float) -> bool:
        """Reads the channel's head; whether it is news. A refused one raises, and what is held stays."""
        serial = Head.from_bytes(self._head[0].payload).serial if self._head else None
        etag = self._head[1] if self._head else None
        answer = self.api.head(self.enrolled.run, self.enrolled.channel, after=serial, wait=wait, etag=etag)
        if self._head is None and answer is None:
            self.stop.sleep(min(1.0, self.options.poll_seconds))  # a server that has no head yet may answer at once
        if answer is None:
            return False
        self.heads.accept(answer[0])
        self._head = answer
        return True

    # -- one move

    def _move(self) -> bool:
        """Goes to the newest head; whether it is held now. Failures are reported and counted, never raised (but for `once`)."""
        changed_mind = False
        while True:
            try:
                self._go(may_retarget=not changed_mind)
            except NewerHead:
                changed_mind = True
                continue
            except (MailboatError, OSError) as error:
                self._fail(error)
                return False
            self._failures = 0
            self._last_failure = None
            self.status.phase, self.status.reason = beats.IDLE, ""
            self.heartbeat.wake()
            with self.stop.interruptible():
                try:
                    self.outbox.send()
                except (Unreachable, ApiError) as error:
                    self.say(f"report: {error}")
                    return not self.options.once
            return True

    def _go(self, *, may_retarget: bool) -> None:
        assert self._head is not None  # noqa: S101 - _follow reads it first
        head = self.heads.accept(self._head[0])  # again: it may have expired while a failure was waited out
        held = self.holding.held
        if held is not None and (held.run, held.epoch, held.version, held.state) == (
            head.run, head.epoch, head.version, head.state,
        ):  # fmt: skip
            return
        trip = Trip(head, held and held.version)
        self.trip = trip
        self._remedy()
        self._walk(trip, may_retarget=may_retarget)
        held = self.holding.held
        if held is None or (held.version, held.state) != (head.version, head.state):
            raise StoreError(f"The plan did not lead to version {head.version}.")
        self.outbox.put(trip.report(outcome="applied", verified=True, error=None))
        self.holding.tidy()
        self._export()
        total = time.monotonic() - trip.started
        self.say(f"version {head.version}  {human_bytes(trip.bytes)}  {total:.2f} s  verified")

    def _remedy(self) -> None:
        """What earlier failures ask for before the next try; also brings a dropped image back."""
        if self._failures >= SAME_ROUTE:
            self.store.drop_incoming()
        if self._failures == REBUILT:
            self.holding.discard_image()
        if self.holding.image is None and self.holding.marker is not None:
            self.status.phase = beats.PREPARING
            with self.stop.interruptible():
                self.holding.recover()

    def _walk(self, trip: Trip, *, may_retarget: bool) -> None:
        head = trip.head
        self.status.phase = beats.FETCHING
        with trip.phase("fetch"), self.stop.interruptible():
            manifest = self.documents.manifest(head.manifest, number=head.version)
            if (manifest.epoch, manifest.state) != (head.epoch, head.state):
                raise ManifestError(f"Head and manifest of version {head.version} do not agree; it is refused.")
            self.documents.state(manifest)
        if not self._holds(manifest):
            with trip.phase("fetch"), self.stop.interruptible():
                local = None if self.holding.held or self._failures >= ANCHOR else self._local_base()
                plan = plan_route(self.api, self.enrolled.run, held=self._from_digest(local), to=head.version)
            try:
                if local is not None and plan.origin is not None:
                    self._seed_locally(trip, plan.origin, *local)
            finally:
                if local is not None:
                    local[0].close()
            for step in plan.steps:
                if isinstance(step, AnchorStep):
                    self._seed_from_anchor(trip, step)
                else:
                    self._patch(trip, step, may_retarget=may_retarget)
                    may_retarget = False
        held = self.holding.held
        if held is not None and held.state == manifest.state and held.manifest != head.manifest:
            with trip.phase("verify"), self.stop.interruptible():
                self.holding.relabel(manifest, head.serial)
                trip.route.append(f"same state as {held.version}")

    def _holds(self, manifest: Manifest) -> bool:
        held = self.holding.held
        return held is not None and held.state == manifest.state

    def _from_digest(self, local: tuple[Checkpoint, Any] | None) -> str | None:
        if self._failures >= ANCHOR:
            return None
        if held := self.holding.held:
            return held.state
        return None if local is None else str(local[1].digest)

    def _local_base(self) -> tuple[Checkpoint, Any] | None:
        """The checkpoint given with --base and its measured state; one that can't be read is said and left alone."""
        if self.options.base is None:
            return None
        try:
            checkpoint = Checkpoint.open(self.options.base.absolute())
            return checkpoint, measure(checkpoint)
        except MailboatError as error:
            self.say(f"the local base can't be used, the anchor is fetched instead: {error}")
            return None

    def _seed_locally(self, trip: Trip, version: int, checkpoint: Checkpoint, state: Any) -> None:
        with trip.phase("fetch"), self.stop.interruptible():
            info = self.api.version(self.enrolled.run, version)
            if info.manifest is None:
                raise ManifestError(f"Version {version} has no manifest yet.")
            manifest = self.documents.manifest(info.manifest, number=version)
        if manifest.state != state.digest:
            raise ManifestError(f"The local base is not version {version}, although the control plane says so.")
        base = Base(path=str(checkpoint.path), version=version, state=state.digest)
        self.status.phase = beats.COMMITTING
        with trip.phase("commit"), self.stop.interruptible():
            self.holding.seed(manifest, trip.head.serial, checkpoint, state, base)
        trip.route.append(f"local base {version}")

    def _seed_from_anchor(self, trip: Trip, step: AnchorStep) -> None:
        self.status.phase = beats.FETCHING
        with trip.phase("fetch"), self.stop.interruptible():
            manifest = self.documents.manifest(step.manifest, number=step.version)
            state = self.documents.state(manifest)
            place = self.store.base_name(manifest.number, manifest.state)
            incoming = self.store.incoming / f"base-{place.name}"
            if not place.is_dir() or self._failures >= ANCHOR:
                trip.bytes += fetch_anchor(self.documents, step, incoming, link=self.link)
        self.status.phase = beats.PREPARING
        with trip.phase("prepare"), self.stop.interruptible():
            found = incoming if incoming.is_dir() else place
            checkpoint, measured = open_proven(found, state.inventory.aliases, manifest.state)
        with checkpoint:
            self.status.phase = beats.COMMITTING
            with trip.phase("commit"):
                base = Base(str(place), manifest.number, manifest.state)
                if found == incoming:
                    base = self.store.adopt_base(incoming, manifest.number, manifest.state)
            with trip.phase("commit"), self.stop.interruptible():
                self.holding.seed(manifest, trip.head.serial, checkpoint, measured, base)
        trip.route.append(f"anchor {step.version}")

    def _patch(self, trip: Trip, step: PatchStep, *, may_retarget: bool) -> None:
        self.status.phase = beats.FETCHING
        with trip.phase("fetch"), self.stop.interruptible():
            manifest = self.documents.manifest(step.manifest, number=step.to)
            target = self.documents.state(manifest)
            entry = self.holding.entry_of(manifest, step)
            if not self.store.has_entry(entry):
                folder = self.store.incoming / entry.name
                trip.bytes += fetch_parts(self.documents, step, folder, link=self.link)[1]
                self.store.append(entry, folder)
        self.status.phase = beats.PREPARING
        with trip.phase("prepare"), self.stop.interruptible():
            prepared = self.holding.prepare(manifest, target, entry, trip.head.serial)
        try:
            if may_retarget:
                self._look_again(trip)
            self._commit(trip, prepared)
        finally:
            prepared.close()
        trip.route.append(f"patch {step.origin}-{step.to}")

    def _look_again(self, trip: Trip) -> None:
        """Goes to the newest head, once, before committing; a control plane that is away does not hold the commit up."""
        with trip.phase("fetch"), self.stop.interruptible():
            try:
                newer = self._read_head(0)
            except (Unreachable, ApiError, HeadRefused):
                return
        if newer and self._head and Head.from_bytes(self._head[0].payload).manifest != trip.head.manifest:
            raise NewerHead

    def _commit(self, trip: Trip, prepared: Prepared) -> None:
        self.status.phase = beats.COMMITTING
        with trip.phase("commit"):
            self.holding.commit(prepared)
        with trip.phase("verify"), self.stop.interruptible():
            self.holding.confirm(prepared)

    # -- afterwards

    def _export(self) -> None:
        """Exports the version held; a failure is said and tried again with the next version or start."""
        held, image = self.holding.held, self.holding.image
        if self.export is None or held is None or image is None:
            return
        try:
            with self.stop.interruptible():
                self.export.write(held, image)
        except (MailboatError, OSError) as error:
            self.say(f"export of version {held.version}: {error}")

    def _fail(self, error: Exception) -> None:
        """Notes a failure, says it once, reports it, and decides how strong the next remedy is."""
        sentence = str(error)
        passing = isinstance(error, (Unreachable, DiskFull, HeadRefused)) or (
            isinstance(error, ApiError) and error.status >= 500  # noqa: PLR2004
        )
        # A passing trouble is waited out; anything else calls for the next remedy.
        self._failures = max(1, self._failures) if passing else self._failures + 1
        self.status.phase, self.status.reason = beats.ERROR, sentence
        self.heartbeat.wake()
        trip = getattr(self, "trip", None)
        version = trip.head.version if trip else -1
        if self._last_failure != (version, sentence):
            self._last_failure = (version, sentence)
            self.say(f"failed: {sentence}")
            if trip is not None and not isinstance(error, Unreachable):
                self.outbox.try_send(trip.report(outcome="failed", verified=False, error=sentence))
        if self.options.once and self._failures > ANCHOR + 1:
            raise error
        with self.stop.interruptible():
            self.stop.sleep(pause_before(min(self._failures, 3)))


def human_bytes(count: float) -> str:
    """A number of bytes for people."""
    if count < 1024:  # noqa: PLR2004
        return f"{int(count)} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:  # noqa: PLR2004
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"
