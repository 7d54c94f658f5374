"""Work in the background of an island: at a bounded rate and behind everything else on the host.

It must never be what a version, a request or a stop waits for.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import threading
import time

from mailboat.island.stop import Stop

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}  # number of the system call
_THIS_THREAD, _IDLE = 1, 3 << 13  # IOPRIO_WHO_PROCESS; IOPRIO_CLASS_IDLE


class Pace:
    """At most ``rate`` bytes a second (None: as fast as it goes); wakes with Stopped when the island stops."""

    def __init__(self, rate: float | None, stop: Stop) -> None:
        self._rate = rate
        self._stop = stop
        self._due = time.monotonic()

    def take(self, count: int) -> None:
        """Waits until ``count`` more bytes may have been moved."""
        self._stop.check()
        if self._rate is None:
            return
        now = time.monotonic()
        self._due = max(self._due, now) + count / self._rate
        if self._due > now:
            self._stop.sleep(self._due - now)


def step_back() -> None:
    """Puts the calling thread behind all others: for the processor, and for the disk where its scheduler knows that."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    if number := _IOPRIO_SET.get(platform.machine()):
        ctypes.CDLL(None, use_errno=True).syscall(number, _THIS_THREAD, 0, _IDLE)
