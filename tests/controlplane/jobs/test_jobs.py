"""Jobs: one owner at a time, truthful outcomes, nothing lost when workers or the broker are."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models.functions import Now

from controlplane.jobs import services
from controlplane.jobs.models import Job
from controlplane.jobs.services import LostLease, TooLate
from controlplane.registry.models import Run
from tests.waiting import PATIENCE

pytestmark = pytest.mark.django_db


@pytest.fixture
def job(run: Run) -> Job:
    return services.enqueue("replay", run, {"version": 0}, "replay:0")[0]


def expire(job: Job) -> None:
    Job.objects.filter(pk=job.pk).update(lease_expires_at=Now() - timedelta(seconds=1))


def state(job: Job) -> str:
    return Job.objects.get(pk=job.pk).state


def test_a_second_trigger_joins_the_unfinished_job(run: Run, job: Job) -> None:
    again, new = services.enqueue("replay", run, {"version": 0}, "replay:0")
    assert (again, new) == (job, False)
    services.claim(job.pk, "w1")
    services.succeed(job.pk, "w1")
    assert services.enqueue("replay", run, {"version": 0}, "replay:0")[1]


@pytest.mark.django_db(transaction=True)
def test_workers_are_woken_after_the_commit(run: Run, sent: list[Any]) -> None:
    job, _ = services.enqueue("replay", run, {"version": 0}, "replay:0")
    assert sent == [(str(job.pk), "replay")]
    assert Job.objects.get(pk=job.pk).sent_at is not None


@pytest.mark.django_db(transaction=True)
def test_a50_a_broker_that_is_down_loses_nothing(run: Run, settings: Any, sent: list[Any]) -> None:
    sender, settings.MAILBOAT_JOB_SENDER = settings.MAILBOAT_JOB_SENDER, "tests.controlplane.jobs.test_jobs.broken"
    job, _ = services.enqueue("replay", run, {"version": 0}, "replay:0")
    assert state(job) == "queued"
    settings.MAILBOAT_JOB_SENDER = sender
    assert services.requeue_expired() == [job]
    assert sent == [(str(job.pk), "replay")]
    assert services.requeue_expired() == [], "what was just sent is not sent again at once"


def broken(job: str, kind: str) -> None:
    raise ConnectionError("the broker is down")


def test_claim_takes_a_queued_job_once(job: Job) -> None:
    claimed = services.claim(job.pk, "w1")
    assert claimed is not None and (claimed.owner, claimed.state, claimed.attempt) == ("w1", "running", 1)
    assert services.claim(job.pk, "w2") is None


@pytest.mark.django_db(transaction=True)
def test_of_many_claims_one_wins(job: Job) -> None:
    barrier, winners = threading.Barrier(4), []

    def work(name: str) -> None:
        try:
            barrier.wait(PATIENCE)
            if services.claim(job.pk, name):
                winners.append(name)
        finally:
            connection.close()

    threads = [threading.Thread(target=work, args=(f"w{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(winners) == 1


def test_a49_an_expired_lease_goes_to_another_worker(job: Job) -> None:
    services.claim(job.pk, "w1")
    services.requeue_expired()
    assert state(job) == "running", "a live lease is left alone"
    expire(job)
    services.requeue_expired()
    again = services.claim(job.pk, "w2")
    assert again is not None and again.attempt == 2
    for call in (services.renew, services.succeed):
        with pytest.raises(LostLease):
            call(job.pk, "w1")
    with pytest.raises(LostLease):
        services.progress(job.pk, "w1", 1, 2, "tensors")
    with pytest.raises(LostLease):
        services.fail(job.pk, "w1", "late")
    services.succeed(job.pk, "w2", {"identical": True})
    assert Job.objects.get(pk=job.pk).result == {"identical": True}
    assert any("did not renew" in event.message for event in job.events.all())


def test_a_renewed_lease_is_not_taken(job: Job) -> None:
    services.claim(job.pk, "w1")
    expire(job)
    assert services.renew(job.pk, "w1") == "running"
    services.requeue_expired()
    assert Job.objects.get(pk=job.pk).owner == "w1"


def test_a_job_that_ends_its_workers_is_given_up(job: Job) -> None:
    for attempt in range(services.MAX_ATTEMPTS):
        assert services.claim(job.pk, f"w{attempt}") is not None
        expire(job)
        services.requeue_expired()
    row = Job.objects.get(pk=job.pk)
    assert row.state == "failed" and "given up" in row.error


def test_progress_is_seen_and_keeps_the_lease(job: Job) -> None:
    services.claim(job.pk, "w1")
    expire(job)
    assert services.progress(job.pk, "w1", 3, 10, "tensors") == "running"
    row = Job.objects.get(pk=job.pk)
    assert (row.done, row.total, row.unit) == (3, 10, "tensors")
    services.requeue_expired()
    assert state(job) == "running"


def test_cancel_of_a_queued_job_is_immediate(job: Job) -> None:
    assert services.cancel(job, "owner").state == "cancelled"
    assert services.claim(job.pk, "w1") is None


def test_cancel_of_a_running_job_waits_for_the_worker(job: Job) -> None:
    services.claim(job.pk, "w1")
    assert services.cancel(job, "owner").state == "cancelling"
    assert services.cancel(job, "owner").state == "cancelling"
    assert services.renew(job.pk, "w1") == "cancelling"
    services.cancelled(job.pk, "w1")
    assert state(job) == "cancelled"


def test_cancel_tells_the_truth_when_it_is_too_late(job: Job) -> None:
    services.claim(job.pk, "w1")
    services.cancel(job, "owner")
    services.succeed(job.pk, "w1")
    with pytest.raises(TooLate):
        services.cancel(job, "owner")
    assert state(job) == "succeeded"


def test_a_lost_worker_of_a_cancelled_job_ends_it(job: Job) -> None:
    services.claim(job.pk, "w1")
    services.cancel(job, "owner")
    expire(job)
    services.requeue_expired()
    assert state(job) == "cancelled"


def test_a_job_waits_for_the_one_before_it(
    run: Run, job: Job, sent: list[Any], django_capture_on_commit_callbacks: Any
) -> None:
    second, _ = services.enqueue("replay", run, {"version": 1}, "replay:1", after=job)
    assert services.claim(second.pk, "w1") is None
    services.claim(job.pk, "w1")
    sent.clear()
    with django_capture_on_commit_callbacks(execute=True):
        services.fail(job.pk, "w1", "no")
    assert sent == [(str(second.pk), "replay")]
    assert services.claim(second.pk, "w1") is not None


@pytest.mark.parametrize(
    ("queued", "sent_before", "again"), [(20, 15, False), (30, 25, True), (300, 100, False), (9000, 700, True)]
)
def test_a_lost_wake_up_is_sent_again_and_ever_rarer(job: Job, queued: int, sent_before: int, again: bool) -> None:
    Job.objects.filter(pk=job.pk).update(
        queued_at=Now() - timedelta(seconds=queued), sent_at=Now() - timedelta(seconds=sent_before)
    )
    assert services.requeue_expired() == ([job] if again else [])
