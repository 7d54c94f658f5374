"""Verify: an island that holds the bytes passes, one that does not is found and disabled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mailboat.digest import measure
from tests.waiting import eventually
from tests.workers.checkpoints import first, following, publish, source, work_on

pytestmark = pytest.mark.usefixtures("unsent")

Answer = Callable[[Any], dict[str, Any]]


@pytest.fixture
def versions(run: Any, tmp_path: Path) -> list[tuple[Any, Any]]:
    """Versions 0 and 1 with their arrays."""
    arrays = first()
    zero = work_on(publish(run, arrays, 0, None, tmp_path))
    after = following(arrays, 2)
    one = work_on(publish(run, after, 1, (arrays, zero), tmp_path))
    assert one.state == "ready"
    return [(zero, arrays), (one, after)]


@pytest.fixture
def island(run: Any, versions: list[tuple[Any, Any]]) -> Any:
    """An island that reported version 1."""
    from controlplane.fleet import services

    channel = run.channels.get(name="latest")
    _, plaintext = services.create_enrolment_token(run, channel, "pier", actor="test")
    island, _ = services.enrol(run.project.slug, plaintext)
    report(island, versions[1][0])
    return island


def report(island: Any, version: Any) -> None:
    from controlplane.fleet import services

    services.report_sync(
        island, from_version=None, version=version.number, digest=version.state_digest, outcome="applied", verified=True
    )


def answering(island: Any, answer: Answer) -> threading.Event:
    """Answers every question of the island's heartbeats until the returned event is set."""
    from django.db import connections

    from controlplane.fleet import services

    done = threading.Event()

    def body() -> None:
        try:
            while not done.wait(0.05):
                island.refresh_from_db()
                commands, _ = services.heartbeat(
                    island, version=island.version_number, digest=island.digest, epoch=0, phase="idle", reason=""
                )
                for command in commands:
                    services.answer_challenge(island, command["challenge"], **answer(command))
        finally:
            connections.close_all()

    threading.Thread(target=body, daemon=True).start()
    return done


def honest(arrays: Any) -> Answer:
    def answer(command: dict[str, Any]) -> dict[str, Any]:
        from workers.verify import answer_of

        ranges = [tuple(item) for item in command["ranges"]]
        text = answer_of(source(arrays), bytes.fromhex(command["nonce"]), ranges)
        return {"version": command["version"], "digest": command["digest"], "answer": text}

    return answer


def verify(island: Any) -> Any:
    from controlplane.jobs import services
    from workers import runner

    job, _ = services.enqueue("verify", island.run, {"island": str(island.pk)}, f"verify:{island.pk}")

    def ended() -> bool:
        runner.run(str(job.pk))  # not to be had while it waits for the answer
        job.refresh_from_db()
        return bool(job.finished)

    eventually(ended)
    island.refresh_from_db()
    return job


def test_the_worker_is_free_while_an_island_does_not_answer(island: Any, unsent: list[str]) -> None:
    """An island that is away must not hold the queue up for everybody else's checks."""
    from controlplane.fleet.models import Challenge
    from controlplane.jobs import services
    from workers import runner

    job, _ = services.enqueue("verify", island.run, {"island": str(island.pk)}, f"verify:{island.pk}")
    runner.run(str(job.pk))
    job.refresh_from_db()
    assert (job.state, job.owner, job.attempt) == ("queued", "", 1)
    assert job.waiting_for == "the answer of island pier"
    assert services.claim(job.pk, "somebody") is None
    assert services.requeue_expired() == []
    challenge = Challenge.objects.get(job=job)
    assert challenge.state == "open"


def test_an_answer_in_the_moment_of_parking_is_not_missed(island: Any, versions: Any, unsent: list[str]) -> None:
    from controlplane.fleet import services as fleet
    from controlplane.jobs import services
    from workers import runner, verify

    job, _ = services.enqueue("verify", island.run, {"island": str(island.pk)}, f"verify:{island.pk}")
    waits = verify._waits

    def answered_at_once(island: Any, challenge: Any, saved: Any, seconds: float) -> Any:
        command = {
            "version": challenge.version.number,
            "digest": challenge.version.state_digest,
            "nonce": challenge.nonce,
            "ranges": challenge.ranges,
        }
        fleet.answer_challenge(island, challenge.pk, **honest(versions[1][1])(command))
        return waits(island, challenge, saved, seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "_waits", answered_at_once)
        runner.run(str(job.pk))
    job.refresh_from_db()
    assert (job.state, job.waiting_for, job.not_before) == ("queued", "", None)
    assert unsent.count(str(job.pk)) == 2
    runner.run(str(job.pk))
    job.refresh_from_db()
    assert job.state == "succeeded", job.error


