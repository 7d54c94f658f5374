"""An island follows its channel: seeds, moves, proves, reports."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from blake3 import blake3

from mailboat.errors import StoreError, Unauthorised
from mailboat.island.keys import read_credential, write_credential
from mailboat.island.store import Store
from tests.island.contract_server import ContractServer
from tests.island.fleet import Trainer, held_state, island


def test_island_seeds_from_the_anchor_and_follows(server: ContractServer, tmp_path: Path) -> None:
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        trainer.step()
        with island(server, tmp_path / "store"):
            report = server.wait_for(lambda: server.applied(1))
            assert report["route"] == ["anchor 0", "patch 0-1"]
            assert report["verified"] is True
            assert report["from_version"] is None
            for number in (2, 3):
                version = trainer.step()
                report = server.wait_for(lambda n=number: server.applied(n))
                assert (report["digest"], report["bytes"]) == (version.digest, version.patch_bytes)
                assert report["from_version"] == number - 1
                assert set(report["seconds"]) == {"fetch", "prepare", "commit", "verify", "total"}
            beat = server.wait_for(lambda: next((b for b in server.beats if b["version"] == 3), None))
            assert (beat["digest"], beat["epoch"]) == (version.digest, 1)
        assert held_state(tmp_path / "store") == trainer.state().digest


def test_credential_is_private_and_a_restart_needs_no_token(server: ContractServer, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        with island(server, store, once=True) as first:
            first.join()
        assert (store / "credential.json").stat().st_mode & 0o777 == 0o600
        trainer.step()
        with island(server, store, once=True, token=None) as second:
            second.join()
    assert server.applied(1)
    assert len([call for call in server.calls if call == "POST islands/enrol"]) == 1


def test_a57_a_report_that_a_restore_took_back_is_sent_again(server: ContractServer, tmp_path: Path) -> None:
    """By an island that runs, and by one that was started again: it believes that its report was sent."""
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        trainer.step()
        with island(server, store):
            first = server.wait_for(lambda: server.applied(1))
            with server.changed:
                server.reports.clear()
            assert server.wait_for(lambda: server.applied(1)) == first
        server.reports.clear()
        with island(server, store, token=None):
            assert server.wait_for(lambda: server.applied(1)) == first
            server.beats.clear()
            server.wait_for(lambda: len(server.beats) > 3)
            assert len(server.reports) == 1, "once is enough"


def test_a_control_plane_that_moved_is_followed_without_a_new_token(server: ContractServer, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        with island(server, store, once=True) as first:
            first.join()
        with closing(Store(store)) as opened:
            note = read_credential(opened)
            assert note is not None
            write_credential(opened, note | {"server": "http://127.0.0.1:9"})
        trainer.step()
        with island(server, store, once=True, token=None) as second:
            second.join()
    assert server.applied(1)
    assert len([call for call in server.calls if call == "POST islands/enrol"]) == 1
    assert json.loads((store / "credential.json").read_text())["server"] == note["server"]


TRAINERS = "mb_0123456789abcdef_" + "x" * 43


@pytest.mark.parametrize("token", [None, TRAINERS])
def test_a_damaged_credential_is_said_and_never_sent(server: ContractServer, tmp_path: Path, token: str | None) -> None:
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        with island(server, store, once=True) as first:
            first.join()
        path = store / "credential.json"
        path.write_bytes(path.read_bytes().replace(b'"secret"', b'"sacret"'))
        before = len(server.calls)
        with pytest.raises(StoreError) as raised, island(server, store, once=True, token=token) as damaged:
            damaged.join()
        assert str(path) in str(raised.value) and "register it again" in str(raised.value)
        assert ("enrolment tokens begin with mbe_" in str(raised.value)) == (token is not None)
        assert len(server.calls) == before
        server.tokens.add("again")
        with island(server, store, once=True, token="again") as mended:
            mended.join()
    assert any("is damaged" in line for line in mended.lines)


def test_a_token_that_is_not_for_enrolling_is_told_apart(server: ContractServer, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with pytest.raises(StoreError, match="a trainer's or a person's"), island(server, store, token=TRAINERS) as refused:
        refused.join()
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        with island(server, store, once=True) as first:
            first.join()
        with island(server, store, once=True, token=TRAINERS) as second:
            second.join()


def test_a51_used_token_is_said(server: ContractServer, tmp_path: Path) -> None:
    server.tokens.clear()
    with pytest.raises(Unauthorised), island(server, tmp_path / "store") as refused:
        refused.join()


def test_island_without_token_and_credential_is_told_what_to_do(server: ContractServer, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="--token"), island(server, tmp_path / "store", token=None) as refused:
        refused.join()


def test_two_islands_can_not_share_a_store(server: ContractServer, tmp_path: Path) -> None:
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        with island(server, tmp_path / "store"):
            server.wait_for(lambda: server.applied(0))
            with pytest.raises(StoreError, match="Another process"), island(server, tmp_path / "store") as second:
                second.join()


def test_local_base_saves_the_anchor_and_is_never_written(server: ContractServer, tmp_path: Path) -> None:
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        base = tmp_path / "base"
        (tmp_path / "checkpoint").rename(base)
        before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in base.iterdir()}
        trainer.step()
        with island(server, tmp_path / "store", base=base, once=True) as running:
            running.join()
        report = server.applied(1)
        assert report["route"] == ["local base 0", "patch 0-1"]
        assert report["bytes"] == trainer.published[1].patch_bytes
        assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in base.iterdir()} == before
        # Base and log are the truth: the image can be made again from them.
        trainer.step()
        with island(server, tmp_path / "store", base=base, once=True, image=tmp_path / "other") as again:
            again.join()
        assert server.applied(2)["route"] == ["patch 1-2"]


def test_unknown_local_base_is_left_alone(server: ContractServer, tmp_path: Path) -> None:
    with Trainer(server, tmp_path) as trainer, Trainer(server, tmp_path / "b", seed=9) as stranger:
        trainer.step()
        (tmp_path / "b").mkdir(exist_ok=True)
        from mailboat.checkpoint.writing import write_checkpoint

        write_checkpoint(stranger.source(), tmp_path / "b" / "base")
        with island(server, tmp_path / "store", base=tmp_path / "b" / "base", once=True) as running:
            running.join()
        assert server.applied(0)["route"] == ["anchor 0"]
        assert held_state(tmp_path / "store") == trainer.state().digest


def test_a_base_that_does_not_fit_is_said_once(server: ContractServer, tmp_path: Path) -> None:
    """One flipped bit; the first tries fail, and what is said stays said."""
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        base = tmp_path / "base"
        (tmp_path / "checkpoint").rename(base)
        weights = bytearray((base / "model.safetensors").read_bytes())
        weights[-1] ^= 1
        (base / "model.safetensors").write_bytes(weights)
        trainer.step()
        lost = {file["sha256"]: server.blobs.pop(file["sha256"]) for file in server.versions[0].anchor or []}
        with island(server, tmp_path / "store", base=base) as running:
            server.wait_for(lambda: sum(call.endswith("/plan") for call in server.calls) > 4)
            server.blobs |= lost
            server.wait_for(lambda: server.applied(1))
        said = [line for line in running.lines if str(base) in line]
        assert said == [
            f"the base {base} does not hold the bytes of the anchor of version 0 (model.safetensors differs); "
            "fetching it"
        ]


def test_a_route_of_several_patches_is_one_commit(server: ContractServer, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        with island(server, store, once=True) as running:
            running.join()
        for _ in range(3):
            trainer.step()
        with island(server, store):
            report = server.wait_for(lambda: server.applied(3))
            assert report["route"] == ["patch 0-1", "patch 1-2", "patch 2-3"]
            assert [r["version"] for r in server.reports] == [0, 3], "nothing was shown of the versions between"
        assert held_state(store) == trainer.state().digest
        with island(server, store, image=tmp_path / "rebuilt", once=True) as again:  # the log leads there too
            again.join()
        assert any("version 3  rebuilt" in line for line in again.lines)


def test_empty_version_moves_the_label_without_a_byte(server: ContractServer, tmp_path: Path) -> None:
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        with island(server, tmp_path / "store"):
            server.wait_for(lambda: server.applied(0))
            version = trainer.publish()
            report = server.wait_for(lambda: server.applied(1))
            assert (report["digest"], report["verified"]) == (version.digest, True)
            assert report["bytes"] == 0
            trainer.step()
            server.wait_for(lambda: server.applied(2))
        with island(server, tmp_path / "store", image=tmp_path / "rebuilt", once=True) as again:
            again.join()
        assert any("rebuilt" in line for line in again.lines)


def test_challenge_is_answered_from_the_bytes_held(server: ContractServer, tmp_path: Path) -> None:
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        version = trainer.step()
        nonce = bytes(range(32))
        ranges = [[0, 3, 100], [2, 0, 8], [1, 1358, 2]]
        commands = [
            {"kind": "challenge", "challenge": "c1", "version": 1, "digest": version.digest, "nonce": nonce.hex(),
             "ranges": ranges},
            {"kind": "challenge", "challenge": "c2", "version": 0, "digest": trainer.published[0].digest,
             "nonce": nonce.hex(), "ranges": ranges},
            {"kind": "challenge", "challenge": "c3", "version": 1, "digest": version.digest, "nonce": nonce.hex(),
             "ranges": [[0, 1 << 40, 8]]},
            {"kind": "of a later version"},
        ]  # fmt: skip
        with island(server, tmp_path / "store"):
            server.wait_for(lambda: server.applied(1))
            server.commands = commands
            server.wait_for(lambda: len(server.answers) >= 3)
    hasher = blake3(key=nonce)
    names = sorted(trainer.weights)
    for tensor, offset, length in ranges:
        data = trainer.weights[names[tensor]].tobytes()[offset : offset + length]
        hasher.update(tensor.to_bytes(4, "little") + offset.to_bytes(8, "little") + length.to_bytes(4, "little") + data)
    answered = [a for a in server.answers if "answer" in a]
    assert [a["answer"] for a in answered] == [hasher.hexdigest()]
    assert len([a for a in server.answers if "error" in a]) == 2


def test_disabled_island_holds_still(server: ContractServer, tmp_path: Path) -> None:
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        with island(server, tmp_path / "store", poll_seconds=1) as running:
            server.wait_for(lambda: server.applied(0))
            server.enabled = False
            beats = len(server.beats)
            server.wait_for(lambda: len(server.beats) > beats + 1)
            trainer.step()
            beats = len(server.beats)
            server.wait_for(lambda: len(server.beats) > beats + 3)
            assert server.applied(1) is None
            server.enabled = True
            server.wait_for(lambda: server.applied(1))
            assert any("disabled" in line for line in running.lines)


def test_a22_exports_are_complete_and_the_last_two_are_kept(server: ContractServer, tmp_path: Path) -> None:
    export = tmp_path / "export"
    with Trainer(server, tmp_path) as trainer, island(server, tmp_path / "store", export=export):
        digests = {}
        for number in range(4):
            digests[f"v{number:06d}"] = trainer.step().digest
            server.wait_for(lambda n=number: server.applied(n))
            assert (export / "current").resolve().name == f"v{number:06d}"
        from mailboat.checkpoint.files import Checkpoint
        from mailboat.digest import measure

        folders = sorted(path.name for path in export.iterdir() if not path.is_symlink())
        assert folders == ["v000002", "v000003"]
        for name in folders:
            with Checkpoint.open(export / name) as checkpoint:
                assert measure(checkpoint).digest == digests[name]
        assert json.loads((export / "v000003" / ".mailboat.json").read_text())["version"] == 3
