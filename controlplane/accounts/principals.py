"""Who is asking, in one project: a token or a person, reduced to what views need to decide."""

from __future__ import annotations

from dataclasses import dataclass

from django.contrib.auth.models import AbstractBaseUser
from django.db.models import Q

from controlplane.accounts.models import Membership, Token
from controlplane.fleet.models import Island
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
    if token.role != ISLAND:
        return None
    held = Q(token=token) | Q(next_token=token)
    known = Island.objects.select_related("run", "channel", "pin")
    return known.defer("channel__head_envelope", "pin__head_envelope").filter(held).first()


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
