"""Who sees what: member, reader, stranger, nobody."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.messages import get_messages
from django.test import Client

from controlplane.jobs.models import Job
from tests import factories as make
from tests.dashboard.conftest import HTMX, PAGES, World, signed_in


def _posts(world: World) -> dict[str, str]:
    enrolment = world.project.enrolment_tokens.get(name="soon")
    return {
        "replay": world.url("runs/demo/versions/2/replay/"),
        "verify": world.url(f"islands/{world.island.pk}/verify/"),
        "cancel": world.url(f"jobs/{world.job.pk}/cancel/"),
        "register": world.url("islands/register/"),
        "bulk": world.url("islands/bulk/"),
        "drain": world.url(f"islands/{world.island.pk}/drain/"),
        "rerun": world.url(f"jobs/{world.job.pk}/rerun/"),
        "move": world.url("runs/demo/channels/latest/"),
        "protect": world.url("runs/demo/channels/latest/protect/"),
        "new channel": world.url("runs/demo/channels/new/"),
        "settings": world.url("runs/demo/settings/"),
        "revoke enrolment": world.url(f"tokens/enrolment/{enrolment.pk}/revoke/"),
    }


def _admin_posts(world: World) -> dict[str, str]:
    token = world.project.tokens.get(name="trainer")
    return {
        "new token": world.url("tokens/new/"),
        "rotate token": world.url(f"tokens/{token.pk}/rotate/"),
        "revoke token": world.url(f"tokens/{token.pk}/revoke/"),
        "set role": world.url("people/set/"),
        "remove member": world.url(f"people/{world.mate.pk}/remove/"),
    }


@pytest.mark.parametrize("name", PAGES)
def test_members_read_every_page(world: World, owner: Client, mate: Client, name: str) -> None:
    assert owner.get(world.pages[name]).status_code == 200
    assert mate.get(world.pages[name]).status_code == 200


@pytest.mark.parametrize("name", PAGES)
def test_parameters_that_no_page_has_written_do_no_harm(world: World, owner: Client, name: str) -> None:
    """Zero characters, which no text of the database holds, numbers that no row has, and half of a character."""
    names = "q page order state kind level before actor action target since until run provider region from window seen"
    address = world.pages[name].partition("?")[0]
    for value in ("%00", "9" * 30, "-1", "%FF", "%F0%9F%9A%A2" * 500):
        answer = owner.get(f"{address}?" + "&".join(f"{key}={value}" for key in names.split()))
        assert answer.status_code < 500, value


@pytest.mark.parametrize("name", PAGES)
def test_stranger_finds_nothing(world: World, stranger: Client, name: str) -> None:
    answer = stranger.get(world.pages[name])
    assert answer.status_code == 404
    assert world.project.name not in answer.content.decode()


@pytest.mark.parametrize("name", PAGES)
def test_nobody_is_sent_to_the_door(world: World, client: Client, name: str) -> None:
    answer = client.get(world.pages[name])
    assert answer.status_code == 302
    assert answer["Location"].startswith("/login/?next=/projects/harbour/")


def test_polling_without_a_session_takes_the_page_to_the_door(world: World, client: Client) -> None:
    here = f"http://testserver{world.pages['fleet']}"
    answer = client.get(world.pages["fleet"], headers={**HTMX, "HX-Current-URL": here})
    assert answer["HX-Redirect"] == "/login/?next=/projects/harbour/"


OPERATOR_POSTS = [
    "replay", "verify", "cancel", "register", "bulk", "drain", "rerun", "move", "protect", "new channel", "settings",
    "revoke enrolment",
]  # fmt: skip
ADMIN_POSTS = ["new token", "rotate token", "revoke token", "set role", "remove member"]


@pytest.mark.parametrize("name", ADMIN_POSTS)
def test_people_and_keys_need_an_admin(
    world: World, chief: Client, owner: Client, mate: Client, stranger: Client, client: Client, name: str
) -> None:
    address = _admin_posts(world)[name]
    assert mate.post(address).status_code == 403
    assert owner.post(address).status_code == 403
    assert stranger.post(address).status_code == 404
    assert client.post(address).status_code == 302
    assert chief.post(address).status_code in (200, 302)


@pytest.mark.parametrize("name", OPERATOR_POSTS + ADMIN_POSTS)
def test_read_only_dashboard_refuses_and_says_so(world: World, chief: Client, settings: Any, name: str) -> None:
    settings.MAILBOAT_READ_ONLY = True
    page = chief.get(world.url()).content.decode()
    assert "Read-only: nothing can be changed" in page
    assert "Register island" not in page
    answer = chief.post((_posts(world) | _admin_posts(world))[name])
    assert answer.status_code == 403
    assert "read-only at the moment" in answer.content.decode()


@pytest.mark.parametrize("name", ["register", "channel", "new channel", "settings"])
def test_forms_open_for_operators_alone(world: World, owner: Client, mate: Client, stranger: Client, name: str) -> None:
    address = world.forms[name]
    assert owner.get(address).status_code == 200
    assert mate.get(address).status_code == 403
    assert stranger.get(address).status_code == 404


@pytest.mark.parametrize("name", OPERATOR_POSTS)
def test_posts_need_a_role(
    world: World, owner: Client, mate: Client, stranger: Client, client: Client, name: str
) -> None:
    address = _posts(world)[name]
    assert mate.post(address).status_code == 403
    assert stranger.post(address).status_code == 404
    assert client.post(address).status_code == 302
    assert not Job.objects.exclude(pk=world.job.pk).filter(state="queued").exists()
    assert owner.post(address).status_code in (200, 302)


@pytest.mark.parametrize("name", ["replay", "verify", "cancel", "bulk", "drain", "rerun", "protect"])
def test_changes_are_never_made_by_reading(world: World, owner: Client, name: str) -> None:
    assert owner.get(_posts(world)[name]).status_code == 405


def test_posts_need_the_csrf_token(world: World) -> None:
    careful = Client(enforce_csrf_checks=True)
    careful.force_login(world.owner)
    assert careful.post(_posts(world)["verify"]).status_code == 403


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fleet", "Register island"),
        ("run", "Replay"),
        ("version", "Replay this version"),
        ("island", "Verify now"),
        ("job", "Cancel the job"),
    ],
)
def test_buttons_that_a_role_lacks_are_absent(world: World, owner: Client, mate: Client, name: str, words: str) -> None:
    assert words in owner.get(world.pages[name]).content.decode()
    assert words not in mate.get(world.pages[name]).content.decode().replace("Replay of", "").replace(">Replay<", "")


def test_viewer_can_not_open_the_registration(world: World, mate: Client) -> None:
    answer = mate.get(world.url("islands/register/"))
    assert answer.status_code == 403
    assert "Your role in this project only allows reading." in answer.content.decode()


def test_things_of_another_project_are_not_found(world: World, owner: Client) -> None:
    other = make.mk_run(make.mk_project("other"), "demo")
    version = make.mk_version(other, 9)
    island = make.mk_island(other, at=version)
    job = make.mk_job(other.project)
    for path in ("runs/demo/versions/9/", f"islands/{island.pk}/", f"jobs/{job.pk}/", "runs/nope/"):
        assert owner.get(world.url(path)).status_code == 404, path
    assert owner.post(world.url(f"islands/{island.pk}/verify/")).status_code == 404


def test_home_leads_to_the_first_project(world: World, owner: Client) -> None:
    assert owner.get("/")["Location"] == world.url()


def test_home_of_somebody_without_project_says_what_to_do(db: None) -> None:
    page = signed_in(make.mk_user("newcomer")).get("/").content.decode()
    assert "You are in no project yet" in page


def test_several_projects_get_a_switcher(world: World, owner: Client) -> None:
    assert "<details" not in owner.get(world.url()).content.decode().split("<main")[0]
    second = make.mk_project("quay", name="The quay")
    from controlplane.accounts.models import Membership

    Membership.objects.create(user=world.owner, project=second, role="viewer")
    top = owner.get(world.url()).content.decode().split("<main")[0]
    assert "/projects/quay/" in top
    assert "The quay" in top


def test_login_and_logout(world: World, client: Client) -> None:
    bad = client.post("/login/", {"username": "owner", "password": "wrong"})
    assert "Please enter a correct username and password" in bad.content.decode()
    good = client.post("/login/", {"username": "owner", "password": make.PASSWORD, "next": world.url("jobs/")})
    assert good["Location"] == world.url("jobs/")
    assert client.post("/logout/")["Location"] == "/login/"
    assert client.get(world.url()).status_code == 302


def test_login_never_leads_away(world: World, client: Client) -> None:
    answer = client.post("/login/", {"username": "owner", "password": make.PASSWORD, "next": "https://example.org/"})
    assert answer["Location"] == "/"


def test_pages_forbid_inline_code(world: World, owner: Client) -> None:
    for address in world.pages.values():
        answer = owner.get(address)
        policy = answer["Content-Security-Policy"]
        assert "script-src 'self'" in policy
        assert "style-src 'self'" in policy
        page = answer.content.decode()
        assert " style=" not in page
        assert "<style" not in page
        assert "onclick=" not in page


def test_messages_tell_what_happened(world: World, owner: Client) -> None:
    answer = owner.post(_posts(world)["verify"], follow=True)
    assert [
        str(m) for m in get_messages(answer.wsgi_request)
    ] or "Verification of fsn1-a queued." in answer.content.decode()
