"""What a job's module gets to work with: its row, a scratch folder, and a way to say how far it is."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cached_property
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any, Protocol

from controlplane.jobs import services as jobs
from controlplane.jobs.models import Job
from workers.scratch import Scratch


class Findings(Exception):  # noqa: N818 - the job did what it should; what it found is bad
    """The work ended with a bad finding: one sentence, and the evidence as the job's result."""

    def __init__(self, sentence: str, result: Mapping[str, Any]) -> None:
        super().__init__(sentence)
        self.result = dict(result)


class Parked(Exception):  # noqa: N818 - not a fault
    """The work waits for something outside and lets its worker go. It is called again with `saved` in the job's row
    when that has come, or `until` has passed.
    """

    def __init__(
        self, waiting_for: str, *, until: timedelta, saved: Mapping[str, Any], still: Callable[[], bool]
    ) -> None:
        super().__init__(waiting_for)
        self.waiting_for = waiting_for
        self.until = until
        self.saved = dict(saved)
        self.still = still


class Keeper(Protocol):
    """What the work asks whether to go on: a lease, or what stands for one in a child."""

    def check(self) -> None:
        """Raises Stopped when the work must not go on."""
        ...

    def progress(self, done: int, total: int | None, unit: str) -> None:
        """Says how far the work is. Raises Stopped like `check`."""
        ...


class Work:
    """One attempt at a job."""

    def __init__(self, job: Job, lease: Keeper) -> None:
        self.job = job
        self._lease = lease
        self._scratch: Scratch | None = None

    @property
    def params(self) -> dict[str, Any]:
        """What was asked for."""
        return dict(self.job.params)

    @property
    def saved(self) -> dict[str, Any] | None:
        """What an earlier part of the work saved when it was parked; None at the beginning."""
        return None if self.job.saved is None else dict(self.job.saved)

    def check(self) -> None:
        """Raises Stopped when the work must not go on."""
        self._lease.check()

    def log(self, message: str, level: str = "info") -> None:
        """Adds a line to the job's log."""
        jobs.log(self.job.pk, level, message)

    def progress(self, done: int, total: int | None, unit: str) -> None:
        """Says how far the work is. Raises Stopped when it must not go on."""
        self._lease.progress(done, total, unit)

    def bytes_of(self, total: int) -> Callable[[int], None]:
        """A callback for functions that report the bytes since their last call."""
        done = 0

        def step(count: int) -> None:
            nonlocal done
            done += count
            self.progress(done, total, "bytes")

        return step

    @cached_property
    def scratch(self) -> Path:
        """A folder that goes with the attempt."""
        self._scratch = Scratch(self.job.kind)
        return self._scratch.folder

    def close(self) -> None:
        """Gives the scratch folder's space back."""
        if self._scratch is not None:
            self._scratch.close()


def environment() -> dict[str, str]:
    """Where a result was computed, for whoever has to explain it."""
    packages = ("mailboat", "numpy", "blake3")
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        **{name: package_version(name) for name in packages},
    }
