"""Real workers say that they are there; one that is killed is seen as lost, and its job's log says why it went back."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENCE, eventually
from tests.workers.conftest import StartWorker


def test_a_worker_is_seen_from_its_start_to_its_end(start_worker: StartWorker) -> None:
    from controlplane.jobs import selectors

    process = start_worker("check")
    row = eventually(lambda: next(iter(selectors.workers()), None))
    assert (row.state, row.busy, row.worker.process) == ("online", False, process.pid)
    assert row.worker.queues == ["check"] and row.worker.name == "check@test"
    assert row.worker.device.startswith("cpu: ") and {"python", "mailboat", "numpy"} <= row.worker.versions.keys()
    process.send_signal(signal.SIGTERM)
    process.wait(PATIENCE)
    assert selectors.workers() == []
    assert [item.state for item in selectors.workers(gone=True)] == ["stopped"]


def test_a_killed_worker_is_lost_and_its_job_says_why_it_was_queued_again(
    start_worker: StartWorker, unsent: list[str], run: Any
) -> None:
    from django.db.models.functions import Now

    from controlplane.jobs import presence, selectors, services
    from controlplane.jobs.models import Worker

    process = start_worker("check")
    row = eventually(lambda: next(iter(selectors.workers()), None))
    job, _ = services.enqueue("replay", run, {"version": 0}, "killed")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert services.claim(job.pk, "host:1:dead", lease_seconds=0) is not None
    presence.beat(row.worker.pk, job.pk)
    Worker.objects.filter(pk=row.worker.pk).update(heartbeat_at=Now() - timedelta(seconds=60))
    (lost,) = selectors.workers()
    assert (lost.state, lost.job) == ("lost", job)
    services.requeue_expired()
    job.refresh_from_db()
    assert (job.state, job.attempt) == ("queued", 2)
    assert "did not renew its lease in attempt 1; queued again" in selectors.events(job, level="warning")[0].message


@pytest.mark.parametrize(("chosen", "visible", "shown"), [
    ("cuda", None, "cuda: T400"), ("cuda:1", None, "cuda:1: H200"), ("cuda:0", "1", "cuda:0: H200"),
    ("cuda:1", "GPU-b, GPU-a", "cuda:1: T400"), ("cuda:1", "0", "cuda:1: the driver does not answer"),
])  # fmt: skip
def test_the_gpu_named_is_the_one_that_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str, visible: str | None, shown: str
) -> None:
    """The driver's tool counts all GPUs, CUDA those that it is shown."""
    from workers.presence import device

    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\ncase "$*" in *--id=0|*--id=GPU-a) echo T400, 550.1, 2048 MiB;;\n'
        "*--id=1|*--id=GPU-b) echo H200, 550.1, 143771 MiB;; *) exit 6;; esac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("MAILBOAT_DEVICE", chosen)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device().startswith(shown)
