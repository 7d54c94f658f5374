"""Reads that only pages need, shaped as rows of what a page shows. The number of queries must never grow with the number of rows."""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import Count, Max, Q, Sum
from django.urls import reverse

from controlplane.dashboard import badges, charts, wording
from controlplane.dashboard.badges import Badge, badge
from controlplane.fleet.models import Challenge, EnrolmentToken, Island, SyncReport
from controlplane.jobs.models import Job, JobEvent
from controlplane.registry import selectors as registry
from controlplane.registry.errors import Missing
from controlplane.registry.models import Anchor, Channel, Patch, Project, Run, Version

RECENT = 20
PAGE = 25


# --- Runs ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run in the list of runs."""

    run: Run
    head: int | None
    versions: int
    islands: int
    full_bytes: int | None
    committed_at: datetime | None


def run_rows(project: Project) -> list[RunRow]:
    """The runs of a project with their figures."""
    heads = dict(_channels(project).filter(name=Channel.LATEST).values_list("run_id", "version__number"))
    islands = dict(Island.objects.filter(project=project).values_list("run_id").annotate(Count("id")))
    found = Version.objects.filter(run__project=project).values("run_id")
    facts = {row["run_id"]: row for row in found.annotate(n=Count("id"), full=Max("full_bytes"), last=Max("committed_at"))}
    return [
        RunRow(
            run=run,
            head=heads.get(run.pk),
            versions=facts[run.pk]["n"] if run.pk in facts else 0,
            islands=islands.get(run.pk, 0),
            full_bytes=facts[run.pk]["full"] if run.pk in facts else None,
            committed_at=facts[run.pk]["last"] if run.pk in facts else None,
        )
        for run in registry.runs(project)
    ]


def _channels(project: Project) -> Any:
    return Channel.objects.filter(run__project=project).select_related("run", "version").order_by("-run__created_at", "name")


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The figures on top of a run's page. Sizes in bytes; `instead_bytes` is what full checkpoints would have cost."""

    versions: int
    full_bytes: int | None
    median_patch: int | None
    density: str
    patch_bytes: int
    instead_bytes: int


def run_figures(run: Run) -> RunFigures:
    """Totals over all versions, medians over the last hundred patches."""
    patched = Q(patch_bytes__isnull=False)
    total = Version.objects.filter(run=run).aggregate(
        n=Count("id"), patches=Sum("patch_bytes", filter=patched), instead=Sum("full_bytes", filter=patched)
    )
    recent = list(
        Version.objects.filter(patched, run=run).order_by("-number").values_list("patch_bytes", "changed", "elements", "full_bytes")[:100]
    )
    newest = Version.objects.filter(run=run, full_bytes__isnull=False).order_by("-number").first()
    shares = [changed / elements for _, changed, elements, _ in recent if changed is not None and elements]
    return RunFigures(
        versions=total["n"],
        full_bytes=newest.full_bytes if newest else None,
        median_patch=int(statistics.median(size for size, *_ in recent)) if recent else None,
        density=wording.share(statistics.median(shares), 1) if shares else "",
        patch_bytes=total["patches"] or 0,
        instead_bytes=total["instead"] or 0,
    )


def size_points(run: Run, last: int) -> list[charts.SizePoint]:
    """The last versions of known size, oldest first, for the chart."""
    known = Version.objects.filter(run=run, full_bytes__isnull=False).exclude(state=Version.State.FAILED)
    points = []
    for version in known.select_related("run__project").defer("envelope", "side_files").order_by("-number")[:last]:
        is_patch = version.patch_bytes is not None
        count = version.patch_bytes if version.patch_bytes is not None else version.full_bytes or 0
        note = f"Version {version.number}: {'patch' if is_patch else 'anchor'} of {wording.size(count)}"
        if is_patch:
            note += f", {wording.share(count, version.full_bytes)} of the full size"
        address = reverse("dashboard:version", args=[run.project.slug, run.name, version.number])
        points.append(charts.SizePoint(version.number, count, is_patch, address, note))
    return points[::-1]


