"""Writes of the fleet: heartbeats, sync reports, challenges. What an island claims is kept as a claim.

Enrolment, operators' actions, pins and orders have modules of their own; what other applications call is named here.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from django.db import connection, transaction
from django.db.models.functions import Now

from controlplane.fleet import measures
from controlplane.fleet.actions import (
    approve,
    drain,
    remove,
    revoke_credential,
    rotate_credential,
    set_enabled,
    stop_drain,
)
from controlplane.fleet.enrolment import (
    EnrolmentInvalid,
    EnrolmentUsed,
    KeyTaken,
    create_enrolment_token,
    enrol,
    enrolment_command,
    revoke_enrolment_token,
)
from controlplane.fleet.models import Challenge, Island, SyncReport
from controlplane.fleet.orders import confirm, standing
from controlplane.fleet.pins import pin, unpin
from controlplane.jobs import services as jobs
from controlplane.jobs.models import Job
from controlplane.registry import leases
from controlplane.registry.announcing import servable
from controlplane.registry.errors import Missing, WrongState
from controlplane.registry.models import Version

__all__ = [
    "EnrolmentInvalid",
    "EnrolmentUsed",
    "KeyTaken",
    "answer_challenge",
    "approve",
    "close_questions",
    "confirm",
    "create_enrolment_token",
    "drain",
    "enrol",
    "enrolment_command",
    "heartbeat",
    "open_challenge",
    "pin",
    "remove",
    "report_sync",
    "resolve",
    "revoke_credential",
    "revoke_enrolment_token",
    "rotate_credential",
    "set_enabled",
    "standing",
    "stop_drain",
    "unpin",
]

REPORTS_KEPT = 1000  # per island


def heartbeat(
    island: Island,
    *,
    version: int | None,
    digest: str,
    epoch: int | None,
    phase: str,
    reason: str,
    time: float | None = None,
    active_requests: int | None = None,
    members: Sequence[Mapping[str, Any]] = (),
    alarm: str | None = None,
    trusted_keys: Sequence[str] | None = None,
    agent_version: str = "",
) -> tuple[list[dict[str, Any]], bool]:
    """Records what an island says of itself, and returns the questions for it, and whether its report of what it holds
    is missing: it was lost, or a restore took it back. `standing` has its orders.

    `alarm` is what it refused as forged, replayed or expired (empty: nothing any more); None leaves what was said.
    """
    values = {
        "island": island.pk,
        "version": version,
        "digest": digest,
        "epoch": epoch,
        "phase": phase,
        "reason": reason[:1000],
        "time": time,
        "active": active_requests,
        "members": json.dumps([{**member, "reason": member["reason"][:1000]} for member in members]),
        "alarm": None if alarm is None else alarm[:1000],
        "keys": None if trusted_keys is None else json.dumps(list(trusted_keys)),
        "agent": agent_version[:40],
    }
    with connection.cursor() as cursor:
        cursor.execute(_BEAT, values)
        found = cursor.fetchone()
    asked, unreported = found or (False, False)
    return _questions(island) if asked else [], unreported


# One statement, written once: a thousand islands that beat every ten seconds send a hundred of them each second. An
# alarm that goes on keeps the time at which it began; the agent may have been upgraded. A report is asked for only
# where it would be accepted, else an island whose version nobody knows would send it with each beat.
_BEAT = """
UPDATE fleet_island SET
    version_number = %(version)s, digest = %(digest)s, epoch = %(epoch)s, phase = %(phase)s, reason = %(reason)s,
    last_seen_at = statement_timestamp(),
    clock_skew_seconds = round((%(time)s::float8 - extract(epoch FROM statement_timestamp())::float8)::numeric, 3),
    active_requests = %(active)s, members = %(members)s::jsonb,
    alarm = coalesce(%(alarm)s::text, alarm),
    alarm_at = CASE WHEN %(alarm)s::text IS NULL THEN alarm_at
        WHEN %(alarm)s::text <> '' THEN coalesce(alarm_at, statement_timestamp()) END,
    trusted_keys = coalesce(%(keys)s::jsonb, trusted_keys),
    agent_version = coalesce(nullif(%(agent)s::text, ''), agent_version)
WHERE id = %(island)s
RETURNING EXISTS (SELECT FROM fleet_challenge WHERE island_id = fleet_island.id AND state = 'open'),
    EXISTS (
        SELECT FROM registry_version held
        WHERE held.run_id = fleet_island.run_id AND held.number = %(version)s AND held.state_digest = %(digest)s
            AND held.state IN ('ready', 'retired') AND held.id IS DISTINCT FROM fleet_island.verified_version_id
    )
