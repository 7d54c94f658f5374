"""Roles of a request, decided once per request from the address and the caller."""

from __future__ import annotations

from typing import Any

from rest_framework.exceptions import MethodNotAllowed, PermissionDenied
from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from controlplane.accounts.models import Token
from controlplane.accounts.principals import Principal
from controlplane.api.authentication import TokenHolder, principal
from controlplane.fleet import pins
from controlplane.registry import selectors
from controlplane.registry.errors import Missing, Refusal
from controlplane.registry.models import Channel, Project, Run


class AwaitingApproval(Refusal):
    """A self-enrolled island may ask for its own status and nothing else."""

    status = 403
    code = "awaiting_approval"

    def __init__(self) -> None:
        super().__init__("An operator has to approve this island's key first; it may ask for its status meanwhile.")


class OtherChannel(Refusal):
    """An island asks for a channel that it does not follow now: it was pinned, or is not pinned any more."""

    code = "other_channel"


class RolePermission(BasePermission):
    """Asks the view's `roles` (method -> roles) and leaves the caller in `view.caller`."""

    def has_permission(self, request: Request, view: Any) -> bool:
        """True, or one of NotAuthenticated (401), Missing (404), PermissionDenied (403)."""
        user: Any = request.user
        token: Token | None = user.token if isinstance(user, TokenHolder) else None
        view.caller = principal(view.kwargs["project"], token, user)
        method = "GET" if request.method == "HEAD" else str(request.method)
        if method not in view.roles:
            raise MethodNotAllowed(method)
        require_role(view.caller, view.roles[method], pending=view.open_to_pending)
        if view.caller.run is not None and "run" not in view.kwargs and not view.open_to_scoped:
            raise PermissionDenied(f"This token is for run {view.caller.run.name} alone.")
        return True


def require_role(caller: Principal, roles: frozenset[str], *, pending: bool = False) -> None:
    """Raises PermissionDenied unless the caller has one of the roles, AwaitingApproval for an island that was not
    approved yet, except where `pending` ones may come.
    """
    if caller.island is not None and caller.island.pending and not pending:
        raise AwaitingApproval
    if caller.role not in roles:
        raise PermissionDenied(f"The role {caller.role} may not do this; it needs {' or '.join(sorted(roles))}.")


def channel_for(caller: Principal, run: Run, name: str) -> Channel:
    """A channel that the caller may follow now. Raises Missing, and OtherChannel for an island that has to follow
    another one.
    """
    if caller.island is not None:
        follows = pins.followed(caller.island).name
        own = {caller.island.channel.name, pins.channel_name(caller.island)}
        if name != follows and name in own:
            raise OtherChannel(f"This island follows the channel {follows} now.", channel=follows)
    return selectors.channel(run, name)


def run_for(caller: Principal, name: str) -> Run:
    """A run that the caller may see. Raises Missing."""
    if caller.island is not None and caller.island.run.name == name:
        return caller.island.run
    project: Project = caller.project
    run = selectors.run(project, name)
    if not caller.may_see_run(run):
        raise Missing(f"There is no run {name} in this project.")
    return run
