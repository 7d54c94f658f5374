"""A worker killed in the middle of its work: the lease runs out, another one finishes, one result remains."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from mailboat.digest import measure
from tests.waiting import eventually
from tests.workers.checkpoints import commit, first, following, publish, source, write
from tests.workers.conftest import StartWorker, lease_runs_out
from tests.workers.halting import HALT, stands_still


@pytest.fixture
def allowed(tmp_path: Path, settings: Any) -> Path:
    folder = tmp_path / "allowed"
    folder.mkdir()
    settings.MAILBOAT_CHECKPOINT_ROOTS = (folder,)
    return folder


def state(row: Any) -> str:
    row.refresh_from_db()
    return str(row.state)


def test_a49_a_worker_killed_in_the_middle_of_a_build(
    run: Any, allowed: Path, home: Path, start_worker: StartWorker
) -> None:
    from controlplane.registry.models import Patch
    from workers.scratch import clear_abandoned

    arrays = first()
    after = following(arrays, 2)
    paths = [write(arrays, allowed / "0"), write(after, allowed / "1")]
    doomed = start_worker("publish", **{HALT: "workers.build:build_patch:1"})
    zero = commit(run, paths[0], 0)
    eventually(lambda: state(zero) == "ready")

    one = commit(run, paths[1], 1, 0)
    eventually(lambda: stands_still(doomed))
    assert state(one) == "building"
    os.kill(doomed.pid, signal.SIGKILL)
    doomed.wait()
    one.refresh_from_db()
    job = one.job
    killed = job.owner
    assert state(job) == "running"

    start_worker("publish")
    lease_runs_out(job)
    eventually(lambda: state(one) == "ready" and state(job) == "succeeded")
    assert (job.attempt, one.state_digest) == (2, measure(source(after)).digest)
    assert job.owner != killed
    assert Patch.objects.count() == 1
    assert any(killed in text and "lease" in text for text in job.events.values_list("message", flat=True))
    clear_abandoned()
    assert not list((home / "scratch").iterdir())


def test_a49_a_worker_killed_in_the_middle_of_a_validation(
    run: Any, tmp_path: Path, home: Path, start_worker: StartWorker
) -> None:
    from controlplane.registry.models import Patch

    arrays = first()
    doomed = start_worker("publish", **{HALT: "workers.validate:require_same:2"})
    zero = publish(run, arrays, 0, None, tmp_path)
    eventually(lambda: state(zero) == "ready")
    one = publish(run, after := following(arrays, 2), 1, (arrays, zero), tmp_path)
    eventually(lambda: stands_still(doomed))
    assert state(one) == "validating"
    os.kill(doomed.pid, signal.SIGKILL)
    doomed.wait()
    one.refresh_from_db()
    job = one.job
    start_worker("publish")
    lease_runs_out(job)
    eventually(lambda: state(one) == "ready" and state(job) == "succeeded")
    assert (job.attempt, one.state_digest) == (2, measure(source(after)).digest)
    assert Patch.objects.count() == 1
