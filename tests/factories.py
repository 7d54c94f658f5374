"""Rows for tests, made by plain functions. `mk_*` makes one row with sensible defaults; `create_*` composes several.

They write rows directly and so may make states that services would refuse; tests of services must not use them for
what they test.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from itertools import count
from typing import Any

from django.contrib.auth.models import User
from django.db.models.functions import Now
from django.utils import timezone

from controlplane.accounts.models import Membership, Token
from controlplane.audit.models import Entry
from controlplane.fleet.models import Challenge, EnrolmentToken, Island, SyncReport
from controlplane.jobs.models import Job, JobEvent, Worker
from controlplane.registry.models import Anchor, Channel, Epoch, Inventory, Patch, Project, Run, RunKey, Version

PASSWORD = "correct horse battery"
FULL_BYTES = 45_000_000
ELEMENTS = 22_500_000
_serial = count(1)


def digest_of(text: str) -> str:
    """A digest that belongs to a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def mk_user(name: str = "") -> User:
    """A person with PASSWORD."""
    return User.objects.create_user(name or f"person{next(_serial)}", password=PASSWORD)


def mk_project(slug: str = "", **fields: Any) -> Project:
    """A project."""
    slug = slug or f"project{next(_serial)}"
    return Project.objects.create(slug=slug, name=fields.pop("name", slug.capitalize()), **fields)


def mk_member(project: Project, role: str = "operator", name: str = "") -> User:
    """A person with a role in the project."""
    user = mk_user(name)
    Membership.objects.create(user=user, project=project, role=role)
    return user


def mk_run(project: Project, name: str = "", **fields: Any) -> Run:
    """A run with epoch 0 and an empty channel `latest`."""
    run = Run.objects.create(project=project, name=name or f"run{next(_serial)}", **fields)
    Epoch.objects.create(run=run, number=0)
    Channel.objects.create(run=run, name=Channel.LATEST)
    return run


def mk_version(run: Run, number: int, *, state: str = "ready", parent: Version | None = None, **fields: Any) -> Version:
    """A version; with a parent it has a patch of 1 MB, without one it is an anchor."""
    name = f"{run.pk}/{number}"
    inventory, _ = Inventory.objects.get_or_create(
        run=run,
        sha256=digest_of(f"{run.pk} inventory"),
        defaults={"tensors": 103, "elements": ELEMENTS, "full_bytes": FULL_BYTES},
    )
    facts: dict[str, Any] = {
        "epoch": run.epochs.latest("number"),
        "state_digest": digest_of(f"state {name}"),
        "manifest_sha256": digest_of(f"manifest {name}"),
        "digests_sha256": digest_of(f"digests {name}"),
        "inventory": inventory,
        "elements": ELEMENTS,
        "full_bytes": FULL_BYTES,
        "published_by": "publisher:trainer",
        "ready_at": timezone.now() if state in ("ready", "retired") else None,
    }
    if parent is not None:
        facts |= {"changed": 33_000, "unit_steps": 30_000, "patch_bytes": 1_000_000}
    facts |= fields
    version = Version.objects.create(run=run, number=number, parent=parent, state=state, **facts)
    if parent is None:
        files = [{"path": "model.safetensors", "sha256": digest_of(name), "size": FULL_BYTES}]
        Anchor.objects.create(version=version, files=files, bytes=FULL_BYTES)
    elif version.patch_bytes is not None:
        Patch.objects.create(
            run=run, from_version=parent, to_version=version, bytes=version.patch_bytes, codecs="positional"
        )
    return version


def announce(version: Version, channel: str = Channel.LATEST) -> Channel:
    """Let the channel point to the version, with a head that is not signed."""
    row, _ = Channel.objects.get_or_create(run=version.run, name=channel)
    row.version, row.serial, row.head_envelope = version, row.serial + 1, {"payload": ""}
    row.save()
    return row


def mk_island(run: Run, name: str = "", *, at: Version | None = None, **fields: Any) -> Island:
    """An island that was just seen; `at` is the version that it proved to hold and says it holds."""
    facts: dict[str, Any] = {
        "engine": "checkpoint",
        "provider": "hetzner",
        "region": "fsn1",
        "agent_version": "0.1.0",
        "hostname": "node-1",
        "cores": 8,
        "codecs": ["dense", "xor", "positional"],
        "last_seen_at": Now(),
    }
    if at is not None:
        facts |= {
            "verified_version": at,
            "version_number": at.number,
            "digest": at.state_digest,
            "epoch": at.epoch.number,
        }
        facts |= {"last_sync_at": Now(), "last_patch_bytes": at.patch_bytes}
    facts |= fields
    channel = facts.pop("channel", None) or run.channels.get(name=Channel.LATEST)
    island = Island.objects.create(
        project=run.project, run=run, channel=channel, name=name or f"island{next(_serial)}", **facts
    )
    island.refresh_from_db()
    return island


