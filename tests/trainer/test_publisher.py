"""Publishing: what is committed, what is refused, and what a repeated or interrupted publish does."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mailboat.checkpoint.files import Checkpoint
from mailboat.checkpoint.source import ArraySource
from mailboat.checkpoint.writing import write_checkpoint
from mailboat.digest import measure
from mailboat.durable import remove
from mailboat.errors import CheckpointError, Conflict, InventoryMismatch, StoreError, Unreachable
from mailboat.patch import PatchFile
from mailboat.trainer import Publisher, PublishFailed, copy
from tests.island.contract_server import PROJECT, RUN, ContractServer, Fault
from tests.island.fleet import Trainer, held_state, island
from tests.waiting import PATIENCE

COMMIT = f"POST runs/{RUN}/versions"


def tensors(seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Some arrays."""
    random = np.random.default_rng(seed)
    return {
        "a": random.standard_normal((30, 7)).astype(np.float32),
        "b": random.integers(-100, 100, (5,), np.int8),
        "scalar": np.array(3.5, np.float64),
        "empty": np.zeros((0, 4), np.float16),
    }


def publisher(server: ContractServer, state: Path | None = None, patience: float = 300.0) -> Publisher:
    """A publisher of the run."""
    return Publisher(server.address, PROJECT, RUN, "publisher", state_dir=state, patience=patience)


