"""Retention: what a run no longer keeps, and the one door through which published rows may leave the database.

Kept are the newest versions by number and by age, every version that a channel, a live island, a lease or unfinished
work needs, and whatever lies on a route to those (`registry.keeping`). The rest is retired: the version's row stays
and says what it was; its patches, anchors and documents go. A run without limits keeps everything but what failed and
what nobody ever committed.

Triggers refuse to delete published rows unless the transaction says that retention is at work. Nothing may ever be
*changed*, here neither. Rows go in one transaction together with a tombstone for each blob; the bytes go afterwards,
so that a kill at any moment leaves work for the next round and never a row without its bytes.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

from django.db import connection, transaction
from django.db.models import Q
from django.db.models.functions import Now

from controlplane.audit import services as audit
from controlplane.jobs.models import Job
from controlplane.registry import beside, blobs, keeping, needs
from controlplane.registry.models import (
    Anchor,
    Blob,
    Patch,
    PatchPart,
    Run,
    Tombstone,
    Upload,
    Version,
)

State = Version.State
Check = Callable[[int], None]  # is told the bytes given back so far, and may raise to stop
UNCOMMITTED = timedelta(days=1)  # how long a blob that no version names may wait for its commit
KEPT_HERE = (Anchor.Kind.UPLOAD, Anchor.Kind.BUILT)  # anchors whose files are blobs: others may vanish without us
ABANDONED = timedelta(days=7)  # how long an upload may take
AT_ONCE = 100  # blobs whose bytes go in one transaction
BATCH = 500  # versions that one transaction retires
LEAST_BRIDGE = 8  # versions kept only as a way to the oldest wanted one, before an anchor there is worth its bytes


@contextmanager
def removing() -> Iterator[None]:
    """A transaction that may delete published rows; what it does afterwards, in an outer transaction, may not."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT set_config('mailboat.retention', 'on', true)")
        try:
            yield
        finally:
            if connection.connection is not None and not connection.needs_rollback:
                cursor.execute("SELECT set_config('mailboat.retention', 'off', true)")


@dataclass(frozen=True, slots=True)
class Collection:
    """What a collection would remove (or one batch of it). `numbers` are the versions that would be retired; `bytes`
    what their blobs and those that nobody committed take; `anchor` a version that needs one before more can go;
    `reasons` how many versions stay for which reason, the commonest first.
    """

    versions: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    patches: tuple[int, ...] = ()
    anchors: tuple[int, ...] = ()
    blobs: dict[str, int] = field(default_factory=dict)
    kept: int = 0
    anchor: int | None = None
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes that it gives back."""
        return sum(self.blobs.values())

    @property
    def nothing(self) -> bool:
        """True when there is nothing to do."""
        return not (self.versions or self.patches or self.anchors or self.blobs)


def preview(run: Run) -> Collection:
    """What a collection would do now. Reads alone; the number of queries does not grow with the versions."""
    return _plan(run, limit=None)


def collect(run: Run, *, job: Job | None, actor: str, check: Check) -> Collection:
    """Removes what `preview` shows, batch by batch, and returns what went. When `check` raises, what is done stays
    done.
    """
    clear(run, check)
    gone = Collection()
    while True:
        with removing():
            locked = Run.objects.select_related("project").select_for_update(of=["self"], no_key=True).get(pk=run.pk)
            batch = _plan(locked, limit=BATCH)
            if not batch.nothing:
                _remove(locked, batch, job)
                audit.record(
                    locked.project, actor, "run.collect", f"run {locked.name}",
                    after={"retired": list(batch.numbers), "blobs": len(batch.blobs), "bytes": batch.bytes},
                )  # fmt: skip
        gone = Collection(
            versions=gone.versions + batch.versions,
            numbers=gone.numbers + batch.numbers,
            patches=gone.patches + batch.patches,
            anchors=gone.anchors + batch.anchors,
            blobs=gone.blobs | batch.blobs,
            kept=batch.kept,
            anchor=batch.anchor,
        )
        beside.remove_versions(run, batch.numbers)
        clear(run, check)
        check(gone.bytes)
        if batch.nothing:
            _drop_uploads(run)
            return gone


def clear(run: Run, check: Check) -> int:
    """Deletes the bytes of blobs whose rows are gone; returns how many blobs. What has come back meanwhile, or is on
    its way, stays.
    """
    cleared = 0
    store = blobs.store()
    while stones := dict(Tombstone.objects.filter(run=run, cleared_at=None).values_list("sha256", "pk")[:AT_ONCE]):
        with transaction.atomic():
            hold_names(run.pk, stones)
            named = {"run": run, "sha256__in": stones}
            back = {
                sha256
                for model in (Blob, Upload)
                for sha256 in model.objects.filter(**named).values_list("sha256", flat=True)
            }
            for sha256 in stones.keys() - back:
                store.remove(run.pk, sha256)
                cleared += 1
            Tombstone.objects.filter(run=run, sha256__in=stones, cleared_at=None).update(cleared_at=Now())
        check(0)
    return cleared


def _drop_uploads(run: Run) -> None:
    """Gives up uploads that nobody has continued for long."""
    for upload in Upload.objects.filter(run=run, created_at__lt=Now() - ABANDONED):
        blobs.store().drop_upload(run.pk, upload.pk)
        upload.delete()


def hold_names(run: uuid.UUID, names: Iterable[str]) -> None:
    """Makes removing blobs' bytes and writing down their rows wait for each other, until the transaction ends."""
    keys = [f"blob {run} {sha256}" for sha256 in sorted(names)]
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(key, 0)) FROM unnest(%s::text[]) AS key", [keys])


