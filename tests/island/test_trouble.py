"""What goes wrong on the way: the island stays on its version, says why, and mends itself in the same process."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mailboat import transfer
from mailboat.checkpoint.files import Checkpoint
from mailboat.digest import measure
from mailboat.durable import remove
from mailboat.errors import DiskFull, Unreachable
from mailboat.island import sync
from mailboat.island.export import Export
from mailboat.island.holding import Holding
from mailboat.manifest import BlobRef, PatchRef
from tests.island.contract_server import ContractServer, Fault
from tests.island.fleet import Trainer, held_state, island, start_process
from tests.waiting import PATIENCE


def failed(server: ContractServer) -> list[dict[str, Any]]:
    """The failures that were reported."""
    return [report for report in server.reports if report["outcome"] == "failed"]


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends an island's process."""
    process.terminate()
    process.wait(PATIENCE)


def part_of(server: ContractServer, number: int) -> str:
    """The digest of a version's patch part."""
    patch = server.versions[number].manifest.patch
    assert patch is not None
    return patch.parts[0].sha256


def test_a01_failure_is_reported_and_caught_up_later(server: ContractServer, tmp_path: Path) -> None:
    with Trainer(server, tmp_path) as trainer, island(server, tmp_path / "store"):
        first = trainer.step()
        server.wait_for(lambda: server.applied(0))
        server.faults = [Fault("GET .*/plan", "status", 422, times=3)]
        trainer.step()
        report = server.wait_for(lambda: failed(server) and failed(server)[-1])
        assert (report["version"], report["verified"], report["from_version"]) == (1, False, 0)
        assert report["error"]
        beat = server.wait_for(lambda: next((b for b in server.beats if b["phase"] == "error"), None))
        assert (beat["version"], beat["digest"], beat["reason"]) == (0, first.digest, report["error"])
        server.wait_for(lambda: server.applied(1))
        server.wait_for(lambda: server.beats[-1]["phase"] == "idle" and server.beats[-1]["reason"] == "")


def test_a05_wrong_patch_bytes_do_not_make_later_ones_fail(server: ContractServer, tmp_path: Path) -> None:
    with Trainer(server, tmp_path) as trainer, island(server, tmp_path / "store"):
        trainer.step()
        server.wait_for(lambda: server.applied(0))
        server.faults = [Fault("GET runs/voyage/blobs/.*", "flip", 30, times=7)]
        trainer.step()
        server.wait_for(lambda: failed(server))
        server.wait_for(lambda: server.applied(1))
        trainer.step()
        server.wait_for(lambda: server.applied(2))


def test_a05_damaged_downloads_do_not_cost_the_image(server: ContractServer, tmp_path: Path) -> None:
    with Trainer(server, tmp_path) as trainer, island(server, tmp_path / "store") as running:
        trainer.step()
        server.wait_for(lambda: server.applied(0))
        server.faults = [Fault("GET runs/voyage/blobs/.*", "flip", 30, times=1 << 30)]
        before = len([call for call in server.calls if "GET runs/voyage/blobs" in call])
        trainer.step()
        # Each try asks twice, so four have failed: before the third the image would have been rebuilt.
        server.wait_for(lambda: len([call for call in server.calls if "GET runs/voyage/blobs" in call]) >= before + 8)
        server.faults = []
        server.wait_for(lambda: server.applied(1))
    assert not [line for line in running.lines if "rebuilt" in line]


def test_a05_patch_that_can_not_be_decoded_heals_in_the_same_process(server: ContractServer, tmp_path: Path) -> None:
    with Trainer(server, tmp_path) as trainer, island(server, tmp_path / "store"):
        trainer.step()
        server.wait_for(lambda: server.applied(0))
        good_plan = server.plan
        garbage = os.urandom(500)
        server.put(garbage)

        def bad_plan(origin: int | None, to: int) -> dict[str, Any]:
            plan = good_plan(origin, to)
            bad = {"sha256": BlobRef(server.put(garbage), 500).sha256, "size": 500}
            plan["steps"] = [s | {"parts": [bad]} if s["kind"] == "patch" else s for s in plan["steps"]]
            return plan

        server.plan = bad_plan  # type: ignore[method-assign]
        version = trainer.step()
        server.wait_for(lambda: failed(server))
        beats = len(server.beats)
        server.wait_for(lambda: len(server.beats) > beats + 3)
        assert held_state(tmp_path / "store") == trainer.published[0].digest
        server.plan = good_plan  # type: ignore[method-assign]
        server.wait_for(lambda: server.applied(1))
        assert held_state(tmp_path / "store") == version.digest
        trainer.step()
        server.wait_for(lambda: server.applied(2))


