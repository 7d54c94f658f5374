"""Every call that writes is strict: keys that nobody knows, values of another type and sizes without bounds are 400."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from django.db import transaction
from django.test import Client

from controlplane.api import schema_views
from controlplane.registry.models import Project, Run
from mailboat import __version__
from mailboat.compatibility import release
from tests.controlplane.test_permission_matrix import CALLERS, World, rows

WRITES = ("POST", "PUT", "PATCH")
BYTES = re.compile(r"/(head|tensors|blobs/{sha256})$")
CLOSED = {"401", "403", "404"}
FREE = {"envelope", "seconds", "anchor"}  # services and a method of the serialiser bound them
WRONG = {
    "string": [5, 1.5, True, ["x"], {"x": 1}],
    "integer": ["5", 1.5, True, [5], 10**30],
    "number": ["5", True, [5], 10**39],
    "boolean": ["yes", "true", 1, 0],
    "array": ["x", 5, {"x": 1}],
    "object": ["x", 5, ["x"]],
}


@pytest.fixture
def world(project: Project, foreign: Project, run: Run, other_run: Run) -> World:
    return World(project, foreign, run, other_run)


def calls() -> Iterator[tuple[str, str, str]]:
    """Every write of the API, with a caller that may make it."""
    for (method, address), row in rows().items():
        if method in WRITES and address.startswith("/api/v1/"):
            open_to = [who for who, status in zip(CALLERS, row.statuses, strict=True) if status not in CLOSED]
            yield method, address, next(who for who in ("admin", "publisher", "island") if who in open_to)


def bodies() -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """The same with the shape of the body, for those that take one."""
    document: dict[str, Any] = yaml.safe_load(schema_views.document())
    for method, address, caller in calls():
        operation = document["paths"][address][method.lower()]
        said = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
        if said:
            yield method, address, caller, document["components"]["schemas"][said["$ref"].rpartition("/")[2]]


def send(world: World, caller: str, method: str, address: str, body: Any, **headers: str) -> Any:
    text = body if isinstance(body, str) else json.dumps(body)
    client: Client = world.clients[caller]
    with transaction.atomic():
        answer = client.generic(
            method,
            world.url(address),
            text,
            content_type="application/json",
            headers={"If-Match": "*", **{name.replace("_", "-"): value for name, value in headers.items()}},
        )
        transaction.set_rollback(True)
    return answer


def test_keys_that_nobody_knows_are_refused_by_name(world: World) -> None:
    wrong = []
    for method, address, caller in calls():
        answer = send(world, caller, method, address, {"no_such_key": 1})
        said = answer.json() if answer.status_code == 400 else {}
        if said.get("code") != "invalid_request" or "no_such_key" not in said.get("errors", {}):
            wrong.append(f"{method} {address} as {caller}: {answer.status_code} {answer.content[:200]!r}")
    assert not wrong, "\n".join(wrong)


def test_parameters_that_nobody_knows_are_refused_by_name(world: World) -> None:
    """Of every call but those that hand out bytes: a cache on the way may add something of its own there."""
    wrong, tried = [], 0
    for (method, address), row in rows().items():
        open_to = [who for who, status in zip(CALLERS, row.statuses, strict=True) if status not in CLOSED | {"405"}]
        if not address.startswith("/api/v1/") or not open_to or BYTES.search(address):
            continue
        caller = next((who for who in ("admin", "publisher", "island") if who in open_to), open_to[0])
        answer = send(world, caller, method, f"{address}?no_such_parameter=1", "")
        said = answer.json() if answer.status_code == 400 else {}
        if "no_such_parameter" not in said.get("errors", {}):
            wrong.append(f"{method} {address} as {caller}: {answer.status_code} {answer.content[:200]!r}")
        tried += 1
    assert not wrong, "\n".join(wrong)
    assert tried > 60


def test_a_misspelt_filter_is_told_what_there_is(world: World) -> None:
    answer = world.clients["viewer"].get(world.url("/api/v1/projects/{project}/jobs?stat=queued"))
    assert answer.status_code == 400
    assert answer.json()["errors"]["stat"] == (
        "There is no such parameter here; there are cursor, kind, limit, run, state."
    )


def types(shape: dict[str, Any]) -> set[str]:
    """The JSON types that a property may have."""
    document = shape.get("allOf", shape.get("oneOf", []))
    found = {kind for item in document for kind in types(item)}
    kind = shape.get("type", "string" if "$ref" in shape else None)
    if kind is None and not document:
        return set(WRONG)
    return found | ({kind} if isinstance(kind, str) else set(kind or ()))


def test_values_of_another_type_are_refused_by_name(world: World) -> None:
    wrong, tried = [], 0
    for method, address, caller, shape in bodies():
        values = {name: [v for kind in types(said) for v in WRONG[kind]] for name, said in shape["properties"].items()}
        for turn in range(max(map(len, values.values()), default=0)):
            body = {name: found[turn] for name, found in values.items() if turn < len(found)}
            answer = send(world, caller, method, address, body)
            errors = answer.json().get("errors", {}) if answer.status_code == 400 else {}
            wrong += [f"{method} {address} takes {name} = {body[name]!r}" for name in body.keys() - errors.keys()]
            tried += len(body)
    assert not wrong, "\n".join(wrong)
    assert tried > 200


def unbounded(name: str, said: dict[str, Any]) -> bool:
    if name in FREE:
        return False
    if said.get("type") == "string":
        return not {"maxLength", "enum", "pattern", "format"} & said.keys()
    if said.get("type") == "array":
        return "maxItems" not in said or unbounded(name, said["items"])
    if said.get("type") == "integer":
        return "maximum" not in said
    return said.get("type") == "object"


def shapes() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object that a body may be or hold."""
    document: dict[str, Any] = yaml.safe_load(schema_views.document())
    waiting = [(f"{method} {address}", shape) for method, address, _, shape in bodies()]
    seen = set()
    while waiting:
        where, shape = waiting.pop()
        yield where, shape
        for name in re.findall(r"'#/components/schemas/(\w+)'", str(shape)):
            inner = document["components"]["schemas"][name]
            if name not in seen and inner.get("type") == "object":
                waiting.append((f"{where}: {name}", inner))
            seen.add(name)


