"""Runs and their versions; replays start here."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_POST, require_safe

from controlplane.dashboard import charts
from controlplane.dashboard.access import PageRequest, member, operator
from controlplane.dashboard.pages import page
from controlplane.dashboard.rows import jobs as job_rows
from controlplane.dashboard.rows import runs as rows
from controlplane.jobs import triggers
from controlplane.registry import selectors as registry
from controlplane.registry.errors import Missing, Refusal
from controlplane.registry.models import Channel

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
    """Patch sizes and versions of one run."""
    found = registry.run(request.seat.project, run)
    last = _number(request, "last")
    last = last if last in RANGES else RANGES[1]
    before = _number(request, "before")
    versions, more = rows.version_rows(found, before)
    figures = rows.run_figures(found)
    channel = Channel.objects.filter(run=found, name=Channel.LATEST).select_related("version").first()
    context = {
        "run": found,
        "channel": Channel.LATEST,
        "head": channel.version if channel else None,
        "figures": figures,
        "chart": charts.size_chart(rows.size_points(found, last), figures.full_bytes or 0),
        "ranges": [{"last": n, "label": f"last {n}", "chosen": n == last} for n in RANGES],
        "versions": versions,
        "older": f"?last={last}&before={more}#versions-title" if more is not None else "",
        "newer": f"?last={last}#versions-title" if before is not None else "",
    }
    return page(request, "dashboard/run.html", context, title=found.name, tab="runs")


@require_safe
@member
def version(request: PageRequest, run: str, number: int) -> HttpResponse:
    """One version: facts, lineage, who holds it, what was done about it."""
    found = registry.run(request.seat.project, run)
    row = rows.version(found, number)
    context = {
        "run": found,
        "version": row,
        "state": rows.version_badge(row),
        "replayable": rows.replayable(row),
        "jobs": job_rows.jobs_of_version(row),
        **rows.lineage(row),
    }
    return page(request, "dashboard/version.html", context, title=f"{found.name} v{number}", tab="runs")


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
