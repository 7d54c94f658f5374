"""What tests of real processes wait with, and where those may listen."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

from urllib3.exceptions import HTTPError

from mailboat.errors import StoreError

# Seconds after which something hangs. A net, never a measure: a busy machine may take ten times what a quiet one takes.
PATIENCE = 120.0

# What a look raises at something that is not there yet, starts, or is written at this moment.
NOT_YET = (HTTPError, LookupError, OSError, StoreError, ValueError)

# Below those that systems give away (to `bind` with port 0, to connections), so that nobody takes one before its use.
PORTS = range(10_000, 30_000)


def eventually(check: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """The first true answer of `check`, which may raise what says "not yet"; fails when there is none in time."""
    deadline = time.monotonic() + seconds
    while True:
        trouble: Exception | None = None
        try:
            if answer := check():
                return answer
        except NOT_YET as error:
            trouble = error
        if time.monotonic() > deadline:
            raise AssertionError("it did not happen in time") from trouble
        time.sleep(0.02)


def free_port() -> int:
    """A port that nobody listens on now, and that nobody is given who asks the system for one."""
    while True:
        # Not by `random`: its seed is the same in all processes of a test run.
        port = PORTS[int.from_bytes(os.urandom(4)) % len(PORTS)]
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
