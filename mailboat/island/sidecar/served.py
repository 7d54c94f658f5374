"""The engines behind the gate, as the one thing that holds the island's weights.

The order of a commit, and why: everything that may fail is staged while requests run; the gate closes before the drain,
or new requests would keep it from ending; nothing is written before every engine stands still, so that a commit can be
given up until then; where an engine reloads from the image, the image is written first; the sums are compared while
the engines stand still; the version flips before they go on, so that no token of the new weights is stamped with the
old version; the gate opens last. A pause is a lease: every way out resumes the engine or fences it. A fenced engine
gets no traffic until its weights agree again.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from mailboat.digest import State, Sums
from mailboat.errors import DigestMismatch, MailboatError, listed
from mailboat.image import Image, Overlay
from mailboat.island.engines.engine import EngineAsleep, EngineBusy, EngineError, EngineUnreachable, Server, Staged
from mailboat.island.members.roster import Alone, Members
from mailboat.island.sidecar.gate import CommitDeferred, ThreadDoor
from mailboat.island.sidecar.metrics import Metrics
from mailboat.island.sidecar.types import Applied, CommitMode
from mailboat.island.sidecar.upstreams import Upstream
from mailboat.island.stop import Stop

Say = Callable[[str], None]
WATCH_SECONDS = 1.0
STOP_SECONDS = 15.0  # that a stop waits for what engines were asked to do
# Looks without an answer in time after which an engine counts as hung; the second while its server says it is well.
MISSED, MISSED_WHILE_WELL = 3, 12


@dataclass(eq=False)
class Berth:
    """An engine's two sides: the control side and the one that gets traffic."""

    server: Server
    upstream: Upstream
    missed: int = 0
    proven: bool = False  # its live sums can be read and agreed after the last load


