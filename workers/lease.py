"""The lease of one job: a thread keeps it while the work goes on, and the work asks it whether to go on.

The work itself never touches the lease's row; it only says how far it is. A lease that can't be renewed in time counts
as lost on this side at least as early as on the sweeper's, so that two workers never record an outcome for one job.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

import structlog
from django.conf import settings
from django.db import DatabaseError, connections

from controlplane.jobs import services as jobs
from controlplane.jobs.models import Job

log = structlog.get_logger(__name__)

PROGRESS_SECONDS = 0.5
working = threading.Event()  # set while this process holds a lease
stopping = threading.Event()  # set when this process was told to end


class Stopped(Exception):  # noqa: N818 - not a fault
    """The work must end now."""


class Cancelled(Stopped):
    """Somebody asked to cancel the job."""


class LeaseLost(Stopped):
    """The job belongs to somebody else by now, or to nobody."""


class ShuttingDown(Stopped):
    """This process was told to end; another worker may have the job at once."""


class Lease:
    """Holds the lease of `job` for `owner` inside a `with` block."""

    def __init__(self, job: Job, owner: str) -> None:
        self.job = job
        self.owner = owner
        self._seconds = float(settings.MAILBOAT_LEASE_SECONDS)
        self._renewed = time.monotonic()
        self._end: type[Stopped] | None = None
        self._progress: tuple[int, int | None, str] | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"lease-{job.pk}", daemon=True)

    def __enter__(self) -> Self:
        working.set()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        working.clear()

    def check(self) -> None:
        """Raises Stopped when the work must not go on."""
        if self._end is not None:
            raise self._end
        if time.monotonic() - self._renewed > self._seconds:
            raise LeaseLost
        if stopping.is_set():
            raise ShuttingDown

    def progress(self, done: int, total: int | None, unit: str) -> None:
        """Says how far the work is. Raises Stopped like `check`."""
        self._progress = done, total, unit
        self.check()

    def _keep(self) -> None:
        try:
            due = time.monotonic() + self._seconds / 3
            while self._end is None and not self._over.wait(min(PROGRESS_SECONDS, self._seconds / 3)):
                if self._progress is not None or time.monotonic() >= due:
                    self._renew()
                    due = time.monotonic() + self._seconds / 3
            if self._progress is not None and self._end is None:
                self._renew()
        finally:
            connections.close_all()

    def _renew(self) -> None:
        asked = time.monotonic()
        said, self._progress = self._progress, None
        try:
            if said is None:
                state = jobs.renew(self.job.pk, self.owner)
            else:
                state = jobs.progress(self.job.pk, self.owner, *said)
        except jobs.LostLease:
            self._end = LeaseLost
        except DatabaseError as error:  # it may be back before the lease is over
            log.warning("lease not renewed", job=str(self.job.pk), error=str(error))
            connections.close_all()
        else:
            self._renewed = asked
            if state == Job.State.CANCELLING:
                self._end = Cancelled
