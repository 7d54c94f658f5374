"""Runs one job: claims it, keeps its lease, calls the module of its kind and records how it ended.

Whatever a job does, the outcome is written by one conditional UPDATE that names this owner; when the lease was lost,
nothing is written.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

import structlog
from django.conf import settings
from django.db import DatabaseError, connections

from controlplane.jobs import services as jobs
from controlplane.jobs.models import Job
from controlplane.registry.errors import Refusal
from mailboat.errors import MailboatError
from workers import supervised
from workers.lease import Cancelled, Lease, ShuttingDown, Stopped
from workers.presence import presence
from workers.work import Findings, Parked, Work

log = structlog.get_logger(__name__)

Ending = Callable[[Job, str], None]  # records how a job ended, for its owner


def run(job_id: str) -> None:
    """Works on the job until it has ended. Returns at once when it is not to be had."""
    owner = f"{socket.gethostname()[:40]}:{os.getpid()}:{secrets.token_hex(4)}"
    job = jobs.claim(job_id, owner)
    if job is None:
        log.info("job not to be had", job=job_id)
        return
    log.info("job begun", job=job_id, kind=job.kind, attempt=job.attempt)
    presence.working_on(job.pk)
    try:
        with Lease(job, owner) as lease:
            end = _attempt(job, lease)
        _record(job, owner, end)
    finally:
        presence.working_on(None)


def _record(job: Job, owner: str, end: Ending) -> None:
    """Writes the outcome; a database that is away for a moment is waited for, as long as the lease may last."""
    deadline = time.monotonic() + settings.MAILBOAT_LEASE_SECONDS
    while True:
        try:
            end(job, owner)
        except jobs.LostLease:
            log.warning("lease lost; nothing recorded", job=str(job.pk), owner=owner)
        except DatabaseError as error:
            connections.close_all()
            if time.monotonic() < deadline:
                time.sleep(0.2)
                continue
            log.error("outcome not recorded", job=str(job.pk), owner=owner, error=str(error))
        return


def _attempt(  # noqa: PLR0911  one line per way to end
    job: Job, lease: Lease
) -> Ending:
    """Does the work; the returned function records how it ended."""
    work = Work(job, lease)
    try:
        result = supervised.carry_out(job, lease) if supervised.wanted() else function_of(job.kind)(work)
    except ShuttingDown:
        return _hand_back
    except Parked as parked:
        return _park(parked)
    except Cancelled:
        return lambda job, owner: jobs.cancelled(job.pk, owner)
    except Stopped:
        return _record_nothing
    except DatabaseError:
        log.exception("database failed under a job", job=str(job.pk))
        return _hand_back
    except Exception as error:  # noqa: BLE001 - whatever it is, the row must say how the job ended
        return _failed(job, error)
    finally:
        work.close()
    return lambda job, owner: jobs.succeed(job.pk, owner, result)


def _failed(job: Job, error: Exception) -> Ending:
    evidence = error.result if isinstance(error, Findings) else {}
    sentence = sentence_of(job, error)
    return lambda job, owner: jobs.fail(job.pk, owner, sentence, evidence)


def sentence_of(job: Job, error: Exception) -> str:
    """What a failure is called in the job's row; the unexpected is logged as a whole."""
    if isinstance(error, (Findings, MailboatError, Refusal)):
        return str(error)
    log.error("job failed unexpectedly", job=str(job.pk), exc_info=error)
    return f"The worker met an unexpected {type(error).__name__}: {str(error)[:300]}"


def _park(parked: Parked) -> Ending:
    return lambda job, owner: jobs.park(
        job.pk, owner, parked.waiting_for, until=parked.until, saved=parked.saved, still=parked.still
    )


def _hand_back(job: Job, owner: str) -> None:
    """Lets the lease run out now, so that the sweeper gives the job to another worker."""
    jobs.log(job.pk, "warning", f"{owner} ends before the work is done and hands the job back.")
    jobs.renew(job.pk, owner, lease_seconds=0)


def _record_nothing(job: Job, owner: str) -> None:
    raise jobs.LostLease(f"{owner} lost job {job.pk}.")


def function_of(kind: str) -> Callable[[Work], dict[str, Any]]:
    """What does the work of a kind of job, imported on use."""
    match kind:
        case "build":
            from workers.build import build as function
        case "validate":
            from workers.validate import validate as function
        case "replay":
            from workers.replay import replay as function
        case "verify":
            from workers.verify import verify as function
        case "derive":
            from workers.derive import derive as function
        case "collect":
            from workers.collect import collect as function
        case "merge":
            from workers.merge import merge as function
        case "anchor":
            from workers.anchor import anchor as function
        case _:
            raise Refusal(f"This worker does not know jobs of kind {kind}; update it.", code="unknown_kind")
    return function
