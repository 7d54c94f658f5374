"""Folders that people name: an island never removes what is not its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mailboat.errors import StoreError
from tests.island.contract_server import ContractServer
from tests.island.fleet import RunningIsland, Trainer


def test_an_image_is_not_made_over_other_files(server: ContractServer, tmp_path: Path) -> None:
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
    precious = tmp_path / "precious"
    shutil.copytree(tmp_path / "checkpoint", precious)
    before = {path.name: path.read_bytes() for path in precious.iterdir()}
    store = tmp_path / "store"
    for image in (precious, tmp_path, store, store / "base", store / "log" / "image"):
        running = RunningIsland(server, store, image=image, once=True)
        running.thread.start()
        with pytest.raises(StoreError, match="choose another folder"):
            running.join()
    assert {path.name: path.read_bytes() for path in precious.iterdir()} == before


def test_an_image_that_lost_the_file_it_is_known_by_is_made_again(server: ContractServer, tmp_path: Path) -> None:
    """But only the very folder: another one of its name is somebody else's."""
    image = tmp_path / "image"
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        for _ in range(2):
            running = RunningIsland(server, tmp_path / "store", image=image, once=True)
            running.thread.start()
            running.join()
            (image / ".mailboat-image").unlink()
    image.rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", image)
    running = RunningIsland(server, tmp_path / "store", image=image, once=True)
    running.thread.start()
    with pytest.raises(StoreError, match="choose another folder"):
        running.join()
    assert (image / "model.safetensors").exists()


def test_a_store_is_not_made_inside_a_checkpoint(server: ContractServer, tmp_path: Path) -> None:
    """Its folders would be side files of the checkpoint, hence another state."""
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
    checkpoint = tmp_path / "checkpoint"
    before = sorted(checkpoint.rglob("*"))
    (tmp_path / "link").symlink_to(checkpoint)
    for store in (checkpoint, checkpoint / "store", checkpoint / "a" / "b", tmp_path / "link" / "store"):
        running = RunningIsland(server, store, once=True)
        running.thread.start()
        with pytest.raises(StoreError, match="is a checkpoint and stays as it is"):
            running.join()
        assert sorted(checkpoint.rglob("*")) == before
    (tmp_path / "lone.safetensors").write_bytes(b"")  # a lone file in /tmp, say, is no reason
    running = RunningIsland(server, tmp_path / "store", once=True)
    running.thread.start()
    running.join()


def test_an_export_leaves_folders_that_are_not_its_own(server: ContractServer, tmp_path: Path) -> None:
    export = tmp_path / "export"
    for name in ("v000000", "v000007", "v000008", "v000009"):
        (export / name).mkdir(parents=True)
        (export / name / "model.safetensors").write_bytes(b"a trainer's own")
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        running = RunningIsland(server, tmp_path / "store", export=export, once=True)
        running.thread.start()
        running.join()
        assert any("v000000 is not an export" in line for line in running.lines), running.lines
        shutil.rmtree(export / "v000000")
        (export / "current").symlink_to("/somewhere/else")
        trainer.step()
        running = RunningIsland(server, tmp_path / "store", export=export, once=True)
        running.thread.start()
        running.join()
        assert any("not an export's link" in line for line in running.lines), running.lines
        (export / "current").unlink()
        trainer.step()
        running = RunningIsland(server, tmp_path / "store", export=export, once=True)
        running.thread.start()
        running.join()
    assert (export / "current").resolve().name == "v000002"
    assert {"v000007", "v000008", "v000009"} <= {path.name for path in export.iterdir()}