# --- Versions -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VersionRow:
    """A version in a run's table."""

    version: Version
    state: Badge
    channels: tuple[str, ...]
    islands: int
    replayable: bool


def replayable(version: Version) -> bool:
    """True when the record names every byte, so that a rebuild can be compared with it."""
    return version.state == Version.State.READY


def version_badge(version: Version) -> Badge:
    """The state of a version for people."""
    return badge(badges.VERSION, version.state, version.reason)


def version_rows(run: Run, before: int | None) -> tuple[list[VersionRow], int | None]:
    """A page of versions, newest first, and the number that the next page starts below."""
    found = Version.objects.filter(run=run).defer("envelope", "side_files").order_by("-number")
    if before is not None:
        found = found.filter(number__lt=before)
    page = list(found[: PAGE + 1])
    more = page[PAGE - 1].number if len(page) > PAGE else None
    page = page[:PAGE]
    heads: dict[int, list[str]] = {}
    for version_id, name in Channel.objects.filter(run=run, version__isnull=False).values_list("version_id", "name"):
        heads.setdefault(version_id, []).append(name)
    islands = dict(Island.objects.filter(run=run, verified_version__isnull=False).values_list("verified_version").annotate(Count("id")))
    rows = [
        VersionRow(v, version_badge(v), tuple(heads.get(v.pk, ())), islands.get(v.pk, 0), replayable(v))
        for v in page
    ]
    return rows, more


def version(run: Run, number: int) -> Version:
    """One version with what its page names. Raises Missing."""
    found = Version.objects.select_related("parent", "epoch", "inventory").defer("envelope").filter(run=run, number=number).first()
    if found is None:
        raise Missing(f"There is no version {number} in this run.")
    return found


def lineage(version: Version) -> dict[str, Any]:
    """Anchor, patches in and out, channels and islands of a version."""
    patches = Patch.objects.select_related("from_version", "to_version").annotate(part_count=Count("parts"))
    return {
        "anchor": Anchor.objects.filter(version=version).first(),
        "patches_in": list(patches.filter(to_version=version)),
        "patches_out": list(patches.filter(from_version=version)),
        "channels": list(Channel.objects.filter(version=version).values_list("name", flat=True)),
        "islands": list(Island.objects.filter(verified_version=version).order_by("name")),
    }


# --- Jobs ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job for people: `seconds` is its run time, `waited` its time in the queue."""

    job: Job
    title: str
    subject: str
    subject_address: str
    state: Badge
    progress: str
    seconds: float | None
    waited: float | None


def job_row(job: Job, names: Mapping[str, str]) -> JobRow:
    """Put a job into words. `names` maps ids of islands to their names."""
    subject, address = _subject(job, names)
    started, finished = job.started_at, job.finished_at
    return JobRow(
        job=job,
        title=job.get_kind_display().capitalize(),
        subject=subject,
        subject_address=address,
        state=badge(badges.JOB, job.state, job.error),
        progress=_progress(job),
        seconds=(finished - started).total_seconds() if started and finished else None,
        waited=(started - job.queued_at).total_seconds() if started else None,
    )


def _subject(job: Job, names: Mapping[str, str]) -> tuple[str, str]:
    slug = job.project.slug
    island = str(job.params.get("island") or "")
    if island:
        return names.get(island, "an island"), reverse("dashboard:island", args=[slug, island]) if island in names else ""
    number = job.params.get("version", job.params.get("number"))
    if job.run and isinstance(number, int):
        return f"{job.run.name} v{number}", reverse("dashboard:version", args=[slug, job.run.name, number])
    return (job.run.name, reverse("dashboard:run", args=[slug, job.run.name])) if job.run else ("", "")


def _progress(job: Job) -> str:
    if job.state == Job.State.QUEUED:
        return "Waiting for a worker"
    if not job.total:
        return "Started"
    if job.unit in ("bytes", "B"):
        return f"{wording.size(job.done)} of {wording.size(job.total)}"
    return f"{job.done:,} of {job.total:,} {job.unit}".rstrip()


