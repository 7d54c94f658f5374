"""The audit log: filters in the address, pages by entry, export of what the filters leave."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from asgiref.sync import sync_to_async
from django.http import Http404, HttpResponse, QueryDict, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.utils.dateparse import parse_date
from django.views.decorators.http import require_safe

from controlplane.audit import selectors
from controlplane.audit.models import Entry
from controlplane.dashboard.access import PageRequest, member
from controlplane.dashboard.pages import page
from controlplane.dashboard.rows.audit import entry_rows
from controlplane.registry.models import Project

PAGE = 50
NAMES = ("actor", "action", "target", "request_id", "since", "until")


@require_safe
@member
def audit(request: PageRequest) -> HttpResponse:
    """Who changed what, newest first."""
    project = request.seat.project
    chosen = _chosen(request.GET)
    asked = request.GET.get("before", "")
    before = int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 19 else None
    found = list(selectors.entries(project, chosen, before=before)[: PAGE + 1])
    kept = {name: request.GET.get(name, "") for name in NAMES}
    query = urlencode({name: value for name, value in kept.items() if value})
    context = {
        "entries": entry_rows(found[:PAGE]),
        "kept": kept,
        "query": query,
        "actions": _offered(selectors.actions(project), kept["action"]),
        "actors": _offered(selectors.actors(project), kept["actor"]),
        "filtered": bool(query) or before is not None,
        "older": f"?{query}&before={found[PAGE - 1].pk}" if len(found) > PAGE else "",
        "newest": f"?{query}" if before is not None else "",
    }
    return page(request, "dashboard/audit.html", context, title="Audit", tab="audit")


def _offered(choices: list[str], chosen: str) -> list[str]:
    """The choices of a filter; what the address names stays chosen although no recent entry has it."""
    return choices if not chosen or chosen in choices else [chosen, *choices]


@require_safe
@member
def export(request: PageRequest, form: str) -> HttpResponseBase:
    """The chosen entries as a file, however many there are, a few at a time in memory."""
    if form not in selectors.FORMATS:
        raise Http404("no such format")
    write, kind = selectors.FORMATS[form]
    answer = StreamingHttpResponse(_lines(request.seat.project, _chosen(request.GET), write), content_type=kind)
    answer["Content-Disposition"] = f'attachment; filename="audit-{request.seat.project.slug}.{form}"'
    return answer


async def _lines(project: Project, chosen: selectors.Filter, write: Any) -> AsyncIterator[str]:
    """Asynchronous, because ASGI would gather a plain iterator in memory."""
    batches = iter(selectors.batches(project, chosen))

    def following() -> list[Entry]:
        return next(batches, [])

    header = True
    while found := await sync_to_async(following)():
        yield write(found, header=header)
        header = False
    if header:
        yield write([], header=True)


def _chosen(query: QueryDict) -> selectors.Filter:
    def text(name: str) -> str:
        return query.get(name, "").strip()[:200]

    until = _day(text("until"))
    return selectors.Filter(
        actor=text("actor"),
        action=text("action"),
        target=text("target"),
        request_id=text("request_id"),
        since=_day(text("since")),
        until=until and until + timedelta(days=1),  # the day is meant whole
    )


def _day(text: str) -> datetime | None:
    try:
        day = parse_date(text)
    except ValueError:  # such as 30 February
        return None
    return None if day is None else datetime(day.year, day.month, day.day, tzinfo=UTC)
