"""Leases: somebody needs a version for a while, and retention leaves it and a route to it alone."""

from __future__ import annotations

from datetime import timedelta

from django.db.models.functions import Now

from controlplane.registry import clock
from controlplane.registry.models import Version, VersionLease


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


def forget_ended() -> int:
    """Removes leases that have ended; returns how many."""
    return VersionLease.objects.filter(expires_at__lt=Now()).delete()[0]
