"""Writes of worker rows: a process says that it is there, what it can do and what it works on. The database's clock
decides whether it still is.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta

from django.db.models.functions import Now

from controlplane.jobs.models import Worker

KEPT = timedelta(days=1)  # rows of processes that are gone


def register(
    name: str, host: str, process: int, *, queues: Sequence[str], device: str, versions: Mapping[str, str]
) -> Worker:
    """A row for a process that has just started."""
    return Worker.objects.create(
        name=name[:120],
        host=host[:120],
        process=process,
        queues=list(queues),
        device=device[:200],
        versions=dict(versions),
    )


def beat(worker_id: uuid.UUID, job_id: uuid.UUID | None) -> bool:
    """A sign of life with the job in hand; False when the row is gone and the process has to register again."""
    return Worker.objects.filter(pk=worker_id).update(heartbeat_at=Now(), job=job_id, stopped_at=None) == 1


def stopped(worker_id: uuid.UUID) -> None:
    """The process ends as it was asked to."""
    Worker.objects.filter(pk=worker_id).update(job=None, stopped_at=Now())


def forget_gone() -> int:
    """Removes the rows of processes that were not heard of for a day."""
    return Worker.objects.filter(heartbeat_at__lt=Now() - KEPT).delete()[0]
