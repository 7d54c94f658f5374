"""Rows of jobs: what they are about, how far they are, what they left."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Q
from django.urls import reverse

from controlplane.dashboard import badges, wording
from controlplane.dashboard.badges import Badge, badge
from controlplane.fleet.models import Island
from controlplane.jobs import selectors
from controlplane.jobs.models import Job, JobEvent, Worker
from controlplane.registry import clock
from controlplane.registry.models import Project, Version

LISTED = 20
TITLES = {"build": "Build", "validate": "Validation", "replay": "Replay", "verify": "Verification"}


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job for people: `seconds` is its run time, `waited` its time in the queue."""

    job: Job
    title: str
    subject: str
    subject_address: str
    state: Badge
    progress: str
    seconds: float | None
    waited: float | None

    @property
    def heading(self) -> str:
        """Kind and subject: Replay of demo v3."""
        return f"{self.title} of {self.subject}" if self.subject else self.title


def job_row(job: Job, names: Mapping[str, str]) -> JobRow:
    """Put a job into words. `names` maps ids of islands to their names."""
    subject, address = _subject(job, names)
    started, finished = job.started_at, job.finished_at
    return JobRow(
        job=job,
        title=TITLES.get(job.kind, job.kind.capitalize()),
        subject=subject,
        subject_address=address,
        state=badge(badges.JOB, job.state, job.error),
        progress=_progress(job),
        seconds=(finished - started).total_seconds() if started and finished else None,
        waited=max(0.0, (started - job.queued_at).total_seconds()) if started else None,
    )


def _subject(job: Job, names: Mapping[str, str]) -> tuple[str, str]:
    slug = job.project.slug
    island = str(job.params.get("island") or "")
    if island:
        if island not in names:
            return "an island", ""
        return names[island], reverse("dashboard:island", args=[slug, island])
    number = job.params.get("version", job.params.get("number"))
    if job.run and isinstance(number, int):
        return f"{job.run.name} v{number}", reverse("dashboard:version", args=[slug, job.run.name, number])
    return (job.run.name, reverse("dashboard:run", args=[slug, job.run.name])) if job.run else ("", "")


def _progress(job: Job) -> str:
    if job.state == Job.State.QUEUED:
        return f"Waiting for {job.waiting_for}" if job.waiting_for else "Waiting for a worker"
    if not job.total:
        return "Started"
    if job.unit in ("bytes", "B"):
        return f"{wording.size(job.done)} of {wording.size(job.total)}"
    return f"{job.done:,} of {job.total:,} {job.unit}".rstrip()


def job_rows(jobs: Sequence[Job]) -> list[JobRow]:
    """Put jobs into words; one query for the names of their islands."""
    return [job_row(job, names) for names in [_island_names(jobs)] for job in jobs]


def _island_names(jobs: Sequence[Job]) -> dict[str, str]:
    wanted = [value for value in (_uuid(job.params.get("island")) for job in jobs) if value]
    if not wanted:
        return {}
    return {str(pk): name for pk, name in Island.objects.filter(pk__in=wanted).values_list("pk", "name")}


def _uuid(value: object) -> uuid.UUID | None:
    try:
        return uuid.UUID(str(value))
    except ValueError:
        return None


def jobs_of_version(version: Version) -> list[JobRow]:
    """The latest jobs about one version."""
    about = Q(params__version=version.number) | Q(params__number=version.number) | Q(versions=version)
    found = (
        Job.objects.filter(about, run_id=version.run_id)
        .select_related("run", "project")
        .order_by("-queued_at")
        .distinct()
    )
    return job_rows(list(found[:8]))


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a job's log with the tone of its level."""

    pk: int
    at: datetime
    level: str
    message: str
    tone: str


_TONES = {JobEvent.Level.WARNING.value: "warn", JobEvent.Level.ERROR.value: "bad"}


def log_lines(events: Sequence[JobEvent]) -> list[LogLine]:
    """Lines with their tone."""
    return [LogLine(event.pk, event.at, event.level, event.message, _TONES.get(event.level, "")) for event in events]


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A queue for people. `oldest_since` is when its oldest job that could start began to wait."""

    queue: selectors.QueueRow
    oldest_since: datetime | None
    starved: bool


def queue_rows(project: Project) -> list[QueueRow]:
    """The queues: the project's jobs in them, and who serves them."""
    now = clock.now()
    return [
        QueueRow(
            queue=row,
            oldest_since=None if row.oldest_seconds is None else now - timedelta(seconds=row.oldest_seconds),
            starved=row.queued > 0 and not row.workers,
        )
        for row in selectors.queues(project)
    ]


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker for people. `job` is the project's own; `busy` that it works at all."""

    worker: Worker
    state: Badge
    job: Job | None
    busy: bool
    versions: tuple[tuple[str, str], ...]


def worker_rows(project: Project) -> list[WorkerRow]:
    """Workers by name. The reason leaves out the seconds, which the page would change with each poll."""
    return [
        WorkerRow(
            worker=row.worker,
            state=badge(badges.WORKER, row.state, "Its signs of life have stopped." if row.state == "lost" else ""),
            job=row.job,
            busy=row.busy,
            versions=tuple(sorted(row.worker.versions.items())),
        )
        for row in selectors.workers(project)
    ]


def result_facts(result: Mapping[str, Any] | None) -> list[tuple[str, dict[str, str]]]:
    """A job's result as named facts; nested ones keep the path to them in their name."""
    facts: list[tuple[str, dict[str, str]]] = []

    def add(name: str, value: Any) -> None:
        words = name.replace("_", " ")
        if isinstance(value, Mapping):
            for key, inner in value.items():
                add(f"{name} {key}".strip(), inner)
        elif isinstance(value, str) and len(value) == 64 and all(c in "0123456789abcdef" for c in value):
            facts.append((words, {"digest": value}))
        elif name.endswith("bytes") and isinstance(value, int):
            facts.append((words, {"text": wording.size(value)}))
        elif name.endswith("seconds") and isinstance(value, int | float) and not isinstance(value, bool):
            facts.append((words, {"text": wording.duration(value)}))
        elif isinstance(value, bool):
            facts.append((words, {"text": "yes" if value else "no"}))
        elif isinstance(value, list):
            facts.append((words, {"text": ", ".join(map(str, value[:LISTED])) or "none"}))
        elif value is not None:
            facts.append((words, {"text": f"{value:,}" if isinstance(value, int) else str(value)}))

    for name, value in (result or {}).items():
        add(name, value)
    return facts
