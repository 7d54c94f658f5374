"""What a publish adds to a step, by stage: measured, logged, and returned with the version."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of the stages of a publish: `gather` (look at the tensors, prove replicas, bring split ones together; of
    several ranks also comparing on accelerators), `build` (compare, code, digest), `upload`, `commit`. Waiting for
    validation is none of them.
    """

    gather: float
    build: float
    upload: float
    commit: float


class Laps:
    """A clock that starts when it is made; each call of `lap` ends a stage."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def skip(self) -> None:
        """What passed since the last lap belongs to no stage."""
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Ends `stage`, a field of Seconds."""
        now = time.perf_counter()
        self._seconds[stage] = self._seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def of_version(self, number: int) -> Seconds:
        """The stages so far, logged as those of a version."""
        stages = ("gather", "build", "upload", "commit")
        found = Seconds(*(self._seconds.get(stage, 0.0) for stage in stages))
        said = ", ".join(f"{stage} {getattr(found, stage) * 1e3:.1f} ms" for stage in stages)
        _log.info("version %d: %s", number, said)
        return found
