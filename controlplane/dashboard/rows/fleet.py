"""The fleet page's rows: heads, facets, islands and what needs attention. Health and sync status are derived by
`fleet.selectors`, never here; this module only counts, filters and words them.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from django.conf import settings
from django.db.models import Count, F, OuterRef, Q, Subquery
from django.db.models.functions import Now
from django.http import QueryDict
from django.urls import reverse

from controlplane.dashboard import badges
from controlplane.dashboard.badges import Badge, badge
from controlplane.fleet import selectors as fleet
from controlplane.fleet.models import Challenge, Island
from controlplane.fleet.status import CLOCK_TOLERANCE_SECONDS, LOST_BEATS, Health, Sync
from controlplane.registry.models import Channel, Project, Run, Version

HEADS = 6
ALWAYS_COUNTED = ("healthy", "degraded", "lost", "current", "behind")


@dataclass(frozen=True, slots=True)
class IslandRow:
    """An island in the fleet's table. `version` is the verified one; `head` is its channel's."""

    id: uuid.UUID
    name: str
    provider: str
    region: str
    engine: str
    run: str
    health_key: str
    sync_key: str
    health: Badge
    sync: Badge
    version: int | None
    head: int | None
    skew_versions: int | None
    behind_since: datetime | None
    patch_bytes: int | None
    full_bytes: int | None
    last_seen_at: datetime | None
    clock_is_off: bool
    failed_sync: str
    failed_verify: bool

    @property
    def is_healthy(self) -> bool:
        """True when its health needs no more words."""
        return self.health_key == Health.HEALTHY and not self.clock_is_off

    @property
    def is_current(self) -> bool:
        """True when its sync status needs no more words."""
        return self.sync_key == Sync.CURRENT

    @property
    def skew_ahead(self) -> int:
        """Versions in front of the head, after a rollback."""
        return -(self.skew_versions or 0)


@dataclass(frozen=True, slots=True)
class HeadRow:
    """A channel with how far its islands have come."""

    run: Run
    channel: str
    version: Version | None
    islands: int
    arrived: int

    @property
    def arrival_words(self) -> str:
        """The bar in words."""
        return f"{self.arrived} of {self.islands} at the head"

    @property
    def arrival_tone(self) -> str:
        """Green when everybody is there."""
        return "good" if self.islands and self.arrived == self.islands else ""


@dataclass(frozen=True, slots=True)
class Facet:
    """A count that is a link to what it counts."""

    word: str
    count: int
    address: str
    chosen: bool
    icon: str = ""
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """A filter with more than one possible value."""

    name: str
    label: str
    options: tuple[str, ...]
    chosen: str


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that needs a person."""

    key: str
    badge: Badge
    what: str
    address: str


def island_rows(project: Project, now: datetime, only: uuid.UUID | None = None) -> list[IslandRow]:
    """All islands of the project by name, or one of them."""
    answers = Challenge.objects.filter(island_id=OuterRef("pk"), state__in=["passed", "failed"]).order_by("-created_at")
    chosen = (
        fleet.islands(project)
        .defer("channel__version__envelope", "verified_version__envelope")
        .annotate(last_answer=Subquery(answers.values("state")[:1]))
    )
    if only is not None:
        chosen = chosen.filter(pk=only)
    return [_row(found, found.island, now) for found in fleet.rows(chosen)]


def _row(found: fleet.FleetRow, island: Any, now: datetime) -> IslandRow:
    """Word one derived row. `island` carries the annotations of `island_rows`."""
    held = island.verified_version
    skew = found.skew_versions
    if found.sync == Sync.AHEAD and found.version is not None and found.target is not None:
        skew = found.target - found.version
    return IslandRow(
        id=island.pk,
        name=island.name,
        provider=island.provider,
        region=island.region,
        engine=island.engine,
        run=island.run.name,
        health_key=found.health,
        sync_key=found.sync,
        health=badge(badges.HEALTH, found.health, _health_reason(found)),
        sync=badge(badges.SYNC, found.sync, found.sync_reason),
        version=found.version,
        head=found.target,
        skew_versions=skew,
        behind_since=now - timedelta(seconds=found.skew_seconds or 0),
        patch_bytes=island.last_patch_bytes,
        full_bytes=held.full_bytes if held else None,
        last_seen_at=island.last_seen_at,
        clock_is_off=abs(island.clock_skew_seconds or 0) > CLOCK_TOLERANCE_SECONDS,
        failed_sync=island.last_error,
        failed_verify=island.last_answer == Challenge.State.FAILED,
    )


def _health_reason(found: fleet.FleetRow) -> str:
    """The reason without a count of seconds: the page counts them itself, and a page must not change each second."""
    if found.health == Health.LOST and found.island.last_seen_at is not None:
        return "Its heartbeats have stopped."
    if found.health == Health.DEGRADED and found.island.phase not in (Island.Phase.ERROR, Island.Phase.FENCED):
        return "Its heartbeats are late."
    return found.health_reason


