"""Roles of a request, decided once per request from the address and the caller."""

from __future__ import annotations

from typing import Any

from rest_framework.exceptions import MethodNotAllowed, PermissionDenied
from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from controlplane.accounts.models import Token
from controlplane.accounts.principals import Principal
from controlplane.api.authentication import TokenHolder, principal
from controlplane.registry import selectors
from controlplane.registry.errors import Missing
from controlplane.registry.models import Project, Run


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
        require_role(view.caller, view.roles[method])
        return True


def require_role(caller: Principal, roles: frozenset[str]) -> None:
    """Raises PermissionDenied unless the caller has one of the roles."""
    if caller.role not in roles:
        raise PermissionDenied(f"The role {caller.role} may not do this; it needs {' or '.join(sorted(roles))}.")


def run_for(caller: Principal, name: str) -> Run:
    """A run that the caller may see. Raises Missing."""
    project: Project = caller.project
    run = selectors.run(project, name)
    if not caller.may_see_run(run):
        raise Missing(f"There is no run {name} in this project.")
    return run
