"""The staleness budget of a run: who is beyond it now, and since when.

An island is beyond it while it is there, follows its channel and is further behind than the run allows, in versions or
in seconds. A pin is meant, and an island that is lost serves nobody: neither counts. A breach is a row with a
beginning and, later, an end; at most one goes on per island and limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import structlog
from django.db.models import Q, QuerySet
from django.db.models.functions import Now

from controlplane.fleet import outline
from controlplane.fleet.models import Breach
from controlplane.fleet.outline import Standing
from controlplane.fleet.status import Health, Sync
from controlplane.registry.models import Project, Run

log = structlog.get_logger(__name__)

KEPT = timedelta(days=90)
PRESENT = frozenset({Health.HEALTHY, Health.DEGRADED, Health.DRAINING})
Excess = dict[str, tuple[int, int]]  # kind of limit -> (how far behind, the limit)


def excess(row: Standing) -> Excess:
    """The limits that the island is beyond now; empty when it is within its run's budget."""
    if row.sync != Sync.BEHIND or row.health not in PRESENT:
        return {}
    limits = {
        Breach.Kind.VERSIONS: (row.skew_versions, row.island.staleness_versions),
        Breach.Kind.SECONDS: (row.skew_seconds, row.island.staleness_seconds),
    }
    return {
        str(kind): (behind, limit)
        for kind, (behind, limit) in limits.items()
        if behind is not None and limit is not None and behind > limit
    }


def watch() -> None:
    """Begins, continues and ends breaches; what a project without a budget costs is one query for all of them."""
    budgets = Q(staleness_versions__isnull=False) | Q(staleness_seconds__isnull=False)
    for project in Project.objects.filter(runs__in=Run.objects.filter(budgets)).distinct():
        _record(project, outline.standings(project))
    Breach.objects.filter(ended_at=None).exclude(run__in=Run.objects.filter(budgets)).update(ended_at=Now())


def _record(project: Project, rows: Iterable[Standing]) -> None:
    beyond = {
        (row.island.id, kind): (row, behind, limit) for row in rows for kind, (behind, limit) in excess(row).items()
    }
    going_on = {(b.island_id, b.kind): b for b in Breach.objects.filter(run__project=project, ended_at=None)}
    over = [breach.pk for key, breach in going_on.items() if key not in beyond]
    Breach.objects.filter(pk__in=over, ended_at=None).update(ended_at=Now())
    worse = [breach for key, breach in going_on.items() if key in beyond and beyond[key][1] > breach.worst]
    for breach in worse:
        breach.worst = beyond[breach.island_id, breach.kind][1]
    Breach.objects.bulk_update(worse, ["worst"])
    fresh = [
        Breach(run_id=row.island.run_id, island_id=island, kind=kind, limit=limit, worst=behind)
        for (island, kind), (row, behind, limit) in beyond.items()
        if (island, kind) not in going_on
    ]
    for breach in fresh:
        log.warning(
            "staleness budget exceeded", run=str(breach.run_id), island=str(breach.island_id), kind=breach.kind,
            behind=breach.worst, limit=breach.limit,
        )  # fmt: skip
    Breach.objects.bulk_create(fresh, ignore_conflicts=True)  # another scheduler may have been quicker


def breaches(run: Run) -> QuerySet[Breach]:
    """The breaches of a run, newest first."""
    return Breach.objects.filter(run=run).select_related("island").order_by("-began_at", "-id")


def forget_old() -> int:
    """Removes breaches that ended long ago; returns how many."""
    return Breach.objects.filter(ended_at__lt=Now() - KEPT).delete()[0]
