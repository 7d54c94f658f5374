"""Stopping an island: at once while it waits, at the next safe point while it writes.

Every write of an island can be cut by a kill, so stopping is a courtesy; it must never be what correctness rests on.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


class Stopped(BaseException):
    """The island was told to stop."""


class Stop:
    """Set once, by a signal or another thread. Waiting parts run inside `interruptible`."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._interruptible = False

    def set(self) -> None:
        """Asks for the stop."""
        self._event.set()

    @property
    def is_set(self) -> bool:
        """Whether the stop was asked for."""
        return self._event.is_set()

    def check(self) -> None:
        """Raises Stopped when the stop was asked for."""
        if self._event.is_set():
            raise Stopped

    def sleep(self, seconds: float) -> None:
        """Sleeps, but wakes with Stopped at once when the stop is asked for."""
        if self._event.wait(seconds):
            raise Stopped

    def wait(self, seconds: float) -> bool:
        """Waits for the stop; returns whether it was asked for."""
        return self._event.wait(seconds)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """A block that a signal may leave at any point: waiting, downloading, decoding, never a commit."""
        self._interruptible = True
        try:
            self.check()
            yield
        finally:
            self._interruptible = False

    @contextlib.contextmanager
    def shielded(self) -> Iterator[None]:
        """A block inside `interruptible` that a signal must not leave half way."""
        before, self._interruptible = self._interruptible, False
        try:
            yield
        finally:
            self._interruptible = before
        if before:
            self.check()

    def on_signals(self) -> None:
        """Handles SIGTERM and SIGINT in the main thread."""

        def handle(_number: int, _frame: object) -> None:
            self._event.set()
            if self._interruptible:
                self._interruptible = False  # a second signal must not interrupt the clean-up
                raise Stopped

        signal.signal(signal.SIGTERM, handle)
        signal.signal(signal.SIGINT, handle)
