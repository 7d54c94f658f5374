"""One trip: from the version held to the one that a head names, by the route that the control plane plans.

Everything is fetched before anything moves, and everything is proven before it is written. It must never go back to an
older version than the one held unless the head asks for that or nothing sound is held.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mailboat.checkpoint.files import Checkpoint
from mailboat.client import Api
from mailboat.digest import State, measure
from mailboat.durable import require_space
from mailboat.errors import MailboatError, ManifestError, StoreError
from mailboat.island.anchors import Gathering, ReferenceFailed
from mailboat.island.heartbeat import COMMITTING, FETCHING, PREPARING, Status
from mailboat.island.holding import Holding, Prepared, Say, Step
from mailboat.island.link import EmulatedLink
from mailboat.island.marker import Base, LogEntry
from mailboat.island.stop import Stop
from mailboat.island.store import Store
from mailboat.manifest import Head, Manifest
from mailboat.replies import AnchorStep, PatchStep, Plan
from mailboat.route import Documents, fetch_parts, open_proven, plan_route

PATIENCE, LONGEST_WAIT = 4, 900.0  # times what was foretold, and seconds, for a patch that is being built


@dataclass(frozen=True)
class Means:
    """What a trip travels with."""

    api: Api
    documents: Documents
    store: Store
    holding: Holding
    status: Status
    stop: Stop
    link: EmulatedLink | None
    local: Path | None
    say: Say
    told: set[str] = field(default_factory=set)

    def say_once(self, line: str) -> None:
        """Says what stays true over the tries."""
        if line not in self.told:
            self.told.add(line)
            self.say(line)


@dataclass(frozen=True)
class AnchorLeg:
    """A fetched anchor: where its files lie now, and their place as a base."""

    step: AnchorStep
    manifest: Manifest
    found: Path
    place: Path


@dataclass(frozen=True)
class PatchLeg:
    """A fetched patch, durable in the log; ``signed``: its manifest says what the publisher says."""

    step: PatchStep
    manifest: Manifest
    entry: LogEntry
    signed: bool


class Trip:
    """A move to ``head``. ``afresh`` asks for the anchor's route. ``look_again`` is called once before the first
    commit.
    """

    def __init__(self, means: Means, head: Head, *, afresh: bool, look_again: Callable[[], None] | None) -> None:
        held = means.holding.held
        self.head = head
        self.origin = held and held.version
        self.bytes = 0
        self.route: list[str] = []
        self._means = means
        self._afresh = afresh
        self._look_again = look_again
        self._clock = _Phases(means.status, means.stop)

    @property
    def total(self) -> float:
        """Seconds since the trip began."""
        return self._clock.total

    def report(self, *, error: str | None = None) -> dict[str, Any]:
        """The body of a sync report: a verified success, or a failure with its sentence."""
        return {
            "from_version": self.origin,
            "version": self.head.version,
            "digest": self.head.state,
            "outcome": "applied" if error is None else "failed",
            "verified": error is None,
            "error": error,
            "bytes": self.bytes,
            "seconds": self._clock.seconds(),
            "route": self.route,
        }

    def go(self) -> None:
        """Makes the trip; afterwards the head's version is held. Raises what went wrong: then a sound older one still
        is.
        """
        means, head = self._means, self.head
        with self._clock.phase("fetch", FETCHING):
            manifest = means.documents.manifest(head.manifest, number=head.version)
            if (manifest.epoch, manifest.state) != (head.epoch, head.state):
                raise ManifestError(f"Head and manifest of version {head.version} do not agree; it is refused.")
            means.documents.state(manifest)
        held = means.holding.held
        if held is None or held.state != manifest.state:
            self._travel()
        held = means.holding.held
        if held is not None and held.state == manifest.state and held.manifest != head.manifest:
            with self._clock.phase("verify", COMMITTING):
                means.holding.relabel(manifest, head.serial)
            self.route.append(f"same state as {held.version}")
        held = means.holding.held
        if held is None or (held.version, held.state) != (head.version, head.state):
            raise StoreError(f"The plan did not lead to version {head.version}.")

    # -- fetching

    def _travel(self) -> None:
        with _closing(self._local_base()) as local:
            with self._clock.phase("fetch", FETCHING):
                digest = local[1].digest if local else None
                plan = self._plan(digest, references=not self._afresh)
            if plan.wait_seconds:
                plan = self._wait_for_shorter(digest, plan.wait_seconds)
            with self._clock.phase("fetch", FETCHING):
                try:
                    legs = self._fetch_all(plan, digest)
                except ReferenceFailed as error:
                    self._means.say(f"{error}; another route is taken")
                    plan = self._plan(digest, references=False)
                    legs = self._fetch_all(plan, digest)
            if local is not None and plan.origin is not None:
                self._seed_locally(plan.origin, *local)
        patches: list[PatchLeg] = []
        for leg in legs:
            if isinstance(leg, AnchorLeg):
                self._seed(leg)
                patches.clear()  # what led to the state before an anchor is of no use after it
            else:
                patches.append(leg)
        if patches:
            self._patch(patches)

    def _plan(self, local: str | None, *, references: bool) -> Plan:
        means, head = self._means, self.head
        held = means.holding.held
        run = means.documents.run
        derived = not self._afresh  # after failures, which they may have caused, the publisher's own patches alone
        if self._afresh or (held is None and local is None):
            plan = plan_route(means.api, run, held=None, to=head.version, references=references, derived=derived)
            if held is None or (isinstance(plan.steps[0], AnchorStep) and plan.steps[0].version > held.version):
                return plan
        at = held.state if held else local
        return plan_route(means.api, run, held=at, to=head.version, references=references, derived=derived)

    def _wait_for_shorter(self, local: str | None, seconds: float) -> Plan:
        """The plan after the time that a shorter route needs to be built, and some patience; whichever it is, it is
        walked then.
        """
        self._means.say(f"waits {seconds:.0f} s for a shorter route")
        until = time.monotonic() + min(PATIENCE * seconds, LONGEST_WAIT)
        with self._clock.phase("wait", FETCHING):
            while True:
                self._means.stop.sleep(min(seconds, LONGEST_WAIT))
                plan = self._plan(local, references=not self._afresh)
                seconds = plan.wait_seconds or 0.0
                if not seconds or time.monotonic() + seconds > until:
                    return plan

    def _fetch_all(self, plan: Plan, local: str | None) -> list[AnchorLeg | PatchLeg]:
        held = self._means.holding.held
        at = held.state if held else local
        legs: list[AnchorLeg | PatchLeg] = []
        for step in plan.steps:
            number = step.version if isinstance(step, AnchorStep) else step.to
            if isinstance(step, AnchorStep):  # it is served before the way goes on, so its publisher counts
                manifest = self._means.documents.manifest(step.manifest, number=number)
                legs.append(self._fetch_anchor(step, manifest))
                at = manifest.state
                continue
            manifest, signed = self._means.documents.waypoint(step.manifest, number=number)
            if number == plan.to and manifest.state != self.head.state:
                raise ManifestError(f"The plan to version {plan.to} leads to another state; it is refused.")
            if at is None:
                raise ManifestError(
                    f"The plan to version {plan.to} starts with a patch, but nothing is held; it is refused."
                )
            legs.append(self._fetch_patch(step, manifest, at, signed=signed))
            at = manifest.state
        return legs

    def _fetch_anchor(self, step: AnchorStep, manifest: Manifest) -> AnchorLeg:
        means = self._means
        place = means.store.base_name(manifest.number, manifest.state)
        incoming = means.store.incoming / f"base-{place.name}"
        gathering = Gathering(
            means.documents, means.store, incoming,
            local=means.local and means.local.absolute(), link=means.link,
            holds_nothing=means.holding.marker is None, say=means.say_once,
        )  # fmt: skip
        self.bytes += gathering.fetch(step)
        return AnchorLeg(step, manifest, incoming, place)

    def _fetch_patch(self, step: PatchStep, manifest: Manifest, origin: str, *, signed: bool) -> PatchLeg:
        means = self._means
        entry = LogEntry(
            name=means.store.entry_name(manifest.number, step.parts),
            version=manifest.number,
            epoch=manifest.epoch,
            origin=origin,
            state=manifest.state,
            manifest=step.manifest,
            inventory=manifest.inventory.sha256,
            digests=manifest.digests.sha256,
            parts=step.parts,
        )
        if not means.store.has_entry(entry):
            folder = means.store.incoming / entry.name
            needed = sum(part.size for part in step.parts)
            require_space(means.store.incoming, needed, f"The patch to version {manifest.number}")
            self.bytes += fetch_parts(means.documents, step, folder, link=means.link)[1]
            means.store.append(entry, folder)
        return PatchLeg(step, manifest, entry, signed)

    def _local_base(self) -> tuple[Checkpoint, State] | None:
        """The checkpoint given with --base and its measured state, when nothing is held; an unusable one is said and
        left alone.
        """
        means = self._means
        if means.local is None or means.holding.held is not None or self._afresh:
            return None
        with self._clock.phase("prepare", PREPARING):
            try:
                checkpoint = Checkpoint.open(means.local.absolute())
            except MailboatError as error:
                means.say_once(f"the local base can't be used, the anchor is fetched instead: {error}")
                return None
            try:
                return checkpoint, measure(checkpoint)
            except BaseException:
                checkpoint.close()
                raise

    # -- moving

    def _seed_locally(self, version: int, checkpoint: Checkpoint, state: State) -> None:
        means = self._means
        with self._clock.phase("fetch", FETCHING):
            info = means.api.version(means.documents.run, version)
            if info.manifest is None:
                raise ManifestError(f"Version {version} has no manifest yet.")
            manifest = means.documents.manifest(info.manifest, number=version)
        if manifest.state != state.digest:
            raise ManifestError(f"The local base is not version {version}, although the control plane says so.")
        base = Base(path=str(checkpoint.path), version=version, state=state.digest)
        with self._clock.phase("commit", COMMITTING):
            means.holding.seed(manifest, self.head.serial, checkpoint, state, base)
        self.route.append(f"local base {version}")

    def _seed(self, leg: AnchorLeg) -> None:
        means, manifest = self._means, leg.manifest
        with self._clock.phase("prepare", PREPARING):
            aliases = means.documents.state(manifest).inventory.aliases
            checkpoint, state = open_proven(leg.found, aliases, manifest.state)
            checkpoint.close()
        with self._clock.phase("commit", COMMITTING, interruptible=False):
            base = means.store.adopt_base(leg.found, manifest.number, manifest.state)
        with self._clock.phase("commit", COMMITTING), Checkpoint.open(leg.place, aliases=aliases) as checkpoint:
            means.holding.seed(manifest, self.head.serial, checkpoint, state, base)
        self.route.append(f"anchor {leg.step.version}")

    def _patch(self, legs: list[PatchLeg]) -> None:
        means = self._means
        with self._clock.phase("prepare", PREPARING):
            steps = [Step(leg.manifest, means.documents.state(leg.manifest), leg.entry, leg.signed) for leg in legs]
            prepared = means.holding.prepare(steps, self.head.serial)
        try:
            if self._look_again is not None:
                with self._clock.phase("fetch", PREPARING):
                    self._look_again()
                self._look_again = None
            self._commit(prepared)
        finally:
            prepared.close()
        self.route += [f"patch {leg.step.origin}-{leg.step.to}" for leg in legs]

    def _commit(self, prepared: Prepared) -> None:
        # The one part that a signal does not cut short: a kill is survived all the same.
        with self._clock.phase("commit", COMMITTING, interruptible=False):
            self._means.holding.commit(prepared)
        with self._clock.phase("verify", COMMITTING):
            self._means.holding.confirm(prepared)


@dataclass
class _Phases:
    """Seconds per phase, and what the heartbeat says meanwhile."""

    status: Status
    stop: Stop
    spent: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("fetch", "prepare", "commit", "verify"), 0.0)
    )
    started: float = field(default_factory=time.monotonic)

    @property
    def total(self) -> float:
        return time.monotonic() - self.started

    def seconds(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in {**self.spent, "total": self.total}.items()}

    @contextmanager
    def phase(self, name: str, shown: str, *, interruptible: bool = True) -> Iterator[None]:
        started = time.monotonic()
        self.status.phase = shown
        try:
            if interruptible:
                with self.stop.interruptible():
                    yield
            else:
                yield
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + time.monotonic() - started


@contextmanager
def _closing(local: tuple[Checkpoint, State] | None) -> Iterator[tuple[Checkpoint, State] | None]:
    try:
        yield local
    finally:
        if local is not None:
            local[0].close()
