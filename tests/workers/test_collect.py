"""Collections by workers: an anchor first where the way is long, then what is old goes; a killed one is finished."""

from __future__ import annotations

import hashlib
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db.models.functions import Now

from controlplane.jobs import triggers
from controlplane.jobs.models import Job
from controlplane.registry import blobs
from controlplane.registry.models import Blob, Run, Tombstone, Version
from tests.waiting import eventually
from tests.workers.conftest import StartWorker, lease_runs_out
from tests.workers.halting import HALT, stands_still
from tests.workers.test_merge import carry_out, line


def collected(run: Run) -> Any:
    job = carry_out(triggers.collect(run, actor="test")[0])
    assert job.state == "succeeded", job.error
    return job.result


@pytest.mark.usefixtures("unsent")
def test_a23_an_anchor_comes_first_and_then_what_is_old_goes(run: Run, tmp_path: Path) -> None:
    Run.objects.filter(pk=run.pk).update(merge_up_to=0)
    line(run, tmp_path, 12)
    assert collected(run)["blobs"] == 0, "without a limit nothing goes"
    Run.objects.filter(pk=run.pk).update(keep_versions=2)
    run.refresh_from_db()
    first = collected(run)
    assert (first["retired"], first["anchor"]) == (0, 10)
    anchored = carry_out(Job.objects.get(kind="anchor"))
    assert anchored.state == "succeeded", anchored.error
    second = collected(run)
    assert (second["retired"], second["kept"], second["anchor"]) == (10, 2, None)
    assert second["bytes"] > 0
    replayed = carry_out(triggers.replay(run.project, run.name, 11, actor="test")[0])
    assert replayed.state == "succeeded", replayed.error
    assert Version.objects.filter(run=run, state="retired").count() == 10


def test_a23_a_worker_killed_in_the_middle_of_a_collection(run: Run, home: Path, start_worker: StartWorker) -> None:
    strays = [f"stray {number}".encode() for number in range(2000)]
    names = [hashlib.sha256(data).hexdigest() for data in strays]
    for data in strays:
        blobs.store().write(run.pk, data)
    long_ago = Now() - timedelta(days=3)
    Blob.objects.bulk_create(
        [
            Blob(run=run, sha256=name, size=len(data), created_at=long_ago)
            for name, data in zip(names, strays, strict=True)
        ]
    )
    halt = {HALT: "controlplane.registry.retention:hold_names:4"}
    doomed = start_worker("check", **halt)
    job, _ = triggers.collect(run, actor="test")
    eventually(lambda: stands_still(doomed))
    assert Tombstone.objects.exclude(cleared_at=None).exists()
    os.kill(doomed.pid, signal.SIGKILL)
    doomed.wait()
    assert Tombstone.objects.filter(cleared_at=None).exists(), "it was killed in the middle"
    assert not Blob.objects.filter(run=run).exists(), "no row is left without its bytes"
    start_worker("check")
    job.refresh_from_db()
    lease_runs_out(job)
    eventually(lambda: job.refresh_from_db() or job.state == "succeeded")
    assert job.attempt == 2
    assert not Tombstone.objects.filter(cleared_at=None).exists()
    assert all(blobs.store().size(run.pk, name) is None for name in names)
