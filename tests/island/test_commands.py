"""The commands as people type them: exit status, one sentence, clean stops."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mailboat.checkpoint.files import Checkpoint
from mailboat.digest import measure
from tests.island.contract_server import PROJECT, RUN, ContractServer, Fault, Reply
from tests.island.fleet import Trainer, held_state, start_process
from tests.waiting import PATIENCE, eventually


def mailboat(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command."""
    command = [sys.executable, "-m", "mailboat.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_publish_and_island_run(server: ContractServer, tmp_path: Path) -> None:
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        expected = trainer.state().digest
    options = ["--server", server.address, "--project", PROJECT]
    checkpoint = str(tmp_path / "checkpoint")
    done = mailboat("publish", checkpoint, *options, "--run", "voyage", "--token", "t", "--step", "4")
    assert done.returncode == 0, done.stderr
    number, digest, *_ = done.stdout.split()
    assert (number, digest) == ("1", expected)
    assert server.versions[1].manifest.step == 4
    store = tmp_path / "store"
    places = ["--store", str(store), "--image", str(store / "image"), "--export", str(tmp_path / "export")]
    done = mailboat("island", "run", *options, *places, "--token", "once", "--once", "--link-mbit", "100")
    assert done.returncode == 0, done.stderr
    assert "version 1" in done.stderr and "verified" in done.stderr
    assert held_state(store) == expected
    with Checkpoint.open(tmp_path / "export" / "current") as exported:
        assert measure(exported).digest == expected


def test_publish_says_that_a_run_is_new(server: ContractServer, tmp_path: Path) -> None:
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
    publish = ["publish", str(tmp_path / "checkpoint"), "--server", server.address, "--project", PROJECT, "--run", RUN]
    assert "is new" not in mailboat(*publish, "--token", "t").stderr
    server.versions.clear()
    server.runs.clear()
    server.faults = [Fault(f"POST runs/{RUN}/blobs", "status", 507)]
    done = mailboat(*publish, "--token", "t")
    assert done.returncode == 1, "nothing was uploaded yet"
    assert f"run {RUN} is new: it begins with a whole anchor (" in done.stderr


def test_plan_says_what_it_starts_from_where_an_anchor_is_sooner(
    server: ContractServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    anchor = {"kind": "anchor", "version": 0, "bytes": 5000, "seconds": 0.1}
    plan = {"from": None, "to": 0, "steps": [anchor], "bytes": 5000, "seconds": 0.1}
    monkeypatch.setattr(server, "_plan", lambda **_: Reply(200, json.dumps(plan).encode()))
    with Trainer(server, tmp_path) as trainer:
        for _ in range(3):
            digest = trainer.step().digest
    options = ["--server", server.address, "--project", PROJECT, "--token", "t", "--to", "0"]
    for held, words in (
        (["--from-version", "2"], "from version 2 to version 0 by the anchor of version 0"),
        (["--from", digest], f"from state {digest[:16]} to version 0 by the anchor of version 0"),
        ([], "from nothing to version 0"),
    ):
        assert mailboat("plan", "voyage", *options, *held).stdout.splitlines()[0] == words


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["island", "run"], 2, "--server"), (["island", "run", "--server", "http://x", "--project", "p", "--store", "s",
        "--link-mbit", "0"], 2, "link-mbit"), (["publish"], 2, "PATH"), (["publish", "nowhere", "--server",
        "http://127.0.0.1:9", "--project", "p", "--run", "r", "--token", "t"], 1, "nowhere"), (["publish", ".",
        "--server", "nonsense", "--project", "p", "--run", "r", "--token", "t"], 1, "address"), (["plan", "r",
        "--server", "http://127.0.0.1:9", "--project", "p", "--token", "t", "--codecs", "xor, foo,dense"], 2,
        "unknown names: 'foo'; known are dense, xor, positional, contextual."),
    ],
)  # fmt: skip
def test_bad_usage_and_bad_input(arguments: list[str], status: int, words: str) -> None:
    done = mailboat(*arguments)
    assert done.returncode == status
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    if status == 1:
        assert done.stderr.startswith("mailboat: ")
        assert done.stderr.count("\n") == 1


def test_plan_sends_the_codecs_without_the_spaces_between_them(
    server: ContractServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def plan(*, query: dict[str, str], **_: object) -> Reply:
        asked.append(query["codecs"])
        return Reply(200, json.dumps({"from": 0, "to": 0, "steps": [], "bytes": 0, "seconds": 0.0}).encode())

    monkeypatch.setattr(server, "_plan", plan)
    options = ["--server", server.address, "--project", PROJECT, "--token", "t", "--to", "0"]
    assert mailboat("plan", RUN, *options, "--codecs", "xor, dense").returncode == 0
    assert asked == ["xor,dense"]


def test_used_token_ends_the_command_with_a_sentence(server: ContractServer, tmp_path: Path) -> None:
    server.tokens.clear()
    process = start_process(server, tmp_path / "store")
    assert process.wait(PATIENCE) == 1
    assert (tmp_path / "store.log").read_text() == "mailboat: The server says enrolment_used.\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stops_at_once_while_the_server_is_away(tmp_path: Path, number: int) -> None:
    with ContractServer().serving() as server:
        server.faults = [Fault(".*", "refuse", times=1 << 30)]
        process = start_process(server, tmp_path / "store")
        eventually(lambda: "waiting for the control plane" in (tmp_path / "store.log").read_text())
        process.send_signal(number)
        tries = len(server.calls)
        assert process.wait(PATIENCE) == 0
        assert len(server.calls) <= tries + 1, "it may have begun one at that moment"


def test_help_reads_without_heavy_imports() -> None:
    done = mailboat("island", "run", "--help")
    assert done.returncode == 0
    for option in ("--store", "--base", "--export", "--once", "--link-mbit", "--image", "--token"):
        assert option in done.stdout
