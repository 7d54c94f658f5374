"""How far behind islands were over time: one strip per island, from its accepted sync reports and the moments at which
versions became ready. Claims of heartbeats have no part in it.
"""

from __future__ import annotations

import uuid
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import F, Max, OuterRef, Q, Subquery

from controlplane.dashboard import wording
from controlplane.fleet.models import Island, SyncReport
from controlplane.registry.models import Version

BUCKETS = 72
WINDOWS = {"1h": timedelta(hours=1), "6h": timedelta(hours=6), "1d": timedelta(days=1), "7d": timedelta(days=7)}
WINDOW_WORDS = {"1h": "last hour", "6h": "6 hours", "1d": "24 hours", "7d": "7 days"}
LEVELS = (
    (0, "at the head"),
    (1, "1 behind"),
    (4, "2 to 4"),
    (9, "5 to 9"),
    (None, "10 or more"),
)


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of time with one level: place and width in per cent of the strip. Level None: nothing held yet."""

    level: int | None
    x: float
    width: float


@dataclass(frozen=True, slots=True)
class Strip:
    """One island's way through the window. `at_head` is the share of the time, of what is known."""

    island: uuid.UUID
    stretches: tuple[Stretch, ...]
    now: int | None
    worst: int | None
    at_head: str

    @property
    def words(self) -> str:
        """The strip for those who do not see it."""
        if self.worst is None:
            return "No verified version in this time"
        if self.worst == 0:
            return "At the head all the time"
        return f"At most {wording.plural(self.worst, 'version')} behind; at the head for {self.at_head} of the time"


def level(behind: int) -> int:
    """Which colour so many versions behind get."""
    return next(index for index, (most, _) in enumerate(LEVELS) if most is None or behind <= most)


def strips(islands: Sequence[tuple[uuid.UUID, uuid.UUID]], window: timedelta, now: datetime) -> dict[uuid.UUID, Strip]:
    """The strips of islands, given as pairs of island and run. Three queries, however many there are."""
    begin = now - window
    moments = [begin + window * (index + 1) / BUCKETS for index in range(BUCKETS)]
    ready = _ready({run for _, run in islands}, begin)
    held = _held([island for island, _ in islands], begin)
    return {island: _strip(island, moments, ready[run], held[island]) for island, run in islands}


def _ready(runs: set[uuid.UUID], begin: datetime) -> dict[uuid.UUID, list[tuple[datetime, int]]]:
    """When which version became ready, per run: those of the window and the last one before it."""
    found: dict[uuid.UUID, list[tuple[datetime, int]]] = defaultdict(list)
    before = Version.objects.filter(run__in=runs, ready_at__lte=begin).order_by()
    for run, number in before.values_list("run").annotate(Max("number")):
        found[run].append((begin, number))
    chosen = Version.objects.filter(run__in=runs, ready_at__gt=begin).order_by("ready_at")
    for run, at, number in chosen.values_list("run", "ready_at", "number"):
        if at is not None:
            found[run].append((at, number))
    return found


def _held(islands: list[uuid.UUID], begin: datetime) -> dict[uuid.UUID, list[tuple[datetime, int]]]:
    """When which island proved to hold which version: in the window, and the last one before it."""
    before = SyncReport.objects.filter(island=OuterRef("pk"), accepted=True, reported_at__lte=begin).order_by("-id")
    found: dict[uuid.UUID, list[tuple[datetime, int]]] = defaultdict(list)
    first = Island.objects.filter(pk__in=islands).annotate(last=Subquery(before.values("to_version")[:1]))
    for island, number in first.order_by().values_list("pk", "last"):
        if number is not None:
            found[island].append((begin, number))
    reports = SyncReport.objects.filter(Q(island__in=islands), accepted=True, reported_at__gt=begin).order_by("id")
    for island, at, number in reports.values_list(F("island"), "reported_at", "to_version"):
        found[island].append((at, number))
    return found


def _strip(
    island: uuid.UUID,
    moments: Sequence[datetime],
    ready: Sequence[tuple[datetime, int]],
    held: Sequence[tuple[datetime, int]],
) -> Strip:
    times, numbers = [at for at, _ in ready], sorted(number for _, number in ready)
    arrivals = [at for at, _ in held]
    behind: list[int | None] = []
    for moment in moments:
        known, arrived = bisect_right(times, moment), bisect_right(arrivals, moment)
        if not known or not arrived:
            behind.append(None)
            continue
        head = max(number for _, number in ready[max(0, known - 8) : known])  # ready in the order of their numbers
        at = held[arrived - 1][1]
        behind.append(max(0, bisect_right(numbers, head) - bisect_right(numbers, at)))
    known_ones = [count for count in behind if count is not None]
    return Strip(
        island=island,
        stretches=_stretches([None if count is None else level(count) for count in behind]),
        now=behind[-1] if behind else None,
        worst=max(known_ones, default=None),
        at_head=wording.share(known_ones.count(0), len(known_ones)),
    )


def _stretches(levels: Sequence[int | None]) -> tuple[Stretch, ...]:
    found: list[Stretch] = []
    step = 100 / len(levels)
    begin = 0
    for index in range(1, len(levels) + 1):
        if index == len(levels) or levels[index] != levels[begin]:
            found.append(Stretch(levels[begin], round(begin * step, 2), round((index - begin) * step, 2)))
            begin = index
    return tuple(found)