# What stays


def _plan(run: Run, *, limit: int | None) -> Collection:
    chosen = Version.objects.filter(run=run).order_by("number")
    rows: list[needs.Row] = list(chosen.values_list("pk", "number", "parent_id", "state", "committed_at"))
    ready = [row for row in rows if row[3] == State.READY]
    stepped = set(Patch.objects.filter(run=run, kind=Patch.Kind.STEP).values_list("to_version", flat=True))
    anchored = set(Anchor.objects.filter(version__run=run, kind__in=KEPT_HERE).values_list("version", flat=True))
    nodes = [keeping.Node(key, number, parent, key in stepped, key in anchored) for key, number, parent, *_ in ready]
    wanted = needs.wanted(run, ready)
    kept = keeping.keep(nodes, wanted, needs.of_islands(run))
    leaving = [node for node in nodes if node.key not in kept.reasons][:limit]
    going = {node.key for node in leaving}
    gone = going | {key for key, _, _, state, _ in rows if state in {State.RETIRED, State.FAILED}}
    patches, anchors, found = _belongings(run, gone, going)
    return Collection(
        versions=tuple(going),
        numbers=tuple(node.number for node in leaving),
        patches=patches,
        anchors=anchors,
        blobs=found,
        kept=len(ready) - len(leaving),
        anchor=_anchor_wanted(run, nodes, wanted, kept),
        reasons=dict(Counter(kept.reasons.values()).most_common()),
    )


def _anchor_wanted(run: Run, nodes: list[keeping.Node], wanted: dict[int, str], kept: keeping.Kept) -> int | None:
    """The number of the oldest wanted version, when many are kept for no other reason than to lead to it."""
    if run.keep_versions is None and run.keep_days is None:
        return None
    oldest = next((node for node in nodes if node.key in wanted), None)
    if oldest is None or oldest.anchored:
        return None
    bridge = sum(node.number < oldest.number and node.key in kept.reasons for node in nodes)
    return oldest.number if bridge >= max(LEAST_BRIDGE, run.keep_versions or 0) else None


def _belongings(run: Run, gone: set[int], going: set[int]) -> tuple[tuple[int, ...], tuple[int, ...], dict[str, int]]:
    """Patches and anchors (keys) and blobs (sizes by name) that nobody needs once the versions in `gone` are gone.

    What versions in `going` had goes at once. Any other blob has to be old: it may be on its way into a commit.
    """
    patches, fresh_patches = _patches_at(run, gone), _patches_at(run, going)
    anchors, fresh_anchors = (
        set(Anchor.objects.filter(version__in=versions).values_list("pk", flat=True)) for versions in (gone, going)
    )
    needed: set[str] = set()
    dropped: set[str] = set()
    documents = Version.objects.filter(run=run).values_list(
        "pk", "manifest_sha256", "digests_sha256", "inventory__sha256", "statistics__sha256"
    )
    for key, *names in documents:
        _sort(names, stays=key not in gone, fresh=key in going, needed=needed, dropped=dropped)
    parts = PatchPart.objects.filter(patch__run=run).values_list("patch", "blob__sha256")
    for key, name in parts.iterator():
        _sort([name], stays=key not in patches, fresh=key in fresh_patches, needed=needed, dropped=dropped)
    for key, files in Anchor.objects.filter(version__run=run).values_list("pk", "files").iterator():
        names = [file["sha256"] for file in files]
        _sort(names, stays=key not in anchors, fresh=key in fresh_anchors, needed=needed, dropped=dropped)
    old = Q(created_at__lt=Now() - UNCOMMITTED) | Q(sha256__in=dropped)
    found = Blob.objects.filter(old, run=run).values_list("sha256", "size")
    return tuple(patches), tuple(anchors), {sha256: size for sha256, size in found if sha256 not in needed}


def _patches_at(run: Run, versions: set[int]) -> set[int]:
    ends = Q(from_version__in=versions) | Q(to_version__in=versions)
    return set(Patch.objects.filter(ends, run=run).values_list("pk", flat=True))


def _sort(names: Iterable[str | None], *, stays: bool, fresh: bool, needed: set[str], dropped: set[str]) -> None:
    if stays:
        needed.update(name for name in names if name)
    elif fresh:
        dropped.update(name for name in names if name)


def _remove(run: Run, batch: Collection, job: Job | None) -> None:
    """One batch of rows, inside `removing` and under the run's lock."""
    retired = Version.objects.filter(pk__in=batch.versions, state=State.READY)
    retired.update(state=State.RETIRED, retired_at=Now(), statistics=None)
    Version.objects.filter(run=run, statistics__sha256__in=batch.blobs).update(statistics=None)  # of failed ones
    PatchPart.objects.filter(patch__in=batch.patches).delete()
    Patch.objects.filter(pk__in=batch.patches).delete()
    Anchor.objects.filter(pk__in=batch.anchors).delete()
    Blob.objects.filter(run=run, sha256__in=batch.blobs).delete()
    Tombstone.objects.bulk_create(
        [Tombstone(run=run, sha256=sha256, size=size, job=job) for sha256, size in batch.blobs.items()],
        batch_size=1000,
    )
