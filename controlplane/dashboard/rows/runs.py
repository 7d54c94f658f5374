"""Rows of runs and their versions."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import Count, Max, Q, Sum
from django.urls import reverse

from controlplane.dashboard import badges, charts, wording
from controlplane.dashboard.badges import Badge, badge
from controlplane.fleet.models import Island
from controlplane.registry import selectors as registry
from controlplane.registry.errors import Missing
from controlplane.registry.models import Anchor, Channel, Patch, Project, Run, Version

PAGE = 25


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
        points.append(charts.SizePoint(version.number, count, is_patch, address, note))
    return points[::-1]


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
    for version_id, name in Channel.objects.filter(run=run, version__isnull=False).values_list("version_id", "name"):
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
        Version.objects.select_related("parent", "epoch", "inventory")
        .defer("envelope")
        .filter(run=run, number=number)
        .first()
    )
    if found is None:
        raise Missing(f"There is no version {number} in this run.")
    return found


def lineage(version: Version) -> dict[str, Any]:
    """Anchor, patches in and out, channels and islands of a version."""
    patches = Patch.objects.select_related("from_version", "to_version").annotate(part_count=Count("parts"))
    return {
        "anchor": Anchor.objects.filter(version=version).first(),
        "patches_in": list(patches.filter(to_version=version)),
        "patches_out": list(patches.filter(from_version=version)),
        "channels": list(Channel.objects.filter(version=version).values_list("name", flat=True)),
        "islands": list(Island.objects.filter(verified_version=version).order_by("name")),
    }
