"""Walking a plan: documents, parts and anchors, each checked against what the manifest says. Shared by islands and
trainers.

It must never hand out a state, a part or a checkpoint that was not compared with its digest.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from mailboat.checkpoint.files import Checkpoint
from mailboat.checkpoint.inventory import Inventory
from mailboat.client import Api
from mailboat.digest import State, measure
from mailboat.errors import Conflict, DigestMismatch, ManifestError
from mailboat.image import Image, Overlay
from mailboat.manifest import MANIFEST_TYPE, BlobRef, Envelope, Manifest
from mailboat.patch.format import KNOWN_CODECS
from mailboat.replies import AnchorStep, PatchStep, Plan
from mailboat.transfer import Link, download, download_bytes


class Keeper(Protocol):
    """Keeps documents between runs of a process."""

    def document(self, sha256: str) -> bytes | None:
        """A document, verified, or None."""

    def keep_document(self, sha256: str, data: bytes) -> None:
        """Keeps a document."""


class Gate(Protocol):
    """Who may publish: `island.trust` for islands that know the publisher's key."""

    @property
    def enforced(self) -> bool:
        """Whether signatures count at all."""

    def knows(self, manifest: str, *, held: bool = False) -> bool:
        """Whether a manifest (SHA-256) was found to be signed before."""

    def accepts(self, envelope: Envelope, *, held: bool = False) -> bool:
        """Whether a trusted publisher has signed."""

    def require(self, envelope: Envelope, number: int, *, held: bool = False) -> None:
        """Raises ManifestError when none has."""


class Memory:
    """A keeper that forgets when the process ends."""

    def __init__(self) -> None:
        self._documents: dict[str, bytes] = {}

    def document(self, sha256: str) -> bytes | None:
        """A document, or None."""
        return self._documents.get(sha256)

    def keep_document(self, sha256: str, data: bytes) -> None:
        """Keeps a document."""
        self._documents[sha256] = data


class Documents:
    """The documents of one run, fetched once and checked each time."""

    def __init__(self, api: Api, run: str, run_id: str, keeper: Keeper, gate: Gate | None = None) -> None:
        self.api = api
        self.run = run
        self.run_id = run_id
        self._keeper = keeper
        self._gate = gate
        self._parsed: tuple[str, Inventory] | None = None

    def manifest(self, sha256: str, *, number: int, held: bool = False) -> Manifest:
        """The manifest of version ``number`` of this run; one of another run or version is refused, and one that no
        trusted publisher signed. For a version that is ``held`` a key counts that was revoked since.
        """
        gate = self._gate
        if gate is not None and gate.enforced and not gate.knows(sha256, held=held):
            gate.require(self._envelope(sha256, number), number, held=held)
        return self._manifest(sha256, number)

    def waypoint(self, sha256: str, *, number: int) -> tuple[Manifest, bool]:
        """The manifest of a version that is only passed on the way, and whether it says what publishers say: if not,
        what comes of the way has to be proven.
        """
        gate = self._gate
        signed = gate is None or not gate.enforced or gate.knows(sha256)
        if gate is not None and not signed:
            signed = gate.accepts(self._envelope(sha256, number))
        return self._manifest(sha256, number), signed

    def _envelope(self, sha256: str, number: int) -> Envelope:
        envelope = self.api.manifest(self.run, number)
        envelope.open(MANIFEST_TYPE)
        if envelope.payload_sha256 != sha256:
            raise ManifestError(f"Version {number} has another manifest than the one that was named; it is refused.")
        return envelope

    def _manifest(self, sha256: str, number: int) -> Manifest:
        manifest = Manifest.from_bytes(self._get(sha256))
        if manifest.run != self.run_id:
            raise ManifestError(f"The manifest of version {number} belongs to another run; it is refused.")
        if manifest.number != number:
            raise ManifestError(
                f"The manifest of version {number} is that of version {manifest.number}; it is refused."
            )
        return manifest

    def state(self, manifest: Manifest) -> State:
        """The digests of a version, proven to make the state that its manifest names."""
        inventory = self._inventory(manifest.inventory)
        digests = self._get(manifest.digests.sha256, manifest.digests.size)
        state = State.from_parts(inventory, digests, manifest.side_files)
        if state.digest != manifest.state:
            raise DigestMismatch(f"The documents of version {manifest.number} do not make its state; it is refused.")
        return state

    def _inventory(self, blob: BlobRef) -> Inventory:
        # An epoch keeps its inventory from version to version, and a large one takes seconds to parse.
        if self._parsed is None or self._parsed[0] != blob.sha256:
            self._parsed = blob.sha256, Inventory.from_bytes(self._get(blob.sha256, blob.size))
        return self._parsed[1]

    def _get(self, sha256: str, size: int | None = None) -> bytes:
        data = self._keeper.document(sha256)
        if data is None:
            data = download_bytes(self.api, self.run, sha256)
            self._keeper.keep_document(sha256, data)
        if size is not None and len(data) != size:
            raise ManifestError(f"A document has {len(data)} bytes instead of the {size} that its manifest names.")
        return data


