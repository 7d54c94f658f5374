"""An island of several hosts: all at the old version or all at the new one, whoever dies, wherever the link is cut."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mailboat.errors import DiskFull, MailboatError
from mailboat.image import Image
from mailboat.island import upkeep
from mailboat.island.members import follower, roster
from mailboat.island.members.lead import MembersError, shared_secret
from mailboat.island.members.order import BadWord, Order, Word
from mailboat.island.store import Store
from mailboat.island.upkeep import UpkeepOptions
from tests.island.contract_server import ContractServer
from tests.island.fleet import RunningIsland, Trainer, held_state, island
from tests.island.members import leading, member, rows
from tests.island.test_upkeep import QUICK, flip, marker
from tests.waiting import PATIENCE, eventually, free_port


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "SPEAK_SECONDS", 0.3)


def test_members_move_with_their_leader(server: ContractServer, tmp_path: Path, port: int) -> None:
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    with Trainer(server, tmp_path) as trainer, island(server, a, **leading(port, "b", "c")), member(b, port):
        trainer.step()
        server.wait_for(lambda: any(row["phase"] == "silent" for row in rows(server)))
        assert server.applied(0) is None, "not before all are there"
        with member(c, port, "c"):
            server.wait_for(lambda: server.applied(0))
            for number in range(1, 4):
                trainer.step()
                server.wait_for(lambda n=number: server.applied(n))
                assert held_state(a) == held_state(b) == held_state(c) == trainer.state().digest
            trainer.publish()  # the same state under another number
            server.wait_for(lambda: server.applied(4))
            both = {("b", 4, "idle"), ("c", 4, "idle")}
            server.wait_for(lambda: {(row["name"], row["version"], row["phase"]) for row in rows(server)} == both)
    blobs = [call for call in server.calls if "/blobs/" in call and call.startswith("GET")]
    assert len(blobs) == len(set(blobs)), "a version travels once, however many hosts"


def test_a_move_waits_for_a_member_and_nothing_is_touched(server: ContractServer, tmp_path: Path, port: int) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    with Trainer(server, tmp_path) as trainer, island(server, a, **leading(port)) as leader:
        with member(b, port):
            old = trainer.step()
            server.wait_for(lambda: server.applied(0))
        trainer.step()
        server.wait_for(
            lambda: any("The member b is not ready" in report.get("error", "") for report in failures(server))
        )
        assert held_state(a) == held_state(b) == old.digest
        shutil.rmtree(b)  # a new host in its place
        with member(b, port):
            server.wait_for(lambda: server.applied(1))
        assert held_state(a) == held_state(b) == trainer.state().digest
        assert leader.error is None


def failures(server: ContractServer) -> list[dict[str, Any]]:
    return [report for report in server.reports if report["outcome"] == "failed"]


def test_a_decision_is_finished_by_whoever_starts_again(
    server: ContractServer, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The member fails after the decision: the leader does not go on alone, and both end at the new version."""
    a, b = tmp_path / "a", tmp_path / "b"
    monkeypatch.setattr(roster, "PATIENCE", 1.0)
    failing = threading.Event()
    commit = Image.commit

    def refuse(image: Image, overlay: Any) -> None:
        if failing.is_set() and image.folder == b / "image":
            raise MailboatError("The disk is on fire.")
        commit(image, overlay)

    monkeypatch.setattr(Image, "commit", refuse)
    with Trainer(server, tmp_path) as trainer:
        with island(server, a, **leading(port)), member(b, port):
            old = trainer.step()
            server.wait_for(lambda: server.applied(0))
            failing.set()
            trainer.step()
            server.wait_for(lambda: any("on fire" in report["error"] for report in failures(server)))
            assert held_state(a) == old.digest and server.applied(1) is None
        assert (a / "decision.json").exists()
        failing.clear()
        with island(server, a, **leading(port)) as leader:  # both start again
            eventually(lambda: any("not at version 1" in line for line in leader.lines))
            with member(b, port):
                server.wait_for(lambda: server.applied(1))
                assert held_state(a) == held_state(b) == trainer.state().digest


