"""Reads of tokens and memberships."""

from __future__ import annotations

from django.contrib.auth.models import AbstractBaseUser
from django.db.models import QuerySet

from controlplane.accounts.models import Membership, Token
from controlplane.registry.models import Project


def memberships(user: AbstractBaseUser) -> QuerySet[Membership]:
    """The projects of a person, by name."""
    return Membership.objects.filter(user_id=user.pk).select_related("project").order_by("project__name")


def tokens(project: Project) -> QuerySet[Token]:
    """The tokens of a project, newest first."""
    return Token.objects.filter(project=project).select_related("island").order_by("-id")
