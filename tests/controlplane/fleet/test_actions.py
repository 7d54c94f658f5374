"""What operators do to an island: approval, drain, pins, rotation, revocation; and what the island is told."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db.models.functions import Now

from controlplane.accounts import services as accounts
from controlplane.audit.models import Entry
from controlplane.fleet import selectors, services
from controlplane.fleet.actions import FingerprintMismatch
from controlplane.fleet.models import EnrolmentToken, Island
from controlplane.registry.errors import Changed, Missing, Refusal, WrongState
from controlplane.registry.models import Channel, Project, Run
from mailboat.identity import fingerprint, new_key, public_half, sign_enrolment
from mailboat.manifest import HEAD_TYPE, Envelope, Head
from tests.controlplane.conftest import Api, enrol
from tests.controlplane.making import series

TokenMaker = Callable[..., Api]


def self_enrolment_key(run: Run, **options: Any) -> str:
    channel = Channel.objects.get(run=run, name="latest")
    return services.create_enrolment_token(run, channel, "rack", reusable=True, actor="owner", **options)[1]


def arrive(run: Run, plaintext: str, key: str, hostname: str = "rack-1") -> tuple[Island, str]:
    proof = sign_enrolment(key, run.project.slug, plaintext)
    return services.enrol(run.project.slug, plaintext, hostname=hostname, public_key=public_half(key), signature=proof)


def row(island: Island) -> selectors.FleetRow:
    return selectors.row(selectors.island(island.project, island.pk))


def beat(api: Api, island: Island, **changes: Any) -> Any:
    body = {"version": None, "digest": None, "epoch": None, "phase": "idle", "reason": ""}
    return api.post(f"islands/{island.pk}/heartbeat", body | changes)


def at(island: Island, version: Any) -> None:
    services.report_sync(
        island, from_version=None, version=version.number, digest=version.state_digest, outcome="applied", verified=True
    )


# Self-enrolment


def test_a_self_enrolled_island_waits_for_its_approval(run: Run) -> None:
    key = new_key()
    island, credential = arrive(run, self_enrolment_key(run), key)
    api = Api(run.project.slug, credential)
    assert island.pending
    assert row(island).health == "disabled"
    for path in ("runs", "runs/minilm", "runs/minilm/channels/latest/head", "runs/minilm/plan"):
        refused = api.get(path)
        assert (refused.status_code, refused.json()["code"]) == (403, "awaiting_approval"), path
    assert beat(api, island).json()["code"] == "awaiting_approval"
    assert api.get(f"islands/{island.pk}").json()["pending"] is True
    with pytest.raises(FingerprintMismatch):
        services.approve(island, fingerprint(public_half(new_key())), actor="owner")
    services.approve(island, fingerprint(public_half(key)), actor="owner")
    assert beat(api, island).status_code == 200
    assert api.get(f"islands/{island.pk}").json()["approved_by"] == "owner"
    entry = Entry.objects.get(action="island.approve")
    assert (entry.actor, entry.before, entry.after) == ("owner", {"pending": True}, {"pending": False})
    with pytest.raises(WrongState):
        services.approve(island, fingerprint(public_half(key)), actor="owner")


def test_a_stolen_self_enrolment_key_needs_the_private_half(run: Run) -> None:
    """Somebody who only knows the public key of a machine can't be approved in its place."""
    plaintext, machine, thief = self_enrolment_key(run), new_key(), new_key()
    proof = sign_enrolment(thief, run.project.slug, plaintext)
    for public_key, signature in ((public_half(machine), proof), (public_half(machine), ""), ("", "")):
        with pytest.raises(Refusal) as refusal:
            services.enrol(run.project.slug, plaintext, public_key=public_key, signature=signature)
        assert refusal.value.code == "key_not_proven"
    assert not Island.objects.exists()


def test_one_key_serves_many_machines_and_a_machine_may_ask_again(run: Run) -> None:
    plaintext, key = self_enrolment_key(run), new_key()
    first, old = arrive(run, plaintext, key)
    again, new = arrive(run, plaintext, key)
    assert (again.pk, again.pending) == (first.pk, True)
    assert accounts.authenticate_token(old) is None and accounts.authenticate_token(new) is not None
    other, _ = arrive(run, plaintext, new_key())
    assert other.name.startswith("rack-1-")
    services.approve(again, fingerprint(public_half(key)), actor="owner")
    with pytest.raises(services.KeyTaken):
        arrive(run, plaintext, key)


@pytest.mark.parametrize("end", ["revoke", "expire"])
def test_a51_a_self_enrolment_key_ends(run: Run, end: str) -> None:
    plaintext = self_enrolment_key(run)
    token = EnrolmentToken.objects.get()
    if end == "revoke":
        services.revoke_enrolment_token(token, actor="owner")
    else:
        EnrolmentToken.objects.update(expires_at=Now() - timedelta(seconds=1))
    with pytest.raises(services.EnrolmentInvalid):
        arrive(run, plaintext, new_key())


