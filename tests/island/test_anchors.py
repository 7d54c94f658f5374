"""Late joiners and islands that come back: what lies on the host, or elsewhere, is not fetched from the run's store."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mailboat import durable
from mailboat.client import Api
from mailboat.durable import remove
from mailboat.errors import DiskFull
from mailboat.island.anchors import Gathering
from mailboat.island.store import Store
from mailboat.replies import AnchorFile, AnchorStep
from mailboat.transfer import bytes_blob
from tests.island.contract_server import PREFIX, PROJECT, RUN, ContractServer, Fault
from tests.island.fleet import Trainer, held_state, island


def cache_of(checkpoint: Path, place: Path) -> Path:
    """The checkpoint as a Hugging Face cache keeps it: links to read-only blobs; and a file that is not the run's."""
    blobs, snapshot = place / "blobs", place / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in checkpoint.iterdir():
        blob = blobs / bytes_blob(path.read_bytes()).sha256
        shutil.copyfile(path, blob)
        blob.chmod(0o444)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    (snapshot / "LICENSE").write_text("not published")
    for folder in (blobs, snapshot):
        folder.chmod(0o555)
    return snapshot


def everything(place: Path) -> dict[Path, Any]:
    """Bytes, times and targets of all that lies in a folder."""
    return {
        path: (
            path.lstat().st_mtime_ns,
            path.lstat().st_mode,
            path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None,
        )
        for path in place.rglob("*")
    }


def lose_anchor(server: ContractServer, number: int) -> None:
    """The anchor's blobs are not in the run's store."""
    for file in server.versions[number].anchor or []:
        server.blobs.pop(file["sha256"], None)


