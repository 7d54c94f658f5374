"""What an engine's `/openapi.json` says of its requests: which of them declare a member.

A document that says less than expected, or something else, declares nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def routes_declaring(member: str, document: Any) -> frozenset[str]:
    """Paths whose POST takes a JSON body with ``member``, whichever of its alternatives is sent."""
    paths = _inside(document, "paths")
    known: dict[str, bool] = {}
    found = set()
    for path in paths:
        schema = _inside(paths, path, "post", "requestBody", "content", "application/json", "schema")
        try:
            if _declares(member, schema, document, known):
                found.add(path)
        except RecursionError:
            continue
    return frozenset(found)


def _declares(member: str, schema: Mapping[str, Any], document: Any, known: dict[str, bool]) -> bool:
    """``known``: what was found behind each reference: none is followed twice, and a circle declares nothing."""
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in known:
            known[reference] = False
            target = _inside(document, *reference.removeprefix("#/").split("/"))
            known[reference] = _declares(member, target, document, known)
        return known[reference]
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(alternatives, list):
        return all(_declares(member, _inside(one), document, known) for one in alternatives)
    return member in _inside(schema, "properties")


def _inside(document: Any, *names: str) -> Mapping[str, Any]:
    for name in names:
        document = document.get(name) if isinstance(document, Mapping) else None
    return document if isinstance(document, Mapping) else {}
