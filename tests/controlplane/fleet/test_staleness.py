"""Breaches of the staleness budget: when they begin, how bad they get, when they end."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db.models.functions import Now

from controlplane.fleet import pins, staleness
from controlplane.fleet.models import Breach, Island
from controlplane.registry.models import Run, Version
from tests import factories as make
from tests.controlplane.making import ready, series

pytestmark = pytest.mark.django_db


@pytest.fixture
def versions(run: Run) -> list[Version]:
    return series(run, 4)


def test_a_breach_begins_grows_and_ends(run: Run, versions: list[Version]) -> None:
    Run.objects.filter(pk=run.pk).update(staleness_versions=2)
    late = make.mk_island(run, "late", at=versions[0])
    make.mk_island(run, "close", at=versions[2])
    staleness.watch()
    staleness.watch()
    breach = Breach.objects.get()
    assert (breach.island, breach.kind, breach.limit, breach.worst) == (late, "versions", 2, 3)
    assert breach.ended_at is None
    ready(run, 4, versions[-1])
    staleness.watch()
    assert Breach.objects.get(pk=breach.pk).worst == 4
    assert Breach.objects.count() == 1
    newest = Version.objects.get(run=run, number=4)
    Island.objects.filter(pk=late.pk).update(
        verified_version=newest, version_number=4, digest=newest.state_digest, phase="idle"
    )
    staleness.watch()
    assert Breach.objects.get(pk=breach.pk).ended_at is not None


def test_seconds_count_from_the_version_that_the_island_lacks(run: Run, versions: list[Version]) -> None:
    Run.objects.filter(pk=run.pk).update(staleness_seconds=60)
    make.mk_island(run, "late", at=versions[2])
    staleness.watch()
    assert not Breach.objects.exists()
    Version.objects.filter(pk=versions[3].pk).update(ready_at=Now() - timedelta(seconds=100))
    staleness.watch()
    assert Breach.objects.get().kind == "seconds"


def test_who_is_lost_pinned_or_unknown_breaches_nothing(run: Run, versions: list[Version]) -> None:
    Run.objects.filter(pk=run.pk).update(staleness_versions=0)
    lost = make.mk_island(run, "lost", at=versions[0])
    Island.objects.filter(pk=lost.pk).update(last_seen_at=Now() - timedelta(days=1))
    pins.pin(make.mk_island(run, "pinned", at=versions[0]), 0, actor="test")
    unknown = make.mk_island(run, "unknown", at=versions[0])
    Island.objects.filter(pk=unknown.pk).update(digest="f" * 64)  # not what it was proven to hold
    staleness.watch()
    assert not Breach.objects.exists()


def test_without_a_budget_breaches_end(run: Run, versions: list[Version]) -> None:
    Run.objects.filter(pk=run.pk).update(staleness_versions=0)
    make.mk_island(run, "late", at=versions[0])
    staleness.watch()
    Run.objects.filter(pk=run.pk).update(staleness_versions=None)
    staleness.watch()
    assert Breach.objects.get().ended_at is not None
    Breach.objects.update(ended_at=Now() - timedelta(days=100))
    assert staleness.forget_old() == 1