def test_an_anchor_by_reference_is_read_where_it_lies_and_never_written(server: ContractServer, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        snapshot = cache_of(tmp_path / "checkpoint", tmp_path / "cache")
        before = everything(tmp_path / "cache")
        server.elsewhere[0] = snapshot.as_uri()
        lose_anchor(server, 0)
        trainer.step()
        with island(server, store, once=True) as running:
            running.join()
        report = server.applied(1)
        assert report["route"] == ["anchor 0", "patch 0-1"]
        assert report["bytes"] == trainer.published[1].patch_bytes, "nothing of the anchor travelled"
        base = next((store / "base").iterdir())
        assert all(path.is_symlink() for path in base.iterdir()) and not (base / "LICENSE").exists()
        remove(store / "image")
        trainer.step()
        with island(server, store, once=True) as again:
            again.join()
        assert any("rebuilt from the store" in line for line in again.lines)
        assert held_state(store) == trainer.state().digest
        remove(store)  # nor does it go when the store goes
        assert everything(tmp_path / "cache") == before


def test_an_anchor_by_reference_over_http_is_resumed_and_proven(server: ContractServer, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        server.mirror = {path.name: path.read_bytes() for path in (tmp_path / "checkpoint").iterdir()}
        server.elsewhere[0] = f"{server.address}{PREFIX}mirror"
        lose_anchor(server, 0)
        server.faults = [Fault("GET mirror/model.safetensors", "cut", 1000, times=2)]
        with island(server, store, once=True) as running:
            running.join()
        assert server.applied(0)["bytes"] == sum(len(data) for data in server.mirror.values())
        assert held_state(store) == trainer.state().digest


@pytest.mark.parametrize("uri", ["file:///nowhere/at/all", "wrong", "http"])
def test_a_reference_that_fails_is_left_for_the_blobs(server: ContractServer, tmp_path: Path, uri: str) -> None:
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        if uri == "wrong":
            place = tmp_path / "wrong"
            shutil.copytree(tmp_path / "checkpoint", place)
            with (place / "model.safetensors").open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"\0" if file.read(1) else b"\1")
            uri = place.as_uri()
        server.elsewhere[0] = f"{server.address}{PREFIX}mirror" if uri == "http" else uri
        with island(server, store, once=True) as running:
            running.join()
        assert held_state(store) == trainer.state().digest


def test_a_reference_that_can_not_be_had_means_another_route(server: ContractServer, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer:
        for _ in range(3):
            trainer.step()
        server.versions[2].anchor = server.versions[0].anchor and [
            {"path": "model.safetensors", "sha256": "e" * 64, "size": 77}
        ]
        server.elsewhere[2] = "file:///nowhere"
        good_plan = server.plan

        def plan(origin: int | None, to: int) -> dict[str, Any]:
            if server.calls and "references" not in asked[-1]:
                kept, server.versions[2].anchor = server.versions[2].anchor, None
                try:
                    return good_plan(origin, to)
                finally:
                    server.versions[2].anchor = kept
            return good_plan(origin, to)

        asked: list[dict[str, str]] = []
        answer = server._plan

        def noted(*, query: dict[str, str], **rest: Any) -> Any:
            asked.append(query)
            return answer(query=query, **rest)

        server._plan = noted  # type: ignore[method-assign]
        server.plan = plan  # type: ignore[method-assign]
        with island(server, store, once=True) as running:
            running.join()
        assert server.applied(2)["route"] == ["anchor 0", "patch 0-1", "patch 1-2"]
        assert any("another route is taken" in line for line in running.lines)
        assert held_state(store) == trainer.state().digest


def test_a48_an_island_comes_back_after_its_base_was_collected(server: ContractServer, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        trainer.step()
        with island(server, store, once=True) as running:
            running.join()
        for _ in range(3):
            trainer.step()
        files = [path for path in (tmp_path / "checkpoint").iterdir() if path.is_file()]
        server.versions[4].anchor = [
            {"path": path.name, "sha256": server.put(path.read_bytes()), "size": path.stat().st_size} for path in files
        ]
        for number in range(4):
            gone = server.versions.pop(number)
            for part in gone.manifest.patch.parts if gone.manifest.patch else ():
                server.blobs.pop(part.sha256, None)
        with island(server, store, once=True, token=None) as back:
            back.join()
        assert server.applied(4)["route"] == ["anchor 4"]
        assert held_state(store) == trainer.state().digest
        assert [path.name[:6] for path in (store / "base").iterdir()] == ["000004"], "the old base is not kept"


# -- what lies on the host already


@pytest.fixture
def gathering(server: ContractServer, tmp_path: Path) -> Any:
    """A gathering in an empty store, and an anchor of three files that are blobs of the run."""
    data = {"one.safetensors": b"1" * 4000, "two.safetensors": b"2" * 5000, "config.json": b"{}"}
    for content in data.values():
        server.put(content)
    step = AnchorStep(0, "f" * 64, tuple(AnchorFile(path, bytes_blob(content)) for path, content in data.items()))
    store = Store(tmp_path / "store")
    api = Api(server.address, PROJECT, "secret")
    documents: Any = SimpleNamespace(api=api, run=RUN)

    def gather(*, local: Path | None = None, holds_nothing: bool = True) -> int:
        folder = store.incoming / "base-000000-new"
        place = Gathering(documents, store, folder, local=local, link=None, holds_nothing=holds_nothing, say=print)
        travelled = place.fetch(step)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == data
        return travelled

    yield SimpleNamespace(gather=gather, data=data, store=store, folder=store.incoming / "base-000000-new")
    store.close()
    api.close()


def test_shards_of_an_older_base_are_not_fetched_again(gathering: Any) -> None:
    old = gathering.store.base_folder / "000007-old"
    old.mkdir()
    (old / "another-name.safetensors").write_bytes(gathering.data["one.safetensors"])
    (old / "two.safetensors").write_bytes(b"3" * 5000)  # the right size, other bytes
    assert gathering.gather() == 5002
    assert (gathering.folder / "one.safetensors").samefile(old / "another-name.safetensors"), "it takes no room"
    assert not (gathering.folder / "two.safetensors").samefile(old / "two.safetensors")


def test_files_that_arrived_and_parts_of_files_are_kept(gathering: Any, server: ContractServer) -> None:
    gathering.folder.mkdir()
    (gathering.folder / "one.safetensors").write_bytes(gathering.data["one.safetensors"])
    (gathering.folder / "two.safetensors.part").write_bytes(gathering.data["two.safetensors"][:3000])
    (gathering.folder / "stray.json").write_bytes(b"of another anchor")
    assert gathering.gather() == 2002
    assert gathering.gather() == 0


def test_files_of_a_base_that_is_no_version_are_linked_to(gathering: Any, tmp_path: Path) -> None:
    local = tmp_path / "base"
    local.mkdir()
    (local / "x.safetensors").write_bytes(gathering.data["two.safetensors"])
    before = everything(local)
    assert gathering.gather(local=local) == 4002
    assert (gathering.folder / "two.safetensors").readlink() == local / "x.safetensors"
    assert everything(local) == before


def test_a09_no_room_for_an_anchor_is_said_before_a_byte_is_fetched(
    gathering: Any, server: ContractServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = gathering.store.base_folder / "000007-old"
    old.mkdir()
    (old / "big").write_bytes(b"0" * 9000)

    def usage(_: Any) -> Any:
        return SimpleNamespace(free=12_000 - (9000 if old.exists() else 0))

    monkeypatch.setattr(durable.shutil, "disk_usage", usage)
    with pytest.raises(DiskFull, match=r"version 0 needs 9,002 bytes .* 0 MiB are free"):
        gathering.gather(holds_nothing=False)
    assert not server.calls and old.exists(), "what is held stays"
    assert gathering.gather(holds_nothing=True) == 9002, "where nothing is held, what is of no use makes room"
    assert not old.exists()
