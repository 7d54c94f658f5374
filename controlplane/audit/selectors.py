"""Reads the audit log: filters, and exports that hold a few rows in memory however long the log is."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import Q, QuerySet

from controlplane.audit.models import Entry
from controlplane.registry.models import Project

COLUMNS = ("id", "at", "actor", "action", "target", "before", "after", "request_id")
BATCH = 500
RECENT, CHOICES = 5000, 200


@dataclass(frozen=True, slots=True)
class Filter:
    """What to look for. Texts: `actor` and `request_id` whole, `action` whole or up to a dot (`island` finds
    `island.drain`), `target` any part of it. `since` is inclusive, `until` is not.
    """

    actor: str = ""
    action: str = ""
    target: str = ""
    request_id: str = ""
    since: datetime | None = None
    until: datetime | None = None


def entries(project: Project, chosen: Filter | None = None, *, before: int | None = None) -> QuerySet[Entry]:
    """The changes of a project, newest first; `before` (an entry's number) continues a page."""
    found = Entry.objects.filter(project=project)
    chosen = chosen or Filter()
    if chosen.actor:
        found = found.filter(actor=chosen.actor)
    if chosen.action:
        found = found.filter(Q(action=chosen.action) | Q(action__startswith=f"{chosen.action}."))
    if chosen.target:
        found = found.filter(target__icontains=chosen.target)
    if chosen.request_id:
        found = found.filter(request_id=chosen.request_id)
    if chosen.since is not None:
        found = found.filter(at__gte=chosen.since)
    if chosen.until is not None:
        found = found.filter(at__lt=chosen.until)
    return found if before is None else found.filter(id__lt=before)


def actions(project: Project) -> list[str]:
    """The actions of the newest entries, for a filter's choices."""
    return _recent(project, "action")


def actors(project: Project) -> list[str]:
    """Who stands in the newest entries, for a filter's choices."""
    return _recent(project, "actor")


def _recent(project: Project, column: str) -> list[str]:
    """Different values among the RECENT newest entries, at most CHOICES: a log of years costs no more than a young one.
    Whoever looks for another value writes it into the address.
    """
    newest = Entry.objects.filter(project=project).order_by("-id").values("id")[:RECENT]
    found = Entry.objects.filter(pk__in=newest).order_by(column).values_list(column, flat=True).distinct()
    return list(found[:CHOICES])


def batches(project: Project, chosen: Filter) -> Iterator[list[Entry]]:
    """The chosen entries, newest first, BATCH at a time; each batch is a query of its own."""
    last: int | None = None
    while found := list(entries(project, chosen, before=last)[:BATCH]):
        yield found
        last = found[-1].pk


def as_csv(found: list[Entry], *, header: bool = False) -> str:
    """Entries as lines of a table that a spreadsheet opens without running what stands in it."""
    out = io.StringIO()
    writer = csv.writer(out)
    if header:
        writer.writerow(COLUMNS)
    for entry in found:
        writer.writerow([_harmless(_text(value)) for value in _values(entry).values()])
    return out.getvalue()


def as_json_lines(found: list[Entry], *, header: bool = False) -> str:  # noqa: ARG001  the same call as `as_csv`
    """Entries as one JSON object per line."""
    return "".join(json.dumps(_values(entry), ensure_ascii=False) + "\n" for entry in found)


FORMATS: dict[str, tuple[Callable[..., str], str]] = {
    "csv": (as_csv, "text/csv; charset=utf-8"),
    "jsonl": (as_json_lines, "application/jsonl"),
}


def _values(entry: Entry) -> dict[str, Any]:
    values = {name: getattr(entry, name) for name in COLUMNS}
    return values | {"at": entry.at.isoformat().replace("+00:00", "Z")}


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)


def _harmless(text: str) -> str:
    """A leading quote keeps spreadsheets from taking a cell for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
