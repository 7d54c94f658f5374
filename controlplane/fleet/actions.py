"""What operators do to an island: approve, enable, drain, rotate, revoke, remove. Pins have a module of their own.

Each is one conditional UPDATE over the revision that the operator saw (`seen`; None: whichever it is) and leaves an
audit entry with what was before and after. An order that changes nothing leaves none. Nothing here waits for the
island: it learns of its orders with its next heartbeat.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import F
from django.db.models.functions import Coalesce, Now

from controlplane.accounts import services as accounts
from controlplane.audit import services as audit
from controlplane.fleet import pins
from controlplane.fleet.models import Island
from controlplane.registry.errors import Changed, Refusal, WrongState
from mailboat.identity import fingerprint as fingerprint_of

DRAIN_DEADLINE = timedelta(minutes=10)
REASON = 1000


class FingerprintMismatch(Refusal):
    """The fingerprint that the operator compared is not that of the waiting key."""

    code = "fingerprint_mismatch"


def approve(island: Island, fingerprint: str, *, actor: str, seen: int | None = None) -> Island:
    """Lets a self-enrolled island in. `fingerprint` is what the operator read on the machine (`SHA256:...`).

    Raises FingerprintMismatch, WrongState when the island is not waiting, Changed.
    """
    if not island.pending:
        raise WrongState(f"The island {island.name} does not wait for an approval.")
    if not hmac.compare_digest(fingerprint.strip().encode(), fingerprint_of(island.public_key).encode()):
        raise FingerprintMismatch(
            f"This is not the fingerprint of the key that {island.name} enrolled with; compare it on the machine."
        )
    return _order(
        island,
        "island.approve",
        {"pending": False, "approved_by": actor[:120]},
        actor=actor,
        seen=seen,
        kept=("pending",),
    )


def set_enabled(island: Island, enabled: bool, *, reason: str = "", actor: str, seen: int | None = None) -> Island:
    """Lets an island follow its channel, or stops it from doing so; an island that failed a challenge is stopped with
    evidence. Raises Changed.
    """
    changes = {"enabled": enabled, "disabled_reason": "" if enabled else reason[:REASON]}
    action = "island.enable" if enabled else "island.disable"
    return _order(island, action, changes, actor=actor, seen=seen, reason=reason)


def drain(
    island: Island,
    *,
    deadline: timedelta = DRAIN_DEADLINE,
    reason: str = "",
    actor: str,
    seen: int | None = None,
) -> Island:
    """Asks an island to take no new requests. What still runs at the deadline is given up.

    Its progress is the number of active requests that its heartbeats report. Draining again sets a new deadline. Raises
    Changed.
    """
    changes = {
        "draining_since": island.draining_since or Now(),
        "drain_until": Now() + deadline,
        "drain_reason": reason[:REASON],
    }
    return _order(island, "island.drain", changes, actor=actor, seen=seen, kept=("drain_until",), reason=reason)


def stop_drain(island: Island, *, actor: str, seen: int | None = None) -> Island:
    """Takes a drain back: the island takes requests again. Raises Changed."""
    changes: dict[str, Any] = {"draining_since": None, "drain_until": None, "drain_reason": ""}
    return _order(island, "island.stop_drain", changes, actor=actor, seen=seen, kept=("drain_until",))


def rotate_credential(island: Island, *, actor: str, seen: int | None = None) -> Island:
    """Gives the island a new credential with its next heartbeat. The old one works until the new one was used.

    Raises WrongState for an island without a working credential, Changed.
    """
    if island.token is None or island.token.revoked_at is not None:
        raise WrongState(f"The island {island.name} has no working credential; enrol it again.")
    changes = {"rotation_asked_at": Coalesce("rotation_asked_at", Now())}  # asking again starts nothing anew
    return _order(island, "island.rotate", changes, actor=actor, seen=seen, kept=("rotation_asked_at",))


def revoke_credential(island: Island, *, reason: str = "", actor: str, seen: int | None = None) -> Island:
    """Ends the island's credentials at once: its next call, even one that waits now, is answered 401. It goes on
    serving what it holds. Raises Changed.
    """
    with transaction.atomic():
        for token in (island.token, island.next_token):
            if token is not None:
                accounts.revoke_token(token, actor=actor)
        return _order(
            island, "island.revoke", {"rotation_asked_at": None}, actor=actor, seen=seen, kept=(), reason=reason
        )


def remove(island: Island, *, actor: str, seen: int | None = None) -> None:
    """Forgets an island that can't come back: its credential was revoked, or its approval is refused. Its name is free
    again. Raises WrongState, Changed.
    """
    revoked = island.token is None or island.token.revoked_at is not None
    if not (revoked or island.pending):
        raise WrongState(f"Revoke the credential of {island.name} first; else it would come back.")
    with transaction.atomic():
        row = locked(island, seen)
        before = {"run": row.run.name, "pending": row.pending, "provider": row.provider, "region": row.region}
        if row.pin is not None:
            pins.release(row)
        for token in (row.token, row.next_token):
            if token is not None:
                token.delete()
        row.delete()
        audit.record(island.project, actor, "island.remove", f"island {island.name}", before=before)


def locked(island: Island, seen: int | None) -> Island:
    """The row, locked until the transaction ends. Raises Changed when it is not the one that was `seen`, or gone."""
    chosen = Island.objects.select_related("project", "run", "channel", "token", "next_token", "pin__version")
    row = chosen.select_for_update(of=["self"]).filter(pk=island.pk).first()
    if row is None or (seen is not None and row.revision != seen):
        raise Changed
    return row


def _order(
    island: Island,
    action: str,
    changes: Mapping[str, Any],
    *,
    actor: str,
    seen: int | None,
    kept: tuple[str, ...] | None = None,
    reason: str = "",
) -> Island:
    """Writes columns and the audit entry; `kept` are the columns that the entry shows (None: all of them). What is so
    already is left alone.
    """
    shown = tuple(changes) if kept is None else kept
    with transaction.atomic():
        row = locked(island, seen)
        if changes and all(getattr(row, name) == value for name, value in changes.items()) and shown:
            island.refresh_from_db()
            return island
        before = {name: _plain(getattr(row, name)) for name in shown}
        Island.objects.filter(pk=row.pk).update(**changes, revision=F("revision") + 1)
        row.refresh_from_db()
        after = {name: _plain(getattr(row, name)) for name in shown}
        if after != before or not shown:
            said = after | ({"reason": reason} if reason else {})
            audit.record(row.project, actor, action, f"island {row.name}", before=before, after=said)
    island.refresh_from_db()
    return island


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | str) else str(value)
