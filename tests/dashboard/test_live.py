"""One address, page and fragment: what is swapped, what is silent, and when polling ends."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone

from controlplane.dashboard.pages import fingerprint
from controlplane.fleet.models import Island
from controlplane.jobs.models import Job, JobEvent
from tests import factories as make
from tests.dashboard.conftest import LIVE_PAGES, World, live


def _seen(html: str) -> str:
    found = re.search(r'"seen": "(\w+)"', html)
    assert found, html[:300]
    return found.group(1)


@pytest.mark.parametrize("name", LIVE_PAGES)
def test_page_and_fragment_share_an_address(world: World, owner: Client, name: str) -> None:
    address = world.pages[name]
    page = owner.get(address).content.decode()
    fragment = live(owner, address).content.decode()
    assert "<html" in page
    assert "<html" not in fragment
    assert fragment.startswith("<title>")
    assert 'id="live"' in fragment
    assert f'hx-get="{address}"' in fragment


@pytest.mark.parametrize("name", LIVE_PAGES)
def test_nothing_new_is_204(world: World, owner: Client, name: str) -> None:
    address = world.pages[name]
    seen = _seen(owner.get(address).content.decode())
    answer = live(owner, address, seen)
    assert answer.status_code == 204
    assert answer.content == b""
    assert answer["Cache-Control"] == "no-store"


def test_news_is_200(world: World, owner: Client) -> None:
    seen = _seen(owner.get(world.url()).content.decode())
    make.mk_island(world.run, "hel1-b")
    answer = live(owner, world.url(), seen)
    assert answer.status_code == 200
    assert "hel1-b" in answer.content.decode()


def test_the_clock_alone_is_no_news() -> None:
    one = '<time datetime="2026-01-01T00:00:00Z" data-kind="ago" title="x">4 s ago</time>'
    assert fingerprint(one) == fingerprint(one.replace("4 s ago", "5 s ago"))
    assert fingerprint(one) != fingerprint(one.replace("00:00:00Z", "00:00:01Z"))
    token = '<input type="hidden" name="csrfmiddlewaretoken" value="{}">'
    assert fingerprint(token.format("a")) == fingerprint(token.format("b"))


def test_a_lost_island_does_not_make_each_second_news(world: World, owner: Client) -> None:
    Island.objects.update(last_seen_at=timezone.now() - timedelta(hours=1))
    seen = _seen(owner.get(world.url()).content.decode())
    Island.objects.update(
        enrolled_at=timezone.now()
    )  # time passes between the statements; nothing on this page depends on it
    assert live(owner, world.url(), seen).status_code == 204


def test_filters_stay_in_the_live_address(world: World, owner: Client) -> None:
    fragment = live(owner, world.url("?health=healthy"), "x").content.decode()
    assert f'hx-get="{world.url("?health=healthy")}"' in fragment
    assert "seen=" not in fragment


def test_title_and_favicon_count_lost_islands(world: World, owner: Client) -> None:
    assert "<title>Fleet · Mailboat</title>" in owner.get(world.url()).content.decode()
    Island.objects.update(last_seen_at=timezone.now() - timedelta(hours=1))
    page = owner.get(world.pages["jobs"]).content.decode()
    assert "<title>(1) Jobs · Mailboat</title>" in page
    assert "/favicon.svg?lost=1" in page
    fragment = live(owner, world.url()).content.decode()
    assert fragment.startswith("<title>(1) Fleet · Mailboat</title>")
    assert 'data-lost="1"' in fragment


def test_favicon_shows_the_number_and_survives_nonsense(client: Client) -> None:
    assert ">3</text>" in client.get("/favicon.svg?lost=3").content.decode()
    for nonsense in ("0", "", "-1", "x", "9" * 40, "<script>"):
        answer = client.get("/favicon.svg", {"lost": nonsense})
        assert answer.status_code == 200
        assert answer["Content-Type"] == "image/svg+xml"
        assert "<text" not in answer.content.decode()


def test_polling_ends_with_the_job(world: World, owner: Client) -> None:
    address = world.pages["job"]
    page = owner.get(address).content.decode()
    assert "data-live=" in page
    assert "1 of 2 versions" in page
    Job.objects.filter(pk=world.job.pk).update(
        state="succeeded", finished_at=timezone.now(), result={"identical": True}
    )
    fragment = live(owner, address, _seen(page)).content.decode()
    assert "Succeeded" in fragment
    assert "data-live" not in fragment
    assert "hx-trigger" not in fragment


def test_log_lines_appear_while_it_runs(world: World, owner: Client) -> None:
    seen = _seen(owner.get(world.pages["job"]).content.decode())
    JobEvent.objects.create(job=world.job, level="warning", message="<b>Version 2</b> is slow.")
    fragment = live(owner, world.pages["job"], seen).content.decode()
    assert "&lt;b&gt;Version 2&lt;/b&gt; is slow." in fragment


@pytest.mark.parametrize("name", LIVE_PAGES)
def test_queries_do_not_grow_with_rows(
    world: World, owner: Client, name: str, django_assert_max_num_queries: object
) -> None:
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    with CaptureQueriesContext(connection) as few:
        owner.get(world.pages[name])
    parent = world.versions[-1]
    for number in range(4, 12):
        parent = make.mk_version(world.run, number, parent=parent)
        island = make.mk_island(world.run, at=parent)
        make.mk_sync(world.island, parent)
        make.mk_challenge(island, parent)
        make.mk_challenge(world.island, parent)
    with CaptureQueriesContext(connection) as many:
        owner.get(world.pages[name])
    assert len(many) == len(few)
    assert len(many) < 40  # of a whole page; polling asks for less
