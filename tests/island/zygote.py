"""Runs the real `mailboat` command in forked children that die by SIGKILL at a chosen write to the disk.

One JSON line in: {"arguments": [...], "die_at": n or null, "log": path}; one JSON line out: {"status": n, "writes": n}.
The parent imports everything once and starts no thread, so that a child costs milliseconds. A pwrite or write that is
died in leaves half of its bytes behind.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

FATAL = ("replace", "rename", "fsync", "fdatasync", "pwrite", "unlink", "rmdir", "mkdir", "symlink", "ftruncate")


def main() -> None:
    """Serves until its input ends."""
    import mailboat.cli
    import mailboat.commands.island
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
            return real(*arguments, **options)

        return call

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


if __name__ == "__main__":
    main()
