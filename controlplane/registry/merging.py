"""Patches over several versions, and back: when one is worth building, and the rows of those that were built.

By policy over aligned spans of 2, 4, 8 ... versions when a version gets ready; on demand for an island that would have
it sooner than it could walk; back to an older version after a rollback. A patch that is no smaller than what it would
replace is not kept, and the job that found out stands in the way of another try.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models.functions import Now

from controlplane.audit import services as audit
from controlplane.jobs import services as jobs
from controlplane.jobs.models import Job
from controlplane.registry import clock, keys, routes
from controlplane.registry.cost import Means
from controlplane.registry.errors import Refusal
from controlplane.registry.models import Anchor, Blob, Patch, PatchPart, Run, Version
from controlplane.registry.plan import Route, estimate
from controlplane.registry.routes import Ground

POLICY, ASKED = "policy", "asked"
BACKLOG = 16  # unfinished policy merges of a run: beyond that its workers can't follow, and on-demand ones serve
AT_ONCE = 4  # unfinished on-demand merges of a run
AGAIN = timedelta(days=1)  # after this, a merge that came to nothing may be asked for again
WORTH = 0.9  # waiting has to save a tenth at least
BUILD = 0.5e9  # bytes of the model per second that a core merges: both ends read, digested and compared
START = 2.0  # seconds until a worker has begun, and its rows are written
LONGEST_WAIT = 900.0
SMALLEST = Means(link=1.0)  # to whom bytes are all that matters


def key_of(run: Run, origin: int, to: int) -> str:
    """What makes a second trigger join the first."""
    return f"merge:{run.pk}:{origin}:{to}"


def enqueue(run: Run, origin: int, to: int, *, why: str, actor: str = "system") -> tuple[Job, bool]:
    """Queues the job that builds the patch between two versions, or joins it. In the caller's transaction."""
    params = {"from": origin, "to": to, "why": why}
    return jobs.enqueue(Job.Kind.MERGE, run, params, key_of(run, origin, to), requested_by=actor)


def enqueue_anchor(run: Run, number: int, *, actor: str = "system") -> tuple[Job, bool]:
    """Queues the job that makes a full checkpoint of a version, or joins it. In the caller's transaction."""
    params = {"version": number}
    return jobs.enqueue(Job.Kind.ANCHOR, run, params, f"anchor:{run.pk}:{number}", requested_by=actor)


# By policy


def queue_spans(version: Version, run: Run) -> None:
    """The merges over aligned spans that end at a version which has just become ready; the longest first, so that a
    worker that begins anew goes back only once.
    """
    numbers = [version.number - span for span in aligned(version.number, run.merge_up_to)]
    if not numbers or _unfinished(run, POLICY) >= BACKLOG:
        return
    ready = Version.objects.filter(run=run, state=Version.State.READY, inventory=version.inventory_id)
    begins = ready.filter(number__in=numbers).exclude(patches_out__to_version=version)
    for begin in begins.order_by("number").values_list("number", flat=True):
        enqueue(run, begin, version.number, why=POLICY)


def queue_anchor(version: Version, run: Run) -> None:
    """The anchor that is due at a version which has just become ready: by policy, or since islands that trust the run's
    keys have no other to start from.
    """
    due = run.anchor_every is not None and version.number % run.anchor_every == 0
    if (due or _first_signed(version, run)) and not Anchor.objects.filter(version=version).exists():
        enqueue_anchor(run, version.number)


def _first_signed(version: Version, run: Run) -> bool:
    """Whether a key that counts has signed the version, and none that has an anchor, or will have one soon."""
    if not Version.objects.filter(keys.SIGNED, pk=version.pk).exists():
        return False
    anchored = Anchor.objects.filter(version__run=run, version__state=Version.State.READY)
    if anchored.filter(keys.SIGNED, kind__in=routes.SERVED.anchors).exists():
        return False
    return not Job.objects.filter(run=run, kind=Job.Kind.ANCHOR, state__in=Job.UNFINISHED).exists()


