"""Runs a module (``python -m controlplane.embedded.child PARENT MODULE ...``) that must not outlive its supervisor.

The kernel sends SIGTERM when the supervisor ends, even by SIGKILL; a supervisor that ended before that was arranged is
found by its number.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

from controlplane.embedded.guard import die_with_parent


def main() -> None:
    """Entry of the module."""
    parent, module = int(sys.argv[1]), sys.argv[2]
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit("mailboat: the supervisor has ended.")
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
