"""Writes of the fleet: enrolment, heartbeats, sync reports, challenges. What an island claims is kept as a claim."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import IntegrityError, connection, transaction
from django.db.models.functions import Now

from controlplane.accounts import credentials
from controlplane.accounts import services as accounts
from controlplane.accounts.models import Token
from controlplane.audit import services as audit
from controlplane.fleet.models import Challenge, EnrolmentToken, Island, SyncReport
from controlplane.jobs.models import Job
from controlplane.registry import clock
from controlplane.registry.errors import Missing, Refusal, WrongState
from controlplane.registry.models import Channel, Run, Version

ENROLMENT_LIFETIME = timedelta(hours=24)
CHALLENGE_NOTIFICATION = "mailboat_challenge"
REPORTS_KEPT = 1000  # per island


class EnrolmentInvalid(Refusal):
    """The enrolment token is unknown or has expired."""

    status = 401
    code = "enrolment_invalid"


class EnrolmentUsed(Refusal):
    """The enrolment token has been used."""

    status = 403
    code = "enrolment_used"


def create_enrolment_token(
    run: Run,
    channel: Channel,
    name: str,
    *,
    provider: str = "",
    region: str = "",
    engine: str = "checkpoint",
    actor: str,
    lifetime: timedelta = ENROLMENT_LIFETIME,
) -> tuple[EnrolmentToken, str]:
    """A one-time token for one island; the second value is its text, which is shown once. Raises Refusal
    `island_exists`.
    """
    if Island.objects.filter(project=run.project, name=name).exists():
        raise Refusal(f"There is an island {name} already; choose another name.", code="island_exists")
    fresh = credentials.new(credentials.ENROLMENT)
    with transaction.atomic():
        token = EnrolmentToken.objects.create(
            project=run.project,
            run=run,
            channel=channel,
            name=name,
            provider=provider,
            region=region,
            engine=engine,
            key_id=fresh.key_id,
            digest=fresh.digest,
            pepper=fresh.pepper,
            expires_at=Now() + lifetime,
        )
        audit.record(
            run.project, actor, "enrolment.create", f"island {name}", after={"run": run.name, "key_id": fresh.key_id}
        )
    token.refresh_from_db()
    return token, fresh.plaintext


def enrolment_command(plaintext: str, project_slug: str, name: str) -> str:
    """The line that turns a machine into this island."""
    return (
        f"mailboat island run --server {settings.MAILBOAT_PUBLIC_URL} --project {project_slug} "
        f"--token {plaintext} --store ./{name}"
    )


def enrol(
    project_slug: str,
    plaintext: str,
    *,
    name: str = "",
    engine: str = "",
    agent_version: str = "",
    cores: int | None = None,
    codecs: Sequence[str] = (),
    hostname: str = "",
) -> tuple[Island, str]:
    """Trades a one-time token for an island and its credential, which is shown once.

    Raises EnrolmentInvalid, EnrolmentUsed, Refusal `island_exists`. A used token leaves a trace in the audit log.
    """
    offered = credentials.split(plaintext, credentials.ENROLMENT)
    token = offered and (
        EnrolmentToken.objects.select_related("project", "run", "channel")
        .filter(project__slug=project_slug, key_id=offered[0])
        .first()
    )
    if not offered or not token or not credentials.matches(offered[1], token.digest, token.pepper):
        raise EnrolmentInvalid("The enrolment token is not valid here; ask an operator for a new one.")
    chosen = name or token.name
    try:
        with transaction.atomic():
            taken = EnrolmentToken.objects.filter(pk=token.pk, used_at=None, expires_at__gt=Now()).update(used_at=Now())
            if taken != 1:
                token.refresh_from_db()
                if token.used_at is not None:
                    raise EnrolmentUsed("The enrolment token has been used; ask an operator for a new one.")
                raise EnrolmentInvalid("The enrolment token has expired; ask an operator for a new one.")
            bearer, credential = accounts.create_token(
                token.project, Token.Role.ISLAND, chosen, actor=f"enrolment:{token.key_id}"
            )
            island = Island.objects.create(
                project=token.project,
                run=token.run,
                channel=token.channel,
                name=chosen,
                provider=token.provider,
                region=token.region,
                engine=engine or token.engine,
                agent_version=agent_version,
                hostname=hostname,
                cores=cores,
                codecs=list(codecs),
                token=bearer,
                last_seen_at=Now(),
            )
            EnrolmentToken.objects.filter(pk=token.pk).update(island=island)
            audit.record(
                token.project,
                f"enrolment:{token.key_id}",
                "island.enrol",
                f"island {chosen}",
                after={"run": token.run.name},
            )
    except EnrolmentUsed:
        audit.record(token.project, f"enrolment:{token.key_id}", "enrolment.reused", f"island {token.name}")
        raise
    except IntegrityError:
        raise Refusal(f"There is an island {chosen} already; choose another name.", code="island_exists") from None
    island.refresh_from_db()
    return island, credential


def heartbeat(
    island: Island,
    *,
    version: int | None,
    digest: str,
    epoch: int | None,
    phase: str,
    reason: str,
    time: float | None = None,
) -> list[dict[str, Any]]:
    """Records what an island says of itself, and returns the commands for it."""
    skew = None if time is None else round(time - clock.now().timestamp(), 3)
    Island.objects.filter(pk=island.pk).update(
        version_number=version,
        digest=digest,
        epoch=epoch,
        phase=phase,
        reason=reason[:1000],
        last_seen_at=Now(),
        clock_skew_seconds=skew,
    )
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
    target = Version.objects.filter(run=island.run_id, number=version, state__in=["ready", "retired"]).first()
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


def set_enabled(island: Island, enabled: bool, *, reason: str = "", actor: str) -> None:
    """Lets an island follow its channel, or stops it from doing so; an island that failed a challenge is stopped with
    evidence.
    """
    with transaction.atomic():
        changed = Island.objects.filter(pk=island.pk, enabled=not enabled).update(
            enabled=enabled, disabled_reason="" if enabled else reason[:1000]
        )
        if changed:
            audit.record(
                island.project,
                actor,
                "island.enable" if enabled else "island.disable",
                f"island {island.name}",
                after={"reason": reason},
            )
    island.refresh_from_db()


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
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_notify(%s, %s)", [CHALLENGE_NOTIFICATION, str(challenge.pk)])
    return challenge


def resolve(challenge: Challenge, state: str, error: str = "") -> None:
    """answered -> passed or failed; open -> expired. Raises WrongState."""
    expected = Challenge.State.OPEN if state == Challenge.State.EXPIRED else Challenge.State.ANSWERED
    rows = Challenge.objects.filter(pk=challenge.pk, state=expected).update(
        state=state, **({"error": error[:1000]} if error else {})
    )
    if rows != 1:
        raise WrongState(f"The challenge is not {expected} any more.")
    challenge.refresh_from_db()
