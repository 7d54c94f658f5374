"""One address, page and fragment. A page's template holds a partial named `live`; when that part asks for itself
again it gets the partial alone, or 204 when nothing in it changed. Views must never render a page by another way, or
the title and the favicon lie.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

from django.conf import settings
from django.http import HttpResponse
from django.shortcuts import render
from django.template.loader import render_to_string
from django.utils.html import format_html
from django.utils.safestring import mark_safe

from controlplane.dashboard import wording
from controlplane.dashboard.access import PageRequest
from controlplane.fleet import selectors as fleet
from controlplane.registry import clock

LIVE = "live"
EVERY_SECONDS = 2
# The words of a relative time change each second and a CSRF token each time; neither is news.
_NOT_NEWS = re.compile(r'(<time [^>]*>)[^<]*(</time>)|(<input[^>]*name="csrfmiddlewaretoken"[^>]*>)')
_SPACE = re.compile(r"\s+")
_INDENT = re.compile(r">\s*\n\s*<")  # between two tags; text, and what stands in <pre>, never begins with one


def page(
    request: PageRequest,
    template: str,
    context: dict[str, Any],
    *,
    title: str,
    tab: str = "",
    live: bool = True,
    polling: bool = True,
    address: str = "",
) -> HttpResponse:
    """Answer with the page, its live part, or 204.

    `live` False: the page has no part that changes. `polling` False: the fragment carries no trigger, so that polling
    ends. `address`: where the live part asks, when not at the address of this request.
    """
    seat = request.seat
    lost = fleet.lost_islands(seat.project)
    full = {
        "project": seat.project,
        "projects": seat.projects,
        "role": seat.role,
        "operates": seat.operates,
        "administers": seat.administers,
        "read_only": settings.MAILBOAT_READ_ONLY,
        "lost": lost,
        "now": clock.now(),
        "title": title,
        "tab": tab,
        **context,
    }
    if not live:
        return _fresh(render(request, template, full))
    inner = mark_safe(_INDENT.sub(">\n<", render_to_string(f"{template}#{LIVE}", full, request=request)))  # noqa: S308
    seen = fingerprint(f"{lost} {polling} {inner}")
    if _wants_live_part(request) and request.GET.get("seen") == seen:
        return _fresh(HttpResponse(status=204))
    part = {
        "inner": inner,
        "lost": lost,
        "polling": polling,
        "every": EVERY_SECONDS,
        "seen": seen,
        "address": address or _address(request),
    }
    full["live"] = render_to_string("components/live.html", part, request=request)
    if _wants_live_part(request):
        return _fresh(HttpResponse(_title(full) + full["live"]))
    return _fresh(render(request, template, full))


def fingerprint(html: str) -> str:
    """Name what a fragment says, whatever the clock says."""
    return hashlib.sha256(_SPACE.sub(" ", _NOT_NEWS.sub(r"\1\2", html)).encode()).hexdigest()[:16]


def _title(context: dict[str, Any]) -> str:
    """The title that comes along with a fragment: the number of lost islands may have changed."""
    return format_html("<title>{}</title>", wording.page_title(context["title"], context["lost"]))


def _wants_live_part(request: PageRequest) -> bool:
    return bool(request.htmx) and request.htmx.target == LIVE


def _address(request: PageRequest) -> str:
    """The page's own address without what polling adds to it."""
    query = request.GET.copy()
    query.pop("seen", None)
    return f"{request.path}?{query.urlencode()}" if query else request.path


def _fresh(response: HttpResponse) -> HttpResponse:
    response["Cache-Control"] = "no-store"
    response["Vary"] = "HX-Request, Cookie"
    return response
