"""The audit log: pages of it, and the whole of it as a stream."""

# ruff: noqa: ARG002  Django hands over every part of the address by name

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

from django.http import HttpResponseBase, StreamingHttpResponse
from django.utils.dateparse import parse_datetime
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.accounts.principals import PEOPLE
from controlplane.api import paging, people_answers
from controlplane.api import people_representations as show
from controlplane.api.answers import page_of
from controlplane.api.views import ProjectView
from controlplane.audit import selectors
from controlplane.audit.selectors import Filter
from controlplane.registry.models import Project

LONGEST = 200
FILTERS = [
    *(
        OpenApiParameter(name, {"type": "string", "maxLength": LONGEST})
        for name in ("actor", "action", "target", "request_id")
    ),
    *(OpenApiParameter(name, OpenApiTypes.DATETIME) for name in ("since", "until")),
]


class Audit(ProjectView):
    """What was changed, by whom."""

    roles = {"GET": PEOPLE}

    @extend_schema(
        operation_id="audit_list",
        parameters=[*FILTERS, *paging.PARAMETERS],
        responses=page_of(people_answers.AuditEntry),
    )
    def get(self, request: Request, project: str) -> Response:
        """Newest first."""
        found = selectors.entries(self.caller.project, chosen(request.query_params))
        page = paging.page(request, found, "-id")
        return page.response([show.audit_entry(row) for row in page.rows])


class AuditExport(ProjectView):
    """The chosen entries as a file."""

    roles = {"GET": PEOPLE}

    @extend_schema(
        parameters=[*FILTERS, OpenApiParameter("as", str, enum=list(selectors.FORMATS), default="csv")],
        responses={(200, "text/csv"): OpenApiTypes.STR, (200, "application/jsonl"): OpenApiTypes.STR},
    )
    def get(self, request: Request, project: str) -> HttpResponseBase:
        """Streamed, newest first: `as=csv` or `as=jsonl`."""
        kind = request.query_params.get("as", "csv")
        if kind not in selectors.FORMATS:
            raise ValidationError({"as": f"It must be one of {', '.join(selectors.FORMATS)}."})
        return export(self.caller.project, chosen(request.query_params), kind)


def chosen(query: Mapping[str, str]) -> Filter:
    """The filter of a query string. Raises ValidationError."""
    return Filter(
        actor=_word(query, "actor"),
        action=_word(query, "action"),
        target=_word(query, "target"),
        request_id=_word(query, "request_id"),
        since=_moment(query, "since"),
        until=_moment(query, "until"),
    )


def export(project: Project, filter_: Filter, kind: str) -> StreamingHttpResponse:
    """An answer that holds a few hundred entries in memory, however many there are."""
    render, content_type = selectors.FORMATS[kind]

    def pieces() -> Iterator[str]:
        yield render([], header=True)
        for batch in selectors.batches(project, filter_):
            yield render(batch)

    headers = {
        "Content-Disposition": f'attachment; filename="mailboat-audit-{project.slug}.{kind}"',
        "Cache-Control": "no-store",
    }
    return StreamingHttpResponse(pieces(), content_type=content_type, headers=headers)


def _word(query: Mapping[str, str], name: str) -> str:
    text = query.get(name, "")
    if len(text) > LONGEST or "\0" in text:
        raise ValidationError({name: f"It must be a text of at most {LONGEST} characters."})
    return text


def _moment(query: Mapping[str, str], name: str) -> datetime | None:
    raw = query.get(name, "")
    try:
        moment = parse_datetime(raw) if raw else None
        if raw and (moment is None or moment.tzinfo is None):
            raise ValueError(raw)
        return None if moment is None else moment.astimezone(UTC)  # PostgreSQL takes fewer offsets than Python
    except (ValueError, OverflowError):
        raise ValidationError({name: "It must be a moment with its time zone, like 2026-11-30T12:00:00Z."}) from None
