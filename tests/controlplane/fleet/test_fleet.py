"""Islands: enrolment once, claims apart from proof, health and skew by the database's clock."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db.models.functions import Now

from controlplane.accounts import services as accounts
from controlplane.audit.models import Entry
from controlplane.fleet import selectors, services
from controlplane.fleet.models import Challenge, EnrolmentToken, Island
from controlplane.fleet.status import Facts, Health, Sync, health, sync
from controlplane.jobs import services as jobs
from controlplane.registry.errors import Missing, WrongState
from controlplane.registry.models import Channel, Run, Version
from mailboat import __version__
from tests.controlplane.conftest import Api, enrol
from tests.controlplane.making import ready, series

pytestmark = pytest.mark.django_db


def report(island: Island, version: Version, /, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "from_version": None,
        "version": version.number,
        "digest": version.state_digest,
        "outcome": "applied",
        "verified": True,
        "bytes": 100,
    }
    return services.report_sync(island, **(fields | changes))


def row(island: Island) -> selectors.FleetRow:
    return selectors.row(selectors.island(island.project, island.pk))


def beat(island: Island, version: Version | None, /, **changes: Any) -> tuple[list[Any], bool]:
    fields: dict[str, Any] = {
        "version": None if version is None else version.number,
        "digest": "" if version is None else version.state_digest,
        "epoch": 0,
        "phase": "idle",
        "reason": "",
    }
    return services.heartbeat(island, **(fields | changes))


# Enrolment


def test_a51_a_token_enrols_once(run: Run) -> None:
    channel = Channel.objects.get(run=run)
    _, plaintext = services.create_enrolment_token(run, channel, "porto", actor="owner")
    island, credential = services.enrol(run.project.slug, plaintext)
    bearer = accounts.authenticate_token(credential)
    assert bearer is not None and bearer.island == island
    with pytest.raises(services.EnrolmentUsed):
        services.enrol(run.project.slug, plaintext, name="thief")
    assert Island.objects.count() == 1
    assert Entry.objects.filter(action="enrolment.reused").exists()


def test_a51_an_expired_or_wrong_token_is_refused(run: Run) -> None:
    channel = Channel.objects.get(run=run)
    token, plaintext = services.create_enrolment_token(run, channel, "porto", actor="owner")
    EnrolmentToken.objects.filter(pk=token.pk).update(expires_at=Now() - timedelta(seconds=1))
    flipped = plaintext[:-1] + ("A" if plaintext[-1] != "A" else "B")
    for bad in (plaintext, flipped, "", "mb_0_0", plaintext.replace("mbe_", "mb_")):
        with pytest.raises(services.EnrolmentInvalid):
            services.enrol(run.project.slug, bad)
    with pytest.raises(services.EnrolmentInvalid):
        services.enrol("elsewhere", plaintext)


def test_secrets_are_not_stored(run: Run) -> None:
    channel = Channel.objects.get(run=run)
    _, plaintext = services.create_enrolment_token(run, channel, "porto", actor="owner")
    _, credential = services.enrol(run.project.slug, plaintext)
    stored = str([list(model.objects.values()) for model in (EnrolmentToken, Island, Entry)]) + str(
        list(run.project.tokens.values())
    )
    assert not any(secret.split("_", 2)[2] in stored for secret in (plaintext, credential))


# Reports


def test_a01_a_failed_report_leaves_the_island_behind_with_the_reason(run: Run, island: Island) -> None:
    versions = series(run, 2)
    report(island, versions[0])
    beat(island, versions[0])
    report(island, versions[1], outcome="failed", verified=False, error="The disk is full.")
    found = row(island)
    assert (found.sync, found.version, found.skew_versions) == (Sync.BEHIND, 0, 1)
    assert "The disk is full." in found.sync_reason
    beat(island, versions[0])
    assert "The disk is full." in row(island).sync_reason, "a quiet heartbeat does not wipe the reason out"
    report(island, versions[1])
    assert row(island).sync == Sync.CURRENT


@pytest.mark.parametrize("change", [{"verified": False}, {"digest": "f" * 64}, {"digest": ""}, {"version": 99}])
def test_a01_only_a_verified_report_with_the_recorded_digest_counts(run: Run, island: Island, change: Any) -> None:
    version = ready(run, 0)
    judged = report(island, version, **change)
    assert not judged.accepted and judged.error
    assert row(island).version is None and row(island).sync == Sync.UNKNOWN


def test_a11_the_digest_of_another_run_does_not_count(run: Run, other_run: Run, island: Island) -> None:
    ready(run, 0)
    foreign = ready(other_run, 0)
    assert not report(island, foreign).accepted
    assert "whose digest is" in row(island).sync_reason


def test_a_heartbeat_alone_puts_nobody_at_a_version(run: Run, island: Island) -> None:
    beat(island, ready(run, 0))
    assert row(island).sync == Sync.UNKNOWN and row(island).version is None


def test_a11_a_heartbeat_with_other_bytes_takes_the_proof_away(run: Run, island: Island) -> None:
    version = ready(run, 0)
    report(island, version)
    assert row(island).sync == Sync.CURRENT
    beat(island, version, digest="e" * 64)
    assert row(island).sync == Sync.UNKNOWN
    beat(island, None)
    assert "holds nothing" in row(island).sync_reason


def test_a57_an_island_whose_report_a_restore_took_back_is_asked_for_it(run: Run, island: Island) -> None:
    """Only where it would be accepted: an island whose version nobody knows would be asked for ever."""
    old = ready(run, 0)
    new = ready(run, 1, parent=old)
    report(island, new)
    assert beat(island, new) == ([], False)
    Island.objects.filter(pk=island.pk).update(verified_version=old)  # as the backup has it
    assert beat(island, new) == ([], True)
    assert row(island).sync == Sync.UNKNOWN
    assert beat(island, new, digest="ee" * 32) == ([], False)
    assert beat(island, None, version=7, digest=new.state_digest) == ([], False)
    report(island, new)
    assert beat(island, new) == ([], False)
    assert row(island).sync == Sync.CURRENT


def test_skew_in_versions_and_seconds(run: Run, island: Island) -> None:
    versions = series(run, 4)
    Version.objects.filter(pk=versions[2].pk).update(ready_at=Now() - timedelta(seconds=100))
    report(island, versions[1])
    found = row(island)
    assert (found.target, found.skew_versions) == (3, 2)
    assert found.skew_seconds is not None and 100 <= found.skew_seconds < 1000


def test_ahead_after_a_rollback(run: Run, island: Island) -> None:
    from controlplane.registry import heads

    versions = series(run, 3)
    report(island, versions[2])
    channel = Channel.objects.select_for_update().get(run=run)
    heads.move(channel, versions[1])
    found = row(island)
    assert (found.sync, found.skew_versions) == (Sync.AHEAD, 0)


def test_queries_do_not_grow_with_islands(run: Run, django_assert_max_num_queries: Any) -> None:
    versions = series(run, 2)
    for number in range(4):
        report(enrol(run, f"island-{number}")[0], versions[0])
    with django_assert_max_num_queries(4):
        assert len(selectors.fleet(run.project)) == 4


# Health


def facts(**changes: Any) -> Facts:
    fields: dict[str, Any] = {
        "enabled": True,
        "disabled_reason": "",
        "phase": "idle",
        "reason": "",
        "last_error": "",
        "seconds_since_seen": 1.0,
        "heartbeat_seconds": 5,
        "clock_skew_seconds": 0.0,
        "claimed_version": 1,
        "claimed_digest": "a",
        "verified_version": 1,
        "verified_digest": "a",
        "head_version": 1,
        "head_digest": "a",
    }
    return Facts(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "expected", "word"),
    [
        ({}, Health.HEALTHY, "in time"),
        ({"seconds_since_seen": 16.0}, Health.DEGRADED, "16 s"),
        ({"seconds_since_seen": 31.0}, Health.LOST, "31 s"),
        ({"seconds_since_seen": None}, Health.LOST, "never"),
        ({"phase": "error", "reason": "Disk full."}, Health.DEGRADED, "Disk full."),
        ({"enabled": False, "disabled_reason": "Lied."}, Health.DISABLED, "Lied."),
        ({"foreign_release": "0.0.1"}, Health.DEGRADED, "release 0.0.1"),
        ({"clock_skew_seconds": -7200.0}, Health.HEALTHY, "7200 s behind"),
    ],
)
def test_health_is_derived(changes: Any, expected: Health, word: str) -> None:
    state, reason = health(facts(**changes))
    assert state == expected and word in reason


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Sync.CURRENT),
        ({"head_version": 2, "head_digest": "b"}, Sync.BEHIND),
        ({"head_version": 2}, Sync.BEHIND),
        ({"head_version": 0, "head_digest": "z"}, Sync.AHEAD),
        ({"head_version": None, "head_digest": ""}, Sync.UNKNOWN),
        ({"verified_version": None, "verified_digest": ""}, Sync.UNKNOWN),
        ({"claimed_digest": "b"}, Sync.UNKNOWN),
    ],
)
def test_sync_status_is_derived(changes: Any, expected: Sync) -> None:
    assert sync(facts(**changes))[0] == expected


def test_a46_the_clock_of_an_island_decides_nothing(run: Run, island: Island) -> None:
    beat(island, None, time=0.0)
    found = row(island)
    assert found.health == Health.HEALTHY and "behind" in found.health_reason


# Challenges


@pytest.fixture
def challenge(run: Run, island: Island) -> Challenge:
    version = ready(run, 0)
    job, _ = jobs.enqueue("verify", run, {"island": str(island.pk)}, f"verify:{island.pk}")
    return services.open_challenge(job, island, version, b"n" * 32, [[0, 0, 16]])


def test_an_open_challenge_comes_with_the_heartbeat(challenge: Challenge) -> None:
    [command], _ = beat(challenge.island, challenge.version)
    assert command["challenge"] == str(challenge.pk)
    assert (command["nonce"], command["ranges"]) == ((b"n" * 32).hex(), [[0, 0, 16]])


def test_an_answer_is_taken_once(challenge: Challenge) -> None:
    held = {"version": 0, "digest": challenge.version.state_digest}
    services.answer_challenge(challenge.island, challenge.pk, **held, answer="a" * 64)
    services.answer_challenge(challenge.island, challenge.pk, **held, answer="a" * 64)
    with pytest.raises(WrongState):
        services.answer_challenge(challenge.island, challenge.pk, **held, answer="b" * 64)
    assert beat(challenge.island, challenge.version)[0] == []
    challenge.refresh_from_db()
    services.resolve(challenge, "passed")
    assert row(challenge.island).sync == Sync.CURRENT, "a proof from the bytes is worth more than a report"
    with pytest.raises(WrongState):
        services.resolve(challenge, "failed")


def test_an_island_that_moved_on_says_so(challenge: Challenge) -> None:
    answered = services.answer_challenge(challenge.island, challenge.pk, version=5, digest="c" * 64, answer="")
    assert answered.state == "moved"


def test_another_island_can_not_answer(run: Run, challenge: Challenge) -> None:
    other, _ = enrol(run, "madeira")
    with pytest.raises(Missing):
        services.answer_challenge(other, challenge.pk, version=0, digest="", answer="a" * 64)


def test_an_island_of_a_release_too_far_away_is_degraded(island_api: tuple[Island, Api], token: Any) -> None:
    island, api = island_api
    operator = token("operator")
    for agent, health_of_it in (("9.9.0", "degraded"), (__version__, "healthy"), ("unknown", "healthy")):
        api.headers["User-Agent"] = f"mailboat/{agent}"
        assert api.post(f"islands/{island.pk}/heartbeat", {"phase": "idle"}).status_code == 200
        told = operator.get(f"islands/{island.pk}").json()
        assert told["health"]["state"] == health_of_it, agent
    api.headers["User-Agent"] = "mailboat/9.9.0"
    api.post(f"islands/{island.pk}/heartbeat", {"phase": "idle"})
    assert "release 9.9.0" in operator.get(f"islands/{island.pk}").json()["health"]["reason"]
