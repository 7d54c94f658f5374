"""Trainer, control plane, workers and islands together: the real server on a real socket, the real runner for jobs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mailboat.checkpoint.source import ArraySource
from mailboat.client import Api
from mailboat.digest import measure
from mailboat.errors import Conflict, InventoryMismatch, NotFound, Unauthorised
from mailboat.manifest import Manifest
from mailboat.trainer import Publisher
from tests.island.fleet import held_state, island
from tests.waiting import PATIENCE, eventually

JSON = {"Content-Type": "application/json"}
RUNNING: list[threading.Thread] = []


def work_at_once(job_id: str, _kind: str) -> None:
    """Stands where the broker is: a worker of its own for each job, as a thread."""

    def work() -> None:
        from django.db import connections

        from workers import runner

        try:
            runner.run(job_id)
        finally:
            connections.close_all()

    thread = threading.Thread(target=work, daemon=True)
    RUNNING.append(thread)
    thread.start()


class Harbour:
    """A project on the real server, with tokens for everybody."""

    def __init__(self, address: str) -> None:
        from controlplane.accounts import services as accounts
        from controlplane.registry import services as registry

        self.server = SimpleNamespace(address=address, changed=threading.Condition(), released=False)
        self.project = registry.create_project("harbour", actor="test")
        tokens = {
            role: accounts.create_token(self.project, role, role, actor="test")[1] for role in ("publisher", "operator")
        }
        self.publisher_token = tokens["publisher"]
        self.operator = Api(address, "harbour", tokens["operator"])
        self.operator.create_run("voyage")

    def publisher(self, state: Path | None = None) -> Publisher:
        """A publisher of the run."""
        return Publisher(self.server.address, "harbour", "voyage", self.publisher_token, state_dir=state)

    def enrol(self, name: str) -> str:
        """A one-time token."""
        return str(self.operator.create_enrolment_token("voyage", name)["token"])

    def at(self, name: str) -> int | None:
        """The version that an island has proven, by the fleet's word."""
        rows = {row["name"]: row for row in self.operator.fleet()["islands"]}
        version: int | None = rows[name]["version"] if name in rows else None
        return version

    def finished(self, kind: str, **params: Any) -> Any:
        """A job's end."""
        job = self.operator.create_job(kind, **params)
        return eventually(lambda: (row := self.operator.job(str(job["id"])))["finished_at"] and row)


@pytest.fixture
def harbour(settings: Any, server: str) -> Iterator[Harbour]:
    """A project on the real server."""
    settings.MAILBOAT_JOB_SENDER = "tests.together.test_real_server.work_at_once"
    settings.MAILBOAT_HEARTBEAT_SECONDS = 0.3
    yield Harbour(server)
    for thread in RUNNING:
        thread.join(PATIENCE)
    RUNNING.clear()


