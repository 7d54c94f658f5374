"""Filters of the lists, by name in the query string. A value that can't be right is refused, never ignored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import django_filters as filters
from django.db.models import QuerySet
from drf_spectacular.utils import OpenApiParameter
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request

from controlplane.api import paging
from controlplane.jobs.models import Job
from controlplane.registry.models import Version

UNFINISHED = "unfinished"
LONGEST = 120


class _Whole(filters.NumberFilter):
    """A whole number from 0 on, as the paths and bodies of the API have it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(min_value=0, max_value=paging.BIG, decimal_places=0, **options)


class _Text(filters.CharFilter):
    """An exact text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(max_length=LONGEST, strip=False, **options)


class Runs(filters.FilterSet):
    """GET runs."""

    name = _Text(lookup_expr="icontains", label="A part of the name.")
    served_format = _Text()


class Versions(filters.FilterSet):
    """GET versions."""

    state = filters.ChoiceFilter(choices=Version.State.choices)
    epoch = _Whole(field_name="epoch__number")
    before = _Whole(field_name="number", lookup_expr="lt", label="Numbers below this one.")
    after = _Whole(field_name="number", lookup_expr="gt", label="Numbers above this one.")


class Jobs(filters.FilterSet):
    """GET jobs."""

    state = filters.ChoiceFilter(choices=[*Job.State.choices, (UNFINISHED, "Unfinished")], method="of_state")
    kind = filters.ChoiceFilter(choices=Job.Kind.choices)
    run = _Text(field_name="run__name")

    def of_state(self, rows: QuerySet[Job], name: str, value: str) -> QuerySet[Job]:  # noqa: ARG002
        """One state, or every one that is not the last."""
        return rows.filter(state__in=Job.UNFINISHED if value == UNFINISHED else [value])


class Islands(filters.FilterSet):
    """GET islands."""

    run = _Text(field_name="run__name")
    channel = _Text(field_name="channel__name")
    provider = _Text()
    region = _Text()
    engine = _Text()
    enabled = filters.ChoiceFilter(choices=[("true", "yes"), ("false", "no")], method="of_enabled")

    def of_enabled(self, rows: QuerySet[Any], name: str, value: str) -> QuerySet[Any]:  # noqa: ARG002
        """Whether it may follow its channel."""
        return rows.filter(enabled=value == "true")


def filtered(request: Request, kind: type[filters.FilterSet], rows: QuerySet[Any]) -> QuerySet[Any]:
    """The rows that the query string asks for. Raises ValidationError."""
    found = kind(data=request.query_params, queryset=rows)
    if not found.is_valid():
        raise ValidationError({name: [str(item) for item in errors] for name, errors in found.errors.items()})
    chosen: QuerySet[Any] = found.qs
    return chosen


def parameters(kind: type[filters.FilterSet]) -> list[OpenApiParameter]:
    """The filters and the page of a list, for the schema."""
    return [*_documented(kind.base_filters.items()), *paging.PARAMETERS]


def _documented(declared: Iterable[tuple[str, filters.Filter]]) -> Iterable[OpenApiParameter]:
    for name, item in declared:
        if isinstance(item, filters.ChoiceFilter):
            schema: dict[str, Any] = {"type": "string", "enum": [value for value, _ in item.extra["choices"]]}
        elif isinstance(item, filters.NumberFilter):
            schema = {"type": "integer", "minimum": 0, "maximum": paging.BIG}
        else:
            schema = {"type": "string", "maxLength": LONGEST}
        yield OpenApiParameter(name, schema, description=item.label or "")
