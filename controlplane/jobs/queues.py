"""Which queue carries which kind of job. Here and not with the workers, so that pages can count what waits in each."""

from __future__ import annotations

QUEUES = {"build": "publish", "validate": "publish", "replay": "check", "verify": "check"}  # by kind of job
HOUSEKEEPING = "housekeeping"
NAMES = (*sorted(set(QUEUES.values())), HOUSEKEEPING)