class Served:
    """All engines of an island, moved together. One thread commits; another watches."""

    def __init__(
        self,
        berths: Sequence[Berth],
        door: ThreadDoor,
        metrics: Metrics,
        *,
        mode: CommitMode,
        say: Say,
        stop: Stop,
        watch_seconds: float = WATCH_SECONDS,
        members: Members | None = None,
    ) -> None:
        self.name = berths[0].server.kind
        self._berths = tuple(berths)
        self._door = door
        self._metrics = metrics
        self._mode = mode
        self._say = say
        self._members = members or Alone()
        self._stop = stop
        self._lock = threading.RLock()
        self._current: tuple[Image, Applied] | None = None
        self._instance = secrets.token_hex(3)  # with a counter it makes a prefix cache's keys unique
        self._turns = 0
        self._pool = ThreadPoolExecutor(max(2, len(berths)), "engines")
        self._closed = threading.Event()
        self._kick = threading.Event()
        self._watch_seconds = watch_seconds
        self._watcher = threading.Thread(target=self._watch, name="engine watchdog", daemon=True)
        self._hurrier = threading.Thread(target=self._hurry, name="stop of engines", daemon=True)

    # -- as the holding's engine

    @property
    def fence(self) -> str:
        """Why nothing is served; empty when some engine is."""
        if any(berth.upstream.open for berth in self._berths):
            return ""
        return "; ".join(dict.fromkeys(berth.upstream.fence for berth in self._berths))

    def load(self, image: Image, applied: Applied) -> None:
        """Brings every engine to what the image holds, by its live sums where they can be read, else by a reload."""
        with self._stop.shielded(), self._lock:  # a signal must not leave an engine paused
            applied = self._next(applied)
            reached = self._each(self._berths, lambda berth: berth.server.look(), "does not answer")
            reached = self._each(reached, self._learn, "does not answer")
            if not reached:
                raise EngineUnreachable(self.fence)
            with self._door.quiet(applied, self._mode):
                reached = self._each(reached, self._forget, "kept its prefix cache")
                loaded, _ = self._swap(reached, lambda berth: self._bring(berth, image), applied)
            if not loaded:
                raise EngineError(self.fence)
            self._current = (image, applied)

    def commit(self, image: Image, overlay: Overlay, applied: Applied) -> None:
        """Moves all open engines, then the image, to the overlay's target."""
        with self._stop.shielded(), self._lock:  # a signal must not leave an engine paused
            applied = self._next(applied)
            berths = [berth for berth in self._berths if berth.upstream.open]
            if not berths:
                raise CommitDeferred(f"No engine can take the update: {self.fence}")
            started = time.monotonic()
            staged = self._stage(berths, image, overlay)
            self._metrics.prepare.observe(time.monotonic() - started)
            move = _Move(image, overlay, staged, self._say, self._members)
            try:
                with self._door.quiet(applied, self._mode):
                    self._members.require_ready(applied.state)
                    self._reset_caches(berths)
                    moved, pause = self._swap(berths, move.one, applied)
                if not move.begun:
                    raise CommitDeferred(f"No engine stood still for version {applied.version}: {self.fence}")
            except CommitDeferred:
                self._metrics.commits.labels("given_up").inc()
                self._each([berth for berth in berths if berth in staged], lambda b: b.server.drop(staged[b]), "")
                raise
            if not moved:
                self._current = None
                self._metrics.commits.labels("failed").inc()
                raise EngineError(f"Version {applied.version} reached no engine: {self.fence}")
            self._metrics.commits.labels("applied").inc()
            self._metrics.paused(pause)
            move.write_image()  # where no engine reloaded from it, it follows after the resume
            self._current = (image, applied)

    def relabel(self, image: Image, applied: Applied) -> None:
        """The same bytes under another number: labels move, nothing stands still."""
        with self._lock:
            applied = self._next(applied)
            berths = [berth for berth in self._berths if berth.upstream.open]
            with self._door.quiet(applied, self._mode):
                self._each(berths, lambda berth: berth.server.label(applied.label), "took no label")
                self._door.flip(applied)
            self._current = (image, applied)

    def verify(self, image: Image) -> None:
        """Scans the image."""
        image.verify_sums()

    def audit(self, image: Image) -> None:
        """Scans live memory where it can be read; an engine that differs is fenced and loaded again."""
        with self._lock:
            self._each(
                [berth for berth in self._berths if berth.upstream.open and berth.proven],
                lambda berth: self._prove(berth, image),
                "does not hold what was written",
            )

    def let_go(self) -> None:
        """The image is about to be closed: nothing is repaired from it any more."""
        with self._lock:
            self._current = None

    # -- steps

    def _learn(self, berth: Berth) -> None:
        """What the build can do of an engine that may be another one than before."""
        berth.upstream.keyed = berth.server.keyed_routes() if self._mode is CommitMode.IN_PLACE else frozenset()

    def _next(self, applied: Applied) -> Applied:
        self._turns += 1
        return replace(applied, turn=f"{self._instance}{self._turns}")

    def _stage(self, berths: Sequence[Berth], image: Image, overlay: Overlay) -> dict[Berth, Staged]:
        """What each engine of way B has mapped; the others reload, as do all whose workers are on several hosts."""
        found: dict[Berth, Staged] = {}
        if not self._members.alone:
            return found

        def stage(berth: Berth) -> None:
            staged = berth.server.stage(image, overlay) if berth.proven else None
            if staged is not None:
                found[berth] = staged

        for berth, error in self._run(berths, stage):
            if error is not None:
                self._say(f"engine {berth.server.url} reloads from the image: {error}")
        return found

    def _forget(self, berth: Berth) -> None:
        """In `drain` mode an engine forgets what it computed from other weights, while nothing is resident."""
        if self._mode is CommitMode.DRAIN:
            berth.server.reset_cache()

    def _reset_caches(self, berths: Sequence[Berth]) -> None:
        """A refusal comes before anything was touched."""
        for _, error in self._run(berths, self._forget):
            if error is not None:
                raise CommitDeferred(f"A prefix cache was not reset, so nothing was changed: {error}")

    def _swap(
        self, berths: Sequence[Berth], apply: Callable[[Berth], None], applied: Applied
    ) -> tuple[list[Berth], float]:
        """Pause, apply, flip, label, resume; those that made it, and how many seconds they stood still.

        Raises CommitDeferred when an engine would not pause.
        """
        resident = bool(self._door.gate.active)
        with self._lease(berths) as lease:
            paused = self._pause(berths, lease, resident=resident)
            started = time.monotonic()
            for berth in paused:
                berth.server.expect(applied.label)
            moved = self._each(paused, apply, "was not updated")
            if moved:
                self._door.flip(applied)
                moved = self._each(moved, lambda berth: berth.server.label(applied.label), "took no label")
                moved = self._each(moved, lambda berth: berth.server.resume(), "did not go on")
            seconds = time.monotonic() - started
            lease.difference_update(moved)
            for berth in moved:
                self._open(berth)
        return moved, seconds

    def _pause(self, berths: Sequence[Berth], lease: set[Berth], *, resident: bool) -> list[Berth]:
        failed = []
        for berth, error in self._run(berths, lambda berth: berth.server.pause(resident=resident)):
            if error is not None:
                failed.append((berth, error))
        refused = []
        for berth, error in failed:
            if isinstance(error, EngineAsleep):  # nothing was asked of it, and a resume would set it to work asleep
                self._close(berth, str(error))
                lease.discard(berth)
                continue
            # Whether it stands still is not known: it goes on, or it is fenced.
            if self._each([berth], lambda berth: berth.server.resume(), f"neither paused ({error}) nor went on"):
                lease.discard(berth)
                refused.append(str(error))
        if refused:
            standing = [berth for berth in berths if berth in lease and berth.upstream.open]
            lease.difference_update(self._each(standing, lambda berth: berth.server.resume(), "did not go on"))
            raise CommitDeferred(f"An engine would not pause, so nothing was changed: {refused[0]}")
        return [berth for berth in berths if berth in lease and not any(berth is bad for bad, _ in failed)]

    @contextmanager
    def _lease(self, berths: Sequence[Berth]) -> Iterator[set[Berth]]:
        """Engines that may stand still; whoever is still in it at the end, for whatever reason, is fenced."""
        lease = set(berths)
        try:
            yield lease
        finally:
            for berth in lease:
                if berth.upstream.open:
                    self._close(berth, "its pause did not end well")

    def _bring(self, berth: Berth, image: Image) -> None:
        """One paused engine to what the image holds."""
        self._members.require_at(image.digest)
        berth.proven = False
        live = berth.server.live_sums(image)
        if live is None or not np.array_equal(live, image.state.sums):
            berth.server.reload(image)
            live = berth.server.live_sums(image)
        if live is not None:
            _compare(live, image.state)
            berth.proven = True

    def _prove(self, berth: Berth, image: Image) -> None:
        live = berth.server.live_sums(image)
        if live is not None:
            _compare(live, image.state)

    # -- fences

    def _open(self, berth: Berth) -> None:
        berth.missed = 0
        berth.upstream.fence = ""

    def _close(self, berth: Berth, why: str) -> None:
        """Fences an engine: no traffic, and what runs in it is cut, since nobody knows which weights it runs with."""
        if berth.upstream.open or berth.upstream.fence != why:
            self._say(f"engine {berth.server.url} is fenced: {why}")
        berth.upstream.fence = why
        self._door.cut_all(berth.upstream, "The engine was taken out of service; send the request again.")
        self._kick.set()

    def _each(self, berths: Sequence[Berth], step: Callable[[Berth], object], what: str) -> list[Berth]:
        """Those for which the step succeeded; the others are fenced."""
        good = []
        for berth, error in self._run(berths, step):
            if error is None:
                good.append(berth)
            elif what:
                asleep = isinstance(error, EngineAsleep)  # which says all there is to say
                self._close(berth, str(error) if asleep else f"The engine at {berth.server.url} {what}: {error}")
        return good

    def _run(
        self, berths: Sequence[Berth], step: Callable[[Berth], object]
    ) -> list[tuple[Berth, MailboatError | OSError | None]]:
        def guarded(berth: Berth) -> MailboatError | OSError | None:
            try:
                step(berth)
            except (MailboatError, OSError) as error:
                return error
            return None

        # One engine needs no other thread, which would only be one more to wait for while it stands still.
        found = map(guarded, berths) if len(berths) == 1 else self._pool.map(guarded, berths)
        return list(zip(berths, found, strict=True))

    # -- the watchdog

    def start(self) -> None:
        """Starts watching."""
        self._watcher.start()
        self._hurrier.start()

    def suspect(self, upstream: object, why: str) -> None:
        """The proxy met trouble with an engine: look at it now."""
        del upstream, why
        self._kick.set()

    def close(self) -> None:
        """Stops watching."""
        self._closed.set()
        self._kick.set()
        if self._watcher.is_alive():
            self._watcher.join(5)
        self._pool.shutdown(wait=False)

    def _hurry(self) -> None:
        """Once the island is told to stop, nothing is waited for that may never come: not for the requests that hold a
        commit up, and not for long for an engine. One that is given up in a commit stays paused, and fenced by the end
        of this process; the next start brings it back.
        """
        while not self._stop.wait(self._watch_seconds):
            if self._closed.is_set():
                return
        if not self._closed.is_set():
            self._door.hurry()
        if not self._closed.wait(STOP_SECONDS):
            for berth in self._berths:
                berth.server.abandon()

    def _watch(self) -> None:
        while not self._closed.is_set():
            self._kick.wait(self._watch_seconds)
            self._kick.clear()
            if self._closed.is_set():
                return
            if self._lock.acquire(blocking=False):  # a commit looks after its engines itself
                try:
                    for berth in self._berths:
                        self._look_at(berth)
                except Exception as error:  # noqa: BLE001 - the watchdog must outlive a defect
                    self._say(f"engine watchdog: {error}")
                finally:
                    self._lock.release()
            if any(not berth.upstream.open for berth in self._berths):
                self._closed.wait(min(0.25, self._watch_seconds))  # a kick by every refused request is one too many

    def _look_at(self, berth: Berth) -> None:
        try:
            label = berth.server.look().label
        except EngineError as error:
            gone = isinstance(error, EngineUnreachable) and not error.hung
            berth.missed += 1
            limit = MISSED_WHILE_WELL if isinstance(error, EngineBusy) else MISSED
            if berth.upstream.open and (gone or berth.missed >= limit):
                self._close(berth, str(error))
            return
        berth.missed = 0
        if self._current is None:
            return
        image, applied = self._current
        if berth.upstream.open and label not in {None, applied.label}:
            self._close(
                berth, f"The engine at {berth.server.url} started anew or was changed by others (it says {label})."
            )
        if not berth.upstream.open:
            self._repair(berth, image, applied)

    def _repair(self, berth: Berth, image: Image, applied: Applied) -> None:
        """Brings one fenced engine back to the version held, beside others that serve."""
        try:
            self._learn(berth)
            self._forget(berth)
            with self._lease([berth]) as lease:
                berth.server.pause(resident=False)
                berth.server.expect(applied.label)
                self._bring(berth, image)
                berth.server.label(applied.label)
                berth.server.resume()
                lease.clear()
        except (MailboatError, OSError) as error:
            if berth.upstream.fence != (why := f"The engine at {berth.server.url} was not brought back: {error}"):
                self._close(berth, why)
            return
        if self._door.gate.applied is None:
            self._door.flip(applied)
        self._open(berth)
        self._say(f"engine {berth.server.url} serves version {applied.version} again")


