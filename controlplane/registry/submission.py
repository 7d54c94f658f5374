"""Reads what a publisher sends in a commit and checks it against itself and against the run's blobs.

Nothing is written here and no row is locked: a large inventory may take a while to parse. What depends on other
versions (number, parent, epoch) is decided by `registry.services` under the lock of the run.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from controlplane.registry import blobs
from controlplane.registry.errors import Refusal, Unacceptable
from controlplane.registry.models import Blob, Run
from controlplane.registry.models import Inventory as InventoryRow
from mailboat.checkpoint.inventory import Inventory
from mailboat.checkpoint.outline import Outline
from mailboat.checkpoint.side_files import INDEX_FILE, TENSOR_FILE, path_problem
from mailboat.digest import state_digest_of_parts
from mailboat.errors import InventoryMismatch, MailboatError
from mailboat.manifest import MANIFEST_TYPE, BlobRef, Envelope, Manifest
from mailboat.replies import AnchorFile

MAX_ANCHOR_FILES = 100_000
MAX_COUNT = (1 << 63) - 1
SHOWN = 5


@dataclass(frozen=True, slots=True)
class Submission:
    """A manifest that agrees with itself, and the anchor that came with it."""

    envelope: dict[str, Any]
    payload: bytes
    manifest: Manifest
    anchor: tuple[AnchorFile, ...] | None

    @property
    def manifest_sha256(self) -> str:
        """What heads and plans call the manifest by."""
        return self.manifest.sha256

    @property
    def anchor_json(self) -> list[dict[str, Any]] | None:
        """The anchor as it is stored."""
        return None if self.anchor is None else [file.as_json() for file in self.anchor]


def parse(run: Run, envelope: Any, anchor: Any) -> Submission:
    """Parses both documents strictly. Raises Unacceptable `manifest_invalid` or `anchor_invalid`."""
    try:
        wrapped = Envelope.from_dict(envelope)
        manifest = Manifest.from_bytes(wrapped.open(MANIFEST_TYPE))
    except MailboatError as error:
        raise _invalid(str(error)) from error
    if manifest.run != str(run.pk):
        raise _invalid(f"The manifest names run {manifest.run}, but this run is {run.pk}.")
    counts = (manifest.epoch << 32, manifest.number, manifest.elements, manifest.full_bytes, manifest.step or 0)
    if (
        max(counts) > MAX_COUNT
        or max((part.size for part in (manifest.patch.parts if manifest.patch else ())), default=0) > MAX_COUNT >> 16
    ):
        raise _invalid("The manifest holds a number that is larger than anything real.")
    files = None if anchor is None else anchor_files(anchor, manifest)
    if files is None and manifest.patch is None:
        raise _invalid("The version has neither a patch nor an anchor, so nobody could build it; send one of them.")
    return Submission(wrapped.to_dict(), wrapped.payload, manifest, files)


def require_blobs(run: Run, submission: Submission) -> dict[str, Blob]:
    """The blobs that the submission needs, by digest. Raises Unacceptable `missing_parts` naming what is not here
    whole.
    """
    manifest, store = submission.manifest, blobs.store()
    wanted = [("inventory", manifest.inventory), ("digests", manifest.digests)]
    if manifest.patch is not None:
        wanted += [(f"part {index}", part) for index, part in enumerate(manifest.patch.parts)]
    wanted += [(file.path, file.blob) for file in submission.anchor or ()]
    rows = {blob.sha256: blob for blob in Blob.objects.filter(run=run, sha256__in={ref.sha256 for _, ref in wanted})}
    missing = [
        (name, ref)
        for name, ref in wanted
        if ref.sha256 not in rows or rows[ref.sha256].size != ref.size or store.size(run.pk, ref.sha256) != ref.size
    ]
    if missing:
        names = [name for name, _ in missing]
        raise Unacceptable(
            f"{len(missing)} of {len(wanted)} blobs are missing or have another size ({listed(names)}); "
            "upload them and commit again.",
            code="missing_parts",
            missing=[{"name": name, "sha256": ref.sha256, "size": ref.size} for name, ref in missing],
        )
    return rows


def require_state(run: Run, manifest: Manifest) -> Outline:
    """Checks sizes and the state digest against inventory and digests. Raises Unacceptable `manifest_invalid`."""
    outline = outline_of(run, manifest.inventory.sha256)
    if (manifest.elements, manifest.full_bytes) != (outline.elements, outline.full_bytes):
        raise _invalid("The manifest's elements and full_bytes are not those of its inventory.")
    digests = blobs.store().read(run.pk, manifest.digests.sha256)
    try:
        found = state_digest_of_parts(manifest.inventory.sha256, outline.tensors, digests, manifest.side_files)
    except MailboatError as error:
        raise _invalid(str(error)) from error
    if found != manifest.state:
        raise _invalid("The manifest's state is not the digest of its inventory, digests and side files.")
    return outline


def outline_of(run: Run, sha256: str) -> Outline:
    """The size of an inventory. Its document is read once per run, by one pass that keeps no tensor of it.

    Raises Unacceptable `manifest_invalid`.
    """
    known = InventoryRow.objects.filter(run=run, sha256=sha256).first()
    if known is not None:
        return Outline(known.tensors, known.elements, known.full_bytes)
    try:
        return Outline.of(blobs.store().read(run.pk, sha256))
    except MailboatError as error:
        raise _invalid(str(error)) from error


@lru_cache(maxsize=2)  # a run keeps its inventory from version to version
def read_inventory(run: uuid.UUID, sha256: str) -> Inventory:
    """The inventory of a blob, for workers: half a million tensors take 300 MiB. Raises Unacceptable
    `manifest_invalid`.
    """
    return _parsed(run, sha256)


def _parsed(run: uuid.UUID, sha256: str) -> Inventory:
    try:
        return Inventory.from_bytes(blobs.store().read(run, sha256))
    except MailboatError as error:
        raise _invalid(str(error)) from error


def require_same_inventory(run: Run, expected: str, found: str) -> None:
    """Compares two inventory blobs. Raises Unacceptable `inventory_mismatch` with the names of the tensors."""
    if expected == found:
        return
    try:
        _parsed(run.pk, expected).require_same(_parsed(run.pk, found))
    except InventoryMismatch as error:
        raise Unacceptable(
            str(error), code="inventory_mismatch", tensors=list(error.names[:SHOWN]), count=len(error.names)
        ) from error


def listed(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return ", ".join(every[:SHOWN]) + more


def anchor_files(document: Any, manifest: Manifest) -> tuple[AnchorFile, ...]:
    """The files of an anchor, with the manifest's side files. Raises Unacceptable `anchor_invalid`."""
    if not isinstance(document, list) or not 0 < len(document) <= MAX_ANCHOR_FILES:
        raise _bad_anchor("it must be a list of files {path, sha256, size}")
    files = tuple(_anchor_file(item) for item in document)
    paths = {file.path for file in files}
    if len(paths) != len(files):
        raise _bad_anchor("a path appears twice")
    if not any(path.endswith(".safetensors") for path in paths):
        raise _bad_anchor("it has no .safetensors file")
    sides = {(file.path, file.blob.sha256, file.blob.size) for file in files if not _is_weights(file.path)}
    declared = {(file.path, file.sha256, file.size) for file in manifest.side_files}
    if sides != declared:
        raise _bad_anchor(
            f"its side files are not the manifest's: {listed(sorted({item[0] for item in sides ^ declared}))}"
        )
    return files


def _anchor_file(item: Any) -> AnchorFile:
    match item:
        case {"path": str(path), "sha256": str(sha256), "size": int(size), **rest}:
            # Weights must be able to stand in the checkpoint's folder just as a side file must.
            problem = path_problem(f"{path}.weights" if _is_weights(path) else path)
            sound = blobs.NAME.fullmatch(sha256) and not isinstance(size, bool) and 0 <= size <= MAX_COUNT >> 16
            if not rest and not problem and sound:
                return AnchorFile(path, BlobRef(sha256, size))
    raise _bad_anchor("each file must be {path, sha256, size} with a path inside the checkpoint folder")


def _is_weights(path: str) -> bool:
    return path.endswith((TENSOR_FILE, INDEX_FILE))


def _bad_anchor(why: str) -> Refusal:
    return Unacceptable(f"The anchor can't be accepted: {why}.", code="anchor_invalid")


def _invalid(sentence: str) -> Refusal:
    return Unacceptable(sentence, code="manifest_invalid")
