"""Reads of the fleet. One query per table, however many islands there are; ages by the database's clock."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

from django.conf import settings
from django.db.models import Q, QuerySet
from django.db.models.functions import Now

from controlplane.fleet import skew, status
from controlplane.fleet.models import Challenge, EnrolmentToken, Island, SyncReport
from controlplane.fleet.pins import followed
from controlplane.fleet.status import Facts, Health, Sync
from controlplane.registry import clock
from controlplane.registry.errors import Missing
from controlplane.registry.models import Project
from mailboat import __version__
from mailboat.compatibility import neighbours
from mailboat.identity import fingerprint


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
    pinned: int | None = None
    drained: bool = False

    @property
    def fingerprint(self) -> str:
        """Of the island's public key; empty for islands that enrolled without one."""
        return fingerprint(self.island.public_key) if self.island.public_key else ""


def islands(project: Project) -> QuerySet[Island]:
    """The islands of a project, by name, with what a row needs."""
    return (
        Island.objects.filter(project=project)
        .select_related("project", "run", "channel__version", "pin__version", "verified_version", "token", "next_token")
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
    on_the_way = skew.course(item.verified_version_id for item in every if item.verified_version_id is not None)
    return [_row(item, now, on_the_way) for item in every]


def counts(table: Iterable[FleetRow]) -> dict[str, dict[str, int]]:
    """Islands per health and per sync status; every state is present."""
    found = {"health": dict.fromkeys(map(str, Health), 0), "sync": dict.fromkeys(map(str, Sync), 0)}
    for item in table:
        found["health"][str(item.health)] += 1
        found["sync"][str(item.sync)] += 1
    return found


def lost_islands(project: Project) -> int:
    """How many islands of the project are lost: the same rule as `status.health`, counted by the database, because
    every page asks for it with each poll.
    """
    silence = timedelta(seconds=status.LOST_BEATS * settings.MAILBOAT_HEARTBEAT_SECONDS)
    silent = Q(last_seen_at=None) | Q(last_seen_at__lt=Now() - silence)
    present = Island.objects.filter(project=project, enabled=True, pending=False, draining_since=None)
    return present.filter(silent).exclude(token__revoked_at__isnull=False).count()


def pending(project: Project) -> QuerySet[Island]:
    """The self-enrolled islands that wait for an approval, the longest waiting first."""
    return islands(project).filter(pending=True).order_by("enrolled_at")


def enrolment_tokens(project: Project, *, working: bool = False) -> QuerySet[EnrolmentToken]:
    """One-time tokens and self-enrolment keys, newest first, with `working` those that still enrol somebody."""
    found = EnrolmentToken.objects.filter(project=project).select_related("project", "run", "channel", "island")
    if working:
        unused = Q(reusable=True) | Q(used_at=None)
        found = found.filter(unused, revoked_at=None, expires_at__gt=Now())
    return found.order_by("-id")


def enrolment_token(project: Project, token_id: int) -> EnrolmentToken:
    """One of them. Raises Missing."""
    found = enrolment_tokens(project).filter(pk=token_id).first()
    if found is None:
        raise Missing("There is no such enrolment token in this project.")
    return found


def enrolment_state(token: EnrolmentToken, now: datetime) -> str:
    """`open`, `used`, `expired` or `revoked` at `now`, by the database's clock."""
    if token.revoked_at is not None:
        return "revoked"
    if token.used_at is not None and not token.reusable:
        return "used"
    return "expired" if token.expires_at <= now else "open"


def sync_reports(island: Island, limit: int = 50) -> list[SyncReport]:
    """The newest reports of an island."""
    return list(SyncReport.objects.filter(island=island).order_by("-id")[:limit])


def challenges(island: Island, limit: int = 50) -> list[Challenge]:
    """The newest questions to an island."""
    return list(
        Challenge.objects.filter(island=island).select_related("version", "job").order_by("-created_at")[:limit]
    )


def _row(island: Island, now: datetime, on_the_way: skew.Course) -> FleetRow:
    target, verified = followed(island).version, island.verified_version
    facts = facts_of(
        island,
        None if verified is None else (verified.number, verified.state_digest),
        None if target is None else (target.number, target.state_digest),
        now,
        revoked=island.token is not None and island.token.revoked_at is not None,
    )
    healthy, health_reason = status.health(facts)
    synced, sync_reason = status.sync(facts)
    held = on_the_way.held.get(island.verified_version_id or 0)
    versions, seconds = (None, None) if held is None else on_the_way.behind(held, facts.head_version, now)
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
        pinned=facts.head_version if facts.pinned else None,
        drained=facts.drained,
    )


def facts_of(
    island: Any, verified: tuple[int, str] | None, target: tuple[int, str] | None, now: datetime, *, revoked: bool
) -> Facts:
    """What `status` judges. `island` is an Island or an `outline.Outline`: both name these columns alike; `verified`
    and `target` are number and digest of the version that it proved to hold and of the one that it should hold.
    """
    until: datetime | None = island.drain_until
    return Facts(
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
        verified_version=None if verified is None else verified[0],
        verified_digest="" if verified is None else verified[1],
        head_version=None if target is None else target[0],
        head_digest="" if target is None else target[1],
        pinned=island.pin_id is not None,
        pending=island.pending,
        revoked=revoked,
        draining=island.draining_since is not None,
        drain_seconds_left=0.0 if until is None else (until - now).total_seconds(),
        active_requests=island.active_requests,
        foreign_release="" if _works_with_us(island.agent_version) else island.agent_version,
    )


@lru_cache(256)
def _works_with_us(release: str) -> bool:
    """Whether islands of this release are neighbours of ours; one that was never told is."""
    return neighbours(release, __version__)
