"""The way of a GPU worker from end to end, through Triton's interpreter: a supervised child builds and validates with
the kernels, and an island ends with the same bytes. On a machine with a GPU the same code runs on the device.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controlplane.jobs import services as jobs
from controlplane.jobs.models import Job, JobEvent
from controlplane.registry.models import PatchPart, Version
from mailboat.checkpoint.source import ArraySource
from mailboat.checkpoint.writing import write_checkpoint
from mailboat.digest import measure
from mailboat.patch import build_patch
from tests.island.fleet import held_state, island
from tests.together.test_real_server import Harbour, harbour  # noqa: F401  a fixture
from tests.waiting import PATIENCE, eventually
from workers import supervised
from workers.lease import Cancelled, Lease


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch, settings: Any, home: Path, database_url: str, tmp_path: Path) -> Path:
    """Jobs go into children that compute with the kernels; returns the folder whose checkpoints they may read."""
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    settings.MAILBOAT_CHECKPOINT_ROOTS = (allowed,)
    for name, value in {
        "MAILBOAT_DEVICE": "interpreter",
        "TRITON_INTERPRET": "1",
        "DATABASE_URL": database_url,
        "MAILBOAT_HOME": str(home),
        "MAILBOAT_BLOB_ROOT": str(settings.MAILBOAT_BLOB_ROOT),
        "MAILBOAT_CHECKPOINT_ROOTS": str(allowed),
    }.items():
        monkeypatch.setenv(name, value)
    return allowed


def arrays(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    found = {"a": random.integers(0, 1 << 16, (40, 32), np.uint16), "b": random.integers(0, 255, (9, 7), np.uint8)}
    for step in range(seed):
        found["a"][step::11, step] += 1
    return found


def state(seed: int) -> ArraySource:
    return ArraySource(arrays(seed), dtypes={"a": "BF16", "b": "U8"})


@pytest.mark.usefixtures("children")
def test_worker_kernels_patch_validation_island(harbour: Harbour, children: Path, tmp_path: Path) -> None:  # noqa: F811
    for number in range(2):
        write_checkpoint(state(number), children / f"v{number}")
        harbour.operator.token = harbour.publisher_token
        harbour.operator.commit_checkpoint(
            "voyage", str(children / f"v{number}"), number=number, parent=number - 1 if number else None, epoch=0
        )
        eventually(lambda n=number: Version.objects.filter(number=n, state="ready").exists())
    with island(harbour.server, tmp_path / "store", token=_token(harbour), once=True) as running:
        running.join()
    assert held_state(tmp_path / "store") == measure(state(1)).digest
    built = build_patch(state(0), state(1), tmp_path / "cpu.mbp")
    part = PatchPart.objects.get(patch__to_version__number=1, patch__kind="step")
    assert part.blob.sha256 == built.sha256, "the file is the CPU's, byte for byte"
    told = JobEvent.objects.filter(message__contains="computes on interpreter")
    assert all("as Arrays" in event.message for event in told) and told.count() >= 2


def _token(harbour: Harbour) -> str:  # noqa: F811
    from controlplane.accounts import services as accounts

    harbour.operator.token = accounts.create_token(harbour.project, "operator", "late", actor="test")[1]
    return harbour.enrol("skerry")


def test_a_child_that_is_killed_or_hangs_or_is_cancelled_is_told_of(
    monkeypatch: pytest.MonkeyPatch, transactional_db: None, children: Path
) -> None:
    from controlplane.registry import services

    project = services.create_project("yard", actor="test")
    ready = children / "ready"
    os.mkfifo(ready)
    # In place of the child's work: it says that it is there, and then nothing at all.
    silent = f"import os, time; open({str(ready)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    monkeypatch.setattr(supervised, "command", lambda _job: [sys.executable, "-c", silent])

    def pid() -> int:
        return int(ready.read_text())

    def kill() -> None:
        os.kill(pid(), signal.SIGKILL)

    def cancel() -> None:
        pid()
        jobs.cancel(Job.objects.get(state="running"), "test")

    cases: list[tuple[Any, float, type[Exception], str | None]] = [
        (kill, PATIENCE, supervised.ChildFailed, "killed by signal 9"),
        (lambda: None, 0.5, supervised.ChildFailed, "did not move"),
        (cancel, PATIENCE, Cancelled, None),
    ]
    for act, still, expected, words in cases:
        job, _ = jobs.enqueue("replay", None, {}, f"silent {words}", project=project)
        claimed = jobs.claim(job.pk, "w")
        assert claimed is not None
        thread = threading.Thread(target=act)
        thread.start()
        with Lease(claimed, "w") as lease, pytest.raises(expected, match=words):
            supervised.carry_out(claimed, lease, still_seconds=still)
        thread.join()
        Job.objects.filter(pk=job.pk).update(state="failed")