def test_every_body_is_closed_and_bounded() -> None:
    loose = []
    for where, shape in shapes():
        if shape.get("additionalProperties") is not False:
            loose.append(f"{where} is open")
        loose += [f"{where}: {name}" for name, said in shape["properties"].items() if unbounded(name, said)]
    assert loose == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"name": %s}' % ("9" * 5000), "5000 digits"),
        ('{"name": 1e999}', "too large"),
        ('{"name": NaN}', "NaN is not JSON"),
        ('{"name": "a", "name": "b"}', "stands twice"),
        ('{"name": ', "line 1, column 10"),
        ('{"name": %s' % ("[" * 100_000), "nested too deeply"),
        ('{"name": "\\ud800"}', "Unicode"),
        ('{"name": "\\u0000"}', "zero character"),
        ("[]", "dictionary"),
    ],
)
def test_what_is_no_sensible_json_is_said_in_our_words(world: World, text: str, said: str) -> None:
    answer = send(world, "admin", "POST", "/api/v1/projects/{project}/runs", text)
    assert answer.status_code == 400
    detail = answer.json()["detail"]
    assert said in detail and "sys." not in detail


def test_a_job_and_a_commit_take_what_belongs_to_them(world: World) -> None:
    jobs, versions = "/api/v1/projects/{project}/jobs", "/api/v1/projects/{project}/runs/{run}/versions"
    verify = {"kind": "verify", "island": str(world.island.pk)}
    assert send(world, "admin", "POST", jobs, verify).status_code in {200, 202}
    answer = send(world, "admin", "POST", jobs, verify | {"version": 1})
    assert answer.status_code == 400 and "version" in answer.json()["errors"]
    answer = send(world, "publisher", "POST", versions, {"envelope": {}, "number": 3})
    assert answer.status_code == 400 and "number" in answer.json()["errors"]


def test_a_newer_release_may_say_more(world: World) -> None:
    """An upgrade of islands survives that of their control plane being taken back: `mailboat.compatibility`."""
    beat = {"phase": "idle", "mood": "calm"}
    address = "/api/v1/projects/{project}/islands/{island}/heartbeat"
    major, minor = release(__version__) or (0, 0)
    for agent, status in ((f"{major}.{minor + 1}.0", 200), (__version__, 400), ("", 400)):
        answer = send(world, "island", "POST", address, beat, User_Agent=f"mailboat/{agent}")
        assert answer.status_code == status, agent
        answer = send(
            world, "island", "POST", f"{address}?mood=calm", {"phase": "idle"}, User_Agent=f"mailboat/{agent}"
        )
        assert answer.status_code == status, agent