def test_a45_islands_join_and_leave_and_their_names_are_free_again(run: Run) -> None:
    island, _ = enrol(run, "porto")
    with pytest.raises(WrongState):
        services.remove(island, actor="owner")
    services.revoke_credential(island, reason="sold", actor="owner")
    services.remove(selectors.island(run.project, island.pk), actor="owner")
    assert not Island.objects.exists()
    again, _ = enrol(run, "porto")
    assert again.pk != island.pk


def test_a_stolen_key_does_not_fill_the_list_for_ever(run: Run, monkeypatch: Any) -> None:
    monkeypatch.setattr("controlplane.fleet.enrolment.MOST_PENDING", 1)
    plaintext, key = self_enrolment_key(run), new_key()
    arrive(run, plaintext, key)
    arrive(run, plaintext, key)
    with pytest.raises(Refusal) as refusal:
        arrive(run, plaintext, new_key())
    assert refusal.value.code == "too_many_pending"


# Orders


def test_a_drain_has_a_deadline_progress_and_an_end(island_api: tuple[Island, Api]) -> None:
    island, api = island_api
    assert beat(api, island, active_requests=3).json()["drain"] is None
    services.drain(island, deadline=timedelta(seconds=90), reason="new kernel", actor="owner")
    told = beat(api, island, active_requests=3).json()["drain"]
    assert told["reason"] == "new kernel" and 0 < told["seconds_left"] <= 90
    assert row(island).health == "draining"
    assert "3 requests are active" in row(island).health_reason
    beat(api, island, active_requests=0)
    assert row(island).drained and row(island).health == "draining"
    assert selectors.lost_islands(island.project) == 0
    services.stop_drain(island, actor="owner")
    assert beat(api, island).json()["drain"] is None
    assert row(island).health == "healthy"
    assert [entry.action for entry in Entry.objects.filter(action__contains="drain")] == [
        "island.stop_drain",
        "island.drain",
    ]


def test_at_the_deadline_of_a_drain_nothing_is_waited_for(island_api: tuple[Island, Api]) -> None:
    island, api = island_api
    beat(api, island, active_requests=2)
    services.drain(island, deadline=timedelta(seconds=1), actor="owner")
    Island.objects.update(drain_until=Now() - timedelta(seconds=1))
    assert row(island).drained
    assert "2 requests given up" in row(island).health_reason
    assert beat(api, island, active_requests=2).json()["drain"]["seconds_left"] == 0


def test_a_pinned_island_gets_the_head_of_its_pin_and_nobody_else_does(run: Run, island_api: Any) -> None:
    versions = series(run, 3)
    island, api = island_api
    _, other_credential = enrol(run, "oslo")
    other = Api(run.project.slug, other_credential)
    at(island, versions[2])
    assert beat(api, island).json()["channel"] == "latest"
    services.pin(island, 1, reason="regression in 2", actor="owner")
    pinned = beat(api, island).json()["channel"]
    assert pinned.startswith(Channel.PINS)
    refused = api.get("runs/minilm/channels/latest/head")
    assert (refused.status_code, refused.json()["code"], refused.json()["channel"]) == (409, "other_channel", pinned)
    head = head_of(api, pinned)
    assert (head.version, head.channel, head.serial) == (1, pinned, 1)
    assert head_of(other, "latest").version == 2
    beat(api, island, version=2, digest=versions[2].state_digest)
    ahead = row(island)
    assert (ahead.sync, ahead.target, ahead.pinned) == ("ahead", 1, 1)
    at(island, versions[1])
    beat(api, island, version=1, digest=versions[1].state_digest)
    assert row(island).sync == "pinned"
    services.pin(island, 0, actor="owner")
    assert head_of(api, pinned).serial == 2
    services.unpin(island, actor="owner")
    assert api.get(f"runs/minilm/channels/{pinned}/head").json()["channel"] == "latest"
    assert head_of(api, "latest").version == 2
    services.pin(island, 2, actor="owner")
    assert head_of(api, pinned).serial == 3  # a serial is never given out twice
    with pytest.raises(Missing):
        services.pin(island, 9, actor="owner")


def head_of(api: Api, channel: str) -> Head:
    answer = api.get(f"runs/minilm/channels/{channel}/head")
    assert answer.status_code == 200, answer.content
    return Head.from_bytes(Envelope.from_json(answer.content).open(HEAD_TYPE))


def test_only_versions_of_the_run_that_are_ready_are_pinned(run: Run, other_run: Run, island: Island) -> None:
    series(other_run, 1)
    with pytest.raises(Missing):
        services.pin(island, 0, actor="owner")
    version = series(run, 1)[0]
    type(version).objects.filter(pk=version.pk).update(state="retired")
    with pytest.raises(Refusal) as refusal:
        services.pin(island, 0, actor="owner")
    assert refusal.value.code == "not_ready"


