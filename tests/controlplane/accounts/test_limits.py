"""Token buckets: what they allow, what they refuse, and how that is answered."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db.models.functions import Now
from django.test import Client

from controlplane.accounts import limits
from controlplane.accounts.limits import Limit
from controlplane.accounts.models import Bucket
from controlplane.registry.models import Project, Run
from tests.controlplane.conftest import Api
from tests.controlplane.making import series

pytestmark = pytest.mark.django_db
FEW = Limit("few", 3, 1 / 10)


def wait(seconds: float) -> None:
    for row in Bucket.objects.all():
        Bucket.objects.filter(pk=row.pk).update(at=row.at - timedelta(seconds=seconds))


def test_a_bucket_is_emptied_and_fills_again() -> None:
    for _ in range(3):
        limits.take(FEW, "ada")
    with pytest.raises(limits.TooMany) as refusal:
        limits.take(FEW, "ada")
    assert (refusal.value.status, refusal.value.code) == (429, "too_many_requests")
    assert refusal.value.headers == {"Retry-After": "10"}
    limits.take(FEW, "bob")  # a bucket of their own
    wait(9)
    with pytest.raises(limits.TooMany) as refusal:
        limits.take(FEW, "ada")
    assert refusal.value.seconds == 1  # a refused call took nothing
    wait(1)
    limits.take(FEW, "ada")


def test_a_bucket_never_holds_more_than_its_capacity() -> None:
    limits.take(FEW, "ada")
    wait(100_000)
    for _ in range(3):
        limits.take(FEW, "ada")
    with pytest.raises(limits.TooMany):
        limits.take(FEW, "ada")


def test_the_table_names_nobody_and_forgets() -> None:
    limits.take(FEW, "ada@example.org")
    assert "ada" not in str(Bucket.objects.get().key)
    assert limits.forget_full() == 0
    Bucket.objects.update(at=Now() - timedelta(days=2))
    assert limits.forget_full() == 1


def test_guessing_a_password_is_slow(project: Project) -> None:
    get_user_model().objects.create_user("ada", password="correct horse battery")
    client = Client()
    wrong = {"username": "Ada", "password": "guess"}
    for _ in range(10):
        assert client.post("/login/", wrong).status_code == 200
    refused = client.post("/login/", {"username": "ada", "password": "correct horse battery"})
    assert refused.status_code == 429
    assert int(refused["Retry-After"]) > 0
    assert "Too many calls" in refused.content.decode()
    assert "_auth_user_id" not in client.session
    elsewhere = Client(REMOTE_ADDR="192.0.2.7")  # the person is not locked out by a stranger
    right = {"username": "ada", "password": "correct horse battery"}
    assert elsewhere.post("/login/", right).status_code == 302


def test_enrolling_is_limited(project: Project, monkeypatch: Any) -> None:
    monkeypatch.setattr(limits, "ENROL_BY_ADDRESS", Limit("enrol", 2, 1 / 60))
    api = Api(project.slug, None)
    body = {"token": "mbe_" + "0" * 16 + "_" + "x" * 43}
    assert [api.post("islands/enrol", body).status_code for _ in range(3)] == [401, 401, 429]
    refused = api.post("islands/enrol", body)
    assert refused.json()["code"] == "too_many_requests"
    assert refused["Retry-After"] == str(refused.json()["retry_after"])


def test_pulling_is_limited_per_island(run: Run, island_api: Any, token: Any, monkeypatch: Any) -> None:
    version = series(run, 1)[0]
    monkeypatch.setattr(limits, "PULL", Limit("pull", 2, 1 / 60))
    _, api = island_api
    assert api.get("runs/minilm/plan").status_code == 200
    assert api.get(f"runs/minilm/blobs/{version.manifest_sha256}").status_code == 200
    refused = api.get(f"runs/minilm/blobs/{version.manifest_sha256}")
    assert (refused.status_code, refused.json()["code"]) == (429, "too_many_requests")
    assert "Retry-After" in refused
    assert api.get("runs/minilm/plan").status_code == 429
    assert token("viewer").get("runs/minilm/plan").status_code == 200
