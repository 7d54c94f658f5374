"""Publishers' keys: what a run with keys takes, and how they come and go."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now

from controlplane.audit.models import Entry
from controlplane.fleet import pins
from controlplane.jobs.models import Job
from controlplane.registry import beside, keys, routes, services, steering
from controlplane.registry.errors import Refusal
from controlplane.registry.models import Anchor, Channel, Run, RunKey, Version
from mailboat.identity import new_key, public_half
from mailboat.manifest import Envelope, Signature
from mailboat.signing import PUBLISHER, KeyDocument, endorse, sign
from tests.controlplane.making import build, make_ready, ready, upload
from tests.factories import mk_island

pytestmark = pytest.mark.django_db
ONE, TWO = new_key(), new_key()


def signed(envelope: dict[str, Any], *privates: str) -> dict[str, Any]:
    made = Envelope.from_dict(envelope)
    for private in privates:
        made = sign(made, private)
    return made.to_dict()


def commit(run: Run, number: int, parent: Version | None, *privates: str, claim: str = "") -> Version:
    built = build(run, number, parent)
    upload(run, built)
    envelope = signed(built.envelope, *privates)
    if claim:  # somebody else's signature under this name
        made = Envelope.from_dict(envelope)
        claimed = tuple(Signature(public_half(claim), item.sig) for item in made.signatures)
        envelope = Envelope(made.payload_type, made.payload, claimed).to_dict()
    return services.commit_manifest(run, envelope, built.anchor, actor="publisher:trainer")[0]


def refused(*arguments: Any, **options: Any) -> str:
    with pytest.raises(Refusal) as told:
        commit(*arguments, **options)
    assert told.value.status == 422
    return told.value.code


def test_a_run_without_keys_takes_any_version(run: Run) -> None:
    assert commit(run, 0, None).number == 0


def test_a_run_with_a_key_takes_versions_that_it_signed(run: Run) -> None:
    keys.register(run, public_half(ONE), "trainer", actor="ops")
    assert refused(run, 0, None) == "signature_missing"
    assert refused(run, 0, None, TWO) == "signature_invalid"
    assert refused(run, 0, None, TWO, claim=ONE) == "signature_invalid"
    assert not Version.objects.exists()
    version = commit(run, 0, None, ONE)
    assert Envelope.from_dict(version.envelope).signatures[0].keyid == public_half(ONE)
    assert commit(run, 0, None, ONE) == version  # a lost answer
    with pytest.raises(Refusal, match="can't sign") as told:
        keys.require_unsigned_allowed(run)
    assert told.value.code == "signature_missing"


def test_no_order_leads_to_what_islands_with_trust_refuse(run: Run) -> None:
    before = make_ready(commit(run, 0, None))
    key, _ = keys.register(run, public_half(ONE), "trainer", actor="ops")
    signed_version = make_ready(commit(run, 1, before, ONE))
    channel = Channel.objects.get(run=run, name="latest")
    island = mk_island(run, at=signed_version)

    def orders(number: int) -> None:
        steering.create_channel(run, f"at-{number}", version=number, protected=False, reason="", actor="ops")
        steering.edit_channel(channel, version=number, protected=False, reason="why", seen=None, actor="ops")
        pins.pin(island, number, actor="ops")

    orders(1)
    for order in (
        lambda: steering.create_channel(run, "stable", version=0, protected=False, reason="", actor="ops"),
        lambda: steering.edit_channel(channel, version=0, protected=False, reason="back", seen=None, actor="ops"),
        lambda: pins.pin(island, 0, actor="ops"),
    ):
        with pytest.raises(Refusal, match="before the run had a key") as told:
            order()
        assert told.value.code == "not_trusted"
    keys.revoke(key, "leaked", actor="ops")
    with pytest.raises(Refusal, match="key that was revoked"):
        pins.pin(island, 1, actor="ops")


def test_keys_overlap_and_are_revoked_for_good(run: Run) -> None:
    first, new = keys.register(run, public_half(ONE), actor="ops")
    assert new and keys.register(run, public_half(ONE), actor="ops") == (first, False)
    keys.register(run, public_half(TWO), actor="ops")
    parent = commit(run, 0, None, ONE)
    keys.revoke(first, "the trainer's disk was lost", actor="ops")
    assert refused(run, 1, parent, ONE) == "key_revoked"
    keys.revoke(first, "again", actor="ops")
    assert RunKey.objects.get(pk=first.pk).revoked_reason == "the trainer's disk was lost"
    with pytest.raises(Refusal) as told:
        keys.register(run, public_half(ONE), actor="ops")
    assert told.value.code == "key_revoked"
    expected = {"publishers": [public_half(TWO)], "revoked": [public_half(ONE)], "derived": False}
    assert keys.standing(run) == expected
    actions = Entry.objects.filter(action__startswith="key.").order_by("pk").values_list("action", flat=True)
    assert list(actions) == ["key.register", "key.register", "key.revoke"]


def test_the_last_revocation_opens_no_door(run: Run) -> None:
    key, _ = keys.register(run, public_half(ONE), actor="ops")
    keys.revoke(key, "gone", actor="ops")
    assert refused(run, 0, None) == "signature_missing"
    assert refused(run, 0, None, ONE) == "key_revoked"


def test_an_endorsement_is_taken_from_another_key_of_the_run_alone(run: Run) -> None:
    keys.register(run, public_half(ONE), actor="ops")
    document = KeyDocument(PUBLISHER, str(run.pk), public_half(TWO))
    other = KeyDocument(PUBLISHER, str(run.pk), public_half(new_key()))
    for wrong in (endorse(document, TWO), endorse(document, new_key()), endorse(other, ONE)):
        with pytest.raises(Refusal) as told:
            keys.register(run, public_half(TWO), endorsement=wrong.to_dict(), actor="ops")
        assert told.value.code == "endorsement_invalid"
    assert RunKey.objects.count() == 1
    key, new = keys.register(run, public_half(TWO), actor="ops")
    assert new and beside.read_key(run.pk, key.public_key) is None
    assert keys.register(run, public_half(TWO), endorsement=endorse(document, ONE).to_dict(), actor="ops")[1] is False
    assert beside.read_key(run.pk, key.public_key) == endorse(document, ONE)


def test_the_database_keeps_keys_as_they_are(run: Run) -> None:
    key, _ = keys.register(run, public_half(ONE), actor="ops")
    for statement in ("UPDATE registry_runkey SET name = 'x'", "DELETE FROM registry_runkey"):
        with pytest.raises(Exception, match=r"immutable|kept|retention"), transaction.atomic():
            connection.cursor().execute(statement)
    assert RunKey.objects.get() == key


def test_ready_versions_lie_beside_the_blobs_and_come_back(run: Run) -> None:
    first = ready(run, 0)
    second = ready(run, 1, first)
    beside.put_back()
    from controlplane.registry import blobs

    store = blobs.store()
    found = store.read_document(beside.version_name(run.pk, 1))
    assert found is not None and Envelope.from_json(found).payload_sha256 == second.manifest_sha256
    assert store.documents(f"runs/{run.pk}/anchors/") == {"0.json"}
    beside.remove_versions(run, [0, 1])
    store.write_document(beside.version_name(run.pk, 7), b"a retired one")
    assert store.documents(f"runs/{run.pk}/versions/") == {"7.json"}
    services.renew_heads()
    assert store.documents(f"runs/{run.pk}/versions/") == {"0.json", "1.json"}
    assert store.documents(f"runs/{run.pk}/anchors/") == {"0.json"}


def begins(run: Run, version: Version) -> Any:
    """The anchor from which an island that holds nothing goes to the version."""
    return routes.find(run, "", version.number).steps[0]["version"]


def anchored(version: Version) -> None:
    files = [{"path": "model.safetensors", "sha256": "ab" * 32, "size": 80}]
    Anchor.objects.create(version=version, kind=Anchor.Kind.BUILT, files=files, bytes=80)


def test_a56_the_first_signed_version_gets_an_anchor(run: Run) -> None:
    """Without an anchor that a key has signed, an island that trusts the key and holds nothing could never start."""

    def wanted() -> list[int]:
        return sorted(job.params["version"] for job in Job.objects.filter(run=run, kind=Job.Kind.ANCHOR))

    def ended(state: str) -> None:
        Job.objects.filter(run=run, kind=Job.Kind.ANCHOR).update(state=state, finished_at=Now())

    at = make_ready(commit(run, 0, None))
    key, _ = keys.register(run, public_half(ONE), "trainer", actor="ops")
    at = make_ready(commit(run, 1, at, ONE))
    assert wanted() == [1]
    at = make_ready(commit(run, 2, at, ONE))
    assert wanted() == [1], "one is enough"
    ended(Job.State.FAILED)
    at = make_ready(commit(run, 3, at, ONE))
    assert wanted() == [1, 3], "until there is one"
    ended(Job.State.SUCCEEDED)
    anchored(at)
    at = make_ready(commit(run, 4, at, ONE))
    assert (wanted(), begins(run, at)) == ([1, 3], 3)
    keys.revoke(key, "leaked", actor="ops")
    keys.register(run, public_half(TWO), "next", actor="ops")
    make_ready(commit(run, 5, at, TWO))
    assert wanted() == [1, 3, 5], "an anchor counts no more when its key was revoked"


def test_no_way_to_a_signed_version_begins_at_an_anchor_that_islands_refuse(run: Run) -> None:
    one, _ = keys.register(run, public_half(ONE), "one", actor="ops")
    keys.register(run, public_half(TWO), "two", actor="ops")
    first = make_ready(commit(run, 0, None, TWO))
    second = make_ready(commit(run, 1, first, ONE))
    anchored(second)
    third = make_ready(commit(run, 2, second, TWO))
    assert begins(run, third) == 1
    keys.revoke(one, "leaked", actor="ops")
    assert begins(run, third) == 0
    assert begins(run, second) == 1, "whoever goes there trusts another key"
