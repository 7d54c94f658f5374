"""One island, its verification, and the way in for new ones."""

from __future__ import annotations

import re
from datetime import timedelta

from django.test import Client
from django.utils import timezone

from controlplane.fleet import services as fleet
from controlplane.fleet.models import EnrolmentToken, Island
from controlplane.jobs.models import Job
from tests import factories as make
from tests.dashboard.conftest import World, live


def _page(client: Client, url: str) -> str:
    return " ".join(client.get(url).content.decode().split())


def _form(world: World, **fields: str) -> dict[str, str]:
    channel = world.run.channels.get(name="latest")
    return {
        "name": "hel1-b",
        "channel": str(channel.pk),
        "provider": "hetzner",
        "region": "hel1",
        "engine": "checkpoint",
    } | fields


def test_island_page_shows_phases_and_verifications(world: World, owner: Client) -> None:
    make.mk_sync(
        world.island, world.versions[2], outcome="failed", accepted=False, verified=False, error="Part 0 broke off."
    )
    page = _page(owner, world.pages["island"])
    for words in (
        "210 ms",
        "340 ms",
        "50 ms",
        "Part 0 broke off.",
        "Passed",
        "3 random ranges, 9.00 KiB",
        "At the head.",
    ):
        assert words in page, words


def test_island_page_shows_the_route_to_the_head_before_it_is_taken(world: World, owner: Client) -> None:
    versions = world.versions
    Island.objects.filter(pk=world.island.pk).update(
        digest=versions[0].state_digest, version_number=0, link_bytes_per_second=1_000_000
    )
    page = _page(owner, world.pages["island"])
    assert "Route to the head" in page and "step patch" in page and "as measured" in page
    assert "Route to the head" not in live(owner, world.pages["island"]).content.decode(), (
        "not asked for with each poll"
    )
    Island.objects.filter(pk=world.island.pk).update(digest="f" * 64, link_bytes_per_second=None)
    page = _page(owner, world.pages["island"])
    assert "nobody has measured its link" in page, "and what it holds is unknown: by an anchor"
    Island.objects.filter(pk=world.island.pk).update(digest=world.island.channel.version.state_digest)
    assert "Route to the head" not in _page(owner, world.pages["island"])


def test_island_page_lists_member_hosts(world: World, owner: Client) -> None:
    assert "Member hosts" not in _page(owner, world.pages["island"])
    members = [
        {"name": "hel1-b", "version": 2, "phase": "idle", "reason": ""},
        {"name": "hel1-c", "version": None, "phase": "silent", "reason": "It is away <b>."},
    ]
    fleet.heartbeat(world.island, version=2, digest="", epoch=0, phase="idle", reason="", members=members)
    page = _page(owner, world.pages["island"])
    for words in ("Member hosts", "hel1-b", "v2", "hel1-c", "silent", "It is away &lt;b&gt;."):
        assert words in page, words


def test_report_that_was_not_accepted_is_not_called_verified(world: World, owner: Client) -> None:
    make.mk_sync(world.island, world.versions[2], accepted=False)
    assert "Not accepted" in _page(owner, world.pages["island"])


def test_verify_starts_a_job_and_a_second_one_joins_it(world: World, owner: Client) -> None:
    address = world.url(f"islands/{world.island.pk}/verify/")
    first = owner.post(address)
    job = Job.objects.get(kind="verify", state="queued")
    assert first["Location"] == world.url(f"jobs/{job.pk}/")
    assert "already under way" in owner.post(address, follow=True).content.decode()


def test_verify_of_an_island_that_holds_nothing_is_refused_in_words(world: World, owner: Client) -> None:
    bare = make.mk_island(world.run, "bare")
    answer = owner.post(world.url(f"islands/{bare.pk}/verify/"), follow=True)
    assert "has not reported any verified version yet" in answer.content.decode()


def test_registration_shows_the_token_once(world: World, owner: Client) -> None:
    answer = owner.post(world.url("islands/register/"), _form(world))
    page = answer.content.decode()
    token = EnrolmentToken.objects.get(name="hel1-b")
    plaintext = re.findall(r"--token (\S+)", page)[0]
    assert answer["Cache-Control"] == "no-store"
    assert "mailboat island run" in page
    assert "Waiting for hel1-b" in page
    assert token.digest not in page
    again = owner.get(world.url(f"islands/register/{token.pk}/")).content.decode()
    assert plaintext not in again
    assert "Waiting for hel1-b" in again


