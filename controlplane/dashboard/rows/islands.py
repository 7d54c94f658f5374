"""Rows of one island: its syncs and verifications, and its enrolment."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from controlplane.accounts import selectors as accounts
from controlplane.dashboard import badges, charts, wording
from controlplane.dashboard.badges import Badge, badge
from controlplane.fleet.models import Challenge, EnrolmentToken, Island, SyncReport
from controlplane.registry.errors import Missing
from controlplane.registry.models import Project

RECENT = 20


@dataclass(frozen=True, slots=True)
class SyncRow:
    """One sync of an island with its bar of phases."""

    report: SyncReport
    outcome: Badge
    segments: tuple[charts.Segment, ...]
    words: str


def sync_rows(island: Island) -> list[SyncRow]:
    """The last syncs, newest first, on one scale of time."""
    reports = list(island.sync_reports.order_by("-id")[:RECENT])
    longest = max((_busy_seconds(report) for report in reports), default=0.0)
    return [
        SyncRow(
            report=report,
            outcome=_outcome(report),
            segments=charts.phases(report.seconds, longest),
            words=", ".join(
                f"{kind} {wording.duration(report.seconds.get(kind))}" for kind in ("fetch", "prepare", "commit")
            ),
        )
        for report in reports
    ]


def _busy_seconds(report: SyncReport) -> float:
    return sum(float(report.seconds.get(kind) or 0) for kind in ("fetch", "prepare", "commit"))


def _outcome(report: SyncReport) -> Badge:
    if report.outcome == SyncReport.Outcome.APPLIED and report.verified and report.accepted:
        return Badge("Verified", "check", "good")
    if report.outcome == SyncReport.Outcome.APPLIED:
        return Badge(
            "Not accepted", "warn", "warn", report.error or "The digest that the island reported is not the record's."
        )
    return badge(badges.OUTCOME, report.outcome, report.error)


@dataclass(frozen=True, slots=True)
class ChallengeRow:
    """One verification of an island."""

    challenge: Challenge
    state: Badge
    ranges: int
    bytes: int


def challenge_rows(island: Island) -> list[ChallengeRow]:
    """The last verifications, newest first."""
    found = island.challenges.select_related("version").order_by("-created_at")[:8]
    return [
        ChallengeRow(
            challenge=challenge,
            state=badge(badges.CHALLENGE, challenge.state, challenge.error),
            ranges=len(challenge.ranges),
            bytes=sum(int(item[2]) for item in challenge.ranges if isinstance(item, list) and len(item) > 2),
        )
        for challenge in found
    ]


def credential(island: Island, now: datetime) -> Badge | None:
    """Where the island's credential stands; None when it has none."""
    if island.token is None:
        return None
    found = accounts.standing(island.token, now)
    if island.rotation_asked_at is not None and found.works:
        return Badge("Rotating", "turn", "busy", "The new one goes out with the next heartbeat.")
    return badge(badges.TOKEN, found.state, found.reason)


def enrolment(project: Project, pk: int) -> EnrolmentToken:
    """One enrolment token with its island, if it has become one. Raises Missing."""
    found = EnrolmentToken.objects.select_related("run", "channel", "island").filter(project=project, pk=pk).first()
    if found is None:
        raise Missing("There is no such enrolment in this project.")
    return found
