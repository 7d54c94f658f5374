"""Who is asking, in one project: a token or a person, reduced to what views need to decide."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from django.contrib.auth.models import AbstractBaseUser
from django.db.models import Q, QuerySet
from django.db.models.functions import Now

from controlplane.accounts.models import Membership, Token
from controlplane.fleet.models import Island
from controlplane.prepared import Prepared
from controlplane.registry.models import Project, Run

VIEWER, OPERATOR, ADMIN, PUBLISHER, ISLAND = "viewer", "operator", "admin", "publisher", "island"
READERS = frozenset({VIEWER, OPERATOR, ADMIN, PUBLISHER})
FOLLOWERS = READERS | {ISLAND}  # may read what an island needs of its own run
OPERATORS = frozenset({OPERATOR, ADMIN})
ADMINS = frozenset({ADMIN})
PEOPLE = frozenset({VIEWER, OPERATOR, ADMIN})
PUBLISHERS = frozenset({PUBLISHER})


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller. `actor` is how the audit log names it; `island` is set for the credential of an island."""

    project: Project
    role: str
    actor: str
    island: Island | None = None
    run: Run | None = None  # the only run that a scoped token opens

    def may_see_run(self, run: Run) -> bool:
        """Islands see their own run and nothing else; everybody else sees the runs of the project."""
        if self.role == ISLAND:
            return self.island is not None and self.island.run_id == run.pk
        return run.project_id == self.project.pk and (self.run is None or self.run.pk == run.pk)


def island_of(token: Token) -> Island | None:
    """The island whose credential this is, or is about to be."""
    return next(iter(_BY_TOKEN.rows(token.pk)), None) if token.role == ISLAND else None


def _holders(token: int) -> QuerySet[Island]:
    held = Q(token=token) | Q(next_token=token)
    known = Island.objects.select_related("run", "channel", "pin")
    return known.defer("channel__head_envelope", "pin__head_envelope").filter(held).order_by()


_BY_TOKEN = Prepared(_holders, -1)


Stamp = tuple[object, ...]
_STAMP = (
    "pk", "role", "project", "run",
    "island__pk", "island__revision", "island__pending", "island__channel", "island__pin",
)  # fmt: skip


def stamp(token: Token, island: Island | None) -> Stamp:
    """All that a decision about a token's holder rests on, the token's number first."""
    own = (token.pk, token.role, token.project_id, token.run_id)
    if island is None:
        return (*own, None, None, None, None, None)
    return (*own, island.pk, island.revision, island.pending, island.channel_id, island.pin_id)


def stamps(tokens: Iterable[int]) -> frozenset[Stamp]:
    """The stamps of those among these tokens that still open anything, in one query."""
    living = Q(expires_at=None) | Q(expires_at__gt=Now())
    found = Token.objects.filter(living, pk__in=list(tokens), revoked_at=None)
    return frozenset(found.values_list(*_STAMP))


def of_token(token: Token, slug: str) -> Principal | None:
    """The caller behind a token, or None when the project is not its own."""
    if token.project.slug != slug:
        return None
    island = island_of(token)
    name = island.name if island else token.name
    return Principal(token.project, token.role, f"{token.role}:{name}", island, token.run)


def of_person(user: AbstractBaseUser, slug: str) -> Principal | None:
    """The caller behind a session, or None when the person is no member of the project."""
    membership = Membership.objects.select_related("project").filter(user_id=user.pk, project__slug=slug).first()
    if membership is None:
        return None
    return Principal(membership.project, membership.role, user.get_username())
