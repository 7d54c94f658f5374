"""What a few letters may mean: an island, a run, `run v7`, a job, or something with that digest. Only the project's
own things; an exact name wins over everything that only looks like it.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

from django.db.models import Q, QuerySet
from django.urls import reverse

from controlplane.dashboard import wording
from controlplane.fleet.models import Island
from controlplane.jobs.models import Job
from controlplane.registry.models import Project, Run, Version

MOST = 20
SHORTEST_DIGEST = 4
_VERSION = re.compile(r"(?P<run>[\w-]+)[\s/]+(?:versions?[\s/]+)?v?(?P<number>\d{1,15})")
_HEX = re.compile(rf"[0-9a-f]{{{SHORTEST_DIGEST},64}}")


@dataclass(frozen=True, slots=True)
class Hit:
    """Something that was found."""

    kind: str
    name: str
    note: str
    address: str


def hits(project: Project, asked: str) -> list[Hit]:
    """What the text may mean, the best first."""
    exact = _named(project, asked) or _numbered(project, asked) or _identified(project, asked)
    if exact:
        return exact
    return [*_similar(project, asked), *_digests(project, asked.lower())][:MOST]


def _named(project: Project, asked: str) -> list[Hit]:
    islands = Island.objects.filter(project=project, name=asked)
    runs = Run.objects.filter(project=project, name=asked)
    return [*map(_island, islands.select_related("project", "run")), *map(_run, runs.select_related("project"))]


def _numbered(project: Project, asked: str) -> list[Hit]:
    match = _VERSION.fullmatch(asked)
    if match is None:
        return []
    found = _versions(project).filter(run__name=match["run"], number=int(match["number"]))
    return [_version(row) for row in found]


def _identified(project: Project, asked: str) -> list[Hit]:
    try:
        key = uuid.UUID(asked)
    except ValueError:
        return []
    found = [_island(row) for row in Island.objects.filter(project=project, pk=key).select_related("project", "run")]
    found += [_job(row) for row in Job.objects.filter(project=project, pk=key).select_related("project")]
    return found + [_run(row) for row in Run.objects.filter(project=project, pk=key).select_related("project")]


def _similar(project: Project, asked: str) -> list[Hit]:
    islands = Island.objects.filter(Q(name__icontains=asked) | Q(hostname__icontains=asked), project=project)
    runs = Run.objects.filter(project=project, name__icontains=asked)
    return [
        *map(_run, runs.select_related("project").order_by("name")[:MOST]),
        *map(_island, islands.select_related("project", "run").order_by("name")[:MOST]),
    ]


def _digests(project: Project, asked: str) -> list[Hit]:
    if not _HEX.fullmatch(asked):
        return []
    same = Q(state_digest__startswith=asked) | Q(manifest_sha256__startswith=asked)
    return [_version(row) for row in _versions(project).filter(same).order_by("-number")[:MOST]]


def _versions(project: Project) -> QuerySet[Version]:
    return Version.objects.filter(run__project=project).select_related("run__project").defer("envelope", "side_files")


def _island(row: Island) -> Hit:
    address = reverse("dashboard:island", args=[row.project.slug, row.pk])
    return Hit("Island", row.name, " ".join(filter(None, [row.provider, row.region, row.run.name])), address)


def _run(row: Run) -> Hit:
    return Hit("Run", row.name, row.served_format, reverse("dashboard:run", args=[row.project.slug, row.name]))


def _version(row: Version) -> Hit:
    address = reverse("dashboard:version", args=[row.run.project.slug, row.run.name, row.number])
    return Hit("Version", f"{row.run.name} v{row.number}", wording.short(row.state_digest), address)


def _job(row: Job) -> Hit:
    return Hit("Job", row.kind, row.state, reverse("dashboard:job", args=[row.project.slug, row.pk]))
