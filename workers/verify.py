"""Verify: asks an island for a keyed digest over random byte ranges and computes the same from the worker's own bytes.

A right answer proves that the island holds the bytes, not that it serves them. A wrong one disables the island, with
the evidence in its reason, in the challenge and in the job's result. No worker waits for an island: between question
and answer the job is parked.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from random import SystemRandom
from typing import Any, NoReturn

import numpy as np
from blake3 import blake3

from controlplane.fleet import services as fleet
from controlplane.fleet.models import Challenge, Island
from controlplane.registry import clock, routes
from controlplane.registry.errors import Missing, Refusal, WrongState
from controlplane.registry.models import Version
from mailboat.checkpoint.inventory import Inventory
from mailboat.checkpoint.source import TensorSource
from workers.copy import Copy
from workers.rebuild import walk
from workers.work import Findings, Parked, Work, environment

DEADLINE_SECONDS = 60.0
QUESTIONS = 5  # an island may move on between question and answer
RANGES = 64
RANGE_BYTES = 64 << 10  # together at most 4 MiB
NONCE_BYTES = 32

Ranges = list[tuple[int, int, int]]


def verify(work: Work) -> dict[str, Any]:
    """The job. Asks and lets its worker go; goes on when the island has answered, or has had its time.

    Fails with a finding when the island does not hold what it reported.
    """
    island, saved = _island(work), work.saved
    if saved is None:
        _ask(work, island, 1)
    challenge = _challenge(saved)
    if challenge.state == Challenge.State.OPEN:
        left = DEADLINE_SECONDS - (clock.now() - challenge.created_at).total_seconds()
        if left > 0:
            raise _waits(island, challenge, saved, left)
        _expire(island, challenge)
    if challenge.state == Challenge.State.MOVED:
        work.log(f"Island {island.name} moved on meanwhile; asking again.")
        _ask(work, island, int(saved["question"]) + 1)
    if challenge.state != Challenge.State.ANSWERED:
        _ask(work, island, int(saved["question"]))
    answered = challenge.answered_at or challenge.created_at
    facts = {
        "island": island.name,
        "version": challenge.version.number,
        "challenge": str(challenge.pk),
        "ranges": len(challenge.ranges),
        "bytes": sum(length for _, _, length in challenge.ranges),
        "seconds": round((answered - challenge.created_at).total_seconds(), 3),
        "environment": environment(),
    }
    return _judge(work, island, challenge, str(saved["expected"]), facts)


def _ask(work: Work, island: Island, question: int) -> NoReturn:
    """Computes the right answer first, so that the island is not bothered when that is impossible."""
    if question > QUESTIONS:
        sentence = f"Island {island.name} moved to another version {QUESTIONS} times; verify it again."
        raise Findings(sentence, {"island": island.name, "questions": QUESTIONS, "environment": environment()})
    version = _held(island)
    nonce = secrets.token_bytes(NONCE_BYTES)
    with _bytes_of(work, version) as source:
        ranges = choose(source.inventory)
        expected = answer_of(source, nonce, ranges)
    work.check()
    challenge = fleet.open_challenge(work.job, island, version, nonce, ranges)
    work.log(f"Question {question}: {len(ranges)} ranges of version {version.number}.")
    saved = {"challenge": str(challenge.pk), "expected": expected, "question": question}
    raise _waits(island, challenge, saved, DEADLINE_SECONDS)


def _waits(island: Island, challenge: Challenge, saved: dict[str, Any], seconds: float) -> Parked:
    def unanswered() -> bool:
        return Challenge.objects.filter(pk=challenge.pk, state=Challenge.State.OPEN).exists()

    waiting_for = f"the answer of island {island.name}"
    return Parked(waiting_for, until=timedelta(seconds=seconds), saved=saved, still=unanswered)


def _challenge(saved: dict[str, Any]) -> Challenge:
    return Challenge.objects.select_related("version", "island").get(pk=saved["challenge"])


def choose(inventory: Inventory) -> Ranges:
    """Random ranges (tensor, offset, length) over all bytes alike, at most 4 MiB together, hard to guess."""
    random = SystemRandom()
    sizes = np.array([tensor.nbytes for tensor in inventory.tensors], dtype=np.int64)
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if ends.size else 0
    ranges = set()
    for _ in range(RANGES if total else 0):
        at = random.randrange(total)
        tensor = int(np.searchsorted(ends, at, side="right"))
        offset = at - int(ends[tensor] - sizes[tensor])
        ranges.add((tensor, offset, min(RANGE_BYTES, int(sizes[tensor]) - offset)))
    return sorted(ranges)


def answer_of(source: TensorSource, nonce: bytes, ranges: Ranges) -> str:
    """Keyed BLAKE3 (key: the nonce) over u32 tensor | u64 offset | u32 length | bytes of each range, as hex."""
    digest = blake3(key=nonce)
    for tensor, offset, length in ranges:
        digest.update(tensor.to_bytes(4, "little") + offset.to_bytes(8, "little") + length.to_bytes(4, "little"))
        out = np.empty(length, dtype=np.uint8)
        source.read(tensor, offset, out)
        digest.update(out.data)
    return digest.hexdigest()


@contextmanager
def _bytes_of(work: Work, version: Version) -> Iterator[TensorSource]:
    """The bytes of a version: the worker's copy where it is there or ahead, else a rebuild in the scratch folder."""
    with Copy(work, version.run) as copy:
        image = copy.bring_to(version) if _latest(version) else copy.at(version)
        if image is not None:
            yield image
            return
    route = routes.find(version.run, "", version.number, scope=routes.PUBLISHED)
    rebuilt = walk(work, version.run, route, folder=work.scratch / "image")
    try:
        yield rebuilt
    finally:
        rebuilt.close()


