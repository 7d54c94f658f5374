"""Islands: one of them, its verification, and the registration of new ones."""

from __future__ import annotations

import uuid

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from controlplane.dashboard.access import PageRequest, member, operator
from controlplane.dashboard.forms import RegisterForm
from controlplane.dashboard.pages import page
from controlplane.dashboard.rows import fleet as fleet_rows
from controlplane.dashboard.rows import islands as rows
from controlplane.dashboard.rows import journey, skew, timeline
from controlplane.dashboard.rows.keys import trust_rows
from controlplane.fleet import outline, selectors
from controlplane.fleet import services as fleet
from controlplane.fleet.models import EnrolmentToken
from controlplane.jobs import triggers
from controlplane.registry import clock, keys
from controlplane.registry.errors import Refusal
from mailboat.identity import fingerprint


@require_safe
@member
def island(request: PageRequest, island: uuid.UUID) -> HttpResponse:
    """One island: state, facts, what it was told to do, syncs, verifications, and all that happened to it."""
    project = request.seat.project
    found = selectors.island(project, island)
    now = clock.now()
    (standing,) = outline.standings(project, only=found.pk)
    strip = skew.strips([(found.pk, found.run_id)], skew.WINDOWS["1d"], now)[found.pk]
    context = {
        "island": found,
        "row": fleet_rows.island_row(standing, now),
        "drained": standing.drained,
        "fingerprint": fingerprint(found.public_key) if found.public_key else "",
        "credential": rows.credential(found, now),
        "trusted": trust_rows(found),
        "strip": strip,
        "syncs": rows.sync_rows(found),
        "challenges": rows.challenge_rows(found),
        "events": timeline.timeline(found),
        "journey": lambda: journey.to_head(found),  # asked for by the whole page alone, not with each poll
    }
    return page(request, "dashboard/island.html", context, title=found.name, tab="fleet")


@require_POST
@member
@operator
def verify(request: PageRequest, island: uuid.UUID) -> HttpResponse:
    """Ask the island to prove what it holds; a verification that runs already is joined."""
    found = selectors.island(request.seat.project, island)
    try:
        job, fresh = triggers.verify(request.seat.project, found.pk, actor=request.user.get_username())
    except Refusal as refusal:
        messages.error(request, refusal.detail)
        return redirect("dashboard:island", request.seat.project.slug, found.pk)
    messages.success(
        request,
        f"Verification of {found.name} queued." if fresh else "This verification is already under way; here it is.",
    )
    return redirect("dashboard:job", request.seat.project.slug, job.pk)


@require_http_methods(["GET", "HEAD", "POST"])
@member
@operator
def register(request: PageRequest) -> HttpResponse:
    """The form for a new island.

    Its answer shows the token once: the text is never stored, so there is nothing to redirect to.
    """
    seat = request.seat
    form = RegisterForm(seat.project, request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        try:
            token, plaintext = form.create(actor=request.user.get_username())
        except Refusal as refusal:
            form.add_error(None, refusal.detail)
        else:
            return _enrolment_page(request, token, plaintext)
    return page(request, "dashboard/register.html", {"form": form}, title="Register island", tab="fleet", live=False)


@require_safe
@member
@operator
def enrolment(request: PageRequest, enrolment: int) -> HttpResponse:
    """Wait for the island of a token, without the token."""
    return _enrolment_page(request, rows.enrolment(request.seat.project, enrolment), "")


def _enrolment_page(request: PageRequest, token: EnrolmentToken, plaintext: str) -> HttpResponse:
    """The command where its token is at hand, and the part that waits for the first heartbeat."""
    project = request.seat.project
    island = token.island
    now = clock.now()
    expired = token.used_at is None and token.expires_at <= now
    arrived = island is not None and island.last_seen_at is not None and island.last_seen_at > island.enrolled_at
    context = {
        "enrolment": token,
        "island": island,
        "arrived": arrived,
        "expired": expired,
        "command": fleet.enrolment_command(token, plaintext) if plaintext else "",
        "pinned": len(keys.to_pin(token.run)) if plaintext else 0,
    }
    return page(
        request,
        "dashboard/enrolment.html",
        context,
        title=f"Register {token.name}",
        tab="fleet",
        polling=not (arrived or expired),
        address=reverse("dashboard:enrolment", args=[project.slug, token.pk]),
    )