def test_an_undecided_move_is_taken_back(
    server: ContractServer, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader dies when all are prepared: at its next start it holds the old version, until it moves with all."""
    a, b = tmp_path / "a", tmp_path / "b"

    def die(_roster: Any, _state: str) -> None:
        raise SystemExit

    with Trainer(server, tmp_path) as trainer, member(b, port):
        with island(server, a, **leading(port)):
            old = trainer.step()
            server.wait_for(lambda: server.applied(0))
        trainer.step()
        with monkeypatch.context() as dying:
            dying.setattr(roster.Roster, "require_ready", die)
            dead = RunningIsland(server, a, **leading(port))
            dead.thread.start()
            dead.thread.join(PATIENCE)
            assert isinstance(dead.error, SystemExit)
        assert (a / "intent.json").exists() and held_state(a) == held_state(b) == old.digest
        server.head, head = None, server.head
        with island(server, a, **leading(port)) as leader:
            eventually(lambda: any("version 0  held and verified" in line for line in leader.lines))
            assert held_state(a) == held_state(b) == old.digest
            with server.changed:
                server.head = head
                server.changed.notify_all()
            server.wait_for(lambda: server.applied(1))
        assert held_state(a) == held_state(b) == trainer.state().digest


def test_a_roll_back_takes_members_along(server: ContractServer, tmp_path: Path, port: int) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    with Trainer(server, tmp_path) as trainer, island(server, a, **leading(port)), member(b, port):
        first = trainer.step()
        trainer.step()
        server.wait_for(lambda: server.applied(1))
        server.reports.clear()
        server.point(0)
        server.wait_for(lambda: server.applied(0))
        assert held_state(a) == held_state(b) == first.digest


def test_the_log_of_a_member_is_compacted(server: ContractServer, tmp_path: Path, port: int) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    short = UpkeepOptions(rate=1e12, start_rate=1e12, log_entries=2, log_share=9)
    with Trainer(server, tmp_path) as trainer, island(server, a, **leading(port)):
        with member(b, port, upkeep=short) as running:
            for number in range(4):
                trainer.step()
                server.wait_for(lambda n=number: server.applied(n))
            eventually(lambda: marker(b)["base"]["version"] == 3 and marker(b)["log"] == [])
            eventually(lambda: any("is the base from now on" in line for line in running.lines))
            trainer.step()
            server.wait_for(lambda: server.applied(4))
            assert [entry["version"] for entry in marker(b)["log"]] == [4]
            assert [path.name[:6] for path in (b / "base").iterdir()] == ["000003"]
        shutil.rmtree(b / "image")  # base and log are its truth
        with member(b, port) as again:
            eventually(lambda: any("rebuilt from the store" in line for line in again.lines))
        assert held_state(a) == held_state(b) == trainer.state().digest


@pytest.mark.parametrize("where", ["base", "image", "base and image"])
def test_damage_of_a_member_is_mended(server: ContractServer, tmp_path: Path, port: int, where: str) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    patterns = {"base": "base/0*/model.safetensors", "image": "image/model.safetensors"}
    with Trainer(server, tmp_path) as trainer, island(server, a, **leading(port)), member(b, port, upkeep=QUICK) as one:
        for number in range(2):
            trainer.step()
            server.wait_for(lambda n=number: server.applied(n))
        eventually(lambda: any("strong digests of image, base and log agree" in line for line in one.lines))
        said = len(one.lines)
        for name in where.split(" and "):
            flip(next(b.glob(patterns[name])), 450)
        mended = {"image": "rebuilt from the store", "base and image": "held and verified"}
        eventually(lambda: any(mended.get(where, "is the base from now on") in line for line in one.lines[said:]))
        assert held_state(b) == trainer.state().digest
        trainer.step()
        server.wait_for(lambda: server.applied(2))
        assert held_state(a) == held_state(b) == trainer.state().digest


def test_what_a_member_finds_is_shown_with_the_island(
    server: ContractServer, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_folder: Path, needed: int, what: str) -> None:
        raise DiskFull(f"{what} needs {needed:,} bytes, and none are free.")

    monkeypatch.setattr(upkeep, "RETRY_SECONDS", 0.2)
    a, b = tmp_path / "a", tmp_path / "b"
    with (
        Trainer(server, tmp_path) as trainer,
        island(server, a, **leading(port)),
        member(b, port, upkeep=UpkeepOptions(rate=1e12, log_entries=0)),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(upkeep, "require_space", full)
            for number in range(2):
                trainer.step()
                server.wait_for(lambda n=number: server.applied(n))
            server.wait_for(lambda: "none are free" in rows(server)[0]["reason"])
            assert rows(server)[0]["version"] == 1, "it goes on with the log that it has"
        eventually(lambda: rows(server)[0]["reason"] == "" and marker(b)["base"]["version"] == 1)


def test_a_new_host_is_given_the_base_that_its_leader_has_now(
    server: ContractServer, tmp_path: Path, port: int
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    short = UpkeepOptions(rate=1e12, start_rate=1e12, log_entries=1, log_share=9)
    with Trainer(server, tmp_path) as trainer, island(server, a, **leading(port), upkeep=short):
        with member(b, port):
            for number in range(3):
                trainer.step()
                server.wait_for(lambda n=number: server.applied(n))
            eventually(lambda: marker(a)["base"]["version"] == 2)
        shutil.rmtree(b)
        with member(b, port):
            eventually(lambda: (b / "marker.json").exists() and marker(b)["version"] == 2)
        assert held_state(b) == trainer.state().digest


def test_strangers_hear_nothing(server: ContractServer, tmp_path: Path, port: int) -> None:
    with Trainer(server, tmp_path) as trainer, island(server, tmp_path / "a", **leading(port)):
        trainer.step()
        with member(tmp_path / "b", port, secret="x" * 40) as wrong, member(tmp_path / "c", port, "c") as unknown:
            eventually(lambda: any("not this island's" in line for line in wrong.lines))
            eventually(lambda: any("expects no member" in line for line in unknown.lines))
        assert server.applied(0) is None


def test_a_leader_that_stops_does_not_wait_for_those_who_wait_for_its_orders(tmp_path: Path) -> None:
    led = roster.Roster(("b",), Store(tmp_path / "store"), image=None)
    now = led.order_after("", -1, 0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(led.order_after, now.leader, now.serial, 10 * PATIENCE)
        led.end()
        assert waiting.result(PATIENCE) == now


def test_secrets_are_private_and_long(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(MembersError, match="copy"):
        shared_secret(path, make=False)
    made = shared_secret(path, make=True)
    assert shared_secret(path, make=False) == made and path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o604)
    with pytest.raises(MembersError, match="chmod"):
        shared_secret(path, make=False)
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(MembersError, match="shorter"):
        shared_secret(path, make=True)


@pytest.mark.parametrize(
    "body", [None, [], {}, {"leader": "x"}, {"leader": "x", "serial": "y", "at": None, "coming": None}]
)
def test_what_can_not_be_understood_is_said(body: Any) -> None:
    with pytest.raises(BadWord):
        Order.parse(body)
    with pytest.raises(BadWord):
        Word.parse(body)
