"""The embedded server: private, without root, gone with its last user, back after every kill."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from controlplane.embedded import guard
from controlplane.embedded.places import SOCKET_NAME
from controlplane.embedded.postgres import (
    EmbeddedPostgres,
    EmbeddedPostgresError,
    database_url,
    places,
    remove,
    socket_dir,
)
from tests.waiting import PATIENCE, eventually

ROOT = os.geteuid() == 0
NOBODY = 65534
CHECKOUT = Path(__file__).resolve().parents[2]
only_root = pytest.mark.skipif(not ROOT, reason="needs root to become somebody else")


@pytest.fixture
def open_home() -> Iterator[Path]:
    """A home that other accounts may pass (pytest's own temporary folders are closed)."""
    folder = Path(tempfile.mkdtemp(prefix="mailboat-test-"))
    folder.chmod(0o711)
    home = folder / "home"
    yield home
    if home.exists():
        remove(home)
    shutil.rmtree(folder)


@pytest.fixture
def server(open_home: Path) -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(open_home) as running:
        yield running


def ask(home: Path, sql: str) -> object:
    with psycopg.connect(database_url(home)) as connection:
        row = connection.execute(sql).fetchone()
        return row and row[0]


def main_process(home: Path) -> int:
    return int((places(home).data / "postmaster.pid").read_text().splitlines()[0])


def guard_process(home: Path) -> int:
    pid = guard.parent_of(main_process(home))
    assert pid is not None
    return pid


def gone(home: Path) -> bool:
    return not guard.servers_of(places(home).data)


def use(home: Path, *account: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.embedded.use_server", str(home), *map(str, account)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT, env=environment,
    )  # fmt: skip


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(word + "\n")
    process.stdin.flush()


def test_it_is_private_and_keeps_its_data(open_home: Path) -> None:
    with EmbeddedPostgres(open_home):
        assert ask(open_home, "show listen_addresses") == ""
        assert str(ask(open_home, "show server_version")).startswith("18.")
        assert ask(open_home, "show server_encoding") == "UTF8"
        pid = main_process(open_home)
        assert Path(f"/proc/{pid}").stat().st_uid != 0
        for folder in (places(open_home).folder, places(open_home).data, socket_dir(open_home)):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        with psycopg.connect(database_url(open_home)) as connection:
            connection.execute("create table kept as select 42 as value")
    assert gone(open_home)
    with EmbeddedPostgres(open_home):
        assert ask(open_home, "select value from kept") == 42


def test_a_second_user_finds_it_running_and_the_last_one_stops_it(server: EmbeddedPostgres) -> None:
    other = use(server.home)
    assert first_line(other).startswith("ready")
    pid = main_process(server.home)
    server.stop()
    assert main_process(server.home) == pid
    assert server.running()
    tell(other, "stop")
    assert other.wait(PATIENCE) == 0
    assert gone(server.home)


@pytest.mark.parametrize("end", ["leave", "interrupt", "kill"])
def test_it_ends_with_its_only_user_however_that_ends(open_home: Path, end: str) -> None:
    user = use(open_home)
    assert first_line(user).startswith("ready")
    if end == "leave":
        tell(user, "leave")
    else:
        user.send_signal(signal.SIGINT if end == "interrupt" else signal.SIGKILL)
    user.wait(PATIENCE)
    eventually(lambda: gone(open_home))
    with EmbeddedPostgres(open_home):
        assert ask(open_home, "select 1") == 1


def test_it_comes_back_by_itself_after_its_main_process_was_killed(server: EmbeddedPostgres) -> None:
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("create table kept as select 7 as value")
        before = main_process(server.home)
        os.kill(before, signal.SIGKILL)
    eventually(lambda: server.running() and main_process(server.home) != before)
    assert ask(server.home, "select value from kept") == 7


def test_orphans_of_a_killed_server_are_ended_before_the_next_start(server: EmbeddedPostgres) -> None:
    busy = psycopg.connect(server.url)
    busy.execute("create table lost as select 1")  # an open transaction keeps its backend
    main, keeper = main_process(server.home), guard_process(server.home)
    os.kill(keeper, signal.SIGSTOP)  # so that it can't start the server again
    os.kill(main, signal.SIGKILL)
    os.kill(keeper, signal.SIGKILL)
    server.start()
    assert ask(server.home, "select to_regclass('lost')") is None
    busy.close()


def test_it_starts_after_its_guard_was_killed(server: EmbeddedPostgres) -> None:
    os.kill(guard_process(server.home), signal.SIGKILL)
    server.start()
    assert ask(server.home, "select 1") == 1


def test_a_stale_lock_file_with_the_number_of_a_living_program_is_no_obstacle(open_home: Path) -> None:
    with EmbeddedPostgres(open_home):
        text = (places(open_home).data / "postmaster.pid").read_text()
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        (places(open_home).data / "postmaster.pid").write_text(text.replace(text.split("\n")[0], str(stranger.pid), 1))
        with EmbeddedPostgres(open_home):
            assert ask(open_home, "select 1") == 1
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_long_path_gets_a_short_private_folder_for_the_socket(open_home: Path) -> None:
    home = open_home / ("long" * 25)
    try:
        with EmbeddedPostgres(home):
            folder = socket_dir(home)
            assert len(os.fsencode(folder / SOCKET_NAME)) <= 107
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert ask(home, "select 1") == 1
        with EmbeddedPostgres(home):
            assert socket_dir(home) == folder
    finally:
        remove(home)
    assert not folder.exists()


@only_root
def test_root_behind_a_closed_folder_says_where_the_data_lies(open_home: Path) -> None:
    open_home.mkdir(mode=0o700)
    said: list[str] = []
    with EmbeddedPostgres(open_home, say=said.append):
        data = Path(str(ask(open_home, "show data_directory")))
    assert not data.is_relative_to(open_home)
    assert len(said) == 1
    assert str(open_home) in said[0]
    assert str(data.parent) in said[0]
    assert stat.S_IMODE(open_home.stat().st_mode) == 0o700
    remove(open_home)
    assert not data.exists()


@only_root
@pytest.mark.parametrize("uid", [NOBODY, 12345])
def test_other_accounts_do_not_get_in(server: EmbeddedPostgres, uid: int) -> None:
    connect = f"import psycopg, psycopg_binary, os; os.setgid({uid}); os.setuid({uid}); psycopg.connect({server.url!r})"
    result = subprocess.run([sys.executable, "-c", connect], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "Permission denied" in result.stderr or "authentication failed" in result.stderr


@only_root
def test_a_normal_user_runs_it_as_itself(open_home: Path) -> None:
    open_home.mkdir()
    os.chown(open_home, NOBODY, NOBODY)
    user = use(open_home, NOBODY, NOBODY)
    assert first_line(user).startswith("ready")
    pid = main_process(open_home)
    assert Path(f"/proc/{pid}").stat().st_uid == NOBODY
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: main_process(open_home) != pid)
    user.kill()
    user.wait()
    eventually(lambda: gone(open_home))
    again = use(open_home, NOBODY, NOBODY)
    assert first_line(again).startswith("ready")
    tell(again, "stop")
    assert again.wait(PATIENCE) == 0
    assert gone(open_home)


def test_a_lock_of_another_program_is_said_clearly(open_home: Path) -> None:
    with EmbeddedPostgres(open_home):
        pass
    descriptor = os.open(places(open_home).folder / "start.lock", os.O_RDWR)
    try:
        assert guard.try_lock(descriptor, exclusive=True)
        with pytest.raises(EmbeddedPostgresError, match=r"Another program keeps .*start.lock locked"):
            EmbeddedPostgres(open_home).start(timeout=0.3)
    finally:
        os.close(descriptor)


def test_a_cluster_of_another_version_is_refused(open_home: Path) -> None:
    with EmbeddedPostgres(open_home):
        pass
    (places(open_home).data / "PG_VERSION").write_text("16\n")
    with pytest.raises(EmbeddedPostgresError, match="written by PostgreSQL 16"):
        EmbeddedPostgres(open_home).start()


def test_a_server_that_refuses_to_start_is_quoted(open_home: Path) -> None:
    with EmbeddedPostgres(open_home):
        pass
    with (places(open_home).data / "postgresql.auto.conf").open("a") as file:
        file.write("max_connections = nonsense\nno_such_setting = 1\n")
    with pytest.raises(EmbeddedPostgresError, match=r"did not start: .*"):
        EmbeddedPostgres(open_home).start()


@only_root
def test_a_full_disk_is_said_clearly(open_home: Path) -> None:
    open_home.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(open_home)], check=False).returncode:
        pytest.skip("may not mount a small disk here")
    try:
        with pytest.raises(EmbeddedPostgresError, match="is full: free some space"):
            EmbeddedPostgres(open_home).start()
    finally:
        subprocess.run(["umount", str(open_home)], check=True)
