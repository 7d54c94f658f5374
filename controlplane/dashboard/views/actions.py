"""What operators do to one island. Each form carries the revision that its page showed; when the island was changed
meanwhile, nothing is overwritten and the page says so.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import timedelta

from django.contrib import messages
from django.http import Http404, HttpResponse, QueryDict
from django.shortcuts import redirect
from django.views.decorators.http import require_POST

from controlplane.dashboard.access import PageRequest, member, operator
from controlplane.fleet import selectors
from controlplane.fleet import services as fleet
from controlplane.fleet.models import Island
from controlplane.registry.errors import Changed, Refusal, Unacceptable

LONGEST_DRAIN = 24 * 60  # minutes


def _approve(island: Island, form: QueryDict, actor: str, seen: int | None) -> str:
    fleet.approve(island, form.get("fingerprint", ""), actor=actor, seen=seen)
    return f"{island.name} is approved; it begins to follow its channel with its next heartbeat."


def _enable(island: Island, _: QueryDict, actor: str, seen: int | None) -> str:
    fleet.set_enabled(island, True, actor=actor, seen=seen)
    return f"{island.name} follows its channel again."


def _disable(island: Island, form: QueryDict, actor: str, seen: int | None) -> str:
    fleet.set_enabled(island, False, reason=form.get("reason", "").strip(), actor=actor, seen=seen)
    return f"{island.name} is disabled: it keeps what it holds and follows no more."


def _drain(island: Island, form: QueryDict, actor: str, seen: int | None) -> str:
    minutes = _whole(form.get("minutes", "10"))
    if minutes is None or not 0 < minutes <= LONGEST_DRAIN:
        raise Unacceptable(f"The deadline is a number of minutes from 1 to {LONGEST_DRAIN}.")
    reason = form.get("reason", "").strip()
    fleet.drain(island, deadline=timedelta(minutes=minutes), reason=reason, actor=actor, seen=seen)
    return f"{island.name} is asked to drain; it takes no new requests."


def _stop_drain(island: Island, _: QueryDict, actor: str, seen: int | None) -> str:
    fleet.stop_drain(island, actor=actor, seen=seen)
    return f"{island.name} takes requests again."


def _pin(island: Island, form: QueryDict, actor: str, seen: int | None) -> str:
    number = _whole(form.get("version", "").strip().removeprefix("v"))
    if number is None:
        raise Unacceptable("Name the version by its number.")
    fleet.pin(island, number, reason=form.get("reason", "").strip(), actor=actor, seen=seen)
    return f"{island.name} stays at version {number} until it is unpinned."


def _unpin(island: Island, _: QueryDict, actor: str, seen: int | None) -> str:
    fleet.unpin(island, actor=actor, seen=seen)
    return f"{island.name} follows {island.channel.name} again."


def _rotate(island: Island, _: QueryDict, actor: str, seen: int | None) -> str:
    fleet.rotate_credential(island, actor=actor, seen=seen)
    return "A new credential goes out with the next heartbeat; the old one works until the new one was used."


def _revoke(island: Island, form: QueryDict, actor: str, seen: int | None) -> str:
    _typed(island, form)
    fleet.revoke_credential(island, reason=form.get("reason", "").strip(), actor=actor, seen=seen)
    return f"The credential of {island.name} is revoked; its next call is answered 401."


def _remove(island: Island, form: QueryDict, actor: str, seen: int | None) -> str:
    _typed(island, form)
    fleet.remove(island, actor=actor, seen=seen)
    return f"{island.name} is removed; its name is free again."


ACTIONS: dict[str, Callable[[Island, QueryDict, str, int | None], str]] = {
    "approve": _approve,
    "enable": _enable,
    "disable": _disable,
    "drain": _drain,
    "stop-drain": _stop_drain,
    "pin": _pin,
    "unpin": _unpin,
    "rotate": _rotate,
    "revoke": _revoke,
    "remove": _remove,
}


@require_POST
@member
@operator
def act(request: PageRequest, island: uuid.UUID, action: str) -> HttpResponse:
    """Do it and go back to the island, or to the fleet when it is gone."""
    found = selectors.island(request.seat.project, island)
    if action not in ACTIONS:
        raise Http404("no such action")
    slug = request.seat.project.slug
    try:
        said = ACTIONS[action](found, request.POST, request.user.get_username(), _whole(request.POST.get("seen", "")))
    except Changed:
        messages.error(request, f"Somebody changed {found.name} meanwhile; look at it as it is now, then decide.")
    except Refusal as refusal:
        messages.error(request, refusal.detail)
    else:
        messages.success(request, said)
        if action == "remove":
            return redirect("dashboard:fleet", slug)
    return redirect("dashboard:island", slug, island)


def _typed(island: Island, form: QueryDict) -> None:
    if form.get("typed", "").strip() != island.name:
        raise Unacceptable(f"Type the island's name, {island.name}, to confirm.")


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None