def _latest(version: Version) -> bool:
    newer = Version.objects.filter(run=version.run, number__gt=version.number, state=Version.State.READY)
    return not newer.exists()


def _island(work: Work) -> Island:
    try:
        return Island.objects.select_related("run", "project").get(project=work.job.project, pk=work.params["island"])
    except (Island.DoesNotExist, KeyError):
        raise Missing("The island of this job is gone; queue it for another one.") from None


def _held(island: Island) -> Version:
    """The version that the island claims to hold."""
    island.refresh_from_db()
    known = Version.objects.select_related("run").filter(run=island.run, state__in=["ready", "retired"])
    number = island.version_number
    version = None if number is None else known.filter(number=number, state_digest=island.digest).first()
    if version is None:
        raise Refusal(
            f"Island {island.name} has not reported a version of this run; wait until it has.", code="no_version"
        )
    return version


def _expire(island: Island, challenge: Challenge) -> None:
    """Closes a question that had its time. Raises Findings, unless the answer came in the last moment."""
    try:
        fleet.resolve(challenge, Challenge.State.EXPIRED)
    except WrongState:
        challenge.refresh_from_db()
        return
    raise Findings(
        f"Island {island.name} did not answer within {DEADLINE_SECONDS:.0f} s; verify it again once it runs.",
        {"island": island.name, "challenge": str(challenge.pk), "environment": environment()},
    )


def _judge(work: Work, island: Island, challenge: Challenge, expected: str, facts: dict[str, Any]) -> dict[str, Any]:
    number = facts["version"]
    if secrets.compare_digest(challenge.answer, expected):
        fleet.resolve(challenge, Challenge.State.PASSED)
        work.log(f"Island {island.name} holds version {number}.")
        return {**facts, "passed": True}
    said = challenge.error or f"answered {challenge.answer[:16] or 'nothing'}, expected {expected[:16]}"
    sentence = f"Island {island.name} does not hold the bytes of version {number} that it reports: it {said}."
    fleet.resolve(challenge, Challenge.State.FAILED, sentence)
    fleet.set_enabled(island, False, reason=f"{sentence} (job {work.job.pk})", actor="verify")
    raise Findings(sentence, {**facts, "passed": False, "expected": expected, "found": challenge.answer})
