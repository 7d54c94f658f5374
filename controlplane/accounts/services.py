"""Writes of tokens and memberships, and the check of a bearer token."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.conf import settings
from django.contrib.auth.models import AbstractBaseUser
from django.db import transaction
from django.db.models import Q, QuerySet
from django.db.models.functions import Least, Now

from controlplane.accounts import credentials
from controlplane.accounts.models import Membership, Token
from controlplane.audit import services as audit
from controlplane.prepared import Prepared
from controlplane.registry.errors import Refusal
from controlplane.registry.models import Project, Run

USED_EVERY = timedelta(minutes=1)  # last_used_at is no finer than this, so that reading costs no write per request
OVERLAP = timedelta(hours=24)


class LastAdmin(Refusal):
    """Nobody would be left who may manage the project's people and keys."""

    code = "last_admin"


class TokenEnded(Refusal):
    """The token has expired, was revoked or has been rotated already."""

    code = "token_ended"


def create_token(
    project: Project,
    role: str,
    name: str,
    *,
    actor: str,
    lifetime: timedelta | None = None,
    run: Run | None = None,
) -> tuple[Token, str]:
    """A new bearer token; the second value is its text, which is shown once. With `run` it opens that run alone."""
    with transaction.atomic():
        token, plaintext = _new(project, role, name, actor=actor, lifetime=lifetime, run=run)
        audit.record(project, actor, "token.create", f"token {name}", after=_facts(token))
    return token, plaintext


def rotate_token(
    token: Token, *, actor: str, overlap: timedelta = OVERLAP, lifetime: timedelta | None = None
) -> tuple[Token, str]:
    """A new secret for the holder of a token: a new row with the same role, scope and name, and its text, shown once.

    The old secret goes on working for `overlap`, and never longer than it would have. `lifetime` is that of the new one
    (None: no expiry). Raises TokenEnded when the old one works no more or has been rotated already; Refusal
    `island_token` for the credential of an island, which is rotated with its island.
    """
    if token.role == Token.Role.ISLAND:
        raise Refusal("An island's credential is rotated on the island's own page.", code="island_token")
    with transaction.atomic():
        rows = _living(token).filter(rotated_to=None).update(expires_at=Least("expires_at", Now() + overlap))
        if rows != 1:
            raise TokenEnded("This token works no more or has been rotated already; create a new one.")
        before = _facts(token)
        fresh, plaintext = _new(
            token.project, token.role, token.name, actor=actor, lifetime=lifetime, run=token.run, rotated_from=token
        )
        token.refresh_from_db()
        after = {**_facts(fresh), "old_expires_at": _text(token.expires_at)}
        audit.record(token.project, actor, "token.rotate", f"token {token.name}", before=before, after=after)
    return fresh, plaintext


def revoke_token(token: Token, *, actor: str) -> None:
    """Ends a token at once; doing it again changes nothing."""
    with transaction.atomic():
        if Token.objects.filter(pk=token.pk, revoked_at=None).update(revoked_at=Now()):
            audit.record(token.project, actor, "token.revoke", f"token {token.name}", before=_facts(token))
    token.refresh_from_db()


def set_membership(user: AbstractBaseUser, project: Project, role: str, *, actor: str) -> Membership:
    """Gives a person a role in a project, in place of an earlier one. Raises LastAdmin."""
    with transaction.atomic():
        Project.objects.select_for_update().get(pk=project.pk)  # two admins who demote each other take turns
        earlier = Membership.objects.filter(user_id=user.pk, project=project).first()
        if earlier is not None and role != Membership.Role.ADMIN:
            _keep_an_admin(earlier)
        membership, _ = Membership.objects.update_or_create(user_id=user.pk, project=project, defaults={"role": role})
        if earlier is None or earlier.role != role:
            audit.record(
                project,
                actor,
                "member.set",
                f"user {user.get_username()}",
                before=None if earlier is None else {"role": earlier.role},
                after={"role": role},
            )
    return membership


def remove_member(membership: Membership, *, actor: str) -> None:
    """Takes a person out of a project at once; their sessions stay, and open nothing here. Raises LastAdmin."""
    project, name = membership.project, membership.user.get_username()
    with transaction.atomic():
        Project.objects.select_for_update().get(pk=project.pk)
        _keep_an_admin(membership)
        if Membership.objects.filter(pk=membership.pk).delete()[0]:
            audit.record(project, actor, "member.remove", f"user {name}", before={"role": membership.role})


def _keep_an_admin(membership: Membership) -> None:
    """The caller holds the project's row."""
    admins = Membership.objects.filter(project=membership.project, role=Membership.Role.ADMIN, user__is_active=True)
    if admins.filter(pk=membership.pk).exists() and not admins.exclude(pk=membership.pk).exists():
        raise LastAdmin("This is the project's last admin; make somebody else one first.")


def _new(project: Project, role: str, name: str, **facts: Any) -> tuple[Token, str]:
    """The row alone, for callers that write the audit log themselves."""
    fresh = credentials.new(credentials.BEARER)
    lifetime = facts.pop("lifetime")
    token = Token.objects.create(
        project=project,
        role=role,
        name=name,
        created_by=facts.pop("actor")[:120],
        key_id=fresh.key_id,
        digest=fresh.digest,
        pepper=fresh.pepper,
        expires_at=None if lifetime is None else Now() + lifetime,
        **facts,
    )
    token.refresh_from_db()
    return token, fresh.plaintext


def _facts(token: Token) -> dict[str, Any]:
    return {
        "role": token.role,
        "run": None if token.run is None else token.run.name,
        "key_id": token.key_id,
        "expires_at": _text(token.expires_at),
    }


def _text(moment: Any) -> str | None:
    return None if moment is None else str(moment.isoformat())


def _living(token: Token) -> Any:
    alive = Q(expires_at=None) | Q(expires_at__gt=Now())
    return Token.objects.filter(alive, pk=token.pk, revoked_at=None)


def _with_key(key_id: str) -> QuerySet[Token]:
    found = (
        Token.objects.select_related("project", "run")
        .filter(key_id=key_id, revoked_at=None)
        .filter(Q(expires_at=None) | Q(expires_at__gt=Now()))
        .annotate(used_lately=Q(last_used_at__gte=Now() - USED_EVERY))
    )
    return found.order_by()


_BY_KEY = Prepared(_with_key, "a key")  # every request with a token comes by here


def authenticate_token(plaintext: str) -> Token | None:
    """The token that this text opens, with its project and island; None when it is wrong, expired or revoked."""
    parts = credentials.split(plaintext, credentials.BEARER)
    if parts is None:
        return None
    key_id, secret = parts
    token = next(iter(_BY_KEY.rows(key_id)), None)
    if token is None or not credentials.matches(secret, token.digest, token.pepper):
        return None
    if token.pepper != max(settings.MAILBOAT_PEPPERS):  # the only moment at which the secret is known again
        Token.objects.filter(pk=token.pk, digest=token.digest).update(**credentials.again(secret))
    if not getattr(token, "used_lately"):  # noqa: B009  an annotation
        Token.objects.filter(pk=token.pk).update(last_used_at=Now())
    return token
