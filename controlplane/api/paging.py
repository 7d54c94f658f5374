"""Pages of a list: `limit` rows and a `cursor` that continues after the last one.

A cursor holds the place in the order, not a count of rows: rows that are added meanwhile neither repeat nor hide
others, and a late page costs no more than the first. Every list answers `{"results": [...], "next": cursor or null}`.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import reduce
from typing import Any, Generic, TypeVar

from django.core.exceptions import ValidationError as ModelValidationError
from django.db.models import Model, Q, QuerySet
from drf_spectacular.utils import OpenApiParameter
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

M = TypeVar("M", bound=Model)

PAGE = 100
MAX_PAGE = 1000
MAX_CURSOR = 1024
BIG = (1 << 63) - 1

PARAMETERS = [
    OpenApiParameter("limit", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": PAGE}),
    OpenApiParameter("cursor", {"type": "string", "maxLength": MAX_CURSOR}, description="`next` of the page before."),
]


@dataclass(frozen=True, slots=True)
class Page(Generic[M]):
    """Some rows of a list, and the cursor of those that follow; None on the last page."""

    rows: list[M]
    following: str | None

    def response(self, shown: Sequence[Any]) -> Response:
        """The answer with the rows as they are shown."""
        return Response({"results": list(shown), "next": self.following})


def page(request: Request, rows: QuerySet[M], *order: str) -> Page[M]:
    """The page that the request asks for. `order` names fields of the rows (with `-` for descending) that are never
    null and together unique. Raises ValidationError.
    """
    limit = number(request, "limit", PAGE, low=1, high=MAX_PAGE) or PAGE
    rows = rows.order_by(*order)
    if cursor := request.query_params.get("cursor", ""):
        rows = rows.filter(_after(order, _place(rows.model, order, cursor)))
    found = list(rows[: limit + 1])
    if len(found) <= limit:
        return Page(found, None)
    return Page(found[:limit], _cursor([getattr(found[limit - 1], field.lstrip("-")) for field in order]))


def number(request: Request, name: str, default: int | None, *, low: int = 0, high: int = BIG) -> int | None:
    """A whole number of the query string. Raises ValidationError."""
    raw = request.query_params.get(name, "")
    if not raw:
        return default
    if not raw.isascii() or not raw.isdecimal() or len(raw) > 19 or not low <= int(raw) <= high:
        raise ValidationError({name: f"It must be a whole number from {low} to {high}."})
    return int(raw)


def _cursor(place: Sequence[Any]) -> str:
    values = [value if isinstance(value, int) else str(value) for value in place]
    return base64.urlsafe_b64encode(json.dumps(values, separators=(",", ":")).encode()).decode().rstrip("=")


def _place(model: type[Model], order: Sequence[str], cursor: str) -> list[Any]:
    """The values of the row after which the page begins."""
    try:
        if len(cursor) > MAX_CURSOR:
            raise ValueError(cursor)
        values = json.loads(base64.urlsafe_b64decode(cursor.encode() + b"=" * (-len(cursor) % 4)))
        if not isinstance(values, list) or len(values) != len(order):
            raise ValueError(cursor)
        return [_value(model, name.lstrip("-"), value) for name, value in zip(order, values, strict=True)]
    except (ValueError, TypeError, RecursionError, binascii.Error, ModelValidationError, OverflowError):
        raise ValidationError({"cursor": "It must be `next` of an earlier page of this list."}) from None


def _value(model: type[Model], name: str, value: Any) -> Any:
    if isinstance(value, str) and "\0" in value:
        raise ValueError(value)
    convert: Callable[[Any], Any] = getattr(model._meta.get_field(name), "to_python")  # noqa: B009  not in the stubs
    found = convert(value)
    if found is None or (isinstance(found, datetime) and found.tzinfo is None):
        raise ValueError(value)
    if isinstance(found, int) and not -BIG <= found <= BIG:
        raise ValueError(value)
    return found.astimezone(UTC) if isinstance(found, datetime) else found  # PostgreSQL takes fewer offsets than Python


def _after(order: Sequence[str], place: Sequence[Any]) -> Q:
    """Rows behind a place: greater in the first field that differs (smaller where it descends)."""
    choices: list[Q] = []
    for position, name in enumerate(order):
        same = {field.lstrip("-"): value for field, value in zip(order[:position], place[:position], strict=True)}
        step = "lt" if name.startswith("-") else "gt"
        choices.append(Q(**same, **{f"{name.lstrip('-')}__{step}": place[position]}))
    return reduce(Q.__or__, choices)
