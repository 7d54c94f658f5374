"""Writes of tokens and memberships, and the check of a bearer token."""

from __future__ import annotations

from datetime import timedelta

from django.contrib.auth.models import AbstractBaseUser
from django.db import transaction
from django.db.models import Q
from django.db.models.functions import Now

from controlplane.accounts import credentials
from controlplane.accounts.models import Membership, Token
from controlplane.audit import services as audit
from controlplane.registry.models import Project

USED_EVERY = timedelta(minutes=1)  # last_used_at is no finer than this, so that reading costs no write per request


def create_token(
    project: Project, role: str, name: str, *, actor: str, lifetime: timedelta | None = None
) -> tuple[Token, str]:
    """A new bearer token; the second value is its text, which is shown once."""
    fresh = credentials.new(credentials.BEARER)
    with transaction.atomic():
        token = Token.objects.create(
            project=project,
            role=role,
            name=name,
            key_id=fresh.key_id,
            digest=fresh.digest,
            pepper=fresh.pepper,
            expires_at=None if lifetime is None else Now() + lifetime,
        )
        audit.record(project, actor, "token.create", f"token {name}", after={"role": role, "key_id": fresh.key_id})
    token.refresh_from_db()
    return token, fresh.plaintext


def revoke_token(token: Token, *, actor: str) -> None:
    """Ends a token at once; doing it again changes nothing."""
    with transaction.atomic():
        if Token.objects.filter(pk=token.pk, revoked_at=None).update(revoked_at=Now()):
            audit.record(token.project, actor, "token.revoke", f"token {token.name}", before={"key_id": token.key_id})
    token.refresh_from_db()


def set_membership(user: AbstractBaseUser, project: Project, role: str, *, actor: str) -> Membership:
    """Gives a person a role in a project, in place of an earlier one."""
    with transaction.atomic():
        earlier = Membership.objects.filter(user_id=user.pk, project=project).first()
        membership, _ = Membership.objects.update_or_create(user_id=user.pk, project=project, defaults={"role": role})
        audit.record(
            project,
            actor,
            "member.set",
            f"user {user.get_username()}",
            before=None if earlier is None else {"role": earlier.role},
            after={"role": role},
        )
    return membership


def authenticate_token(plaintext: str) -> Token | None:
    """The token that this text opens, with its project and island; None when it is wrong, expired or revoked."""
    parts = credentials.split(plaintext, credentials.BEARER)
    if parts is None:
        return None
    key_id, secret = parts
    token = (
        Token.objects.select_related("project", "island__run", "island__channel")
        .filter(key_id=key_id, revoked_at=None)
        .filter(Q(expires_at=None) | Q(expires_at__gt=Now()))
        .first()
    )
    if token is None or not credentials.matches(secret, token.digest, token.pepper):
        return None
    stale = Q(last_used_at=None) | Q(last_used_at__lt=Now() - USED_EVERY)
    Token.objects.filter(stale, pk=token.pk).update(last_used_at=Now())
    return token
