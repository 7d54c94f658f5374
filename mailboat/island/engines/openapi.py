"""What an engine's `/openapi.json` says of its requests: which of them declare a member.

A document that says less than expected, or something else, declares nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DEEPEST = 8  # references to references; none needs more than two


def routes_declaring(member: str, document: Any) -> frozenset[str]:
    """Paths whose POST takes a JSON body with ``member``, whichever of its alternatives is sent."""
    paths = _inside(document, "paths")
    found = set()
    for path in paths:
        schema = _inside(paths, path, "post", "requestBody", "content", "application/json", "schema")
        if _declares(member, schema, document, _DEEPEST):
            found.add(path)
    return frozenset(found)


def _declares(member: str, schema: Mapping[str, Any], document: Any, depth: int) -> bool:
    if depth == 0:
        return False
    if isinstance(reference := schema.get("$ref"), str):
        target = _inside(document, *reference.removeprefix("#/").split("/"))
        return _declares(member, target, document, depth - 1)
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(alternatives, list):
        return all(_declares(member, _inside(one), document, depth - 1) for one in alternatives)
    return member in _inside(schema, "properties")


def _inside(document: Any, *names: str) -> Mapping[str, Any]:
    for name in names:
        document = document.get(name) if isinstance(document, Mapping) else None
    return document if isinstance(document, Mapping) else {}
