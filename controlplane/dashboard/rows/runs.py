"""Rows of runs and their versions."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Count, F, Max, Min, Q, Sum
from django.db.models.functions import Abs, TruncHour
from django.urls import reverse

from controlplane.dashboard import badges, charts, wording
from controlplane.dashboard.badges import Badge, badge
from controlplane.fleet import outline
from controlplane.fleet import staleness as budgets
from controlplane.fleet.models import Breach, Island
from controlplane.registry import routes as planning
from controlplane.registry import selectors as registry
from controlplane.registry.errors import Missing, Refusal
from controlplane.registry.models import Anchor, Blob, Channel, Epoch, Patch, Project, Run, Version

PAGE = 25
HOURS = 24
HOLDERS = 12
LOOK_BACK = 10
BREACHES = 8
VARIANT_VERSIONS = 8
WAYS: dict[str, str] = {
    Patch.Kind.STEP: "Step patches",
    Patch.Kind.MERGED: "Merged patches",
    Patch.Kind.REVERSE: "Reverse patches",
    Anchor.Kind.UPLOAD: "Anchors, uploaded",
    Anchor.Kind.BUILT: "Anchors, built here",
    Anchor.Kind.REFERENCE: "Anchors that lie elsewhere",
}


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run in the list of runs."""

    run: Run
    head: int | None
    versions: int
    islands: int
    full_bytes: int | None
    committed_at: datetime | None


def run_rows(project: Project) -> list[RunRow]:
    """The runs of a project with their figures."""
    channels = Channel.objects.filter(run__project=project, name=Channel.LATEST)
    heads = dict(channels.values_list("run_id", "version__number"))
    islands = dict(Island.objects.filter(project=project).values_list("run_id").annotate(Count("id")))
    found = Version.objects.filter(run__project=project).values("run_id")
    facts = {
        row["run_id"]: row for row in found.annotate(n=Count("id"), full=Max("full_bytes"), last=Max("committed_at"))
    }
    return [
        RunRow(
            run=run,
            head=heads.get(run.pk),
            versions=facts[run.pk]["n"] if run.pk in facts else 0,
            islands=islands.get(run.pk, 0),
            full_bytes=facts[run.pk]["full"] if run.pk in facts else None,
            committed_at=facts[run.pk]["last"] if run.pk in facts else None,
        )
        for run in registry.runs(project)
    ]


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The figures on top of a run's page. Sizes in bytes; `instead_bytes` is what full checkpoints would have cost."""

    versions: int
    full_bytes: int | None
    median_patch: int | None
    density: str
    patch_bytes: int
    instead_bytes: int


def run_figures(run: Run) -> RunFigures:
    """Totals over all versions, medians over the last hundred patches."""
    patched = Q(patch_bytes__isnull=False)
    total = Version.objects.filter(run=run).aggregate(
        n=Count("id"), patches=Sum("patch_bytes", filter=patched), instead=Sum("full_bytes", filter=patched)
    )
    recent = list(
        Version.objects.filter(patched, run=run)
        .order_by("-number")
        .values_list("patch_bytes", "changed", "elements", "full_bytes")[:100]
    )
    newest = Version.objects.filter(run=run, full_bytes__isnull=False).order_by("-number").first()
    sizes = [size for size, *_ in recent if size is not None]
    shares = [changed / elements for _, changed, elements, _ in recent if changed is not None and elements]
    return RunFigures(
        versions=total["n"],
        full_bytes=newest.full_bytes if newest else None,
        median_patch=int(statistics.median(sizes)) if sizes else None,
        density=wording.share(statistics.median(shares), 1) if shares else "",
        patch_bytes=total["patches"] or 0,
        instead_bytes=total["instead"] or 0,
    )


def size_points(run: Run, last: int) -> list[charts.SizePoint]:
    """The last versions of known size, oldest first, for the chart."""
    known = Version.objects.filter(run=run, full_bytes__isnull=False).exclude(state=Version.State.FAILED)
    points = []
    for version in known.select_related("run__project").defer("envelope", "side_files").order_by("-number")[:last]:
        is_patch = version.patch_bytes is not None
        count = version.patch_bytes if version.patch_bytes is not None else version.full_bytes or 0
        note = f"Version {version.number}: {'patch' if is_patch else 'anchor'} of {wording.size(count)}"
        if is_patch:
            note += f", {wording.share(count, version.full_bytes)} of the full size"
        address = reverse("dashboard:version", args=[run.project.slug, run.name, version.number])
        density = None if version.changed is None or not version.elements else version.changed / version.elements
        steps = None if version.unit_steps is None or not version.changed else version.unit_steps / version.changed
        points.append(charts.SizePoint(version.number, count, is_patch, address, note, density, steps))
    return points[::-1]


