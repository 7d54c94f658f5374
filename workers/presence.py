"""Says that this process is there, what it can do and which job it has in hand, so that people see their workers.

A thread of its own, so that a long job does not look like a lost worker. Nothing depends on what it writes: a database
that is away is tried again at the next beat.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import threading
import uuid
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from pathlib import Path

import structlog
from django.db import DatabaseError, connections

from controlplane.jobs import presence as rows
from mailboat.patch.backends import DEVICE

log = structlog.get_logger(__name__)

BEAT_SECONDS = 10.0
_PACKAGES = ("mailboat", "numpy", "numba", "blake3", "torch", "triton")


class Presence:
    """The row of this process, from `begin` to `leave`."""

    def __init__(self) -> None:
        self._job: uuid.UUID | None = None
        self._row: uuid.UUID | None = None
        self._wake = threading.Event()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, name: str, queues: Sequence[str]) -> None:
        """Registers the process and begins to beat."""
        arguments = (name, tuple(queues))
        self._thread = threading.Thread(target=self._run, args=arguments, name="presence", daemon=True)
        self._thread.start()

    def working_on(self, job: uuid.UUID | None) -> None:
        """The job in hand, or none."""
        self._job = job
        self._wake.set()

    def leave(self, seconds: float = 1.0) -> None:
        """Says goodbye, if that can be done in time."""
        self._over.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self, name: str, queues: tuple[str, ...]) -> None:
        while not self._over.is_set():
            self._wake.clear()
            self._try(name, queues)
            self._wake.wait(BEAT_SECONDS)
        self._try(name, queues)

    def _try(self, name: str, queues: tuple[str, ...]) -> None:
        try:
            if self._over.is_set():
                if self._row is not None:
                    rows.stopped(self._row)
            elif self._row is None or not rows.beat(self._row, self._job):
                host, versions = socket.gethostname(), _versions()
                made = rows.register(name, host, os.getpid(), queues=queues, device=device(), versions=versions)
                self._row = made.pk
                rows.beat(self._row, self._job)
        except DatabaseError as error:
            log.warning("presence not recorded", error=str(error).strip())
        finally:
            connections.close_all()


def device() -> str:
    """What this process computes on, in words. Asks the driver's own tool about a GPU: this process never opens one."""
    chosen = os.environ.get(DEVICE) or "cpu"
    if chosen.startswith("cuda"):
        return _gpu(chosen)
    return _cpu() if chosen == "cpu" else f"{chosen} on {_cpu()}"


def _gpu(chosen: str) -> str:
    """CUDA counts the devices that CUDA_VISIBLE_DEVICES lists, by number or UUID; the tool counts all."""
    ask = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        number = int(chosen.partition(":")[2] or 0)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        ask.append(f"--id={number if visible is None else visible.split(',')[number].strip()}")
        line = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True).stdout
        name, driver, memory = (part.strip() for part in line.split(","))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return f"{chosen}: the driver does not answer"
    return f"{chosen}: {name}, {memory}, driver {driver}"


def _cpu() -> str:
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"cpu: {model}, {cores} cores"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = package_version(name)
        except PackageNotFoundError:
            continue
    return found


presence = Presence()
