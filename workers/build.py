"""Build: makes a version from a checkpoint that its publisher left under an allowed folder.

The first version becomes an anchor (a copy of the files); every other one a patch from its parent. Nothing is visible
before the version is proven like one that was published ready-made. The same checkpoint gives the same bytes, so an
attempt that was killed leaves nothing but blobs that the next one finds in place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from controlplane.fleet import encoding
from controlplane.registry import services
from controlplane.registry.models import Run, Version
from mailboat.checkpoint.files import Checkpoint
from mailboat.digest import State, measure
from mailboat.manifest import MANIFEST_TYPE, BlobRef, Envelope, Manifest, ParentRef, PatchRef
from mailboat.patch import build_patch
from workers.copy import Copy
from workers.materials import add_files, open_anchor
from workers.validate import prove, version_of
from workers.work import Work


def build(work: Work) -> dict[str, Any]:
    """The job of a version that was committed as a checkpoint's path."""
    version = version_of(work)
    if version.state == Version.State.READY:
        return {"version": version.number, "state": version.state_digest}
    if version.state != Version.State.VALIDATING:  # an earlier attempt may have come that far
        services.begin_building(version)
        # Looked up again: links may have changed since the commit.
        path = services.allowed_checkpoint(version.checkpoint_path)
        work.log(f"Reading {path}.")
        if version.parent is None:
            _build_anchor(work, version, path)
        else:
            _build_patch(work, version, version.parent, path)
    return prove(work, version)


def _build_anchor(work: Work, version: Version, path: Path) -> None:
    with Checkpoint.open(path) as checkpoint:
        files = copy_files(work, version.run, checkpoint)
        checkpoint.check_unchanged()
        inventory = checkpoint.inventory
    # What is measured is the copy, so that the digests are those of the bytes that islands will get.
    with open_anchor(version.run, files, work.scratch, inventory.aliases) as copied:
        copied.inventory.require_same(inventory)
        state = measure(copied, progress=work.bytes_of(copied.inventory.full_bytes))
    work.check()
    _hand_over(version, state, None, None, files)


def copy_files(work: Work, run: Run, checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Copies every file of the checkpoint into the run's blobs; returns the anchor's list."""
    if not checkpoint.is_folder:
        names = {checkpoint.path.name: checkpoint.path}
    else:
        paths = [shard.path for shard in checkpoint.shards]
        paths += [checkpoint.path / file.path for file in checkpoint.side_files]
        if checkpoint.index_bytes is not None:
            paths += [checkpoint.path / checkpoint.layout.index[0]] if checkpoint.layout.index else []
        names = {path.relative_to(checkpoint.path).as_posix(): path for path in paths}
    return add_files(work, run, names)


def _build_patch(work: Work, version: Version, parent: Version, path: Path) -> None:
    with Copy(work, version.run) as copy, Checkpoint.open(path) as checkpoint:
        image = copy.bring_to(parent)
        out = work.scratch / "part-0.mbp"
        progress, wanted = work.bytes_of(checkpoint.inventory.full_bytes), encoding.wanted(version.run)
        built = build_patch(image, checkpoint, out, base_state=image.state, progress=progress, encode_for=wanted)
    work.log(f"{built.changed} of {built.elements} elements changed; the patch has {built.size} bytes.")
    work.check()
    blob = services.add_blob(version.run, out)
    part = BlobRef(blob.sha256, blob.size)
    _hand_over(
        version, built.target_state, ParentRef(parent.number, parent.state_digest), PatchRef((part,), built.changed)
    )


def _hand_over(
    version: Version,
    state: State,
    parent: ParentRef | None,
    patch: PatchRef | None,
    anchor: list[dict[str, Any]] | None = None,
) -> None:
    place = version.run, version.epoch.number, version.number
    manifest = made_manifest(place, state, parent, patch, version.step)
    envelope = Envelope.wrap(MANIFEST_TYPE, manifest.to_bytes()).to_dict()
    services.begin_validating(version, envelope=envelope, anchor=anchor)


def made_manifest(
    place: tuple[Run, int, int], state: State, parent: ParentRef | None, patch: PatchRef | None, step: int | None
) -> Manifest:
    """The manifest of a version that a worker made, at (run, epoch, number); its documents become blobs of the run."""
    run, epoch, number = place
    inventory, digests = (services.add_blob(run, data) for data in (state.inventory.to_bytes(), state.digests_bytes()))
    return Manifest(
        run=str(run.pk),
        epoch=epoch,
        number=number,
        parent=parent,
        inventory=BlobRef(inventory.sha256, inventory.size),
        digests=BlobRef(digests.sha256, digests.size),
        side_files=state.side_files,
        state=state.digest,
        patch=patch,
        elements=state.inventory.elements,
        full_bytes=state.inventory.full_bytes,
        step=step,
    )