@dataclass(frozen=True, slots=True)
class ChannelRow:
    """A channel of a run with how far its islands have come."""

    channel: Channel
    islands: int
    arrived: int


def channel_rows(run: Run) -> list[ChannelRow]:
    """The channels of a run, `latest` first. Pins of single islands are no channels for people."""
    arrived = Q(islands__verified_version=F("version"))
    found = (
        registry.channels(run)
        .defer("version__envelope", "version__side_files", "head_envelope")
        .annotate(followers=Count("islands"), arrived=Count("islands", filter=arrived))
    )
    ordered = sorted(found, key=lambda channel: (channel.name != Channel.LATEST, channel.name))
    return [ChannelRow(channel, channel.followers, channel.arrived) for channel in ordered]


@dataclass(frozen=True, slots=True)
class Storage:
    """What a run keeps, in bytes."""

    blobs: int
    bytes: int
    anchors: tuple[tuple[int, str, int], ...]


def storage(run: Run) -> Storage:
    """Blobs of the run, and its newest anchors: version, kind, bytes."""
    total = Blob.objects.filter(run=run).aggregate(n=Count("id"), bytes=Sum("size"))
    anchors = Anchor.objects.filter(version__run=run).order_by("-version__number")
    return Storage(total["n"], total["bytes"] or 0, tuple(anchors.values_list("version__number", "kind", "bytes")[:5]))


@dataclass(frozen=True, slots=True)
class Ways:
    """What routes of a run are made of, of one kind: how many, their bytes, the most versions that one spans."""

    name: str
    count: int
    bytes: int
    span: int | None


def ways(run: Run) -> list[Ways]:
    """Step, merged and reverse patches, and anchors; kinds that the run has none of are left out."""
    span = Abs(F("to_version__number") - F("from_version__number"))
    patches = Patch.objects.filter(run=run).values("kind").annotate(n=Count("id"), size=Sum("bytes"), span=Max(span))
    anchors = Anchor.objects.filter(version__run=run)
    sizes = anchors.values("kind").annotate(n=Count("id"), size=Sum("bytes"))
    found = {row["kind"]: Ways(WAYS[row["kind"]], row["n"], row["size"], row["span"]) for row in patches}
    found |= {row["kind"]: Ways(WAYS[row["kind"]], row["n"], row["size"], None) for row in sizes}
    return [found[kind] for kind in WAYS if kind in found]


@dataclass(frozen=True, slots=True)
class Staleness:
    """The budget of a run in words, how many of its islands are over it now, and the newest breaches."""

    budget: str
    over: int
    islands: int
    breaches: tuple[Breach, ...]


def staleness(run: Run) -> Staleness:
    """What the run allows, and who is beyond it."""
    allowed = []
    if run.staleness_versions is not None:
        allowed.append(wording.plural(run.staleness_versions, "version"))
    if run.staleness_seconds is not None:
        allowed.append(wording.duration(run.staleness_seconds))
    mine = [row for row in outline.standings(run.project) if row.island.run_id == run.pk and row.island.enabled]
    over = sum(bool(budgets.excess(row)) for row in mine)
    return Staleness(" or ".join(allowed), over, len(mine), tuple(budgets.breaches(run)[:BREACHES]))


@dataclass(frozen=True, slots=True)
class EpochRow:
    """An epoch: what it goes on from, its first version, and the versions that were given up when it began."""

    epoch: Epoch
    first: int | None
    given_up: tuple[int, int] | None


def epoch_rows(run: Run) -> list[EpochRow]:
    """The epochs of a run, newest first."""
    firsts = dict(Version.objects.filter(run=run).order_by().values_list("epoch").annotate(Min("number")))
    rows = []
    for epoch in registry.epochs(run).order_by("-number"):
        first = firsts.get(epoch.pk)
        base = None if epoch.from_version is None else epoch.from_version.number
        gap = None if first is None or base is None or first - base <= 1 else (base + 1, first - 1)
        rows.append(EpochRow(epoch, first, gap))
    return rows


def published_per_hour(run: Run, now: datetime) -> list[tuple[datetime, int]]:
    """Versions committed in each of the last 24 hours, the oldest first."""
    first = now.replace(minute=0, second=0, microsecond=0) - timedelta(hours=HOURS - 1)
    found = Version.objects.filter(run=run, committed_at__gte=first).order_by()
    counts = dict(found.values_list(TruncHour("committed_at")).annotate(Count("id")))
    hours = [first + timedelta(hours=index) for index in range(HOURS)]
    return [(hour, counts.get(hour, 0)) for hour in hours]


