"""What operators set: a run's settings, and where its channels point.

Each edit goes out from a revision that the operator saw and is one conditional UPDATE on it: of two edits at once one
wins and the other is told (412). A head's serial only rises; going back is a higher serial on an older version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import F

from controlplane.audit import services as audit
from controlplane.registry import heads, keys, merging
from controlplane.registry.errors import Changed, Missing, Refusal, Unacceptable
from controlplane.registry.models import Channel, Run, Version

SETTINGS = (
    "announce",
    "encode_for",
    "keep_versions",
    "keep_days",
    "anchor_every",
    "merge_up_to",
    "staleness_versions",
    "staleness_seconds",
)
AHEAD_OF_NEED = frozenset({"anchor_every", "merge_up_to"})


def edit_run(run: Run, changes: Mapping[str, Any], *, seen: int | None, actor: str) -> Run:
    """Writes settings (names of SETTINGS) over the revision `seen` (None: whichever it is). Raises Changed."""
    with transaction.atomic():
        row = Run.objects.select_related("project").select_for_update(of=["self"], no_key=True).get(pk=run.pk)
        if seen is not None and row.revision != seen:
            raise Changed
        before = {name: getattr(row, name) for name in SETTINGS}
        after = {name: changes.get(name, before[name]) for name in SETTINGS}
        if after == before:
            return row
        Run.objects.filter(pk=row.pk).update(**after, revision=F("revision") + 1)
        changed = [name for name in SETTINGS if after[name] != before[name]]
        audit.record(
            row.project,
            actor,
            "run.edit",
            f"run {row.name}",
            before={name: before[name] for name in changed},
            after={name: after[name] for name in changed},
        )
        row.refresh_from_db()
        if not AHEAD_OF_NEED.isdisjoint(changed):
            merging.queue_due(row)
    return row


def create_channel(run: Run, name: str, *, version: int | None, protected: bool, reason: str, actor: str) -> Channel:
    """A new channel, pointing at a ready version or still empty. Raises Changed when there is one, Missing,
    Refusal `not_ready`.
    """
    try:
        with transaction.atomic():
            channel = Channel.objects.create(run=run, name=name, protected=protected)
            target = None if version is None else _ready(run, version)
            if target is not None:
                heads.move(channel, target)
            audit.record(run.project, actor, "channel.create", _named(channel), after=_shown(channel, reason))
    except IntegrityError:
        raise Changed from None
    return channel


def edit_channel(
    channel: Channel, *, version: int | None, protected: bool | None, reason: str, seen: int | None, actor: str
) -> Channel:
    """Moves the channel to a ready version and protects it or not; None leaves either as it is.

    Moving to an older version is a rollback and needs a reason. Raises Changed, Missing, Refusal
    `not_ready`, Unacceptable `reason_required`.
    """
    with transaction.atomic():
        row = Channel.objects.select_for_update(of=["self"], no_key=True).select_related("version").get(pk=channel.pk)
        if seen is not None and row.revision != seen:
            raise Changed
        before = _shown(row, "")
        target = None if version is None else _ready(channel.run, version)
        moves = target is not None and target != row.version
        if moves and target is not None:
            if row.version is not None and target.number < row.version.number and not reason:
                raise Unacceptable(
                    f"Going back from version {row.version.number} to {target.number} needs a reason, which islands' "
                    "operators will read.",
                    code="reason_required",
                )
            heads.move(row, target)
            if before["version"] is not None and target.number < before["version"]:
                ahead = Version.objects.get(run=channel.run, number=before["version"])
                merging.queue_return(channel.run, ahead, target, actor=actor)
        protects = protected is not None and protected != row.protected
        if protects:
            Channel.objects.filter(pk=row.pk).update(protected=protected, revision=F("revision") + 1)
            row.refresh_from_db()
        if moves or protects:
            audit.record(
                channel.run.project, actor, "channel.edit", _named(channel), before=before, after=_shown(row, reason)
            )
    return row


def _ready(run: Run, number: int) -> Version:
    version = Version.objects.select_related("epoch", "run").filter(run=run, number=number).first()
    if version is None:
        raise Missing(f"There is no version {number} in this run.")
    if version.state != Version.State.READY:
        raise Refusal(f"Version {number} is {version.state}; a channel points at ready versions.", code="not_ready")
    keys.require_trusted(version)
    return version


def _shown(channel: Channel, reason: str) -> dict[str, Any]:
    """The channel in the audit log."""
    number = None if channel.version is None else channel.version.number
    shown = {"version": number, "serial": channel.serial, "protected": channel.protected}
    return shown | ({"reason": reason} if reason else {})


def _named(channel: Channel) -> str:
    return f"run {channel.run.name} channel {channel.name}"
