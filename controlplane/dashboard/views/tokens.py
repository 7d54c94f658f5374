"""API tokens and enrolment tokens: made, shown once, rotated, revoked. Everybody in the project sees which there are;
only admins change tokens, and operators, who register islands, revoke enrolment tokens. A secret is never stored, so a
page that shows one answers the POST itself.
"""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from controlplane.accounts import selectors, services
from controlplane.accounts.models import Token
from controlplane.dashboard.access import PageRequest, admin, member, operator
from controlplane.dashboard.forms import TokenForm
from controlplane.dashboard.pages import page
from controlplane.dashboard.rows import tokens as rows
from controlplane.fleet import selectors as fleet_selectors
from controlplane.fleet import services as fleet
from controlplane.registry import clock
from controlplane.registry.errors import Refusal


@require_safe
@member
def tokens(request: PageRequest) -> HttpResponse:
    """The keys of the project and where each stands."""
    project = request.seat.project
    now = clock.now()
    ended = request.GET.get("ended") == "yes"
    context = {
        "tokens": rows.token_rows(project, now, ended=ended),
        "enrolments": rows.enrolment_rows(project, now),
        "ended": ended,
    }
    return page(request, "dashboard/tokens.html", context, title="Tokens", tab="tokens")


@require_http_methods(["GET", "HEAD", "POST"])
@member
@admin
def new(request: PageRequest) -> HttpResponse:
    """The form for a token; its answer shows the secret, this once."""
    project = request.seat.project
    form = TokenForm(project, request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        token, plaintext = form.create(actor=request.user.get_username())
        return _shown_once(request, token, plaintext)
    return page(request, "dashboard/new_token.html", {"form": form}, title="New token", tab="tokens", live=False)


@require_POST
@member
@admin
def rotate(request: PageRequest, token: int) -> HttpResponse:
    """A new secret; the old one works for a day."""
    found = selectors.token(request.seat.project, token)
    try:
        fresh, plaintext = services.rotate_token(found, actor=request.user.get_username())
    except Refusal as refusal:
        messages.error(request, refusal.detail)
        return redirect("dashboard:tokens", request.seat.project.slug)
    return _shown_once(request, fresh, plaintext)


@require_POST
@member
@admin
def revoke(request: PageRequest, token: int) -> HttpResponse:
    """End it at once, once its name was typed."""
    found = selectors.token(request.seat.project, token)
    if request.POST.get("typed", "").strip() != found.name:
        messages.error(request, f"Type the token's name, {found.name}, to confirm.")
    elif found.role == Token.Role.ISLAND:
        messages.error(request, "An island's credential is revoked on the island's own page.")
    else:
        services.revoke_token(found, actor=request.user.get_username())
        messages.success(request, f"The token {found.name} is revoked.")
    return redirect("dashboard:tokens", request.seat.project.slug)


@require_POST
@member
@operator
def revoke_enrolment(request: PageRequest, enrolment: int) -> HttpResponse:
    """End an enrolment token; islands that it has enrolled stay."""
    found = fleet_selectors.enrolment_token(request.seat.project, enrolment)
    fleet.revoke_enrolment_token(found, actor=request.user.get_username())
    messages.success(request, f"The enrolment token {found.name} is revoked; islands that came with it stay.")
    return redirect("dashboard:tokens", request.seat.project.slug)


def _shown_once(request: PageRequest, token: Token, plaintext: str) -> HttpResponse:
    context = {"token": token, "plaintext": plaintext}
    return page(request, "dashboard/token.html", context, title="New token", tab="tokens", live=False)
