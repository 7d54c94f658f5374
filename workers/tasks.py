"""What the queues carry. Each task returns quietly whatever happened: outcomes stand in the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog

from workers.app import HEADER, app

log = structlog.get_logger(__name__)


@app.task(name="mailboat.job", bind=True)
def job(self: Any, job_id: str) -> None:
    """Works on a job, unless it is taken, ended or not due yet. Its log lines and audit entries carry the number of
    the request that queued it; a job that the sweeper sent again has only its own.
    """
    from controlplane.audit import middleware
    from workers import runner

    middleware.begin(str((self.request.headers or {}).get(HEADER, "")) or f"job-{job_id}")
    runner.run(job_id)


@app.task(name="mailboat.sweep")
def sweep() -> None:
    """Puts right what time has passed over."""
    from workers.sweep import sweep as once

    _scheduled("sweep", once)


@app.task(name="mailboat.heads")
def heads() -> None:
    """Renews heads before they expire."""
    from controlplane.registry.services import renew_heads

    _scheduled("heads", renew_heads)


@app.task(name="mailboat.staleness")
def staleness() -> None:
    """Watches the staleness budgets."""
    from controlplane.fleet.staleness import watch

    _scheduled("staleness", watch)


@app.task(name="mailboat.scrub")
def scrub() -> None:
    """Verifies the fleet."""
    from workers.scrub import scrub as once

    _scheduled("scrub", once)


@app.task(name="mailboat.collect")
def collect() -> None:
    """Queues collections."""
    from workers.collect import due

    _scheduled("collect", due)


@app.task(name="mailboat.tidy")
def tidy() -> None:
    """Forgets what nobody needs any more."""
    from workers.sweep import tidy as once

    _scheduled("tidy", once)


def _scheduled(name: str, work: Callable[[], object]) -> None:
    """One round of an entry of the schedule; what goes wrong is logged and seen on the page of the schedule."""
    from django.db import close_old_connections

    from controlplane.audit import middleware
    from controlplane.jobs.schedule import ran

    middleware.begin("")
    close_old_connections()
    try:
        ran(name, work)
    except Exception:
        log.exception("scheduled work failed", entry=name)