def weights(seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Some arrays."""
    random = np.random.default_rng(seed)
    return {"a": random.standard_normal((200, 64)).astype(np.float32), "b": random.integers(0, 99, (77,), np.int16)}


def test_versions_reach_islands_and_are_proven(harbour: Harbour, tmp_path: Path) -> None:
    arrays = weights()
    config = {"config.json": b"{}"}
    one, two = tmp_path / "one", tmp_path / "two"
    with harbour.publisher() as trainer, island(harbour.server, one, token=harbour.enrol("skerry"), poll_seconds=1):
        trainer.publish(arrays, step=0, side_files=config)
        eventually(lambda: harbour.at("skerry") == 0)
        arrays["a"][::7, 3] += 1
        version = trainer.publish(arrays, step=1)
        assert version.patch_bytes is not None and version.patch_bytes < version.full_bytes / 10
        eventually(lambda: harbour.at("skerry") == 1)
        # A late joiner gets there by anchor and patch; an empty version moves labels only.
        with island(harbour.server, two, token=harbour.enrol("holm"), export=tmp_path / "export", poll_seconds=1):
            eventually(lambda: harbour.at("holm") == 1)
            trainer.publish(arrays, step=2)
            for name in ("skerry", "holm"):
                eventually(lambda n=name: harbour.at(n) == 2)
            expected = measure(ArraySource(arrays, side_files=config)).digest
            assert held_state(one) == held_state(two) == expected
            assert harbour.finished("replay", run="voyage", version=2)["state"] == "succeeded"
            rows = {row["name"]: row["id"] for row in harbour.operator.fleet()["islands"]}
            for name in ("skerry", "holm"):
                job = harbour.finished("verify", island=rows[name])
                assert job["state"] == "succeeded", job
    # Without token and without network needs beyond the head, the island comes back where it was.
    arrays["b"][5] += 1
    with harbour.publisher() as restarted:
        assert restarted.publish(arrays).changed == 1
    with island(harbour.server, one, token=None, once=True) as again:
        again.join()
    assert harbour.at("skerry") == 3
    assert held_state(one) == measure(ArraySource(arrays, side_files=config)).digest


def test_an_island_that_was_removed_comes_back_on_its_store_with_a_new_token(harbour: Harbour, tmp_path: Path) -> None:
    arrays, store = weights(), tmp_path / "store"
    with harbour.publisher() as trainer:
        trainer.publish(arrays, step=0)
        with island(harbour.server, store, token=harbour.enrol("skerry"), once=True) as first:
            first.join()
        (row,) = harbour.operator.fleet()["islands"]
        place = f"islands/{row['id']}"
        reason = json.dumps({"reason": "test"}).encode()
        harbour.operator.request("POST", f"{place}/revoke", body=reason, headers=JSON)
        with pytest.raises(Unauthorised), island(harbour.server, store, token=harbour.enrol("holm"), once=True) as held:
            held.join()
        assert "has this key" in " ".join(held.lines), "it is not removed yet"
        harbour.operator.request("DELETE", place)
        arrays["a"][3, 3] += 1
        trainer.publish(arrays, step=1)
    with island(harbour.server, store, token=harbour.enrol("skerry"), once=True) as back:
        back.join()
    assert harbour.at("skerry") == 1
    assert any(line.startswith("version 0  held and verified") for line in back.lines), back.lines


def test_a03_a19_commits_are_idempotent_and_races_have_one_winner(harbour: Harbour) -> None:
    with harbour.publisher() as first, harbour.publisher() as second:
        first.publish(weights())
        second.publish(weights())
        send, raced = second._send, []

        def slow(*arguments: Any) -> Any:
            if not raced:
                raced.append(first.publish(weights(3)))
            return send(*arguments)

        second._send = slow  # type: ignore[method-assign]
        with pytest.raises(Conflict):
            second.publish(weights(4))
        assert second.publish(weights(4)).number == 3


def test_a25_other_tensors_are_refused(harbour: Harbour) -> None:
    with harbour.publisher() as trainer:
        trainer.publish(weights())
        with pytest.raises(InventoryMismatch):
            trainer.publish({"a": weights()["a"]})
        assert trainer.publish(weights()).number == 1


def test_a15_first_version_of_an_epoch_is_the_exact_bytes(harbour: Harbour, tmp_path: Path) -> None:
    config = {"config.json": b"{}"}
    with (
        harbour.publisher() as trainer,
        island(harbour.server, tmp_path / "store", token=harbour.enrol("skerry"), poll_seconds=1),
    ):
        trainer.publish(weights(), side_files=config)
        trainer.publish(weights(1))
        eventually(lambda: harbour.at("skerry") == 1)
        assert harbour.operator.open_epoch("voyage", 0, "resumed from step 0") == 1
        version = trainer.publish(weights(2))
        assert version.number == 2, "numbers go on"
        assert version.patch_bytes is not None, "what travels starts from the version that the epoch goes on from"
        eventually(lambda: harbour.at("skerry") == 2)
        assert held_state(tmp_path / "store") == version.digest
        assert version.digest == measure(ArraySource(weights(2), side_files=config)).digest
        assert trainer.publish(weights(2)).changed == 0


def test_a13_a_step_that_goes_back_begins_an_epoch(harbour: Harbour, tmp_path: Path) -> None:
    with (
        harbour.publisher() as trainer,
        island(harbour.server, tmp_path / "store", token=harbour.enrol("skerry"), poll_seconds=1),
    ):
        for number in range(4):
            trainer.publish(weights(number), step=10 * number)
        eventually(lambda: harbour.at("skerry") == 3)
        version = trainer.publish(weights(7), step=20)
        assert (version.number, harbour.operator.run("voyage").epoch) == (4, 1)
        assert harbour.operator.run("voyage").epoch_from == 1, "the last version before that step"
        eventually(lambda: harbour.at("skerry") == 4)
        assert held_state(tmp_path / "store") == version.digest
        assert trainer.publish(weights(8), step=30).number == 5
        assert harbour.operator.run("voyage").epoch == 1


def test_a14_a_restarted_trainer_touches_nothing_that_was_published(harbour: Harbour, tmp_path: Path) -> None:
    """A new trainer process, without its copy, starts again at version 1. Whoever reads the old epoch meanwhile gets
    its bytes to the end, and an island can still be sent to it.
    """
    old = []
    with harbour.publisher(tmp_path / "first") as trainer:
        for number in range(3):
            old.append(trainer.publish(weights(number), step=number))
            old[-1].wait_ready(PATIENCE)
    envelopes = {one.number: harbour.operator.manifest("voyage", one.number) for one in old}
    patches = [Manifest.from_bytes(envelope.payload).patch for envelope in envelopes.values()]
    parts = [part for patch in patches if patch is not None for part in patch.parts]
    assert len(parts) == 2
    with harbour.operator.open_blob("voyage", parts[1].sha256) as reader:
        begun = reader.read(10)
        with harbour.publisher(tmp_path / "second") as restarted:
            assert restarted.resume(version=1) == 1
            newest = restarted.publish(weights(9), step=2)
            newest.wait_ready(PATIENCE)
            assert newest.number == 3
        assert hashlib.sha256(begun + reader.read()).hexdigest() == parts[1].sha256
    assert {number: harbour.operator.manifest("voyage", number) for number in envelopes} == envelopes
    for part in parts:
        with harbour.operator.open_blob("voyage", part.sha256) as again:
            assert hashlib.sha256(again.read()).hexdigest() == part.sha256
    with island(harbour.server, tmp_path / "store", token=harbour.enrol("skerry"), poll_seconds=1):
        eventually(lambda: harbour.at("skerry") == 3)
        name = next(row["id"] for row in harbour.operator.fleet()["islands"] if row["name"] == "skerry")
        body = json.dumps({"version": 2, "reason": "An evaluation of the old epoch."}).encode()
        harbour.operator.request("POST", f"islands/{name}/pin", body=body, headers=JSON)
        eventually(lambda: harbour.at("skerry") == 2)
        assert held_state(tmp_path / "store") == old[2].digest


def test_a_trainer_resumes_from_a_checkpoint_and_with_other_tensors(harbour: Harbour, tmp_path: Path) -> None:
    resumed = tmp_path / "resumed.safetensors"
    save_file(weights(0), resumed)
    with harbour.publisher() as trainer:
        for number in range(3):
            trainer.publish(weights(number))
        assert trainer.resume(checkpoint=resumed) == 1
        assert harbour.operator.run("voyage").epoch_from == 0
        assert trainer.publish(weights(5)).patch_bytes is not None
        save_file(weights(99), resumed)
        assert trainer.resume(checkpoint=resumed, reason="A state that was never published.") == 2
        assert harbour.operator.run("voyage").epoch_from is None
        other = {"b": weights(1)["a"]}
        version = trainer.publish(other)
        assert (version.number, version.patch_bytes) == (4, None), "other tensors stand alone"
        assert trainer.publish(other).changed == 0


def test_a51_token_works_once(harbour: Harbour, tmp_path: Path) -> None:
    with harbour.publisher() as trainer:
        trainer.publish(weights())
    token = harbour.enrol("skerry")
    with island(harbour.server, tmp_path / "one", token=token, once=True) as running:
        running.join()
    with pytest.raises(Unauthorised), island(harbour.server, tmp_path / "two", token=token) as refused:
        refused.join()


def test_publisher_with_a_wrong_token_is_told(harbour: Harbour) -> None:
    with (
        Publisher(harbour.server.address, "harbour", "voyage", "mb_x_y") as stranger,
        pytest.raises((Unauthorised, NotFound)),
    ):
        stranger.publish(weights())
