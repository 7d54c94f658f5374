"""How machines become islands: one-time tokens, and reusable keys whose islands wait for an operator's approval.

A credential is shown once and kept as a digest alone. Whoever enrols with a public key proves to hold its private half,
so that an operator who compares the fingerprint approves the machine and not only its name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models.functions import Now

from controlplane.accounts import credentials
from controlplane.accounts import services as accounts
from controlplane.accounts.models import Token
from controlplane.audit import services as audit
from controlplane.fleet.models import EnrolmentToken, Island
from controlplane.registry import keys
from controlplane.registry.errors import Refusal
from controlplane.registry.models import Channel, Run
from mailboat import __version__
from mailboat.compatibility import neighbours
from mailboat.identity import fingerprint, proves_enrolment

ENROLMENT_LIFETIME = timedelta(hours=24)
SELF_ENROLMENT_LIFETIME = timedelta(days=30)
LONGEST_NAME = 60
MOST_PENDING = 500  # per project: a stolen key can't fill the list for ever
_LISTEN = "--listen 127.0.0.1:8200"
_ENGINE_URL = "--engine-url http://127.0.0.1:8000"
SERVING = {  # what `mailboat island run` needs beside for each engine; `checkpoint` is its default and serves nobody
    "local": ("--engine local", _LISTEN),
    "vllm": ("--engine vllm", _ENGINE_URL, _LISTEN),
    "sglang": ("--engine sglang", _ENGINE_URL, _LISTEN),
}


class AgentIncompatible(Refusal):
    """The island is too old, or too new, for this control plane."""

    status = 426
    code = "agent_incompatible"


class EnrolmentInvalid(Refusal):
    """The enrolment token is unknown, has expired or was revoked."""

    status = 401
    code = "enrolment_invalid"


class EnrolmentUsed(Refusal):
    """The enrolment token has been used."""

    status = 403
    code = "enrolment_used"


class KeyTaken(Refusal):
    """Another island of the project has this public key."""

    code = "key_taken"


@dataclass(frozen=True, slots=True)
class Applicant:
    """What a machine says of itself. `public_key` (Ed25519, hex) and `signature` (hex) are empty for old islands."""

    name: str = ""
    engine: str = ""
    agent_version: str = ""
    cores: int | None = None
    codecs: Sequence[str] = ()
    hostname: str = ""
    public_key: str = ""
    signature: str = ""


def create_enrolment_token(
    run: Run,
    channel: Channel,
    name: str,
    *,
    provider: str = "",
    region: str = "",
    engine: str = "checkpoint",
    actor: str,
    lifetime: timedelta | None = None,
    reusable: bool = False,
) -> tuple[EnrolmentToken, str]:
    """A token for one island, or with `reusable` a self-enrolment key for any number of islands that then wait for
    approval; the second value is its text, which is shown once.

    `name` is the island's name, or that of the key. `lifetime` is 24 hours for a one-time token and 30 days for a key
    unless given. Raises Refusal `island_exists`.
    """
    if not reusable and Island.objects.filter(project=run.project, name=name).exists():
        raise Refusal(f"There is an island {name} already; choose another name.", code="island_exists")
    fresh = credentials.new(credentials.ENROLMENT)
    lifetime = lifetime or (SELF_ENROLMENT_LIFETIME if reusable else ENROLMENT_LIFETIME)
    with transaction.atomic():
        token = EnrolmentToken.objects.create(
            project=run.project,
            run=run,
            channel=channel,
            name=name,
            provider=provider,
            region=region,
            engine=engine,
            reusable=reusable,
            created_by=actor[:120],
            key_id=fresh.key_id,
            digest=fresh.digest,
            pepper=fresh.pepper,
            expires_at=Now() + lifetime,
        )
        facts = {"run": run.name, "channel": channel.name, "key_id": fresh.key_id, "reusable": reusable}
        audit.record(run.project, actor, "enrolment.create", _target(token), after=facts)
    token.refresh_from_db()
    return token, fresh.plaintext


def revoke_enrolment_token(token: EnrolmentToken, *, actor: str) -> None:
    """Ends an enrolment token at once; islands that it has enrolled stay. Doing it again changes nothing."""
    with transaction.atomic():
        if EnrolmentToken.objects.filter(pk=token.pk, revoked_at=None).update(revoked_at=Now()):
            audit.record(token.project, actor, "enrolment.revoke", _target(token), before={"key_id": token.key_id})
    token.refresh_from_db()


def enrolment_command(token: EnrolmentToken, plaintext: str) -> str:
    """The line that turns a machine into this island, with the run's keys that count now. Its addresses are those of
    docs/sidecar.md, reached from the machine itself alone: whoever pastes it changes them where they don't fit.
    """
    command = (
        f"mailboat island run --server {settings.MAILBOAT_PUBLIC_URL} --project {token.project.slug} "
        f"--token {plaintext} --store ./{token.name}"
    )
    # A project's API takes any name of an engine; only those that the island knows stand in a line for a shell.
    serving = SERVING.get(token.engine, ())
    return " ".join([command, *serving, *(f"--publisher-key {public_key}" for public_key in keys.to_pin(token.run))])


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
    public_key: str = "",
    signature: str = "",
) -> tuple[Island, str]:
    """Trades an enrolment token for an island and its credential, which is shown once.

    With a reusable key the island is `pending`: its credential opens its own status and nothing else until an operator
    approves its public key. While it is pending, enrolling again with the same key gives the same island a new
    credential (the answer may have been lost).

    Raises AgentIncompatible, EnrolmentInvalid, EnrolmentUsed, KeyTaken, Refusal `island_exists`, `key_not_proven`,
    `too_many_pending`. A used token leaves a trace in the audit log.
    """
    if not neighbours(agent_version, __version__):
        raise AgentIncompatible(
            f"An island of release {agent_version} does not work with this control plane ({__version__}); "
            "install the release of the control plane, or the one before."
        )
    applicant = Applicant(name, engine, agent_version, cores, codecs, hostname, public_key, signature)
    token = _offered(project_slug, plaintext)
    if (public_key or token.reusable) and not proves_enrolment(public_key, signature, project_slug, plaintext):
        raise Refusal(
            "The enrolment is not signed by the public key that it names; update the island.",
            code="key_not_proven",
            status=403,
        )
    try:
        with transaction.atomic():
            return _self_enrol(token, applicant) if token.reusable else _enrol_once(token, applicant)
    except EnrolmentUsed:
        audit.record(token.project, f"enrolment:{token.key_id}", "enrolment.reused", f"island {token.name}")
        raise
    except IntegrityError as error:
        if "island_key_once" in str(error):
            raise KeyTaken("An island of this project has this key; give each island a store of its own.") from None
        taken = name or token.name
        raise Refusal(f"There is an island {taken} already; choose another name.", code="island_exists") from None


def _offered(project_slug: str, plaintext: str) -> EnrolmentToken:
    """The row of a token text that is right; whether it still works is decided when it is taken."""
    offered = credentials.split(plaintext, credentials.ENROLMENT)
    token = offered and (
        EnrolmentToken.objects.select_related("project", "run", "channel")
        .filter(project__slug=project_slug, key_id=offered[0])
        .first()
    )
    if not offered or not token or not credentials.matches(offered[1], token.digest, token.pepper):
        raise EnrolmentInvalid("The enrolment token is not valid here; ask an operator for a new one.")
    if token.revoked_at is not None:
        raise EnrolmentInvalid("The enrolment token was revoked; ask an operator for a new one.")
    return token


def _enrol_once(token: EnrolmentToken, applicant: Applicant) -> tuple[Island, str]:
    _take(token, used_at=None)
    island, credential = _create(token, applicant, applicant.name or token.name, pending=False)
    EnrolmentToken.objects.filter(pk=token.pk).update(island=island)
    return island, credential


def _self_enrol(token: EnrolmentToken, applicant: Applicant) -> tuple[Island, str]:
    _take(token)
    known = (
        Island.objects.select_for_update(of=["self"])
        .select_related("token")
        .filter(project=token.project, public_key=applicant.public_key)
    )
    island = known.first()
    if island is None:
        if Island.objects.filter(project=token.project, pending=True).count() >= MOST_PENDING:
            raise Refusal(
                f"{MOST_PENDING} islands wait for an approval already; an operator has to decide about them first.",
                code="too_many_pending",
            )
        return _create(token, applicant, _free_name(token, applicant), pending=True)
    if not island.pending:
        raise KeyTaken(f"This key is enrolled already, as island {island.name}; start it with its own store.")
    actor = f"enrolment:{token.key_id}"
    if island.token is not None:
        accounts.revoke_token(island.token, actor=actor)
    bearer, credential = accounts.create_token(token.project, Token.Role.ISLAND, island.name, actor=actor)
    Island.objects.filter(pk=island.pk).update(token=bearer)
    island.refresh_from_db()
    return island, credential


def _take(token: EnrolmentToken, **unused: None) -> None:
    """Marks the token as used now. Raises EnrolmentUsed, EnrolmentInvalid."""
    still = EnrolmentToken.objects.filter(pk=token.pk, expires_at__gt=Now(), revoked_at=None, **unused)
    if still.update(used_at=Now()) == 1:
        return
    token.refresh_from_db()
    if token.used_at is not None and not token.reusable:
        raise EnrolmentUsed("The enrolment token has been used; ask an operator for a new one.")
    what = "was revoked" if token.revoked_at else "has expired"
    raise EnrolmentInvalid(f"The enrolment token {what}; ask an operator for a new one.")


def _create(token: EnrolmentToken, applicant: Applicant, name: str, *, pending: bool) -> tuple[Island, str]:
    actor = f"enrolment:{token.key_id}"
    bearer, credential = accounts.create_token(token.project, Token.Role.ISLAND, name, actor=actor)
    island = Island.objects.create(
        project=token.project,
        run=token.run,
        channel=token.channel,
        name=name,
        provider=token.provider,
        region=token.region,
        engine=applicant.engine or token.engine,
        agent_version=applicant.agent_version,
        hostname=applicant.hostname,
        cores=applicant.cores,
        codecs=list(applicant.codecs),
        token=bearer,
        public_key=applicant.public_key,
        pending=pending,
        last_seen_at=Now(),
    )
    key = fingerprint(applicant.public_key) if applicant.public_key else None
    audit.record(
        token.project,
        actor,
        "island.enrol",
        f"island {name}",
        after={"run": token.run.name, "fingerprint": key, "pending": pending},
    )
    island.refresh_from_db()
    return island, credential


def _free_name(token: EnrolmentToken, applicant: Applicant) -> str:
    """What the machine calls itself; when that is taken, with the beginning of its key's fingerprint."""
    said = re.sub(r"[^a-z0-9-]+", "-", (applicant.name or applicant.hostname).lower()).strip("-")
    name = said[:LONGEST_NAME] or "island"
    if Island.objects.filter(project=token.project, name=name).exists():
        name = f"{name[: LONGEST_NAME - 9]}-{applicant.public_key[:8]}"
    return name


def _target(token: EnrolmentToken) -> str:
    return f"enrolment key {token.name}" if token.reusable else f"island {token.name}"
