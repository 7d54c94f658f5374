"""The fleet: the home of a project."""

from __future__ import annotations

from django.http import HttpResponse
from django.views.decorators.http import require_safe

from controlplane.dashboard.access import PageRequest, member
from controlplane.dashboard.pages import page
from controlplane.dashboard.rows import attention
from controlplane.dashboard.rows import fleet as rows
from controlplane.dashboard.rows import skew as skew_rows
from controlplane.dashboard.rows.filters import Filters, pages
from controlplane.fleet import outline
from controlplane.registry import clock
from controlplane.registry import selectors as registry

STRIPS = 60


@require_safe
@member
def fleet(request: PageRequest) -> HttpResponse:
    """Heads, what needs attention, and the islands that the filters of the address name."""
    project = request.seat.project
    now = clock.now()
    chosen = Filters.of(request.GET)
    every = outline.standings(project)
    matching = chosen.ordered(chosen.of_them(every, now))
    shown = pages(chosen, len(matching))
    heads = rows.heads(project)
    context = {
        "runs": bool(heads) or registry.runs(project).exists(),
        "heads": heads,
        "attention": attention.attention(project, every, all_of_it=request.GET.get("findings") == "all"),
        "facets": rows.facets(every, chosen, now),
        "choices": rows.choices(every, chosen),
        "chosen": chosen,
        "kept": chosen.kept("run", "provider", "region", "version", "unseen", "behind", "q"),
        "columns": rows.columns(chosen),
        "islands": [rows.island_row(row, now) for row in matching[max(0, shown.first - 1) : shown.last]],
        "pages": shown,
        "total": len(every),
        "several_runs": len({row.island.run_name for row in every}) > 1,
    }
    return page(request, "dashboard/fleet.html", context, title="Fleet", tab="fleet")


@require_safe
@member
def skew(request: PageRequest) -> HttpResponse:
    """A strip of time per island: who fell behind, when, and for how long."""
    project = request.seat.project
    now = clock.now()
    chosen = Filters.of(request.GET)
    asked = request.GET.get("window", "")
    window = asked if asked in skew_rows.WINDOWS else "1h"
    every = outline.standings(project)
    matching = chosen.of_them(every, now)
    matching.sort(key=lambda row: (-(row.skew_versions or 0), row.island.name))
    shown = matching[:STRIPS]
    drawn = skew_rows.strips([(row.island.id, row.island.run_id) for row in shown], skew_rows.WINDOWS[window], now)
    context = {
        "rows": [(row.island, drawn[row.island.id]) for row in shown],
        "total": len(every),
        "left_out": len(matching) - len(shown),
        "chosen": chosen,
        "choices": rows.choices(every, chosen),
        "kept": [("window", window)],
        "levels": [word for _, word in skew_rows.LEVELS],
        "window": skew_rows.WINDOW_WORDS[window],
        "windows": [
            {"address": chosen.query(window=key), "word": word, "chosen": key == window}
            for key, word in skew_rows.WINDOW_WORDS.items()
        ],
    }
    return page(request, "dashboard/skew.html", context, title="Skew over time", tab="fleet")
