"""Work that people start: replays, verifications, merges, anchors, collections. A second trigger joins the job."""

from __future__ import annotations

import uuid

from django.db import transaction

from controlplane.fleet import selectors as fleet
from controlplane.jobs import services
from controlplane.jobs.models import Job
from controlplane.registry import merging
from controlplane.registry import selectors as registry
from controlplane.registry.errors import Refusal
from controlplane.registry.models import Project, Run, Version


def replay(project: Project, run: str, version: int, *, actor: str) -> tuple[Job, bool]:
    """Rebuilds a version from the nearest anchor and compares it with the record. Raises Missing, Refusal
    `not_ready`.
    """
    row = registry.version(registry.run(project, run), version)
    if row.state != Version.State.READY:
        raise Refusal(f"Version {version} is {row.state}; only ready versions can be replayed.", code="not_ready")
    with transaction.atomic():
        return services.enqueue(
            Job.Kind.REPLAY, row.run, {"version": version}, f"replay:{row.run_id}:{version}", requested_by=actor
        )


def verify(project: Project, island: uuid.UUID | str, *, actor: str) -> tuple[Job, bool]:
    """Challenges an island over what it holds. Raises Missing, Refusal `nothing_held`."""
    row = fleet.island(project, island)
    if row.verified_version is None:
        raise Refusal(f"The island {row.name} has not reported any verified version yet.", code="nothing_held")
    with transaction.atomic():
        return services.enqueue(
            Job.Kind.VERIFY, row.run, {"island": str(row.pk)}, f"verify:{row.pk}", requested_by=actor
        )


def merge(run: Run, origin: int, to: int, *, actor: str) -> tuple[Job, bool]:
    """Builds the one patch from a version to another. Raises Missing, Refusal `not_ready`, `no_patch`."""
    ends = [registry.version(run, number) for number in (origin, to)]
    for row in ends:
        if row.state != Version.State.READY:
            raise Refusal(f"Version {row.number} is {row.state}; patches join ready versions.", code="not_ready")
    if origin == to or ends[0].inventory_id != ends[1].inventory_id:
        raise Refusal("A patch joins two versions with the same tensors; name two such versions.", code="no_patch")
    with transaction.atomic():
        return merging.enqueue(run, origin, to, why=merging.ASKED, actor=actor)


def anchor(run: Run, version: int, *, actor: str) -> tuple[Job, bool]:
    """Makes a full checkpoint of a ready version, where newcomers can start. Raises Missing, Refusal `not_ready`."""
    row = registry.version(run, version)
    if row.state != Version.State.READY:
        raise Refusal(f"Version {version} is {row.state}; only ready versions get an anchor.", code="not_ready")
    with transaction.atomic():
        return merging.enqueue_anchor(run, version, actor=actor)


def collect(run: Run, *, actor: str) -> tuple[Job, bool]:
    """Removes what the run no longer keeps."""
    with transaction.atomic():
        return services.enqueue(Job.Kind.COLLECT, run, {}, f"collect:{run.pk}", requested_by=actor)
