"""Which islands can serve a version now: for trainers that send their rollouts where the weights are fresh enough."""

from __future__ import annotations

from controlplane.fleet import outline
from controlplane.fleet.outline import Standing
from controlplane.fleet.status import Health, Sync
from controlplane.registry.models import Run

__all__ = ["Standing", "serving"]

TAKING = frozenset({Health.HEALTHY, Health.DEGRADED})
FENCED = "fenced"


def serving(run: Run, least: int) -> list[Standing]:
    """The islands of the run that take requests and have proven to hold version `least` or a later one; the freshest
    first, and among those the least busy.

    Versions that were given up when an epoch began have lower numbers than those after it, like all older ones.
    """
    rows = [row for row in outline.standings(run.project) if row.island.run_id == run.pk and _serves(row, least)]
    return sorted(rows, key=lambda row: (-(row.version or 0), row.island.active_requests or 0, row.island.name))


def _serves(row: Standing, least: int) -> bool:
    there = row.health in TAKING and row.sync != Sync.UNKNOWN and row.island.phase != FENCED
    return there and row.version is not None and row.version >= least
