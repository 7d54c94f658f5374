"""The workers' application in a process that stands still before a call.

MAILBOAT_TEST_HALT is `module:function:n` or `module:Class.method:n`: the n-th call of that function. Whoever started
the process sees that (`stands_still`) and kills it there, or lets it go on, on however busy a machine.
"""

from __future__ import annotations

import os
import signal
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

from workers.app import app

__all__ = ["app"]

HALT = "MAILBOAT_TEST_HALT"


def stands_still(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has come to that call."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _halt_before(place: Any, name: str, turn: int) -> None:
    *classes, name = name.split(".")
    for one in classes:
        place = getattr(place, one)
    real, calls = getattr(place, name), 0

    def halting(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == turn:
            os.kill(os.getpid(), signal.SIGSTOP)
        return real(*arguments, **options)

    setattr(place, name, halting)


if HALT in os.environ:
    _module, _name, _turn = os.environ[HALT].split(":")
    _halt_before(import_module(_module), _name, int(_turn))
