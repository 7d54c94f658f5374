"""Tokens that are shown once, people and their roles, the audit log, the box that jumps."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.test import Client
from django.utils import timezone

from controlplane.accounts.models import Membership, Token
from controlplane.accounts.services import authenticate_token
from tests import factories as make
from tests.dashboard.conftest import World


def _page(answer: Any) -> str:
    return " ".join(answer.content.decode().split())


async def _gather(parts: Any) -> str:
    return "".join([part.decode() async for part in parts])


def _secret(page: str) -> str:
    found = re.search(r'data-copy="(mb_[^"]+)"', page)
    assert found
    return found.group(1)


def test_a_new_token_is_shown_once_and_works(world: World, chief: Client) -> None:
    form = {"name": "nightly", "role": "viewer", "run": world.run.pk, "days": 30}
    page = _page(chief.post(world.url("tokens/new/"), form))
    token = authenticate_token(_secret(page))
    assert token is not None
    assert (token.name, token.role, token.run) == ("nightly", "viewer", world.run)
    assert "shown this once" in page
    listed = _page(chief.get(world.pages["tokens"]))
    assert "nightly" in listed
    assert "demo only" in listed
    assert _secret(page) not in listed


def test_rotation_gives_a_new_secret_and_the_old_one_time(world: World, chief: Client) -> None:
    token = world.project.tokens.get(name="trainer")
    page = _page(chief.post(world.url(f"tokens/{token.pk}/rotate/")))
    assert authenticate_token(_secret(page)) is not None
    assert "The old secret works for another 24 hours." in page
    token.refresh_from_db()
    assert token.expires_at is not None
    again = _page(chief.post(world.url(f"tokens/{token.pk}/rotate/"), follow=True))
    assert "has been rotated already" in again


def test_revoking_a_token_needs_its_name(world: World, chief: Client) -> None:
    token = world.project.tokens.get(name="trainer")
    address = world.url(f"tokens/{token.pk}/revoke/")
    assert "Type the token&#x27;s name" in _page(chief.post(address, {"typed": "x"}, follow=True))
    assert "is revoked" in _page(chief.post(address, {"typed": "trainer"}, follow=True))
    assert "No token works here" in _page(chief.get(world.pages["tokens"]))
    assert "Revoked" in _page(chief.get(world.url("tokens/?ended=yes")))


def test_credentials_about_to_end_need_attention(world: World, owner: Client) -> None:
    Token.objects.update(expires_at=timezone.now() + timedelta(days=3))
    attention = _page(owner.get(world.url())).split("Needs attention")[1]
    assert "Credential expires:" in attention
    assert "publisher token trainer" in attention


def test_enrolment_tokens_are_revoked(world: World, owner: Client) -> None:
    enrolment = world.project.enrolment_tokens.get(name="soon")
    page = _page(owner.post(world.url(f"tokens/enrolment/{enrolment.pk}/revoke/"), follow=True))
    assert "None is open." in page


def test_roles_are_given_changed_and_taken(world: World, chief: Client) -> None:
    make.mk_user("newcomer")
    page = _page(chief.post(world.url("people/set/"), {"name": "newcomer", "role": "viewer"}, follow=True))
    assert "newcomer is viewer of this project." in page
    chief.post(world.url("people/set/"), {"name": "newcomer", "role": "operator"})
    member = Membership.objects.get(user__username="newcomer")
    assert member.role == "operator"
    remove = world.url(f"people/{member.user_id}/remove/")
    assert "Type the person&#x27;s name" in _page(chief.post(remove, {"typed": ""}, follow=True))
    assert "is no member of this project any more" in _page(chief.post(remove, {"typed": "newcomer"}, follow=True))


def test_the_last_admin_stays(world: World, chief: Client) -> None:
    page = _page(chief.post(world.url("people/set/"), {"name": "chief", "role": "viewer"}, follow=True))
    assert "last admin" in page
    assert "There is no person nobody" in _page(
        chief.post(world.url("people/set/"), {"name": "nobody", "role": "viewer"}, follow=True)
    )


def test_audit_shows_before_and_after(world: World, mate: Client) -> None:
    page = _page(mate.get(world.pages["audit"]))
    assert "run.edit" in page
    assert "<del>none</del> → <ins>9</ins>" in page


def test_audit_filters_live_in_the_address(world: World, mate: Client) -> None:
    make.mk_audit(world.project, "island.drain", "island fsn1-a", actor="chief", request_id="abc12345")
    assert "run.edit</b>" not in _page(mate.get(world.url("audit/?action=island")))
    assert "island.drain</b>" in _page(mate.get(world.url("audit/?actor=chief")))
    assert "island.drain</b>" in _page(mate.get(world.url("audit/?request_id=abc12345")))
    assert "No entry matches" in _page(mate.get(world.url("audit/?until=2001-01-01")))
    assert mate.get(world.url("audit/?since=2026-02-30&before=x")).status_code == 200


def test_audit_comes_in_pages(world: World, mate: Client) -> None:
    for number in range(60):
        make.mk_audit(world.project, "test.entry", f"thing {number}")
    first = _page(mate.get(world.url("audit/?action=test")))
    assert first.count("test.entry</b>") == 50
    found = re.search(r'href="\?action=test&amp;before=(\d+)"', first)
    assert found
    assert _page(mate.get(world.url(f"audit/?action=test&before={found.group(1)}"))).count("test.entry</b>") == 10


@pytest.mark.parametrize(("form", "kind"), [("csv", "text/csv"), ("jsonl", "application/jsonl")])
def test_audit_exports_what_the_filters_leave(world: World, mate: Client, form: str, kind: str) -> None:
    make.mk_audit(world.project, "island.drain", "=danger()")
    answer = mate.get(world.url(f"audit/{form}/?action=island"))
    assert answer["Content-Type"].startswith(kind)
    assert "attachment" in answer["Content-Disposition"]
    text = async_to_sync(_gather)(answer.streaming_content)
    assert "island.drain" in text
    assert "run.edit" not in text
    if form == "csv":
        assert ",=danger()" not in text
    assert mate.get(world.url("audit/xml/")).status_code == 404


@pytest.mark.parametrize(
    ("asked", "path"),
    [
        ("fsn1-a", "islands/"),
        ("fsn1", "islands/"),
        ("demo", "runs/demo/"),
        ("demo v2", "runs/demo/versions/2/"),
        ("demo/versions/2", "runs/demo/versions/2/"),
    ],
)
def test_the_box_jumps_by_name(world: World, mate: Client, asked: str, path: str) -> None:
    answer = mate.get(world.url("find/"), {"q": asked})
    assert answer.status_code == 302, _page(answer)
    assert answer["Location"].startswith(world.url(path))


def test_the_box_jumps_by_id_and_digest(world: World, mate: Client) -> None:
    job = mate.get(world.url("find/"), {"q": str(world.job.pk)})
    assert job["Location"] == world.pages["job"]
    version = mate.get(world.url("find/"), {"q": world.versions[2].state_digest[:10].upper()})
    assert version["Location"] == world.pages["version"]


def test_the_box_lists_several_and_knows_nothing_of_others(world: World, mate: Client, stranger: Client) -> None:
    make.mk_island(world.run, "fsn1-b")
    page = _page(mate.get(world.url("find/"), {"q": "fsn1"}))
    assert "fsn1-a" in page
    assert "fsn1-b" in page
    assert "Nothing has this name" in _page(mate.get(world.url("find/"), {"q": "<zzz>"}))
    theirs = _page(stranger.get("/projects/elsewhere/find/", {"q": "fsn1-a"}))
    assert "Nothing has this name" in theirs