def job_rows(jobs: Sequence[Job]) -> list[JobRow]:
    """Put jobs into words; one query for the names of their islands."""
    return [job_row(job, names) for names in [_island_names(jobs)] for job in jobs]


def _island_names(jobs: Sequence[Job]) -> dict[str, str]:
    wanted = [value for value in (_uuid(job.params.get("island")) for job in jobs) if value]
    return {str(pk): name for pk, name in Island.objects.filter(pk__in=wanted).values_list("pk", "name")} if wanted else {}


def _uuid(value: object) -> uuid.UUID | None:
    try:
        return uuid.UUID(str(value))
    except ValueError:
        return None


def jobs_of_version(version: Version) -> list[JobRow]:
    """The latest jobs about one version."""
    about = Q(params__version=version.number) | Q(params__number=version.number) | Q(versions=version)
    found = Job.objects.filter(about, run_id=version.run_id).select_related("run", "project").order_by("-queued_at").distinct()
    return job_rows(list(found[:8]))


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a job's log with the tone of its level."""

    pk: int
    at: datetime
    level: str
    message: str
    tone: str


_TONES = {JobEvent.Level.WARNING.value: "warn", JobEvent.Level.ERROR.value: "bad"}


def log_lines(events: Sequence[JobEvent], level: str) -> list[LogLine]:
    """The lines of at least this level."""
    order = list(JobEvent.Level.values)
    least = order.index(level) if level in order else 0
    return [
        LogLine(event.pk, event.at, event.level, event.message, _TONES.get(event.level, ""))
        for event in events
        if event.level not in order or order.index(event.level) >= least
    ]


def result_facts(result: Mapping[str, Any] | None) -> list[tuple[str, dict[str, str]]]:
    """A job's result as named facts; nested ones keep the path to them in their name."""
    facts: list[tuple[str, dict[str, str]]] = []

    def add(name: str, value: Any) -> None:
        words = name.replace("_", " ")
        if isinstance(value, Mapping):
            for key, inner in value.items():
                add(f"{name} {key}".strip(), inner)
        elif isinstance(value, str) and len(value) == 64 and all(c in "0123456789abcdef" for c in value):
            facts.append((words, {"digest": value}))
        elif name.endswith("bytes") and isinstance(value, int):
            facts.append((words, {"text": wording.size(value)}))
        elif name.endswith("seconds") and isinstance(value, int | float) and not isinstance(value, bool):
            facts.append((words, {"text": wording.duration(value)}))
        elif isinstance(value, bool):
            facts.append((words, {"text": "yes" if value else "no"}))
        elif isinstance(value, list):
            facts.append((words, {"text": ", ".join(map(str, value[:20])) + (" …" if len(value) > 20 else "") or "none"}))
        elif value is not None:
            facts.append((words, {"text": f"{value:,}" if isinstance(value, int) else str(value)}))

    for name, value in (result or {}).items():
        add(name, value)
    return facts


# --- Islands ------------------------------------------------------------------------------------------------------------


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
            words=", ".join(f"{kind} {wording.duration(report.seconds.get(kind))}" for kind in ("fetch", "prepare", "commit")),
        )
        for report in reports
    ]


def _busy_seconds(report: SyncReport) -> float:
    return sum(float(report.seconds.get(kind) or 0) for kind in ("fetch", "prepare", "commit"))


def _outcome(report: SyncReport) -> Badge:
    if report.outcome == SyncReport.Outcome.APPLIED and report.verified and report.accepted:
        return Badge("Verified", "check", "good")
    if report.outcome == SyncReport.Outcome.APPLIED:
        return Badge("Not accepted", "warn", "warn", report.error or "The digest that the island reported is not the record's.")
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


def enrolment(project: Project, pk: int) -> EnrolmentToken:
    """One enrolment token with its island, if it has become one. Raises Missing."""
    found = EnrolmentToken.objects.select_related("run", "channel", "island").filter(project=project, pk=pk).first()
    if found is None:
        raise Missing("There is no such enrolment in this project.")
    return found
