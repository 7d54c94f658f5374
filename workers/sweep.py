"""What only time can tell: leases that ran out, messages that were lost, rows that nobody needs any more.

The sweeper alone puts a job back into a queue. Each step is on its own, so that one that fails does not hold up the
others; the first failure is raised at the end.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
from django.db import close_old_connections

from controlplane.accounts import limits, sessions
from controlplane.fleet import staleness
from controlplane.idempotency import services as replies
from controlplane.jobs import presence
from controlplane.jobs import services as jobs
from controlplane.registry import leases
from workers.scratch import clear_abandoned

log = structlog.get_logger(__name__)


def sweep() -> None:
    """One round, every few seconds."""
    _each(jobs.requeue_expired, clear_abandoned)


def tidy() -> None:
    """One round, every night."""
    _each(
        sessions.forget_ended,
        limits.forget_full,
        presence.forget_gone,
        replies.forget_old,
        staleness.forget_old,
        leases.forget_ended,
    )


def _each(*steps: Callable[[], object]) -> None:
    failure: Exception | None = None
    for step in steps:
        close_old_connections()
        try:
            step()
        except Exception as error:
            log.exception("sweep step failed", step=getattr(step, "__name__", str(step)))
            failure = failure or error
    if failure is not None:
        raise failure
