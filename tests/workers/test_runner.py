"""Leases, cancels and outcomes of one job, with the work itself replaced by a few lines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from mailboat.errors import StoreError
from tests.waiting import PATIENCE, eventually

pytestmark = pytest.mark.usefixtures("unsent")


@pytest.fixture
def work_is(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], Any]], None]:
    from workers import runner

    return lambda function: monkeypatch.setattr(runner, "function_of", lambda _kind: function)


def queue(run: Any, key: str = "one") -> Any:
    from controlplane.jobs import services

    job, _ = services.enqueue("validate", run, {"version": 0}, key)
    return job


def go(job: Any) -> None:
    from workers import runner

    runner.run(str(job.pk))
    job.refresh_from_db()


def in_a_thread(job: Any) -> threading.Thread:
    from django.db import connections

    from workers import runner

    def body() -> None:
        try:
            runner.run(str(job.pk))
        finally:
            connections.close_all()

    thread = threading.Thread(target=body)
    thread.start()
    return thread


def test_outcome_progress_and_log_are_recorded(run: Any, work_is: Any) -> None:
    def work(w: Any) -> dict[str, Any]:
        w.log("Half way.")
        w.progress(1, 2, "steps")
        return {"found": 7}

    work_is(work)
    job = queue(run)
    go(job)
    assert (job.state, job.result, job.error) == ("succeeded", {"found": 7}, "")
    assert (job.done, job.total, job.unit) == (1, 2, "steps")
    assert "Half way." in list(job.events.values_list("message", flat=True))


def test_a_known_error_fails_the_job_with_its_sentence(run: Any, work_is: Any) -> None:
    def work(_w: Any) -> dict[str, Any]:
        raise StoreError("The blob is gone; upload it again.")

    work_is(work)
    job = queue(run)
    go(job)
    assert (job.state, job.error) == ("failed", "The blob is gone; upload it again.")


def test_an_unknown_error_fails_the_job_with_a_short_reason(run: Any, work_is: Any) -> None:
    def work(_w: Any) -> dict[str, Any]:
        raise ZeroDivisionError("x" * 5000)

    work_is(work)
    job = queue(run)
    go(job)
    assert job.state == "failed"
    assert job.error.startswith("The worker met an unexpected ZeroDivisionError")
    assert len(job.error) < 500


def test_a_message_that_comes_again_finds_the_job_taken(run: Any, work_is: Any) -> None:
    entered, leave = threading.Event(), threading.Event()
    times = []

    def work(_w: Any) -> dict[str, Any]:
        times.append(1)
        entered.set()
        assert leave.wait(PATIENCE)
        return {}

    work_is(work)
    job = queue(run)
    thread = in_a_thread(job)
    assert entered.wait(PATIENCE)
    go(job)  # the same message
    assert job.state == "running"
    leave.set()
    thread.join()
    go(job)  # and once more, after the end
    assert job.state == "succeeded"
    assert times == [1]


def test_a_long_job_keeps_its_lease(run: Any, work_is: Any, settings: Any) -> None:
    settings.MAILBOAT_LEASE_SECONDS = 6
    from controlplane.jobs import services

    entered, leave = threading.Event(), threading.Event()

    def work(w: Any) -> dict[str, Any]:
        entered.set()
        assert leave.wait(PATIENCE)
        w.check()
        return {}

    work_is(work)
    job = queue(run)
    thread = in_a_thread(job)
    assert entered.wait(PATIENCE)
    ends = set()

    def kept_twice() -> bool:
        services.requeue_expired()
        job.refresh_from_db()
        assert (job.state, job.attempt) == ("running", 1)
        ends.add(job.lease_expires_at)
        return len(ends) > 2

    eventually(kept_twice)
    leave.set()
    thread.join()
    job.refresh_from_db()
    assert job.state == "succeeded"


def test_a_cancel_is_honoured(run: Any, work_is: Any) -> None:
    from controlplane.jobs import services

    entered = threading.Event()

    def work(w: Any) -> dict[str, Any]:
        entered.set()
        while True:
            w.progress(0, None, "bytes")
            time.sleep(0.02)

    work_is(work)
    job = queue(run)
    thread = in_a_thread(job)
    assert entered.wait(PATIENCE)
    services.cancel(job, "somebody")
    thread.join(PATIENCE)
    job.refresh_from_db()
    assert job.state == "cancelled"


def test_a_lost_lease_stops_the_work_and_nothing_is_recorded(run: Any, work_is: Any) -> None:
    from controlplane.jobs.models import Job

    entered, stopped = threading.Event(), threading.Event()

    def work(w: Any) -> dict[str, Any]:
        entered.set()
        try:
            while True:
                w.progress(0, None, "bytes")
                time.sleep(0.02)
        except BaseException:
            stopped.set()
            raise

    work_is(work)
    job = queue(run)
    thread = in_a_thread(job)
    assert entered.wait(PATIENCE)
    Job.objects.filter(pk=job.pk).update(owner="another")
    thread.join(PATIENCE)
    assert stopped.is_set()
    job.refresh_from_db()
    assert (job.state, job.owner) == ("running", "another")


def test_a_worker_that_is_told_to_end_hands_the_job_back(run: Any, work_is: Any) -> None:
    from controlplane.jobs import services
    from workers import lease

    entered = threading.Event()

    def work(w: Any) -> dict[str, Any]:
        entered.set()
        while True:
            w.check()
            time.sleep(0.02)

    work_is(work)
    job = queue(run)
    thread = in_a_thread(job)
    assert entered.wait(PATIENCE)
    lease.stopping.set()
    try:
        thread.join(PATIENCE)
    finally:
        lease.stopping.clear()
    eventually(lambda: services.requeue_expired() or Job_state(job) == "queued")
    job.refresh_from_db()
    assert (job.state, job.attempt) == ("queued", 2)


def test_a50_a_database_that_is_away_for_a_moment_does_not_lose_the_outcome(
    run: Any, work_is: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from django.db import OperationalError

    from controlplane.jobs import services

    original, failures = services.succeed, [OperationalError("gone"), OperationalError("starting up")]

    def flaky(*arguments: Any) -> None:
        if failures:
            raise failures.pop()
        original(*arguments)

    monkeypatch.setattr(services, "succeed", flaky)
    work_is(lambda _w: {"found": 1})
    job = queue(run)
    go(job)
    assert (job.state, job.result) == ("succeeded", {"found": 1})


def Job_state(job: Any) -> str:
    job.refresh_from_db()
    return str(job.state)