def test_first_version_is_an_anchor_of_the_exact_bytes(server: ContractServer, tmp_path: Path) -> None:
    with publisher(server) as trainer:
        version = trainer.publish(tensors(), side_files={"config.json": b"{}", "sub/x.txt": b"x"})
    assert (version.number, version.patch_bytes, version.changed) == (0, None, None)
    anchor = server.versions[0].anchor
    assert anchor is not None
    assert sorted(file["path"] for file in anchor) == ["config.json", "model.safetensors", "sub/x.txt"]
    for file in anchor:
        path = tmp_path / "anchor" / file["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(server.blobs[file["sha256"]])
    with Checkpoint.open(tmp_path / "anchor") as checkpoint:
        assert measure(checkpoint).digest == version.digest == server.versions[0].manifest.state


def test_lone_file_is_a_folder_of_one_file(server: ContractServer, tmp_path: Path) -> None:
    write_checkpoint(ArraySource(tensors()), tmp_path / "weights.safetensors")
    with publisher(server) as trainer:
        version = trainer.publish_checkpoint(tmp_path / "weights.safetensors")
    with Checkpoint.open(tmp_path / "weights.safetensors") as checkpoint:
        assert measure(checkpoint).digest == version.digest
    anchor = server.versions[0].anchor
    assert anchor is not None
    assert [file["path"] for file in anchor] == ["model.safetensors"]


def test_shards_keep_their_layout_on_every_island(server: ContractServer, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    weights = tensors()
    shards = {"model-00001-of-00002.safetensors": ["a"], "model-00002-of-00002.safetensors": ["b", "empty", "scalar"]}

    def write() -> None:
        for shard, names in shards.items():
            save_file({name: weights[name] for name in names}, folder / shard)
        weight_map = {name: shard for shard, names in shards.items() for name in names}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    with publisher(server) as trainer:
        write()
        trainer.publish_checkpoint(folder)
        weights["a"][3] += 1
        write()
        version = trainer.publish_checkpoint(folder)
    with island(server, tmp_path / "store", once=True, export=tmp_path / "export") as running:
        running.join()
    assert held_state(tmp_path / "store") == version.digest
    for name in (*shards, "model.safetensors.index.json"):
        assert (tmp_path / "export" / "current" / name).read_bytes() == (folder / name).read_bytes()


def test_a_patch_is_encoded_for_what_the_server_says(server: ContractServer, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    bits = random.integers(0, 1 << 16, (400, 64), np.uint16)
    found = []
    with publisher(server) as trainer:
        trainer.publish({"a": bits.view(np.float16)})
        for said in ({}, {"encode_next": "speed"}, {"encode_next": "size"}, {"encode_next": "a way to come"}):
            server.run_says = said
            bits.reshape(-1)[random.choice(bits.size, bits.size // 100, replace=False)] ^= 1
            version = trainer.publish({"a": bits.view(np.float16)})
            patch = server.versions[version.number].manifest.patch
            assert patch is not None
            path = tmp_path / "part"
            path.write_bytes(server.blobs[patch.parts[0].sha256])
            with PatchFile.open(path) as part:
                found.append(",".join(part.codecs))
    assert found == ["contextual", "positional", "contextual", "contextual"]


def test_patches_start_from_the_last_ready_version(server: ContractServer, tmp_path: Path) -> None:
    verdicts = {2: ("failed", "a part was damaged")}
    server.verdict = lambda manifest: verdicts.get(manifest.number, ("ready", ""))
    weights = tensors()
    with publisher(server) as trainer:
        trainer.publish(weights)
        weights["a"][0, 0] += 1
        one = trainer.publish(weights)
        weights["a"][1, 1] += 1
        with pytest.raises(PublishFailed, match="a part was damaged"):
            trainer.publish(weights)
        weights["b"][2] += 1
        three = trainer.publish(weights)
    assert three.number == 3, "a failed version keeps its number"
    parent = server.versions[3].manifest.parent
    assert parent is not None
    assert (parent.number, parent.state) == (1, one.digest)
    assert three.changed == 2
    with island(server, tmp_path / "store", once=True) as running:
        running.join()
    assert held_state(tmp_path / "store") == three.digest == measure(ArraySource(weights)).digest


def test_failed_first_version_is_followed_by_another_anchor(server: ContractServer) -> None:
    verdicts = {0: ("failed", "no")}
    server.verdict = lambda manifest: verdicts.get(manifest.number, ("ready", ""))
    with publisher(server) as trainer:
        with pytest.raises(PublishFailed):
            trainer.publish(tensors())
        version = trainer.publish(tensors(1))
    assert (version.number, version.patch_bytes) == (1, None)
    assert server.versions[1].manifest.parent is None


def test_no_wait_returns_and_the_next_publish_waits(server: ContractServer) -> None:
    weights = tensors()
    with publisher(server) as trainer:
        trainer.publish(weights)
        server.verdict = lambda _manifest: ("validating", "")
        weights["a"][0] += 1
        one = trainer.publish(weights, wait=False)
        assert server.versions[1].state == "validating"
        with pytest.raises(Unreachable):
            one.wait_ready(0.1)

        def release() -> None:
            server.verdict = lambda _manifest: ("ready", "")
            server.versions[1].state = "ready"

        weights["a"][1] += 1
        timer = threading.Timer(0.3, release)
        timer.start()
        two = trainer.publish(weights)
        timer.join()
        parent = server.versions[2].manifest.parent
        assert parent is not None and parent.number == 1
        assert two.changed == 7
        one.wait_ready(PATIENCE)


def test_a02_unchanged_state_is_an_explicit_empty_version(server: ContractServer) -> None:
    with publisher(server) as trainer:
        first = trainer.publish(tensors())
        second = trainer.publish(tensors())
    assert (second.number, second.digest, second.changed) == (1, first.digest, 0)
    assert second.patch_bytes is not None and 0 < second.patch_bytes < 2000


@pytest.mark.parametrize("kind", ["drop", "refuse"])
def test_a03_lost_answer_gives_the_same_version(server: ContractServer, kind: str) -> None:
    with publisher(server) as trainer:
        trainer.publish(tensors())
        server.faults = [Fault(COMMIT, kind, times=2)]
        trainer._api.sleep = lambda _seconds: None
        version = trainer.publish(tensors(1), step=7)
    assert version.number == 1
    assert sorted(server.versions) == [0, 1]


def test_a03_publish_again_after_giving_up_gives_the_same_version(server: ContractServer) -> None:
    with publisher(server, patience=0) as trainer:
        trainer._api.sleep = lambda _seconds: None
        trainer.publish(tensors())
        server.faults = [Fault(COMMIT, "drop", times=6)]
        with pytest.raises(Unreachable):
            trainer.publish(tensors(1), step=7)
        again = trainer.publish(tensors(1), step=7)
        assert again.number == 1
        assert sorted(server.versions) == [0, 1]
        assert trainer.publish(tensors(1), step=8).number == 2, "another step is another version"


def test_a03_commit_that_never_arrived_leaves_no_gap(server: ContractServer) -> None:
    with publisher(server, patience=0) as trainer:
        trainer._api.sleep = lambda _seconds: None
        trainer.publish(tensors())
        server.faults = [Fault(COMMIT, "refuse", times=6)]
        with pytest.raises(Unreachable):
            trainer.publish(tensors(1))
        assert trainer.publish(tensors(2)).number == 1


def test_publish_bears_a_restart_of_the_control_plane(server: ContractServer, caplog: pytest.LogCaptureFixture) -> None:
    refused: list[float] = []
    with ExitStack() as serves, publisher(server) as trainer:
        trainer.publish(tensors())
        address = server._http.server_address
        server._http.shutdown()
        server._http.server_close()
        trainer._api.close()
        server._http.socket = socket.socket()
        server._http.server_address = address
        server._http.server_bind()  # nobody listens yet, so connections are refused

        def sleep(seconds: float) -> None:
            refused.append(seconds)
            if len(refused) == 20:
                server._http.server_activate()
                serves.enter_context(server.serving())

        trainer._api.sleep = sleep
        version = trainer.publish(tensors(1))
    assert (version.number, len(refused), sorted(server.versions)) == (1, 20, [0, 1])
    said = [record for record in caplog.records if record.getMessage().startswith("waiting for the control plane: ")]
    assert len(said) == 1


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    "call", [f"GET runs/{RUN}/versions/1", COMMIT, f"POST runs/{RUN}/blobs", f"PATCH runs/{RUN}/blobs/.*"]
)
def test_publish_bears_a_dozen_refusals(server: ContractServer, call: str, status: int) -> None:
    pauses: list[float] = []
    with publisher(server) as trainer:
        trainer.publish(tensors())
        trainer._api.sleep = pauses.append
        server.faults = [Fault(call, "status", status, times=12)]
        assert trainer.publish(tensors(1)).number == 1
    assert len(pauses) == 12


def test_a19_race_for_a_number_has_one_winner(server: ContractServer) -> None:
    with publisher(server) as first, publisher(server) as second:
        first.publish(tensors())
        second.publish(tensors())
        raced = []

        def race(call: str) -> None:
            if call == COMMIT and not raced:
                raced.append(call)
                first.publish(tensors(1))

        server.on_call = race
        with pytest.raises(Conflict):
            second.publish(tensors(2))
        assert sorted(server.versions) == [0, 1, 2]
        assert second.publish(tensors(2)).number == 3


@pytest.mark.parametrize("kept", [True, False])
def test_restart_goes_on_from_the_last_ready_version(server: ContractServer, tmp_path: Path, kept: bool) -> None:
    state = tmp_path / "state"
    weights = tensors()
    with publisher(server, state) as trainer:
        trainer.publish(weights)
        weights["a"][0] += 1
        trainer.publish(weights, wait=False)  # committed, but the copy did not follow
    if not kept:
        state = tmp_path / "another"
    weights["a"][1] += 1
    with publisher(server, state) as trainer:
        version = trainer.publish(weights)
    assert (version.number, version.changed) == (2, 7)
    anchors = [call for call in server.calls if "/blobs/" in call and call.startswith("GET")]
    assert anchors
    with island(server, tmp_path / "store", once=True) as running:
        running.join()
    assert held_state(tmp_path / "store") == version.digest


def test_damaged_copy_is_fetched_again(server: ContractServer, tmp_path: Path) -> None:
    with publisher(server, tmp_path / "state") as trainer:
        trainer.publish(tensors())
    shard = tmp_path / "state" / "image" / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-3] + b"\1\2\3")
    with publisher(server, tmp_path / "state") as trainer:
        assert trainer.publish(tensors()).changed == 0


def test_damaged_downloads_are_tried_again_like_lost_ones(
    server: ContractServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with publisher(server, tmp_path / "state") as trainer:
        trainer.publish(tensors())
    remove(tmp_path / "state" / "image")
    monkeypatch.setattr(copy, "pause_before", lambda _attempt: 0.0)
    server.faults = [Fault("GET .*/blobs/.*", "flip", 3, times=7)]
    with publisher(server, tmp_path / "state") as trainer:
        assert trainer.publish(tensors()).changed == 0
    assert not any(fault.times for fault in server.faults)


def test_two_publishers_can_not_share_a_folder(server: ContractServer, tmp_path: Path) -> None:
    with publisher(server, tmp_path), pytest.raises(StoreError, match="Another publisher"):
        publisher(server, tmp_path)


def test_temporary_copy_is_removed(server: ContractServer) -> None:
    with publisher(server) as trainer:
        trainer.publish(tensors())
        folder = trainer._copy.folder(0)
        assert folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()


def test_a25_other_tensors_are_refused_with_their_names(server: ContractServer) -> None:
    with publisher(server) as trainer:
        trainer.publish(tensors())
        for change in ("missing", "extra", "renamed", "dtype", "shape"):
            other = tensors()
            match change:
                case "missing":
                    del other["b"]
                case "extra":
                    other["c"] = np.zeros(3)
                case "renamed":
                    other["B"] = other.pop("b")
                case "dtype":
                    other["b"] = other["b"].view(np.uint8)
                case "shape":
                    other["b"] = other["b"].reshape(1, 5)
            with pytest.raises(InventoryMismatch) as refused:
                trainer.publish(other)
            assert {"b", "c"} & set(refused.value.names), change
        assert sorted(server.versions) == [0]
        assert trainer.publish(tensors()).number == 1


def test_side_files_are_kept_changed_and_removed(server: ContractServer) -> None:
    with publisher(server) as trainer:
        trainer.publish(tensors(), side_files={"config.json": b"{}", "notes.txt": b"one"})
        kept = trainer.publish(tensors(1))
        changed = trainer.publish(tensors(1), side_files={"config.json": b"{}", "notes.txt": b"two"})
        removed = trainer.publish(tensors(1), side_files={"config.json": b"{}"})
    assert [file.path for file in server.versions[kept.number].manifest.side_files] == ["config.json", "notes.txt"]
    assert len({kept.digest, changed.digest, removed.digest}) == 3
    assert [file.path for file in server.versions[removed.number].manifest.side_files] == ["config.json"]


def test_nothing_to_publish_is_said(server: ContractServer) -> None:
    with publisher(server) as trainer, pytest.raises(CheckpointError):
        trainer.publish({})
    with publisher(server) as trainer, pytest.raises(CheckpointError):
        trainer.publish({"a": [1, 2, 3]})


def test_checkpoints_and_islands_agree(server: ContractServer, tmp_path: Path) -> None:
    with Trainer(server, tmp_path) as trainer:
        for _ in range(3):
            trainer.step()
        with island(server, tmp_path / "store", once=True) as running:
            running.join()
        assert held_state(tmp_path / "store") == trainer.state().digest
