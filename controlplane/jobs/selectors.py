"""Reads of background work: jobs and their logs, queues, workers, the schedule."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import connection
from django.db.models import Count, Min, Q, QuerySet
from django.db.models.functions import Now

from controlplane.jobs import queues as queueing
from controlplane.jobs.models import Job, JobEvent, ScheduledRun, Worker
from controlplane.jobs.schedule import SCHEDULE, Entry
from controlplane.registry import clock
from controlplane.registry.errors import Missing
from controlplane.registry.models import Project

LOST_SECONDS = 45.0  # a worker beats every ten
LONG_SECONDS = 3600.0  # a job that runs longer needs a look


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A queue. `queued` could start now, `waiting` waits for something outside or for another job; `oldest_seconds` is
    the age of the oldest of `queued`. `messages` is what the broker holds, None where it can't be asked.
    """

    name: str
    queued: int
    waiting: int
    running: int
    oldest_seconds: float | None
    workers: int
    messages: int | None
    oldest_message_seconds: float | None


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker: `online`, `lost` or `stopped` with one sentence. `job` is shown only where it is the project's own;
    `busy` says that it works at all.
    """

    worker: Worker
    state: str
    reason: str
    busy: bool
    job: Job | None


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """An entry of the schedule and how it went last; None where it never ran."""

    entry: Entry
    last: ScheduledRun | None


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
        return Job.objects.select_related("run", "project", "rerun_of").get(project=project, pk=uuid.UUID(str(job_id)))
    except (Job.DoesNotExist, ValueError):
        raise Missing(f"There is no job {job_id} in this project.") from None


def events(job: Job, *, after: int = 0, limit: int = 1000, level: str = "") -> list[JobEvent]:
    """The job's log lines after the one numbered `after`, oldest first; with `level` those that matter as much or
    more.
    """
    lines = job.events.filter(pk__gt=after)
    if level:
        levels = list(JobEvent.Level.values)
        lines = lines.filter(level__in=levels[levels.index(level) :])
    return list(lines[:limit])


def counts(project: Project) -> dict[str, int]:
    """Number of jobs per state; every state is present."""
    found = dict(Job.objects.filter(project=project).values_list("state").annotate(Count("id")))
    return {state: found.get(state, 0) for state in Job.State.values}


def overdue(project: Project) -> list[Job]:
    """Jobs that have run for longer than an hour, the oldest first."""
    long_ago = Now() - timedelta(seconds=LONG_SECONDS)
    began = Job.objects.filter(project=project, state__in=[Job.State.RUNNING, Job.State.CANCELLING])
    return list(began.filter(started_at__lt=long_ago).select_related("run").order_by("started_at"))


def queues(project: Project | None = None) -> list[QueueRow]:
    """Every queue: jobs of the project (None: of all projects), workers and messages of the whole installation."""
    chosen = Job.objects.filter(state__in=Job.UNFINISHED)
    if project is not None:
        chosen = chosen.filter(project=project)
    # `free` in the sense of jobs.services: nothing outside is waited for, and no job before it.
    held = Q(waiting_for__gt="") | Q(after__state__in=Job.UNFINISHED)
    found: dict[str, Mapping[str, object]] = {
        row["kind"]: row
        for row in chosen.order_by()
        .values("kind")
        .annotate(
            queued=Count("id", filter=Q(state="queued") & ~held),
            waiting=Count("id", filter=Q(state="queued") & held),
            running=Count("id", filter=~Q(state="queued")),
            oldest=Min("queued_at", filter=Q(state="queued") & ~held),
        )
    }
    now, messages = clock.now(), _messages()
    serving = [row.worker.queues for row in workers(project) if row.state == "online"]
    return [_queue(name, found, now, messages.get(name), serving) for name in queueing.NAMES]


def workers(project: Project | None = None, *, gone: bool = False) -> list[WorkerRow]:
    """Worker processes by name: those that are there or got lost, with `gone` also those that ended as asked."""
    chosen = Worker.objects.select_related("job__run")
    if not gone:
        chosen = chosen.filter(stopped_at=None)
    now = clock.now()
    return [_worker(row, now, project) for row in chosen]


def schedule() -> list[ScheduleRow]:
    """The whole schedule with the last run of each entry."""
    last = ScheduledRun.objects.in_bulk([entry.name for entry in SCHEDULE])
    return [ScheduleRow(entry, last.get(entry.name)) for entry in SCHEDULE]


def _queue(
    name: str,
    found: Mapping[str, Mapping[str, object]],
    now: datetime,
    messages: tuple[int, float | None] | None,
    serving: list[list[str]],
) -> QueueRow:
    rows = [found[kind] for kind, queue in queueing.QUEUES.items() if queue == name and kind in found]
    oldest = [row["oldest"] for row in rows if isinstance(row["oldest"], datetime)]
    return QueueRow(
        name=name,
        queued=_sum(rows, "queued"),
        waiting=_sum(rows, "waiting"),
        running=_sum(rows, "running"),
        oldest_seconds=(now - min(oldest)).total_seconds() if oldest else None,
        workers=sum(name in queues for queues in serving),
        messages=messages[0] if messages else None,
        oldest_message_seconds=messages[1] if messages else None,
    )


def _sum(rows: list[Mapping[str, object]], key: str) -> int:
    return sum(value for row in rows if isinstance(value := row[key], int))


def _messages() -> dict[str, tuple[int, float | None]]:
    """Messages and age of the oldest per queue, where PostgreSQL is the broker."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT to_regprocedure('pgmq.metrics_all()') IS NOT NULL")
        if not cursor.fetchone()[0]:
            return {}
        cursor.execute("SELECT queue_name, queue_length, oldest_msg_age_sec FROM pgmq.metrics_all()")
        return {name: (int(length), None if age is None else float(age)) for name, length, age in cursor.fetchall()}


def _worker(row: Worker, now: datetime, project: Project | None) -> WorkerRow:
    silent = (now - row.heartbeat_at).total_seconds()
    own = row.job if row.job is not None and (project is None or row.job.project_id == project.pk) else None
    if row.stopped_at is not None:
        return WorkerRow(row, "stopped", "It was told to end.", busy=False, job=None)
    if silent > LOST_SECONDS:
        return WorkerRow(row, "lost", f"No sign of life for {int(silent)} s.", busy=False, job=own)
    busy = row.job_id is not None
    return WorkerRow(row, "online", "It works." if busy else "It waits for work.", busy=busy, job=own)
