"""What happened to an island, newest first: its syncs, its verifications, and what people did to it. Syncs that went
well in a row are one line.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from controlplane.audit import selectors as audit
from controlplane.audit.models import Entry
from controlplane.dashboard import badges, wording
from controlplane.dashboard.badges import Badge, badge
from controlplane.fleet.models import Challenge, Island, SyncReport
from controlplane.jobs.models import Job

RECENT = 40
SHOWN = 30
ACTIONS = {
    "island.enrol": Badge("Enrolled", "plus", "good"),
    "island.approve": Badge("Approved", "check", "good"),
    "island.enable": Badge("Enabled", "check", "good"),
    "island.disable": Badge("Disabled", "off", "idle"),
    "island.drain": Badge("Drain asked", "pause", "idle"),
    "island.stop_drain": Badge("Drain taken back", "check", "idle"),
    "island.pin": Badge("Pinned", "pin", "idle"),
    "island.unpin": Badge("Unpinned", "pin", "idle"),
    "island.rotate": Badge("Rotation asked", "key", "idle"),
    "island.rotated": Badge("New credential in use", "key", "good"),
    "island.revoke": Badge("Credential revoked", "key", "bad"),
    "enrolment.create": Badge("Command created", "plus", "idle"),
    "enrolment.reused": Badge("Token used again", "warn", "bad"),
}


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the timeline. `job` is the id of the job that it came from."""

    key: str
    at: datetime
    badge: Badge
    what: str
    actor: str
    job: str = ""


def timeline(island: Island) -> list[Event]:
    """The last events of an island. Three queries."""
    events = [*_syncs(island), *_challenges(island), *_deeds(island)]
    events.sort(key=lambda event: event.at, reverse=True)
    return events[:SHOWN]


def _syncs(island: Island) -> list[Event]:
    reports = list(SyncReport.objects.filter(island=island).order_by("-id")[:RECENT])
    events: list[Event] = []
    run: list[SyncReport] = []  # that went well, newest first
    for report in reports:
        if report.accepted:
            run.append(report)
            continue
        events += _went_well(island, run)
        run = []
        failed = report.outcome == SyncReport.Outcome.FAILED
        shown = Badge("Sync failed", "lost", "bad") if failed else Badge("Sync not accepted", "warn", "warn")
        what = f"To v{report.to_version}. {report.error}".strip()
        events.append(Event(f"sync-{report.pk}", report.reported_at, shown, what, island.name))
    return events + _went_well(island, run)


def _went_well(island: Island, reports: list[SyncReport]) -> list[Event]:
    if not reports:
        return []
    newest, oldest = reports[0], reports[-1]
    total = sum(report.bytes for report in reports)
    begin = "nothing" if oldest.from_version is None else f"v{oldest.from_version}"
    what = f"{begin} to v{newest.to_version}, {wording.size(total)}"
    if len(reports) > 1:
        what += f" in {len(reports)} syncs"
    shown = Badge("Synced", "check", "good")
    return [Event(f"syncs-{oldest.pk}", newest.reported_at, shown, what, island.name)]


def _challenges(island: Island) -> list[Event]:
    found = Challenge.objects.filter(island=island).select_related("version", "job").order_by("-created_at")
    return [_challenge(row, row.job) for row in found[:RECENT]]


def _challenge(row: Challenge, job: Job) -> Event:
    state = badge(badges.CHALLENGE, row.state, row.error)
    shown = Badge(f"Verification {state.word.lower()}", state.icon, state.tone, turn=state.turn)
    what = f"At v{row.version.number}. {state.reason}".strip()
    return Event(f"challenge-{row.pk}", row.created_at, shown, what, job.requested_by, str(job.pk))


def _deeds(island: Island) -> list[Event]:
    found = audit.entries(island.project).filter(target=f"island {island.name}", at__gte=island.enrolled_at)
    return [_deed(entry) for entry in found.order_by("-id")[:RECENT]]


def _deed(entry: Entry) -> Event:
    shown = ACTIONS.get(entry.action) or Badge(entry.action, "person", "idle")
    after = entry.after or {}
    words = []
    if entry.action == "island.pin":
        words.append(f"At v{after.get('version')}.")
    if entry.action == "island.drain" and after.get("drain_until"):
        words.append(f"Until {str(after['drain_until'])[:16]} UTC.")
    if after.get("reason") or after.get("disabled_reason"):
        words.append(str(after.get("reason") or after.get("disabled_reason")))
    return Event(f"entry-{entry.pk}", entry.at, shown, " ".join(words), entry.actor)
