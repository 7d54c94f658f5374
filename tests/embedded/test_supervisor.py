"""Restarts: at once for what had worked, later and later for what keeps ending as it starts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.embedded import supervisor
from controlplane.embedded.supervisor import Command, Supervisor
from tests.waiting import eventually, free_port

CHECKOUT = Path(__file__).resolve().parents[2]
WORKED = 50.0  # seconds; less than what makes earlier crashes forgotten, more than the longest pause
KILLS = 8  # after so many in a row the pause is the longest


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Supervisor]:
    keeper = Supervisor(CHECKOUT, tmp_path / "logs", dict(os.environ))
    keeper.start()
    yield keeper
    keeper.stop()


def test_a_process_that_had_worked_comes_back_at_once_however_often_it_was_killed(
    kept: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, passed = time.monotonic, 0.0
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: real() + passed)
    kept.keep(Command("server", "http.server", [str(free_port()), "--bind", "127.0.0.1"]))
    for number in range(KILLS):
        pid = eventually(lambda: kept.pids().get("server"))
        passed += WORKED
        killed = real()
        os.kill(pid, signal.SIGKILL)
        eventually(lambda old=pid: kept.pids().get("server", old) != old)
        assert kept.crashes("server") == number + 1
    assert real() - killed < supervisor._LONGEST_PAUSE / 2


def test_a_process_that_ends_as_it_starts_is_started_ever_more_rarely(kept: Supervisor) -> None:
    began = time.monotonic()
    kept.keep(Command("broken", "no_such_module", []))
    eventually(lambda: kept.crashes("broken") == 4)
    assert time.monotonic() - began > 0.5 + 1 + 2  # from start to start
    assert "no_such_module" in kept.last_line("broken")
