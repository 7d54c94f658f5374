"""Upkeep of the store: the log is compacted while the island moves on, and what a disk or a memory damages is found by
strong digests and mended without a hand.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from mailboat.checkpoint.files import Checkpoint
from mailboat.digest import measure
from mailboat.durable import remove
from mailboat.errors import DiskFull
from mailboat.island import upkeep
from mailboat.island.background import Pace
from mailboat.island.upkeep import UpkeepOptions
from tests.island.contract_server import ContractServer
from tests.island.fleet import Trainer, held_state, island
from tests.waiting import eventually

QUICK = UpkeepOptions(rate=1e12, start_rate=1e12, check_seconds=0.3)


def marker(store: Path) -> dict[str, Any]:
    """The marker as it lies on the disk."""
    body: dict[str, Any] = json.loads((store / "marker.json").read_bytes())
    return body


def flip(path: Path, at: int) -> None:
    """Another bit on the disk, under the same time of change: nothing but its bytes tells."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def test_a_log_that_grew_too_long_is_compacted(server: ContractServer, tmp_path: Path) -> None:
    store = tmp_path / "store"
    options = UpkeepOptions(rate=1e12, start_rate=1e12, log_entries=3, log_share=9)
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        with island(server, store, poll_seconds=0.2, upkeep=options) as running:
            for number in range(1, 5):
                trainer.step()
                server.wait_for(lambda n=number: server.applied(n))
            eventually(lambda: marker(store)["base"]["version"] == 4)
            eventually(lambda: any("is the base from now on" in line for line in running.lines))
            assert marker(store)["log"] == []
            trainer.step()
            server.wait_for(lambda: server.applied(5))
            assert [entry["version"] for entry in marker(store)["log"]] == [5]
            assert [path.name[:6] for path in (store / "base").iterdir()] == ["000004"]
            assert len(list((store / "log").glob("0*"))) == 1
            assert not (store / "rewrite").exists() or not list((store / "rewrite").iterdir())
        with Checkpoint.open(next((store / "base").iterdir())) as base:
            assert measure(base).digest == trainer.published[4].digest
        # Base and log are the truth: the image is made again from them.
        remove(store / "image")
        with island(server, store, once=True) as again:
            again.join()
        assert any("rebuilt from the store" in line for line in again.lines)
        assert held_state(store) == trainer.state().digest


def test_versions_go_on_while_the_base_is_written(
    server: ContractServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is compacted by bytes: versions that come while a base is written stay in the log behind it."""
    store, may_write = tmp_path / "store", threading.Event()
    may_write.set()

    class Held(Pace):
        """Writes while it may, and one base only: the next one, of what the log then holds, waits for ever."""

        def take(self, count: int) -> None:
            while not may_write.wait(0.01) or marker(store)["base"]["version"] > 0:
                self._stop.check()

    monkeypatch.setattr(upkeep, "Pace", Held)
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        with island(server, store, poll_seconds=0.2, upkeep=UpkeepOptions(log_share=0.01)) as running:
            server.wait_for(lambda: server.applied(0))
            eventually(lambda: any("strong digests of image, base and log agree" in line for line in running.lines))
            may_write.clear()
            trainer.step()
            server.wait_for(lambda: server.applied(1))
            eventually(lambda: list((store / "rewrite").glob(".*.tmp/*.safetensors")))
            for number in (2, 3, 4):
                trainer.step()
                server.wait_for(lambda n=number: server.applied(n))
            assert marker(store)["base"]["version"] == 0
            may_write.set()
            eventually(lambda: marker(store)["base"]["version"] == 1)
        assert [entry["version"] for entry in marker(store)["log"]] == [2, 3, 4]
        with Checkpoint.open(next((store / "base").iterdir())) as base:
            assert measure(base).digest == trainer.published[1].digest
        remove(store / "image")
        monkeypatch.undo()
        with island(server, store, once=True) as again:
            again.join()
        assert held_state(store) == trainer.state().digest


def test_an_island_that_ends_after_each_catch_up_compacts_too(server: ContractServer, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer:
        for number in range(3):
            trainer.step()
            with island(server, store, once=True, upkeep=UpkeepOptions(log_entries=1, log_share=9)) as running:
                running.join()
            assert marker(store)["base"]["version"] == (2 if number == 2 else 0)
        assert held_state(store) == trainer.state().digest


@pytest.mark.parametrize("where", ["base", "log", "image", "base gone", "log gone"])
def test_damage_is_found_and_mended(server: ContractServer, tmp_path: Path, where: str) -> None:
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        trainer.step()
        with island(server, store, poll_seconds=0.2, upkeep=QUICK) as running:
            server.wait_for(lambda: server.applied(1))
            eventually(lambda: any("strong digests of image, base and log agree" in line for line in running.lines))
            place = {
                "base": store / "base",
                "log": store / "log",
                "image": store / "image",
            }[where.split(maxsplit=1)[0]]
            if where.endswith("gone"):
                remove(next(path for path in place.iterdir() if path.name != "documents"))
            else:
                pattern = "model.safetensors" if where == "image" else "0*/[mp]*.*[sp]"
                flip(next(place.glob(pattern)), 450)
            damaged = server.wait_for(lambda: next((b for b in server.beats if b["reason"]), None))
            assert where.split(maxsplit=1)[0] in damaged["reason"] and damaged["phase"] == "idle"
            assert (damaged["version"], damaged["digest"]) == (1, trainer.published[1].digest)
            server.wait_for(lambda: server.beats[-1]["reason"] == "" and server.beats[-1]["phase"] == "idle")
            assert held_state(store) == trainer.published[1].digest
            trainer.step()
            server.wait_for(lambda: server.applied(2))
        remove(store / "image")
        with island(server, store, once=True) as again:
            again.join()
        assert any("rebuilt from the store" in line for line in again.lines)
        assert held_state(store) == trainer.state().digest
    assert [report["route"][0] for report in server.reports].count("anchor 0") == 1, "nothing was fetched again"


def test_everything_damaged_at_once_is_seeded_anew(server: ContractServer, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        trainer.step()
        with island(server, store, poll_seconds=0.2, upkeep=QUICK):
            server.wait_for(lambda: server.applied(1))
            for path in (next((store / "base").glob("0*/model.safetensors")), store / "image" / "model.safetensors"):
                flip(path, 450)
            reports = len(server.reports)
            server.wait_for(lambda: len(server.reports) > reports)
            assert server.reports[-1]["route"] == ["anchor 0", "patch 0-1"], server.reports
        assert held_state(store) == trainer.state().digest


def test_a09_no_room_for_a_new_base_is_said_and_tried_again(
    server: ContractServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    monkeypatch.setattr(upkeep, "RETRY_SECONDS", 0.2)

    def full(_folder: Path, needed: int, what: str) -> None:
        raise DiskFull(f"{what} needs {needed:,} bytes, and none are free.")

    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        with island(server, store, poll_seconds=0.2, upkeep=UpkeepOptions(rate=1e12, log_entries=0)):
            with monkeypatch.context() as patched:
                patched.setattr(upkeep, "require_space", full)
                trainer.step()
                server.wait_for(lambda: server.applied(1))
                beat = server.wait_for(lambda: next((b for b in server.beats if "bytes" in b["reason"]), None))
                assert (beat["version"], beat["phase"]) == (1, "idle"), "it goes on with the log that it has"
                trainer.step()
                server.wait_for(lambda: server.applied(2))
            eventually(lambda: marker(store)["base"]["version"] == 2)
            server.wait_for(lambda: server.beats[-1]["reason"] == "")
