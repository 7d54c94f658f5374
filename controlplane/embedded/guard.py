"""The process that stands between a PostgreSQL server and the programs that use it.

Runs as a script of its own (``python -I guard.py ...``) with nothing but the standard library, because it must
outlive whoever started it by exactly as long as the server needs to stop. It starts the server as an unprivileged
account, starts it again when it was killed, and stops it as soon as no program holds the shared *users* lock any more,
however those programs ended. A program that dies by SIGKILL drops its lock too, so no server is left behind.

It must never touch a process that is not a PostgreSQL server working in this data folder.

Exit codes: 0 stopped because nobody uses the server; 3 another guard is at work; else that of a server that refused to
start.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ALREADY_GUARDED = 3
_PR_SET_PDEATHSIG = 1
_EARLY_SECONDS = 2.0
_RESTARTS_IN_A_ROW = 5
_FAST_STOP_SECONDS = 30.0


# --- locks ---
# Open-file-description locks: they belong to an open file, not to a process, so threads do not lose them by accident.


def try_lock(descriptor: int, *, exclusive: bool) -> bool:
    """Take the lock on the whole file at once or say False."""
    kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock(kind))
    except (BlockingIOError, PermissionError):
        return False
    return True


def wait_lock(descriptor: int) -> None:
    """Wait for the exclusive lock."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW, _flock(fcntl.F_WRLCK))


def held_by_others(descriptor: int) -> bool:
    """Whether any other open file holds a lock (shared or exclusive) on it."""
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK))
    return int(struct.unpack_from("h", answer)[0]) != fcntl.F_UNLCK


def _flock(kind: int) -> bytes:
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)


# --- processes ---


def servers_of(data: Path) -> list[int]:
    """Ids of PostgreSQL processes with this working folder: a server's processes all work in its data folder."""
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if Path(f"/proc/{entry.name}/cwd").readlink() != data:
                continue
            program = Path(f"/proc/{entry.name}/exe").readlink().name.removesuffix(" (deleted)")
            if program == "postgres":
                found.append(int(entry.name))
    return found


def wait_gone(pids: Iterable[int], seconds: float) -> bool:
    """Wait until all these processes have ended; False when some are left after the time."""
    deadline = time.monotonic() + seconds
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return False
        finally:
            os.close(descriptor)
    return True


def end_orphans(data: Path, sockets: Path) -> None:
    """End what a killed server left behind: its backends keep the shared memory and would block the next start."""
    for stop, seconds in ((signal.SIGINT, 5.0), (signal.SIGQUIT, 3.0), (signal.SIGKILL, 5.0)):
        pids = servers_of(data)
        if not pids:
            break
        main = recorded_server(data)
        # A fast shutdown is the main process's affair; backends without one are told to leave at once.
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, stop if pid == main or stop != signal.SIGINT else signal.SIGQUIT)
        wait_gone(pids, seconds)
    else:
        raise SystemExit(f"mailboat: processes {servers_of(data)} of an earlier server do not end.")
    # Nobody works here, so lock files are stale, even if their number belongs to a zombie or another program by now.
    for lock in (data / "postmaster.pid", *sockets.glob(".s.PGSQL.*.lock")):
        lock.unlink(missing_ok=True)


def recorded_server(data: Path) -> int | None:
    """The main process as the server's own file names it; it may be long gone."""
    try:
        return int((data / "postmaster.pid").read_text().split("\n", 1)[0])
    except (OSError, ValueError):
        return None


def parent_of(pid: int | None) -> int | None:
    """The parent's process id."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return None


def die_with_parent(stop: signal.Signals) -> None:
    """Ask the kernel to send ``stop`` to this process when the thread that started it ends; does nothing off Linux."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(stop), 0, 0, 0)


def drop_to(uid: int, gid: int) -> None:
    """Give up root for good; nothing when that account runs already."""
    if os.geteuid() != uid:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)


# --- the guard ---


class Guard:
    """Keeps one server running while somebody holds the users lock."""

    def __init__(self, data: Path, sockets: Path, account: tuple[int, int], command: Sequence[str]) -> None:
        self._data = data
        self._sockets = sockets
        self._account = account
        self._command = list(command)
        self._stopping = False
        self._child: int | None = None
        self._lock = threading.Lock()

    def run(self) -> int:
        """Until nobody needs the server; the exit code."""
        deaths = 0
        while True:
            started = time.monotonic()
            code = self._serve_once()
            if self._stopping:
                return 0
            early = time.monotonic() - started < _EARLY_SECONDS
            deaths = deaths + 1 if early else 1
            refused = early and code >= 0  # it said no by itself: it is no use to ask again
            if refused or deaths > _RESTARTS_IN_A_ROW:
                return code if code > 0 else 1

    def stop(self) -> None:
        """Ask for a fast shutdown; a server that does not follow in time is ended at once, which its log survives."""
        with self._lock:
            self._stopping = True
            self._signal(signal.SIGINT)
        threading.Timer(_FAST_STOP_SECONDS, self._stop_at_once).start()

    def _stop_at_once(self) -> None:
        with self._lock:
            self._signal(signal.SIGQUIT)

    def _serve_once(self) -> int:
        with self._lock:
            if self._stopping:
                return 0
            self._child = os.fork()
            if self._child == 0:
                self._become_server()
        # waitid leaves the zombie in place, so that nobody signals a recycled number between the end and the reaping.
        os.waitid(os.P_PID, self._child, os.WEXITED | os.WNOWAIT)
        with self._lock:
            _, status = os.waitpid(self._child, 0)
            self._child = None
        return os.waitstatus_to_exitcode(status)

    def _become_server(self) -> None:
        try:
            drop_to(*self._account)
            die_with_parent(signal.SIGINT)
            os.umask(0o077)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            end_orphans(self._data, self._sockets)
            os.execv(self._command[0], self._command)  # noqa: S606 - no shell is wanted
        except BaseException as error:  # noqa: BLE001 - a forked child must never return into its parent's code
            os.write(2, f"FATAL:  {error}\n".encode())
            os._exit(1)

    def _signal(self, number: signal.Signals) -> None:
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, number)


def _when_unused(descriptor: int, stop: Callable[[], None]) -> None:
    wait_lock(descriptor)
    stop()


def main() -> int:
    """Entry of the script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sockets", type=Path, required=True)
    parser.add_argument("--users-lock", type=Path, required=True)
    parser.add_argument("--guard-lock", type=Path, required=True)
    parser.add_argument("--uid", type=int, required=True)
    parser.add_argument("--gid", type=int, required=True)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    own = os.open(options.guard_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not try_lock(own, exclusive=True):
        return ALREADY_GUARDED
    users = os.open(options.users_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    guard = Guard(options.data, options.sockets, (options.uid, options.gid), options.command)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=guard.stop, daemon=True).start())
    threading.Thread(target=_when_unused, args=(users, guard.stop), daemon=True).start()
    return guard.run()


if __name__ == "__main__":
    sys.stdout.flush()
    code = main()
    os._exit(code)  # a timer or the lock thread may still wait; there is nothing left to flush
