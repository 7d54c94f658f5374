"""Images in shared memory: one island each, and none is left behind when its store is gone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mailboat.island import shared_memory
from mailboat.island.shared_memory import SharedPlace
from tests.island.contract_server import ContractServer
from tests.island.fleet import Trainer, island
from tests.waiting import PATIENCE


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", folder)
    return folder


def stored(path: Path) -> Path:
    """A store's folder."""
    path.mkdir()
    return path


def test_image_outlives_the_process_but_not_the_store(tmp_path: Path) -> None:
    one = stored(tmp_path / "one")
    place = SharedPlace(one)
    assert place.folder is not None
    place.folder.mkdir()
    place.close()
    again = SharedPlace(one)
    assert again.folder == place.folder and again.folder.is_dir()
    shutil.rmtree(one)
    other = SharedPlace(stored(tmp_path / "two"))
    assert place.folder.is_dir(), "it is locked: its island may live in another container"
    again.close()
    other.close()
    SharedPlace(tmp_path / "two").close()
    assert not place.folder.exists()


def test_place_of_a_living_island_is_not_shared(tmp_path: Path) -> None:
    one = stored(tmp_path / "one")
    first, second = SharedPlace(one), SharedPlace(one)
    assert first.folder is not None
    assert second.folder is None and not second.fits(1)
    first.close()
    second.close()


def test_no_shared_memory_and_no_room(tmp_path: Path, memory: Path) -> None:
    place = SharedPlace(stored(tmp_path / "one"))
    assert place.fits(1) and not place.fits(1 << 60)
    place.close()
    shutil.rmtree(memory)
    assert SharedPlace(tmp_path / "one").folder is None


def test_island_uses_it(server: ContractServer, tmp_path: Path, memory: Path) -> None:
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        with island(server, tmp_path / "store", image=None, once=True) as running:
            running.join()
        assert list(memory.glob("mailboat-*/*/model.safetensors"))
        assert next(memory.iterdir()).stat().st_mode & 0o077 == 0
        trainer.step()
        with island(server, tmp_path / "store", image=None, once=True) as again:
            again.join()
        assert any("held and verified" in line for line in again.lines)
        assert not any("rebuilt" in line for line in again.lines)


def test_islands_on_one_host_do_not_collide(server: ContractServer, tmp_path: Path, memory: Path) -> None:
    """Stores of one name in different folders; each has an image of its own, and one may go without the other."""
    server.tokens = {"one", "two"}
    stores = [tmp_path / name / "store" for name in ("one", "two")]
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        with (
            island(server, stores[0], image=None, token="one", poll_seconds=0.2) as first,
            island(server, stores[1], image=None, token="two", poll_seconds=0.2) as second,
        ):
            server.wait_for(lambda: len(server.reports) == 2)
            images = list(memory.glob("mailboat-*/*/model.safetensors"))
            assert len(images) == 2
            trainer.step()
            server.wait_for(lambda: len(server.reports) == 4)
            first.stop.set()
            first.thread.join(PATIENCE)
            trainer.step()
            server.wait_for(lambda: server.applied(2))
            assert second.thread.is_alive()
    assert len({image.parent for image in images}) == 2
