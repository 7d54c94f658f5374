"""What every page tells the browser, and how sessions and passwords are kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as configured
from django.contrib.auth import get_user_model
from django.contrib.auth.hashers import identify_hasher
from django.test import Client

from controlplane.accounts import services
from controlplane.registry.models import Project

CHECKOUT = Path(__file__).resolve().parents[3]
ARGON2 = ["django.contrib.auth.hashers.Argon2PasswordHasher"]


def pages(project: Project) -> dict[str, Any]:
    user = get_user_model().objects.create_user("ada")
    services.set_membership(user, project, "admin", actor="test")
    client = Client()
    found = {"login": client.get("/login/")}
    client.force_login(user)
    for path in ("/", f"/projects/{project.slug}/", f"/projects/{project.slug}/runs/", "/api/schema", "/nowhere/"):
        found[path] = client.get(path)
    return found


def test_every_answer_has_secure_headers(project: Project) -> None:
    for path, answer in pages(project).items():
        assert answer["X-Content-Type-Options"] == "nosniff", path
        assert answer["X-Frame-Options"] == "DENY", path
        assert answer["Referrer-Policy"] == "same-origin", path
        assert answer["Cross-Origin-Opener-Policy"] == "same-origin", path


def test_no_policy_allows_inline_scripts_or_other_origins(project: Project) -> None:
    for path, answer in pages(project).items():
        policy = answer["Content-Security-Policy"]
        for directive in ("default-src 'self'", "script-src 'self'", "object-src 'none'", "frame-ancestors 'none'"):
            assert directive in policy, (path, policy)
        assert "unsafe" not in policy and "*" not in policy, (path, policy)


def test_the_session_cookie_is_out_of_reach_of_scripts(project: Project) -> None:
    get_user_model().objects.create_user("ada", password="correct horse battery")
    client = Client()
    client.post("/login/", {"username": "ada", "password": "correct horse battery"})
    cookie = client.cookies["sessionid"]
    assert cookie["httponly"] and cookie["samesite"] == "Lax"
    assert cookie["max-age"] == 7 * 86400


@pytest.mark.parametrize(("url", "secure"), [("https://boat.example", True), ("http://127.0.0.1:8000", False)])
def test_behind_https_cookies_travel_encrypted_alone(url: str, secure: bool, tmp_path: Path) -> None:
    script = (
        "from controlplane import settings as s; "
        "print(s.SESSION_COOKIE_SECURE, s.CSRF_COOKIE_SECURE, s.SECURE_HSTS_SECONDS > 0)"
    )
    environment = {"MAILBOAT_HOME": str(tmp_path), "MAILBOAT_PUBLIC_URL": url, "PATH": "/usr/bin:/bin"}
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == [str(secure)] * 3


def test_passwords_are_kept_with_argon2(db: None, settings: Any) -> None:
    settings.PASSWORD_HASHERS = ARGON2
    user = get_user_model().objects.create_user("ada", password="correct horse battery")
    assert identify_hasher(user.password).algorithm == "argon2"
    assert user.check_password("correct horse battery") and not user.check_password("wrong")


def test_weak_passwords_are_refused() -> None:
    names = {item["NAME"].rpartition(".")[2] for item in configured.AUTH_PASSWORD_VALIDATORS}
    assert {"MinimumLengthValidator", "CommonPasswordValidator"} <= names
