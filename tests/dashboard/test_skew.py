"""Strips of time: from verified syncs alone."""

from __future__ import annotations

from datetime import timedelta

from django.test import Client
from django.utils import timezone

from controlplane.dashboard.rows import skew
from controlplane.fleet.models import SyncReport
from controlplane.registry.models import Version
from tests import factories as make
from tests.dashboard.conftest import World


def test_an_island_that_lags_gets_a_strip_of_levels(world: World) -> None:
    now = timezone.now()
    for number, version in enumerate(world.versions):
        Version.objects.filter(pk=version.pk).update(ready_at=now - timedelta(minutes=55 - 10 * number))
    SyncReport.objects.all().delete()
    report = make.mk_sync(world.island, world.versions[0])
    SyncReport.objects.filter(pk=report.pk).update(reported_at=now - timedelta(minutes=50))
    strip = skew.strips([(world.island.pk, world.run.pk)], timedelta(hours=1), now)[world.island.pk]
    assert strip.now == 3
    assert strip.worst == 3
    assert [part.level for part in strip.stretches] == [None, 0, 1, 2]
    assert abs(sum(part.width for part in strip.stretches) - 100) < 0.1
    assert "At most 3 versions behind" in strip.words


def test_what_was_not_accepted_does_not_count(world: World) -> None:
    SyncReport.objects.update(accepted=False)
    strip = skew.strips([(world.island.pk, world.run.pk)], timedelta(hours=1), timezone.now())[world.island.pk]
    assert strip.worst is None
    assert [part.level for part in strip.stretches] == [None]


def test_what_was_held_before_the_window_is_known(world: World) -> None:
    long_ago = timezone.now() - timedelta(days=3)
    Version.objects.update(ready_at=long_ago)
    SyncReport.objects.update(reported_at=long_ago)
    strip = skew.strips([(world.island.pk, world.run.pk)], timedelta(hours=1), timezone.now())[world.island.pk]
    assert (strip.now, strip.at_head) == (0, "100 %")


def test_page_has_windows_and_the_furthest_first(world: World, mate: Client) -> None:
    make.mk_island(world.run, "zz-late", at=world.versions[0])
    page = mate.get(world.url("skew/?window=7d")).content.decode()
    assert page.index("zz-late") < page.index("fsn1-a")
    assert 'href="?window=1h"' in page
    assert mate.get(world.url("skew/?window=nonsense")).status_code == 200
    assert "No island matches" in mate.get(world.url("skew/?health=lost&provider=x")).content.decode()


def test_levels_cover_every_count() -> None:
    assert [skew.level(count) for count in (0, 1, 2, 4, 5, 9, 10, 10**6)] == [0, 1, 2, 2, 3, 3, 4, 4]
