"""Supervises a job whose work goes on in a process of its own: how a worker with a GPU works.

This process never touches the device, so that it can always tell what became of the work: it holds the lease, passes on
progress, and kills the child when the job is cancelled, its lease is lost or nothing has moved for too long. The child
is started afresh for each job (never forked: CUDA does not survive that), says what it does in lines of JSON, and ends
by itself when this process is gone.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import structlog

from controlplane.jobs.models import Job
from mailboat.errors import MailboatError
from mailboat.patch.backends import DEVICE
from workers.lease import Lease, ShuttingDown
from workers.work import Findings, Parked

log = structlog.get_logger(__name__)

CHECKOUT = Path(__file__).resolve().parent.parent
LOOK_SECONDS = 0.2  # between two looks at the lease
STILL_SECONDS = 900.0  # without any sign that the work moves, the child hangs
GRACE_SECONDS = 5.0  # for a child that was asked to end


class ChildFailed(MailboatError):  # noqa: N818 - as the library's other errors, named for what happened
    """The process that did the work ended without saying how it went."""

    code = "child_failed"


def wanted() -> bool:
    """Whether this worker's jobs go into children: on any device but the CPU."""
    return (os.environ.get(DEVICE) or "cpu") != "cpu"


def command(job: Job) -> list[str]:
    """How the child of a job is started."""
    return [sys.executable, "-m", "workers.child", str(job.pk)]


def carry_out(job: Job, lease: Lease, *, still_seconds: float = STILL_SECONDS) -> dict[str, Any]:
    """Does the job's work in a child and returns its result. Raises what the work raised: Stopped, Parked, Findings,
    MailboatError with its sentence.
    """
    child = subprocess.Popen(
        command(job), cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        return _ended(_listen(child, lease, still_seconds), child)
    finally:
        _end(child)


def _listen(child: subprocess.Popen[bytes], lease: Lease, still_seconds: float) -> Mapping[str, Any] | None:
    """Passes on what the child says until it says how it ended; None when it ended without a word."""
    assert child.stdout is not None  # noqa: S101 - a pipe
    os.set_blocking(child.stdout.fileno(), False)
    rest, moved, count = b"", time.monotonic(), -1
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while True:
            ready = selector.select(LOOK_SECONDS)
            lease.check()
            if time.monotonic() - moved > still_seconds:
                raise ChildFailed(
                    f"The work did not move for {still_seconds:.0f} s and was ended; it can be run again."
                )
            if not ready:
                continue
            piece = child.stdout.read()
            if not piece:
                return None
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                said = json.loads(line)
                if said["kind"] == "progress":
                    moved = time.monotonic()
                    lease.progress(said["done"], said["total"], said["unit"])
                elif said["kind"] == "alive":
                    moved, count = (time.monotonic(), said["count"]) if said["count"] != count else (moved, count)
                else:
                    return dict(said)


def _ended(said: Mapping[str, Any] | None, child: subprocess.Popen[bytes]) -> dict[str, Any]:
    if said is None:
        code = child.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        raise ChildFailed(f"The process that did the work {how}; it can be run again.")
    match said["kind"]:
        case "result":
            return dict(said["result"])
        case "parked":
            until = timedelta(seconds=said["seconds"])
            raise Parked(said["waiting_for"], until=until, saved=said["saved"], still=lambda: True)
        case "findings":
            raise Findings(said["sentence"], said["result"])
        case "stopped":
            raise ShuttingDown
        case _:
            raise ChildFailed(said["sentence"])


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends the child, whatever it does; its scratch folder is found and removed by the sweep."""
    if child.stdin is not None:
        child.stdin.close()  # what it watches
    for ask in (child.terminate, child.kill):
        if child.poll() is None:
            ask()
            try:
                child.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                continue
    if child.stdout is not None:
        child.stdout.close()
