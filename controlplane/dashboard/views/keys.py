"""Publishers' keys of a run: registered and revoked on the run's page. Private halves never come near it."""

from __future__ import annotations

import re
import uuid

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_POST

from controlplane.dashboard.access import PageRequest, member, operator
from controlplane.registry import keys
from controlplane.registry import selectors as registry
from controlplane.registry.errors import Refusal

PUBLIC = re.compile(r"[0-9a-f]{64}")
LONGEST = 300


@require_POST
@member
@operator
def register(request: PageRequest, run: str) -> HttpResponse:
    """A further key; from the first one on, the run takes signed versions only."""
    found = registry.run(request.seat.project, run)
    public, name = request.POST.get("public_key", "").strip().lower(), request.POST.get("name", "").strip()[:80]
    if not PUBLIC.fullmatch(public):
        messages.error(request, "A public key has 64 hex digits; `mailboat keys show` prints it.")
    else:
        try:
            key, new = keys.register(found, public, name, actor=request.user.get_username())
            messages.success(request, f"The key {key.name} is registered." if new else "The run has this key already.")
        except Refusal as refusal:
            messages.error(request, refusal.detail)
    return redirect("dashboard:run", request.seat.project.slug, run)


@require_POST
@member
@operator
def revoke(request: PageRequest, run: str, key: uuid.UUID) -> HttpResponse:
    """The end of a key, once its name was typed and a reason given."""
    found = keys.key(registry.run(request.seat.project, run), key)
    reason = request.POST.get("reason", "").strip()[:LONGEST]
    if request.POST.get("typed", "").strip() != found.name:
        messages.error(request, f"Type the key's name, {found.name}, to confirm.")
    elif not reason:
        messages.error(request, "Say why the key is revoked; whoever meets it again will read it.")
    else:
        keys.revoke(found, reason, actor=request.user.get_username())
        messages.success(request, f"The key {found.name} is revoked for good.")
    return redirect("dashboard:run", request.seat.project.slug, run)
