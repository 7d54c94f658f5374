"""`mailboat digest` and the front of the command line, as a user meets them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mailboat.checkpoint.files import Checkpoint
from mailboat.digest import measure
from tests.checkpoint.build import folder

ROOT = Path(__file__).resolve().parents[2]


def _run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mailboat.cli", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_digest_prints_the_state_digest_alone(tmp_path: Path) -> None:
    path = folder(tmp_path / "c", {"any.safetensors": {"a": ("U8", [3], b"abc")}}, side={"x": b""}, index=False)
    done = _run("digest", path)
    with Checkpoint.open(path) as checkpoint:
        expected = measure(checkpoint).digest
    assert (done.returncode, done.stdout, done.stderr) == (0, expected + "\n", "")


def test_bad_input_is_one_sentence_and_status_1(tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"hello")
    for path in (tmp_path / "absent", tmp_path / "bad.safetensors", tmp_path):
        done = _run("digest", path)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("mailboat: ")
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["digest"], ["digest", "--nope", "x"], ["nope"], ["digest", "a", "b"]], ids=str)
def test_bad_usage_is_status_2(arguments: list[str]) -> None:
    done = _run(*arguments)
    assert done.returncode == 2
    assert "Usage" in done.stderr


def test_help_names_every_command() -> None:
    done = _run("--help")
    assert done.returncode == 0
    lines = done.stdout.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in lines if not line.startswith("   ")] == [  # the rest wraps
        "digest", "patch", "quantise", "publish", "island", "keys", "plan", "status", "doctor"
    ]  # fmt: skip


def test_importing_the_library_and_the_front_loads_nothing_heavy() -> None:
    code = (
        "import sys, mailboat, mailboat.cli; "
        "print([m for m in ('numpy', 'numba', 'torch', 'django', 'blake3', 'urllib3') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"
