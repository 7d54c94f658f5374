"""Jobs: the list, one of them, and its cancellation."""

from __future__ import annotations

import uuid
from urllib.parse import urlencode

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_POST, require_safe

from controlplane.dashboard import badges
from controlplane.dashboard.access import PageRequest, member, operator
from controlplane.dashboard.pages import page
from controlplane.dashboard.rows import jobs as rows
from controlplane.dashboard.rows.fleet import Facet
from controlplane.jobs import selectors, services
from controlplane.jobs.models import Job, JobEvent
from controlplane.registry.errors import Refusal

PAGE = 30
RERUN_FROM = (Job.State.FAILED, Job.State.CANCELLED)


@require_safe
@member
def jobs(request: PageRequest) -> HttpResponse:
    """The jobs that the address asks for, newest first."""
    project = request.seat.project
    state = request.GET.get("state", "")
    state = state if state in Job.State.values else ""
    kind = request.GET.get("kind", "")
    kind = kind if kind in Job.Kind.values else ""
    asked = request.GET.get("page", "1")
    number = max(1, int(asked)) if asked.isascii() and asked.isdigit() and len(asked) < 7 else 1
    found = selectors.jobs(project, state=state, kind=kind).select_related("run", "project")
    shown = list(found[(number - 1) * PAGE : number * PAGE + 1])

    def address(page: int, state: str = state) -> str:
        wanted = {"state": state, "kind": kind, "page": str(page) if page > 1 else ""}
        return "?" + urlencode({name: value for name, value in wanted.items() if value})

    counts = selectors.counts(project)
    facets = [Facet("All", sum(counts.values()), address(1, ""), not state)]
    facets += [
        Facet(badge.word, counts[key], address(1, "" if key == state else key), key == state, badge.icon, badge.tone)
        for key, badge in badges.JOB.items()
        if counts[key] or key == state or key in (Job.State.RUNNING, Job.State.QUEUED)
    ]
    context = {
        "jobs": rows.job_rows(shown[:PAGE]),
        "facets": facets,
        "kind": kind,
        "filtered": bool(state or kind or number > 1),
        "older": address(number + 1) if len(shown) > PAGE else "",
        "newer": address(number - 1) if number > 1 else "",
        "queues": rows.queue_rows(project),
        "overdue": rows.job_rows(selectors.overdue(project)),
    }
    return page(request, "dashboard/jobs.html", context, title="Jobs", tab="jobs")


@require_safe
@member
def job(request: PageRequest, job: uuid.UUID) -> HttpResponse:
    """One job. Its last fragment carries no trigger, so that polling ends by itself."""
    found = selectors.job(request.seat.project, job)
    (row,) = rows.job_rows([found])
    level = request.GET.get("level", "")
    level = level if level in JobEvent.Level.values else ""
    words = [("", "All"), (JobEvent.Level.WARNING.value, "Warnings"), (JobEvent.Level.ERROR.value, "Errors")]
    context = {
        "job": found,
        "row": row,
        "result": rows.result_facts(found.result),
        "events": rows.log_lines(selectors.events(found, level=level)),
        "again": found.state in RERUN_FROM and found.kind in services.RERUNNABLE,
        "levels": [
            {"address": f"?level={key}" if key else "?", "word": word, "chosen": key == level} for key, word in words
        ],
        "filtered": bool(level),
    }
    return page(request, "dashboard/job.html", context, title=row.heading, tab="jobs", polling=not found.finished)


@require_POST
@member
@operator
def cancel(request: PageRequest, job: uuid.UUID) -> HttpResponse:
    """Ask the job to stop, and say truthfully whether it still could."""
    found = selectors.job(request.seat.project, job)
    try:
        ended = services.cancel(found, request.user.get_username())
    except services.TooLate as late:
        messages.error(request, late.detail)
    else:
        done = ended.state == Job.State.CANCELLED
        messages.success(
            request, "The job is cancelled." if done else "Asked the worker to stop; it ends at its next step."
        )
    return redirect("dashboard:job", request.seat.project.slug, found.pk)


@require_POST
@member
@operator
def rerun(request: PageRequest, job: uuid.UUID) -> HttpResponse:
    """Queue the same work again; it is a job of its own."""
    found = selectors.job(request.seat.project, job)
    try:
        again, fresh = services.rerun(found, request.user.get_username())
    except Refusal as refusal:
        messages.error(request, refusal.detail)
        return redirect("dashboard:job", request.seat.project.slug, found.pk)
    messages.success(request, "Queued again." if fresh else "This work is already under way; here it is.")
    return redirect("dashboard:job", request.seat.project.slug, again.pk)


@require_safe
@member
def workers(request: PageRequest) -> HttpResponse:
    """Who works on jobs, with which device and versions; and what runs by the clock."""
    context = {"workers": rows.worker_rows(request.seat.project), "schedule": selectors.schedule()}
    return page(request, "dashboard/workers.html", context, title="Workers", tab="jobs")
