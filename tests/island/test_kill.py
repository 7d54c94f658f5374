"""Kill the island anywhere: the next start finishes or repeats what was under way, with identical bytes and no manual
step.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mailboat.island.upkeep import UpkeepOptions
from tests.island.contract_server import PROJECT, ContractServer
from tests.island.fleet import Trainer, held_state, island, start_process
from tests.waiting import PATIENCE


class Zygote:
    """The parent of islands that die at a chosen write."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "islands.log"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.island.zygote"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, server: ContractServer, store: Path, die_at: int | None, *extra: str, **order: int) -> dict[str, Any]:
        """An island that catches up once, or dies at its ``die_at``-th write. ``log_entries``: compacts beyond that;
        ``full_at``: the disk is full from that write on, for a while.
        """
        arguments = ["island", "run", "--server", server.address, "--project", PROJECT, "--token", "once", "--once"]
        arguments += ["--store", str(store), "--image", str(store / "image"), *extra]
        assert self.process.stdin and self.process.stdout
        line = {"arguments": arguments, "die_at": die_at, "log": str(self.log), **order}
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def close(self) -> None:
        """Ends the parent."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(PATIENCE)


@pytest.fixture
def zygote(tmp_path: Path) -> Iterator[Zygote]:
    """A parent of islands."""
    parent = Zygote(tmp_path)
    yield parent
    parent.close()


def copied(template: Path, place: Path) -> Path:
    """A fresh copy of a store."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(template, place, symlinks=True)
    return place


@pytest.mark.parametrize("first", [1, 3])
def test_a07_killed_at_every_write_of_a_sync(
    server: ContractServer, tmp_path: Path, zygote: Zygote, first: int
) -> None:
    """Two patches from version 1 to 3; every other write of them is a case, in two parts that run side by side."""
    template, store, export = tmp_path / "template", tmp_path / "store", tmp_path / "export"
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        trainer.step()
        with island(server, template, once=True) as running:
            running.join()
        trainer.step()
        trainer.step()
        expected = trainer.state().digest
    whole = zygote.run(server, copied(template, store), None, "--export", str(export))
    assert whole["status"] == 0 and whole["writes"] > 30
    for die_at in range(first, whole["writes"] + 1, 4):
        shutil.rmtree(export)
        killed = zygote.run(server, copied(template, store), die_at, "--export", str(export))
        assert killed["status"] == -signal.SIGKILL, f"write {die_at}"
        if (export / "current").exists():
            assert (export / "current" / "model.safetensors").exists()
        ended = zygote.run(server, store, None, "--export", str(export))
        assert ended["status"] == 0, f"killed at write {die_at}: {zygote.log.read_text()[-2000:]}"
        assert held_state(store) == expected, f"killed at write {die_at}"
        assert server.applied(3), f"killed at write {die_at}"
        assert not list((store / "incoming").iterdir())
        server.reports.clear()


def test_a07_killed_at_every_few_writes_of_a_seed(server: ContractServer, tmp_path: Path, zygote: Zygote) -> None:
    template, store = tmp_path / "template", tmp_path / "store"
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        with island(server, template, once=True) as running:
            running.join()
        for path in template.iterdir():
            if path.name != "credential.json":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        trainer.step()
        expected = trainer.state().digest
    whole = zygote.run(server, copied(template, store), None)
    assert whole["status"] == 0
    for die_at in range(1, whole["writes"] + 1, 5):
        assert zygote.run(server, copied(template, store), die_at)["status"] == -signal.SIGKILL
        # And killed once more while it recovers.
        zygote.run(server, store, max(1, die_at // 2))
        ended = zygote.run(server, store, None)
        assert ended["status"] == 0, f"killed at write {die_at}: {zygote.log.read_text()[-2000:]}"
        assert held_state(store) == expected


def test_a07_killed_at_every_write_of_a_compaction(server: ContractServer, tmp_path: Path, zygote: Zygote) -> None:
    """And what is left is enough to make the image again, from the old base or the new one."""
    template, store = tmp_path / "template", tmp_path / "store"
    with Trainer(server, tmp_path) as trainer:
        for _ in range(3):
            trainer.step()
        with island(server, template, once=True, upkeep=UpkeepOptions(log_share=9)) as running:
            running.join()
        expected = trainer.state().digest
    moved = zygote.run(server, copied(template, store), None)
    whole = zygote.run(server, copied(template, store), None, log_entries=0)
    assert whole["status"] == 0 and whole["writes"] > moved["writes"] + 8
    assert [path.name[:6] for path in (store / "base").iterdir()] == ["000002"]
    for die_at in range(moved["writes"] + 1, whole["writes"] + 1, 5):
        killed = zygote.run(server, copied(template, store), die_at, log_entries=0)
        assert killed["status"] == -signal.SIGKILL, f"write {die_at}"
        shutil.rmtree(store / "image")
        ended = zygote.run(server, store, None)
        assert ended["status"] == 0, f"killed at write {die_at}: {zygote.log.read_text()[-2000:]}"
        assert held_state(store) == expected, f"killed at write {die_at}"
        assert "anchor" not in zygote.log.read_text(), "rebuilt, not fetched"
        assert not (store / "rewrite").exists()


def test_a07_real_process_killed_at_random_moments(server: ContractServer, tmp_path: Path) -> None:
    moments = random.Random(3)
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        for _ in range(4):
            process = start_process(server, store)
            beats = len(server.beats)
            server.wait_for(lambda n=beats: len(server.beats) > n)
            trainer.step()
            time.sleep(moments.uniform(0.0, 0.3))  # the moment of the kill is the point of this test
            process.kill()
            process.wait()
        process = start_process(server, store)
        last = len(trainer.published) - 1
        beats = len(server.beats)
        server.wait_for(lambda: any((b["version"], b["phase"]) == (last, "idle") for b in server.beats[beats:]))
        server.wait_for(lambda: server.waiting)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert server.waiting, "nor does it wait for the answer to its poll"
        assert held_state(store) == trainer.state().digest
    assert "stopped" in (tmp_path / "store.log").read_text()