def test_registration_starts_the_engine_that_was_asked_for(world: World, owner: Client) -> None:
    page = owner.post(world.url("islands/register/"), _form(world, engine="vllm")).content.decode()
    copied = re.findall(r'data-copy="([^"]*)"', page)[0]
    for part in ("--engine vllm", "--engine-url http://127.0.0.1:8000", "--listen 127.0.0.1:8200"):
        assert part in copied and part in page.replace(copied, "")


def test_registration_pins_the_keys_that_count(world: World, owner: Client) -> None:
    def registered(name: str) -> str:
        return owner.post(world.url("islands/register/"), {**_form(world), "name": name}).content.decode()

    assert "--publisher-key" not in registered("before")
    for key, revoked in (("ab" * 32, None), ("cd" * 32, None), ("ef" * 32, world.island.enrolled_at)):
        make.mk_key(world.run, key, revoked_at=revoked)
    copied = re.findall(r'data-copy="([^"]*)"', page := registered("after"))[0]
    assert re.findall(r"--publisher-key (\S+)", copied) == ["ab" * 32, "cd" * 32]
    assert "trainer.pem.pub" in page


def test_registration_for_a_derived_run_pins_its_workers_key(world: World, owner: Client) -> None:
    derived = make.mk_run(world.project, "demo-fp8", source=world.run, quantiser={"name": "fp8"})
    form = {**_form(world), "channel": str(derived.channels.get().pk)}
    assert "has no key yet" in owner.post(world.url("islands/register/"), {**form, "name": "before"}).content.decode()
    make.mk_key(world.run, "ab" * 32)
    make.mk_key(derived, "cd" * 32, kind="derived")
    page = owner.post(world.url("islands/register/"), {**form, "name": "after"}).content.decode()
    copied = re.findall(r'data-copy="([^"]*)"', page)[0]
    assert copied.endswith(f"--store ./after --publisher-key {'cd' * 32}")
    assert "the worker that quantises" in page


def test_registration_waits_for_the_first_heartbeat(world: World, owner: Client) -> None:
    page = owner.post(world.url("islands/register/"), _form(world)).content.decode()
    token = EnrolmentToken.objects.get(name="hel1-b")
    address = world.url(f"islands/register/{token.pk}/")
    assert f'hx-get="{address}"' in page
    plaintext = re.findall(r"--token (\S+)", page)[0]
    island, _ = fleet.enrol("harbour", plaintext, hostname="node-7")
    waiting = live(owner, address).content.decode()
    assert "waiting for the first heartbeat" in waiting
    assert "data-live" in waiting
    Island.objects.filter(pk=island.pk).update(last_seen_at=timezone.now() + timedelta(seconds=1))
    arrived = live(owner, address).content.decode()
    assert "hel1-b has arrived" in arrived
    assert "data-live" not in arrived
    assert world.url(f"islands/{island.pk}/") in arrived


def test_token_that_ended_unused_says_so(world: World, owner: Client) -> None:
    token = make.mk_enrolment(world.run, "late", expires_at=timezone.now() - timedelta(minutes=1))
    page = owner.get(world.url(f"islands/register/{token.pk}/")).content.decode()
    assert "The token has ended unused" in page
    assert "data-live" not in page


def test_registration_errors_stand_beside_their_field(world: World, owner: Client) -> None:
    page = owner.post(world.url("islands/register/"), _form(world, name="fsn1-a")).content.decode()
    assert "There is an island fsn1-a in this project already; choose another name." in page
    assert 'aria-invalid="true"' in page
    for name in ("", "two words", "x" * 61, "<b>"):
        answer = owner.post(world.url("islands/register/"), _form(world, name=name))
        assert 'class="error"' in answer.content.decode(), name
    assert EnrolmentToken.objects.count() == 1, "the one that was there"


def test_registration_refuses_channels_of_others(world: World, owner: Client) -> None:
    other = make.mk_run(make.mk_project("other"))
    page = owner.post(world.url("islands/register/"), _form(world, channel=str(other.channels.get().pk)))
    assert "Select a valid choice" in page.content.decode()
    assert EnrolmentToken.objects.count() == 1, "the one that was there"


def test_enrolments_of_others_are_not_found(world: World, owner: Client, mate: Client) -> None:
    other = make.mk_enrolment(make.mk_run(make.mk_project("other")))
    assert owner.get(world.url(f"islands/register/{other.pk}/")).status_code == 404
    own = make.mk_enrolment(world.run)
    assert mate.get(world.url(f"islands/register/{own.pk}/")).status_code == 403
