"""Heads: the serially numbered, expiring documents that say where a channel stands.

A head is written in the transaction that moves its channel and wakes the waiting islands when that commits. Beside the
blobs it appears only after the commit, so that the file never says more than the database.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import structlog
from django.conf import settings
from django.db import connection, transaction
from django.db.models import F, Max
from django.db.models.functions import Now

from controlplane import head_keys
from controlplane.audit import services as audit
from controlplane.registry import beside, clock
from controlplane.registry.beside import encoded
from controlplane.registry.errors import WrongState
from controlplane.registry.models import Channel, Version
from mailboat.manifest import HEAD_TYPE, Envelope, Head
from mailboat.signing import HEAD, KeyDocument, endorse, sign

__all__ = ["announce_keys", "encoded", "move", "raise_generation", "renew_heads"]

log = structlog.get_logger(__name__)

NOTIFICATION = "mailboat_head"
GENERATIONS_BEGIN = 1_735_689_600  # 2025-01-01, as seconds since 1970


def move(channel: Channel, version: Version) -> None:
    """Points the channel at a version with the next serial. The caller is in a transaction and holds the channel's
    row.
    """
    if channel.serial == 0:  # after a restore, islands may remember an earlier channel of this name
        highest = Channel.objects.filter(run=channel.run_id).aggregate(highest=Max("generation"))["highest"]
        Channel.objects.filter(pk=channel.pk).update(generation=highest)
        channel.generation = highest
    _write(channel, version, channel.serial + 1)
    _notify(channel)


def raise_generation(*, actor: str) -> int:
    """The end of every restore from a backup: a new generation for every head; returns it.

    Serials went back with the database, and islands refuse a serial below the highest that they saw; a higher
    generation outranks any serial. Seconds since GENERATIONS_BEGIN make the number higher than that of any restore
    before, of this backup or another, which the restored rows can't know of. See docs/adr/generation-of-heads.md.
    """
    with transaction.atomic():
        channels = list(Channel.objects.select_for_update(of=["self"]).select_related("version__epoch").order_by("pk"))
        before = max((channel.generation for channel in channels), default=0)
        generation = max(before + 1, int(clock.now().timestamp()) - GENERATIONS_BEGIN)
        Channel.objects.update(generation=generation)
        for channel in channels:
            channel.generation = generation
            if channel.version is not None:
                _write(channel, channel.version, channel.serial + 1)
                _notify(channel)
        audit.record(
            None, actor, "heads.raise_generation", f"{len(channels)} channels",
            before={"generation": before}, after={"generation": generation},
        )  # fmt: skip
    return generation


def _notify(channel: Channel) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_notify(%s, %s)", [NOTIFICATION, f"{channel.run_id}/{channel.name}"])


def renew_heads() -> int:
    """Gives every head that is past half of its life, or is not signed by the keys of today, a new expiry under the
    same serial; returns how many.

    Also puts back what is missing beside the blobs.
    """
    limit, names = timedelta(days=settings.MAILBOAT_HEAD_DAYS) / 2, set(head_keys.public().values())
    held = Channel.objects.filter(version__isnull=False)
    due = list(held.filter(expires_at__lt=Now() + limit).values_list("pk", flat=True))
    others = held.exclude(pk__in=due).values_list("pk", "head_envelope__signatures")
    due += [key for key, signatures in others if {item["keyid"] for item in signatures} != names]
    _renew(due)
    beside.put_back()
    return len(due)


def announce_keys() -> int:
    """After a change of the head keys: each older key vouches for the newer ones, and every head is signed anew.

    Returns how many heads there are.
    """
    keys = head_keys.current()
    for number, public_key in head_keys.public().items():
        document = KeyDocument(HEAD, None, public_key)
        older = [private for other, private in sorted(keys.items()) if other < number]
        if older:
            envelope = endorse(document, older[0])
            for private in older[1:]:
                envelope = sign(envelope, private)
            beside.write_key(None, public_key, envelope)
    every = list(Channel.objects.filter(version__isnull=False).values_list("pk", flat=True))
    _renew(every)
    return len(every)


def _renew(keys: Iterable[int]) -> None:
    for key in keys:
        with transaction.atomic():
            channel = Channel.objects.select_for_update(of=["self"]).select_related("version__epoch").get(pk=key)
            if channel.version is not None:
                _write(channel, channel.version, channel.serial)


def _write(channel: Channel, version: Version, serial: int) -> None:
    issued = clock.now()
    expires = issued + timedelta(days=settings.MAILBOAT_HEAD_DAYS)
    head = Head(
        run=str(channel.run_id),
        channel=channel.name,
        version=version.number,
        epoch=version.epoch.number,
        manifest=version.manifest_sha256,
        state=version.state_digest,
        generation=channel.generation,
        serial=serial,
        issued=int(issued.timestamp()),
        expires=int(expires.timestamp()),
    )
    envelope = Envelope.wrap(HEAD_TYPE, head.to_bytes())
    for private in head_keys.current().values():
        envelope = sign(envelope, private)
    before = {item["keyid"] for item in (channel.head_envelope or {}).get("signatures", ())}
    if before and before.isdisjoint(signature.keyid for signature in envelope.signatures):
        log.error(
            "no key of the head before signs this one: machines with other MAILBOAT_HEAD_KEYS?", channel=str(channel)
        )
    rows = Channel.objects.filter(pk=channel.pk, serial=channel.serial).update(
        version=version,
        serial=serial,
        head_envelope=envelope.to_dict(),
        expires_at=expires,
        revision=F("revision") + int(serial != channel.serial),
    )
    if rows != 1:
        raise WrongState(f"The channel {channel.name} moved meanwhile; nothing was changed.")
    channel.refresh_from_db()
    transaction.on_commit(lambda: beside.write_head(channel), robust=True)
