"""Plans over HTTP: what an island says of itself, what is shown, and what is built while it waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from controlplane.jobs.models import Job
from controlplane.registry import merging
from controlplane.registry.models import Patch, Run, Version
from tests.controlplane.conftest import Api, enrol
from tests.controlplane.making import series

pytestmark = pytest.mark.django_db

FULL, SIZE = 1_000_000_000, 20_000_000
SLOW, FAST = "link=1000000", "link=10000000000"


@pytest.fixture
def versions(run: Run) -> list[Version]:
    """Ten versions of a model of 1 GB, whose steps have 20 MB each; nothing is merged ahead of need."""
    Run.objects.filter(pk=run.pk).update(merge_up_to=0)
    run.refresh_from_db()
    found = series(run, 10)
    from django.db import connection

    with connection.cursor() as cursor:  # what is published can't be changed otherwise
        cursor.execute("SET LOCAL session_replication_role = replica")
        cursor.execute("UPDATE registry_patch SET bytes = %s, changed = 9000000, codecs = 'contextual'", [SIZE])
        cursor.execute("UPDATE registry_version SET full_bytes = %s", [FULL])
        cursor.execute("UPDATE registry_anchor SET bytes = %s", [FULL])
        cursor.execute("SET LOCAL session_replication_role = origin")
    return found


def ask(api: Api, held: Version, *more: str) -> Any:
    answer = api.get("&".join([f"runs/minilm/plan?from_digest={held.state_digest}", *more]))
    assert answer.status_code == 200, answer.content
    return answer.json()


def merges() -> list[Job]:
    return list(Job.objects.filter(kind="merge"))


def test_bytes_and_seconds_of_each_step_and_in_sum(versions: list[Version], token: Callable[..., Api]) -> None:
    found = ask(token("viewer"), versions[7], SLOW)
    assert [(step["via"], step["bytes"]) for step in found["steps"]] == [("step", SIZE)] * 2
    assert found["bytes"] == 2 * SIZE
    assert found["seconds"] == pytest.approx(sum(step["seconds"] for step in found["steps"]), abs=0.01)
    assert 40 < found["seconds"] < 50
    assert ask(token("viewer"), versions[7], FAST)["seconds"] < 3


def test_an_island_that_would_be_there_sooner_by_a_merge_is_told_to_wait(
    versions: list[Version], island_api: tuple[Any, Api]
) -> None:
    _, api = island_api
    found = ask(api, versions[1], SLOW)
    (job,) = merges()
    assert found["building"] | {"seconds": 0} == {
        "job": str(job.pk), "from": 1, "to": 9, "bytes": int(8 * SIZE * 8**-0.3), "seconds": 0,
    }  # fmt: skip
    assert 1 < found["wait_seconds"] < 5
    assert found["building"]["seconds"] + 0 < found["seconds"], "waiting is sooner than walking"
    assert len(found["steps"]) == 8, "and it may walk all the same"
    assert job.params == {"from": 1, "to": 9, "why": "asked"}


def test_where_the_link_is_fast_nobody_waits(versions: list[Version], island_api: tuple[Any, Api]) -> None:
    assert "building" not in ask(island_api[1], versions[6], FAST) and not merges()


def test_a16_a_fleet_at_one_lag_makes_one_job_and_many_lags_a_few(versions: list[Version], run: Run) -> None:
    """A16: 300 islands at one lag ask; they share a job. At many lags, only a few are built at a time."""
    apis = [Api(run.project.slug, enrol(run, f"island-{number}")[1]) for number in range(12)]
    for api in apis:
        assert ask(api, versions[1], SLOW)["building"]["job"] == str(merges()[0].pk)
    assert len(merges()) == 1
    for number, api in enumerate(apis[:7]):
        ask(api, versions[number], SLOW)
    assert len(merges()) == merging.AT_ONCE


def test_whoever_only_looks_begins_nothing(versions: list[Version], token: Callable[..., Api]) -> None:
    found = ask(token("viewer"), versions[1], SLOW)
    assert found["building"]["job"] is None and found["wait_seconds"] is None
    assert not merges()


def test_a_merge_that_came_to_nothing_is_not_begun_again(versions: list[Version], island_api: tuple[Any, Api]) -> None:
    api = island_api[1]
    ask(api, versions[1], SLOW)
    Job.objects.filter(kind="merge").update(state="succeeded", result={"kept": False})
    assert "building" not in ask(api, versions[1], SLOW)
    assert len(merges()) == 1


def test_a_merged_patch_is_taken_once_it_is_there(versions: list[Version], island_api: tuple[Any, Api]) -> None:
    Patch.objects.create(
        run=versions[1].run, from_version=versions[1], to_version=versions[9], kind="merged", bytes=90_000_000,
        codecs="contextual",
    )  # fmt: skip
    found = ask(island_api[1], versions[1], SLOW)
    assert [(step["via"], step["from"], step["to"]) for step in found["steps"]] == [("merged", 1, 9)]
    assert "building" not in found
    old = ask(island_api[1], versions[1], SLOW, "codecs=dense,positional,contextual")
    assert old["steps"] == found["steps"]


def test_an_island_that_does_not_know_the_codec_is_told_so(
    versions: list[Version], island_api: tuple[Any, Api]
) -> None:
    digest = versions[1].state_digest
    answer = island_api[1].get(f"runs/minilm/plan?from_digest={digest}&codecs=dense,positional")
    assert (answer.status_code, answer.json()["code"]) == (409, "no_route")
    assert "codec" in answer.json()["detail"] and not merges()


def test_what_an_island_says_of_itself_as_it_asks_is_kept(versions: list[Version], island_api: tuple[Any, Api]) -> None:
    island, api = island_api
    digest = versions[1].state_digest
    assert api.get(f"runs/minilm/plan?from_digest={digest}&cores=48&codecs=dense,contextual").status_code == 200
    island.refresh_from_db()
    assert (island.cores, island.codecs) == (48, ["dense", "contextual"])
    assert api.get(f"runs/minilm/plan?from_digest={digest}").status_code == 200
    island.refresh_from_db()
    assert (island.cores, island.codecs) == (48, ["dense", "contextual"])


@pytest.mark.parametrize("query", ["link=0", "link=fast", "cores=-1", "codecs=", "apply=0", "references=perhaps"])
def test_what_can_not_be_right_is_refused(versions: list[Version], token: Callable[..., Api], query: str) -> None:
    assert token("viewer").get(f"runs/minilm/plan?{query}").status_code == 400


def test_operators_ask_for_merges_and_anchors(versions: list[Version], token: Callable[..., Api]) -> None:
    api = token("operator")
    made = api.post("jobs", {"kind": "merge", "run": "minilm", "from": 2, "to": 7})
    assert made.status_code == 202 and made.json()["params"] == {"from": 2, "to": 7, "why": "asked"}
    assert api.post("jobs", {"kind": "merge", "run": "minilm", "from": 2, "to": 7}).status_code == 200
    assert api.post("jobs", {"kind": "merge", "run": "minilm", "from": 7, "to": 7}).status_code == 409
    assert api.post("jobs", {"kind": "merge", "run": "minilm", "from": 7, "to": 70}).status_code == 404
    assert api.post("jobs", {"kind": "merge", "run": "minilm", "version": 7}).status_code == 400
    assert api.post("jobs", {"kind": "anchor", "run": "minilm", "version": 5}).status_code == 202


def test_a_rollback_builds_the_way_back(versions: list[Version], run: Run, token: Callable[..., Api]) -> None:
    api = token("operator")
    body = {"version": 6, "reason": "The reward fell."}
    answer = api.client.put(
        f"{api.base}runs/minilm/channels/latest", body, content_type="application/json",
        headers=api.headers | {"If-Match": "*"},
    )  # fmt: skip
    assert answer.status_code == 200, answer.content
    (job,) = merges()
    assert job.params == {"from": 9, "to": 6, "why": "asked"}
