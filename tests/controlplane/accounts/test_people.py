"""People and keys: memberships, tokens that rotate and expire, tokens of one run, sessions."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db.models.functions import Now
from django.test import Client

from controlplane.accounts import selectors, services, sessions
from controlplane.accounts.models import Membership, Token
from controlplane.audit.models import Entry
from controlplane.registry import clock
from controlplane.registry.errors import Missing, Refusal
from controlplane.registry.models import Project, Run
from tests.controlplane.conftest import Api, enrol
from tests.controlplane.making import series

TokenMaker = Callable[..., Api]
PASSWORD = "correct horse battery"


def person(name: str, project: Project, role: str) -> Membership:
    user = get_user_model().objects.create_user(name, password=PASSWORD)
    return services.set_membership(user, project, role, actor="test")


# Members


def test_the_last_admin_stays(project: Project) -> None:
    ada, bob = person("ada", project, "admin"), person("bob", project, "operator")
    for change in (
        lambda: services.remove_member(ada, actor="ada"),
        lambda: services.set_membership(ada.user, project, "viewer", actor="ada"),
    ):
        with pytest.raises(services.LastAdmin):
            change()
    services.set_membership(bob.user, project, "admin", actor="ada")
    services.remove_member(selectors.member(project, ada.user_id), actor="bob")
    with pytest.raises(services.LastAdmin):
        services.remove_member(selectors.member(project, bob.user_id), actor="bob")
    entry = Entry.objects.filter(action="member.set").first()
    assert entry is not None and (entry.before, entry.after) == ({"role": "operator"}, {"role": "admin"})


def test_an_admin_who_may_not_log_in_counts_for_nothing(project: Project) -> None:
    ada, bob = person("ada", project, "admin"), person("bob", project, "admin")
    get_user_model().objects.filter(pk=bob.user_id).update(is_active=False)
    with pytest.raises(services.LastAdmin):
        services.remove_member(ada, actor="ada")


def test_a_member_who_is_taken_out_sees_nothing_at_once(project: Project) -> None:
    person("ada", project, "admin")
    bob = person("bob", project, "viewer")
    client = Client()
    client.force_login(bob.user)
    address = f"/api/v1/projects/{project.slug}/runs"
    assert client.get(address).status_code == 200
    services.remove_member(bob, actor="ada")
    assert client.get(address).status_code == 404


def test_members_over_http(project: Project) -> None:
    ada = person("ada", project, "admin")
    get_user_model().objects.create_user("eve")
    client, base = Client(), f"/api/v1/projects/{project.slug}/members"
    client.force_login(ada.user)
    made = client.post(base, {"name": "eve", "role": "viewer"}, content_type="application/json")
    assert (made.status_code, made.json()["role"]) == (201, "viewer")
    one = f"{base}/{made.json()['user']}"
    assert client.patch(one, {"role": "operator"}, content_type="application/json").json()["role"] == "operator"
    assert [row["name"] for row in client.get(base).json()["results"]] == ["ada", "eve"]
    assert client.delete(one).status_code == 204
    refused = client.delete(f"{base}/{ada.user_id}")
    assert (refused.status_code, refused.json()["code"]) == (409, "last_admin")
    missing = client.post(base, {"name": "nobody", "role": "viewer"}, content_type="application/json")
    assert missing.status_code == 404


# Tokens


def test_a_rotated_token_works_for_the_stated_overlap(project: Project, run: Run) -> None:
    old, before = services.create_token(project, "publisher", "trainer", run=run, actor="ada")
    fresh, after = services.rotate_token(old, overlap=timedelta(hours=1), actor="ada")
    assert (fresh.role, fresh.name, fresh.run, fresh.rotated_from) == ("publisher", "trainer", run, old)
    assert services.authenticate_token(before) and services.authenticate_token(after)
    assert old.expires_at is not None
    assert timedelta(minutes=59) < old.expires_at - clock.now() <= timedelta(hours=1)
    Token.objects.filter(pk=old.pk).update(expires_at=Now() - timedelta(seconds=1))
    assert services.authenticate_token(before) is None and services.authenticate_token(after)
    entry = Entry.objects.get(action="token.rotate")
    assert entry.before["key_id"] == old.key_id and entry.after["key_id"] == fresh.key_id
    assert not any(secret.split("_", 2)[2] in str(entry.after) for secret in (before, after))


def test_rotation_never_lengthens_a_life(project: Project) -> None:
    old, _ = services.create_token(project, "viewer", "board", lifetime=timedelta(minutes=5), actor="ada")
    services.rotate_token(old, overlap=timedelta(days=1), actor="ada")
    assert old.expires_at is not None and old.expires_at - clock.now() <= timedelta(minutes=5)


def test_what_does_not_work_is_not_rotated(project: Project, run: Run) -> None:
    old, _ = services.create_token(project, "viewer", "board", actor="ada")
    services.rotate_token(old, actor="ada")
    with pytest.raises(services.TokenEnded):
        services.rotate_token(old, actor="ada")
    gone, _ = services.create_token(project, "viewer", "gone", actor="ada")
    services.revoke_token(gone, actor="ada")
    with pytest.raises(services.TokenEnded):
        services.rotate_token(gone, actor="ada")
    island, _ = enrol(run)
    assert island.token is not None
    with pytest.raises(Refusal) as refusal:
        services.rotate_token(island.token, actor="ada")
    assert refusal.value.code == "island_token"


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "active"),
        ({"expires_at": Now() + timedelta(days=20)}, "active"),
        ({"expires_at": Now() + timedelta(days=13)}, "expiring"),
        ({"expires_at": Now() - timedelta(seconds=1)}, "expired"),
        ({"revoked_at": Now()}, "revoked"),
    ],
)
def test_where_a_token_stands(project: Project, changes: dict[str, Any], state: str) -> None:
    made, _ = services.create_token(project, "viewer", "board", actor="ada")
    Token.objects.filter(pk=made.pk).update(**changes)
    row = selectors.token(project, made.pk)
    standing = selectors.standing(row, clock.now())
    assert standing.state == state and standing.reason.endswith(".")
    assert standing.works == selectors.tokens(project, ended=False).exists()
    assert selectors.expiring(project).exists() == (state == "expiring")


def test_a18_a_token_of_one_run_opens_that_run_alone(project: Project, run: Run, other_run: Run) -> None:
    series(run, 1)
    series(other_run, 1)
    _, plaintext = services.create_token(project, "operator", "script", run=run, actor="ada")
    api = Api(project.slug, plaintext)
    assert [row["name"] for row in api.get("runs").json()["results"]] == [run.name]
    assert api.get(f"runs/{run.name}/versions/0").status_code == 200
    assert api.get(f"runs/{other_run.name}/versions/0").status_code == 404
    for path in ("fleet", "islands", "jobs", "tokens", "members", "audit", "queues"):
        assert api.get(path).status_code == 403, path
    assert api.post("runs", {"name": "more"}).status_code == 403


def test_tokens_over_http(project: Project, run: Run, token: TokenMaker) -> None:
    ada = person("ada", project, "admin")
    client, base = Client(), f"/api/v1/projects/{project.slug}/tokens"
    client.force_login(ada.user)

    def post(path: str, body: Any) -> Any:
        return client.post(base + path, body, content_type="application/json")

    made = post("", {"name": "trainer", "role": "publisher", "run": run.name, "days": 30})
    assert made.status_code == 201
    body = made.json()
    assert (body["state"], body["run"], body["created_by"]) == ("active", run.name, "ada")
    assert Api(project.slug, body["token"]).get("runs").status_code == 200
    assert "token" not in client.get(f"{base}/{body['id']}").json()
    rotated = post(f"/{body['id']}/rotate", {"overlap_seconds": 60}).json()
    assert (rotated["rotated_from"], rotated["name"]) == (body["key_id"], "trainer")
    assert post(f"/{body['id']}/rotate", {}).json()["code"] == "token_ended"
    assert post(f"/{rotated['id']}/revoke", None).json()["state"] == "revoked"
    assert Api(project.slug, rotated["token"]).get("runs").status_code == 401
    assert post("", {"name": "x", "role": "island"}).status_code == 400
    assert post("", {"name": "x", "role": "viewer", "run": "nope"}).status_code == 404
    listed = client.get(base).json()["results"]
    assert listed[0]["last_used_at"] is not None or listed[1]["last_used_at"] is not None
    assert not any("digest" in row or "token" in row for row in listed)


# Sessions


def test_a_person_sees_and_ends_their_own_sessions(project: Project, foreign: Project) -> None:
    ada, eve = person("ada", project, "admin"), person("eve", foreign, "admin")
    here, there, stranger = Client(), Client(headers={"User-Agent": "phone"}), Client()
    for client, who in ((here, ada), (there, ada), (stranger, eve)):
        client.force_login(who.user)
    listed = here.get("/api/v1/sessions").json()["results"]
    assert [row["current"] for row in listed] == [False, True]
    assert stranger.delete(f"/api/v1/sessions/{listed[0]['id']}").status_code == 404
    assert here.delete(f"/api/v1/sessions/{listed[0]['id']}").status_code == 204
    assert there.get("/api/v1/sessions").status_code == 401
    assert here.get("/api/v1/sessions").status_code == 200
    with pytest.raises(Missing):
        sessions.end(ada.user, listed[0]["id"])
    assert sessions.end_all(ada.user) == 1
    assert here.get("/api/v1/sessions").status_code == 401
    assert sessions.forget_ended() == 0
    assert set(Entry.objects.values_list("action", flat=True)) >= {"person.login", "person.session_end"}


def test_peppers_in_use_tell_when_an_old_one_may_go(project: Project, settings: Any) -> None:
    settings.MAILBOAT_PEPPERS = {1: b"a" * 32}
    _, plaintext = services.create_token(project, "viewer", "board", actor="ada")
    settings.MAILBOAT_PEPPERS = {1: b"a" * 32, 2: b"b" * 32}
    assert selectors.peppers_in_use() == {1: 1}
    assert services.authenticate_token(plaintext)
    assert selectors.peppers_in_use() == {2: 1}
