"""Who may see which page. A project that is not the reader's does not exist for them (404); a button that their role
lacks is absent, and its address answers 403. Views must never look at memberships themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import update_wrapper, wraps
from typing import Concatenate, ParamSpec

from django.conf import settings
from django.contrib.auth.models import AbstractBaseUser, AnonymousUser, User
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import BadRequest, PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.urls import reverse
from django_htmx.http import HttpResponseClientRedirect
from django_htmx.middleware import HtmxDetails

from controlplane.accounts import selectors as accounts
from controlplane.accounts.principals import ADMINS, OPERATORS
from controlplane.registry.errors import Missing
from controlplane.registry.models import Project

P = ParamSpec("P")


class PageRequest(HttpRequest):
    """What the middleware and `member` add to a request."""

    user: User  # `member` has sent everybody else to the door
    htmx: HtmxDetails
    seat: Seat


@dataclass(frozen=True, slots=True)
class Seat:
    """A reader's place in a project."""

    project: Project
    role: str
    projects: tuple[Project, ...]

    @property
    def operates(self) -> bool:
        """True when the reader may change things."""
        return self.role in OPERATORS and not settings.MAILBOAT_READ_ONLY

    @property
    def administers(self) -> bool:
        """True when the reader may change who may do what."""
        return self.role in ADMINS and not settings.MAILBOAT_READ_ONLY


def sign_in(request: HttpRequest) -> HttpResponse:
    """Send a reader without a session to the door; a polling fragment takes its whole page along."""
    target = redirect_to_login(request.get_full_path())
    if getattr(request, "htmx", False):
        page = request.htmx.current_url_abs_path or reverse("dashboard:home")  # type: ignore[attr-defined]
        return HttpResponseClientRedirect(redirect_to_login(page).url)
    return target


View = Callable[Concatenate[PageRequest, P], HttpResponseBase]


def member(view: View[P]) -> Callable[..., HttpResponseBase]:
    """Resolve the project of the address once and put the reader's `seat` on the request; what is missing is 404.

    A zero character in the query is 400: PostgreSQL refuses texts with one, in whatever filter it is.
    """

    @wraps(view)
    def inner(request: PageRequest, project: str, *args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
        visitor: AbstractBaseUser | AnonymousUser = request.user
        if isinstance(visitor, AnonymousUser):
            return sign_in(request)
        mine = list(accounts.memberships(visitor))
        seat = next((m for m in mine if m.project.slug == project), None)
        if seat is None:
            raise Http404("no such project")
        request.seat = Seat(seat.project, seat.role, tuple(m.project for m in mine))
        if any("\0" in value for _, values in request.GET.lists() for value in values):
            raise BadRequest("A zero character stands in the address; no text here has one.")
        try:
            return view(request, *args, **kwargs)
        except Missing as missing:
            raise Http404(missing.detail) from missing

    return inner


def operator(view: View[P]) -> View[P]:
    """Refuse with 403 what the reader's role may not do. Stands inside `member`."""

    def inner(request: PageRequest, /, *args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
        if not request.seat.operates:
            raise PermissionDenied(_refusal("Your role in this project only allows reading."))
        return view(request, *args, **kwargs)

    update_wrapper(inner, view)
    return inner


def admin(view: View[P]) -> View[P]:
    """Refuse with 403 what only admins of the project may do. Stands inside `member`."""

    def inner(request: PageRequest, /, *args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
        if not request.seat.administers:
            raise PermissionDenied(_refusal("Only an admin of this project may change its people and keys."))
        return view(request, *args, **kwargs)

    update_wrapper(inner, view)
    return inner


def _refusal(otherwise: str) -> str:
    return "The dashboard is read-only at the moment." if settings.MAILBOAT_READ_ONLY else otherwise
