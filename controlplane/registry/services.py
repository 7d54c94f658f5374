"""Writes of the registry: runs, epochs, blobs, versions and their life cycle.

Numbers and parents are compare-and-set under the lock of the run's row; states change by one conditional UPDATE that
names the expected state. A repeated commit of the same content is harmless; of other content it changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models.functions import Now

from controlplane.audit import services as audit
from controlplane.jobs import services as jobs
from controlplane.jobs.models import Job
from controlplane.registry import announcing, beside, blobs, deriving, keys, merging, submission
from controlplane.registry.blobs import Part
from controlplane.registry.errors import Refusal, Unacceptable, WrongState
from controlplane.registry.heads import renew_heads
from controlplane.registry.joining import joins
from controlplane.registry.models import (
    Anchor,
    Blob,
    Channel,
    Epoch,
    Inventory,
    Patch,
    PatchPart,
    Project,
    Run,
    Upload,
    Version,
)
from controlplane.registry.retention import hold_names
from controlplane.registry.submission import Submission
from mailboat.checkpoint.outline import Outline
from mailboat.manifest import Manifest

__all__ = [
    "add_blob",
    "begin_building",
    "begin_epoch",
    "begin_upload",
    "begin_validating",
    "commit_checkpoint",
    "commit_manifest",
    "create_project",
    "create_run",
    "finish_parts",
    "finish_upload",
    "mark_failed",
    "mark_ready",
    "missing_parts",
    "renew_heads",
]

State = Version.State
PART_SECONDS = 3600  # how long the addresses of parts are valid; announcing the blob again gives new ones
JOINED_AT_ONCE = 64 << 20  # bytes of an upload in parts that are joined within the request
MANY = 1000


def create_project(slug: str, name: str = "", *, actor: str) -> Project:
    """A new tenant. Raises Refusal `project_exists`."""
    try:
        with transaction.atomic():
            project = Project.objects.create(slug=slug, name=name or slug)
            audit.record(project, actor, "project.create", f"project {slug}")
    except IntegrityError:
        raise Refusal(f"There is a project {slug} already.", code="project_exists") from None
    project.refresh_from_db()
    return project


def create_run(
    project: Project, name: str, *, served_format: str = "bf16", announce: str = Run.Announce.VALIDATED, actor: str
) -> Run:
    """A new run with epoch 0 and the channel `latest`. Raises Refusal `run_exists`."""
    try:
        with transaction.atomic():
            run = Run.objects.create(project=project, name=name, served_format=served_format, announce=announce)
            Epoch.objects.create(run=run, number=0, reason="The run begins.")
            Channel.objects.create(run=run, name=Channel.LATEST)
            audit.record(project, actor, "run.create", f"run {name}", after={"served_format": served_format})
    except IntegrityError:
        raise Refusal(f"There is a run {name} already; use it or choose another name.", code="run_exists") from None
    run.refresh_from_db()
    return run


def begin_epoch(run: Run, from_version: int | None, reason: str, *, from_state: str = "", actor: str) -> Epoch:
    """A new epoch that goes on from a ready version, given by number or by the state digest `from_state`; numbers of
    versions go on.

    None of both, or a state that no version has: the trainer goes on from bytes that were never published. Raises
    Refusal `parent_not_ready`, Unacceptable `wrong_state_digest`.
    """
    with transaction.atomic():
        _lock(run)
        base = _resumed_from(run, from_version, from_state)
        latest = Epoch.objects.filter(run=run).order_by("-number").values_list("number", flat=True)[0]
        epoch = Epoch.objects.create(
            run=run, number=latest + 1, from_version=base, from_state=from_state, reason=reason
        )
        told = {"epoch": epoch.number, "from_version": base and base.number, "reason": reason}
        audit.record(run.project, actor, "epoch.begin", f"run {run.name}", after=told)
    epoch.refresh_from_db()
    return epoch


def _resumed_from(run: Run, number: int | None, state: str) -> Version | None:
    ready = Version.objects.filter(run=run, state=State.READY)
    if number is None:
        return ready.filter(state_digest=state).order_by("-number").first() if state else None
    base = ready.filter(number=number).first()
    if base is None:
        raise Refusal(f"Version {number} is not ready, so no epoch can start from it.", code="parent_not_ready")
    if state and base.state_digest != state:
        raise Unacceptable(
            f"Version {number} has another state digest than the one that was sent; send only one of the two.",
            code="wrong_state_digest",
        )
    return base


def begin_upload(run: Run, sha256: str, size: int) -> Upload | None:
    """An upload to feed, new or begun before; None when the run has the blob already."""
    if Blob.objects.filter(run=run, sha256=sha256, size=size).exists() and blobs.store().size(run.pk, sha256) == size:
        return None
    upload, _ = Upload.objects.get_or_create(run=run, sha256=sha256, defaults={"size": size})
    if (
        upload.size != size
    ):  # one of the two claims is wrong, and only whole bytes can tell: start again with the newer one
        blobs.store().drop_upload(run.pk, upload.pk)
        Upload.objects.filter(pk=upload.pk).update(size=size)
        upload.size = size
    upload.offset = blobs.store().upload_offset(run.pk, upload.pk)
    if upload.offset == size:  # every byte had arrived when the process ended
        try:
            finish_upload(upload)
            return None
        except Unacceptable:
            upload.offset = 0  # what lay there was damaged and is gone
    blobs.store().require_space(size - upload.offset)
    return upload


def missing_parts(upload: Upload) -> tuple[Part, ...] | None:
    """The parts that may go straight to the blob store and are not there yet; None where it takes none."""
    return blobs.store().presign_put_parts(upload.run_id, upload.pk, upload.size, PART_SECONDS)


def finish_upload(upload: Upload) -> Blob:
    """Checks the digest of what arrived and makes it a blob. Raises Unacceptable `digest_mismatch`."""
    blobs.store().finish(upload.run_id, upload.pk, upload.sha256, upload.size)
    return _uploaded(upload)


def finish_parts(upload: Upload) -> bool:
    """The same for an upload whose parts went straight to the blob store: True when it is a blob, False while a large
    one is joined beside the request. Raises Refusal `parts_missing`, Unacceptable `digest_mismatch`.
    """
    if blobs.store().size(upload.run_id, upload.sha256) != upload.size:
        lacking = missing_parts(upload)
        if lacking:
            joins.outcome(upload)  # bytes with another digest are gone by now
            raise _lacking([part.index for part in lacking])
        if lacking is not None and upload.size > JOINED_AT_ONCE:
            return joins.ask(upload, _join)
    _join(upload)
    return True


def _join(upload: Upload) -> None:
    lacking = blobs.store().finish_parts(upload.run_id, upload.pk, upload.sha256, upload.size)
    if lacking:
        raise _lacking(lacking)
    _uploaded(upload)


def _lacking(parts: Sequence[int]) -> Refusal:
    return Refusal(
        f"{len(parts)} parts are not in the blob store whole; announce the blob again to see which, and send them.",
        code="parts_missing",
        parts=list(parts[:MANY]),
    )


def _uploaded(upload: Upload) -> Blob:
    with transaction.atomic():
        hold_names(upload.run_id, [upload.sha256])
        blob, _ = Blob.objects.get_or_create(run_id=upload.run_id, sha256=upload.sha256, defaults={"size": upload.size})
        Upload.objects.filter(pk=upload.pk).delete()
    return blob


def add_blob(run: Run, content: bytes | Path) -> Blob:
    """Stores bytes, or a copy of a file, as a blob of the run. For workers, which sit beside the store."""
    store = blobs.store()
    while True:
        sha256, size = store.write_file(run.pk, content) if isinstance(content, Path) else store.write(run.pk, content)
        with transaction.atomic():
            hold_names(run.pk, [sha256])
            row = Blob.objects.get_or_create(run=run, sha256=sha256, defaults={"size": size})[0]
        if store.size(run.pk, sha256) == size:  # a collection may have removed the bytes before the row was there
            return row


# Commit


def commit_manifest(
    run: Run, envelope: Any, anchor: Any, *, source: Version | None = None, actor: str
) -> tuple[Version, bool]:
    """Commits a version that its manifest defines; the second value is True when it is new. `source` is the version
    that it serves in another format, where the run is derived.

    Raises Unacceptable `manifest_invalid`, `anchor_invalid`, `missing_parts`, `inventory_mismatch`,
    `signature_missing`, `signature_invalid`, `key_revoked` and Refusal `version_conflict`, `wrong_epoch`,
    `wrong_parent`, `parent_not_ready`, `derived_run`.
    """
    sent = submission.parse(run, envelope, anchor)
    deriving.require_publishable(run, source, sent.manifest.number)
    existing = Version.objects.filter(run=run, number=sent.manifest.number).first()
    if existing is not None:
        return _same_manifest(existing, sent), False
    rows = submission.require_blobs(run, sent)
    outline = submission.require_state(run, sent.manifest)
    add_blob(run, sent.payload)
    with transaction.atomic():
        locked = _lock(run)
        existing = Version.objects.filter(run=run, number=sent.manifest.number).first()
        if existing is not None:
            return _same_manifest(existing, sent), False
        keys.require_signature(run, sent.envelope)
        manifest = sent.manifest
        epoch = _require_place(run, manifest.number, manifest.epoch)
        parent = _require_parent(run, epoch, None if manifest.parent is None else manifest.parent.number, manifest)
        _require_inventory(run, epoch, parent, manifest)
        version = Version(
            run=run, epoch=epoch, number=manifest.number, parent=parent, source=source, published_by=actor
        )
        _fill(version, sent, outline)
        version.save()
        _attach(version, sent, rows, Anchor.Kind.UPLOAD)
        _queue(version, "validate", actor)
        announcing.announce_early(locked, version)
    version.refresh_from_db()
    return version, True


def commit_checkpoint(
    run: Run, checkpoint: str, number: int, parent: int | None, epoch: int, *, step: int | None = None, actor: str
) -> tuple[Version, bool]:
    """Commits a version that a worker builds from a checkpoint under an allowed root; True when it is new.

    Raises Unacceptable `checkpoint_not_allowed` and the refusals of `commit_manifest`.
    """
    deriving.require_publishable(run, None, number)
    path = str(allowed_checkpoint(checkpoint))
    with transaction.atomic():
        _lock(run)
        existing = Version.objects.select_related("parent", "epoch").filter(run=run, number=number).first()
        if existing is not None:
            told = (
                existing.checkpoint_path,
                existing.parent and existing.parent.number,
                existing.epoch.number,
                existing.step,
            )
            if told != (path, parent, epoch, step):
                raise _conflict(run, number)
            return existing, False
        keys.require_unsigned_allowed(run)
        row = _require_place(run, number, epoch)
        parent_row = _require_parent(run, row, parent, None)
        version = Version.objects.create(
            run=run, epoch=row, number=number, parent=parent_row, step=step, checkpoint_path=path, published_by=actor
        )
        _queue(version, "build", actor)
    version.refresh_from_db()
    return version, True


def allowed_checkpoint(checkpoint: str) -> Path:
    """The real path of a checkpoint under one of the allowed roots. Raises Unacceptable `checkpoint_not_allowed`."""
    roots = settings.MAILBOAT_CHECKPOINT_ROOTS
    if not roots:
        raise Unacceptable(
            "Workers may read no checkpoints here; the operator allows folders with MAILBOAT_CHECKPOINT_ROOTS.",
            code="checkpoint_not_allowed",
        )
    try:
        path = Path(checkpoint).resolve(strict=True) if Path(checkpoint).is_absolute() else None
    except (OSError, ValueError, RuntimeError):
        path = None
    # A path outside and a path that does not exist read the same, so that nobody can feel about on the server's disk.
    if path is None or not any(path.is_relative_to(root.resolve()) for root in roots):
        raise Unacceptable(
            "The checkpoint is not an existing absolute path under a folder of MAILBOAT_CHECKPOINT_ROOTS.",
            code="checkpoint_not_allowed",
        )
    return path


# The life of a version


def begin_building(version: Version) -> None:
    """committed -> building. Harmless again for the attempt that follows a lost worker."""
    _move(version, (State.COMMITTED, State.BUILDING), state=State.BUILDING)


def begin_validating(
    version: Version,
    *,
    envelope: Any = None,
    anchor: Any = None,
    anchor_kind: str = Anchor.Kind.UPLOAD,
) -> None:
    """committed or building -> validating. Harmless again for the attempt that follows a lost worker.

    A worker that built the version hands over its manifest (and anchor), whose blobs it has added to the run before.
    """
    if envelope is None:
        _move(version, (State.COMMITTED, State.VALIDATING), state=State.VALIDATING)
        return
    run = version.run
    sent = submission.parse(run, envelope, anchor)
    rows = submission.require_blobs(run, sent)
    outline = submission.require_state(run, sent.manifest)
    add_blob(run, sent.payload)
    manifest = sent.manifest
    with transaction.atomic():
        locked = _lock(run)
        keys.require_signature(run, sent.envelope)
        version.refresh_from_db()
        parent = version.parent and version.parent.number
        if (manifest.number, manifest.epoch, manifest.parent and manifest.parent.number) != (
            version.number,
            version.epoch.number,
            parent,
        ):
            raise Unacceptable("The built manifest has another number, epoch or parent.", code="manifest_invalid")
        if version.parent is not None:
            _require_parent_state(version.parent, manifest)
        _require_inventory(run, version.epoch, version.parent, manifest, besides=version)
        _move(version, (State.BUILDING,), state=State.VALIDATING)
        version.refresh_from_db()
        _fill(version, sent, outline)
        version.save()
        _attach(version, sent, rows, anchor_kind)
        announcing.announce_early(locked, version)


def mark_ready(
    version: Version, *, codecs: str = "", statistics: Blob | None = None, unit_steps: int | None = None
) -> None:
    """validating -> ready, with what the validation learnt of its patch; moves `latest` unless it is protected.

    Raises WrongState while an earlier version is unfinished.
    """
    with transaction.atomic():
        run = _lock(version.run)
        earlier = Version.objects.filter(run=run, number__lt=version.number, state__in=Version.IN_FLIGHT)
        unfinished = earlier.values_list("number", flat=True).first()
        if unfinished is not None:
            raise WrongState(f"Version {version.number} can't be ready before version {unfinished} is ready or failed.")
        learnt = {"statistics": statistics, "unit_steps": unit_steps}
        _move(version, (State.VALIDATING,), state=State.READY, ready_at=Now(), reason="", **learnt)
        version.refresh_from_db()
        if codecs:
            Patch.objects.filter(to_version=version).update(codecs=codecs)
        transaction.on_commit(partial(beside.write_version, version), robust=True)
        announcing.announce(version)
        merging.queue_spans(version, run)
        merging.queue_anchor(version, run)
        deriving.queue(version)
        audit.record(
            run.project, "system", "version.ready", _named(version), after={"state_digest": version.state_digest}
        )


def mark_failed(version: Version, reason: str) -> None:
    """committed, building or validating -> failed. What was committed on top of it fails too."""
    with transaction.atomic():
        run = _lock(version.run)
        _move(version, Version.IN_FLIGHT, state=State.FAILED, reason=reason[:4000])
        announcing.take_back(version)
        audit.record(run.project, "system", "version.failed", _named(version), after={"reason": reason[:4000]})
        version.refresh_from_db()
        for child in version.children.filter(state__in=Version.IN_FLIGHT).select_related("run", "job"):
            mark_failed(
                child, f"Its parent, version {version.number}, failed; publish again on the last ready version."
            )
            if child.job is not None and child.job.state == Job.State.QUEUED:
                jobs.cancel(child.job, "system")


def fail_unfinished(job: Job) -> None:
    """A build or validate job that has ended leaves no version in the middle of its life."""
    version = Version.objects.filter(job=job, state__in=Version.IN_FLIGHT).select_related("run").first()
    if version is not None:
        mark_failed(version, job.error or f"Its {job.kind} job ended without finishing it.")


def _move(version: Version, expected: tuple[str, ...], **changes: Any) -> None:
    if Version.objects.filter(pk=version.pk, state__in=expected).update(**changes) != 1:
        version.refresh_from_db()
        raise WrongState(
            f"Version {version.number} is {version.state}, not {' or '.join(expected)}; nothing was changed."
        )
    version.refresh_from_db(fields=list(changes))


def _lock(run: Run) -> Run:
    """Serialises commits and transitions of one run; readers are not held up."""
    return Run.objects.select_related("project").select_for_update(of=["self"], no_key=True).get(pk=run.pk)


def _same_manifest(existing: Version, sent: Submission) -> Version:
    anchor = Anchor.objects.filter(version=existing).values_list("files", flat=True).first()
    if existing.manifest_sha256 != sent.manifest_sha256 or (
        existing.checkpoint_path == "" and anchor != sent.anchor_json
    ):
        raise _conflict(existing.run, existing.number)
    return existing


def _conflict(run: Run, number: int) -> Refusal:
    last = Version.objects.filter(run=run).order_by("-number").values_list("number", flat=True).first()
    following = 0 if last is None else last + 1
    what = "was committed with other content" if number < following else "is not the next one"
    return Refusal(f"Version {number} {what}; the next number is {following}.", code="version_conflict", next=following)


def _require_place(run: Run, number: int, epoch: int) -> Epoch:
    last = Version.objects.filter(run=run).order_by("-number").values_list("number", flat=True).first()
    following = 0 if last is None else last + 1
    if number < following or (number > following and run.source_id is None):  # a derived run has its source's holes
        raise _conflict(run, number)
    current = Epoch.objects.select_related("from_version").filter(run=run).order_by("-number")[0]
    if epoch != current.number:
        raise Refusal(
            f"The run is in epoch {current.number}, not {epoch}; ask for the run again and start from "
            "its latest version.",
            code="wrong_epoch",
            epoch=current.number,
        )
    return current


def _require_parent(run: Run, epoch: Epoch, parent: int | None, manifest: Manifest | None) -> Version | None:
    """The row of the parent, which must be the newest version of the epoch that has not failed.

    The first version of an epoch may stand alone. Its patch may start from the version that the epoch goes on from;
    from any ready one, when the trainer's state was never published.
    """
    newest = Version.objects.filter(run=run, epoch=epoch).exclude(state=State.FAILED).order_by("-number").first()
    expected = newest or epoch.from_version
    if parent is None:
        if newest is None:
            return None
        raise _wrong_parent(expected)
    row = Version.objects.filter(run=run, number=parent).first()
    if row is None or row.state == State.FAILED:
        why = "does not exist" if row is None else "failed"
        last = "there is none yet" if expected is None else f"that is version {expected.number}"
        raise Refusal(
            f"Version {parent} {why}; publish against the last version that did not fail: {last}.",
            code="parent_not_ready",
        )
    if row != expected and (expected is not None or row.state != State.READY):
        raise _wrong_parent(expected)
    if manifest is not None:
        _require_parent_state(row, manifest)
    return row


def _require_parent_state(parent: Version, manifest: Manifest) -> None:
    if not parent.state_digest:
        raise Refusal(f"Version {parent.number} is still being built; wait until it is ready.", code="parent_not_ready")
    if manifest.parent is None or manifest.parent.state != parent.state_digest:
        raise Refusal(
            f"The patch starts from another state than version {parent.number} has; build it against "
            "the published version.",
            code="wrong_parent",
            parent=parent.number,
        )


def _wrong_parent(expected: Version | None) -> Refusal:
    said = "no parent" if expected is None else f"version {expected.number} as its parent"
    return Refusal(f"The next version must name {said}.", code="wrong_parent", parent=expected and expected.number)


def _require_inventory(
    run: Run, epoch: Epoch, parent: Version | None, manifest: Manifest, *, besides: Version | None = None
) -> None:
    """One inventory per epoch; a patch never changes it."""
    of_epoch = Version.objects.filter(run=run, epoch=epoch, inventory__isnull=False).exclude(state=State.FAILED)
    if besides is not None:
        of_epoch = of_epoch.exclude(pk=besides.pk)
    first = of_epoch.select_related("inventory").order_by("number").first()
    if first is None and manifest.patch is not None:
        first = parent
    if first is not None and first.inventory is not None:
        submission.require_same_inventory(run, first.inventory.sha256, manifest.inventory.sha256)


def _fill(version: Version, sent: Submission, outline: Outline) -> None:
    manifest = sent.manifest
    version.inventory, _ = Inventory.objects.get_or_create(
        run_id=version.run_id,
        sha256=manifest.inventory.sha256,
        defaults={"tensors": outline.tensors, "elements": outline.elements, "full_bytes": outline.full_bytes},
    )
    version.state_digest = manifest.state
    version.manifest_sha256 = sent.manifest_sha256
    version.digests_sha256 = manifest.digests.sha256
    version.envelope = sent.envelope
    version.step = manifest.step if manifest.step is not None else version.step
    version.elements, version.full_bytes = manifest.elements, manifest.full_bytes
    version.side_files = [{"path": f.path, "size": f.size, "sha256": f.sha256} for f in manifest.side_files]
    if manifest.patch is not None:
        version.changed = manifest.patch.changed
        version.patch_bytes = sum(part.size for part in manifest.patch.parts)


def _attach(version: Version, sent: Submission, rows: dict[str, Blob], anchor_kind: str) -> None:
    """The rows of the version's patch and anchor."""
    if sent.manifest.patch is not None and version.parent is not None:
        patch = Patch.objects.create(
            run=version.run,
            from_version=version.parent,
            to_version=version,
            bytes=version.patch_bytes or 0,
            changed=version.changed,
        )
        PatchPart.objects.bulk_create(
            PatchPart(patch=patch, index=index, blob=rows[part.sha256])
            for index, part in enumerate(sent.manifest.patch.parts)
        )
    if sent.anchor is not None:
        size = sum(file.blob.size for file in sent.anchor)
        Anchor.objects.create(version=version, kind=anchor_kind, files=sent.anchor_json, bytes=size)


def _queue(version: Version, kind: str, actor: str) -> None:
    """Queues the version's job behind that of the version before it: readiness goes in the order of the numbers."""
    before = (
        Version.objects.filter(run=version.run, number__lt=version.number, state__in=Version.IN_FLIGHT)
        .filter(job__isnull=False)
        .order_by("-number")
        .select_related("job")
        .first()
    )
    job, _ = jobs.enqueue(
        kind,
        version.run,
        {"version": version.number},
        f"{kind}:{version.run_id}:{version.number}",
        requested_by=actor,
        after=before.job if before else None,
    )
    version.job = job
    version.save(update_fields=["job"])
    audit.record(
        version.run.project, actor, "version.commit", _named(version), after={"state_digest": version.state_digest}
    )


def _named(version: Version) -> str:
    return f"run {version.run.name} version {version.number}"
