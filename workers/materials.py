"""What a version is made of, from the run's blobs, each checked against its name before it is used."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from controlplane.registry import blobs, services, submission
from controlplane.registry.errors import Missing
from controlplane.registry.models import Run, Version
from mailboat.checkpoint.files import Checkpoint
from mailboat.digest import State
from mailboat.errors import DigestMismatch, StoreError
from mailboat.manifest import Manifest
from workers.work import Work

_CHUNK = 1 << 20


def add_files(work: Work, run: Run, files: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Copies files, by their names in a checkpoint, into the run's blobs; returns the anchor's list."""
    added = []
    for name, path in sorted(files.items()):
        blob = services.add_blob(run, path)
        added.append({"path": name, "sha256": blob.sha256, "size": blob.size})
        work.progress(len(added), len(files), "files")
    return added


def manifest_of(version: Version) -> Manifest:
    """The manifest as it was committed."""
    return Manifest.from_bytes(blobs.store().read(version.run_id, version.manifest_sha256))


def recorded_state(version: Version) -> State:
    """The digests that the version was published with. Raises DigestMismatch when they do not make its state."""
    manifest = manifest_of(version)
    inventory = submission.read_inventory(version.run_id, manifest.inventory.sha256)
    state = State.from_parts(
        inventory, blobs.store().read(version.run_id, manifest.digests.sha256), manifest.side_files
    )
    if state.digest != version.state_digest or manifest.state != version.state_digest:
        raise DigestMismatch(f"The record of version {version.number} contradicts itself; restore the blob store.")
    return state


def checked_files(
    run: Run, refs: Iterable[Mapping[str, Any]], scratch: Path, progress: Callable[[int], None] = lambda _: None
) -> list[Path]:
    """Files of these blobs ({sha256, size}), the store's own or copies in `scratch`, read and compared with their
    names.

    Raises StoreError for one that is missing or damaged.
    """
    store = blobs.store()
    found = []
    for ref in refs:
        digest, size = hashlib.sha256(), 0
        try:
            path = store.local(run.pk, ref["sha256"], scratch)
        except Missing:
            raise StoreError(f"The blob {ref['sha256']} is not in the store; upload it again.") from None
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
                progress(len(chunk))
        if (digest.hexdigest(), size) != (ref["sha256"], ref["size"]):
            raise StoreError(f"The blob {ref['sha256']} is damaged in the store; upload it again.")
        found.append(path)
    return found


def open_anchor(run: Run, files: Iterable[Mapping[str, Any]], scratch: Path, aliases: Mapping[str, str]) -> Checkpoint:
    """The checkpoint that an anchor's files make, as links in a new folder under `scratch` to the blobs."""
    store = blobs.store()
    folder = Path(tempfile.mkdtemp(prefix="anchor-", dir=scratch))
    for file in files:
        place = folder / file["path"]
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(store.local(run.pk, file["sha256"], scratch).absolute())
    return Checkpoint.open(folder, aliases=aliases)


def require_same(expected: State, found: State, what: str) -> None:
    """Compares every strong digest. Raises DigestMismatch that names the first difference."""
    difference = first_difference(expected, found)
    if difference is not None:
        raise DigestMismatch(
            f"{what} does not have the recorded bytes: {difference['what']} is the first that differs, "
            f"expected {difference['expected'][:16]}, found {difference['found'][:16]}."
        )


def first_difference(expected: State, found: State) -> dict[str, Any] | None:
    """The first tensor (or side file) whose strong digest differs: {what, index, expected, found}; None when equal."""
    expected.inventory.require_same(found.inventory)
    differing = np.flatnonzero((expected.strong != found.strong).any(axis=1))
    if differing.size:
        index = int(differing[0])
        return {
            "what": f"tensor {expected.inventory.tensors[index].name}",
            "index": index,
            "expected": expected.strong[index].tobytes().hex(),
            "found": found.strong[index].tobytes().hex(),
        }
    recorded = {file.path: file.sha256 for file in expected.side_files}
    present = {file.path: file.sha256 for file in found.side_files}
    for path in sorted(recorded.keys() | present.keys()):
        pair = recorded.get(path, "nothing"), present.get(path, "nothing")
        if pair[0] != pair[1]:
            return {"what": f"side file {path}", "index": None, "expected": pair[0], "found": pair[1]}
    return None
