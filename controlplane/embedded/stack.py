"""The whole control plane on one machine: PostgreSQL, web server, workers, scheduler.

``manage.py up`` and the demo use it. Everything ends with the process that started it, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from controlplane.embedded.postgres import EmbeddedPostgres, EmbeddedPostgresError
from controlplane.embedded.supervisor import Command, Supervisor

CHECKOUT = Path(__file__).resolve().parents[2]
WORKERS = {"publish": "publish", "check": "check", "merge": "merge,gpu", "housekeeping": "housekeeping"}
_MIGRATE_SECONDS = 600.0
_HOPELESS_CRASHES = 3


class StackError(Exception):
    """The control plane can't run here; the sentence says why and what to do."""


class Stack:
    """Everything for one home. Use it as a context manager, or ``start`` and ``stop``."""

    def __init__(
        self, home: Path, port: int = 8000, extra_env: Mapping[str, str] | None = None, *, host: str = "127.0.0.1"
    ) -> None:
        self.home = home.absolute()
        self.host = host
        self.port = port
        self._environment = {**os.environ, **(extra_env or {}), "MAILBOAT_HOME": str(self.home)}
        self._environment.setdefault("MAILBOAT_PUBLIC_URL", self.url)
        self._environment.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
        self._listener: socket.socket | None = None
        self._lock = -1
        self._postgres: EmbeddedPostgres | None = None
        self._supervisor: Supervisor | None = None

    @property
    def url(self) -> str:
        """The dashboard's address on this machine."""
        name = "127.0.0.1" if self.host in {"", "0.0.0.0", "::"} else self.host  # noqa: S104 - compared, not bound
        return f"http://[{name}]:{self.port}" if ":" in name else f"http://{name}:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything; returns when the database is ready and the processes are on their way.

        :raises StackError: the port is in use, another stack has this home, the database can't run, a migration failed.
        """
        try:
            self._listener = self._listen()
            self.home.mkdir(parents=True, exist_ok=True)
            self._lock = self._only_one()
            if not (self._environment.get("DATABASE_URL") or self._environment.get("DATABASE_URL_FILE")):
                self._postgres = EmbeddedPostgres(self.home)
                self._postgres.start()
            self._supervisor = Supervisor(CHECKOUT, self.home / "logs", self._environment, look=self._watch_postgres)
            self._supervisor.start()
            self._supervisor.keep(self._web())  # it imports while the migrations run
            self._migrate()
            self._supervisor.keep(*(_worker(*item) for item in WORKERS.items()), _scheduler())
        except EmbeddedPostgresError as error:
            self.stop()
            raise StackError(str(error)) from error
        except BaseException:
            self.stop()
            raise

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Wait until the web server answers. Raises StackError with its last words when it does not."""
        deadline = time.monotonic() + timeout
        while not self._answers():
            crashed = self._supervisor.crashes("web") if self._supervisor is not None else _HOPELESS_CRASHES
            if crashed >= _HOPELESS_CRASHES or time.monotonic() > deadline:
                raise StackError(f"The web server does not answer: {self._said('web')}.")
            time.sleep(0.1)  # after an error; without one the request itself has waited

    def pids(self) -> dict[str, int]:
        """The supervised processes that run now, by name."""
        return self._supervisor.pids() if self._supervisor is not None else {}

    def stop(self) -> None:
        """End everything, gently first. Harmless when nothing runs."""
        if self._supervisor is not None:
            self._supervisor.stop()
            self._supervisor = None
        if self._postgres is not None:
            self._postgres.stop()
            self._postgres = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _listen(self) -> socket.socket:
        """The web server's socket; held here, so that nobody takes the port and connections wait while it restarts."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            return socket.create_server((self.host, self.port), family=family, backlog=512)
        except OSError as error:
            if error.errno is not None and "in use" in os.strerror(error.errno):
                reason = "is in use: stop what listens there or choose another with --port"
            else:
                reason = f"can't be used on {self.host} ({error.strerror or error}): choose another host or port"
            raise StackError(f"Port {self.port} {reason}.") from error

    def _only_one(self) -> int:
        lock = os.open(self.home / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise StackError(
                f"Mailboat runs in {self.home} already: stop it or choose another MAILBOAT_HOME."
            ) from error
        return lock

    def _migrate(self) -> None:
        command = [sys.executable, "-m", "django", "migrate", "--no-input", "--skip-checks"]
        log = self.home / "logs" / "migrate.log"
        with log.open("ab") as output:
            result = subprocess.run(
                command, cwd=CHECKOUT, env=self._environment, check=False,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=_MIGRATE_SECONDS,
            )  # fmt: skip
        if result.returncode:
            raise StackError(f"The database could not be brought up to date: {self._said('migrate')}.")

    def _said(self, name: str) -> str:
        if self._supervisor is None:
            return "it was stopped"
        return f"{self._supervisor.last_line(name).rstrip('.')} (see {self._supervisor.log(name)})"

    def _answers(self) -> bool:
        """One request; it waits in the socket's queue while the server starts."""
        name = self.url.rpartition(":")[0].removeprefix("http://").strip("[]")
        connection = http.client.HTTPConnection(name, self.port, timeout=2.0)
        try:
            connection.request("GET", "/health/live", headers={"Host": f"localhost:{self.port}"})
            # Any answer but an error: ALLOWED_HOSTS may not know the name that is used here.
            return connection.getresponse().status < http.HTTPStatus.INTERNAL_SERVER_ERROR
        except OSError:
            return False
        finally:
            connection.close()

    def _watch_postgres(self) -> None:
        """Its guard restarts the server; this is for a guard that was killed itself."""
        if self._postgres is not None and not self._postgres.guarded():
            with contextlib.suppress(EmbeddedPostgresError):
                self._postgres.start()

    def _web(self) -> Command:
        descriptor = self._listener.fileno() if self._listener is not None else -1
        arguments = [
            "controlplane.asgi:application", "--fd", str(descriptor), "--no-access-log", "--log-level", "warning",
            "--timeout-graceful-shutdown", "3", "--no-server-header",
            # Longer than any pause between two heartbeats: a server that closes a connection just as the next request
            # is on its way makes that request fail.
            "--timeout-keep-alive", "75",
        ]  # fmt: skip
        return Command("web", "uvicorn", arguments, (descriptor,))


def _worker(name: str, queues: str) -> Command:
    arguments = [
        "-A", "workers.app", "worker", "--queues", queues, "--hostname", f"{name}@mailboat", "--pool", "solo",
        "--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel", "WARNING",
    ]  # fmt: skip
    return Command(name, "celery", arguments)


def _scheduler() -> Command:
    # The schedule is static, so nothing has to be remembered between runs.
    arguments = [
        "-A",
        "workers.app",
        "beat",
        "--scheduler",
        "celery.beat:Scheduler",
        "--pidfile",
        "",
        "--loglevel",
        "WARNING",
    ]
    return Command("scheduler", "celery", arguments)
