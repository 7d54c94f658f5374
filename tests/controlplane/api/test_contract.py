"""The API does what its OpenAPI document says: every call, as three roles, with values that nobody thought of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from controlplane.accounts import services as accounts
from controlplane.api import schema_views
from controlplane.jobs.models import Job
from controlplane.registry import services as registry
from tests.controlplane.conftest import enrol
from tests.controlplane.making import series

EXAMPLES = 6
SUCCEED = {"publisher": 20, "operator": 25, "island": 15}  # calls of which some example must succeed
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture
def world(server: str, transactional_db: None) -> dict[str, Any]:
    """A project with something of everything, and what stands for it in addresses."""
    project = registry.create_project("harbour", "Harbour", actor="test")
    run = registry.create_run(project, "minilm", actor="test")
    versions = series(run, 2)
    island, credential = enrol(run, "porto")
    blob = registry.add_blob(run, b"some bytes")
    upload = registry.begin_upload(run, "c" * 64, 10)
    assert upload is not None
    roles = {role: accounts.create_token(project, role, role, actor="test")[1] for role in ("publisher", "operator")}
    return {
        "server": server,
        "tokens": roles | {"island": credential},
        "run": run,
        "parts": {
            "project": project.slug,
            "run": run.name,
            "channel": "latest",
            "number": versions[-1].number,
            "sha256": blob.sha256,
            "upload": str(upload.pk),
            "island": str(island.pk),
            "job": str(Job.objects.all()[0].pk),
        },
    }


def _operations() -> Iterator[Any]:
    document = schemathesis.openapi.from_dict(yaml.safe_load(schema_views.document()))
    for found in document.get_all_operations():
        yield found.ok()


def _exercise(operation: Any, world: dict[str, Any], token: str, done: set[str]) -> None:
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(), real=_mostly())
    def call(case: Any, real: bool) -> None:
        if real:
            case.path_parameters = {**case.path_parameters, **_known(case.path_parameters, world["parts"])}
        if case.query and "wait" in case.query:
            case.query = {**case.query, "wait": "0"}
        response = case.call(base_url=world["server"], headers={"Authorization": f"Bearer {token}"})
        if response.status_code < 300:
            done.add(operation.label)
        full = response.status_code == 507  # announcing more than the disk has left is refused, and that is no fault
        case.validate_response(response, checks=CHECKS[1:] if full else CHECKS)

    call()


def _mostly() -> Any:
    from hypothesis import strategies

    return strategies.sampled_from([True, True, True, False])


def _known(parameters: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    return {name: parts[name] for name in parameters if name in parts}


@pytest.mark.parametrize("role", ["publisher", "operator", "island"])
def test_no_call_breaks_and_every_answer_has_its_shape(world: dict[str, Any], role: str) -> None:
    broken, done = [], set[str]()
    for operation in _operations():
        try:
            _exercise(operation, world, world["tokens"][role], done)
        except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001  what a check raises is a group of failures
            broken.append(f"{operation.label}: {type(error).__name__} {error}")
    assert not broken, "\n\n".join(broken)
    assert len(done) >= SUCCEED[role], "the examples hardly reach what they should try"
