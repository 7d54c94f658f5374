"""The ordinary calls: shapes, codes, and who may see what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client

from controlplane.accounts import services as accounts
from controlplane.accounts.models import Token
from controlplane.fleet.models import Island
from controlplane.registry import services as registry
from controlplane.registry.models import Project, Run, RunKey
from mailboat.commands.island import run as run_island
from mailboat.island.sidecar.assembly import EngineOptions
from tests.controlplane.conftest import Api, enrol
from tests.controlplane.making import build, commit, ready, series, upload

pytestmark = pytest.mark.django_db

READS = ["runs", "runs/minilm", "runs/minilm/versions", "runs/minilm/versions/0", "runs/minilm/versions/0/manifest",
         "runs/minilm/plan", "runs/minilm/channels/latest/head"]  # fmt: skip
PROJECT_READS = ["fleet", "islands", "jobs"]


@pytest.fixture
def published(run: Run) -> Run:
    series(run, 2)
    return run


def problem(response: Any, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.content
    assert response["Content-Type"] == "application/problem+json"
    body = response.json()
    assert {"type", "title", "status", "code", "detail"} <= body.keys()
    assert (body["status"], body["code"]) == (status, code)
    assert body["detail"].rstrip().endswith((".", "`")), "one sentence"
    return dict(body)


# Who sees what


@pytest.mark.parametrize("path", READS + PROJECT_READS)
def test_without_a_credential_everything_is_401(published: Run, token: Callable[..., Api], path: str) -> None:
    response = token(None).get(path)
    problem(response, 401, "unauthorised")
    assert response["WWW-Authenticate"].startswith("Bearer")


@pytest.mark.parametrize("path", READS + PROJECT_READS)
def test_a_foreign_project_is_404(published: Run, foreign: Project, token: Callable[..., Api], path: str) -> None:
    problem(token("operator", foreign).get(path), 404, "not_found")


@pytest.mark.parametrize("path", READS + PROJECT_READS)
def test_owner_and_mate_see_and_the_stranger_does_not(
    published: Run, person: Callable[[str], Client], path: str
) -> None:
    address = f"/api/v1/projects/harbour/{path}"
    assert person("owner").get(address).status_code == 200
    assert person("mate").get(address).status_code == 200
    problem(person("stranger").get(address), 404, "not_found")


@pytest.mark.parametrize("path", READS)
def test_an_island_reads_its_own_run(published: Run, island_api: tuple[Island, Api], path: str) -> None:
    assert island_api[1].get(path).status_code == 200


@pytest.mark.parametrize("path", READS[1:])
def test_a52_an_island_sees_no_other_run(published: Run, other_run: Run, path: str) -> None:
    _, credential = enrol(other_run, "spy")
    problem(Api("harbour", credential).get(path), 404, "not_found")


def test_a52_an_island_sees_no_other_island_and_no_blob_of_another_run(
    published: Run, other_run: Run, island: Island
) -> None:
    row, credential = enrol(other_run, "spy")
    spy = Api("harbour", credential)
    assert [run["name"] for run in spy.get("runs").json()["results"]] == ["qwen"]
    for path in (f"islands/{island.pk}", f"islands/{island.pk}/syncs"):
        problem(spy.get(path), 404, "not_found")
    problem(spy.post(f"islands/{island.pk}/heartbeat", {"phase": "idle"}), 404, "not_found")
    blob = registry.add_blob(published, b"secret")
    problem(spy.get(f"runs/minilm/blobs/{blob.sha256}"), 404, "not_found")
    problem(spy.get(f"runs/qwen/blobs/{blob.sha256}"), 404, "not_found")
    for path in PROJECT_READS:
        problem(spy.get(path), 403, "forbidden")
    assert spy.get(f"islands/{row.pk}").status_code == 200


def test_a51_a_revoked_or_expired_credential_is_401_at_once(project: Project, run: Run) -> None:
    from datetime import timedelta

    row, plaintext = accounts.create_token(project, Token.Role.VIEWER, "x", actor="test")
    api = Api("harbour", plaintext)
    assert api.get("runs").status_code == 200
    accounts.revoke_token(row, actor="test")
    problem(api.get("runs"), 401, "unauthorised")
    _, late = accounts.create_token(project, Token.Role.VIEWER, "y", actor="test", lifetime=timedelta(seconds=-1))
    problem(Api("harbour", late).get("runs"), 401, "unauthorised")
    problem(Api("harbour", plaintext[:-2] + "zz").get("runs"), 401, "unauthorised")


WRITES: list[tuple[str, str, dict[str, Any]]] = [
    ("publisher", "runs/minilm/blobs", {"sha256": "a" * 64, "size": 1}),
    ("publisher", "runs/minilm/versions", {"checkpoint": "/x", "number": 0, "parent": None, "epoch": 0}),
    ("operator", "enrolment-tokens", {"run": "minilm", "name": "azores"}),
    ("operator", "jobs", {"kind": "replay", "run": "minilm", "version": 0}),
]


@pytest.mark.parametrize(("needed", "path", "body"), WRITES)
@pytest.mark.parametrize("role", ["publisher", "operator", "viewer", "island"])
def test_wrong_roles_are_403(
    published: Run, token: Callable[..., Api], island_api: Any, needed: str, path: str, body: Any, role: str
) -> None:
    api = island_api[1] if role == "island" else token(role)
    response = api.post(path, body)
    if role == needed:
        assert response.status_code in {200, 201, 202, 422}
    else:
        problem(response, 403, "forbidden")


def test_people_need_a_csrf_token_to_change_something(published: Run, person: Callable[[str], Client]) -> None:
    client = person("owner")
    client.handler.enforce_csrf_checks = True
    body = {"kind": "replay", "run": "minilm", "version": 0}
    problem(client.post("/api/v1/projects/harbour/jobs", body, content_type="application/json"), 403, "forbidden")


def test_owner_starts_jobs_and_mate_may_not(published: Run, person: Callable[[str], Client]) -> None:
    body = {"kind": "replay", "run": "minilm", "version": 1}
    address = "/api/v1/projects/harbour/jobs"
    assert person("owner").post(address, body, content_type="application/json").status_code == 202
    problem(person("mate").post(address, body, content_type="application/json"), 403, "forbidden")


# Shapes


def test_runs(token: Callable[..., Api], project: Project) -> None:
    api = token("publisher")
    made = api.post("runs", {"name": "llama"})
    assert made.status_code == 201
    assert made.json()["epoch"] == {"number": 0, "from_version": None} and made.json()["latest_ready"] is None
    problem(api.post("runs", {"name": "llama"}), 409, "run_exists")
    assert "name" in problem(api.post("runs", {"name": "a b"}), 400, "invalid_request")["detail"]
    problem(api.get("runs/unknown"), 404, "not_found")


def test_publishing_over_http(run: Run, token: Callable[..., Api]) -> None:
    api = token("publisher")
    built = build(run, 0)
    body = {"envelope": built.envelope, "anchor": built.anchor}
    missing = problem(api.post("runs/minilm/versions", body), 422, "missing_parts")
    assert {item["name"] for item in missing["missing"]} == {"inventory", "digests", "model.safetensors"}
    upload(run, built)
    first = api.post("runs/minilm/versions", body)
    assert first.status_code == 202 and first.json()["job"]
    again = api.post("runs/minilm/versions", body)
    assert again.status_code == 200 and again.json() == first.json()
    assert api.get("runs/minilm/versions/0/manifest").json() == built.envelope
    assert api.get("runs/minilm").json()["latest_ready"] is None


def test_versions_are_paginated(run: Run, token: Callable[..., Api]) -> None:
    series(run, 5)
    api = token("viewer")
    first = api.get("runs/minilm/versions?limit=2").json()
    assert [row["number"] for row in first["results"]] == [4, 3]
    assert api.get(f"runs/minilm/versions?limit=3&cursor={first['next']}").json()["next"] is None
    rest = api.get("runs/minilm/versions?limit=9&before=3").json()
    assert [row["number"] for row in rest["results"]] == [2, 1, 0] and rest["next"] is None
    assert api.get("runs/minilm/versions?state=failed").json()["results"] == []
    problem(api.get("runs/minilm/versions?state=nice"), 400, "invalid_request")
    problem(api.get("runs/minilm/versions?limit=99999999999999999999"), 400, "invalid_request")
    problem(api.get("runs/minilm/versions/99999999999999999999"), 404, "not_found")


def test_version_list_has_constant_queries(
    run: Run, token: Callable[..., Api], django_assert_max_num_queries: Any
) -> None:
    series(run, 4)
    api = token("viewer")
    with django_assert_max_num_queries(8):
        api.get("runs/minilm/versions")


def test_plan(run: Run, other_run: Run, token: Callable[..., Api]) -> None:
    versions = series(run, 3)
    api = token("viewer")
    whole = api.get("runs/minilm/plan?from_digest=&to=2").json()
    assert [step["kind"] for step in whole["steps"]] == ["anchor", "patch", "patch"]
    assert whole["from"] is None and whole["steps"][0]["manifest"] == versions[0].manifest_sha256
    part = api.get(f"runs/minilm/plan?from_digest={versions[1].state_digest}").json()
    assert (part["from"], part["to"]) == (1, 2) and len(part["steps"]) == 1
    foreign = ready(other_run, 0)
    problem(api.get(f"runs/minilm/plan?from_digest={foreign.state_digest}&to=2"), 409, "unknown_base")
    problem(api.get("runs/minilm/plan?to=9"), 404, "not_found")
    commit(run, 3, versions[2])
    problem(api.get("runs/minilm/plan?to=3"), 409, "no_route")
    problem(api.get("runs/minilm/plan?from_digest=xyz"), 400, "invalid_request")


def test_the_command_of_a_new_island_pins_the_keys_that_count(run: Run, token: Callable[..., Api]) -> None:
    body = {"run": "minilm", "name": "azores"}
    assert "--publisher-key" not in token("operator").post("enrolment-tokens", body).json()["command"]
    for name, key, revoked_at in (("trainer", "ab" * 32, None), ("old", "cd" * 32, run.created_at)):
        RunKey.objects.create(run=run, public_key=key, name=name, created_by="ada", revoked_at=revoked_at)
    command = token("operator").post("enrolment-tokens", {**body, "name": "madeira"}).json()["command"]
    assert command.endswith(f"--store ./madeira --publisher-key {'ab' * 32}")


@pytest.mark.parametrize("engine", ["checkpoint", "local", "vllm", "sglang"])
def test_the_command_of_a_new_island_starts_the_engine_that_was_asked_for(
    run: Run, token: Callable[..., Api], engine: str
) -> None:
    body = {"run": "minilm", "name": "azores", "engine": engine}
    made = token("operator").post("enrolment-tokens", body).json()
    words = made["command"].split()
    assert words[:3] == ["mailboat", "island", "run"]
    given = run_island.make_context("run", words[3:]).params
    assert (given["engine"], given["token"]) == (engine, made["token"])
    EngineOptions(given["engine"], given["engine_urls"], given["listen"]).check()


def test_the_command_of_an_engine_that_is_not_known_holds_nothing_of_it(run: Run, token: Callable[..., Api]) -> None:
    body = {"run": "minilm", "name": "azores", "engine": "x; reboot"}
    assert "reboot" not in token("operator").post("enrolment-tokens", body).json()["command"]


def test_island_life_over_http(run: Run, token: Callable[..., Api]) -> None:
    versions = series(run, 1)
    made = token("operator").post(
        "enrolment-tokens", {"run": "minilm", "name": "azores", "provider": "p", "region": "r"}
    )
    assert made.status_code == 201
    assert made.json()["token"] in made.json()["command"]
    about = {
        "token": made.json()["token"],
        "engine": "checkpoint",
        "agent_version": "0.1",
        "cores": 2,
        "codecs": [],
        "hostname": "h",
    }
    enrolled = token(None).post("islands/enrol", about)
    assert enrolled.status_code == 201
    body = enrolled.json()
    assert (body["run"], body["run_id"], body["channel"]) == ("minilm", str(run.pk), "latest")
    problem(token(None).post("islands/enrol", about), 403, "enrolment_used")
    problem(token(None).post("islands/enrol", about | {"token": "mbe_nothing"}), 401, "enrolment_invalid")
    api, key = Api("harbour", body["credential"]), body["island"]["id"]
    beat = api.post(
        f"islands/{key}/heartbeat",
        {"version": None, "digest": None, "epoch": None, "phase": "fetching", "reason": "", "time": 1.5},
    )
    assert beat.json()["commands"] == [] and beat.json()["enabled"] is True
    members = [{"name": "b", "version": None, "phase": "silent", "reason": "It is away."}]
    assert api.post(f"islands/{key}/heartbeat", {"phase": "idle", "members": members}).status_code == 200
    assert token("viewer").get("islands").json()["results"][0]["members"] == members
    problem(api.post(f"islands/{key}/heartbeat", {"phase": "idle", "members": [{"name": 3}]}), 400, "invalid_request")
    report = {
        "from_version": None,
        "version": 0,
        "digest": versions[0].state_digest,
        "outcome": "applied",
        "verified": True,
        "error": None,
        "bytes": 10,
        "seconds": {"total": 1.5},
        "route": ["anchor 0"],
    }
    judged = api.post(f"islands/{key}/syncs", report)
    assert judged.status_code == 201 and judged.json()["accepted"] is True
    fleet = token("viewer").get("fleet").json()
    assert fleet["islands"][0]["version"] == 0 and fleet["islands"][0]["sync"]["state"] == "current"
    assert fleet["head"]["minilm"]["version"] == 0
    assert fleet["counts"]["sync"]["current"] == 1


def test_jobs_over_http(run: Run, island: Island, token: Callable[..., Api]) -> None:
    series(run, 1)
    api = token("operator")
    made = api.post("jobs", {"kind": "replay", "run": "minilm", "version": 0})
    assert made.status_code == 202
    joined = api.post("jobs", {"kind": "replay", "run": "minilm", "version": 0})
    assert (joined.status_code, joined.json()["id"]) == (200, made.json()["id"])
    key = made.json()["id"]
    assert api.get(f"jobs/{key}").json()["events"] == []
    assert [row["id"] for row in api.get("jobs?kind=replay&state=unfinished").json()["results"]] == [key]
    assert api.post(f"jobs/{key}/cancel").status_code == 202
    problem(api.post(f"jobs/{key}/cancel"), 409, "job_finished")
    problem(api.post("jobs", {"kind": "verify", "island": str(island.pk)}), 409, "nothing_held")
    problem(api.post("jobs", {"kind": "verify"}), 400, "invalid_request")
    problem(api.post("jobs", {"kind": "replay", "run": "minilm", "version": 5}), 404, "not_found")


def test_epochs(run: Run, token: Callable[..., Api]) -> None:
    api = token("publisher")
    problem(api.post("runs/minilm/epochs", {"from_version": 0, "reason": "x"}), 409, "parent_not_ready")
    series(run, 1)
    assert api.post("runs/minilm/epochs", {"from_version": 0, "reason": "Resumed."}).json()["number"] == 1
    assert api.get("runs/minilm").json()["epoch"] == {"number": 1, "from_version": 0}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff",
        b'{"name": NaN}',
        b"[" * 100_000,
        b'{"name": "\\u0000"}',
        b'{"name": "\\ud800"}',
        b"1" * 5000,
        b"[]",
        b'"x"',
        b"null",
    ],
)
def test_bodies_that_are_no_json_are_400(run: Run, token: Callable[..., Api], raw: bytes) -> None:
    api = token("publisher")
    response = api.client.post(api.base + "runs", raw, content_type="application/json", headers=api.headers)
    problem(response, 400, "invalid_request")


def test_a_long_body_is_413(run: Run, token: Callable[..., Api]) -> None:
    api = token("publisher")
    response = api.client.post(
        api.base + "runs", b" " * (9 << 20), content_type="application/json", headers=api.headers
    )
    problem(response, 413, "too_large")


@pytest.mark.parametrize("number", ["0", 1.0, True, -1, 1 << 63, None, [], {}])
def test_numbers_are_json_integers(run: Run, token: Callable[..., Api], number: Any) -> None:
    problem(token("publisher").post("runs/minilm/blobs", {"sha256": "a" * 64, "size": number}), 400, "invalid_request")


def test_unknown_addresses_and_methods_are_problems(run: Run, token: Callable[..., Api]) -> None:
    api = token("viewer")
    problem(api.get("nothing"), 404, "not_found")
    problem(api.client.delete(api.base + "runs", headers=api.headers), 405, "method_not_allowed")


def test_checkpoints_only_under_allowed_roots(
    run: Run, token: Callable[..., Api], settings: Any, tmp_path: Any
) -> None:
    api, root = token("publisher"), tmp_path / "root"
    (root / "step-1").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (root / "link").symlink_to(tmp_path / "secret")

    def send(path: str) -> Any:
        return api.post(
            "runs/minilm/versions", {"checkpoint": path, "number": 0, "parent": None, "epoch": 0, "step": 1}
        )

    problem(send(str(root / "step-1")), 422, "checkpoint_not_allowed")
    settings.MAILBOAT_CHECKPOINT_ROOTS = (root,)
    for bad in (
        str(tmp_path / "secret"),
        str(root / "link"),
        str(root / ".." / "secret"),
        str(root / "none"),
        "step-1",
        "/",
    ):
        problem(send(bad), 422, "checkpoint_not_allowed")
    made = send(str(root / "step-1"))
    assert made.status_code == 202 and made.json()["state_digest"] is None
    assert send(str(root / "step-1")).status_code == 200
    assert api.get(f"jobs/{made.json()['job']}").json()["kind"] == "build"


def test_every_answer_has_a_request_id(client: Client, db: None) -> None:
    assert client.get("/health/live", headers={"X-Request-ID": "abcdef-123"})["X-Request-ID"] == "abcdef-123"
    assert len(client.get("/health/live", headers={"X-Request-ID": "<bad>"})["X-Request-ID"]) == 32


def test_health(client: Client, db: None) -> None:
    assert client.get("/health/live").status_code == 200
    assert client.get("/health/ready").json() == {"status": "ready", "problems": {}}


def test_schema_is_valid(client: Client, db: None) -> None:
    from drf_spectacular.generators import SchemaGenerator
    from drf_spectacular.validation import validate_schema

    validate_schema(SchemaGenerator().get_schema(request=None, public=True))
    assert client.get("/api/schema").status_code == 200


def test_policy_allows_no_inline_scripts(client: Client, db: None) -> None:
    policy = client.get("/health/live")["Content-Security-Policy"]
    assert "script-src 'self'" in policy and "unsafe-inline" not in policy


def test_a_fault_of_ours_is_a_problem_document(project: Project, token: Callable[..., Api], monkeypatch: Any) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("secret detail")

    api = token("viewer")
    monkeypatch.setattr("controlplane.registry.selectors.runs", broken)
    api.client.raise_request_exception = False
    assert "secret" not in problem(api.get("runs"), 500, "internal_error")["detail"]


def test_a_database_that_is_away_is_503(project: Project, token: Callable[..., Api], monkeypatch: Any) -> None:
    from django.db import OperationalError

    def away(*_: Any) -> Any:
        raise OperationalError("connection refused")

    api = token("viewer")
    monkeypatch.setattr("controlplane.registry.selectors.runs", away)
    problem(api.get("runs"), 503, "unavailable")
