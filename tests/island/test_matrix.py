"""The matrix: killed at some write, with something damaged or full meanwhile, an island converges by itself, and what
readers see all the time is a whole published version.

`bench/recovery` does the same for long, at random, with worker, web and PostgreSQL.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mailboat.checkpoint.files import Checkpoint
from mailboat.digest import measure
from mailboat.errors import CheckpointError
from tests.island.contract_server import ContractServer, Fault
from tests.island.fleet import Trainer, held_state, island
from tests.island.test_kill import Zygote, copied, zygote
from tests.waiting import PATIENCE

__all__ = ["zygote"]  # a fixture

PLACES = ("base", "log", "incoming", "documents", "marker.json", "intent.json", "image/*.safetensors", "image/.*")


class Reader:
    """Reads the export all the time, as an engine on the same host would."""

    def __init__(self, export: Path, published: set[str]) -> None:
        self.seen: set[str] = set()
        self.export, self.published = export, published
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._done.wait(0.01):
            try:
                with Checkpoint.open((self.export / "current").resolve(strict=True)) as checkpoint:
                    self.seen.add(measure(checkpoint).digest)
            except (OSError, CheckpointError):
                continue  # none yet, or it was let go while it was read: another one is there

    def close(self) -> None:
        """Ends it; everything that it saw had been published."""
        self._done.set()
        self._thread.join(PATIENCE)
        assert self.seen <= self.published


@dataclass
class World:
    """An island's store at version 1 of a run that is at version 3."""

    server: ContractServer
    zygote: Zygote
    template: Path
    store: Path
    export: Path
    expected: str
    writes: int
    reader: Reader

    def run(self, die_at: int | None = None, **order: int) -> int:
        """One start of the island; its exit status."""
        return int(self.zygote.run(self.server, self.store, die_at, "--export", str(self.export), **order)["status"])

    def converges(self, case: str) -> None:
        """The next start ends at the newest version, with its bytes."""
        assert self.run() == 0, f"{case}: {self.zygote.log.read_text()[-2000:]}"
        assert held_state(self.store) == self.expected, case


@pytest.fixture
def world(server: ContractServer, tmp_path: Path, zygote: Zygote) -> Iterator[World]:
    """The store is made once and copied for each case."""
    template, store, export = tmp_path / "template", tmp_path / "store", tmp_path / "export"
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        trainer.step()
        with island(server, template, once=True) as running:
            running.join()
        trainer.step()
        trainer.step()
        reader = Reader(export, {version.digest for version in trainer.published})
        writes = zygote.run(server, copied(template, store), None, "--export", str(export))["writes"]
        yield World(server, zygote, template, store, export, trainer.state().digest, writes, reader)
        reader.close()
        assert reader.seen


def damage(path: Path, how: str, chance: random.Random) -> None:
    """Flips a bit of a file, cuts it short or removes it."""
    size = path.stat().st_size
    if how == "remove":
        path.unlink()
    elif how == "cut":
        os.truncate(path, chance.randrange(max(1, size)))
    elif size:
        data = bytearray(path.read_bytes())
        data[chance.randrange(size)] ^= 1 << chance.randrange(8)
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_a07_a24_killed_and_damaged_on_the_disk(world: World, how: str) -> None:
    chance = random.Random(how)
    for place in PLACES:
        copied(world.template, world.store)
        case = f"{how} {place}"
        assert world.run(chance.randrange(4, world.writes)) in {-signal.SIGKILL, 0}, case  # 0: it had fewer to do
        folder = world.store / ("log/documents" if place == "documents" else place)
        found = folder.parent.glob(folder.name) if "*" in place else [folder, *folder.rglob("*")]
        files = sorted(path for path in found if path.is_file() and not path.is_symlink())
        for path in chance.sample(files, min(2, len(files))):
            damage(path, how, chance)
        if place == "base":  # the image alone would do; without it the base has to
            shutil.rmtree(world.store / "image")
        world.converges(case)


@pytest.mark.parametrize("kind", ["flip", "cut", "short", "stale", "status", "drop"])
def test_a24_killed_and_wrong_bytes_on_the_wire(world: World, kind: str) -> None:
    chance = random.Random(kind)
    for times in (1, 3):
        copied(world.template, world.store)
        at = 503 if kind == "status" else chance.randrange(20, 400)
        world.server.faults = [Fault("GET runs/voyage/(blobs/.*|plan|channels/.*)", kind, at, times=times)]
        assert world.run(chance.randrange(4, world.writes)) in {-signal.SIGKILL, 0}
        world.server.faults = [Fault("GET runs/voyage/blobs/.*", kind, at, times=times)]
        world.converges(f"{kind} {times} times")
        world.server.faults = []


def test_a09_a_disk_that_is_full_at_any_write(world: World) -> None:
    for full_at in range(3, world.writes, 23):
        copied(world.template, world.store)
        shutil.rmtree(world.export, ignore_errors=True)
        world.run(full_at=full_at)  # mostly it goes on by itself once there is room
        world.converges(f"full at write {full_at}")
