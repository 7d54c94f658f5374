"""Does a create once per key, and answers it the same every time.

The row of the key is inserted before the work and in its transaction. A second request with the key therefore waits
at the unique index until the first one has ended, and then gets its answer; when the first one failed, or its process
died, nothing is left of it and the second one does the work. A refusal changes nothing and is not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import IntegrityError, OperationalError, connection, transaction
from django.db.models.functions import Now

from controlplane.idempotency.models import Reply
from controlplane.registry.errors import Refusal
from controlplane.registry.models import Project

KEPT = timedelta(hours=24)
WAIT_SECONDS = 5
_LOCK_NOT_AVAILABLE = "55P03"


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and body of an answer; `again` when the work was done by an earlier request."""

    status: int
    body: Any
    again: bool = False


def once(
    project: Project,
    principal: str,
    key: str,
    fingerprint: str,
    work: Callable[[], Answer],
    *,
    secret: bool = False,
) -> Answer:
    """The answer of `work`, now or from before. With `secret` the body is not kept.

    Raises Refusal `idempotency_mismatch` (the key came with another request), `idempotency_in_progress` (the first
    one still runs), `secret_shown` (the first one's answer held a secret), and whatever `work` raises.
    """
    with transaction.atomic():
        reply = _claim(project, principal, key, fingerprint)
        if reply is None:
            return _repeat(project, principal, key, fingerprint)
        answer = work()
        body = None if secret else answer.body
        Reply.objects.filter(pk=reply.pk).update(status=answer.status, body=body)
    return answer


def forget_old() -> int:
    """The sweeper: drops answers that are older than a day; returns how many."""
    return Reply.objects.filter(created_at__lt=Now() - KEPT).delete()[0]


def _claim(project: Project, principal: str, key: str, fingerprint: str) -> Reply | None:
    """The row of a key that was free, or whose time has run out; None for one that has an answer.

    Waits while another transaction holds the key.
    """
    Reply.objects.filter(project=project, principal=principal, key=key, created_at__lt=Now() - KEPT).delete()
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT set_config('lock_timeout', %s, true)", [f"{WAIT_SECONDS}s"])
            reply = Reply.objects.create(project=project, principal=principal, key=key, fingerprint=fingerprint)
            cursor.execute("SET LOCAL lock_timeout TO DEFAULT")
    except IntegrityError:
        return None
    except OperationalError as error:
        if getattr(error.__cause__, "sqlstate", "") != _LOCK_NOT_AVAILABLE:
            raise
        refusal = Refusal(
            "The first request with this Idempotency-Key still runs; ask again in a moment.",
            code="idempotency_in_progress",
        )
        refusal.headers["Retry-After"] = "1"
        raise refusal from error
    return reply


def _repeat(project: Project, principal: str, key: str, fingerprint: str) -> Answer:
    reply = Reply.objects.get(project=project, principal=principal, key=key)
    if reply.fingerprint != fingerprint:
        raise Refusal(
            "This Idempotency-Key came with another request before; use a new key for a new request.",
            code="idempotency_mismatch",
            status=422,
        )
    if reply.body is None:
        raise Refusal(
            "The first request with this Idempotency-Key was done; its secret was shown once and is not kept, so "
            "revoke what it made and create another under a new key.",
            code="secret_shown",
        )
    return Answer(reply.status or 200, reply.body, again=True)
