"""Validate: proves that a version's files lead to exactly the bytes that its digests promise, before it is announced.

Each part is applied to the worker's copy of the parent, in an overlay; only when every strong digest is right does the
version become ready, and only then does the copy move. It may be killed anywhere and started again.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from controlplane.registry import selectors, services, submission
from controlplane.registry.models import Anchor, Version
from mailboat.checkpoint.files import Checkpoint
from mailboat.digest import State, measure
from mailboat.errors import CheckpointError, DigestMismatch, ManifestError, listed
from mailboat.patch import PatchFile
from mailboat.patch.statistics import Column, Statistics
from mailboat.patch.statistics import measure as measure_patch
from workers.copy import Copy
from workers.materials import checked_files, manifest_of, open_anchor, recorded_state, require_same
from workers.work import Work


def validate(work: Work) -> dict[str, Any]:
    """The job of a version that its publisher built."""
    version = version_of(work)
    if version.state == Version.State.READY:
        return {"version": version.number, "state": version.state_digest}
    services.begin_validating(version)
    return prove(work, version)


def version_of(work: Work) -> Version:
    """The version that the job is about."""
    if work.job.run is None:
        raise ManifestError("The job names no run; queue it again.")
    return selectors.version(work.job.run, int(work.params["version"]))


def prove(work: Work, version: Version) -> dict[str, Any]:
    """Checks a version in `validating` and makes it ready. Raises DigestMismatch naming the first differing tensor."""
    started = time.monotonic()
    version = selectors.version(version.run, version.number)
    submission.require_state(version.run, manifest_of(version))
    with Copy(work, version.run) as copy:
        if manifest_of(version).patch is not None:
            _prove_patch(work, version, copy)
        else:
            _prove_anchor(work, version, copy)
    work.log(f"Version {version.number} is ready: every digest is right.")
    return {
        "version": version.number,
        "state": version.state_digest,
        "seconds": round(time.monotonic() - started, 3),
    }


def _prove_patch(work: Work, version: Version, copy: Copy) -> None:
    run, parent, patch = version.run, version.parent, manifest_of(version).patch
    if parent is None or patch is None:
        raise ManifestError(f"Version {version.number} has a patch but no parent; publish it again.")
    expected = recorded_state(version)
    paths = checked_files(run, [part.to_json() for part in patch.parts], work.scratch, lambda _: work.check())
    image = copy.bring_to(parent)
    overlay = image.prepare(paths, expected, scratch=work.scratch)
    try:
        if overlay.changed != patch.changed:
            raise DigestMismatch(
                f"The manifest says that {patch.changed} elements change, but the patch changes {overlay.changed}."
            )
        compared = image.compared(overlay)
        found = measure(compared, progress=work.bytes_of(expected.inventory.full_bytes))
        require_same(expected, found, f"Version {version.number}")
        if anchor := Anchor.objects.filter(version=version).first():
            _measure_anchor(work, version, anchor)
        work.check()
        codecs, statistics = _read_tables(paths, compared.unit_steps)
        blob = services.add_blob(run, statistics.to_bytes())
        services.mark_ready(version, codecs=codecs, statistics=blob, unit_steps=int(statistics.unit_steps.sum()))
        copy.keep(image, overlay)
    finally:
        overlay.close()


def _prove_anchor(work: Work, version: Version, copy: Copy) -> None:
    anchor = Anchor.objects.get(version=version)
    expected = _measure_anchor(work, version, anchor)
    work.check()
    services.mark_ready(version)
    with open_anchor(version.run, anchor.files, work.scratch, expected.inventory.aliases) as checkpoint:
        copy.begin(checkpoint, expected)


def _measure_anchor(work: Work, version: Version, anchor: Anchor) -> State:
    expected = recorded_state(version)
    checked_files(version.run, anchor.files, work.scratch, lambda _: work.check())
    with open_anchor(version.run, anchor.files, work.scratch, expected.inventory.aliases) as checkpoint:
        found = measure(checkpoint, progress=work.bytes_of(expected.inventory.full_bytes))
        require_same(expected, found, f"The anchor of version {version.number}")
        _require_no_more(anchor, checkpoint)
    return expected


def _require_no_more(anchor: Anchor, checkpoint: Checkpoint) -> None:
    """Refuses files that no digest of the state covers: every island would fetch and keep them."""
    known = {shard.name for shard in checkpoint.shards} | {file.path for file in checkpoint.side_files}
    if checkpoint.layout.index is not None:
        known.add(checkpoint.layout.index[0])
    if stray := sorted({file["path"] for file in anchor.files} - known):
        raise CheckpointError(f"The anchor holds files that are no part of its checkpoint: {listed(stray)}.")


def _read_tables(paths: list[Path], unit_steps: Column) -> tuple[str, Statistics]:
    """The codecs of the parts, and the statistics of the patch."""
    with ExitStack() as stack:
        parts = [stack.enter_context(PatchFile.open(path)) for path in paths]
        codecs = sorted({codec for part in parts for codec in part.codecs})
        return ",".join(codecs), measure_patch(parts, unit_steps)
