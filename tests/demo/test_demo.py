"""The demo as a user runs it: real processes, real optimiser steps, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.waiting import PATIENCE, eventually, free_port

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 400


@pytest.fixture
def demo_home(tmp_path: Path) -> Iterator[Path]:
    """A home whose every process must be gone when the test ends."""
    yield tmp_path
    running = lambda: [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]  # noqa: E731
    eventually(lambda: not any(str(tmp_path) in command for command in running()))


def demo(home: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the demo with its state under `home`, on its own embedded database."""
    environment = {k: v for k, v in os.environ.items() if k not in {"DATABASE_URL", "DJANGO_SETTINGS_MODULE"}}
    environment["MAILBOAT_HOME"] = str(home)
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "scripts.demonstration", *arguments],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def test_versions_travel_bit_for_bit_and_a_second_start_continues(demo_home: Path) -> None:
    out = demo_home / "result.json"
    first = demo(demo_home, "--versions", "1", "--islands", "2", "--port", str(free_port()), "--json", str(out))
    said, _ = first.communicate(timeout=DEADLINE)
    assert first.returncode == 0, said
    result = json.loads(out.read_text())
    assert [v["number"] for v in result["versions"]] == [0, 1]
    anchor, patched = result["versions"]
    assert anchor["patch_bytes"] is None and anchor["identical"]
    assert patched["identical"] and 0 < patched["patch_bytes"] < patched["full_bytes"] / 20
    assert 0 < patched["changed"] < patched["elements"] == 22565376
    assert patched["full_bytes"] == 2 * patched["elements"]
    assert {i["digest"] for i in result["islands"]} == {patched["digest"]}
    assert all(i["identical"] and i["version"] == 1 for i in result["islands"]) and len(result["islands"]) == 2
    assert [j["kind"] for j in result["jobs"]] == ["replay", "verify", "verify"]
    assert {j["state"] for j in result["jobs"]} == {"succeeded"}

    second = demo(demo_home, "--versions", "1", "--islands", "2", "--port", str(free_port()), "--json", str(out))
    said, _ = second.communicate(timeout=DEADLINE)
    assert second.returncode == 0, said
    assert [v["number"] for v in json.loads(out.read_text())["versions"]] == [2]


def test_a_port_in_use_is_said_in_one_sentence(demo_home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = demo(demo_home, "--versions", "1", "--port", str(taken.getsockname()[1]))
        said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert said.count("\n") == 1 and "port" in said and "in use" in said


@pytest.mark.long
def test_ctrl_c_ends_an_endless_demo_and_every_process(demo_home: Path) -> None:
    process = demo(demo_home, "--port", str(free_port()))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("version") or " step " in line:
            break
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, rest
    assert "Traceback" not in rest
