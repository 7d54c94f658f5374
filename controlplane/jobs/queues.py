"""Which queue carries which kind of job. Here and not with the workers, so that pages can count what waits in each."""

from __future__ import annotations

QUEUES = {  # by kind of job
    "build": "publish",
    "validate": "publish",
    "replay": "check",
    "verify": "check",
    "collect": "check",
    "merge": "merge",  # of its own: an island may be waiting, and no replay or publication shall be in its way
    "anchor": "merge",
    "derive": "gpu",  # where one is; else the worker of merges takes this queue too
}
HOUSEKEEPING = "housekeeping"
NAMES = (*sorted(set(QUEUES.values())), HOUSEKEEPING)
