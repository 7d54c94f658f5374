"""The fleet: the home of a project."""

from __future__ import annotations

from django.http import HttpResponse
from django.views.decorators.http import require_safe

from controlplane.dashboard.access import PageRequest, member
from controlplane.dashboard.pages import page
from controlplane.dashboard.rows import fleet as fleet_rows
from controlplane.registry import clock
from controlplane.registry import selectors as registry


@require_safe
@member
def fleet(request: PageRequest) -> HttpResponse:
    """Heads, what needs attention, and the islands that the filters of the address name."""
    project = request.seat.project
    chosen = fleet_rows.Filters.of(request.GET)
    rows = fleet_rows.island_rows(project, clock.now())
    context = {
        "runs": registry.runs(project).exists(),
        "heads": fleet_rows.heads(project),
        "attention": fleet_rows.attention(project, rows),
        "facets": fleet_rows.facets(rows, chosen),
        "choices": fleet_rows.choices(rows, chosen),
        "kept": [(name, getattr(chosen, name)) for name in ("health", "sync") if getattr(chosen, name)],
        "islands": [row for row in rows if chosen.matches(row)],
        "total": len(rows),
        "filtered": chosen.any,
    }
    return page(request, "dashboard/fleet.html", context, title="Fleet", tab="fleet")
