"""How far behind: in versions, and since when. What is read is bounded by the number of different versions that
islands hold, never by the number of versions in between.
"""

from __future__ import annotations

import uuid
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from django.db.models import OuterRef, Subquery

from controlplane.registry.models import Version


@dataclass(frozen=True, slots=True)
class Held:
    """A version that some island holds, with the moment at which the next one of its run became ready."""

    run: uuid.UUID
    number: int
    digest: str
    full_bytes: int | None
    next_ready_at: datetime | None


@dataclass(frozen=True, slots=True)
class Course:
    """What is needed to say how far behind an island is, for all islands that hold one of `held`, by its key.
    `failed` are the numbers per run, ascending, that never were a version to arrive at.
    """

    held: Mapping[int, Held] = field(default_factory=dict)
    failed: Mapping[uuid.UUID, list[int]] = field(default_factory=dict)

    def behind(self, held: Held, head: int | None, now: datetime) -> tuple[int | None, int | None]:
        """Versions and seconds from `held` to the head; 0 at the head or in front of it, None without a head."""
        if head is None:
            return None, None
        failed = self.failed.get(held.run, [])
        versions = head - held.number - (bisect_right(failed, head) - bisect_right(failed, held.number))
        if versions <= 0:
            return 0, 0
        since = held.next_ready_at
        return versions, 0 if since is None else max(0, int((now - since).total_seconds()))


def course(keys: Iterable[int]) -> Course:
    """The course of islands that hold the versions with these keys: two queries."""
    following = Version.objects.filter(run=OuterRef("run"), number__gt=OuterRef("number"), ready_at__isnull=False)
    found = Version.objects.filter(pk__in=set(keys)).annotate(
        next_ready_at=Subquery(following.order_by("number").values("ready_at")[:1])
    )
    held = {
        key: Held(*rest)
        for key, *rest in found.values_list("pk", "run", "number", "state_digest", "full_bytes", "next_ready_at")
    }
    oldest: dict[uuid.UUID, int] = {}
    for item in held.values():
        oldest[item.run] = min(item.number, oldest.get(item.run, item.number))
    failed: dict[uuid.UUID, list[int]] = defaultdict(list)
    if oldest:
        lost = Version.objects.filter(run__in=oldest, state=Version.State.FAILED, number__gt=min(oldest.values()))
        for run, number in lost.order_by("number").values_list("run", "number"):
            failed[run].append(number)
    return Course(held, failed)
