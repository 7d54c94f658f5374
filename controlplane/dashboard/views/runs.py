"""Runs and their versions; replays start here."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_POST, require_safe

from controlplane.dashboard import charts
from controlplane.dashboard.access import PageRequest, member, operator
from controlplane.dashboard.pages import page
from controlplane.dashboard.rows import comparison
from controlplane.dashboard.rows import jobs as job_rows
from controlplane.dashboard.rows import runs as rows
from controlplane.dashboard.rows import tensors as tensor_rows
from controlplane.dashboard.rows.keys import key_rows
from controlplane.jobs import triggers
from controlplane.registry import clock, deriving
from controlplane.registry import selectors as registry
from controlplane.registry.errors import Missing, Refusal

RANGES = (20, 60, 200)


@require_safe
@member
def runs(request: PageRequest) -> HttpResponse:
    """All runs of the project."""
    context = {"rows": rows.run_rows(request.seat.project)}
    return page(request, "dashboard/runs.html", context, title="Runs", tab="runs")


@require_safe
@member
def run(request: PageRequest, run: str) -> HttpResponse:
    """Heads, sizes, densities and versions of one run."""
    found = registry.run(request.seat.project, run)
    last = _number(request, "last")
    last = last if last in RANGES else RANGES[1]
    before = _number(request, "before")
    budget = _number(request, "budget")
    versions, more = rows.version_rows(found, before)
    figures = rows.run_figures(found)
    points = rows.size_points(found, last)
    kept = f"last={last}" + (f"&budget={budget}" if budget else "")
    context = {
        "run": found,
        "channels": rows.channel_rows(found),
        "figures": figures,
        "storage": rows.storage(found),
        "ways": rows.ways(found),
        "staleness": rows.staleness(found),
        "epochs": rows.epoch_rows(found),
        "variants": deriving.variants(found),
        "variant_rows": deriving.side_by_side(found, rows.VARIANT_VERSIONS),
        "keys": key_rows(found),
        "chart": charts.size_chart(points, figures.full_bytes or 0, (budget or 0) * 1024 * 1024),
        "density": charts.density_chart(points),
        "steps": charts.steps_chart(points),
        "rate": charts.rate_chart(rows.published_per_hour(found, clock.now())),
        "budget": budget,
        "last": last,
        "ranges": [
            {
                "address": f"?last={n}" + (f"&budget={budget}" if budget else ""),
                "label": f"last {n}",
                "chosen": n == last,
            }
            for n in RANGES
        ],
        "versions": versions,
        "older": f"?{kept}&before={more}#versions-title" if more is not None else "",
        "newer": f"?{kept}#versions-title" if before is not None else "",
    }
    return page(request, "dashboard/run.html", context, title=found.name, tab="runs")


@require_safe
@member
def version(request: PageRequest, run: str, number: int) -> HttpResponse:
    """One version: facts, lineage, routes to it, who holds it, what was done about it."""
    found = registry.run(request.seat.project, run)
    row = rows.version(found, number)
    context = {
        "run": found,
        "version": row,
        "state": rows.version_badge(row),
        "replayable": rows.replayable(row),
        "jobs": job_rows.jobs_of_version(row),
        "routes": lambda: rows.routes(row),  # asked for by the whole page alone, not with each poll
        "movable": [channel for channel in registry.channels(found) if channel.version_id != row.pk],
        **rows.lineage(row),
    }
    return page(request, "dashboard/version.html", context, title=f"{found.name} v{number}", tab="runs")


@require_safe
@member
def tensors(request: PageRequest, run: str, number: int) -> HttpResponse:
    """Which tensors the version changed. Nothing here changes any more, so the page does not ask again."""
    found = registry.run(request.seat.project, run)
    row = rows.version(found, number)
    order = request.GET.get("order", "")
    order = order if order in tensor_rows.ORDERS else "changed"
    table, absence = None, ""
    try:
        table = tensor_rows.table(row, order, _number(request, "page") or 1)
    except tensor_rows.Absent as absent:
        absence = str(absent)
    context = {
        "run": found,
        "version": row,
        "table": table,
        "absence": absence,
        "order": order,
        "orders": [{"key": key, "word": word, "chosen": key == order} for key, word in tensor_rows.ORDERS.items()],
        "newer": f"?order={order}&page={table.page - 1}" if table and table.page > 1 else "",
        "older": f"?order={order}&page={table.page + 1}" if table and table.page < table.pages else "",
    }
    title = f"Tensors of {found.name} v{number}"
    return page(request, "dashboard/tensors.html", context, title=title, tab="runs", live=False)


@require_safe
@member
def compare(request: PageRequest, run: str, number: int) -> HttpResponse:
    """What differs between another version (`from`; its parent unless named) and this one."""
    found = registry.run(request.seat.project, run)
    row = rows.version(found, number)
    asked = _number(request, "from")
    if asked is None and row.parent is not None:
        asked = row.parent.number
    other = None if asked is None else rows.version_or_none(found, asked)
    context = {
        "run": found,
        "version": row,
        "other": other,
        "asked": asked,
        "comparison": comparison.compare(other, row) if other else None,
        "route": rows.route(found, other.state_digest, row.number) if other else None,
        "listed": comparison.LISTED,
    }
    title = f"Compare {found.name} v{number}"
    return page(request, "dashboard/compare.html", context, title=title, tab="runs", live=False)


@require_POST
@member
@operator
def replay(request: PageRequest, run: str, number: int) -> HttpResponse:
    """Ask for a rebuild of the version; a replay that runs already is joined."""
    try:
        job, fresh = triggers.replay(request.seat.project, run, number, actor=request.user.get_username())
    except Missing:
        raise
    except Refusal as refusal:
        messages.error(request, refusal.detail)
        return redirect("dashboard:version", request.seat.project.slug, run, number)
    messages.success(
        request, f"Replay of version {number} queued." if fresh else "This replay is already under way; here it is."
    )
    return redirect("dashboard:job", request.seat.project.slug, job.pk)


def _number(request: PageRequest, name: str) -> int | None:
    """A whole number of the address, or None for anything else."""
    asked = request.GET.get(name, "")
    return int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 19 else None
