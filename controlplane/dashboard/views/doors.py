"""Sign-in, the way to the first project, and the favicon."""

from __future__ import annotations

from typing import cast

from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.views import LoginView
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect, render
from django.utils.html import format_html
from django.views.decorators.http import require_safe

from controlplane.accounts import selectors as accounts
from controlplane.dashboard.access import PageRequest, sign_in

MAX_ON_BADGE = 99


class Door(LoginView):
    """The sign-in page; somebody who is signed in already goes on."""

    template_name = "dashboard/login.html"
    redirect_authenticated_user = True
    extra_context = {"title": "Log in"}


@require_safe
def home(request: HttpRequest) -> HttpResponseBase:
    """The reader's first project."""
    if not request.user.is_authenticated:
        return sign_in(cast(PageRequest, request))
    first = accounts.memberships(request.user).first()
    if first is None:
        return render(request, "dashboard/no_project.html", {"title": "No project"})
    return redirect("dashboard:fleet", first.project.slug)


@login_not_required
@require_safe
def favicon(request: HttpRequest) -> HttpResponse:
    """The mail boat, with the number of lost islands on it."""
    asked = request.GET.get("lost", "0")
    lost = min(int(asked), MAX_ON_BADGE) if asked.isascii() and asked.isdigit() and len(asked) < 9 else 0
    answer = HttpResponse(_boat(lost), content_type="image/svg+xml")
    answer["Cache-Control"] = "public, max-age=86400"
    return answer


def _boat(lost: int) -> str:
    badge = (
        format_html(
            '<circle cx="22" cy="10" r="9.5" fill="#c4281d"/><text x="22" y="14.5" text-anchor="middle" fill="#fff"'
            ' font-family="system-ui, sans-serif" font-weight="700" font-size="{}">{}</text>',
            10 if lost > 9 else 13,  # noqa: PLR2004  two digits need smaller ones
            lost,
        )
        if lost
        else ""
    )
    return format_html(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><g stroke-linejoin="round" stroke-width="2">'
        '<path d="M9 17V6.500h14V17" fill="#fff" stroke="#0a5c7d"/><path d="m9.500 7 6.500 5.500L22.500 7" fill="none" stroke="#0a5c7d"/>'
        '<path d="M3 17h26l-3.600 7.500H6.600z" fill="#0a5c7d" stroke="#0a5c7d"/></g>'
        '<path d="M3 29c2.200 0 2.200-1.500 4.300-1.500S9.500 29 11.700 29s2.200-1.500 4.300-1.500 2.200 1.500 4.400 1.500 2.200-1.500 4.300-1.500S26.900 29 29 29"'
        ' fill="none" stroke="#3a9cc0" stroke-width="2" stroke-linecap="round"/>{}</svg>',
        badge,
    )
