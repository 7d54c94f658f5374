"""One box that jumps to an object by name, id or the beginning of a digest. Exactly one hit is opened at once."""

from __future__ import annotations

from django.http import HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_safe

from controlplane.dashboard.access import PageRequest, member
from controlplane.dashboard.pages import page
from controlplane.dashboard.rows import find as rows


@require_safe
@member
def find(request: PageRequest) -> HttpResponse:
    """Open what was meant, or list what it could be."""
    asked = request.GET.get("q", "").strip()
    hits = rows.hits(request.seat.project, asked) if asked else []
    if len(hits) == 1:
        return redirect(hits[0].address)
    context = {"asked": asked, "hits": hits, "most": rows.MOST}
    return page(request, "dashboard/find.html", context, title="Find", live=False)
