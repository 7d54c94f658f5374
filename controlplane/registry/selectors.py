"""Reads of the registry. The number of queries never grows with the number of rows."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from django.db.models import Exists, OuterRef, QuerySet

from controlplane.registry.errors import Missing
from controlplane.registry.models import Anchor, Blob, Channel, Epoch, Project, Run, Upload, Version

READY = Version.State.READY


def project(slug: str) -> Project:
    """A project by its slug. Raises Missing."""
    found = Project.objects.filter(slug=slug).first()
    if found is None:
        raise Missing(f"There is no project {slug}.")
    return found


def runs(project: Project) -> QuerySet[Run]:
    """The runs of a project, newest first."""
    return Run.objects.filter(project=project).select_related("source").order_by("-created_at", "name")


def run(project: Project, name: str) -> Run:
    """A run by its name. Raises Missing."""
    found = Run.objects.select_related("project", "source").filter(project=project, name=name).first()
    if found is None:
        raise Missing(f"There is no run {name} in this project.")
    return found


def epochs(run: Run) -> QuerySet[Epoch]:
    """The epochs of a run with the versions that they began from."""
    return Epoch.objects.filter(run=run).select_related("from_version")


def channels(run: Run) -> QuerySet[Channel]:
    """The channels of a run, but not those that pin a single island."""
    return Channel.objects.filter(run=run).exclude(name__startswith=Channel.PINS).select_related("run", "version")


def standing(runs: Sequence[Run]) -> tuple[dict[uuid.UUID, Epoch], dict[uuid.UUID, Version]]:
    """The current epoch and the newest ready version of each run, by the run's key."""
    epochs = Epoch.objects.filter(run__in=runs).select_related("from_version")
    epochs = epochs.defer("from_version__envelope", "from_version__side_files")
    epochs = epochs.order_by("run", "-number").distinct("run")
    ready = Version.objects.filter(run__in=runs, state=READY).order_by("run", "-number").distinct("run")
    return {row.run_id: row for row in epochs}, {row.run_id: row for row in ready.defer("envelope", "side_files")}


def current_epoch(run: Run) -> Epoch:
    """The epoch in which the run is published now."""
    return Epoch.objects.filter(run=run).select_related("from_version").order_by("-number")[0]


def latest_ready(run: Run) -> Version | None:
    """The newest version that islands may hold."""
    return Version.objects.filter(run=run, state=READY).order_by("-number").first()


def versions(run: Run, *, state: str = "", before: int | None = None) -> QuerySet[Version]:
    """The versions of a run with all that is shown of them, newest first."""
    found = (
        Version.objects.filter(run=run)
        .select_related("run", "epoch", "parent", "inventory", "job", "anchor", "statistics")
        .prefetch_related("patches_in__parts__blob")
        .order_by("-number")
    )
    if state:
        found = found.filter(state=state)
    return found if before is None else found.filter(number__lt=before)


def versions_in_short(run: Run) -> QuerySet[Version]:
    """The versions of a run without their documents: a row costs the same however many tensors and files it has."""
    chosen = Version.objects.filter(run=run).select_related("run", "epoch", "parent", "inventory", "statistics")
    return chosen.defer("envelope", "side_files", "parent__envelope", "parent__side_files").annotate(
        anchored=Exists(Anchor.objects.filter(version=OuterRef("pk")))
    )


def version(run: Run, number: int) -> Version:
    """One version. Raises Missing."""
    found = versions(run).filter(number=number).first()
    if found is None:
        raise Missing(f"There is no version {number} in this run.")
    return found


def channel(run: Run, name: str) -> Channel:
    """A channel; its version is read when it is asked for, since whoever waits for a head does not. Raises Missing."""
    found = next(iter(Channel.objects.filter(run=run, name=name).order_by()[:1]), None)
    if found is None:
        raise Missing(f"There is no channel {name} in this run.")
    found.run = run
    return found


def blob(run: Run, sha256: str) -> Blob:
    """A blob of this run, never of another. Raises Missing."""
    found = Blob.objects.filter(run=run, sha256=sha256).first()
    if found is None:
        raise Missing("There is no such blob in this run.")
    return found


def upload(run: Run, key: Any) -> Upload:
    """An unfinished upload of this run. Raises Missing."""
    found = Upload.objects.filter(run=run, pk=key).first()
    if found is None:
        raise Missing("There is no such upload in this run; announce the blob again to see where it stands.")
    return found


def heads(project: Project) -> QuerySet[Channel]:
    """The channel `latest` of every run of a project."""
    found = Channel.objects.filter(run__project=project, name=Channel.LATEST)
    return found.select_related("run", "version").order_by("run__name")
