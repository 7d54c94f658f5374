"""The OpenAPI document: committed, complete, and served with a page that keeps to the policy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.conf import settings
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver

from controlplane.api import schema_views

COMMITTED = Path(settings.BASE_DIR) / "docs" / "api" / "openapi.yaml"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(schema_views.document())
    return found


def test_the_committed_document_has_not_drifted() -> None:
    assert COMMITTED.read_bytes() == schema_views.document(), "run `manage.py openapi` and commit what it writes"


def _addresses(patterns: Any, before: str = "") -> list[str]:
    found = []
    for item in patterns:
        here = before + str(item.pattern)
        if isinstance(item, URLResolver):
            found += _addresses(item.url_patterns, here)
        elif isinstance(item, URLPattern):
            found.append(here)
    return found


def test_every_address_of_the_api_is_described(document: dict[str, Any]) -> None:
    known = {re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", path) for path in _addresses(get_resolver().url_patterns)}
    ours = {f"/{path}" for path in known if path.startswith(("api/v1/", "health/"))}
    undescribed = ours - document["paths"].keys()
    assert not undescribed
    below_django = {path for path in document["paths"] if path.endswith("/blobs/uploads/{upload}")}
    assert document["paths"].keys() - ours == below_django


def test_every_call_has_typed_answers_and_a_refusal(document: dict[str, Any]) -> None:
    loose = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            responses = operation["responses"]
            if "default" not in responses:
                loose.append(f"{method} {path}: no refusal")
            for code, said in responses.items():
                for kind, content in said.get("content", {}).items():
                    if kind == "application/json" and path.startswith("/api/v1/"):
                        shape = content.get("schema", {})
                        if not ("$ref" in shape or shape.get("type") == "array"):
                            loose.append(f"{method} {path}: {code} has no shape")
    assert loose == []


def test_operations_have_names_of_their_own(document: dict[str, Any]) -> None:
    names = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(names) == len(set(names))


def test_the_page_keeps_to_the_policy_and_needs_no_other_host(client: Client, db: None) -> None:
    page = client.get("/api/docs/")
    text = page.content.decode()
    assert page.status_code == 200 and "unsafe-inline" not in page["Content-Security-Policy"]
    assert not re.search(r"<style|style=|<script>|\son\w+=|https?://", text)
    for address in re.findall(r'(?:src|href)="([^"]+)"', text):
        found = client.get(address)
        assert found.status_code == 200, address
    script = client.get("/api/docs/?script=")
    assert script["Content-Type"].startswith("application/javascript") and b"/api/schema" in script.content


def test_the_document_is_served(client: Client, db: None) -> None:
    assert client.get("/api/schema").content == COMMITTED.read_bytes()