def test_rotation_keeps_the_old_credential_until_the_new_one_was_used(island_api: tuple[Island, Api]) -> None:
    island, old = island_api
    assert beat(old, island).json()["credential"] is None
    services.rotate_credential(island, actor="owner")
    lost = beat(old, island).json()["credential"]
    fresh = beat(old, island).json()["credential"]  # the first answer was lost on its way
    assert lost != fresh
    assert beat(Api(island.project.slug, lost), island).status_code == 401
    assert beat(old, island).status_code == 200  # ... which made another secret again
    fresh = beat(old, island).json()["credential"]
    new = Api(island.project.slug, fresh)
    assert new.get("runs").status_code == 200  # any call confirms
    assert beat(old, island).status_code == 401
    answer = beat(new, island)
    assert (answer.status_code, answer.json()["credential"]) == (200, None)
    entry = Entry.objects.get(action="island.rotated")
    assert entry.before["key_id"] != entry.after["key_id"]
    assert Entry.objects.filter(action="island.rotate", actor="owner").count() == 1


def test_a51_a_revoked_credential_is_401_at_once_also_during_a_rotation(island_api: tuple[Island, Api]) -> None:
    island, old = island_api
    services.rotate_credential(island, actor="owner")
    new = Api(island.project.slug, beat(old, island).json()["credential"])
    services.revoke_credential(selectors.island(island.project, island.pk), reason="stolen", actor="owner")
    assert beat(old, island).status_code == 401
    assert beat(new, island).status_code == 401
    assert row(island).health == "disabled"
    assert Entry.objects.get(action="island.revoke").after["reason"] == "stolen"
    with pytest.raises(WrongState):
        services.rotate_credential(selectors.island(island.project, island.pk), actor="owner")


def test_of_two_operators_the_second_is_told(island: Island) -> None:
    seen = island.revision
    services.drain(island, actor="owner", seen=seen)
    with pytest.raises(Changed):
        services.set_enabled(island, False, reason="mine", actor="mate", seen=seen)
    island.refresh_from_db()
    assert island.enabled


def test_heartbeats_do_not_move_the_revision(island_api: tuple[Island, Api]) -> None:
    island, api = island_api
    beat(api, island, active_requests=1)
    before = island.revision
    island.refresh_from_db()
    assert island.revision == before


def test_orders_over_http(run: Run, token: TokenMaker, project: Project) -> None:
    versions = series(run, 2)
    island, _ = enrol(run)
    at(island, versions[1])
    operator, base = token("operator"), f"islands/{island.pk}"
    etag = operator.get(base)["ETag"]
    drained = operator.post(f"{base}/drain", {"deadline_seconds": 60, "reason": "kernel"})
    assert drained.status_code == 200
    assert drained.json()["drain"]["reason"] == "kernel"
    assert drained["ETag"] != etag
    headers = operator.headers | {"If-Match": etag}
    stale = operator.client.post(
        f"{operator.base}{base}/enable", "{}", content_type="application/json", headers=headers
    )
    assert (stale.status_code, stale.json()["code"]) == (412, "precondition_failed")
    assert operator.post(f"{base}/stop-drain").json()["drain"] is None
    assert operator.post(f"{base}/disable", {"reason": "odd"}).json()["health"]["reason"] == "odd"
    assert operator.post(f"{base}/disable", {}).status_code == 400
    assert operator.post(f"{base}/enable").json()["enabled"] is True
    assert operator.post(f"{base}/pin", {"version": 0}).json()["pinned"] == {"version": 0, "reason": ""}
    assert operator.post(f"{base}/unpin").json()["pinned"] is None
    assert operator.post(f"{base}/rotate").json()["credential"]["rotation_asked_at"]
    assert operator.post(f"{base}/verify").status_code == 202
    assert operator.post(f"{base}/verify").status_code == 200
    assert operator.post(f"{base}/revoke").json()["credential"]["revoked_at"]
    gone = operator.client.delete(operator.base + base, headers=operator.headers)
    assert gone.status_code == 204
    assert operator.get(base).status_code == 404


def test_a18_pins_of_two_runs_do_not_mix(run: Run, other_run: Run) -> None:
    series(run, 2)
    series(other_run, 2)
    mine, credential = enrol(run, "porto")
    theirs, _ = enrol(other_run, "oslo")
    services.pin(mine, 0, actor="owner")
    services.pin(theirs, 1, actor="owner")
    api = Api(run.project.slug, credential)
    assert theirs.pin is not None
    assert api.get(f"runs/qwen/channels/{theirs.pin.name}/head").status_code == 404
    assert api.get(f"runs/minilm/channels/{theirs.pin.name}/head").status_code == 404
    assert mine.pin is not None and head_of(api, mine.pin.name).run == str(run.pk)


def test_a46_a_drain_ends_by_the_clock_of_the_database(island_api: tuple[Island, Api]) -> None:
    island, api = island_api
    services.drain(island, deadline=timedelta(seconds=60), actor="owner")
    answer = beat(api, island, time=4e9, active_requests=1).json()
    assert 0 < answer["drain"]["seconds_left"] <= 60
    assert not row(island).drained


def test_the_registry_knows_no_names_of_pins(run: Run, token: TokenMaker) -> None:
    """A channel that pins one island is not there to be enrolled in or edited."""
    version = series(run, 1)[0]
    island, _ = enrol(run)
    services.pin(island, version.number, actor="owner")
    assert island.pin is not None
    listed = token("viewer").get("runs/minilm/channels").json()["results"]
    assert [channel["channel"] for channel in listed] == ["latest"]
