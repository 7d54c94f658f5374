"""Who is asking, in one project: a token or a person, reduced to what views need to decide."""

from __future__ import annotations

from dataclasses import dataclass

from django.contrib.auth.models import AbstractBaseUser

from controlplane.accounts.models import Membership, Token
from controlplane.fleet.models import Island
from controlplane.registry.models import Project, Run

VIEWER, OPERATOR, ADMIN, PUBLISHER, ISLAND = "viewer", "operator", "admin", "publisher", "island"
READERS = frozenset({VIEWER, OPERATOR, ADMIN, PUBLISHER})
FOLLOWERS = READERS | {ISLAND}  # may read what an island needs of its own run
OPERATORS = frozenset({OPERATOR, ADMIN})
PUBLISHERS = frozenset({PUBLISHER})


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller. `actor` is how the audit log names it; `island` is set for the credential of an island."""

    project: Project
    role: str
    actor: str
    island: Island | None = None

    def may_see_run(self, run: Run) -> bool:
        """Islands see their own run and nothing else; everybody else sees the runs of the project."""
        if self.role == ISLAND:
            return self.island is not None and self.island.run_id == run.pk
        return run.project_id == self.project.pk


def of_token(token: Token, slug: str) -> Principal | None:
    """The caller behind a token, or None when the project is not its own."""
    if token.project.slug != slug:
        return None
    island = getattr(token, "island", None) if token.role == ISLAND else None
    name = island.name if island else token.name
    return Principal(token.project, token.role, f"{token.role}:{name}", island)


def of_person(user: AbstractBaseUser, slug: str) -> Principal | None:
    """The caller behind a session, or None when the person is no member of the project."""
    membership = Membership.objects.select_related("project").filter(user_id=user.pk, project__slug=slug).first()
    if membership is None:
        return None
    return Principal(membership.project, membership.role, user.get_username())