def queue_due(run: Run) -> None:
    """After an edit of the settings: the merges that end at the newest version, and the anchor that is due at it or was
    before it. Older spans are left to those who wait for them.
    """
    ready = Version.objects.filter(run=run, state=Version.State.READY)
    newest = ready.order_by("-number").first()
    if newest is None:
        return
    queue_spans(newest, run)
    last = None if run.anchor_every is None else newest.number - newest.number % run.anchor_every
    if last is not None and (version := ready.filter(number=last).first()) is not None:
        queue_anchor(version, run)


def aligned(number: int, up_to: int) -> list[int]:
    """The spans of 2, 4, 8 ... that end at a number, up to a length."""
    spans, span = [], 2
    while number and number % span == 0 and span <= min(up_to, number):
        spans.append(span)
        span *= 2
    return spans


def queue_return(run: Run, origin: Version, to: Version, *, actor: str) -> None:
    """After a rollback: the patch back, for the islands that are ahead now."""
    if origin.inventory_id == to.inventory_id and not Patch.objects.filter(from_version=origin, to_version=to).exists():
        enqueue(run, origin.number, to.number, why=ASKED, actor=actor)


# On demand


@dataclass(frozen=True, slots=True)
class Building:
    """A patch that is (`job`) or could be built, and would bring the island to its target sooner than the route."""

    origin: int
    to: int
    bytes: int
    seconds: float  # until the island would be there
    wait: float
    job: Job | None

    def as_json(self) -> dict[str, Any]:
        """As the API answers it."""
        return {
            "job": self.job and str(self.job.pk),
            "from": self.origin,
            "to": self.to,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
        }


def offer(run: Run, ground: Ground, route: Route, means: Means, *, ask: bool, actor: str = "") -> Building | None:
    """What to wait for instead of walking; None where walking is best. With `ask` the job is begun, or joined: many
    islands at one lag make one job.
    """
    target, full = ground.target, ground.target.full_bytes or 0
    origin = ground.held[0] if ground.held and route.start is None else route.start
    direct = any((edge.origin, edge.to) == (origin, target.number) for edge in ground.edges)
    guess = None if origin is None or direct else estimate(ground.edges, origin, target.number)
    if origin is None or guess is None or guess[2] < 2 or not means.knows("contextual"):
        return None
    size, changed, _ = guess
    decoding = means.scan("contextual", full) + changed * means.element("contextual")
    there = size / means.link + decoding + means.strong(full)
    job = _standing(run, origin, target.number)
    wait = _left(job, full)
    if wait > LONGEST_WAIT or wait + there > WORTH * route.total:
        return None
    if job is not None and job.finished:  # it came to nothing, else there were an edge
        return None
    if job is None and ask:
        job = _begin(run, origin, target, actor)
    possible = job is not None or (not ask and _buildable(run, origin, target))
    return Building(origin, target.number, size, wait + there, wait, job) if possible else None


def _begin(run: Run, origin: int, target: Version, actor: str) -> Job | None:
    """None when it can't be built, or enough is being built for this run."""
    if not _buildable(run, origin, target):
        return None
    with transaction.atomic():
        Run.objects.select_for_update(of=["self"], no_key=True).get(pk=run.pk)
        same = Job.objects.filter(run=run, dedupe_key=key_of(run, origin, target.number), state__in=Job.UNFINISHED)
        if (unfinished := same.first()) is not None:
            return unfinished
        if _unfinished(run, ASKED) >= AT_ONCE:
            return None
        return enqueue(run, origin, target.number, why=ASKED, actor=actor)[0]


def _standing(run: Run, origin: int, to: int) -> Job | None:
    """The job for this pair that is at work, or has ended not long ago."""
    recent = Job.objects.filter(project=run.project_id, queued_at__gt=Now() - AGAIN)
    return recent.filter(dedupe_key=key_of(run, origin, to)).order_by("-queued_at").first()