@dataclass(frozen=True, slots=True)
class Route:
    """How an island would get to a version: from where, in how many steps, with how many bytes and seconds."""

    begin: str
    steps: str
    bytes: int | None
    why_not: str = ""
    seconds: float | None = None


def routes(version: Version) -> list[Route]:
    """The route from nothing, and from ten versions before or the oldest that is nearer."""
    if version.state != Version.State.READY:
        return []
    earlier = Version.objects.filter(run=version.run_id, number__lt=version.number, state=Version.State.READY)
    begins = list(earlier.order_by("-number").values_list("number", "state_digest")[:LOOK_BACK])
    picked = [("nothing", "")] + [(f"v{number}", digest) for number, digest in begins[-1:]]
    return [replace(route(version.run, digest, version.number), begin=begin) for begin, digest in picked]


def route(run: Run, held: str, number: int) -> Route:
    """One route; `why_not` tells why there is none."""
    try:
        plan = planning.find(run, held, number)
    except Refusal as refusal:
        return Route("", "", None, refusal.detail)
    kinds = [step.get("via", "anchor") for step in plan.steps]
    words = [
        wording.plural(kinds.count(kind), word, many)
        for kind, word, many in (
            ("anchor", "anchor", ""),
            ("step", "patch", "patches"),
            ("merged", "merged patch", "merged patches"),
            ("reverse", "reverse patch", "reverse patches"),
        )
        if kind in kinds
    ]
    return Route("", " and ".join(words) or "nothing to do", plan.bytes, seconds=plan.seconds)


@dataclass(frozen=True, slots=True)
class VersionRow:
    """A version in a run's table."""

    version: Version
    state: Badge
    channels: tuple[str, ...]
    islands: int
    replayable: bool


def replayable(version: Version) -> bool:
    """True when the record names every byte, so that a rebuild can be compared with it."""
    return version.state == Version.State.READY


def version_badge(version: Version) -> Badge:
    """The state of a version for people."""
    return badge(badges.VERSION, version.state, version.reason)


def version_rows(run: Run, before: int | None) -> tuple[list[VersionRow], int | None]:
    """A page of versions, newest first, and the number that the next page starts below."""
    found = Version.objects.filter(run=run).defer("envelope", "side_files").order_by("-number")
    if before is not None:
        found = found.filter(number__lt=before)
    page = list(found[: PAGE + 1])
    more = page[PAGE - 1].number if len(page) > PAGE else None
    page = page[:PAGE]
    heads: dict[int, list[str]] = {}
    for version_id, name in Channel.objects.filter(run=run).needing().values_list("version_id", "name"):
        heads.setdefault(version_id, []).append(name)
    islands = dict(
        Island.objects.filter(run=run, verified_version__isnull=False)
        .values_list("verified_version")
        .annotate(Count("id"))
    )
    rows = [
        VersionRow(v, version_badge(v), tuple(heads.get(v.pk, ())), islands.get(v.pk, 0), replayable(v)) for v in page
    ]
    return rows, more


def version(run: Run, number: int) -> Version:
    """One version with what its page names. Raises Missing."""
    found = (
        Version.objects.select_related("run__project", "parent", "epoch", "inventory", "statistics")
        .defer("envelope")
        .filter(run=run, number=number)
        .first()
    )
    if found is None:
        raise Missing(f"There is no version {number} in this run.")
    return found


def version_or_none(run: Run, number: int) -> Version | None:
    """The same for a number that somebody typed."""
    try:
        return version(run, number)
    except Missing:
        return None


def lineage(version: Version) -> dict[str, Any]:
    """Anchor, patches in and out, channels and islands of a version."""
    patches = Patch.objects.select_related("from_version", "to_version").annotate(part_count=Count("parts"))
    return {
        "children": list(version.children.defer("envelope", "side_files").order_by("number")[:5]),
        "anchor": Anchor.objects.filter(version=version).first(),
        "patches_in": list(patches.filter(to_version=version)),
        "patches_out": list(patches.filter(from_version=version)),
        "channels": list(Channel.objects.filter(version=version).needing().values_list("name", flat=True)),
        "islands": list(Island.objects.filter(verified_version=version).order_by("name")[:HOLDERS]),
        "holders": Island.objects.filter(verified_version=version).count(),
    }
