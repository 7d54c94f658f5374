"""Links and processors as islands' reports measured them."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.fleet import services
from controlplane.fleet.models import Island
from controlplane.registry.cost import CONTEXTUAL, POSITIONAL, STRONG
from controlplane.registry.models import Patch, Run
from tests.factories import FULL_BYTES, create_line, mk_island, mk_version

pytestmark = pytest.mark.django_db


def like_contextual(speed: float) -> Any:
    """What a machine does that goes over a model at this speed for a positional patch."""
    return pytest.approx(speed * CONTEXTUAL / POSITIONAL, abs=1)


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
    assert (island.link_bytes_per_second, island.quick_bytes_per_second) == (500_000, like_contextual(450e6))
    island = report(island, versions[2], seconds={"fetch": 2.0, "prepare": 0.3}, route=["patch 0-1", "patch 1-2"])
    assert (island.link_bytes_per_second, island.quick_bytes_per_second) == (750_000, like_contextual(375e6))


@pytest.mark.parametrize(
    ("codecs", "kind", "apply", "quick"),
    [
        ("contextual", "step", 1e9, None),
        ("contextual,positional", "merged", 1e9 * CONTEXTUAL * (1 / CONTEXTUAL + 1 / STRONG), None),
        ("positional", "step", None, 1e9 * CONTEXTUAL / POSITIONAL),
    ],
)
def test_speeds_with_either_kind_of_patch_stand_apart(
    run: Run, codecs: str, kind: str, apply: float | None, quick: float | None
) -> None:
    first = mk_version(run, 0)
    last = mk_version(run, 4, parent=first, patch_bytes=None)
    Patch.objects.create(run=run, from_version=first, to_version=last, kind=kind, bytes=1, codecs=codecs)
    island = report(mk_island(run), last, seconds={"prepare": FULL_BYTES / 1e9}, route=["patch 0-4"])
    found = island.apply_bytes_per_second, island.quick_bytes_per_second
    assert found == (apply and pytest.approx(apply), quick and pytest.approx(quick))


def test_a_route_of_both_kinds_tells_neither(run: Run) -> None:
    versions = create_line(run, 2)
    last = mk_version(run, 2, parent=versions[1], patch_bytes=None)
    Patch.objects.create(run=run, from_version=versions[1], to_version=last, bytes=1, codecs="contextual")
    island = report(mk_island(run), last, route=["patch 0-1", "patch 1-2"])
    assert (island.apply_bytes_per_second, island.quick_bytes_per_second) == (None, None)


@pytest.mark.parametrize(
    "facts",
    [
        {"bytes": 1000, "route": ["anchor 0", "patch 0-1"]},
        {"bytes": 1000, "route": ["patch 0-1", "patch 7-8"]},
        {"seconds": {"fetch": 0.0}, "route": []},
        {"outcome": "failed", "verified": False, "error": "The disk is full."},
    ],
)
def test_what_measures_nothing_changes_nothing(run: Run, facts: dict[str, Any]) -> None:
    island = report(mk_island(run), create_line(run, 2)[1], **facts)
    assert (island.link_bytes_per_second, island.apply_bytes_per_second) == (None, None)
    assert island.quick_bytes_per_second is None
