"""Leases: somebody needs a version for a while, and retention leaves it and a route to it alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from django.db.models import QuerySet
from django.db.models.functions import Now

from controlplane.registry import clock
from controlplane.registry.errors import Missing, Refusal
from controlplane.registry.models import Run, Version, VersionLease

ANCHOR_HOURS = timedelta(hours=12)
ISLANDS = "island:"  # what the names of holders that are islands begin with


def take(version: Version, holder: str, lifetime: timedelta, reason: str = "") -> VersionLease:
    """Keeps a version, and a route to it, for a while; taking it again prolongs it and never shortens it."""
    until = clock.now() + lifetime
    row, new = VersionLease.objects.get_or_create(
        version=version,
        holder=holder,
        defaults={"run_id": version.run_id, "expires_at": until, "reason": reason},
    )
    if not new and row.expires_at < until:
        VersionLease.objects.filter(pk=row.pk, expires_at__lt=until).update(expires_at=until, reason=reason)
        row.refresh_from_db()
    return row


def take_for_route(run: Run, steps: Sequence[Mapping[str, Any]], holder: str) -> None:
    """An island that fetches an anchor keeps it, and the way on from it, for as long as a slow link may take."""
    numbers = [step["version"] for step in steps if step["kind"] == "anchor"]
    for version in Version.objects.filter(run=run, number__in=numbers, state=Version.State.READY):
        take(version, f"{ISLANDS}{holder}", ANCHOR_HOURS, "It fetches the anchor.")


def end_of_fetch(version: Version, holder: str) -> None:
    """An island that holds the version now fetches no anchor at it or before it any more."""
    fetched = VersionLease.objects.filter(run=version.run_id, version__number__lte=version.number)
    fetched.filter(holder=f"{ISLANDS}{holder}").delete()


def of_run(run: Run) -> QuerySet[VersionLease]:
    """The leases of a run, newest first, ended ones too until they are forgotten."""
    return VersionLease.objects.filter(run=run).select_related("version").order_by("-id")


def leasable(run: Run, number: int) -> Version:
    """A version that can be leased. Raises Missing, Refusal `not_ready`."""
    found = Version.objects.filter(run=run, number=number).first()
    if found is None:
        raise Missing(f"There is no version {number} in this run.")
    if found.state != Version.State.READY:
        raise Refusal(f"Version {number} is {found.state}; only ready versions can be leased.", code="not_ready")
    return found


def end(run: Run, key: int, holder: str | None) -> None:
    """Ends a lease (of `holder`, unless that is None). Raises Missing."""
    chosen = VersionLease.objects.filter(run=run, pk=key)
    if holder is not None:
        chosen = chosen.filter(holder=holder)
    if not chosen.delete()[0]:
        raise Missing("There is no such lease in this run, or it is somebody else's.")


def forget_ended() -> int:
    """Removes leases that have ended; returns how many."""
    return VersionLease.objects.filter(expires_at__lt=Now()).delete()[0]