def mk_sync(island: Island, to: Version, **fields: Any) -> SyncReport:
    """A verified sync report."""
    facts: dict[str, Any] = {
        "from_version": to.parent.number if to.parent else None,
        "digest": to.state_digest,
        "outcome": "applied",
        "verified": True,
        "accepted": True,
        "bytes": to.patch_bytes or to.full_bytes or 0,
        "seconds": {"fetch": 0.21, "prepare": 0.34, "commit": 0.05, "total": 0.61},
    }
    return SyncReport.objects.create(island=island, to_version=to.number, **(facts | fields))


def mk_job(
    project: Project, kind: str = "replay", *, run: Run | None = None, state: str = "queued", **fields: Any
) -> Job:
    """A job in any state."""
    facts: dict[str, Any] = {"dedupe_key": f"{kind}:{next(_serial)}", "requested_by": "somebody"}
    if state != "queued":
        facts |= {"started_at": timezone.now(), "owner": "check@host"}
    if state in ("succeeded", "failed", "cancelled"):
        facts |= {"finished_at": timezone.now() + timedelta(seconds=2)}
    job = Job.objects.create(project=project, run=run, kind=kind, state=state, **(facts | fields))
    job.refresh_from_db()
    return job


def mk_event(job: Job, message: str, level: str = "info") -> JobEvent:
    """A line of a job's log."""
    return JobEvent.objects.create(job=job, level=level, message=message)


def mk_challenge(island: Island, version: Version, *, state: str = "passed", **fields: Any) -> Challenge:
    """A verification with its job."""
    job = fields.pop("job", None) or mk_job(
        island.project, "verify", run=island.run, state="succeeded", params={"island": str(island.pk)}
    )
    ranges = [[0, 0, 4096], [3, 8192, 4096], [7, 0, 1024]]
    return Challenge.objects.create(
        island=island, job=job, version=version, nonce="0" * 64, ranges=ranges, state=state, **fields
    )


def mk_key(run: Run, public_key: str, **fields: Any) -> RunKey:
    """A publisher's key, in use unless `revoked_at` is given."""
    return RunKey.objects.create(run=run, public_key=public_key, name=public_key[:8], created_by="owner", **fields)


def mk_enrolment(run: Run, name: str = "newcomer", **fields: Any) -> EnrolmentToken:
    """An open enrolment token whose text nobody knows."""
    facts: dict[str, Any] = {
        "key_id": f"key{next(_serial)}",
        "digest": digest_of(name),
        "pepper": 1,
        "engine": "checkpoint",
        "expires_at": timezone.now() + timedelta(hours=1),
    }
    channel = run.channels.get(name=Channel.LATEST)
    return EnrolmentToken.objects.create(project=run.project, run=run, channel=channel, name=name, **(facts | fields))


def mk_token(project: Project, name: str = "", role: str = "publisher", **fields: Any) -> Token:
    """A token whose text nobody knows."""
    facts: dict[str, Any] = {"key_id": f"tok{next(_serial)}", "digest": digest_of(name), "pepper": 1}
    token = Token.objects.create(project=project, role=role, name=name or f"token{next(_serial)}", **(facts | fields))
    token.refresh_from_db()
    return token


def mk_audit(project: Project, action: str, target: str, *, actor: str = "owner", **fields: Any) -> Entry:
    """An entry of the audit log."""
    return Entry.objects.create(project=project, actor=actor, action=action, target=target, **fields)


def mk_worker(name: str = "", **fields: Any) -> Worker:
    """A worker that has just been heard of."""
    facts: dict[str, Any] = {
        "host": "node-1",
        "process": 42,
        "queues": ["check"],
        "device": "CPU, 2 cores",
        "versions": {"mailboat": "0.1.0"},
    }
    return Worker.objects.create(name=name or f"worker{next(_serial)}", **(facts | fields))


def create_line(run: Run, length: int) -> list[Version]:
    """An anchor and its patches, all ready, the last one announced."""
    versions: list[Version] = []
    for number in range(length):
        versions.append(mk_version(run, number, parent=versions[-1] if versions else None, step=number * 8))
    announce(versions[-1])
    return versions


def send_nowhere(job_id: str, kind: str) -> None:
    """Stands in for the message to a worker: the job stays queued."""
