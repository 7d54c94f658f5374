"""An emulated link: a token bucket that makes downloads as slow as a given bandwidth, for demonstrations and tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class EmulatedLink:
    """Lets ``mbit`` million bits a second pass, with bursts of up to 50 ms. Shared by all downloads of an island."""

    def __init__(
        self,
        mbit: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._rate = mbit * 1e6 / 8  # bytes per second
        self._clock = clock
        self._sleep = sleep
        self._free_at = clock()
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        """Waits until ``count`` more bytes may pass."""
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now - 0.05) + count / self._rate
            wait = self._free_at - now
        if wait > 0:
            self._sleep(wait)
