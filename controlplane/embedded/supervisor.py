"""Keeps a few processes running: starts them, restarts those that crash, ends them all, leaves none behind.

All starting happens in one thread, which lives as long as the supervisor: the kernel's "end with your parent" means the
thread that started a process. It must never signal a process that it did not start.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_LOG_BYTES = 8 << 20
_STEADY_SECONDS = 60.0  # a process that ran this long has earned a quick restart
_LONGEST_PAUSE = 30.0
_STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Command:
    """One process to keep: ``module`` with ``arguments`` under this interpreter; ``descriptors`` are inherited."""

    name: str
    module: str
    arguments: Sequence[str]
    descriptors: Sequence[int] = ()


@dataclass(slots=True)
class _Kept:
    command: Command
    process: subprocess.Popen[bytes] | None = None
    descriptor: int = -1
    started: float = 0.0
    crashes: int = 0
    due: float = field(default=0.0)


class Supervisor:
    """Runs commands in ``folder`` with ``environment``; each one's output goes to ``logs/NAME.log``."""

    def __init__(
        self, folder: Path, logs: Path, environment: Mapping[str, str], *, look: Callable[[], None] = lambda: None
    ) -> None:
        self._folder = folder
        self._logs = logs
        self._environment = dict(environment)
        self._look = look  # called every few seconds, for what is not a process of ours
        self._kept: list[_Kept] = []
        self._lock = threading.Lock()
        self._stopping = False
        self._wake_reader, self._wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        """Begin; commands come by ``keep``."""
        self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._thread.start()

    def keep(self, *commands: Command) -> None:
        """Start these and keep them running."""
        with self._lock:
            self._kept += [_Kept(command) for command in commands]
        self._wake()

    def crashes(self, name: str) -> int:
        """How often in a row a process has ended by itself."""
        return sum(kept.crashes for kept in self._kept if kept.command.name == name)

    def pids(self) -> dict[str, int]:
        """The processes that run now, by name."""
        with self._lock:
            return {kept.command.name: kept.process.pid for kept in self._kept if kept.process is not None}

    def log(self, name: str) -> Path:
        """Where a process's output goes."""
        return self._logs / f"{name}.log"

    def last_line(self, name: str) -> str:
        """The last thing that a process said."""
        with contextlib.suppress(OSError):
            lines = self.log(name).read_bytes()[-8192:].decode(errors="replace").split("\n")
            return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return "it said nothing"

    def stop(self) -> None:
        """End every process, gently first; returns when all have ended."""
        self._stopping = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()
        for descriptor in (self._wake_reader, self._wake_writer):
            os.close(descriptor)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_writer, b".")

    def _run(self) -> None:
        while not self._stopping:
            now = time.monotonic()
            with self._lock:
                kept = list(self._kept)
            for one in kept:
                if one.process is None and one.due <= now:
                    self._start(one)
            pauses = [one.due - now for one in kept if one.process is None]
            self._wait(kept, max(0.0, min([*pauses, 5.0])))
            for one in kept:
                self._reap(one)
            if not self._stopping:
                self._look()
        self._end_all()

    def _wait(self, kept: Sequence[_Kept], seconds: float) -> None:
        descriptors = [one.descriptor for one in kept if one.process is not None]
        select.select([self._wake_reader, *descriptors], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_reader, 4096)

    def _start(self, one: _Kept) -> None:
        log = self.log(one.command.name)
        if log.exists() and log.stat().st_size > _LOG_BYTES:
            log.replace(log.with_suffix(".log.1"))
        command = one.command
        with log.open("ab") as output:
            one.process = subprocess.Popen(
                [
                    sys.executable, "-m", "controlplane.embedded.child", str(os.getpid()),
                    command.module, *command.arguments,
                ],
                cwd=self._folder, env=self._environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True, pass_fds=tuple(command.descriptors),
            )  # fmt: skip
        one.descriptor = os.pidfd_open(one.process.pid)
        one.started = time.monotonic()

    def _reap(self, one: _Kept) -> None:
        if one.process is None or one.process.poll() is None:
            return
        os.close(one.descriptor)
        _signal_group(one.process.pid, signal.SIGKILL)  # what it may have started itself
        one.process = None
        now = time.monotonic()
        one.crashes = 1 if now - one.started > _STEADY_SECONDS else one.crashes + 1
        # From its last start on: who keeps ending at once waits longer and longer, who had worked meanwhile does not.
        one.due = max(now, one.started + min(_LONGEST_PAUSE, 0.25 * 2**one.crashes))

    def _end_all(self) -> None:
        alive = [one for one in self._kept if one.process is not None]
        deadline = time.monotonic() + _STOP_SECONDS
        for number in (signal.SIGTERM, signal.SIGKILL):
            for one in alive:
                if one.process is not None and one.process.poll() is None:
                    one.process.send_signal(number)
            for one in alive:
                if one.process is not None:
                    select.select([one.descriptor], [], [], max(0.0, deadline - time.monotonic()))
            deadline = time.monotonic() + _STOP_SECONDS
        for one in alive:
            if one.process is not None:
                one.process.wait()
                _signal_group(one.process.pid, signal.SIGKILL)
                os.close(one.descriptor)
                one.process = None


def _signal_group(group: int, number: signal.Signals) -> None:
    """Each process leads a group of its own, whose number stays taken while it has members."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
