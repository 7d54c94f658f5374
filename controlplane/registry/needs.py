"""Who needs which versions of a run: its limits, channels, leases, islands and unfinished work. Reads alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from django.db.models import Q
from django.db.models.functions import Now

from controlplane.fleet.models import Island
from controlplane.jobs.models import Job
from controlplane.registry import clock
from controlplane.registry.leases import ISLANDS
from controlplane.registry.models import Channel, Epoch, Run, Version, VersionLease

LIVE = timedelta(days=1)  # an island that was heard of within this time may come back to where it was
LONGEST_DAYS = 36_500  # that a run may keep versions for; a limit beyond would leave the calendar
Row = tuple[int, int, int | None, str, datetime]  # of a version: key, number, parent, state, committed_at


def wanted(run: Run, ready: Sequence[Row]) -> dict[int, str]:
    """Versions that stay for their own sake, with the reason."""
    keys = [row[0] for row in ready]
    if run.keep_versions is None and run.keep_days is None:
        return dict.fromkeys(keys, "the run has no limit")
    found = dict.fromkeys(keys[-1:], "the newest")
    if run.keep_versions is not None:
        found |= dict.fromkeys(keys[-run.keep_versions :], f"one of the newest {run.keep_versions}")
    if run.keep_days is not None:
        oldest = clock.now() - timedelta(days=min(run.keep_days, LONGEST_DAYS))
        found |= {key: f"not older than {run.keep_days} days" for key, *_, at in ready if at >= oldest}
    pending = Version.objects.filter(run=run, state__in=Version.IN_FLIGHT)
    current = Epoch.objects.filter(run=run).order_by("-number").values_list("from_version", flat=True)[:1]
    found |= _because("an unfinished version starts from it", pending.values_list("parent", flat=True))
    found |= _because("the epoch goes on from it", current)
    found |= _because("an unfinished job needs it", _of_jobs(run))
    leases = VersionLease.objects.filter(run=run, expires_at__gte=Now())
    found |= {key: f"leased to {holder}" for key, holder in leases.values_list("version", "holder")}
    channels = Channel.objects.filter(run=run).needing().values_list("version", "name", "pinned_island__name")
    for key, name, pinned in channels:
        found |= _because(f"{pinned} is pinned to it" if pinned else f"{name} points at it", [key])
    return found


def _because(why: str, keys: Iterable[int | None]) -> dict[int, str]:
    return {key: why for key in keys if key is not None}


def _of_jobs(run: Run) -> list[int]:
    """Versions that unfinished jobs name, of this run or of one that is derived from it."""
    named: set[int] = set()
    work = Job.objects.filter(Q(run=run) | Q(run__source=run), state__in=Job.UNFINISHED)
    for params in work.values_list("params", flat=True):
        named |= {value for key in ("version", "from", "to", "source") if isinstance(value := params.get(key), int)}
    return list(Version.objects.filter(run=run, number__in=named).values_list("pk", flat=True))


def of_islands(run: Run) -> list[tuple[int, int]]:
    """What live islands hold, by their word or by proof, and where they go."""
    live = Island.objects.filter(run=run, last_seen_at__gte=Now() - LIVE)
    told = list(live.values_list("verified_version", "digest", "channel__version", "pin__version"))
    by_digest: dict[str, list[int]] = defaultdict(list)
    claims = {digest for _, digest, *_ in told if digest}
    for digest, key in Version.objects.filter(run=run, state_digest__in=claims).values_list("state_digest", "pk"):
        by_digest[digest].append(key)
    pairs = set()
    for verified, digest, channel, pin in told:
        target = pin or channel
        for held in {verified, *by_digest.get(digest, ())} - {None}:
            if target is not None:
                pairs.add((held, target))
    return sorted(pairs | _on_the_way(run))


def _on_the_way(run: Run) -> set[tuple[int, int]]:
    """What islands fetch that hold nothing yet: they took a lease of the anchor with their plan."""
    leased = VersionLease.objects.filter(run=run, expires_at__gte=Now(), holder__startswith=ISLANDS)
    targets = Channel.objects.filter(run=run).needing().values_list("version", flat=True)
    return {(begin, target) for begin in leased.values_list("version", flat=True) for target in targets if target}
