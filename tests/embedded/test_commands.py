"""`manage.py` as people type it: one sentence for what is wrong, no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE, free_port

CHECKOUT = Path(__file__).resolve().parents[2]


def manage(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    return subprocess.run(
        [sys.executable, "manage.py", *arguments], cwd=CHECKOUT, env={**os.environ, **environment},
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("port", ["0", "-1", "65536", "99999", "http"])
def test_a_port_that_is_none(tmp_path: Path, port: str) -> None:
    done = manage("up", f"--port={port}", MAILBOAT_HOME=str(tmp_path))
    assert done.returncode == 2
    assert f"'{port}' is not a port" in done.stderr
    assert "Traceback" not in done.stderr


def test_roles_are_listed_as_they_are_typed(tmp_path: Path) -> None:
    done = manage("create_token", "--project=p", "--role=king", "--name=n", MAILBOAT_HOME=str(tmp_path))
    assert done.returncode == 2
    assert "choose from 'publisher', 'operator', 'viewer'" in done.stderr


def test_settings_that_are_wrong_are_one_sentence(tmp_path: Path) -> None:
    done = manage("create_project", "p", MAILBOAT_HOME=str(tmp_path), DATABASE_URL="nonsense")
    assert done.returncode == 1
    assert done.stderr.startswith("manage.py: DATABASE_URL must read")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_is_heard_where_the_shell_has_it_ignored(tmp_path: Path) -> None:
    """As `manage.py up &` in a script."""
    environment = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
    process = subprocess.Popen(
        [sys.executable, "-c", _DEAF, sys.executable, "manage.py", "up", "--port", str(free_port())], cwd=CHECKOUT,
        env={**environment, "MAILBOAT_HOME": str(tmp_path / "home")}, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert "Mailboat is up" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
        assert "Stopped" in process.stdout.read()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(PATIENCE)


_DEAF = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
