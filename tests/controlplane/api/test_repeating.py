"""Creates with an Idempotency-Key are done once and answered alike; the key is the caller's own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, connections
from django.db.models.functions import Now

from controlplane.accounts import services as accounts
from controlplane.idempotency import services
from controlplane.idempotency.models import Reply
from controlplane.idempotency.services import Answer
from controlplane.registry import services as registry
from controlplane.registry.errors import Refusal
from controlplane.registry.models import Epoch, Project, Run
from tests.controlplane.conftest import Api
from tests.controlplane.making import series
from tests.waiting import PATIENCE

pytestmark = pytest.mark.django_db

EPOCHS = "runs/minilm/epochs"


def send(api: Api, path: str, body: Any, key: str) -> Any:
    return api.client.post(
        api.base + path, body, content_type="application/json", headers=api.headers | {"Idempotency-Key": key}
    )


@pytest.fixture
def published(run: Run) -> Run:
    series(run, 1)
    return run


def test_a_repeated_create_is_done_once(published: Run, token: Callable[..., Api]) -> None:
    api = token("publisher")
    body = {"from_version": 0, "reason": "Resumed."}
    first, second = (send(api, EPOCHS, body, "k-1") for _ in range(2))
    assert first.status_code == second.status_code == 201 and first.json() == second.json()
    assert "Idempotency-Replayed" not in first and second["Idempotency-Replayed"] == "true"
    assert Epoch.objects.filter(run=published).count() == 2
    send(api, EPOCHS, body, "k-2")
    assert Epoch.objects.filter(run=published).count() == 3


def test_another_request_under_the_same_key_is_refused(published: Run, token: Callable[..., Api]) -> None:
    api = token("publisher")
    assert send(api, EPOCHS, {"from_version": 0, "reason": "a"}, "k").status_code == 201
    for path, body in ((EPOCHS, {"from_version": 0, "reason": "b"}), ("runs", {"name": "llama"})):
        answer = send(api, path, body, "k")
        assert (answer.status_code, answer.json()["code"]) == (422, "idempotency_mismatch")
    assert Epoch.objects.filter(run=published).count() == 2 and not Run.objects.filter(name="llama").exists()


def test_the_order_of_members_does_not_matter(published: Run, token: Callable[..., Api]) -> None:
    api = token("publisher")
    first = send(api, EPOCHS, '{"from_version": 0, "reason": "a"}', "k")
    assert send(api, EPOCHS, '{"reason":"a","from_version":0}', "k").json() == first.json()


def test_keys_belong_to_their_callers(published: Run, token: Callable[..., Api], foreign: Project) -> None:
    body = {"from_version": 0, "reason": "a"}
    one, other = token("publisher"), token("operator")
    assert send(one, EPOCHS, body, "k").json()["number"] == 1
    assert send(other, EPOCHS, body, "k").json()["number"] == 2


def test_a_refusal_is_not_kept(run: Run, token: Callable[..., Api]) -> None:
    api = token("publisher")
    body = {"from_version": 0, "reason": "a"}
    assert send(api, EPOCHS, body, "k").status_code == 409
    assert not Reply.objects.exists()
    series(run, 1)
    assert send(api, EPOCHS, body, "k").status_code == 201


def test_a_secret_is_never_kept(run: Run, token: Callable[..., Api]) -> None:
    api = token("operator")
    body = {"run": "minilm", "name": "azores"}
    first = send(api, "enrolment-tokens", body, "k")
    assert first.status_code == 201 and first.json()["token"]
    again = send(api, "enrolment-tokens", body, "k")
    assert (again.status_code, again.json()["code"]) == (409, "secret_shown")
    assert Reply.objects.get().body is None


@pytest.mark.parametrize("key", ["", " ", "a b", "x" * 201, "é"])
def test_keys_are_visible_ascii(run: Run, token: Callable[..., Api], key: str) -> None:
    answer = send(token("publisher"), "runs", {"name": "llama"}, key)
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")


def test_answers_are_forgotten_after_a_day(run: Run, token: Callable[..., Api]) -> None:
    api = token("publisher")
    assert send(api, "runs", {"name": "llama"}, "k").status_code == 201
    assert services.forget_old() == 0
    Reply.objects.update(created_at=Now() - timedelta(hours=25))
    assert send(api, "runs", {"name": "other"}, "k").status_code == 201, "the key is free again"
    Reply.objects.update(created_at=Now() - timedelta(hours=25))
    assert services.forget_old() == 1


@pytest.mark.django_db(transaction=True)
class TestTwoAtOnce:
    """Real transactions: the second request waits for the first."""

    def _once(self, project: Project, work: Callable[[], Answer]) -> Answer | str:
        try:
            return services.once(project, "token:1", "k", "a" * 64, work)
        except Refusal as refusal:
            return refusal.code
        finally:
            connection.close()

    def test_the_second_waits_and_gets_the_answer(self, project: Project) -> None:
        done: list[int] = []

        def work() -> Answer:
            done.append(1)
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_sleep(0.3)")
            return Answer(201, {"n": len(done)})

        with ThreadPoolExecutor(4) as pool:
            answers = [task.result(PATIENCE) for task in [pool.submit(self._once, project, work) for _ in range(4)]]
        assert done == [1]
        assert [answer.body for answer in answers if isinstance(answer, Answer)] == [{"n": 1}] * 4
        assert sorted(answer.again for answer in answers if isinstance(answer, Answer)) == [False, True, True, True]

    def test_who_waits_too_long_is_told_to_come_again(self, project: Project, monkeypatch: Any) -> None:
        monkeypatch.setattr(services, "WAIT_SECONDS", 0.2)
        with ThreadPoolExecutor(1) as pool:

            def slow() -> Answer:
                assert (
                    pool.submit(self._once, project, lambda: Answer(201, 2)).result(PATIENCE)
                    == "idempotency_in_progress"
                )
                return Answer(201, 1)

            assert services.once(project, "token:1", "k", "a" * 64, slow).body == 1
        connections.close_all()

    def test_a_first_request_that_died_leaves_the_key_free(self, project: Project) -> None:
        def dies() -> Answer:
            raise RuntimeError("killed")

        with pytest.raises(RuntimeError):
            services.once(project, "token:1", "k", "a" * 64, dies)
        assert services.once(project, "token:1", "k", "a" * 64, lambda: Answer(201, 1)).again is False

    @pytest.fixture
    def project(self, transactional_db: None) -> Project:
        found = registry.create_project("quay", actor="test")
        accounts.create_token(found, "viewer", "x", actor="test")
        return found
