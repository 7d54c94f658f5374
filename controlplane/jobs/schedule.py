"""What runs by the clock. The schedule is code: nothing has to be remembered between runs, and two schedulers at once
do no harm, since every entry may run twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from django.db.models.functions import Now

from controlplane.jobs.models import ScheduledRun


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the schedule: every `seconds`, or daily `at` (hour, minute) UTC."""

    name: str
    task: str
    purpose: str
    seconds: float | None = None
    at: tuple[int, int] | None = None

    @property
    def when(self) -> str:
        """In words."""
        if self.at is not None:
            return f"daily at {self.at[0]:02}:{self.at[1]:02} UTC"
        seconds = self.seconds or 0.0
        return f"every {seconds / 60:g} min" if seconds >= 60 else f"every {seconds:g} s"


SCHEDULE = (
    Entry("sweep", "mailboat.sweep", "Takes jobs back whose worker is gone; wakes workers again.", seconds=3.0),
    Entry("heads", "mailboat.heads", "Renews the heads of channels before they expire.", seconds=60.0),
    Entry("staleness", "mailboat.staleness", "Notes who is beyond the staleness budget.", seconds=10.0),
    Entry("collect", "mailboat.collect", "Removes what runs no longer keep.", seconds=600.0),
    Entry("scrub", "mailboat.scrub", "Verifies every island that is there.", at=(3, 17)),
    Entry(
        "tidy",
        "mailboat.tidy",
        "Forgets ended sessions, full buckets, old answers, lost workers, old breaches, leases.",
        at=(4, 41),
    ),
)


def ran(name: str, work: Callable[[], object]) -> None:
    """Does the work of an entry and writes down when, how long and how it went. Raises what the work raises."""
    ScheduledRun.objects.update_or_create(name=name, defaults={"started_at": Now(), "seconds": None, "error": ""})
    began = time.monotonic()
    try:
        work()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"[:1000]
        ScheduledRun.objects.filter(name=name).update(seconds=time.monotonic() - began, error=said)
        raise
    ScheduledRun.objects.filter(name=name).update(seconds=time.monotonic() - began)
