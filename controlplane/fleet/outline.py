"""The whole fleet in a few columns: what counts, filters, sorting and the needs-attention list are made from, for a
thousand islands in a few milliseconds. Health and sync status come from `status`, as everywhere; this module must
never judge by itself.
"""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import NamedTuple

from django.db.models import Exists, F, FloatField, Func, OuterRef
from django.db.models.fields.json import KT
from django.db.models.functions import Cast

from controlplane.fleet import selectors, skew, status
from controlplane.fleet.models import Challenge, Island
from controlplane.registry import clock
from controlplane.registry.models import Project, Version


class Outline(NamedTuple):
    """The columns of one island, named as in `Island`."""

    id: uuid.UUID
    name: str
    provider: str
    region: str
    engine: str
    hostname: str
    agent_version: str
    run_id: uuid.UUID
    run_name: str
    channel_name: str
    channel_version_id: int | None
    verified_version_id: int | None
    pinned_version_id: int | None
    enabled: bool
    disabled_reason: str
    pending: bool
    draining_since: datetime | None
    drain_until: datetime | None
    drain_reason: str
    pin_id: int | None
    pin_reason: str
    phase: str
    reason: str
    last_error: str
    alarm: str
    last_seen: float | None  # seconds since 1970: PostgreSQL writes, and Python reads, a time far more slowly
    last_sync_at: datetime | None
    clock_skew_seconds: float | None
    version_number: int | None
    digest: str
    last_patch_bytes: int | None
    last_pause: float | None  # seconds for which the last sync held the engine: its commit
    active_requests: int | None
    expires_at: datetime | None
    revoked_at: datetime | None
    staleness_versions: int | None
    staleness_seconds: int | None

    @property
    def last_seen_at(self) -> datetime | None:
        """When it was heard of last."""
        return None if self.last_seen is None else datetime.fromtimestamp(self.last_seen, UTC)


_COLUMNS = {
    "run_name": "run__name",
    "channel_name": "channel__name",
    "channel_version_id": "channel__version_id",
    "pinned_version_id": "pin__version_id",
    "expires_at": "token__expires_at",
    "revoked_at": "token__revoked_at",
    "staleness_versions": "run__staleness_versions",
    "staleness_seconds": "run__staleness_seconds",
}


class Standing(NamedTuple):
    """One island and what follows: see `selectors.FleetRow`. `failed_verify` is true until a later question passed."""

    island: Outline
    health: status.Health
    health_reason: str
    sync: status.Sync
    sync_reason: str
    version: int | None
    target: int | None
    skew_versions: int | None
    skew_seconds: int | None
    full_bytes: int | None
    failed_verify: bool
    drained: bool


def standings(project: Project, *, only: uuid.UUID | None = None) -> list[Standing]:
    """All islands of the project by name, or one of them. Four queries, however many there are."""
    chosen = Island.objects.filter(project=project).order_by("name")
    if only is not None:
        chosen = chosen.filter(pk=only)
    columns = [_COLUMNS.get(name, name) for name in Outline._fields]
    # The database takes the one number out of the document: parsing a thousand of them costs as much as the rest.
    chosen = chosen.annotate(
        last_pause=Cast(KT("last_seconds__commit"), FloatField()),
        last_seen=Func(
            "last_seen_at", template="extract(epoch FROM %(expressions)s)::float8", output_field=FloatField()
        ),
    )
    every = [Outline(*values) for values in chosen.values_list(*columns)]
    now = clock.now()
    on_the_way = skew.course(item.verified_version_id for item in every if item.verified_version_id is not None)
    targets = _targets(every)
    failed = _failed_verifies(project)
    return [_standing(item, now, on_the_way, targets, item.id in failed) for item in every]


def target_id(item: Outline) -> int | None:
    """The version that the island should hold: that of its pin, or of its channel."""
    return item.pinned_version_id if item.pin_id is not None else item.channel_version_id


def _targets(every: list[Outline]) -> dict[int, tuple[int, str]]:
    wanted = {key for item in every if (key := target_id(item)) is not None}
    found = Version.objects.filter(pk__in=wanted).values_list("pk", "number", "state_digest")
    return {key: (number, digest) for key, number, digest in found}


def _failed_verifies(project: Project) -> set[uuid.UUID]:
    """Islands whose last judged challenge failed."""
    later = Challenge.objects.filter(
        island=OuterRef("island"), state=Challenge.State.PASSED, created_at__gt=OuterRef("created_at")
    )
    failed = Challenge.objects.filter(~Exists(later), island__project=project, state=Challenge.State.FAILED)
    return set(failed.order_by().values_list(F("island"), flat=True).distinct())


def _standing(
    item: Outline, now: datetime, on_the_way: skew.Course, targets: dict[int, tuple[int, str]], failed_verify: bool
) -> Standing:
    held = on_the_way.held.get(item.verified_version_id or 0)
    facts = selectors.facts_of(
        item,
        None if held is None else (held.number, held.digest),
        targets.get(target_id(item) or 0),
        now,
        revoked=item.revoked_at is not None,
    )
    health, health_reason = status.health(facts)
    sync, sync_reason = status.sync(facts)
    versions, seconds = (None, None) if held is None else on_the_way.behind(held, facts.head_version, now)
    if sync == status.Sync.AHEAD and facts.verified_version is not None and facts.head_version is not None:
        versions = facts.head_version - facts.verified_version
    return Standing(
        island=item,
        health=health,
        health_reason=health_reason,
        sync=sync,
        sync_reason=sync_reason,
        version=facts.verified_version,
        target=facts.head_version,
        skew_versions=versions,
        skew_seconds=seconds,
        full_bytes=None if held is None else held.full_bytes,
        failed_verify=failed_verify,
        drained=facts.drained,
    )