class _Move:
    """One commit's writing: way B where it was staged, else and if that fails the image and a reload."""

    def __init__(
        self,
        image: Image,
        overlay: Overlay,
        staged: dict[Berth, Staged],
        say: Say,
        members: Members,
    ) -> None:
        self._image = image
        self._overlay = overlay
        self._before = image.state
        self._staged = staged
        self._say = say
        self._members = members
        self._stayed: EngineError | None = None  # why a member did not follow the decision
        self._lock = threading.Lock()
        self.begun = False  # whether anything may have been touched

    def write_image(self) -> None:
        """Writes the images, the members' first; repeating it is harmless. Raises EngineError when a member did not
        follow: the decision stays, and the island goes on when it has.
        """
        with self._lock:
            if self._stayed is None:
                try:
                    self._members.commit()
                except EngineError as stayed:
                    self._stayed = stayed
            if self._stayed is not None:
                raise self._stayed
            self._image.commit(self._overlay)

    def one(self, berth: Berth) -> None:
        """Moves one paused engine."""
        self.begun = True
        staged = self._staged.get(berth)
        if staged is not None:
            try:
                change = berth.server.write(staged, self._image)
                _compare(self._before.sums + change, self._overlay.target)
                return
            except (EngineError, DigestMismatch) as error:
                self._say(f"engine {berth.server.url} is reloaded, since it was not written in place: {error}")
        self.write_image()
        berth.server.reload(self._image)
        if berth.proven:
            live = berth.server.live_sums(self._image)
            berth.proven = live is not None
            if live is not None:
                _compare(live, self._overlay.target)


def _compare(sums: Sums, state: State) -> None:
    wrong = np.flatnonzero((sums != state.sums).any(axis=1))
    if len(wrong):
        names = listed([state.inventory.tensors[index].name for index in wrong])
        raise DigestMismatch(f"The engine's bytes of {names} do not have the promised sums.")
