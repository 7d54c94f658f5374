"""Upkeep of the store, in one thread behind everything else: is what lies there still right, and is the log short?

Everything is read by strong digests (`scrub`) once after each start and then slowly, again and again. A log that has
grown too long is compacted: the image's state is written as the next base while the island moves on, and `settle` swaps
the marker between two trips. A damaged base or log is mended in the same way, a damaged image from base and log. It
must never write what the marker names, and never move the marker from this thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mailboat.checkpoint.inventory import Inventory
from mailboat.checkpoint.side_files import SideFile
from mailboat.checkpoint.source import Bytes
from mailboat.checkpoint.writing import write_checkpoint
from mailboat.durable import remove, require_space
from mailboat.errors import DigestMismatch, MailboatError
from mailboat.island import scrub
from mailboat.island.background import Pace, step_back
from mailboat.island.heartbeat import Status
from mailboat.island.holding import Holding, Say
from mailboat.island.marker import Marker
from mailboat.island.stop import Stop, Stopped
from mailboat.island.store import Store
from mailboat.snapshot import Snapshot

RETRY_SECONDS = 60.0
LOOK_SECONDS = 1.0  # until something is held
BESIDE = 16 << 20  # bytes of a base beside its tensors: headers, index, side files


@dataclass(frozen=True)
class UpkeepOptions:
    """``rate``: bytes a second that upkeep reads or writes, ``start_rate``: in the check after a start. The log is
    compacted beyond ``log_share`` of the image's bytes or ``log_entries`` patches. Everything is checked again
    ``check_seconds`` after the last time.
    """

    rate: float = 64e6
    start_rate: float = 512e6
    log_share: float = 0.5
    log_entries: int = 128
    check_seconds: float = 6 * 3600.0


@dataclass(frozen=True)
class _Rewritten:
    """A finished checkpoint of the version that ``origin`` names, and why it was written."""

    origin: Marker
    folder: Path
    why: str


class Upkeep:
    """The thread, and what the thread that moves the island does with its findings."""

    def __init__(
        self, store: Store, holding: Holding, status: Status, options: UpkeepOptions, *, stop: Stop, say: Say
    ) -> None:
        self._store = store
        self._holding = holding
        self._status = status
        self._options = options
        self._stop = stop
        self._say = say
        self._wake = threading.Event()
        self._rewritten: _Rewritten | None = None
        self._image_is_damaged = False  # set after the finding, so that what mends it also takes the finding back
        self._mend = ""  # why the base is written anew however short the log is
        self._check_at = self._rewrite_at = time.monotonic()
        self._start_rate: float | None = options.start_rate
        self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)
        remove(store.rewrite)

    def start(self) -> None:
        """Checks everything once, then as the options say."""
        self._thread.start()

    def wake(self) -> None:
        """The island moved: the log may have grown too long."""
        self._wake.set()

    def join(self, timeout: float) -> None:
        """Waits for the thread after the stop was asked for; what it was writing is of no use."""
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    # -- by the thread that moves the island

    @property
    def has_news(self) -> bool:
        """Whether `settle` has something to do."""
        return self._image_is_damaged or (self._rewritten is not None and self._holding.held is not None)

    def settle(self) -> None:
        """Between two trips: rebuilds an image that was found damaged, swaps the marker to a base that was finished."""
        if self._image_is_damaged:
            self._holding.discard_image()
            self._image_is_damaged = False
            self._holding.recover()
            self._status.finding = self._mend
        done = self._rewritten
        if done is None or self._holding.held is None:
            return
        if self._holding.rebase(done.origin, done.folder):
            self._mend = self._status.finding = ""
            self._say(f"version {done.origin.version} is the base from now on: {done.why}")
        self._rewritten = None
        self._wake.set()

    def finish(self) -> None:
        """Compacts here and now when that is due: for an island that ends after a catch-up."""
        if why := self._due():
            self._rewrite(why, Pace(None, self._stop))
            self.settle()

    # -- the thread

    def _run(self) -> None:
        step_back()
        try:
            while True:
                self._stop.check()
                self._wake.clear()
                if time.monotonic() >= self._rewrite_at and (why := self._due()):
                    if not self._succeeds(self._rewrite, why, Pace(self._options.rate, self._stop)):
                        self._rewrite_at = time.monotonic() + RETRY_SECONDS
                elif time.monotonic() >= self._check_at and self._holding.held is not None:
                    if not self._succeeds(self._check):
                        self._check_at = time.monotonic() + RETRY_SECONDS
                else:
                    self._wake.wait(self._idle())
        except Stopped:
            return

    def _idle(self) -> float:
        if self._holding.held is None:
            return LOOK_SECONDS
        until = min(self._check_at, self._rewrite_at) if self._due() else self._check_at
        return max(0.05, until - time.monotonic())

    def _succeeds(self, work: Callable[..., None], *arguments: object) -> bool:
        try:
            work(*arguments)
        except (MailboatError, OSError) as error:
            self._note(f"Upkeep of the store failed and is repeated: {error}")
            return False
        return True

    def _note(self, finding: str) -> None:
        self._status.finding = finding
        self._say(finding)

    # -- checking

    def _check(self) -> None:
        started, first = time.monotonic(), self._start_rate
        pace = Pace(first or self._options.rate, self._stop)
        if damage := scrub.damage_of_image(self._holding, pace):
            self._note(f"{damage}; it is rebuilt from base and log.")
            self._image_is_damaged = True
        else:
            damage = scrub.damage_of_base(self._store, self._holding, pace)
            damage = damage or scrub.damage_of_log(self._store, self._holding, pace)
            if damage:
                self._mend = f"{damage}; a new base is written from the image."
                self._note(self._mend)
            elif self._status.finding and not self._mend:
                self._status.finding = ""
        self._start_rate = None
        if not damage and first is not None:
            self._say(f"strong digests of image, base and log agree ({time.monotonic() - started:.2f} s)")
        # What was mended is looked at again soon: a disk that fails does not fail once.
        self._check_at = time.monotonic() + (RETRY_SECONDS if damage else self._options.check_seconds)

    # -- compacting

    def _due(self) -> str:
        """Why the base should be written anew; empty when it should not."""
        marker, image = self._holding.held, self._holding.image
        if marker is None or image is None or self._rewritten is not None or self._image_is_damaged:
            return ""
        if self._mend:
            return self._mend
        size = sum(part.size for entry in marker.log for part in entry.parts)
        full = image.inventory.full_bytes
        if len(marker.log) > self._options.log_entries or size > self._options.log_share * full:
            return f"the log had {len(marker.log)} patches of {size:,} bytes"
        return ""

    def _rewrite(self, why: str, pace: Pace) -> None:
        begun = self._holding.snapshot()
        if begun is None:  # in the middle of a commit; the next wake-up asks again
            self._wake.wait(LOOK_SECONDS)
            return
        marker, snapshot, layout = begun
        folder = self._store.rewrite / self._store.base_name(marker.version, marker.state).name
        try:
            self._store.rewrite.mkdir(exist_ok=True)
            needed = snapshot.inventory.full_bytes + BESIDE
            require_space(self._store.rewrite, needed, f"The next base (version {marker.version})")
            write_checkpoint(_Paced(snapshot, pace), folder, layout=layout, expect=snapshot.state)
        except DigestMismatch as error:
            self._note(f"The image is damaged ({error}); it is rebuilt from base and log.")
            self._image_is_damaged = True
            return
        finally:
            self._holding.end_snapshot(snapshot)
        self._rewritten = _Rewritten(marker, folder, why)
        if self._status.finding and not self._mend:
            self._status.finding = ""


class _Paced:
    """A snapshot that is read at a bounded rate."""

    def __init__(self, snapshot: Snapshot, pace: Pace) -> None:
        self._snapshot, self._pace = snapshot, pace

    @property
    def inventory(self) -> Inventory:
        return self._snapshot.inventory

    @property
    def side_files(self) -> tuple[SideFile, ...]:
        return self._snapshot.side_files

    def read(self, index: int, offset: int, out: Bytes) -> None:
        self._pace.take(out.size)
        self._snapshot.read(index, offset, out)

    def read_side(self, path: str) -> bytes:
        return self._snapshot.read_side(path)
