"""Runs the real `mailboat` command in forked children that die by SIGKILL at a chosen write to the disk.

One JSON line in: {"arguments": [...], "die_at": n or null, "log": path, "log_entries": n or null (the patches that the
log may hold before it is compacted), "full_at": n or null (the write from which on the disk is full for a while)}; one
JSON line out: {"status": n, "writes": n}.
The parent imports everything once and starts no thread, so that a child costs milliseconds. A pwrite or write that is
died in leaves half of its bytes behind.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from dataclasses import replace
from typing import Any

FATAL = ("replace", "rename", "fsync", "fdatasync", "pwrite", "unlink", "rmdir", "mkdir", "symlink", "ftruncate")

FILLING = {"fsync", "fdatasync", "pwrite", "mkdir", "symlink", "replace"}  # what a full disk refuses
FULL_FOR = 4


def main() -> None:
    """Serves until its input ends."""
    import mailboat.cli
    import mailboat.commands.island
    import mailboat.compiled
    import mailboat.island.sync  # noqa: F401 - imported once for all children

    for line in sys.stdin:
        order = json.loads(line)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _run(order, writer)
        os.close(writer)
        _, status = os.waitpid(child, 0)
        counted = os.read(reader, 64)
        os.close(reader)
        answer = {"status": os.waitstatus_to_exitcode(status), "writes": int(counted or b"-1")}
        print(json.dumps(answer), flush=True)


def _run(order: dict[str, Any], writer: int) -> None:
    import mailboat.cli

    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    done = 0

    def deadly(name: str, real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal done
            done += 1
            if done == order["die_at"]:
                if name == "pwrite":
                    descriptor, data, offset = arguments
                    real(descriptor, bytes(memoryview(data).cast("B")[: len(data) // 2]), offset)
                os.kill(os.getpid(), signal.SIGKILL)
            if name in FILLING and 0 <= done - (order.get("full_at") or done + 1) < FULL_FOR:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments, **options)

        return call

    if order.get("log_entries") is not None:
        _compact_beyond(order["log_entries"])
    for name in FATAL:
        setattr(os, name, deadly(name, getattr(os, name)))
    status = 70
    try:
        mailboat.cli.main(order["arguments"])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0
    finally:
        os.write(writer, str(done).encode())
        os._exit(status)


def _compact_beyond(entries: int) -> None:
    from mailboat.island import sync
    from mailboat.island.upkeep import UpkeepOptions

    run_island = sync.run_island

    def run(options: sync.IslandOptions, **rest: Any) -> None:
        run_island(replace(options, upkeep=UpkeepOptions(log_entries=entries, log_share=9)), **rest)

    sync.run_island = run


if __name__ == "__main__":
    main()