def test_a_verification_that_waits_can_be_cancelled(island: Any) -> None:
    from controlplane.jobs import services
    from workers import runner

    job, _ = services.enqueue("verify", island.run, {"island": str(island.pk)}, f"verify:{island.pk}")
    runner.run(str(job.pk))
    assert services.cancel(job, "owner").state == "cancelled"
    assert island.challenges.get().state == "expired"  # nobody is left to judge an answer


def test_an_island_that_holds_the_bytes_passes(island: Any, versions: Any) -> None:
    done = answering(island, honest(versions[1][1]))
    try:
        job = verify(island)
    finally:
        done.set()
    assert job.state == "succeeded", job.error
    assert job.result["passed"] is True
    assert 0 < job.result["bytes"] <= 4 << 20
    assert island.enabled


def test_a47_an_island_that_holds_other_bytes_is_disabled_with_evidence(island: Any, versions: Any) -> None:
    wrong = {name: array.copy() for name, array in versions[1][1].items()}
    wrong["model.weight"][...] ^= 1
    done = answering(island, honest(wrong))
    try:
        job = verify(island)
    finally:
        done.set()
    assert job.state == "failed"
    assert "pier does not hold the bytes of version 1" in job.error
    assert job.result["passed"] is False
    assert job.result["expected"] != job.result["found"]
    assert not island.enabled
    assert str(job.pk) in island.disabled_reason
    assert island.challenges.get().state == "failed"


def test_an_island_that_can_not_answer_is_disabled_with_its_reason(island: Any) -> None:
    def answer(command: dict[str, Any]) -> dict[str, Any]:
        return {"version": command["version"], "digest": command["digest"], "answer": "", "error": "the image is gone"}

    done = answering(island, answer)
    try:
        job = verify(island)
    finally:
        done.set()
    assert job.state == "failed"
    assert "the image is gone" in job.error
    assert not island.enabled


def test_an_older_version_is_computed_from_a_rebuild(island: Any, versions: Any, home: Path) -> None:
    from controlplane.fleet.models import Island

    zero, arrays = versions[0]
    Island.objects.filter(pk=island.pk).update(version_number=0, digest=zero.state_digest)
    done = answering(island, honest(arrays))
    try:
        job = verify(island)
    finally:
        done.set()
    assert job.state == "succeeded", job.error
    assert job.result["version"] == 0
    from mailboat.image import Image

    image = Image.open(home / "copies" / str(island.run_id) / "image")
    assert image.digest == measure(source(versions[1][1])).digest  # the copy did not go back
    image.close()


def test_an_island_that_moved_on_is_asked_again(island: Any, versions: Any, run: Any, tmp_path: Path) -> None:
    one, arrays = versions[1]
    after = following(arrays, 9)
    two = work_on(publish(run, after, 2, (arrays, one), tmp_path))
    asked = []

    def answer(command: dict[str, Any]) -> dict[str, Any]:
        asked.append(command["version"])
        if command["version"] == 1:
            report(island, two)
            return {"version": 2, "digest": two.state_digest, "answer": ""}
        return honest(after)(command)

    done = answering(island, answer)
    try:
        job = verify(island)
    finally:
        done.set()
    assert job.state == "succeeded", job.error
    assert asked == [1, 2]
    assert island.enabled


def test_no_answer_fails_without_a_verdict(island: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from workers import verify as module

    monkeypatch.setattr(module, "DEADLINE_SECONDS", 0.3)
    job = verify(island)
    assert job.state == "failed"
    assert "did not answer" in job.error
    assert island.enabled
    assert island.challenges.get().state == "expired"


def test_ranges_lie_within_their_tensors_and_cover_all_of_them_alike() -> None:
    from workers.verify import choose

    inventory = source({**first(), "empty": np.zeros((0, 4), np.uint16)}).inventory
    for _ in range(20):
        ranges = choose(inventory)
        assert ranges == sorted(set(ranges))
        assert sum(length for _, _, length in ranges) <= 4 << 20
        for tensor, offset, length in ranges:
            assert 0 < length <= inventory.tensors[tensor].nbytes - offset
    assert choose(inventory) != choose(inventory)
