"""Channels and settings of a run: promote, roll back, protect, and two people at once."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db.models.functions import Now
from django.test import Client

from controlplane.audit.models import Entry
from controlplane.fleet import staleness
from controlplane.fleet.models import Island
from controlplane.jobs.models import Job
from controlplane.registry import services
from controlplane.registry.models import Anchor, Channel, Run
from tests import factories as make
from tests.dashboard.conftest import World


def _page(answer: Any) -> str:
    return " ".join(answer.content.decode().split())


@pytest.fixture
def latest(world: World, home: Any) -> Channel:
    return world.run.channels.get(name="latest")


def _move(client: Client, world: World, channel: Channel, **form: Any) -> Any:
    channel.refresh_from_db()
    return client.post(
        world.url(f"runs/demo/channels/{channel.name}/"), {"seen": channel.revision, **form}, follow=True
    )


def test_rolling_back_needs_a_reason_and_the_name(world: World, owner: Client, latest: Channel) -> None:
    page = _page(owner.get(world.url("runs/demo/channels/latest/?version=1")))
    assert "Roll latest back" in page
    assert "Type latest to confirm" in page
    assert "This field is required" in _page(_move(owner, world, latest, version=1, typed="latest"))
    assert "Type latest to confirm" in _page(_move(owner, world, latest, version=1, reason="Bad.", typed="late"))
    latest.refresh_from_db()
    assert latest.version == world.versions[3]
    serial = latest.serial
    page = _page(_move(owner, world, latest, version=1, reason="Version 3 diverges.", typed="latest"))
    assert "latest points at version 1." in page
    latest.refresh_from_db()
    assert latest.version == world.versions[1]
    assert latest.serial > serial
    entry = Entry.objects.get(action="channel.edit")
    assert entry.after["reason"] == "Version 3 diverges."


def test_promoting_is_one_click(world: World, owner: Client, latest: Channel) -> None:
    stable = Channel.objects.create(run=world.run, name="stable")
    page = _page(owner.get(world.url("runs/demo/channels/stable/?version=2")))
    assert "Promote v2 to stable" in page
    assert "stable points at version 2." in _page(_move(owner, world, stable, version=2))


def test_a_channel_that_moved_meanwhile_is_not_overwritten(world: World, owner: Client, latest: Channel) -> None:
    seen = latest.revision
    _move(owner, world, latest, version=2, reason="Slow.", typed="latest")
    late = owner.post(
        world.url("runs/demo/channels/latest/"),
        {"seen": seen, "version": 0, "reason": "Slower.", "typed": "latest"},
        follow=True,
    )
    assert "Somebody changed it meanwhile" in _page(late)
    latest.refresh_from_db()
    assert latest.version == world.versions[2]


def test_channels_point_at_ready_versions_alone(world: World, owner: Client, latest: Channel) -> None:
    make.mk_version(world.run, 4, parent=world.versions[-1], state="failed")
    assert "Version 4 is failed" in _page(_move(owner, world, latest, version=4))
    assert "no version 99" in _page(_move(owner, world, latest, version=99))


def test_protecting_and_new_channels(world: World, owner: Client, latest: Channel) -> None:
    page = _page(owner.post(world.url("runs/demo/channels/latest/protect/"), {"protected": "yes"}, follow=True))
    assert "Unprotect" in page
    made = owner.post(world.url("runs/demo/channels/new/"), {"name": "canary", "version": 2}, follow=True)
    assert "The channel canary is there." in _page(made)
    assert Channel.objects.get(name="canary").version == world.versions[2]
    again = owner.post(world.url("runs/demo/channels/new/"), {"name": "canary"})
    assert "There is such a channel already." in _page(again)
    pins = owner.post(world.url("runs/demo/channels/new/"), {"name": "island-x"})
    assert "belong to pinned islands" in _page(pins)


def test_settings_are_saved_over_what_was_seen(world: World, owner: Client) -> None:
    address = world.url("runs/demo/settings/")
    form = {"announce": "validated", "staleness_versions": 2, "keep_versions": 3, "seen": world.run.revision}
    assert "The settings of demo are saved." in _page(owner.post(address, form, follow=True))
    run = Run.objects.get(pk=world.run.pk)
    assert (run.staleness_versions, run.keep_versions, run.keep_days) == (2, 3, None)
    late = owner.post(address, form | {"keep_versions": 9}, follow=True)
    assert "Somebody changed it meanwhile" in _page(late)
    assert Run.objects.get(pk=run.pk).keep_versions == 3


def test_limits_are_shown_before_they_are_saved(world: World, owner: Client, home: Any) -> None:
    address = world.url("runs/demo/settings/")
    form = {"announce": "validated", "keep_versions": 1, "seen": world.run.revision}
    newest = make.mk_version(world.run, 4, parent=world.versions[-1])
    Anchor.objects.create(version=newest, files=[], bytes=1)
    Island.objects.update(last_seen_at=Now() - timedelta(days=2))
    make.announce(newest)
    Job.objects.update(state="succeeded")
    shown = _page(owner.post(address, form | {"preview": "yes"}))
    assert "Not saved yet. With these limits 4 versions would be retired, 1 stay" in shown
    assert "Why they stay: latest points at it (1)." in shown
    assert Run.objects.get(pk=world.run.pk).keep_versions is None
    assert "would be retired" not in _page(owner.get(address))
    owner.post(address, form)
    assert "With the limits as they are saved 4 versions would be retired" in _page(owner.get(address))
    owner.post(world.url("runs/demo/collect/"))
    assert Job.objects.get(kind="collect").requested_by == "owner"


@pytest.mark.parametrize("value", ["0", "-1", "x", "99999999999"])
def test_limits_of_nothing_are_refused(world: World, owner: Client, value: str) -> None:
    form = {"announce": "validated", "keep_days": value, "seen": world.run.revision}
    assert 'class="error"' in _page(owner.post(world.url("runs/demo/settings/"), form))


def test_staleness_budget_and_who_is_over_it(world: World, owner: Client) -> None:
    Run.objects.update(staleness_versions=1)
    make.mk_island(world.run, "late", at=world.versions[0])
    assert "1 island over it" in _page(owner.get(world.pages["run"]))
    attention = _page(owner.get(world.url())).split("Needs attention")[1]
    assert "Skew over budget:" in attention
    assert "It is 3 versions behind; demo allows 1 version." in attention


def test_breaches_stand_on_the_page_of_the_run(world: World, owner: Client) -> None:
    Run.objects.update(staleness_versions=1)
    make.mk_island(world.run, "late", at=world.versions[0])
    staleness.watch()
    page = _page(owner.get(world.pages["run"])).split("Breaches of the staleness budget")[1]
    assert "late </a> 3 versions behind of 1 allowed" in page.replace("late</a>", "late </a>")
    assert "and going on" in page


def test_epochs_stand_on_the_page_of_the_run(world: World, owner: Client) -> None:
    assert "stretches without a rewind" not in _page(owner.get(world.pages["run"]))
    services.begin_epoch(world.run, 1, "The node of the trainer was lost.", actor="test")
    page = _page(owner.get(world.pages["run"])).split("stretches without a rewind")[1]
    assert "The node of the trainer was lost." in page
    assert "goes on from" in page
