"""Writes of background work: queueing, leases, progress, outcome.

Every transition is one conditional UPDATE that names the expected state, and the owner where there is one; anything
but one row raises. Times come from the database's clock. A message to a worker is only a wake-up: it may be lost or
come twice.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import structlog
from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import (
    Case,
    DateTimeField,
    DurationField,
    Exists,
    ExpressionWrapper,
    F,
    OuterRef,
    Q,
    Value,
    When,
)
from django.db.models.functions import Coalesce, Least, Now
from django.utils.module_loading import import_string

from controlplane.audit import services as audit
from controlplane.jobs.models import Job, JobEvent
from controlplane.jobs.signals import job_ended
from controlplane.registry.errors import Refusal
from controlplane.registry.models import Project, Run

log_ = structlog.get_logger(__name__)

MAX_ATTEMPTS = 5
RESEND_AFTER = timedelta(seconds=20)
RESEND_AT_LEAST_EVERY = timedelta(minutes=10)
RERUNNABLE = frozenset({Job.Kind.REPLAY, Job.Kind.VERIFY, Job.Kind.COLLECT, Job.Kind.MERGE, Job.Kind.ANCHOR})
State = Job.State
JobId = uuid.UUID | str


class LostLease(Refusal):
    """The job is no longer this owner's: its lease ran out or it has ended. Stop working on it."""

    code = "lost_lease"


class TooLate(Refusal):
    """The job has already ended."""

    code = "job_finished"


def enqueue(
    kind: str,
    run: Run | None,
    params: Mapping[str, Any],
    dedupe_key: str,
    *,
    project: Project | None = None,
    requested_by: str = "system",
    after: Job | None = None,
    rerun_of: Job | None = None,
) -> tuple[Job, bool]:
    """Queues work in the current transaction and wakes a worker once it has committed.

    Returns the job and whether it is new: while a job with the same `dedupe_key` is unfinished, the caller joins that
    one. With `after`, the job can't be claimed before that one has ended. A broker that is down does not matter: the
    sweeper sends again.
    """
    owner_project = project or (run.project if run else None)
    if owner_project is None:
        raise ValueError("a job needs a run or a project")
    while True:
        try:
            with transaction.atomic():
                job = Job.objects.create(
                    project=owner_project,
                    run=run,
                    kind=kind,
                    params=dict(params),
                    dedupe_key=dedupe_key,
                    requested_by=requested_by[:120],
                    after=after,
                    rerun_of=rerun_of,
                )
        except IntegrityError:
            running = Job.objects.filter(project=owner_project, dedupe_key=dedupe_key, state__in=Job.UNFINISHED).first()
            if running is not None:
                return running, False
            continue  # it ended between the two statements
        audit.record(
            owner_project, requested_by, "job.enqueue", f"job {job.pk}", after={"kind": kind, "params": dict(params)}
        )
        send_after_commit(job)
        return job, True


def send_after_commit(job: Job) -> None:
    """Wakes a worker for the job when the current transaction commits."""
    transaction.on_commit(lambda: send([job]), robust=True)


def send(jobs: Sequence[Job]) -> None:
    """Sends wake-ups now. A broker that can't be reached is logged, never raised."""
    try:
        sender = import_string(settings.MAILBOAT_JOB_SENDER)
        for job in jobs:
            sender(str(job.pk), job.kind)
    except Exception as error:  # noqa: BLE001  whatever a broker's client raises
        log_.warning(
            "job not sent; the sweeper will send it again", jobs=[str(job.pk) for job in jobs], error=str(error)
        )
        return
    Job.objects.filter(pk__in=[job.pk for job in jobs]).update(sent_at=Now())


def wake(job_id: JobId) -> bool:
    """What the job waited for is there: it may go on at once. Call inside the transaction that brought it.

    False when the job does not wait (any more).
    """
    with transaction.atomic():
        # The lock makes `park`, when it is under way, come before or after this as a whole.
        job = Job.objects.select_for_update().filter(pk=job_id).first()
        if job is None or job.state != State.QUEUED or not job.waiting_for:
            return False
        Job.objects.filter(pk=job_id).update(waiting_for="", not_before=None)
        send_after_commit(job)
    return True


