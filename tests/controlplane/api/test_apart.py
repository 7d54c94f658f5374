"""Runs stay apart, and races have one winner, as seen over the API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import yaml

from controlplane.api import schema_views
from controlplane.fleet.models import Island
from controlplane.jobs.models import Job
from controlplane.registry import blobs, keys, leases
from controlplane.registry import services as registry
from controlplane.registry.models import Blob, Channel, Patch, Run, Version
from mailboat.manifest import HEAD_TYPE, Envelope, Head
from tests.controlplane.api.test_calls import problem
from tests.controlplane.conftest import Api, enrol
from tests.controlplane.making import build, ready, series, upload

pytestmark = pytest.mark.django_db


def commit_over_http(api: Api, run: Run, built: Any) -> Any:
    return api.post(f"runs/{run.name}/versions", {"envelope": built.envelope, "anchor": built.anchor})


def test_a18_equal_bytes_of_two_runs_are_two_blobs(run: Run, other_run: Run, token: Callable[..., Api]) -> None:
    api, data = token("publisher"), b"the same bytes"
    mine = registry.add_blob(run, data)
    assert api.get(f"runs/{other_run.name}/blobs/{mine.sha256}").status_code == 404
    announced = api.post(f"runs/{other_run.name}/blobs", {"sha256": mine.sha256, "size": mine.size})
    assert announced.status_code == 201 and announced.json()["exists"] is False
    registry.add_blob(other_run, data)
    assert Blob.objects.filter(sha256=mine.sha256).count() == 2
    keys = {blobs.key(row.pk, mine.sha256) for row in (run, other_run)}
    assert len(keys) == 2 and all(str(row.pk) in "".join(keys) for row in (run, other_run))


def test_a18_manifest_and_head_name_their_run(run: Run, other_run: Run, token: Callable[..., Api]) -> None:
    built = build(run, 0)
    upload(other_run, built)
    refused = problem(commit_over_http(token("publisher"), other_run, built), 422, "manifest_invalid")
    assert str(run.pk) in refused["detail"]
    assert not Version.objects.exists()
    heads = []
    for row in (run, other_run):
        ready(row, 0)
        envelope = token("viewer").get(f"runs/{row.name}/channels/latest/head").json()
        heads.append(Head.from_bytes(Envelope.from_dict(envelope).open(HEAD_TYPE)))
    assert [head.run for head in heads] == [str(run.pk), str(other_run.pk)]


def test_a18_a_version_is_made_of_its_own_runs_blobs(run: Run, other_run: Run, token: Callable[..., Api]) -> None:
    built = build(run, 0)
    upload(other_run, built)
    missing = problem(commit_over_http(token("publisher"), run, built), 422, "missing_parts")
    assert len(missing["missing"]) == 3


def test_a19_of_two_publishers_one_wins_and_the_other_changes_nothing(run: Run, token: Callable[..., Api]) -> None:
    zero = ready(run, 0)
    api = token("publisher")
    first, second = build(run, 1, zero), build(run, 1, zero, salt="other")
    upload(run, first)
    upload(run, second)
    assert commit_over_http(api, run, first).status_code == 202
    before = (Version.objects.count(), Patch.objects.count(), Job.objects.count(), Channel.objects.get(run=run).serial)
    lost = problem(commit_over_http(api, run, second), 409, "version_conflict")
    assert lost["next"] == 2
    after = (Version.objects.count(), Patch.objects.count(), Job.objects.count(), Channel.objects.get(run=run).serial)
    assert after == before
    assert commit_over_http(api, run, first).status_code == 200, "the winner may repeat itself"


def _addresses() -> Iterator[tuple[str, str]]:
    for path, methods in yaml.safe_load(schema_views.document())["paths"].items():
        if path.startswith("/api/v1/projects/") and not path.endswith("/blobs/uploads/{upload}"):
            for method in methods:
                yield method, path.removeprefix("/api/v1/projects/{project}/")


def _ask(api: Api, method: str, path: str) -> Any:
    call = getattr(api.client, method)
    return call(api.base + path, headers=api.headers | {"If-Match": "*"}, content_type="application/json")


def test_a52_an_island_sees_nothing_of_another_run_whatever_it_asks(
    run: Run, other_run: Run, island: Island, token: Callable[..., Api]
) -> None:
    """Generated from the document of the API: a new call is tried without a word here."""
    versions = series(run, 2)
    blob = registry.add_blob(run, b"secret")
    begun = registry.begin_upload(run, "c" * 64, 5)
    assert begun is not None
    spy, own = (Api("harbour", enrol(row, name)[1]) for row, name in ((other_run, "spy"), (run, "own")))
    known = {
        "run": run.name, "number": versions[1].number, "channel": "latest", "sha256": blob.sha256,
        "upload": begun.pk, "island": island.pk, "challenge": begun.pk,
        "key": keys.register(run, "ab" * 32, actor="test")[0].pk,
        "lease": leases.take(versions[0], "somebody", timedelta(hours=1)).pk,
    }  # fmt: skip
    tried = 0
    for method, path in _addresses():
        if "{run}" not in path and "{island}" not in path:
            continue
        answer = _ask(spy, method, path.format_map(known))
        # 403 where no island may call at all, whichever run or island it names; else it does not exist for this one.
        if answer.status_code == 403:
            assert _ask(own, method, path.format_map(known)).status_code == 403, f"{method} {path}: its own may"
        else:
            assert answer.status_code == 404, f"{method} {path}: {answer.status_code}"
        assert b"secret" not in answer.content and versions[1].state_digest.encode() not in answer.content
        tried += 1
    assert tried > 25
    for path in ("fleet", "islands", "jobs", "audit", "tokens", "members"):
        problem(spy.get(path), 403, "forbidden")
