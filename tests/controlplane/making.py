"""Makes rows and documents for tests: a tiny model whose states differ by one byte pattern. Documents are real ones."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from controlplane.registry import services as registry
from controlplane.registry.models import Run, Version
from mailboat.checkpoint.inventory import Inventory, Tensor
from mailboat.digest import State
from mailboat.manifest import MANIFEST_TYPE, BlobRef, Envelope, Manifest, ParentRef, PatchRef

TENSORS = (("model.embed.weight", "BF16", (8, 4)), ("model.norm.weight", "F32", (4,)))


def inventory_of(tensors: Any = TENSORS) -> Inventory:
    """An inventory of named tensors."""
    return Inventory.of([Tensor("target", name, dtype, shape) for name, dtype, shape in tensors], {})


def ref(data: bytes) -> BlobRef:
    """The name and size of bytes."""
    return BlobRef(hashlib.sha256(data).hexdigest(), len(data))


@dataclass(frozen=True)
class Built:
    """A version ready to be committed, and the blobs that it needs, by name."""

    manifest: Manifest
    envelope: dict[str, Any]
    anchor: list[dict[str, Any]] | None
    blobs: dict[str, bytes] = field(repr=False)


def build(
    run: Run,
    number: int,
    parent: Version | None = None,
    /,
    *,
    salt: str = "",
    epoch: int = 0,
    anchored: bool | None = None,
    inventory: Inventory | None = None,
    **changes: Any,
) -> Built:
    """A version with a patch when it has a parent, and an anchor when it has none (or when told to)."""
    inventory = inventory or inventory_of()
    seed = hashlib.sha256(f"{run.pk} {number} {salt}".encode()).digest()
    count = len(inventory.tensors)
    strong = np.frombuffer((seed * count)[: 32 * count], np.uint8).reshape(count, 32)
    state = State(inventory, np.full((count, 2), number, np.uint64), strong, ())
    patch = b"patch " + seed
    blobs = {"inventory": inventory.to_bytes(), "digests": state.digests_bytes()}
    if parent is not None:
        blobs["part 0"] = patch
    anchor = None
    if parent is None if anchored is None else anchored:
        blobs["model.safetensors"] = b"weights " + seed
        weights = ref(blobs["model.safetensors"])
        anchor = [{"path": "model.safetensors", "sha256": weights.sha256, "size": weights.size}]
    fields: dict[str, Any] = {
        "run": str(run.pk),
        "epoch": epoch,
        "number": number,
        "parent": None if parent is None else ParentRef(parent.number, parent.state_digest),
        "inventory": ref(blobs["inventory"]),
        "digests": ref(blobs["digests"]),
        "side_files": (),
        "state": state.digest,
        "patch": None if parent is None else PatchRef((ref(patch),), 1),
        "elements": inventory.elements,
        "full_bytes": inventory.full_bytes,
        "step": number * 10,
    }
    manifest = Manifest(**(fields | changes))
    envelope = Envelope.wrap(MANIFEST_TYPE, manifest.to_bytes()).to_dict()
    return Built(manifest, envelope, anchor, blobs)


def upload(run: Run, built: Built, *, leave_out: frozenset[str] = frozenset()) -> None:
    """Stores the blobs of a version."""
    for name, data in built.blobs.items():
        if name not in leave_out:
            registry.add_blob(run, data)


def commit(run: Run, number: int, parent: Version | None = None, **options: Any) -> Version:
    """A committed version."""
    built = build(run, number, parent, **options)
    upload(run, built)
    return registry.commit_manifest(run, built.envelope, built.anchor, actor="publisher:trainer")[0]


def make_ready(version: Version) -> Version:
    """Takes a committed version to ready, as its worker would."""
    from controlplane.jobs import services as jobs

    assert version.job is not None
    job = jobs.claim(version.job.pk, "worker")
    assert job is not None
    registry.begin_validating(version)
    registry.mark_ready(version)
    jobs.succeed(job.pk, "worker")
    version.refresh_from_db()
    return version


def ready(run: Run, number: int, parent: Version | None = None, **options: Any) -> Version:
    """A ready version."""
    return make_ready(commit(run, number, parent, **options))


def series(run: Run, length: int) -> list[Version]:
    """Ready versions 0 (an anchor), 1, 2 ... in a row."""
    versions: list[Version] = []
    for number in range(length):
        versions.append(ready(run, number, versions[-1] if versions else None))
    return versions