"""


def _questions(island: Island) -> list[dict[str, Any]]:
    return [
        {
            "kind": "challenge",
            "challenge": str(challenge.pk),
            "version": challenge.version.number,
            "digest": challenge.version.state_digest,
            "nonce": challenge.nonce,
            "ranges": challenge.ranges,
        }
        for challenge in Challenge.objects.filter(island=island, state=Challenge.State.OPEN).select_related("version")
    ]


def report_sync(
    island: Island,
    *,
    from_version: int | None,
    version: int,
    digest: str,
    outcome: str,
    verified: bool,
    error: str = "",
    bytes: int = 0,
    seconds: Mapping[str, float] | None = None,
    route: Sequence[Any] = (),
) -> SyncReport:
    """Records the outcome of a sync. Only a verified one whose digest is the record's puts the island at the version.

    A failed one leaves the island where it was, with the reason. An older report never takes back a newer one.
    """
    retired = Version.objects.filter(run=island.run_id, state=Version.State.RETIRED)
    target = (servable(island.run) | retired).filter(number=version).first()
    accepted = (
        outcome == SyncReport.Outcome.APPLIED and verified and target is not None and target.state_digest == digest
    )
    problem = error
    if outcome == SyncReport.Outcome.APPLIED and not accepted:
        problem = problem or _refused(island, target, version, digest)
    with transaction.atomic():
        report = SyncReport.objects.create(
            island=island,
            from_version=from_version,
            to_version=version,
            digest=digest,
            outcome=outcome,
            verified=verified,
            accepted=accepted,
            bytes=bytes,
            seconds=dict(seconds or {}),
            error=problem[:4000],
            route=list(route),
        )
        changes: dict[str, Any] = {"last_seen_at": Now(), "last_sync_at": Now()}
        if accepted and target is not None:
            changes |= {
                "verified_version": target,
                "version_number": version,
                "digest": digest,
                "last_patch_bytes": bytes,
                "last_seconds": dict(seconds or {}),
            }
            changes |= measures.measured(island, target, bytes, seconds or {}, route)
            leases.end_of_fetch(target, island.name)
        if accepted or problem:
            changes["last_error"] = problem[:1000]
        Island.objects.filter(pk=island.pk).update(**changes)
        _forget_old_reports(island)
    report.refresh_from_db()
    return report


def _refused(island: Island, target: Version | None, version: int, digest: str) -> str:
    if target is None:
        return f"It reported version {version}, which run {island.run.name} does not have."
    if target.state_digest != digest:
        recorded = target.state_digest[:12]
        return f"It reported digest {digest[:12] or 'nothing'} for version {version}, whose digest is {recorded}."
    return f"It reported version {version} without having verified it."


def _forget_old_reports(island: Island) -> None:
    oldest = SyncReport.objects.filter(island=island).order_by("-id").values_list("id", flat=True)[REPORTS_KEPT:]
    edge = oldest.first()
    if edge is not None:
        SyncReport.objects.filter(island=island, id__lte=edge).delete()


# Challenges


def open_challenge(
    job: Job, island: Island, version: Version, nonce: bytes, ranges: Sequence[Sequence[int]]
) -> Challenge:
    """Asks an island for a keyed BLAKE3 over byte ranges ([tensor, offset, length]); it learns of it with its next
    heartbeat.

    Questions that an earlier attempt of the job left open are closed.
    """
    with transaction.atomic():
        Challenge.objects.filter(job=job, state=Challenge.State.OPEN).update(state=Challenge.State.EXPIRED)
        challenge = Challenge.objects.create(
            island=island, job=job, version=version, nonce=nonce.hex(), ranges=[list(item) for item in ranges]
        )
    challenge.refresh_from_db()
    return challenge


def close_questions(job: Job) -> None:
    """open -> expired for whatever an ended job has asked and not had answered."""
    Challenge.objects.filter(job=job, state=Challenge.State.OPEN).update(state=Challenge.State.EXPIRED)


def answer_challenge(
    island: Island, challenge_id: uuid.UUID | str, *, version: int | None, digest: str, answer: str, error: str = ""
) -> Challenge:
    """open -> answered, or moved when the island holds another version by now. Wakes the job that asked.

    Raises Missing for a question that is not this island's, WrongState when it is closed. The same answer again is
    harmless.
    """
    try:
        challenge = Challenge.objects.select_related("version").get(pk=uuid.UUID(str(challenge_id)), island=island)
    except (Challenge.DoesNotExist, ValueError):
        raise Missing("There is no such challenge for this island.") from None
    held = (version, digest) == (challenge.version.number, challenge.version.state_digest)
    # An island that holds the version and can't answer has answered too: the job judges the error.
    state = Challenge.State.ANSWERED if held else Challenge.State.MOVED
    with transaction.atomic():
        rows = Challenge.objects.filter(pk=challenge.pk, state=Challenge.State.OPEN).update(
            state=state, answer=answer, error=error[:1000], answered_at=Now()
        )
        challenge.refresh_from_db()
        if rows != 1 and challenge.answer != answer:
            raise WrongState(f"The challenge is {challenge.state} already.")
        jobs.wake(challenge.job_id)
    return challenge


def resolve(challenge: Challenge, state: str, error: str = "") -> None:
    """answered -> passed or failed; open -> expired. Raises WrongState.

    One that passed proves more than a report: the island counts as at the version while it says that it holds it.
    """
    expected = Challenge.State.OPEN if state == Challenge.State.EXPIRED else Challenge.State.ANSWERED
    with transaction.atomic():
        rows = Challenge.objects.filter(pk=challenge.pk, state=expected).update(
            state=state, **({"error": error[:1000]} if error else {})
        )
        if rows != 1:
            raise WrongState(f"The challenge is not {expected} any more.")
        if state == Challenge.State.PASSED:
            version = challenge.version
            holders = Island.objects.filter(version_number=version.number, digest=version.state_digest)
            stale = holders.filter(pk=challenge.island_id).exclude(verified_version=version)
            stale.update(verified_version=version, last_error="")
    challenge.refresh_from_db()
