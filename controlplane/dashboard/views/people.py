"""People and their roles in a project."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_POST, require_safe

from controlplane.accounts import selectors, services
from controlplane.accounts.models import Membership
from controlplane.dashboard.access import PageRequest, admin, member
from controlplane.dashboard.pages import page
from controlplane.registry.errors import Missing, Refusal

ROLES = (
    (Membership.Role.VIEWER.value, "reads everything"),
    (Membership.Role.OPERATOR.value, "steers islands, channels and jobs too"),
    (Membership.Role.ADMIN.value, "manages people and keys too"),
)


@require_safe
@member
def people(request: PageRequest) -> HttpResponse:
    """Who is in the project, and as what."""
    context = {"members": list(selectors.members(request.seat.project)), "roles": ROLES}
    return page(request, "dashboard/people.html", context, title="People", tab="people", live=False)


@require_POST
@member
@admin
def set_role(request: PageRequest) -> HttpResponse:
    """Add a person by their name, or change the role of one who is here."""
    name, role = request.POST.get("name", "").strip(), request.POST.get("role", "")
    try:
        if role not in Membership.Role.values:
            raise Refusal("Choose one of the roles.")
        services.set_membership(selectors.person(name), request.seat.project, role, actor=request.user.get_username())
    except (Missing, Refusal) as refusal:
        messages.error(request, refusal.detail)
    else:
        messages.success(request, f"{name} is {role} of this project.")
    return redirect("dashboard:people", request.seat.project.slug)


@require_POST
@member
@admin
def remove(request: PageRequest, person: int) -> HttpResponse:
    """Take somebody out of the project."""
    found = selectors.member(request.seat.project, person)
    name = found.user.get_username()
    if request.POST.get("typed", "").strip() != name:
        messages.error(request, f"Type the person's name, {name}, to confirm.")
        return redirect("dashboard:people", request.seat.project.slug)
    try:
        services.remove_member(found, actor=request.user.get_username())
    except Refusal as refusal:
        messages.error(request, refusal.detail)
    else:
        messages.success(request, f"{name} is no member of this project any more.")
    if found.user_id == request.user.pk:
        return redirect("dashboard:home")
    return redirect("dashboard:people", request.seat.project.slug)