def park(
    job_id: JobId,
    owner: str,
    waiting_for: str,
    *,
    until: timedelta,
    saved: Mapping[str, Any],
    still: Callable[[], bool] = lambda: True,
) -> None:
    """running -> queued, without counting an attempt: lets the worker go while the job waits for something outside.

    The job goes on with `saved` when `wake` is called, or `until` has passed. `still` says, once the row is written,
    whether there is anything to wait for. A job that was asked to stop is cancelled instead. Raises LostLease.
    """
    with transaction.atomic():
        rows = Job.objects.filter(pk=job_id, owner=owner, state=State.RUNNING).update(
            state=State.QUEUED,
            owner="",
            lease_expires_at=None,
            sent_at=Now(),
            waiting_for=waiting_for[:200],
            not_before=Now() + until,
            saved=dict(saved),
        )
        if rows != 1:
            cancelled(job_id, owner)
            return
        log(job_id, "info", f"Waits for {waiting_for}; the worker is free meanwhile.")
        if not still():
            wake(job_id)


def rerun(job: Job, actor: str) -> tuple[Job, bool]:
    """Queues the same work again after it failed or was cancelled; joins it when it is queued already.

    Raises Refusal `not_finished` and `not_rerunnable`: a version that failed keeps its number, and its publisher
    publishes the next one.
    """
    if job.state not in {State.FAILED, State.CANCELLED}:
        raise Refusal(f"The job is {job.state}; only failed and cancelled jobs are run again.", code="not_rerunnable")
    if job.kind not in RERUNNABLE:
        raise Refusal(
            f"A {job.kind} job ends with its version; publish the next version instead.", code="not_rerunnable"
        )
    with transaction.atomic():
        again, new = enqueue(
            job.kind, job.run, job.params, job.dedupe_key, project=job.project, requested_by=actor, rerun_of=job
        )
        if new:
            log(again.pk, "info", f"Runs job {job.pk} again, asked for by {actor}.")
    return again, new


def claim(job_id: JobId, owner: str, *, lease_seconds: int | None = None) -> Job | None:
    """Makes a queued job this owner's. None when it is not to be had: taken, ended, unknown, or waiting for another
    job.
    """
    rows = Job.objects.filter(_not_waiting(), pk=job_id, state=State.QUEUED).update(
        state=State.RUNNING,
        owner=owner,
        lease_expires_at=_lease(lease_seconds),
        started_at=Case(When(saved__isnull=True, then=Now()), default=Coalesce("started_at", Now())),
        waiting_for="",
        not_before=None,
        done=0,
        total=None,
    )
    if rows != 1:
        return None
    job = Job.objects.select_related("project", "run").get(pk=job_id)
    log(job_id, "info", f"{'Started' if job.saved is None else 'Goes on'} with {owner}, attempt {job.attempt}.")
    return job


def renew(job_id: JobId, owner: str, *, lease_seconds: int | None = None) -> str:
    """Keeps the lease. Returns the state: `cancelling` means that somebody asked to stop. Raises LostLease."""
    _held(job_id, owner, lease_expires_at=_lease(lease_seconds))
    return str(Job.objects.values_list("state", flat=True).get(pk=job_id))


def progress(job_id: JobId, owner: str, done: int, total: int | None, unit: str) -> str:
    """Records how far the work is and keeps the lease; returns the state like `renew`. Raises LostLease."""
    _held(job_id, owner, done=done, total=total, unit=unit, lease_expires_at=_lease(None))
    return str(Job.objects.values_list("state", flat=True).get(pk=job_id))


def log(job_id: JobId, level: str, message: str) -> None:
    """Adds a line to the job's log."""
    JobEvent.objects.create(job_id=job_id, level=level, message=message[:4000])


def succeed(job_id: JobId, owner: str, result: Mapping[str, Any] | None = None) -> None:
    """running or cancelling -> succeeded. Raises LostLease."""
    _end(job_id, owner, State.SUCCEEDED, (State.RUNNING, State.CANCELLING), result=dict(result or {}))


def fail(job_id: JobId, owner: str, error: str, result: Mapping[str, Any] | None = None) -> None:
    """running or cancelling -> failed, with one sentence. Raises LostLease."""
    _end(job_id, owner, State.FAILED, (State.RUNNING, State.CANCELLING), error=error[:4000], result=dict(result or {}))


def cancelled(job_id: JobId, owner: str) -> None:
    """cancelling -> cancelled: the worker has stopped, as it was asked to. Raises LostLease."""
    _end(job_id, owner, State.CANCELLED, (State.CANCELLING,), error="Cancelled on request.")


def cancel(job: Job, actor: str) -> Job:
    """Asks to stop: queued -> cancelled at once, running -> cancelling until the worker has stopped. Raises TooLate."""
    with transaction.atomic():
        if Job.objects.filter(pk=job.pk, state=State.QUEUED).update(
            state=State.CANCELLED, finished_at=Now(), error=f"Cancelled by {actor} before it started."
        ):
            _ended(job.pk)
        elif not Job.objects.filter(pk=job.pk, state=State.RUNNING).update(state=State.CANCELLING):
            job.refresh_from_db()
            if job.state != State.CANCELLING:
                raise TooLate(f"The job has already ended: {job.state}.")
            return job
        log(job.pk, "warning", f"{actor} asked to cancel.")
        audit.record(job.project, actor, "job.cancel", f"job {job.pk}", before={"state": job.state})
    job.refresh_from_db()
    return job


