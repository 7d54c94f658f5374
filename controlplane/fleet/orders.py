"""What an island is told with each heartbeat beside its challenges: which channel to follow, whether to drain, and its
next credential.

A credential that is being rotated has no secret that could be kept for it, so each heartbeat that comes with the old
one hands out a fresh secret; the first call with the new one ends the old.
"""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.db.models import F

from controlplane.accounts import credentials
from controlplane.accounts import services as accounts
from controlplane.accounts.models import Token
from controlplane.audit import services as audit
from controlplane.fleet.models import Island
from controlplane.fleet.pins import followed
from controlplane.registry import clock


def standing(island: Island, token: Token) -> dict[str, Any]:
    """The orders for an island whose heartbeat came with `token`."""
    drain = None
    if island.draining_since is not None:
        until = island.drain_until
        left = 0.0 if until is None else max(0.0, (until - clock.now()).total_seconds())
        drain = {"seconds_left": round(left, 1), "reason": island.drain_reason}
    return {"channel": followed(island).name, "drain": drain, "credential": _next_credential(island, token)}


def confirm(island: Island, token: Token) -> None:
    """The island has used its new credential: it takes the place of the old one, which ends now.

    Called for every request with such a token; does nothing for the one in place.
    """
    if island.next_token_id != token.pk:
        return
    old = island.token
    with transaction.atomic():
        rows = Island.objects.filter(pk=island.pk, next_token=token).update(
            token=token, next_token=None, rotation_asked_at=None, revision=F("revision") + 1
        )
        if rows == 1:
            if old is not None:
                accounts.revoke_token(old, actor=f"island:{island.name}")
            audit.record(
                island.project,
                f"island:{island.name}",
                "island.rotated",
                f"island {island.name}",
                before=None if old is None else {"key_id": old.key_id},
                after={"key_id": token.key_id},
            )
    island.refresh_from_db()


def _next_credential(island: Island, token: Token) -> str | None:
    """A fresh secret while a rotation is asked for and the island still comes with its old credential."""
    if island.rotation_asked_at is None or island.token_id != token.pk:
        return None
    with transaction.atomic():
        row = Island.objects.select_for_update(of=["self"]).select_related("next_token", "project").get(pk=island.pk)
        if row.rotation_asked_at is None or row.token_id != token.pk:
            return None
        if row.next_token is not None:
            return _another_secret(row.next_token)
        fresh, plaintext = accounts.create_token(row.project, Token.Role.ISLAND, row.name, actor=f"island:{row.name}")
        Island.objects.filter(pk=row.pk).update(next_token=fresh)
    return plaintext


def _another_secret(token: Token) -> str:
    fresh = credentials.new(credentials.BEARER)
    Token.objects.filter(pk=token.pk).update(key_id=fresh.key_id, digest=fresh.digest, pepper=fresh.pepper)
    return fresh.plaintext
