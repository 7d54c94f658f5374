"""The fleet page's rows: heads, facets and islands. Health and sync status are derived by `fleet`, never here; this
module only counts, filters and words them. Only the page that is shown is put into words.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from django.db.models import Count, F, Q

from controlplane.dashboard import badges, wording
from controlplane.dashboard.badges import Badge, badge
from controlplane.dashboard.rows.filters import UNSEEN_WORDS, Filters
from controlplane.fleet import status
from controlplane.fleet.outline import Standing
from controlplane.fleet.status import CLOCK_TOLERANCE_SECONDS, Health, Sync
from controlplane.registry.models import Channel, Project, Run, Version

HEADS = 6
MANY_OPTIONS = 200
ALWAYS_COUNTED = ("healthy", "degraded", "lost", "current", "behind")
COLUMNS = (
    ("name", "Island", ""),
    ("where", "Where", ""),
    ("health", "Health", ""),
    ("sync", "Sync", ""),
    ("version", "Version", ""),
    ("skew", "Skew", ""),
    ("patch", "Last patch", "end"),
    ("pause", "Last pause", "end"),
    ("seen", "Last seen", "end"),
)


@dataclass(frozen=True, slots=True)
class IslandRow:
    """An island in the fleet's table. `version` is the verified one; `head` is what it should hold."""

    id: uuid.UUID
    name: str
    provider: str
    region: str
    engine: str
    run: str
    health: Badge
    sync: Badge
    is_healthy: bool  # nothing to add to the word; so with the sync status
    sync_is_plain: bool
    version: int | None
    head: int | None
    skew_versions: int | None
    behind_since: datetime | None
    patch_bytes: int | None
    full_bytes: int | None
    pause: float | None
    last_seen_at: datetime | None


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
    """A filter with more than one possible value: pairs of value and word."""

    name: str
    label: str
    options: tuple[tuple[str, str], ...]
    chosen: str


@dataclass(frozen=True, slots=True)
class Column:
    """A heading that sorts. `direction` is the value of aria-sort."""

    word: str
    address: str
    direction: str
    place: str


def island_row(found: Standing, now: datetime) -> IslandRow:
    """Word one derived row."""
    island = found.island
    clock_is_off = abs(island.clock_skew_seconds or 0) > CLOCK_TOLERANCE_SECONDS
    return IslandRow(
        id=island.id,
        name=island.name,
        provider=island.provider,
        region=island.region,
        engine=island.engine,
        run=island.run_name,
        health=badge(badges.HEALTH, found.health, health_reason(found)),
        sync=badge(badges.SYNC, found.sync, found.sync_reason),
        is_healthy=found.health == Health.HEALTHY and not clock_is_off,
        sync_is_plain=found.sync in (Sync.CURRENT, Sync.PINNED)
        or (found.sync == Sync.BEHIND and not island.last_error),
        version=found.version,
        head=found.target,
        skew_versions=found.skew_versions,
        behind_since=now - timedelta(seconds=found.skew_seconds or 0),
        patch_bytes=island.last_patch_bytes,
        full_bytes=found.full_bytes,
        pause=island.last_pause,
        last_seen_at=island.last_seen_at,
    )


def health_reason(found: Standing) -> str:
    """The reason without a count of seconds: the page counts them itself, and a page must not change each second."""
    if found.health == Health.LOST and found.island.last_seen_at is not None:
        return "Its heartbeats have stopped."
    if found.health == Health.DEGRADED and found.health_reason.startswith(status.LATE):
        return "Its heartbeats are late."
    if found.health == Health.DRAINING:
        return drain_words(found.island.active_requests, found.drained)
    return found.health_reason


def drain_words(active: int | None, drained: bool) -> str:
    """How far a drain is, without the seconds that are left."""
    if drained:
        left = active or 0
        return f"Drained; {wording.plural(left, 'request')} given up at the deadline." if left else "Drained."
    return "Draining." if active is None else f"Draining: {wording.plural(active, 'request')} active."


def columns(chosen: Filters) -> list[Column]:
    """The headings of the table."""
    return [Column(word, chosen.by(name), chosen.direction(name), place) for name, word, place in COLUMNS]


def heads(project: Project) -> list[HeadRow]:
    """The channels that moved last, with how many of their islands have arrived."""
    arrived = Q(islands__verified_version=F("version"))
    channels = (
        Channel.objects.filter(run__project=project)
        .exclude(name__startswith=Channel.PINS)
        .select_related("run", "version")
        .defer("version__envelope", "version__side_files", "head_envelope")
    )
    counted = channels.annotate(followers=Count("islands"), arrived=Count("islands", filter=arrived))
    return [
        HeadRow(channel.run, channel.name, channel.version, channel.followers, channel.arrived)
        for channel in counted.order_by(F("version__ready_at").desc(nulls_last=True), "run__name", "name")[:HEADS]
    ]


def facets(rows: Sequence[Standing], chosen: Filters, now: datetime) -> list[Facet]:
    """Counts per health and per sync status as links. Counts follow the other filters, not their own axis."""
    found = [Facet("All", len(rows), "?", not chosen.any)]
    for axis, table in (("health", badges.HEALTH), ("sync", badges.SYNC)):
        others = replace(chosen, **{axis: ""})
        counted = Counter([str(getattr(row, axis)) for row in others.of_them(rows, now)])
        for key, known in table.items():
            current = getattr(chosen, axis) == key
            if counted[key] or current or key in ALWAYS_COUNTED:
                address = chosen.query(**{axis: "" if current else key})
                found.append(Facet(known.word, counted[key], address, current, known.icon, known.tone))
    return found


def choices(rows: Sequence[Standing], chosen: Filters) -> list[Choice]:
    """Filters whose values differ between islands."""
    found = []
    for name, label, values in (
        ("run", "Run", {row.island.run_name for row in rows}),
        ("provider", "Provider", {row.island.provider for row in rows}),
        ("region", "Region", {row.island.region for row in rows}),
    ):
        options = sorted(values - {""})[:MANY_OPTIONS]
        if len(options) > 1 or getattr(chosen, name):
            found.append(Choice(name, label, tuple((value, value) for value in options), getattr(chosen, name)))
    held = sorted({row.version for row in rows if row.version is not None}, reverse=True)[:MANY_OPTIONS]
    if len(held) > 1 or chosen.version:
        found.append(Choice("version", "Version", tuple((str(n), f"v{n}") for n in held), chosen.version))
    found.append(Choice("unseen", "Not seen for", tuple(UNSEEN_WORDS.items()), chosen.unseen))
    return found
