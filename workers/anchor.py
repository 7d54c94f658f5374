"""Anchor: writes a full checkpoint of a version into the run's blobs, so that routes may begin there.

The bytes come from the worker's own copy and are compared with every strong digest as they are written.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from controlplane.registry import merging, selectors
from controlplane.registry.errors import Refusal
from controlplane.registry.models import Anchor, Version
from mailboat.checkpoint.writing import write_checkpoint
from mailboat.errors import ManifestError
from workers.history import History
from workers.materials import add_files, recorded_state
from workers.merge import step_back
from workers.work import Work


def anchor(work: Work) -> dict[str, Any]:
    """The job."""
    step_back()
    started = time.monotonic()
    if work.job.run is None:
        raise ManifestError("The job names no run; queue it again.")
    run, version = work.job.run, selectors.version(work.job.run, int(work.params["version"]))
    if version.state != Version.State.READY:
        raise Refusal(f"Version {version.number} is {version.state}; only ready ones get an anchor.", code="not_ready")
    row = Anchor.objects.filter(version=version).first()
    if row is None:
        folder = work.scratch / "anchor"
        with History(work, run) as history:
            history.healing(lambda: _write(history, version, folder))
        paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        files = add_files(work, run, paths)
        row = merging.record_anchor(version, files, actor=f"job:{work.job.pk}")
    work.log(f"Version {version.number} has an anchor of {row.bytes} bytes.")
    return {"version": version.number, "bytes": row.bytes, "seconds": round(time.monotonic() - started, 3)}


def _write(history: History, version: Version, folder: Path) -> None:
    with history.pair(version, version) as (source, _):
        write_checkpoint(source, folder, expect=recorded_state(version))
