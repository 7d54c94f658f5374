"""Reads of background work."""

from __future__ import annotations

import uuid

from django.db.models import Count, QuerySet

from controlplane.jobs.models import Job, JobEvent
from controlplane.registry.errors import Missing
from controlplane.registry.models import Project


def jobs(project: Project, *, state: str = "", kind: str = "") -> QuerySet[Job]:
    """The jobs of a project, newest first. `state` may also read `unfinished`."""
    found = Job.objects.filter(project=project).select_related("run").order_by("-queued_at", "-id")
    if state == "unfinished":
        found = found.filter(state__in=Job.UNFINISHED)
    elif state:
        found = found.filter(state=state)
    return found.filter(kind=kind) if kind else found


def job(project: Project, job_id: uuid.UUID | str) -> Job:
    """One job of the project. Raises Missing."""
    try:
        return Job.objects.select_related("run", "project").get(project=project, pk=uuid.UUID(str(job_id)))
    except (Job.DoesNotExist, ValueError):
        raise Missing(f"There is no job {job_id} in this project.") from None


def events(job: Job, *, after: int = 0, limit: int = 1000) -> list[JobEvent]:
    """The job's log lines after the one numbered `after`, oldest first."""
    return list(job.events.filter(pk__gt=after)[:limit])


def counts(project: Project) -> dict[str, int]:
    """Number of jobs per state; every state is present."""
    found = dict(Job.objects.filter(project=project).values_list("state").annotate(Count("id")))
    return {state: found.get(state, 0) for state in Job.State.values}
