"""When islands hear of a version: `latest` moves once it is proven, or as soon as it is committed with the proof to
follow (`announce: committed`).

The caller is in a transaction and holds the run's lock. A version that was announced and then fails takes its heads
back, by a higher serial on the last version that is ready; what was never proven must not stay announced.
"""

from __future__ import annotations

from django.db.models import Q, QuerySet

from controlplane.audit import services as audit
from controlplane.registry import heads
from controlplane.registry.models import Channel, Run, Version

State = Version.State


def servable(run: Run) -> QuerySet[Version]:
    """The versions of a run that islands may be led to: ready ones, and those that were announced at their commit."""
    return Version.objects.filter(Q(state=State.READY) | ~Q(manifest_sha256=""), run=run, state__in=states(run))


def states(run: Run) -> tuple[str, ...]:
    """In which states they are; a version that is not ready must have its manifest, too."""
    early = (State.COMMITTED, State.VALIDATING) if run.announce == Run.Announce.COMMITTED else ()
    return (State.READY, *early)


def announce(version: Version) -> None:
    """Moves `latest` to the version, unless it is protected, there already or further on."""
    chosen = Channel.objects.select_for_update(of=["self"]).select_related("version")
    channel = chosen.get(run=version.run_id, name=Channel.LATEST)
    if not channel.protected and (channel.version is None or channel.version.number < version.number):
        heads.move(channel, version)


def announce_early(run: Run, version: Version) -> None:
    """The same before the validation, where the run wants that and there is a ready version to fall back to."""
    if run.announce == Run.Announce.COMMITTED and Version.objects.filter(run=run, state=State.READY).exists():
        announce(version)


def take_back(version: Version) -> None:
    """Leads every channel that points at a failed version to the last ready one before it."""
    before = Version.objects.filter(run=version.run_id, state=State.READY, number__lt=version.number)
    target = before.select_related("epoch").order_by("-number").first()
    if target is None:  # then it was not announced either
        return
    for channel in Channel.objects.select_for_update(of=["self"]).filter(version=version):
        heads.move(channel, target)
        audit.record(
            version.run.project,
            "system",
            "channel.edit",
            f"run {version.run.name} channel {channel.name}",
            before={"version": version.number},
            after={"version": target.number, "reason": "The version failed its validation."},
        )
