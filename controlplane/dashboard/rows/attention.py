"""What needs a person, worst first: lost and stuck islands, failed syncs and verifications, skew over the budget,
credentials about to end, machines that wait for approval, runs whose trainer does something odd.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from django.contrib.postgres.expressions import ArraySubquery
from django.db.models import OuterRef, Subquery
from django.db.models.functions import JSONObject
from django.urls import reverse

from controlplane.accounts import selectors as accounts
from controlplane.dashboard import badges, wording
from controlplane.dashboard.badges import Badge, badge
from controlplane.dashboard.rows.fleet import health_reason
from controlplane.fleet import staleness
from controlplane.fleet.outline import Standing
from controlplane.fleet.status import Health, Sync
from controlplane.registry.models import Project, Run, Version

SHOWN = 8
STUCK_SECONDS = 600
UNCHANGED_VERSIONS = 3
UNCHANGED_LOOK_BACK = 20
_ORDER = {"bad": 0, "warn": 1}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that needs a person."""

    key: str
    badge: Badge
    what: str
    page: str
    place: tuple[object, ...]

    @property
    def address(self) -> str:
        """The page to look at; worked out for those that are shown, not for every island that is behind."""
        return reverse(self.page, args=self.place)


@dataclass(frozen=True, slots=True)
class Attention:
    """The first findings and how many there are in all."""

    shown: tuple[Finding, ...]
    total: int

    @property
    def more(self) -> int:
        """Findings that the list leaves out."""
        return self.total - len(self.shown)


def attention(project: Project, rows: Sequence[Standing], *, all_of_it: bool = False) -> Attention:
    """All that needs a person in the project."""
    found: list[Finding] = []
    for row in rows:
        if not _is_well(row):
            found += _about_island(project, row)
    found += [*_failed_ends(project), *_unchanged(project), *_expiring(project)]
    found.sort(key=lambda finding: _ORDER.get(finding.badge.tone, 2))
    return Attention(tuple(found if all_of_it else found[:SHOWN]), len(found))


def _is_well(row: Standing) -> bool:
    """What most islands are; a quick answer for them."""
    said = row.failed_verify or row.island.alarm or row.island.last_error
    return row.health == Health.HEALTHY and row.sync != Sync.BEHIND and not said


def _about_island(project: Project, row: Standing) -> Iterator[Finding]:
    """What is wrong with one island."""

    def finding(kind: str, shown: Badge) -> Finding:
        place = (project.slug, row.island.id)
        return Finding(f"{kind}-{row.island.name}", shown, row.island.name, "dashboard:island", place)

    if row.health == Health.LOST:
        yield finding("lost", badge(badges.HEALTH, row.health, health_reason(row)))
    if row.failed_verify:
        words = "The last verification failed: what the island holds is not what the record says."
        yield finding("verify", Badge("Verification failed", "lost", "bad", words))
    if row.island.alarm:
        yield finding("alarm", Badge("Refused", "lost", "bad", row.island.alarm))
    if row.island.pending:
        words = "A machine enrolled itself; compare its key's fingerprint and let it in, or turn it away."
        yield finding("pending", Badge("Waits for approval", "ask", "warn", words))
    elif row.health == Health.DEGRADED:
        yield finding("degraded", badge(badges.HEALTH, row.health, health_reason(row)))
    elif row.health == Health.HEALTHY:
        if row.island.last_error:
            yield finding("sync", Badge("Sync failed", "warn", "warn", row.island.last_error))
        elif staleness.excess(row):
            yield finding("budget", Badge("Skew over budget", "behind", "warn", _budget_words(row)))
        elif row.sync == Sync.BEHIND and (row.skew_seconds or 0) > STUCK_SECONDS:
            words = f"Healthy, yet {wording.plural(row.skew_versions or 0, 'version')} behind and not getting closer."
            yield finding("stuck", Badge("Stuck", "behind", "warn", words))


def _budget_words(row: Standing) -> str:
    allowed = []
    if row.island.staleness_versions is not None:
        allowed.append(wording.plural(row.island.staleness_versions, "version"))
    if row.island.staleness_seconds is not None:
        allowed.append(wording.duration(row.island.staleness_seconds))
    behind = wording.plural(row.skew_versions or 0, "version")
    return f"It is {behind} behind; {row.island.run_name} allows {' and '.join(allowed)}."


def _failed_ends(project: Project) -> Iterator[Finding]:
    """Runs whose newest version failed: the trainer may be stuck behind it."""
    newest = Version.objects.filter(run_id=OuterRef("run_id")).order_by("-number").values("number")[:1]
    found = Version.objects.filter(run__project=project, state=Version.State.FAILED, number=Subquery(newest))
    for version in found.select_related("run").defer("envelope", "side_files"):
        yield Finding(
            f"version-{version.pk}",
            Badge("Version failed", "lost", "bad", version.reason),
            f"{version.run.name} v{version.number}",
            "dashboard:version",
            (project.slug, version.run.name, version.number),
        )


def _unchanged(project: Project) -> Iterator[Finding]:
    """Runs whose last versions change no byte while steps advance: what is published is not what is trained."""
    last = Version.objects.filter(run=OuterRef("pk"), state=Version.State.READY, parent__isnull=False)
    facts = JSONObject(changed="changed", step="step")
    runs = Run.objects.filter(project=project).annotate(
        last=ArraySubquery(last.order_by("-number").values(fact=facts)[:UNCHANGED_LOOK_BACK])
    )
    for run in runs.order_by("name"):
        same = list(takewhile(lambda fact: fact["changed"] == 0, run.last))
        steps = {fact["step"] for fact in same}
        if len(same) >= UNCHANGED_VERSIONS and (len(steps) > 1 or steps == {None}):
            count = f"at least {len(same)}" if len(same) == UNCHANGED_LOOK_BACK else str(len(same))
            words = f"The last {count} versions change zero bytes: the trainer may publish the wrong weights."
            yield Finding(
                f"unchanged-{run.pk}",
                Badge("Nothing changes", "ask", "warn", words),
                run.name,
                "dashboard:run",
                (project.slug, run.name),
            )


def _expiring(project: Project) -> Iterator[Finding]:
    """Credentials that end within two weeks."""
    for token in accounts.expiring(project)[: SHOWN + 1]:
        island = getattr(token, "island", None)
        place: tuple[str, tuple[object, ...]] = ("dashboard:tokens", (project.slug,))
        if island:
            place = ("dashboard:island", (project.slug, island.pk))
        what = f"island {island.name}" if island else f"{token.role} token {token.name}"
        assert token.expires_at is not None  # noqa: S101  the selector asks for it
        words = f"It opens nothing after {token.expires_at:%-d %b %Y, %H:%M} UTC; rotate it before."
        yield Finding(f"expiring-{token.pk}", Badge("Credential expires", "clock", "warn", words), what, *place)
