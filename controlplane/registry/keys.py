"""The keys of a run's publishers, and whether a commit carries the signature of one.

Once a run has had a key it takes signed versions only, for good: were the last revocation to open the door again,
whoever can revoke could publish. The private halves stay with the trainers; nothing here ever sees one.
"""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.db.models import BooleanField, QuerySet
from django.db.models.expressions import RawSQL
from django.db.models.functions import Now

from controlplane.audit import services as audit
from controlplane.registry import beside
from controlplane.registry.errors import Missing, Refusal, Unacceptable
from controlplane.registry.models import Run, RunKey, Version
from mailboat.errors import MailboatError
from mailboat.identity import fingerprint
from mailboat.manifest import Envelope
from mailboat.signing import PUBLISHER, KeyDocument, endorsers, signers

MOST = 32  # keys of one run
# Of a version in a query: whether its manifest names a key of the run that counts. Since the first key a commit needs a
# right signature; what was claimed before that misleads a plan at most, islands check.
SIGNED = RawSQL(
    """EXISTS (
        SELECT FROM registry_runkey key
        WHERE key.run_id = registry_version.run_id AND key.revoked_at IS NULL
            AND registry_version.envelope -> 'signatures'
                @> jsonb_build_array(jsonb_build_object('keyid', key.public_key))
    )""",
    (),
    output_field=BooleanField(),
)


def of_run(run: Run) -> QuerySet[RunKey]:
    """The keys of a run, oldest first, revoked ones too."""
    return RunKey.objects.filter(run=run)


def key(run: Run, key_id: Any) -> RunKey:
    """One of them. Raises Missing."""
    found = of_run(run).filter(pk=key_id).first()
    if found is None:
        raise Missing("There is no such key in this run.")
    return found


def register(
    run: Run, public_key: str, name: str = "", *, endorsement: Any = None, kind: str = RunKey.Kind.PUBLISHER, actor: str
) -> tuple[RunKey, bool]:
    """A further key of the run; the second value is True when it is new.

    `endorsement` is a key document signed by an older key: islands that trust that one will trust this one. It may
    come later, by registering the key again. Raises Unacceptable `endorsement_invalid`, Refusal `key_revoked`,
    `too_many_keys`.
    """
    with transaction.atomic():
        Run.objects.select_for_update(of=["self"], no_key=True).get(pk=run.pk)
        known = of_run(run).filter(public_key=public_key).first()
        if known is not None and known.revoked_at is not None:
            raise Refusal("This key was revoked for good; make another one.", code="key_revoked")
        envelope = None if endorsement is None else _endorsement(run, public_key, endorsement)
        if known is None:
            if of_run(run).count() >= MOST:
                raise Refusal(f"A run has at most {MOST} keys, revoked ones too.", code="too_many_keys")
            row = RunKey.objects.create(
                run=run, kind=kind, public_key=public_key, name=name or fingerprint(public_key)[:20],
                created_by=actor[:120],
            )  # fmt: skip
            told = {"fingerprint": fingerprint(public_key), "kind": kind, "endorsed": envelope is not None}
            audit.record(run.project, actor, "key.register", _named(row), after=told)
        else:
            row = known
        if envelope is not None:
            beside.write_key(run.pk, public_key, envelope)
    row.refresh_from_db()
    return row, known is None


def revoke(key: RunKey, reason: str, *, actor: str) -> RunKey:
    """Ends a key for good: no commit with its signature is taken any more, and islands hear of it with their next
    heartbeat. Doing it again changes nothing.
    """
    with transaction.atomic():
        Run.objects.select_for_update(of=["self"], no_key=True).get(pk=key.run_id)
        changes = {"revoked_at": Now(), "revoked_by": actor[:120], "revoked_reason": reason[:300]}
        if RunKey.objects.filter(pk=key.pk, revoked_at=None).update(**changes):
            audit.record(key.run.project, actor, "key.revoke", _named(key), after={"reason": reason[:300]})
    key.refresh_from_db()
    return key


def require_signature(run: Run, envelope: Any) -> None:
    """Whether a manifest may be committed. The caller holds the run's lock, so that no key is revoked meanwhile.

    Raises Unacceptable `signature_missing`, `signature_invalid`, `key_revoked`.
    """
    revoked = dict(of_run(run).values_list("public_key", "revoked_at"))
    if not revoked:
        return
    sent = Envelope.from_dict(envelope)
    signed = signers(sent, revoked)
    if any(revoked[public_key] is None for public_key in signed):
        return
    if signed:
        raise Unacceptable("The manifest is signed by a key that was revoked; sign with another.", code="key_revoked")
    if not sent.signatures:
        raise _unsigned(run)
    raise Unacceptable(
        f"No signature of the manifest is right and by a key of run {run.name}; register the trainer's key with it.",
        code="signature_invalid",
    )


def require_trusted(version: Version) -> None:
    """Whether islands that trust the run's keys would go to the version: those published before the first key, or
    signed by keys that were revoked, they refuse. Raises Refusal `not_trusted`.
    """
    revoked = dict(of_run(version.run).values_list("public_key", "revoked_at"))
    signed = signers(Envelope.from_dict(version.envelope), revoked) if revoked else set()
    if revoked and all(revoked[public_key] is not None for public_key in signed):
        why = "is signed by a key that was revoked" if signed else "was published before the run had a key"
        raise Refusal(
            f"Version {version.number} {why}: islands that trust the run's keys would refuse it. Publish its bytes "
            "again, signed, and go there.",
            code="not_trusted",
        )


def require_unsigned_allowed(run: Run) -> None:
    """Workers have no publisher's key, so what they build can't be signed. Raises Unacceptable `signature_missing`."""
    if of_run(run).exists():
        raise _unsigned(run)


def _unsigned(run: Run) -> Refusal:
    return Unacceptable(
        f"Run {run.name} takes signed versions only: publish from the trainer with its signing key. A worker that "
        "builds a version from a checkpoint can't sign it.",
        code="signature_missing",
    )


def to_pin(run: Run) -> list[str]:
    """The public keys that a new island of the run is started with: of publishers, and of the workers that publish a
    derived run.
    """
    return list(of_run(run).filter(revoked_at=None).values_list("public_key", flat=True))


def standing(run: Run) -> dict[str, Any]:
    """The publishers' keys that count and those that do not any more, for islands, and whether a worker publishes the
    run: its key is not among them, since islands have to opt in to it by name. One query.
    """
    rows = list(of_run(run).filter(kind=RunKey.Kind.PUBLISHER).values_list("public_key", "revoked_at"))
    return {
        "publishers": [public_key for public_key, revoked_at in rows if revoked_at is None],
        "revoked": [public_key for public_key, revoked_at in rows if revoked_at is not None],
        "derived": run.source_id is not None,
    }


def _endorsement(run: Run, public_key: str, sent: Any) -> Envelope:
    current = of_run(run).filter(revoked_at=None).exclude(public_key=public_key)
    document = KeyDocument(PUBLISHER, str(run.pk), public_key)
    try:
        envelope = Envelope.from_dict(sent)
        found = endorsers(envelope, document, current.values_list("public_key", flat=True))
    except MailboatError as error:
        raise Unacceptable(str(error), code="endorsement_invalid") from error
    if not found:
        raise Unacceptable(
            "The endorsement is not for this key in this run, or not signed by another key of the run.",
            code="endorsement_invalid",
        )
    return envelope


def _named(row: RunKey) -> str:
    return f"run {row.run.name} key {row.name}"
