"""Merge: builds the one patch between two versions of a run, on or back, and keeps it where it saves bytes.

Both ends are read from the worker's own copies and compared by strong digests with what was published, so the patch is
byte for byte the one that would be built between the two, and nothing that was not proven is recorded. It may be
killed anywhere and started again: the same ends give the same bytes.
"""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from controlplane.registry import merging, selectors, services
from controlplane.registry.errors import Refusal
from controlplane.registry.models import Version
from mailboat.digest import measure
from mailboat.errors import ManifestError
from mailboat.patch import PatchFile, build_patch
from mailboat.patch.build import BuiltPatch
from workers.history import History
from workers.materials import recorded_state, require_same
from workers.work import Parked, Work

_STEP_BACK = timedelta(seconds=5)


def merge(work: Work) -> dict[str, Any]:
    """The job. Its result says how large the patch is, what it stands for, and whether it was kept."""
    if work.params.get("why") != merging.ASKED:
        step_back()
    run, started = work.job.run, time.monotonic()
    if run is None:
        raise ManifestError("The job names no run; queue it again.")
    origin, to = (_ready(work, int(work.params[name])) for name in ("from", "to"))
    if origin.inventory_id != to.inventory_id:
        raise Refusal("The two versions have different tensors; no patch joins them.", code="no_patch")
    if (patch := merging.existing(origin, to)) is not None:
        return {"from": origin.number, "to": to.number, "bytes": patch.bytes, "kept": True, "seconds": 0.0}
    out = work.scratch / "part-0.mbp"
    with History(work, run) as history:
        built = history.healing(lambda: _build(work, history, origin, to, out))
    work.check()
    replaced = merging.replaced_bytes(run, origin, to)
    kept = replaced is None or built.size < replaced
    if kept:
        with PatchFile.open(out) as part:
            codecs = ",".join(part.codecs)
        blob = services.add_blob(run, out)
        actor = f"job:{work.job.pk}"
        merging.record(run, origin, to, [blob], changed=built.changed, codecs=codecs, actor=actor)
        work.log(f"The patch {origin.number}-{to.number} has {built.size} bytes in place of {replaced}.")
    else:
        work.log(f"The patch {origin.number}-{to.number} would have {built.size} bytes; {replaced} travel without it.")
    return {
        "from": origin.number,
        "to": to.number,
        "bytes": built.size,
        "replaces": replaced,
        "changed": built.changed,
        "kept": kept,
        "seconds": round(time.monotonic() - started, 3),
    }


def _build(work: Work, history: History, origin: Version, to: Version, out: Path) -> BuiltPatch:
    before, after = recorded_state(origin), recorded_state(to)
    with history.pair(origin, to) as (base, target):
        require_same(before, measure(base, progress=lambda _: work.check()), f"The copy of version {origin.number}")
        progress = work.bytes_of(after.inventory.full_bytes)
        built = build_patch(base, target, out, base_state=before, progress=progress)
    require_same(after, built.target_state, f"The copy of version {to.number}")
    return built


def step_back() -> None:
    """Lets a merge that an island waits for go first."""
    if merging.waited_for():
        raise Parked("a merge that an island waits for", until=_STEP_BACK, saved={}, still=merging.waited_for)


def _ready(work: Work, number: int) -> Version:
    if work.job.run is None:
        raise ManifestError("The job names no run; queue it again.")
    version = selectors.version(work.job.run, number)
    if version.state != Version.State.READY:
        raise Refusal(f"Version {number} is {version.state}; patches join ready versions.", code="not_ready")
    return version
