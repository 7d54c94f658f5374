"""Pins: an island that stays at one version, whatever its channel does.

A pinned island follows a channel of its own, whose head is numbered, expiring and signed like any other, so that
nothing about following changes and the island can follow the blob store alone. See docs/adr/pins-are-channels.md.
"""

from __future__ import annotations

from django.db import connection, transaction
from django.db.models import F

from controlplane.audit import services as audit
from controlplane.fleet.models import Island
from controlplane.registry import heads, keys
from controlplane.registry.errors import Changed, Missing, Refusal
from controlplane.registry.models import Channel, Version


def pin(island: Island, number: int, *, reason: str = "", actor: str, seen: int | None = None) -> Island:
    """Holds the island at a ready version of its run, newer or older than what it has. Pinning again moves the pin.

    Raises Missing, Refusal `not_ready`, Changed.
    """
    version = Version.objects.select_related("epoch").filter(run=island.run_id, number=number).first()
    if version is None:
        raise Missing(f"There is no version {number} in this run.")
    if version.state != Version.State.READY:
        raise Refusal(f"Version {number} is {version.state}; only ready versions can be pinned.", code="not_ready")
    keys.require_trusted(version)
    with transaction.atomic():
        row = _locked(island, seen)
        before = _shown(row)
        Channel.objects.get_or_create(run=row.run, name=channel_name(row), defaults={"protected": True})
        channel = Channel.objects.select_for_update(of=["self"], no_key=True).get(run=row.run, name=channel_name(row))
        if channel.version_id != version.pk:
            heads.move(channel, version)
        Island.objects.filter(pk=row.pk).update(pin=channel, pin_reason=reason[:1000], revision=F("revision") + 1)
        _wake(row)
        after = {"version": number} | ({"reason": reason} if reason else {})
        audit.record(row.project, actor, "island.pin", f"island {row.name}", before=before, after=after)
    island.refresh_from_db()
    return island


def unpin(island: Island, *, actor: str, seen: int | None = None) -> Island:
    """Lets the island follow its channel again. Raises Changed."""
    with transaction.atomic():
        row = _locked(island, seen)
        if row.pin is None:
            return island
        before = _shown(row)
        release(row)
        Island.objects.filter(pk=row.pk).update(revision=F("revision") + 1)
        audit.record(row.project, actor, "island.unpin", f"island {row.name}", before=before)
    island.refresh_from_db()
    return island


def release(island: Island) -> None:
    """Unties the island from its own channel, which stays: its serial must never be given out twice."""
    Island.objects.filter(pk=island.pk).update(pin=None, pin_reason="")
    _wake(island)


def followed(island: Island) -> Channel:
    """The channel whose head the island has to follow now."""
    return island.pin or island.channel


def channel_name(island: Island) -> str:
    """The name of the island's own channel."""
    return f"{Channel.PINS}{island.pk.hex}"


def _wake(island: Island) -> None:
    """Ends the island's long poll on whichever channel it follows by now; others look once and go on waiting."""
    with connection.cursor() as cursor:
        for name in (island.channel.name, channel_name(island)):
            cursor.execute("SELECT pg_notify(%s, %s)", [heads.NOTIFICATION, f"{island.run_id}/{name}"])


def _locked(island: Island, seen: int | None) -> Island:
    chosen = Island.objects.select_related("project", "run", "channel", "pin__version").select_for_update(of=["self"])
    row = chosen.filter(pk=island.pk).first()
    if row is None or (seen is not None and row.revision != seen):
        raise Changed
    return row


def _shown(island: Island) -> dict[str, object] | None:
    if island.pin is None or island.pin.version is None:
        return None
    return {"version": island.pin.version.number, "reason": island.pin_reason}