def lost_islands(project: Project) -> int:
    """How many islands of the project are lost: the number in the title and on the favicon of every page.

    The same rule as `fleet.status.health`, counted by the database: it is asked for with each poll.
    """
    silence = timedelta(seconds=LOST_BEATS * settings.MAILBOAT_HEARTBEAT_SECONDS)
    silent = Q(last_seen_at=None) | Q(last_seen_at__lt=Now() - silence)
    return Island.objects.filter(silent, project=project, enabled=True).count()


def heads(project: Project) -> list[HeadRow]:
    """The channels that moved last, with how many of their islands have arrived."""
    arrived = Q(islands__verified_version=F("version"))
    channels = Channel.objects.filter(run__project=project).select_related("run", "version").defer("version__envelope")
    counted = channels.annotate(followers=Count("islands"), arrived=Count("islands", filter=arrived))
    return [
        HeadRow(channel.run, channel.name, channel.version, channel.followers, channel.arrived)
        for channel in counted.order_by(F("version__ready_at").desc(nulls_last=True), "run__name", "name")[:HEADS]
    ]


@dataclass(frozen=True, slots=True)
class Filters:
    """What the address asks for; empty means anything."""

    health: str = ""
    sync: str = ""
    run: str = ""
    provider: str = ""
    region: str = ""

    @classmethod
    def of(cls, query: QueryDict) -> Filters:
        """Read the address; what it doesn't know, it ignores."""
        return cls(**{field.name: query.get(field.name, "") for field in fields(cls)})

    @property
    def any(self) -> bool:
        """True when something is asked for."""
        return any(getattr(self, field.name) for field in fields(self))

    def query(self, **changes: str) -> str:
        """An address with these filters, some of them changed."""
        wanted = {field.name: getattr(replace(self, **changes), field.name) for field in fields(self)}
        return "?" + urlencode({name: value for name, value in wanted.items() if value})

    def matches(self, row: IslandRow) -> bool:
        """True when the island is asked for."""
        pairs = (
            (self.health, row.health_key),
            (self.sync, row.sync_key),
            (self.run, row.run),
            (self.provider, row.provider),
            (self.region, row.region),
        )
        return all(not wanted or wanted == found for wanted, found in pairs)


def facets(rows: Sequence[IslandRow], chosen: Filters) -> list[Facet]:
    """Counts per health and per sync status as links. Counts follow the other filters, not their own axis."""
    found = [Facet("All", len(rows), "?", not chosen.any)]
    for axis, table in (("health", badges.HEALTH), ("sync", badges.SYNC)):
        others = replace(chosen, **{axis: ""})
        counted = Counter(getattr(row, f"{axis}_key") for row in rows if others.matches(row))
        for key, known in table.items():
            current = getattr(chosen, axis) == key
            if counted[key] or current or key in ALWAYS_COUNTED:
                address = chosen.query(**{axis: "" if current else key})
                found.append(Facet(known.word, counted[key], address, current, known.icon, known.tone))
    return found


def choices(rows: Sequence[IslandRow], chosen: Filters) -> list[Choice]:
    """Filters whose values differ between islands."""
    found = []
    for name, label in (("run", "Run"), ("provider", "Provider"), ("region", "Region")):
        options = tuple(sorted({getattr(row, name) for row in rows} - {""}))
        if len(options) > 1 or getattr(chosen, name):
            found.append(Choice(name, label, options, getattr(chosen, name)))
    return found


def attention(project: Project, rows: Sequence[IslandRow]) -> list[Finding]:
    """What needs a person, worst first: lost, failed verifications, degraded, runs that end in a failed version."""
    found: list[Finding] = []
    for row in rows:
        address = reverse("dashboard:island", args=[project.slug, row.id])
        if row.health_key == "lost":
            found.append(Finding(f"lost-{row.id}", row.health, row.name, address))
        if row.failed_verify:
            words = "The last verification failed: what the island holds is not what the record says."
            found.append(
                Finding(f"verify-{row.id}", Badge("Verification failed", "lost", "bad", words), row.name, address)
            )
        if row.health_key == "degraded":
            found.append(Finding(f"degraded-{row.id}", row.health, row.name, address))
        elif row.failed_sync and row.health_key == "healthy":
            found.append(
                Finding(f"sync-{row.id}", Badge("Sync failed", "warn", "warn", row.failed_sync), row.name, address)
            )
    found += [
        Finding(
            f"version-{version.pk}",
            Badge("Version failed", "lost", "bad", version.reason),
            f"{version.run.name} v{version.number}",
            reverse("dashboard:version", args=[project.slug, version.run.name, version.number]),
        )
        for version in _failed_ends(project)
    ]
    return sorted(found, key=lambda finding: finding.badge.tone != "bad")


def _failed_ends(project: Project) -> list[Version]:
    """Runs whose newest version failed: the trainer may be stuck behind it."""
    newest = Version.objects.filter(run_id=OuterRef("run_id")).order_by("-number").values("number")[:1]
    found = Version.objects.filter(run__project=project, state=Version.State.FAILED, number=Subquery(newest))
    return list(found.select_related("run").defer("envelope"))
