"""How much some Python computes, in seconds of one core of our day: the same on a slow machine and on a busy one.

What it waits for, a database say, is not in it; how long that takes is told by `bench/`. Tests use it as a net for what
became many times as slow, at NET times the goal: neighbours that press on caches and memory slow most code more than
the loop here.
"""

from __future__ import annotations

import time
from collections.abc import Callable

NET = 2.5
CORE_SECONDS = 0.0125  # what the loop below takes on a core of our day with nothing else to do
TRIES = 20  # whoever shares the core's caches is waited out


def core_seconds(work: Callable[[], object], enough: float) -> float:
    """The quickest of some tries; the first one that takes less than `enough` ends them."""
    quickest = float("inf")
    for _ in range(TRIES):
        core = _seconds(lambda: sum(number * number for number in range(300_000)))
        quickest = min(quickest, _seconds(work) / core * CORE_SECONDS)
        if quickest < enough:
            break
    return quickest


def _seconds(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun
