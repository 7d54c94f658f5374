"""Links and processors as islands' reports measured them."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.fleet import services
from controlplane.fleet.models import Island
from controlplane.registry.models import Run
from tests.factories import create_line, mk_island

pytestmark = pytest.mark.django_db


def report(island: Island, version: Any, **facts: Any) -> Island:
    said: dict[str, Any] = {
        "from_version": 0, "version": version.number, "digest": version.state_digest, "outcome": "applied",
        "verified": True, "bytes": 2_000_000, "seconds": {"fetch": 4.0, "prepare": 0.1}, "route": ["patch 0-1"],
    }  # fmt: skip
    services.report_sync(island, **(said | facts))
    island.refresh_from_db()
    return island


def test_an_old_measurement_and_a_new_one_count_alike(run: Run) -> None:
    versions = create_line(run, 3)
    island = report(mk_island(run), versions[1])
    assert (island.link_bytes_per_second, island.apply_bytes_per_second) == (500_000, 450_000_000)
    island = report(island, versions[2], seconds={"fetch": 2.0, "prepare": 0.3}, route=["patch 0-1", "patch 1-2"])
    assert (island.link_bytes_per_second, island.apply_bytes_per_second) == (750_000, 375_000_000)


@pytest.mark.parametrize(
    "facts",
    [
        {"bytes": 1000, "route": ["anchor 0", "patch 0-1"]},
        {"seconds": {"fetch": 0.0}, "route": []},
        {"outcome": "failed", "verified": False, "error": "The disk is full."},
    ],
)
def test_what_measures_nothing_changes_nothing(run: Run, facts: dict[str, Any]) -> None:
    island = report(mk_island(run), create_line(run, 2)[1], **facts)
    assert (island.link_bytes_per_second, island.apply_bytes_per_second) == (None, None)