def requeue_expired() -> list[Job]:
    """The sweeper: takes jobs back whose lease ran out, and sends queued ones again that no worker has claimed.

    After MAX_ATTEMPTS a job fails: something about it ends its workers. Returns the jobs that were sent.
    """
    expired = Job.objects.filter(state__in=[State.RUNNING, State.CANCELLING], lease_expires_at__lt=Now())
    for job in list(expired):
        with transaction.atomic():
            _take_back(job)
    waiting = (
        Job.objects.filter(_not_waiting(), state=State.QUEUED)
        .filter(Q(sent_at__isnull=True) | Q(sent_at__lt=_sent_long_ago()))
        .order_by("queued_at")[:100]
    )
    jobs = list(waiting)
    if jobs:
        send(jobs)
    return jobs


def _sent_long_ago() -> ExpressionWrapper:
    """Before this, a wake-up counts as lost. The longer a job waits the rarer it is sent, so that a queue without
    workers does not fill with copies."""
    waited = Least(F("sent_at") - F("queued_at"), Value(RESEND_AT_LEAST_EVERY, output_field=DurationField()))
    return ExpressionWrapper(
        Now() - Value(RESEND_AFTER, output_field=DurationField()) - waited, output_field=DateTimeField()
    )


def _take_back(job: Job) -> None:
    """One expired job: running -> queued (attempt + 1) or failed; cancelling -> cancelled. A renewed lease wins."""
    still = Job.objects.filter(pk=job.pk, owner=job.owner, state=job.state, lease_expires_at__lt=Now())
    said = f"Worker {job.owner} did not renew its lease in attempt {job.attempt}"
    if job.state == State.CANCELLING:
        if still.update(
            state=State.CANCELLED, finished_at=Now(), lease_expires_at=None, error=f"{said}; cancelled on request."
        ):
            _ended(job.pk)
    elif job.attempt >= MAX_ATTEMPTS:
        error = f"{said}; given up after {MAX_ATTEMPTS} attempts."
        if still.update(state=State.FAILED, finished_at=Now(), lease_expires_at=None, error=error):
            log(job.pk, "error", error)
            _ended(job.pk)
    elif still.update(
        state=State.QUEUED,
        owner="",
        lease_expires_at=None,
        sent_at=None,
        not_before=None,
        attempt=F("attempt") + 1,
        done=0,
        total=None,
    ):
        log(job.pk, "warning", f"{said}; queued again.")


def _not_waiting() -> Q:
    """The job that it comes after has ended, and what it waits for is there or has been waited for long enough.

    A subquery and not a join: Django turns an UPDATE over a join into `WHERE id IN (SELECT ...)`, whose conditions
    PostgreSQL does not check again when another transaction has just changed the row, so that two workers would win.
    """
    due = Q(not_before=None) | Q(not_before__lte=Now())
    return due & Q(~Exists(Job.objects.filter(pk=OuterRef("after"), state__in=Job.UNFINISHED)))


def _lease(seconds: int | None) -> Any:
    return Now() + timedelta(seconds=settings.MAILBOAT_LEASE_SECONDS if seconds is None else seconds)


def _held(job_id: JobId, owner: str, **changes: Any) -> None:
    rows = Job.objects.filter(pk=job_id, owner=owner, state__in=[State.RUNNING, State.CANCELLING]).update(**changes)
    if rows != 1:
        raise LostLease(f"Job {job_id} is no longer held by {owner}; stop working on it.")


def _end(job_id: JobId, owner: str, state: str, expected: Sequence[str], **changes: Any) -> None:
    with transaction.atomic():
        rows = Job.objects.filter(pk=job_id, owner=owner, state__in=expected).update(
            state=state, finished_at=Now(), lease_expires_at=None, **changes
        )
        if rows != 1:
            raise LostLease(f"Job {job_id} is no longer held by {owner}; stop working on it.")
        if changes.get("error"):
            log(job_id, "error", changes["error"])
        _ended(job_id)


def _ended(job_id: JobId) -> None:
    """Tells whoever depends on the job, in the same transaction, and wakes the jobs that waited for it."""
    job = Job.objects.select_related("project", "run").get(pk=job_id)
    job_ended.send(sender=Job, job=job)
    followers = list(job.followers.filter(state=State.QUEUED))
    if followers:
        transaction.on_commit(lambda: send(followers), robust=True)
