"""The whole control plane as processes: up in time, back after kills, gone without a trace."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from controlplane.embedded import guard
from controlplane.embedded.postgres import database_url, places, remove
from controlplane.embedded.stack import WORKERS, Stack, StackError
from tests.waiting import PATIENCE, eventually, free_port

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("MAILBOAT_", "DATABASE_URL"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def open_home() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="mailboat-test-"))
    folder.chmod(0o711)
    yield folder / "home"
    if (folder / "home").exists():
        remove(folder / "home")
    shutil.rmtree(folder)


@pytest.fixture
def port() -> int:
    return free_port()


def get(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


PROCESSES = len(WORKERS) + 2  # web and scheduler


def processes_of(home: Path) -> list[int]:
    """Every living process that has this home in its environment, and PostgreSQL's."""
    found = guard.servers_of(places(home).data)
    wanted = f"MAILBOAT_HOME={home}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def up(home: Path, port: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "MAILBOAT_HOME": str(home)}
    return subprocess.Popen(
        [sys.executable, "manage.py", "up", "--port", str(port)], cwd=CHECKOUT, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def test_everything_runs_survives_kills_and_leaves_nothing(open_home: Path, port: int) -> None:
    with Stack(open_home, port) as stack:
        stack.wait_ready(PATIENCE)
        assert get(port, "/health/live") == 200
        before = eventually(lambda: len(stack.pids()) == PROCESSES and stack.pids())
        for pid in before.values():
            os.kill(pid, signal.SIGKILL)
        assert get(port, "/health/live") == 200  # the connection waited until the web server was back
        eventually(lambda: len(stack.pids()) == PROCESSES and not set(stack.pids().values()) & set(before.values()))
        count = eventually(lambda: swept(open_home))
        survivors = stack.pids()
        os.kill(int((places(open_home).data / "postmaster.pid").read_text().split()[0]), signal.SIGKILL)
        eventually(lambda: get(port, "/health/ready") == 200)
        eventually(lambda: swept(open_home) > count + 1)
        assert stack.pids() == survivors  # the database came back under them
    assert processes_of(open_home) == []
    with socket.create_server(("127.0.0.1", port)):
        pass


def swept(home: Path) -> int:
    """Sweeps that went from the scheduler over the queue to a worker."""
    try:
        with psycopg.connect(database_url(home)) as connection:
            row = connection.execute(
                "select total_messages - queue_length from pgmq.metrics('housekeeping')"
            ).fetchone()
    except (psycopg.errors.UndefinedTable, psycopg.OperationalError):  # not there yet, or not there now
        return 0
    return int(row[0]) if row else 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_up_ends_with_everything_that_it_started(open_home: Path, port: int, number: signal.Signals) -> None:
    process = up(open_home, port)
    try:
        assert process.stdout is not None
        assert f":{port}" in process.stdout.readline()
        process.send_signal(number)
        process.communicate(timeout=PATIENCE)
        if number != signal.SIGKILL:
            assert process.returncode == 0
        eventually(lambda: processes_of(open_home) == [])
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def test_a_port_in_use_is_said_before_anything_starts(open_home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StackError, match=f"Port {port} is in use"):
            Stack(open_home, port).start()
        assert not open_home.exists()
        process = up(open_home.with_name("other"), port)
        _, said = process.communicate(timeout=PATIENCE)
        assert process.returncode == 1
        assert f"Port {port} is in use" in said
        assert "Traceback" not in said
    remove(open_home.with_name("other"))


def test_a_second_one_in_the_same_home_is_refused(open_home: Path, port: int) -> None:
    open_home.mkdir()
    with (open_home / "up.lock").open("w") as lock:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StackError, match=r"runs in .* already"):
            Stack(open_home, port).start()


def test_a_database_that_can_not_be_reached_is_said(open_home: Path, port: int) -> None:
    url = "postgresql://nobody@127.0.0.1:9/none?connect_timeout=2"
    with pytest.raises(StackError, match="could not be brought up to date"):
        Stack(open_home, port, {"DATABASE_URL": url}).start()
    assert processes_of(open_home) == []
