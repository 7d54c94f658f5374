"""What an operator does to one island, and to many."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from controlplane.audit.models import Entry
from controlplane.fleet.models import Island
from controlplane.jobs.models import Job
from mailboat import identity
from tests import factories as make
from tests.dashboard.conftest import World, live


def _do(client: Client, world: World, action: str, island: Island | None = None, **form: Any) -> str:
    island = island or world.island
    answer = client.post(world.url(f"islands/{island.pk}/{action}/"), form, follow=True)
    assert answer.status_code == 200
    return " ".join(answer.content.decode().split())


def _page(client: Client, url: str) -> str:
    return " ".join(client.get(url).content.decode().split())


def test_drain_has_a_deadline_progress_and_an_end(world: World, owner: Client) -> None:
    page = _do(owner, world, "drain", minutes="5", reason="New disks.")
    assert "fsn1-a is asked to drain" in page
    world.island.refresh_from_db()
    assert world.island.drain_until is not None
    left = world.island.drain_until - timezone.now()
    assert timedelta(minutes=4) < left <= timedelta(minutes=5)
    Island.objects.update(active_requests=3)
    page = _page(owner, world.pages["island"])
    assert "<strong>3</strong> active requests left" in page
    assert "New disks." in page
    assert "Draining: 3 requests active." in page
    Island.objects.update(active_requests=0)
    assert "Drained" in _page(owner, world.pages["island"])
    assert "takes requests again" in _do(owner, world, "stop-drain")
    world.island.refresh_from_db()
    assert world.island.draining_since is None


def test_a_drain_is_no_news_each_second(world: World, owner: Client) -> None:
    import re

    _do(owner, world, "drain", minutes="5")
    Island.objects.update(active_requests=3)
    page = owner.get(world.pages["island"]).content.decode()
    found = re.search(r'"seen": "(\w+)"', page)
    assert found
    assert live(owner, world.pages["island"], found.group(1)).status_code == 204


@pytest.mark.parametrize("minutes", ["", "0", "-3", "x", "99999"])
def test_a_drain_needs_a_sensible_deadline(world: World, owner: Client, minutes: str) -> None:
    assert "number of minutes from 1 to 1440" in _do(owner, world, "drain", minutes=minutes)
    world.island.refresh_from_db()
    assert world.island.draining_since is None


def test_disable_and_enable(world: World, owner: Client) -> None:
    page = _do(owner, world, "disable", reason="Too slow.")
    assert "Too slow." in page
    assert "Enable fsn1-a" in page
    assert "follows its channel again" in _do(owner, world, "enable")
    entry = Entry.objects.filter(action="island.disable").get()
    assert entry.actor == "owner"


def test_pin_and_unpin(world: World, owner: Client, home: Any) -> None:
    page = _do(owner, world, "pin", version="v1", reason="A bug in 2.")
    assert "stays at version 1" in page
    assert "A bug in 2." in page
    assert "Unpin" in page
    assert "Pin to a version" not in page
    assert 'href="/projects/harbour/runs/demo/versions/1/"' in page
    assert "follows latest again" in _do(owner, world, "unpin")


@pytest.mark.parametrize(("version", "words"), [("x", "by its number"), ("77", "There is no version 77 in this run.")])
def test_pins_are_refused_in_words(world: World, owner: Client, version: str, words: str) -> None:
    assert words in _do(owner, world, "pin", version=version)


def test_a_form_that_is_out_of_date_changes_nothing(world: World, owner: Client) -> None:
    seen = world.island.revision
    _do(owner, world, "disable", seen=seen)
    assert "Somebody changed fsn1-a meanwhile" in _do(owner, world, "enable", seen=seen)
    world.island.refresh_from_db()
    assert not world.island.enabled


def test_revoking_needs_the_name_and_ends_the_credential(world: World, owner: Client) -> None:
    token = make.mk_token(world.project, "fsn1-a", "island")
    Island.objects.update(token=token)
    assert "Type the island&#x27;s name" in _do(owner, world, "revoke", typed="fsn1")
    token.refresh_from_db()
    assert token.revoked_at is None
    page = _do(owner, world, "revoke", typed="fsn1-a", reason="Stolen.")
    token.refresh_from_db()
    assert token.revoked_at is not None
    assert "Stolen." in page
    assert "Remove fsn1-a" in page
    page = _do(owner, world, "remove", typed="fsn1-a")
    assert "its name is free again" in page
    assert not Island.objects.filter(name="fsn1-a").exists()


def test_rotation_is_asked_for_and_shown(world: World, owner: Client) -> None:
    Island.objects.update(token=make.mk_token(world.project, "fsn1-a", "island"))
    page = _do(owner, world, "rotate")
    assert "Rotating" in page
    assert "A new credential goes out with the next heartbeat" in page


def test_approval_compares_the_fingerprint(world: World, owner: Client, mate: Client) -> None:
    key = identity.public_half(identity.new_key())
    island = make.mk_island(world.run, "newcomer", pending=True, public_key=key, hostname="rack-9")
    address = world.url(f"islands/{island.pk}/")
    assert "Waits for approval" in _page(owner, world.url())
    page = _page(owner, address)
    assert identity.fingerprint(key) in page
    assert "rack-9" in page
    assert "Approve newcomer" not in _page(mate, address)
    assert "not the fingerprint" in _do(owner, world, "approve", island, fingerprint="SHA256:nonsense")
    island.refresh_from_db()
    assert island.pending
    page = _do(owner, world, "approve", island, fingerprint=identity.fingerprint(key))
    assert "newcomer is approved" in page
    island.refresh_from_db()
    assert not island.pending
    assert island.approved_by == "owner"


def test_unknown_actions_are_not_found(world: World, owner: Client) -> None:
    assert owner.post(world.url(f"islands/{world.island.pk}/explode/")).status_code == 404


def test_the_timeline_tells_who_did_what_when(world: World, owner: Client) -> None:
    make.mk_sync(world.island, world.versions[2], outcome="failed", accepted=False, error="Part 0 broke off.")
    _do(owner, world, "disable", reason="Noise.")
    timeline = _page(owner, world.pages["island"]).split('id="timeline-title"')[1]
    for words in ("Disabled", "Noise.", "owner", "Sync failed", "Part 0 broke off.", "Verification passed", ">job</a>"):
        assert words in timeline, words
    assert timeline.index("Disabled") < timeline.index("Sync failed") < timeline.index("Synced")


def test_bulk_actions_ask_with_the_count_first(world: World, owner: Client) -> None:
    for number in range(3):
        make.mk_island(world.run, f"hel-{number}", at=world.versions[-1], provider="aws")
    address = world.url("islands/bulk/?provider=aws")
    page = " ".join(owner.post(address, {"action": "disable", "all": "matching"}).content.decode().split())
    assert "Disable 3 islands?" in page
    assert "hel-0, hel-1, hel-2." in page
    assert not Island.objects.filter(enabled=False).exists()
    names = ["hel-0", "hel-2", "nobody"]
    page = owner.post(address, {"action": "disable", "island": names}).content.decode()
    assert "Disable 2 islands?" in " ".join(page.split())
    done = owner.post(address, {"action": "disable", "island": names, "confirmed": "yes"}, follow=True)
    assert done.redirect_chain[0][0].endswith("?provider=aws")
    assert "2 islands disabled." in done.content.decode()
    assert set(Island.objects.filter(enabled=False).values_list("name", flat=True)) == {"hel-0", "hel-2"}


def test_bulk_actions_never_reach_into_another_project(world: World, owner: Client) -> None:
    other = make.mk_island(make.mk_run(make.mk_project("other")), "theirs")
    owner.post(world.url("islands/bulk/"), {"action": "disable", "island": ["theirs"], "confirmed": "yes"})
    other.refresh_from_db()
    assert other.enabled


def test_bulk_actions_without_a_choice_say_so(world: World, owner: Client) -> None:
    answer = owner.post(world.url("islands/bulk/"), {"action": "verify"}, follow=True)
    assert "Tick the islands that you mean first" in answer.content.decode()


def test_bulk_verification_queues_one_job_each_and_tells_refusals(world: World, owner: Client) -> None:
    make.mk_island(world.run, "empty")
    form = {"action": "verify", "island": ["fsn1-a", "empty"], "confirmed": "yes"}
    page = owner.post(world.url("islands/bulk/"), form, follow=True).content.decode()
    assert "1 island asked to prove what they hold." in page
    assert "1 island left as they were: The island empty has not reported any verified version yet." in page
    assert Job.objects.filter(kind="verify", state="queued").count() == 1
