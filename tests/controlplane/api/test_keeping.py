"""Leases, the preview of a collection, breaches and resolve, over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db.models.functions import Now

from controlplane.fleet import services as fleet
from controlplane.fleet import staleness
from controlplane.fleet.models import Island
from controlplane.registry import leases, retention
from controlplane.registry.models import Run, VersionLease
from tests import factories as make
from tests.controlplane.api.test_calls import problem
from tests.controlplane.conftest import Api, enrol
from tests.controlplane.making import ready, series
from tests.controlplane.registry.test_retention import anchored_series

pytestmark = pytest.mark.django_db


def test_a_lease_keeps_a_version_until_it_ends(run: Run, token: Callable[..., Api]) -> None:
    series(run, 4)
    Run.objects.filter(pk=run.pk).update(keep_versions=1)
    trainer, operator = token("publisher"), token("operator")
    body = {"version": 1, "seconds": 600, "reason": "An evaluation runs on it."}
    lease = trainer.post("runs/minilm/leases", body)
    assert lease.status_code == 201
    assert trainer.post("runs/minilm/leases", body).json()["id"] == lease.json()["id"]
    assert [row["version"] for row in operator.get("runs/minilm/leases").json()["results"]] == [1]
    problem(trainer.post("runs/minilm/leases", body | {"version": 9}), 404, "not_found")
    problem(trainer.post("runs/minilm/leases", body | {"seconds": 0}), 400, "invalid_request")
    address = f"{operator.base}runs/minilm/leases/{lease.json()['id']}"
    for expected in (204, 404):
        assert operator.client.delete(address, headers=operator.headers).status_code == expected


def test_the_preview_says_what_would_go(run: Run, token: Callable[..., Api]) -> None:
    anchored_series(run, 5, 4)
    viewer = token("viewer")
    assert viewer.get("runs/minilm/retention").json()["retire"] == []
    Run.objects.filter(pk=run.pk).update(keep_versions=1)
    run.refresh_from_db()
    shown = viewer.get("runs/minilm/retention").json()
    assert shown["retire"] == [0, 1, 2, 3]
    assert shown["keep"] == 1
    assert shown["bytes"] == retention.preview(run).bytes > 0


def test_the_preview_says_why_versions_stay(run: Run, token: Callable[..., Api]) -> None:
    versions = anchored_series(run, 7, 4)
    Run.objects.filter(pk=run.pk).update(keep_versions=2)
    leases.take(versions[1], "evaluator", timedelta(hours=1))
    shown = token("viewer").get("runs/minilm/retention").json()
    assert (shown["retire"], shown["keep"]) == ([2, 3], 5)
    assert shown["reasons"] == {"one of the newest 2": 1, "latest points at it": 1, "leased to evaluator": 1,
                                "a route leads over it": 2}  # fmt: skip


def test_a_limit_beyond_the_calendar_is_refused_and_does_no_harm(run: Run, token: Callable[..., Api]) -> None:
    anchored_series(run, 5, 4)
    operator = token("operator")
    answer = operator.client.patch(
        f"{operator.base}runs/minilm", {"keep_days": 800_000}, content_type="application/json",
        headers={**operator.headers, "If-Match": "*"},
    )  # fmt: skip
    assert "keep_days" in problem(answer, 400, "invalid_request")["errors"]
    Run.objects.filter(pk=run.pk).update(keep_days=800_000)  # from before there was a limit
    assert operator.get("runs/minilm/retention").status_code == 200


def test_a_collection_is_started_by_hand(run: Run, token: Callable[..., Api]) -> None:
    anchored_series(run, 5, 4)
    operator = token("operator")
    answer = operator.post("jobs", {"kind": "collect", "run": "minilm"})
    assert answer.status_code == 202 and answer.json()["kind"] == "collect"
    assert operator.post("jobs", {"kind": "collect", "run": "minilm"}).status_code == 200
    problem(operator.post("jobs", {"kind": "collect", "run": "minilm", "version": 1}), 400, "invalid_request")
    said = problem(operator.post("jobs", {"kind": "sweep"}), 400, "invalid_request")["errors"]
    assert said["kind"] == ['"sweep" is none of replay, verify, merge, anchor, collect.']


def test_breaches_are_listed(run: Run, token: Callable[..., Api]) -> None:
    versions = series(run, 4)
    Run.objects.filter(pk=run.pk).update(staleness_versions=1)
    make.mk_island(run, "late", at=versions[0])
    staleness.watch()
    (breach,) = token("viewer").get("runs/minilm/breaches").json()["results"]
    assert (breach["island"], breach["kind"], breach["limit"], breach["worst"]) == ("late", "versions", 1, 3)
    assert breach["ended_at"] is None


def test_resolve_names_who_can_serve_a_version(run: Run, other_run: Run, token: Callable[..., Api]) -> None:
    versions = series(run, 4)
    for name, number, busy in (("old", 0, 0), ("busy", 3, 9), ("idle", 3, 1), ("near", 2, 0), ("drained", 3, 0)):
        island = make.mk_island(run, name, at=versions[number])
        Island.objects.filter(pk=island.pk).update(active_requests=busy)
    fleet.drain(Island.objects.get(name="drained"), reason="Upkeep.", actor="test")
    Island.objects.filter(name="near").update(phase="fenced")
    trainer = token("publisher")

    def names(least: int) -> list[str]:
        answer: Any = trainer.get(f"fleet/resolve?run=minilm&min_version={least}").json()
        return [row["name"] for row in answer["islands"]]

    assert names(0) == ["idle", "busy", "old"]
    assert names(1) == names(3) == ["idle", "busy"]
    assert names(4) == []
    problem(trainer.get("fleet/resolve?run=minilm"), 400, "invalid_request")
    problem(trainer.get("fleet/resolve?run=minilm&min_version=-1"), 400, "invalid_request")
    problem(trainer.get("fleet/resolve?run=nothing&min_version=0"), 404, "not_found")


def test_an_island_that_fetches_an_anchor_keeps_it_and_the_way_on(run: Run) -> None:
    versions = anchored_series(run, 3)
    newcomer, credential = enrol(run, "porto")
    plan = Api(run.project.slug, credential).get("runs/minilm/plan").json()
    assert [step["kind"] for step in plan["steps"]] == ["anchor", "patch", "patch"]
    for number in range(3, 7):
        versions.append(ready(run, number, versions[-1], anchored=number == 6))
    Run.objects.filter(pk=run.pk).update(keep_versions=1)
    run.refresh_from_db()
    assert retention.preview(run).numbers == ()
    VersionLease.objects.filter(holder=f"island:{newcomer.name}").update(expires_at=Now())
    assert retention.preview(run).numbers == (0, 1, 2, 3, 4, 5)


def test_the_lease_of_a_fetch_ends_with_the_report_of_what_was_fetched(run: Run) -> None:
    versions = anchored_series(run, 7, 6)
    newcomer, _ = enrol(run, "porto")
    for name in ("porto", "oslo"):
        leases.take_for_route(run, [{"kind": "anchor", "version": number} for number in (0, 6)], name)
    leases.take(versions[0], "evaluator", timedelta(hours=1))

    def left(holder: str) -> list[int]:
        return sorted(lease.version.number for lease in leases.of_run(run).filter(holder=holder))

    def report(number: int, *, verified: bool) -> None:
        digest = versions[number].state_digest
        fleet.report_sync(
            newcomer, from_version=None, version=number, digest=digest, outcome="applied", verified=verified
        )

    report(2, verified=False)
    assert left("island:porto") == [0, 6]
    report(2, verified=True)
    assert left("island:porto") == [6], "it may be on its way there already"
    report(6, verified=True)
    assert (left("island:porto"), left("island:oslo"), left("evaluator")) == ([], [0, 6], [0])
