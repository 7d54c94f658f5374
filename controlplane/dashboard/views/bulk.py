"""One action on many islands: first a page that says on how many, then the deed. Each island is a change of its own,
with its own audit entry; one that is refused does not stop the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.http import require_POST

from controlplane.dashboard import wording
from controlplane.dashboard.access import PageRequest, member, operator
from controlplane.dashboard.pages import page
from controlplane.dashboard.rows.filters import Filters
from controlplane.fleet import outline, selectors
from controlplane.fleet import services as fleet
from controlplane.fleet.models import Island
from controlplane.jobs import triggers
from controlplane.registry import clock
from controlplane.registry.errors import Refusal

MOST = 1000
NAMED = 12


@dataclass(frozen=True, slots=True)
class Deed:
    """What is done to each island; `past` tells it afterwards."""

    verb: str
    past: str
    consequence: str
    do: Callable[[Island, str], object]


DEEDS = {
    "verify": Deed(
        "Verify",
        "asked to prove what they hold",
        "Each is asked for a keyed hash over random ranges; nothing pauses.",
        lambda island, actor: triggers.verify(island.project, island.pk, actor=actor),
    ),
    "drain": Deed(
        "Drain",
        "asked to drain",
        "They take no new requests; what still runs after ten minutes is given up.",
        lambda island, actor: fleet.drain(island, actor=actor),
    ),
    "disable": Deed(
        "Disable",
        "disabled",
        "They keep serving what they hold and follow their channel no more.",
        lambda island, actor: fleet.set_enabled(island, False, actor=actor),
    ),
    "enable": Deed(
        "Enable",
        "enabled",
        "They follow their channel again.",
        lambda island, actor: fleet.set_enabled(island, True, actor=actor),
    ),
}


@require_POST
@member
@operator
def bulk(request: PageRequest) -> HttpResponse:
    """Ask first, with the count; then do it."""
    project = request.seat.project
    back = reverse("dashboard:fleet", args=[project.slug]) + Filters.of(request.GET).query()
    deed = DEEDS.get(request.POST.get("action", ""))
    names = _names(request)
    if deed is None or not names:
        messages.warning(request, "Tick the islands that you mean first, or all that match.")
        return redirect(back)
    if len(names) > MOST:
        messages.warning(request, f"That is {len(names):,} islands; at most {MOST:,} at once.")
        return redirect(back)
    if "confirmed" in request.POST:
        _do(request, deed, names)
        return redirect(back)
    context = {
        "deed": deed,
        "action": request.POST["action"],
        "names": names,
        "named": names[:NAMED],
        "unnamed": len(names) - NAMED,
        "back": back,
    }
    return page(request, "dashboard/bulk.html", context, title=f"{deed.verb} islands", tab="fleet", live=False)


def _names(request: PageRequest) -> list[str]:
    """The ticked islands, or all that the address names; only those of this project."""
    project = request.seat.project
    if request.POST.get("all") == "matching":
        chosen, now = Filters.of(request.GET), clock.now()
        return [row.island.name for row in chosen.of_them(outline.standings(project), now)]
    ticked = request.POST.getlist("island")[: MOST + 1]
    return list(Island.objects.filter(project=project, name__in=ticked).order_by("name").values_list("name", flat=True))


def _do(request: PageRequest, deed: Deed, names: list[str]) -> None:
    project = request.seat.project
    refused: list[str] = []
    for island in selectors.islands(project).filter(name__in=names):
        try:
            deed.do(island, request.user.get_username())
        except Refusal as refusal:
            refused.append(refusal.detail)
    done = len(names) - len(refused)
    if done:
        messages.success(request, f"{wording.plural(done, 'island')} {deed.past}.")
    if refused:
        more = f" And {len(refused) - 1} more." if len(refused) > 1 else ""
        messages.error(request, f"{wording.plural(len(refused), 'island')} left as they were: {refused[0]}{more}")
