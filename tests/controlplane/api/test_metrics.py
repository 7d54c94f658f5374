"""/metrics says what the database says, to whom it may; health names what is missing; requests keep their number."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client
from prometheus_client.parser import text_string_to_metric_families

from controlplane.registry.models import Run
from tests import factories
from tests.controlplane.making import series

pytestmark = pytest.mark.django_db


LABELS = ("project", "run", "channel", "queue", "health", "sync", "state", "outcome", "result", "quantile", "version")


def scrape(**headers: Any) -> dict[tuple[str, ...], float]:
    """Values by name and label values, in the order of LABELS."""
    answer = Client().get("/metrics", headers=headers)
    assert answer.status_code == 200, answer.content
    families = text_string_to_metric_families(answer.content.decode())
    samples = [sample for family in families for sample in family.samples]
    return {(s.name, *(s.labels[name] for name in LABELS if name in s.labels)): s.value for s in samples}


def test_figures_come_from_the_rows(run: Run) -> None:
    versions = series(run, 3)
    porto = factories.mk_island(run, "porto", at=versions[2])
    factories.mk_island(run, "lisbon", at=versions[0])
    factories.mk_island(run, "faro", at=versions[2], last_seen_at="2020-01-01T00:00:00Z")
    factories.mk_sync(porto, versions[2], seconds={"total": 0.5})
    factories.mk_sync(porto, versions[2], seconds={"total": "broken"})
    factories.mk_sync(porto, versions[2], outcome="failed", accepted=False)
    factories.mk_challenge(porto, versions[2])
    factories.mk_job(run.project, "replay", run=run)
    seen = scrape()
    assert seen["mailboat_islands", "harbour", "healthy"] == 2
    assert seen["mailboat_islands", "harbour", "lost"] == 1
    assert seen["mailboat_islands_by_sync", "harbour", "behind"] == 1
    assert seen["mailboat_skew_versions_max", "harbour", "minilm"] == 2
    assert seen["mailboat_skew_seconds_max", "harbour", "minilm"] >= 0
    assert seen["mailboat_head_version", "harbour", "minilm", "latest"] == 2
    assert seen["mailboat_head_expires_seconds", "harbour", "minilm", "latest"] > 3 * 86400
    assert seen["mailboat_patch_bytes", "harbour", "minilm"] == versions[2].patch_bytes
    assert seen["mailboat_syncs_last_hour", "harbour", "minilm", "applied"] == 2
    assert seen["mailboat_syncs_last_hour", "harbour", "minilm", "failed"] == 1
    assert seen["mailboat_pull_seconds", "harbour", "minilm", "0.95"] == 0.5
    assert seen["mailboat_verifications_last_day", "harbour", "passed"] == 1
    assert seen["mailboat_queue_jobs", "check", "queued"] == 1
    assert seen["mailboat_queue_oldest_seconds", "check"] >= 0


def test_an_empty_installation_has_figures_too() -> None:
    assert scrape()["mailboat_queue_jobs", "publish", "queued"] == 0


def test_only_this_machine_or_the_token_may_ask(settings: Any) -> None:
    client = Client()
    assert client.get("/metrics", REMOTE_ADDR="10.1.2.3").status_code == 401
    assert client.get("/metrics", headers={"X-Forwarded-For": "127.0.0.1"}).status_code == 401
    settings.MAILBOAT_METRICS_TOKEN = "a secret of the monitoring"
    assert client.get("/metrics").status_code == 401
    assert client.get("/metrics", headers={"Authorization": "Bearer wrong"}).status_code == 401
    right = {"Authorization": "Bearer a secret of the monitoring"}
    assert client.get("/metrics", headers=right, REMOTE_ADDR="10.1.2.3").status_code == 200


def test_query_count_does_not_grow_with_islands(run: Run, django_assert_max_num_queries: Any) -> None:
    version = series(run, 1)[0]
    for _ in range(30):
        factories.mk_island(run, at=version)
    with django_assert_max_num_queries(30):
        scrape()


def test_readiness_covers_the_broker(settings: Any) -> None:
    assert Client().get("/health/ready").json() == {"status": "ready", "problems": {}}
    settings.MAILBOAT_BROKER_CHECK = "tests.controlplane.api.test_metrics.broken"
    answer = Client().get("/health/ready")
    assert answer.status_code == 503
    assert set(answer.json()["problems"]) == {"broker"}
    assert "secret" not in answer.content.decode()


def broken() -> str:
    raise ConnectionError("amqp://user:secret@broker")


def test_every_answer_has_the_number_of_its_request(server: str) -> None:
    import urllib3

    for path in ("/health/live", "/api/v1/projects/x/runs", "/login/", "/static/mailboat.css", "/nowhere"):
        answer = urllib3.request("GET", server + path, headers={"X-Request-ID": "voyage-0001"}, redirect=False)
        assert answer.headers["X-Request-ID"] == "voyage-0001", path
        own = urllib3.request("GET", server + path, headers={"X-Request-ID": "bad id\x7f"[:6]}, redirect=False)
        assert len(own.headers["X-Request-ID"]) == 32
    head = "/api/v1/projects/x/runs/y/channels/latest/head"
    headers = {"X-Request-ID": "voyage-0002", "Authorization": "Bearer nonsense"}
    answer = urllib3.request("GET", server + head, headers=headers)
    assert (answer.status, answer.headers["X-Request-ID"]) == (401, "voyage-0002")
