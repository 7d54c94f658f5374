"""Reads of the registry. The number of queries never grows with the number of rows."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from django.db.models import Exists, OuterRef, Q, QuerySet

from controlplane.registry import plan as planning
from controlplane.registry.announcing import servable
from controlplane.registry.errors import Missing, Refusal
from controlplane.registry.models import Anchor, Blob, Channel, Epoch, PatchPart, Project, Run, Upload, Version

READY = Version.State.READY


def project(slug: str) -> Project:
    """A project by its slug. Raises Missing."""
    found = Project.objects.filter(slug=slug).first()
    if found is None:
        raise Missing(f"There is no project {slug}.")
    return found


def runs(project: Project) -> QuerySet[Run]:
    """The runs of a project, newest first."""
    return Run.objects.filter(project=project).order_by("-created_at", "name")


def run(project: Project, name: str) -> Run:
    """A run by its name. Raises Missing."""
    found = Run.objects.select_related("project").filter(project=project, name=name).first()
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
    epochs = Epoch.objects.filter(run__in=runs).order_by("run", "-number").distinct("run")
    ready = Version.objects.filter(run__in=runs, state=READY).order_by("run", "-number").distinct("run")
    return {row.run_id: row for row in epochs}, {row.run_id: row for row in ready.defer("envelope", "side_files")}


def current_epoch(run: Run) -> Epoch:
    """The epoch in which the run is published now."""
    return Epoch.objects.filter(run=run).order_by("-number")[0]


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


def plan(run: Run, from_digest: str, to: int | None) -> planning.Plan:
    """The route from what is held to version `to` (None: the newest ready one).

    Raises Missing, Refusal `unknown_base` and `no_route`.
    """
    target = latest_ready(run) if to is None else Version.objects.filter(run=run, number=to).first()
    if target is None:
        raise Missing(
            "There is no such version in this run." if to is not None else "The run has no ready version yet."
        )
    try:
        try:
            return planning.plan(plan_nodes(run, target.number, from_digest), target.number, from_digest)
        except planning.NoRoute:
            # After a rewind the chain passes by the nearest anchor: look at all there is before saying no.
            nodes = plan_nodes(run, target.number, from_digest, whole=True)
            return planning.plan(nodes, target.number, from_digest)
    except planning.UnknownBase as error:
        raise Refusal(str(error), code="unknown_base") from error
    except planning.NoRoute as error:
        raise Refusal(str(error), code="no_route") from error


def plan_nodes(run: Run, target: int, held: str, *, whole: bool = False) -> list[planning.Node]:
    """The rows from the nearest anchor (or the held version, when that is older) up to the target, and what is held.

    With `whole`, from the first version on.
    """
    up_to = servable(run).filter(number__lte=target)
    anchor = (
        Anchor.objects.filter(version__in=up_to).order_by("-version__number").values_list("version__number", flat=True)
    )
    oldest = 0 if whole else anchor.first() or 0
    holding = Q(state_digest=held) if held else Q(pk__in=[])
    newest_held = up_to.filter(holding).order_by("-number").values_list("number", flat=True).first()
    oldest = oldest if newest_held is None else min(oldest, newest_held)
    chosen = list(
        servable(run)
        .filter(Q(number__gte=oldest, number__lte=target) | holding)
        .values("pk", "number", "state_digest", "manifest_sha256", "parent__number")
    )
    keys = [row["pk"] for row in chosen]
    parts: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for key, sha256, size in (
        PatchPart.objects.filter(patch__to_version__in=keys, patch__kind="step")
        .order_by("patch", "index")
        .values_list("patch__to_version", "blob__sha256", "blob__size")
    ):
        parts[key].append((sha256, size))
    anchors = dict(Anchor.objects.filter(version__in=keys).values_list("version", "files"))
    return [
        planning.Node(
            number=row["number"],
            state_digest=row["state_digest"],
            manifest=row["manifest_sha256"],
            parent=row["parent__number"],
            parts=tuple(parts[row["pk"]]) if row["pk"] in parts else None,
            anchor=tuple(anchors[row["pk"]]) if row["pk"] in anchors else None,
        )
        for row in chosen
    ]


def heads(project: Project) -> QuerySet[Channel]:
    """The channel `latest` of every run of a project."""
    found = Channel.objects.filter(run__project=project, name=Channel.LATEST)
    return found.select_related("run", "version").order_by("run__name")
