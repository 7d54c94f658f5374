"""Reads of the fleet. One query per table, however many islands there are; ages by the database's clock."""

from __future__ import annotations

import uuid
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from operator import or_

from django.conf import settings
from django.db.models import Q, QuerySet

from controlplane.fleet import status
from controlplane.fleet.models import Challenge, Island, SyncReport
from controlplane.fleet.status import Facts, Health, Sync
from controlplane.registry import clock
from controlplane.registry.errors import Missing
from controlplane.registry.models import Project, Version


@dataclass(frozen=True, slots=True)
class FleetRow:
    """One island with what follows from its rows. `skew_versions` and `skew_seconds` are None where nothing is
    verified.
    """

    island: Island
    health: Health
    health_reason: str
    sync: Sync
    sync_reason: str
    version: int | None
    target: int | None
    skew_versions: int | None
    skew_seconds: int | None


def islands(project: Project) -> QuerySet[Island]:
    """The islands of a project, by name, with what a row needs."""
    return (
        Island.objects.filter(project=project)
        .select_related("project", "run", "channel__version", "verified_version", "token")
        .order_by("name")
    )


def island(project: Project, island_id: uuid.UUID | str) -> Island:
    """One island of the project. Raises Missing."""
    try:
        return islands(project).get(pk=uuid.UUID(str(island_id)))
    except (Island.DoesNotExist, ValueError):
        raise Missing("There is no such island in this project.") from None


def fleet(project: Project) -> list[FleetRow]:
    """The fleet table."""
    return rows(islands(project))


def row(island: Island) -> FleetRow:
    """The row of one island that `islands` or `island` returned."""
    return rows([island])[0]


def rows(chosen: Iterable[Island]) -> list[FleetRow]:
    """Rows of islands that came from `islands`."""
    every = list(chosen)
    now = clock.now()
    ready = _ready_times(every)
    return [_row(item, now, ready[item.run_id]) for item in every]


def counts(table: Iterable[FleetRow]) -> dict[str, dict[str, int]]:
    """Islands per health and per sync status; every state is present."""
    found = {"health": dict.fromkeys(map(str, Health), 0), "sync": dict.fromkeys(map(str, Sync), 0)}
    for item in table:
        found["health"][str(item.health)] += 1
        found["sync"][str(item.sync)] += 1
    return found


def sync_reports(island: Island, limit: int = 50) -> list[SyncReport]:
    """The newest reports of an island."""
    return list(SyncReport.objects.filter(island=island).order_by("-id")[:limit])


def challenges(island: Island, limit: int = 50) -> list[Challenge]:
    """The newest questions to an island."""
    return list(
        Challenge.objects.filter(island=island).select_related("version", "job").order_by("-created_at")[:limit]
    )


def _ready_times(every: Iterable[Island]) -> dict[uuid.UUID, list[tuple[int, datetime]]]:
    """Number and time of the ready versions that an island of their run has not reached, ascending, per run."""
    held: dict[uuid.UUID, int] = {}
    for item in every:
        if item.verified_version is not None:
            held[item.run_id] = min(item.verified_version.number, held.get(item.run_id, item.verified_version.number))
    found: dict[uuid.UUID, list[tuple[int, datetime]]] = defaultdict(list)
    newer = [Q(run=run, number__gt=number) for run, number in held.items()]
    if newer:
        ready = Version.objects.filter(reduce(or_, newer), state=Version.State.READY)
        for run, number, moment in ready.order_by("number").values_list("run", "number", "ready_at"):
            if moment is not None:
                found[run].append((number, moment))
    return found


def _row(island: Island, now: datetime, ready: list[tuple[int, datetime]]) -> FleetRow:
    head, verified = island.channel.version, island.verified_version
    facts = Facts(
        enabled=island.enabled,
        disabled_reason=island.disabled_reason,
        phase=island.phase,
        reason=island.reason,
        last_error=island.last_error,
        seconds_since_seen=None if island.last_seen_at is None else (now - island.last_seen_at).total_seconds(),
        heartbeat_seconds=settings.MAILBOAT_HEARTBEAT_SECONDS,
        clock_skew_seconds=island.clock_skew_seconds,
        claimed_version=island.version_number,
        claimed_digest=island.digest,
        verified_version=None if verified is None else verified.number,
        verified_digest="" if verified is None else verified.state_digest,
        head_version=None if head is None else head.number,
        head_digest="" if head is None else head.state_digest,
    )
    healthy, health_reason = status.health(facts)
    synced, sync_reason = status.sync(facts)
    versions, seconds = _skew(facts, now, ready)
    return FleetRow(
        island=island,
        health=healthy,
        health_reason=health_reason,
        sync=synced,
        sync_reason=sync_reason,
        version=facts.verified_version,
        target=facts.head_version,
        skew_versions=versions,
        skew_seconds=seconds,
    )


def _skew(facts: Facts, now: datetime, ready: list[tuple[int, datetime]]) -> tuple[int | None, int | None]:
    """How many ready versions the island is behind its channel, and for how long it has been so."""
    if facts.verified_version is None or facts.head_version is None:
        return None, None
    numbers = [number for number, _ in ready]
    first, last = bisect_right(numbers, facts.verified_version), bisect_right(numbers, facts.head_version)
    if last <= first:
        return 0, 0
    return last - first, max(0, int((now - ready[first][1]).total_seconds()))
