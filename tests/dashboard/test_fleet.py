"""The fleet page: counts that are links, filters, skew, what needs attention, and two kinds of nothing."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from controlplane.fleet import selectors
from controlplane.fleet.models import Island
from controlplane.registry import clock
from controlplane.registry.models import Version
from tests import factories as make
from tests.dashboard.conftest import World


def _page(client: Client, url: str) -> str:
    return " ".join(client.get(url).content.decode().split())


def test_shows_each_island_with_version_and_patch(world: World, owner: Client) -> None:
    page = _page(owner, world.url())
    for words in ("fsn1-a", "hetzner", "fsn1", "checkpoint", "Healthy", "Current", "v3", "977 KiB", "2.22 % of full"):
        assert words in page, words
    assert "1 of 1 island verified at v3" in page
    assert "Nothing needs attention" in page


def test_skew_in_versions_and_time(world: World, owner: Client) -> None:
    Version.objects.filter(number=2).update(ready_at=timezone.now() - timedelta(seconds=95))
    make.mk_island(world.run, "late", at=world.versions[1])
    page = _page(owner, world.url("?sync=behind"))
    assert "2 versions" in page
    assert ">1 min</time>" in page
    assert "fsn1-a</a>" not in page


def test_counts_are_links_that_filter(world: World, owner: Client) -> None:
    make.mk_island(world.run, "gone", at=world.versions[0], last_seen_at=timezone.now() - timedelta(hours=2))
    page = _page(owner, world.url())
    assert 'href="?health=lost"' in page
    assert 'href="?sync=behind"' in page
    lost = _page(owner, world.url("?health=lost"))
    assert "gone</a>" in lost.split("<table")[1]
    assert "fsn1-a</a>" not in lost.split("<table")[1]


def test_facets_of_place(world: World, owner: Client) -> None:
    make.mk_island(world.run, "iad", at=world.versions[-1], provider="aws", region="us-east-1")
    table = _page(owner, world.url("?provider=aws")).split("<table")[1]
    assert "iad</a>" in table
    assert "fsn1-a</a>" not in table


def test_no_match_is_not_no_island(world: World, owner: Client) -> None:
    page = _page(owner, world.url("?health=disabled"))
    assert "No island matches" in page
    assert "Clear filters" in page
    Island.objects.all().delete()
    page = _page(owner, world.url())
    assert "No island yet" in page
    assert "Register island" in page


def test_project_without_run_says_how_it_begins(world: World) -> None:
    from tests.dashboard.conftest import signed_in

    project = make.mk_project("bare")
    page = _page(signed_in(make.mk_member(project)), "/projects/bare/")
    assert "No run yet" in page
    assert "Register island" not in page


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"last_seen_at": timezone.now() - timedelta(days=1)}, "Lost:"),
        ({"phase": "error", "reason": "The disk is full; free 3 GiB."}, "The disk is full; free 3 GiB."),
        ({"last_error": "Part 0 broke off."}, "Sync failed:"),
    ],
)
def test_needs_attention(world: World, owner: Client, fields: dict[str, object], words: str) -> None:
    make.mk_island(world.run, "poor", at=world.versions[-1], **fields)
    section = _page(owner, world.url()).split("Needs attention")[1].split("islands-title")[0]
    assert words in section
    assert "poor</a>" in section


def test_failed_verification_needs_attention_until_one_passes(world: World, owner: Client) -> None:
    make.mk_challenge(world.island, world.versions[-1], state="failed")
    assert "Verification failed" in _page(owner, world.url())
    make.mk_challenge(world.island, world.versions[-1], state="passed")
    assert "Verification failed" not in _page(owner, world.url())


def test_run_that_ends_in_a_failed_version_needs_attention(world: World, owner: Client) -> None:
    make.mk_version(world.run, 4, parent=world.versions[-1], state="failed", reason="Tensor a.weight differs.")
    page = _page(owner, world.url())
    assert "Version failed" in page
    assert "Tensor a.weight differs." in page


@pytest.mark.parametrize("beats", [0, 2, 4, 5.9, 6.1, 100, None])
@pytest.mark.parametrize("enabled", [True, False])
def test_lost_islands_are_counted_as_they_are_derived(
    world: World, settings: Any, beats: float | None, enabled: bool
) -> None:
    settings.MAILBOAT_HEARTBEAT_SECONDS = 60
    seen = None if beats is None else clock.now() - timedelta(seconds=60 * beats)
    Island.objects.update(last_seen_at=seen, enabled=enabled)
    derived = sum(row.health == "lost" for row in selectors.fleet(world.project))
    assert selectors.lost_islands(world.project) == derived


def test_names_are_escaped(world: World, owner: Client) -> None:
    Island.objects.update(provider="<script>alert(1)</script>")
    assert "<script>alert" not in _page(owner, world.url())


def _unchanging(world: World, count: int, steps: bool = True, changed: int = 0) -> None:
    parent = world.versions[-1]
    for number in range(4, 4 + count):
        step = number * 8 if steps else 24
        parent = make.mk_version(world.run, number, parent=parent, changed=changed, patch_bytes=900, step=step)
    make.announce(parent)


def test_a55_versions_that_change_nothing_while_steps_advance_need_attention(world: World, owner: Client) -> None:
    _unchanging(world, 3)
    section = _page(owner, world.url()).split("Needs attention")[1]
    assert "Nothing changes:" in section
    assert "The last 3 versions change zero bytes: the trainer may publish the wrong weights." in section


@pytest.mark.parametrize(("count", "steps", "changed"), [(2, True, 0), (3, False, 0), (3, True, 1)])
def test_a55_no_alarm_before_its_time(world: World, owner: Client, count: int, steps: bool, changed: int) -> None:
    _unchanging(world, count, steps, changed)
    assert "Nothing changes:" not in _page(owner, world.url())


def test_a55_one_change_ends_the_alarm(world: World, owner: Client) -> None:
    _unchanging(world, 3)
    last = Version.objects.get(run=world.run, number=6)
    make.announce(make.mk_version(world.run, 7, parent=last, changed=5, step=99))
    assert "Nothing changes:" not in _page(owner, world.url())


def test_stuck_islands_need_attention(world: World, owner: Client) -> None:
    Version.objects.update(ready_at=timezone.now() - timedelta(minutes=30))
    make.mk_island(world.run, "slow", at=world.versions[1])
    section = _page(owner, world.url()).split("Needs attention")[1].split("islands-title")[0]
    assert "Stuck:" in section
    assert "Healthy, yet 2 versions behind and not getting closer." in section


def test_long_lists_of_findings_are_cut_and_can_be_seen_whole(world: World, owner: Client) -> None:
    for number in range(12):
        make.mk_island(world.run, f"poor-{number:02}", at=world.versions[-1], last_error="Part 0 broke off.")
    page = _page(owner, world.url())
    assert "Show all 12 findings" in page
    assert page.count('id="finding-') == 8
    assert _page(owner, world.url("?findings=all")).count('id="finding-') == 12


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("q=LATE", {"late"}),
        ("q=rack-7", {"late"}),
        ("behind=1", {"late"}),
        ("behind=2", set()),
        ("version=v3", {"fsn1-a"}),
        ("unseen=1h", {"gone"}),
        ("unseen=nonsense&sort=nonsense&page=x&behind=-1", {"late", "gone", "fsn1-a"}),
    ],
)
def test_filters_of_the_address(world: World, owner: Client, query: str, found: set[str]) -> None:
    make.mk_island(world.run, "late", at=world.versions[1], hostname="rack-7")
    make.mk_island(world.run, "gone", at=world.versions[2], last_seen_at=timezone.now() - timedelta(hours=2))
    page = _page(owner, world.url(f"?{query}"))
    assert {name for name in ("late", "gone", "fsn1-a") if f'id="is-{name}"' in page} == found


def test_headings_sort_both_ways(world: World, owner: Client) -> None:
    make.mk_island(world.run, "late", at=world.versions[1])
    up = _page(owner, world.url("?sort=skew"))
    assert up.index('id="is-fsn1-a"') < up.index('id="is-late"')
    assert 'aria-sort="ascending"' in up
    assert 'href="?sort=-skew"' in up
    down = _page(owner, world.url("?sort=-skew"))
    assert down.index('id="is-late"') < down.index('id="is-fsn1-a"')
