"""Heads: the serially numbered, expiring documents that say where a channel stands.

A head is written in the transaction that moves its channel and wakes the waiting islands when that commits. Beside the
blobs it appears only after the commit, so that the file never says more than the database.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import structlog
from django.conf import settings
from django.db import connection, transaction
from django.db.models import F, Max
from django.db.models.functions import Now

from controlplane.audit import services as audit
from controlplane.registry import blobs, clock
from controlplane.registry.errors import Refusal, WrongState
from controlplane.registry.models import Channel, Version
from mailboat.manifest import HEAD_TYPE, Envelope, Head

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
    """Gives every head that is past half of its life a new expiry under the same serial; returns how many.

    Also puts back what is missing beside the blobs.
    """
    limit = timedelta(days=settings.MAILBOAT_HEAD_DAYS) / 2
    due = list(Channel.objects.filter(version__isnull=False, expires_at__lt=Now() + limit).values_list("pk", flat=True))
    for key in due:
        with transaction.atomic():
            channel = Channel.objects.select_for_update(of=["self"]).select_related("version__epoch").get(pk=key)
            if channel.version is not None:
                _write(channel, channel.version, channel.serial)
    for channel in Channel.objects.filter(version__isnull=False):
        if blobs.store().read_head(channel.run_id, channel.name) is None:
            write_file(channel)
    return len(due)


def write_file(channel: Channel) -> None:
    """Copies the head beside the blobs. A store that is full or away is logged: the database holds the truth, and the
    next move (or renewal) writes again.
    """
    channel.refresh_from_db(fields=["head_envelope"])
    try:
        blobs.store().write_head(channel.run_id, channel.name, encoded(channel.head_envelope))
    except (Refusal, OSError) as error:
        log.error("head not written beside the blobs", channel=str(channel), error=str(error))


def encoded(envelope: Any) -> bytes:
    """The bytes of an envelope as served: the same for the file, the answer and the ETag."""
    return json.dumps(envelope, sort_keys=True, separators=(",", ":")).encode()


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
    envelope = Envelope.wrap(HEAD_TYPE, head.to_bytes()).to_dict()
    rows = Channel.objects.filter(pk=channel.pk, serial=channel.serial).update(
        version=version,
        serial=serial,
        head_envelope=envelope,
        expires_at=expires,
        revision=F("revision") + int(serial != channel.serial),
    )
    if rows != 1:
        raise WrongState(f"The channel {channel.name} moved meanwhile; nothing was changed.")
    channel.refresh_from_db()
    transaction.on_commit(lambda: write_file(channel), robust=True)
