"""People, keys, workers and the audit log as the API answers them. Never a secret: those stand in the one answer that
makes them.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from controlplane.accounts import selectors as accounts
from controlplane.accounts.models import Membership, SignIn, Token
from controlplane.api.representations import moment
from controlplane.audit.models import Entry
from controlplane.fleet import selectors as fleet
from controlplane.fleet.models import EnrolmentToken
from controlplane.jobs.models import JobEvent
from controlplane.jobs.selectors import QueueRow, ScheduleRow, WorkerRow

Json = dict[str, Any]


def token(row: Token, now: datetime) -> Json:
    """A token that `accounts.selectors.tokens` returned."""
    standing = accounts.standing(row, now)
    island = getattr(row, "island", None) or getattr(row, "next_island", None)
    return {
        "id": row.pk,
        "name": row.name,
        "role": row.role,
        "run": None if row.run is None else row.run.name,
        "island": None if island is None else str(island.pk),
        "key_id": row.key_id,
        "state": standing.state,
        "reason": standing.reason,
        "created_by": row.created_by or None,
        "created_at": moment(row.created_at),
        "expires_at": moment(row.expires_at),
        "last_used_at": moment(row.last_used_at),
        "revoked_at": moment(row.revoked_at),
        "rotated_from": None if row.rotated_from is None else row.rotated_from.key_id,
    }


def member(row: Membership) -> Json:
    """A person in the project."""
    return {
        "user": row.user_id,
        "name": row.user.get_username(),
        "role": row.role,
        "active": row.user.is_active,
        "last_login": moment(row.user.last_login),
    }


def sign_in(row: SignIn, session_key: str | None) -> Json:
    """A session of the person who asks."""
    return {
        "id": row.pk,
        "at": moment(row.at),
        "expires_at": moment(getattr(row, "expires_at", None)),
        "address": row.address,
        "agent": row.agent,
        "current": row.session_key == session_key,
    }


def enrolment_token(row: EnrolmentToken, now: datetime) -> Json:
    """A one-time token or a self-enrolment key."""
    return {
        "id": row.pk,
        "name": row.name,
        "reusable": row.reusable,
        "run": row.run.name,
        "channel": row.channel.name,
        "provider": row.provider,
        "region": row.region,
        "engine": row.engine,
        "key_id": row.key_id,
        "state": fleet.enrolment_state(row, now),
        "created_by": row.created_by or None,
        "created_at": moment(row.created_at),
        "expires_at": moment(row.expires_at),
        "used_at": moment(row.used_at),
        "revoked_at": moment(row.revoked_at),
        "island": None if row.island_id is None else str(row.island_id),
    }


def audit_entry(row: Entry) -> Json:
    """One change."""
    return {
        "id": row.pk,
        "at": moment(row.at),
        "actor": row.actor,
        "action": row.action,
        "target": row.target,
        "before": row.before,
        "after": row.after,
        "request_id": row.request_id or None,
    }


def job_event(row: JobEvent) -> Json:
    """One line of a job's log."""
    return {"id": row.pk, "at": moment(row.at), "level": row.level, "message": row.message}


def queue(row: QueueRow) -> Json:
    """A queue as it stands."""
    return {
        "name": row.name,
        "queued": row.queued,
        "waiting": row.waiting,
        "running": row.running,
        "oldest_seconds": row.oldest_seconds,
        "workers": row.workers,
        "messages": row.messages,
        "oldest_message_seconds": row.oldest_message_seconds,
    }


def worker(row: WorkerRow) -> Json:
    """A worker; its job only where it is the project's own."""
    it = row.worker
    return {
        "id": str(it.pk),
        "name": it.name,
        "host": it.host,
        "process": it.process,
        "queues": it.queues,
        "device": it.device,
        "versions": it.versions,
        "state": row.state,
        "reason": row.reason,
        "busy": row.busy,
        "job": None if row.job is None else str(row.job.pk),
        "started_at": moment(it.started_at),
        "heartbeat_at": moment(it.heartbeat_at),
    }


def schedule_entry(row: ScheduleRow) -> Json:
    """An entry of the schedule and its last run."""
    return {
        "name": row.entry.name,
        "purpose": row.entry.purpose,
        "when": row.entry.when,
        "last_started_at": None if row.last is None else moment(row.last.started_at),
        "last_seconds": None if row.last is None else row.last.seconds,
        "last_error": None if row.last is None else row.last.error or None,
    }
