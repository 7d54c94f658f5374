"""The nightly round: every island that is there is asked whether it still holds what it reported."""

from __future__ import annotations

import structlog

from controlplane.fleet import selectors as fleet
from controlplane.fleet.status import Health
from controlplane.jobs import triggers
from controlplane.registry.errors import Refusal
from controlplane.registry.models import Project

log = structlog.get_logger(__name__)

ACTOR = "schedule:scrub"
_THERE = frozenset({Health.HEALTHY, Health.DEGRADED, Health.DRAINING})


def scrub() -> int:
    """Queues a verification of each island that is heard of and holds something; how many there were. One that is being
    verified is joined, so a second round at once changes nothing.
    """
    asked = 0
    for project in Project.objects.order_by("pk"):
        for row in fleet.fleet(project):
            if row.health not in _THERE or row.version is None:
                continue
            try:
                triggers.verify(project, row.island.pk, actor=ACTOR)
            except Refusal as refusal:  # it left meanwhile
                log.info("island not scrubbed", island=row.island.name, reason=refusal.detail)
            else:
                asked += 1
    return asked