def plan_route(
    api: Api, run: str, *, held: str | None, to: int, references: bool = False, derived: bool = True
) -> Plan:
    """The route from the state digest ``held`` (None: nothing) to version ``to``; an unknown base means the anchor's
    route. ``references``: whether it may begin at an anchor that lies elsewhere. ``derived``:
    whether it may use patches that workers made.
    """
    means: dict[str, int | str] = {} if derived else {"published": 1}
    means |= {"cores": os.cpu_count() or 1, "codecs": ",".join(KNOWN_CODECS)}
    if held is not None:
        try:
            return _walkable(api.plan(run, from_digest=held, to=to, references=references, **means), to)
        except Conflict as error:
            if error.code not in {"unknown_base", "no_route"}:
                raise
    return _walkable(api.plan(run, from_digest=None, to=to, references=references, **means), to)


def _walkable(plan: Plan, to: int) -> Plan:
    """Refuses a plan with a hole: each patch starts where the step before ended, and the last one ends at ``to``."""
    at = plan.origin
    for step in plan.steps:
        if isinstance(step, AnchorStep):
            at = step.version
        elif step.origin != at:
            raise ManifestError(f"The plan to version {to} has a hole at version {at}; it is refused.")
        else:
            at = step.to
    if at != to or plan.to != to:
        raise ManifestError(f"The plan to version {to} ends at version {at}; it is refused.")
    return plan


def fetch_parts(
    documents: Documents, step: PatchStep, folder: Path, *, link: Link | None = None
) -> tuple[tuple[Path, ...], int]:
    """Downloads the parts of a patch into ``folder``; returns their paths and the bytes that travelled."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = tuple(folder / f"part-{index}.mbp" for index in range(len(step.parts)))
    travelled = 0
    for part, path in zip(step.parts, paths, strict=True):
        travelled += download(documents.api, documents.run, part, path, link=link)
    return paths, travelled


def fetch_anchor(documents: Documents, step: AnchorStep, folder: Path, *, link: Link | None = None) -> int:
    """Downloads an anchor's files into ``folder``; returns the bytes that travelled."""
    folder.mkdir(parents=True, exist_ok=True)
    travelled = 0
    for file in step.files:
        travelled += download(documents.api, documents.run, file.blob, folder / file.path, link=link)
    return travelled


def open_proven(folder: Path, aliases: Mapping[str, str], digest: str) -> tuple[Checkpoint, State]:
    """Opens a checkpoint and proves by strong digests that it is the state ``digest``; raises DigestMismatch."""
    checkpoint = Checkpoint.open(folder, aliases=dict(aliases))
    try:
        state = measure(checkpoint)
        if state.digest != digest:
            raise DigestMismatch(f"The checkpoint {folder} is not the state {digest[:16]} that it should be.")
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint, state


def published(manifest: Manifest, origin: str, parts: tuple[BlobRef, ...]) -> bool:
    """Whether these parts are the publisher's own for this step; any others need `prove`."""
    return (
        manifest.patch is not None
        and manifest.parent is not None
        and manifest.parent.state == origin
        and manifest.patch.parts == parts
    )


def prove(image: Image, overlay: Overlay, target: State) -> None:
    """Checks the strong digests of the result before anything is written: for bytes that the publisher did not make."""
    if measure(image.overlaid(overlay)).digest != target.digest:
        raise DigestMismatch("The patch leads to other bytes than the publisher's; it is refused.")
