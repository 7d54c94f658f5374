"""Bearer tokens, memberships and the commands that make them."""

from __future__ import annotations

from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.core.management import CommandError, call_command

from controlplane import env
from controlplane.accounts import credentials, services
from controlplane.accounts.models import Membership, Token
from controlplane.audit.models import Entry
from controlplane.registry import services as registry
from controlplane.registry.models import Project

pytestmark = pytest.mark.django_db


def make(project: Project, **options: Any) -> tuple[Token, str]:
    return services.create_token(project, Token.Role.PUBLISHER, "trainer", actor="owner", **options)


def test_a_token_opens_its_project(project: Project) -> None:
    token, plaintext = make(project)
    found = services.authenticate_token(plaintext)
    assert found == token and plaintext.startswith(f"mb_{token.key_id}_")
    assert Token.objects.get(pk=token.pk).last_used_at is not None


@pytest.mark.parametrize(
    "change", [str.upper, lambda t: t[:-1], lambda t: t + "x", lambda t: "mbe" + t[2:], lambda t: ""]
)
def test_anything_else_does_not(project: Project, change: Any) -> None:
    assert services.authenticate_token(change(make(project)[1])) is None


def test_expiry_and_revocation_are_at_once(project: Project) -> None:
    assert services.authenticate_token(make(project, lifetime=timedelta(seconds=-1))[1]) is None
    token, plaintext = make(project, lifetime=timedelta(hours=1))
    assert services.authenticate_token(plaintext) is not None
    services.revoke_token(token, actor="owner")
    services.revoke_token(token, actor="owner")
    assert services.authenticate_token(plaintext) is None
    assert Entry.objects.filter(action="token.revoke").count() == 1


def test_peppers_rotate_with_overlap(project: Project, settings: Any) -> None:
    settings.MAILBOAT_PEPPERS = {1: b"a" * 32}
    _, old = make(project)
    _, idle = make(project)
    settings.MAILBOAT_PEPPERS = {1: b"a" * 32, 2: b"b" * 32}
    token, new = make(project)
    assert token.pepper == 2
    assert services.authenticate_token(old) and services.authenticate_token(new)
    settings.MAILBOAT_PEPPERS = {2: b"b" * 32}
    # A token moves to the newest pepper when it is used; one that never was stops with its pepper.
    assert services.authenticate_token(old) and services.authenticate_token(new)
    assert services.authenticate_token(idle) is None


def test_the_secret_is_not_in_the_row(project: Project) -> None:
    token, plaintext = make(project)
    secret = credentials.split(plaintext, credentials.BEARER)
    assert secret is not None and secret[1] not in str(Token.objects.filter(pk=token.pk).values()[0])


def run(*words: str) -> str:
    out = StringIO()
    call_command(*words, stdout=out)
    return out.getvalue().strip()


def test_commands(db: None) -> None:
    run("create_project", "demo", "--name", "Demo")
    with pytest.raises(CommandError, match="already"):
        run("create_project", "demo")
    assert "exists" in run("create_project", "demo", "--exists-ok")
    plaintext = run("create_token", "--project", "demo", "--role", "publisher", "--name", "trainer")
    token = services.authenticate_token(plaintext)
    assert token is not None and (token.role, token.project.slug) == ("publisher", "demo")
    registry.create_run(token.project, "voyage", actor="test")
    scoped = run("create_token", "--project", "demo", "--role", "publisher", "--name", "t", "--run", "voyage")
    opened = services.authenticate_token(scoped)
    assert opened is not None and opened.run is not None and opened.run.name == "voyage"
    get_user_model().objects.create_user("anna")
    run("add_member", "anna", "demo", "operator")
    run("add_member", "anna", "demo", "admin")
    assert Membership.objects.get().role == "admin"


@pytest.mark.parametrize(
    "words",
    [
        ("create_project", "a b"),
        ("create_token", "--project", "none", "--role", "viewer", "--name", "x"),
        ("create_token", "--project", "harbour", "--role", "island", "--name", "x"),
        ("create_token", "--project", "harbour", "--role", "viewer", "--name", "x", "--days", "0"),
        ("create_token", "--project", "harbour", "--role", "viewer", "--name", "x", "--run", "none"),
        ("add_member", "nobody", "harbour", "viewer"),
    ],
)
def test_commands_refuse_what_makes_no_sense(project: Project, words: tuple[str, ...]) -> None:
    with pytest.raises(CommandError):
        run(*words)


def test_generated_secrets_are_kept_and_private(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("MAILBOAT_HOME", str(tmp_path / "home"))
    first = env.kept_secret("pepper")
    assert env.kept_secret("pepper") == first and len(first) == 64
    assert (tmp_path / "home/secrets/pepper").stat().st_mode & 0o777 == 0o600
    monkeypatch.delenv("MAILBOAT_PEPPERS", raising=False)
    assert env.peppers() == {1: bytes.fromhex(first)}


@pytest.mark.parametrize(
    ("name", "value", "call"),
    [
        ("MAILBOAT_DEBUG", "maybe", lambda: env.flag("MAILBOAT_DEBUG", False)),
        ("MAILBOAT_LEASE_SECONDS", "0", lambda: env.integer("MAILBOAT_LEASE_SECONDS", 30, low=1, high=10)),
        ("MAILBOAT_PEPPERS", "1:zz", env.peppers),
        ("MAILBOAT_PEPPERS_FILE", "/nonexistent/pepper", env.peppers),
        ("DATABASE_URL", "mysql://x/y", env.database),
        ("MAILBOAT_CHECKPOINT_ROOTS", "relative/path", env.checkpoint_roots),
    ],
)
def test_a_variable_that_can_not_be_read_is_named(monkeypatch: Any, name: str, value: str, call: Any) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(env.EnvironmentProblem, match=name):
        call()


def test_a_secret_from_a_file(tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "url").write_text("postgresql://anna:p%40ss@db.example:5433/boats?sslmode=require\n")
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.setenv("DATABASE_URL_FILE", str(tmp_path / "url"))
    found = env.database()
    assert (found.host, found.port, found.name, found.user, found.password) == (
        "db.example",
        "5433",
        "boats",
        "anna",
        "p@ss",
    )
    assert found.options == (("sslmode", "require"),) and not found.embedded
