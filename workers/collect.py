"""Collect: removes what a run no longer keeps. It may be killed anywhere: the next one goes on where it stopped."""

from __future__ import annotations

from typing import Any

import structlog

from controlplane.jobs import triggers
from controlplane.registry import retention
from controlplane.registry.errors import Refusal
from controlplane.registry.models import Run
from workers.work import Work

log = structlog.get_logger(__name__)


def collect(work: Work) -> dict[str, Any]:
    """The job of one run."""
    run = work.job.run
    if run is None:
        raise Refusal("The job names no run; queue it again.", code="unknown_run")
    total = retention.preview(run).bytes

    def check(done: int) -> None:
        work.progress(min(done, total), total, "bytes")

    gone = retention.collect(run, job=work.job, actor=f"job:{work.job.pk}", check=check)
    work.log(f"{len(gone.numbers)} versions retired, {len(gone.blobs)} blobs with {gone.bytes} bytes removed.")
    if gone.anchor is not None:
        triggers.anchor(run, gone.anchor, actor="system")
        work.log(f"Version {gone.anchor} gets an anchor, so that older ones can go the next time.")
    return {
        "retired": len(gone.numbers),
        "blobs": len(gone.blobs),
        "bytes": gone.bytes,
        "kept": gone.kept,
        "anchor": gone.anchor,
    }


def due() -> None:
    """Queues a collection for every run that has something to give back."""
    for run in Run.objects.select_related("project").all():
        try:
            shown = retention.preview(run)
            if not shown.nothing or shown.anchor is not None:
                triggers.collect(run, actor="system")
        except Exception:  # whatever is wrong with one run, the others' turn comes
            log.exception("what a run would give back can't be told", run=str(run.pk))
