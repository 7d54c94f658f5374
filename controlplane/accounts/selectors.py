"""Reads of tokens and memberships."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.contrib.auth import get_user_model
from django.contrib.auth.models import AbstractBaseUser
from django.db.models import Count, Q, QuerySet
from django.db.models.functions import Now

from controlplane.accounts.models import Membership, Token
from controlplane.registry.errors import Missing
from controlplane.registry.models import Project

EXPIRING = timedelta(days=14)


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a token stands: `active`, `expiring` (within EXPIRING), `expired` or `revoked`, and one sentence."""

    state: str
    reason: str

    @property
    def works(self) -> bool:
        """True while it opens something."""
        return self.state in {"active", "expiring"}


def memberships(user: AbstractBaseUser) -> QuerySet[Membership]:
    """The projects of a person, by name."""
    return Membership.objects.filter(user_id=user.pk).select_related("project").order_by("project__name")


def members(project: Project) -> QuerySet[Membership]:
    """The people of a project, by user name."""
    return Membership.objects.filter(project=project).select_related("user", "project").order_by("user__username")


def member(project: Project, user_id: int) -> Membership:
    """One person's membership, by the number of the user. Raises Missing."""
    found = members(project).filter(user_id=user_id).first()
    if found is None:
        raise Missing("There is no such member in this project.")
    return found


def person(name: str) -> AbstractBaseUser:
    """A person by their exact user name, to be made a member. Raises Missing."""
    found = get_user_model().objects.filter(username=name, is_active=True).first()
    if found is None:
        raise Missing(f"There is no person {name}; an administrator of the server adds people.")
    return found


def tokens(project: Project, *, ended: bool = True) -> QuerySet[Token]:
    """The tokens of a project, newest first, credentials of islands among them; without `ended` those that work."""
    found = Token.objects.filter(project=project).select_related(
        "project", "run", "island", "next_island", "rotated_from"
    )
    if not ended:
        found = found.filter(Q(expires_at=None) | Q(expires_at__gt=Now()), revoked_at=None)
    return found.order_by("-id")


def token(project: Project, token_id: int) -> Token:
    """One token. Raises Missing."""
    found = tokens(project).filter(pk=token_id).first()
    if found is None:
        raise Missing("There is no such token in this project.")
    return found


def standing(token: Token, now: datetime) -> Standing:
    """What the row means at `now` (by the database's clock, see `registry.clock`)."""
    if token.revoked_at is not None:
        return Standing("revoked", "It was revoked and opens nothing any more.")
    if token.expires_at is None:
        return Standing("active", "It does not expire.")
    left = token.expires_at - now
    if left <= timedelta(0):
        return Standing("expired", "It has expired; create a new one.")
    if left <= EXPIRING:
        return Standing("expiring", f"It expires in {_span(left)}; rotate it before.")
    return Standing("active", f"It expires in {_span(left)}.")


def expiring(project: Project) -> QuerySet[Token]:
    """The tokens that work now and stop within EXPIRING, the next one first, for the list of what needs attention.

    Tokens that were rotated are meant to end and are left out.
    """
    soon = Q(expires_at__gt=Now(), expires_at__lte=Now() + EXPIRING)
    return tokens(project).filter(soon, revoked_at=None, rotated_to=None).order_by("expires_at")


def peppers_in_use() -> dict[int, int]:
    """Tokens that still work, per number of their pepper: a pepper with none may be taken out of service."""
    working = Token.objects.filter(Q(expires_at=None) | Q(expires_at__gt=Now()), revoked_at=None)
    return dict(working.values_list("pepper").annotate(Count("id")).order_by("pepper"))


def _span(left: timedelta) -> str:
    hours = left.total_seconds() / 3600
    if hours < 1:
        return f"{max(1, int(hours * 60))} min"
    return f"{int(hours)} h" if hours < 48 else f"{int(hours / 24)} days"