def _left(job: Job | None, full_bytes: int) -> float:
    """Seconds until the patch can be had."""
    takes = START + full_bytes / BUILD
    began: datetime | None = None if job is None else job.started_at
    if began is None:
        return takes
    return max(1.0, takes - (clock.now() - began).total_seconds())


def _buildable(run: Run, origin: int, target: Version) -> bool:
    """Both ends are proven and have the same tensors."""
    ready = Version.objects.filter(run=run, state=Version.State.READY, inventory=target.inventory_id)
    return ready.filter(number__in=(origin, target.number)).count() == 2


def _unfinished(run: Run, why: str) -> int:
    return Job.objects.filter(run=run, kind=Job.Kind.MERGE, state__in=Job.UNFINISHED, params__why=why).count()


def waited_for() -> bool:
    """Whether an island waits for a merge that nobody has begun: other work on that queue steps back."""
    return Job.objects.filter(kind=Job.Kind.MERGE, state=Job.State.QUEUED, params__why=ASKED).exists()


# What was built


def replaced_bytes(run: Run, origin: Version, to: Version) -> int | None:
    """The bytes of the smallest way from one version to the other without the new patch; None where there is none."""
    try:
        _, route = routes.search(run, origin.state_digest, to.number, means=SMALLEST)
    except Refusal:
        return None
    return route.bytes


def existing(origin: Version, to: Version) -> Patch | None:
    """The patch that joins two versions directly, if there is one."""
    return Patch.objects.filter(from_version=origin, to_version=to).order_by("bytes").first()


def record(
    run: Run, origin: Version, to: Version, parts: Sequence[Blob], *, changed: int, codecs: str, actor: str
) -> Patch:
    """The rows of a patch whose result was proven. Harmless again: the first one stays. Raises Refusal `not_ready`."""
    kind = Patch.Kind.MERGED if to.number > origin.number else Patch.Kind.REVERSE
    with transaction.atomic():
        Run.objects.select_for_update(of=["self"], no_key=True).get(pk=run.pk)
        ready = Version.objects.filter(pk__in=[origin.pk, to.pk], state=Version.State.READY).count()
        if ready != 2:
            raise Refusal("One of the two versions is not ready any more; nothing was recorded.", code="not_ready")
        patch, new = Patch.objects.get_or_create(
            from_version=origin,
            to_version=to,
            kind=kind,
            defaults={"run": run, "bytes": sum(p.size for p in parts), "changed": changed, "codecs": codecs},
        )
        if new:
            PatchPart.objects.bulk_create(
                PatchPart(patch=patch, index=index, blob=blob) for index, blob in enumerate(parts)
            )
            audit.record(
                run.project, actor, "patch.add", f"run {run.name} versions {origin.number} to {to.number}",
                after={"kind": str(kind), "bytes": patch.bytes},
            )  # fmt: skip
    return patch


def record_anchor(version: Version, files: list[dict[str, Any]], *, actor: str) -> Anchor:
    """The row of an anchor that a worker built and proved. Harmless again: the first one stays."""
    with transaction.atomic():
        run = Run.objects.select_related("project").select_for_update(of=["self"], no_key=True).get(pk=version.run_id)
        if not Version.objects.filter(pk=version.pk, state=Version.State.READY).exists():
            raise Refusal(f"Version {version.number} is not ready any more; nothing was recorded.", code="not_ready")
        anchor, new = Anchor.objects.get_or_create(
            version=version,
            defaults={"kind": Anchor.Kind.BUILT, "files": files, "bytes": sum(f["size"] for f in files)},
        )
        if new:
            audit.record(
                run.project, actor, "anchor.add", f"run {run.name} version {version.number}",
                after={"bytes": anchor.bytes},
            )  # fmt: skip
    return anchor
