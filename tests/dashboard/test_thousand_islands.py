"""The fleet page with a thousand islands: how large, how quick, how many queries."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection
from django.template.base import Template
from django.test import Client
from django.test.utils import CaptureQueriesContext, _TestState
from django.utils import timezone

from controlplane.fleet.models import Island
from tests.dashboard.conftest import World
from tests.yardstick import NET, core_seconds

ISLANDS = 1000
MOST_BYTES = 100 * 1024
MOST_SECONDS = 0.060 * NET


@pytest.fixture
def crowd(world: World) -> World:
    """A thousand islands, most of them well, a hundred behind, twenty lost."""
    now = timezone.now()
    channel = world.run.channels.get(name="latest")
    soon = now + timedelta(minutes=10)  # well for the whole test, however slow the machine
    islands = []
    for number in range(ISLANDS - 1):
        at = world.versions[1 if number % 10 == 0 else 3]
        islands.append(
            Island(
                project=world.project,
                run=world.run,
                channel=channel,
                name=f"us-east-rack-{number:04}",
                provider=("hetzner", "aws", "lambda", "coreweave")[number % 4],
                region=("fsn1", "us-east-1", "us-south-2", "ord1", "hel1")[number % 5],
                engine="sglang",
                verified_version=at,
                version_number=at.number,
                digest=at.state_digest,
                last_seen_at=now - timedelta(hours=1) if number % 50 == 7 else soon,
                last_patch_bytes=1_000_000 + number,
                last_seconds={"fetch": 0.4, "prepare": 0.3, "commit": 0.083, "total": 0.8},
            )
        )
    Island.objects.bulk_create(islands)
    return world


@pytest.mark.parametrize("query", ["", "?page=10", "?sort=-skew", "?sync=behind", "?q=rack-00&provider=aws"])
def test_a_view_of_a_thousand_islands_is_small(crowd: World, owner: Client, query: str) -> None:
    answer = owner.get(crowd.url(query))
    assert answer.status_code == 200
    assert len(answer.content) < MOST_BYTES


def test_a_view_of_a_thousand_islands_is_quick(crowd: World, owner: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    # Under test Django copies the context of every template that is rendered; nobody pays for that outside.
    monkeypatch.setattr(Template, "_render", _TestState.saved_data.template_render)
    owner.get(crowd.url())  # templates are compiled on first use
    assert core_seconds(lambda: owner.get(crowd.url()), MOST_SECONDS) < MOST_SECONDS


@pytest.mark.parametrize("path", ["", "skew/"])
def test_queries_do_not_grow_to_a_thousand(crowd: World, owner: Client, path: str) -> None:
    with CaptureQueriesContext(connection) as many:
        owner.get(crowd.url(path))
    Island.objects.filter(name__startswith="us-east-rack-").exclude(name__endswith="7").delete()
    with CaptureQueriesContext(connection) as few:
        owner.get(crowd.url(path))
    assert len(many) == len(few)
    assert len(many) < 20


def test_pages_hold_a_hundred_and_keep_the_filters(crowd: World, owner: Client) -> None:
    page = owner.get(crowd.url("?provider=aws&sort=-name")).content.decode()
    assert page.count('<tr id="is-') == 100
    assert "1–100 of 250" in page
    assert 'rel="next" href="?provider=aws&amp;sort=-name&amp;page=2"' in page
    last = owner.get(crowd.url("?provider=aws&page=99")).content.decode()
    assert "201–250 of 250" in last
