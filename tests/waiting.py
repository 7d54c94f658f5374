"""What tests of real processes wait with, and where those may listen."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any


def eventually(check: Callable[[], Any], seconds: float = 20.0) -> Any:
    """The first true answer of `check`; fails when there is none within `seconds`."""
    deadline = time.monotonic() + seconds
    while not (answer := check()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return answer


def patient(usually: float) -> Callable[..., Any]:
    """`eventually` for tests whose processes need longer: `usually` seconds where a test names no others."""

    def wait(check: Callable[[], Any], seconds: float = usually) -> Any:
        return eventually(check, seconds)

    return wait


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
