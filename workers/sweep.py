"""What only time can tell: leases that ran out, messages that were lost, heads that grow old.

The sweeper alone puts a job back into a queue. Each step is on its own, so that one that fails does not hold up the
others.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
from django.db import close_old_connections

from controlplane.jobs import services as jobs
from controlplane.registry import services as registry
from workers.scratch import clear_abandoned

log = structlog.get_logger(__name__)


def sweep() -> None:
    """One round."""
    steps: tuple[Callable[[], object], ...] = (jobs.requeue_expired, registry.renew_heads, clear_abandoned)
    for step in steps:
        close_old_connections()
        try:
            step()
        except Exception:
            log.exception("sweep step failed", step=step.__name__)