def test_a05_damaged_image_is_rebuilt_in_the_same_process(server: ContractServer, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer, island(server, store):
        trainer.step()
        trainer.step()
        server.wait_for(lambda: server.applied(1))
        shard = store / "image" / "model.safetensors"
        with shard.open("r+b") as file:  # a bit flips in every tensor
            file.seek(400)
            rest = file.read()
            file.seek(400)
            file.write(bytes(byte ^ 1 for byte in rest))
        version = trainer.step()
        server.wait_for(lambda: server.applied(2))
        assert held_state(store) == version.digest


def test_a06_patch_is_never_applied_to_another_base(server: ContractServer, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer, island(server, store):
        trainer.step()
        server.wait_for(lambda: server.applied(0))
        good_plan = server.plan

        def skipping(origin: int | None, to: int) -> dict[str, Any]:
            plan = good_plan(origin, to)
            if origin == 0 and to == 2:  # leaves version 1 out
                last = plan["steps"][-1]
                plan["steps"] = [last | {"from": 0}]
            return plan

        server.plan = skipping  # type: ignore[method-assign]
        before = (store / "image" / "model.safetensors").read_bytes()
        server.enabled = False
        beats = len(server.beats)
        server.wait_for(lambda: len(server.beats) > beats + 1)
        trainer.step()
        trainer.step()
        server.enabled = True
        report = server.wait_for(lambda: failed(server) and failed(server)[-1])
        assert "starts from the state" in report["error"]
        assert (store / "image" / "model.safetensors").read_bytes() == before
        server.plan = good_plan  # type: ignore[method-assign]
        server.wait_for(lambda: server.applied(2))
        assert held_state(store) == trainer.state().digest


def test_a12_plan_with_a_hole_is_refused(server: ContractServer, tmp_path: Path) -> None:
    with Trainer(server, tmp_path) as trainer:
        for _ in range(3):
            trainer.step()
        good_plan = server.plan

        def holed(origin: int | None, to: int) -> dict[str, Any]:
            plan = good_plan(origin, to)
            plan["steps"] = [plan["steps"][0], *plan["steps"][2:]]
            return plan

        server.plan = holed  # type: ignore[method-assign]
        with island(server, tmp_path / "store"):
            report = server.wait_for(lambda: failed(server) and failed(server)[-1])
            assert "hole" in report["error"]
            server.plan = good_plan  # type: ignore[method-assign]
            server.wait_for(lambda: server.applied(2))


def test_a11_store_of_another_run_is_not_taken_for_current(server: ContractServer, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        trainer.step()
        with island(server, store, once=True) as running:
            running.join()
    with ContractServer().serving() as other, Trainer(other, tmp_path / "other", seed=5) as stranger:
        stranger.step()
        version = stranger.step()
        with island(other, store, once=True) as running:
            running.join()
        report = other.applied(1)
        assert report["route"] == ["anchor 0", "patch 0-1"]
        assert held_state(store) == version.digest


def test_a11_same_numbers_in_another_epoch_are_compared(server: ContractServer, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        trainer.step()
        with island(server, store):
            server.wait_for(lambda: server.applied(1))
            # The same number and bytes, in another epoch: the label has to move.
            kept = server.versions[1]
            manifest = replace(kept.manifest, epoch=2)
            server.add(manifest, kept.anchor)
            server.wait_for(lambda: any(b["epoch"] == 2 for b in server.beats))


def test_a17_target_equals_current_is_no_work(server: ContractServer, tmp_path: Path) -> None:
    with Trainer(server, tmp_path) as trainer, island(server, tmp_path / "store"):
        trainer.step()
        server.wait_for(lambda: server.applied(0))
        calls = len(server.calls)
        server.point(0)
        server.wait_for(lambda: server.calls[calls:].count("GET runs/voyage/channels/latest/head") >= 2)
        assert not [call for call in server.calls[calls:] if "plan" in call or "blobs" in call]
        assert len(server.reports) == 1


def test_a17_target_that_does_not_exist_changes_nothing(server: ContractServer, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer, island(server, store):
        version = trainer.step()
        server.wait_for(lambda: server.applied(0))
        server.point(0, version=7, manifest="0" * 64, state="1" * 64)
        server.wait_for(lambda: failed(server))
        assert held_state(store) == version.digest
        trainer.step()
        server.wait_for(lambda: server.applied(1))


def test_a17_newer_head_while_preparing_is_taken_once(
    server: ContractServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Trainer(server, tmp_path) as trainer, island(server, tmp_path / "store"):
        trainer.step()
        server.wait_for(lambda: server.applied(0))
        prepare, pending = Holding.prepare, [1, 1]

        def slow(holding: Holding, *arguments: Any) -> Any:
            prepared = prepare(holding, *arguments)
            if pending:
                pending.pop()
                trainer.step()  # the trainer is faster than the island, twice
            return prepared

        monkeypatch.setattr(Holding, "prepare", slow)
        trainer.step()
        server.wait_for(lambda: server.applied(3))
        assert [r["version"] for r in server.reports if r["outcome"] == "applied"] == [0, 2, 3]


def test_a20_commit_is_the_only_truth(server: ContractServer, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer, island(server, store):
        version = trainer.step()
        server.wait_for(lambda: server.applied(0))
        # A head whose manifest is not visible yet: no patch is taken for a checkpoint.
        hidden: dict[str, bytes] = {}

        def hide(call: str) -> None:
            manifest = server.versions[1].manifest.sha256 if 1 in server.versions else None
            if manifest in server.blobs and not hidden:
                hidden[manifest] = server.blobs.pop(manifest)

        server.on_call = hide
        trainer.step()
        server.wait_for(lambda: failed(server))
        assert held_state(store) == version.digest
        server.blobs.update(hidden)
        server.wait_for(lambda: server.applied(1))


def test_a21_partial_anchor_is_refused(server: ContractServer, tmp_path: Path) -> None:
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        anchor = server.versions[0].anchor
        assert anchor is not None
        server.versions[0].anchor = [file for file in anchor if file["path"] != "config.json"]
        with island(server, tmp_path / "store", export=tmp_path / "export"):
            server.wait_for(lambda: failed(server))
            assert not (tmp_path / "store" / "image").exists()
            assert not (tmp_path / "export").exists()
            server.versions[0].anchor = anchor
            server.wait_for(lambda: server.applied(0))


def test_manifest_with_other_parts_needs_the_strong_digests(server: ContractServer, tmp_path: Path) -> None:
    """A route by bytes that the publisher did not name is taken when the result is right."""
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        trainer.step()
        kept = server.versions[1]
        patch = kept.manifest.patch
        assert patch is not None
        named = PatchRef((BlobRef("f" * 64, 1),), patch.changed)
        good_plan = server.plan
        server.add(replace(kept.manifest, patch=named), None)
        parts = [{"sha256": part.sha256, "size": part.size} for part in patch.parts]

        def merged(origin: int | None, to: int) -> dict[str, Any]:
            plan = good_plan(origin, to)
            return plan | {"steps": [s | {"parts": parts} if s["kind"] == "patch" else s for s in plan["steps"]]}

        server.plan = merged  # type: ignore[method-assign]
        with island(server, tmp_path / "store"):
            server.wait_for(lambda: server.applied(1))
        assert held_state(tmp_path / "store") == trainer.state().digest


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"expires": int(time.time()) - 4000, "issued": int(time.time()) - 9000}, "expired"),
        ({"issued": int(time.time()) + 90_000, "expires": int(time.time()) + 99_000}, "future"),
        ({"serial": 1}, "serial 1"),
        ({"run": "00000000-0000-0000-0000-000000000000"}, "another run"),
        ({"channel": "stable"}, "another run or channel"),
    ],
)
def test_a53_heads_that_must_not_be_followed(
    server: ContractServer, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer:
        for _ in range(3):
            trainer.step()
        with island(server, store):
            server.wait_for(lambda: server.applied(2))
            server.point(1, **changes)
            beat = server.wait_for(lambda: next((b for b in server.beats if words in b["reason"]), None))
            assert (beat["version"], beat["phase"]) == (2, "error")
            assert held_state(store) == trainer.state().digest
            server.point(2, serial=50)
            server.wait_for(lambda: server.beats[-1]["phase"] == "idle" and server.beats[-1]["reason"] == "")


@pytest.mark.parametrize(("off", "words"), [(2 * 3600, "expired"), (-2 * 3600, "in the future")])
def test_a46_an_island_whose_clock_is_wrong_keeps_serving_and_says_so(
    server: ContractServer, tmp_path: Path, off: int, words: str
) -> None:
    """A process whose clock is hours off follows no head, and holds and serves what it has until the clock is right."""
    store, export = tmp_path / "store", tmp_path / "export"
    process = start_process(server, store, "--export", str(export))
    try:
        with Trainer(server, tmp_path) as trainer:
            held = trainer.step()
            server.wait_for(lambda: server.applied(0))
            stop(process)
            trainer.step()
            server.beats.clear()
            process = start_process(server, store, "--export", str(export), off=off)
            beat = server.wait_for(lambda: next((b for b in server.beats if words in b["reason"]), None))
            assert (beat["version"], beat["phase"]) == (0, "error") and "clock" in beat["reason"]
            assert abs(beat["time"] - time.time() - off) < 60, "from which the control plane computes the skew"
            assert held_state(store) == held.digest
            with Checkpoint.open(export / "current") as current:
                assert measure(current).digest == held.digest
            assert process.poll() is None and server.applied(1) is None
            stop(process)
            process = start_process(server, store, off=off // 60)  # within what is tolerated
            server.wait_for(lambda: server.applied(1))
            assert held_state(store) == trainer.state().digest
    finally:
        stop(process)


def test_a53_old_head_is_refused_after_a_restart(server: ContractServer, tmp_path: Path) -> None:
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        old = server.point(0)
        trainer.step()
        with island(server, tmp_path / "store", once=True) as running:
            running.join()
        server.head = old
        with island(server, tmp_path / "store") as running:
            server.wait_for(lambda: any("older than" in b["reason"] for b in server.beats))
            assert server.beats[-1]["version"] == 1


def test_rollback_is_a_higher_serial_on_an_older_version(server: ContractServer, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer, island(server, store, export=tmp_path / "export"):
        for number in range(3):
            trainer.step()
            server.wait_for(lambda n=number: server.applied(n))
        reports = len(server.reports)
        server.point(1)
        server.wait_for(lambda: len(server.reports) > reports)
        assert server.reports[-1]["version"] == 1
        assert held_state(store) == trainer.published[1].digest
        assert (tmp_path / "export" / "current").resolve().name == "v000001"
        server.point(2)
        server.wait_for(lambda: len(server.reports) > reports + 1)
        assert held_state(store) == trainer.published[2].digest


def test_a45_control_plane_that_goes_away_is_waited_for(tmp_path: Path) -> None:
    server = ContractServer()
    with server.serving(), Trainer(server, tmp_path) as trainer:
        trainer.step()
        with island(server, tmp_path / "store"):
            server.wait_for(lambda: server.applied(0))
            server.faults = [
                Fault("(?!POST runs|PATCH|GET runs/voyage$|GET runs/voyage/versions).*", "refuse", times=12)
            ]
            trainer.step()
            server.wait_for(lambda: server.applied(1))


def test_once_gives_up_with_a_sentence(tmp_path: Path) -> None:
    server = ContractServer()
    with server.serving(), Trainer(server, tmp_path) as trainer:
        trainer.step()
        server.faults = [Fault("GET .*/head", "refuse", times=99)]
        with pytest.raises(Unreachable), island(server, tmp_path / "store", once=True) as running:
            running.join()


def test_a09_once_ends_on_a_full_disk(server: ContractServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise DiskFull("The disk of the store is full; free some space there.")

    monkeypatch.setattr(transfer, "_fetch", full)
    monkeypatch.setattr(sync, "pause_before", lambda _attempt: 0.0)
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        with pytest.raises(DiskFull), island(server, tmp_path / "store", once=True) as running:
            running.join()
    assert sum("full" in line for line in running.lines) == 1, "said once"


def test_a09_full_disk_while_downloading_keeps_the_old_version(
    server: ContractServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer, island(server, store):
        version = trainer.step()
        server.wait_for(lambda: server.applied(0))

        def full(*_: Any, **__: Any) -> Any:
            raise DiskFull("The disk is full.") from OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(transfer, "_fetch", full)
            trainer.step()
            report = server.wait_for(lambda: failed(server) and failed(server)[-1])
            assert "full" in report["error"]
            assert held_state(store) == version.digest
        server.wait_for(lambda: server.applied(1))


def test_a09_full_disk_of_an_export_does_not_hold_the_island_up(
    server: ContractServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise DiskFull("The disk of the export is full.")

    monkeypatch.setattr(Export, "write", full)
    with Trainer(server, tmp_path) as trainer, island(server, tmp_path / "store", export=tmp_path / "e") as running:
        trainer.step()
        server.wait_for(lambda: server.applied(0))
        assert any("export" in line and "full" in line for line in running.lines)


def test_base_that_vanished_is_fetched_again(server: ContractServer, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        trainer.step()
        with island(server, store, once=True) as running:
            running.join()
        remove(store / "base")
        remove(store / "image")
        with island(server, store, once=True) as running:
            running.join()
        assert held_state(store) == trainer.state().digest


@pytest.mark.parametrize("damage", [b"", b"{", b'{"format": "mailboat-marker-1"}', b"\xff" * 100])
def test_damaged_marker_means_a_new_seed(server: ContractServer, tmp_path: Path, damage: bytes) -> None:
    store = tmp_path / "store"
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        trainer.step()
        with island(server, store, once=True) as running:
            running.join()
        (store / "marker.json").write_bytes(damage)
        with island(server, store, once=True) as running:
            running.join()
        assert held_state(store) == trainer.state().digest


def test_lost_report_is_sent_again(server: ContractServer, tmp_path: Path) -> None:
    with Trainer(server, tmp_path) as trainer:
        trainer.step()
        server.faults = [Fault("POST islands/.*/syncs", "status", 500, times=1)]
        with island(server, tmp_path / "store"):
            server.wait_for(lambda: server.applied(0))
