"""Rows as the API answers them. Shapes only: nothing here queries more than its row already holds."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from controlplane.fleet.models import Island, SyncReport
from controlplane.fleet.selectors import FleetRow
from controlplane.jobs.models import Job, JobEvent
from controlplane.registry.blobs import Part
from controlplane.registry.models import Channel, Epoch, Run, Version
from controlplane.registry.steering import SETTINGS

Json = dict[str, Any]


def moment(value: datetime | None) -> str | None:
    """RFC 3339 in UTC."""
    return None if value is None else value.isoformat().replace("+00:00", "Z")


def run(row: Run, epoch: Epoch, ready: Version | None) -> Json:
    """A run with where it stands."""
    return {
        "id": str(row.pk),
        "name": row.name,
        "served_format": row.served_format,
        "source": None if row.source is None else row.source.name,
        "quantiser": row.quantiser,
        "announce": row.announce,
        "settings": {name: getattr(row, name) for name in SETTINGS},
        "epoch": {"number": epoch.number, "from_version": epoch.from_version and epoch.from_version.number},
        "latest_ready": None if ready is None else {"number": ready.number, "state_digest": ready.state_digest},
        "created_at": moment(row.created_at),
    }


def epoch(row: Epoch) -> Json:
    """An epoch that `selectors.epochs` returned."""
    return {
        "number": row.number,
        "from_version": None if row.from_version is None else row.from_version.number,
        "from_state": row.from_state or None,
        "reason": row.reason,
        "created_at": moment(row.created_at),
    }


def version(row: Version) -> Json:
    """A version that `selectors.versions` returned, with the files that it is made of."""
    patch = next(iter(row.patches_in.all()), None)
    anchor = getattr(row, "anchor", None)
    parts = None if patch is None else [{"sha256": p.blob.sha256, "size": p.blob.size} for p in patch.parts.all()]
    return version_in_short(row, anchored=anchor is not None) | {
        "patch": None if parts is None else {"parts": parts},
        "anchor": None if anchor is None else {"kind": anchor.kind, "uri": anchor.uri, "files": anchor.files},
    }


def version_in_short(row: Version, *, anchored: bool) -> Json:
    """A version without anything that grows with its tensors and files."""
    return {
        "number": row.number,
        "epoch": row.epoch.number,
        "state": row.state,
        "reason": row.reason,
        "state_digest": row.state_digest or None,
        "parent": None
        if row.parent is None
        else {"number": row.parent.number, "state": row.parent.state_digest or None},
        "manifest": {"sha256": row.manifest_sha256} if row.manifest_sha256 else None,
        "inventory": {"sha256": row.inventory.sha256} if row.inventory else None,
        "digests": {"sha256": row.digests_sha256} if row.digests_sha256 else None,
        "statistics": {"sha256": row.statistics.sha256, "size": row.statistics.size} if row.statistics else None,
        "elements": row.elements,
        "changed": row.changed,
        "unit_steps": row.unit_steps,
        "full_bytes": row.full_bytes,
        "patch_bytes": row.patch_bytes,
        "anchored": anchored,
        "step": row.step,
        "published_by": row.published_by,
        "committed_at": moment(row.committed_at),
        "ready_at": moment(row.ready_at),
        "job": None if row.job_id is None else str(row.job_id),
    }


def part(it: Part) -> Json:
    """A stretch of an upload."""
    return {"index": it.index, "offset": it.offset, "size": it.size, "url": it.url}


def job(row: Job, events: Iterable[JobEvent] | None = None) -> Json:
    """A job, with its log where it is given."""
    body = {
        "id": str(row.pk),
        "kind": row.kind,
        "run": row.run.name if row.run else None,
        "state": row.state,
        "params": row.params,
        "attempt": row.attempt,
        "waiting_for": row.waiting_for or None,
        "rerun_of": None if row.rerun_of_id is None else str(row.rerun_of_id),
        "owner": row.owner or None,
        "done": row.done,
        "total": row.total,
        "unit": row.unit,
        "result": row.result,
        "error": row.error or None,
        "requested_by": row.requested_by,
        "queued_at": moment(row.queued_at),
        "started_at": moment(row.started_at),
        "finished_at": moment(row.finished_at),
    }
    if events is not None:
        body["events"] = [{"at": moment(event.at), "level": event.level, "message": event.message} for event in events]
    return body


def island(row: FleetRow) -> Json:
    """A line of the fleet table."""
    it: Island = row.island
    return {
        "id": str(it.pk),
        "name": it.name,
        "run": it.run.name,
        "channel": it.channel.name,
        "provider": it.provider,
        "region": it.region,
        "engine": it.engine,
        "agent_version": it.agent_version,
        "enabled": it.enabled,
        **orders(row),
        "health": {"state": str(row.health), "reason": row.health_reason},
        "sync": {"state": str(row.sync), "reason": row.sync_reason},
        "phase": it.phase,
        "version": row.version,
        "target": row.target,
        "skew": {"versions": row.skew_versions, "seconds": row.skew_seconds},
        "claimed": {"version": it.version_number, "digest": it.digest or None, "epoch": it.epoch},
        "members": it.members,
        "trusted_keys": it.trusted_keys,
        "alarm": it.alarm or None,
        "alarm_at": moment(it.alarm_at),
        "last_patch_bytes": it.last_patch_bytes,
        "last_seconds": it.last_seconds,
        "last_seen_at": moment(it.last_seen_at),
        "last_sync_at": moment(it.last_sync_at),
    }


def orders(row: FleetRow) -> Json:
    """What operators asked of an island, and its keys; part of its line in the fleet table."""
    it, drain, credential = row.island, None, None
    if it.draining_since is not None:
        drain = {
            "since": moment(it.draining_since),
            "until": moment(it.drain_until),
            "reason": it.drain_reason,
            "active_requests": it.active_requests,
            "drained": row.drained,
        }
    if it.token is not None:
        credential = {
            "key_id": it.token.key_id,
            "expires_at": moment(it.token.expires_at),
            "revoked_at": moment(it.token.revoked_at),
            "last_used_at": moment(it.token.last_used_at),
            "rotation_asked_at": moment(it.rotation_asked_at),
        }
    return {
        "pending": it.pending,
        "fingerprint": row.fingerprint or None,
        "approved_by": it.approved_by or None,
        "pinned": None if it.pin_id is None else {"version": row.pinned, "reason": it.pin_reason},
        "drain": drain,
        "credential": credential,
        "revision": it.revision,
    }


def sync_report(row: SyncReport) -> Json:
    """A report as it was judged."""
    return {
        "from_version": row.from_version,
        "version": row.to_version,
        "digest": row.digest or None,
        "outcome": row.outcome,
        "accepted": row.accepted,
        "bytes": row.bytes,
        "seconds": row.seconds,
        "error": row.error or None,
        "reported_at": moment(row.reported_at),
    }


def channel_head(row: Channel) -> Json:
    """Where a channel stands, in the fleet's answer."""
    return {
        "run": row.run.name,
        "channel": row.name,
        "version": None if row.version is None else row.version.number,
        "state_digest": None if row.version is None else row.version.state_digest,
        "serial": row.serial,
        "generation": row.generation,
        "protected": row.protected,
        "expires_at": moment(row.expires_at),
    }
