"""Engines that die, hang, lie or start anew: no traffic until their weights agree, and nothing stays paused."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import urllib3

from mailboat.island.engines import control, vllm
from mailboat.island.engines.engine import EngineError, EngineUnreachable, Look
from mailboat.island.sidecar import served
from mailboat.island.sidecar.gate import CommitDeferred
from mailboat.island.sidecar.serving import Address, HttpServer
from mailboat.island.sidecar.types import SyncView
from tests.engines.contract_engine import ContractEngine
from tests.sidecar.harness import Station, Stream, in_background, station
from tests.waiting import PATIENCE, eventually, free_port

FAILURES = [
    ("vllm", True, "mailboat_write", "500"),
    ("vllm", True, "mailboat_write", "unsuccessful"),
    ("vllm", False, "reload_weights", "500"),
    ("sglang", False, "/update_weights_from_disk", "500"),
    ("sglang", False, "/update_weights_from_disk", "unsuccessful"),
]


@pytest.mark.parametrize(("kind", "extension", "call", "fault"), FAILURES)
def test_a08_a_failed_install_is_fenced_until_it_is_whole(
    kind: str, extension: bool, call: str, fault: str, tmp_path: Path
) -> None:
    engine = ContractEngine(kind, extension=extension)
    with station([engine], tmp_path) as running:
        engine.faults |= {call: fault, "reload_weights": "500"} if call == "mailboat_write" else {call: fault}
        stream = Stream(running, 100_000)
        with pytest.raises(EngineError):
            running.step()
        assert running.complete()[0] == 503 and running.get("/health")[0] == 503
        assert "fenced" in " ".join(running.lines)
        with pytest.raises(Exception):  # noqa: B017 - the stream breaks off: nobody knows what made its next tokens
            while True:
                assert stream.one() is not None
                assert b"finish_reason" not in stream.events[-1] or b"null" in stream.events[-1]
        engine.faults.clear()
        running.sidecar.engine.load(running.image, running.applied())  # type: ignore[arg-type]
        answer = running.complete()[1]
        assert (answer["weight_version_start"], answer["choices"][0]["text"]) == (1, "1 1 1 1 ")
        assert not engine.paused


CALLS = {
    "vllm": ("/pause", "reload_weights", "/update_weight_version", "/resume"),
    "sglang": ("/pause_generation", "/update_weights_from_disk", "/continue_generation"),
}


@pytest.mark.parametrize(("kind", "call"), [(kind, call) for kind, calls in CALLS.items() for call in calls])
def test_a04_no_way_out_leaves_an_engine_paused(kind: str, call: str, tmp_path: Path) -> None:
    engine = ContractEngine(kind, extension=False)
    with station([engine], tmp_path) as running:
        engine.faults[call] = "500"
        with pytest.raises(Exception):  # noqa: B017 - which one is the other tests' subject
            running.step()
        engine.faults.clear()
        # Either it went on with the old version, or it is fenced and comes back with what the image holds.
        if running.complete()[0] == 503:
            running.sidecar.engine.load(running.image, running.applied())  # type: ignore[arg-type]
        assert not engine.paused
        status, answer, _ = running.complete()
        assert status == 200 and str(answer["weight_version_end"]) in answer["choices"][0]["text"]


def test_a30_a_tensor_without_a_home_is_never_skipped(tmp_path: Path) -> None:
    engine = ContractEngine("vllm")
    attention = engine.workers[0].model_runner.model.model.layers[0].self_attn
    attention.qkv_proj.weight.data = attention.qkv_proj.weight.data.t().contiguous().t()  # repacked
    with station([engine], tmp_path) as running:
        assert any("way A" in line and "repacked" in line for line in running.lines), running.lines
        running.step()
        assert "mailboat_write" not in engine.calls and engine.version == 1


def test_a30_blocks_that_change_as_a_whole_are_written_in_place_too(tmp_path: Path) -> None:
    engine = ContractEngine("vllm")
    with station([engine], tmp_path) as running:
        running.commit(*running.versions.next(changes=1 << 20))
        assert "mailboat_write" in engine.calls and engine.calls.count("reload_weights") == 1
        running.sidecar.engine.audit(running.image)  # type: ignore[arg-type]
        assert running.complete()[1]["choices"][0]["text"] == "1 1 1 1 "


def test_wrong_sums_in_place_lead_to_a_reload(tmp_path: Path) -> None:
    engine = ContractEngine("vllm")
    with station([engine], tmp_path) as running:
        engine.faults["after mailboat_write"] = "corrupt"
        engine.unending = 60
        stream = Stream(running, 60)
        running.step()
        engine.unending = math.inf
        assert engine.calls.count("reload_weights") == 2, "once at the start, once instead of the write"
        assert json.loads(stream.rest()[-2])["weight_version_end"] == 1
        running.sidecar.engine.audit(running.image)  # type: ignore[arg-type]
        assert running.complete()[0] == 200
        running.step()
        assert engine.calls.count("mailboat_write") == 2


def test_live_memory_that_changes_is_found_and_mended(tmp_path: Path) -> None:
    engine = ContractEngine("vllm")
    with station([engine], tmp_path) as running:
        running.step()
        engine.workers[0].model_runner.model.model.embed_tokens.weight.view(-1)[5] += 1
        running.sidecar.engine.audit(running.image)  # type: ignore[arg-type]
        assert any("embed_tokens" in line and "fenced" in line for line in running.lines)
        eventually(lambda: running.complete()[0] == 200)
        running.sidecar.engine.audit(running.image)  # type: ignore[arg-type]
        assert running.complete()[0] == 200


def test_a39_an_engine_that_starts_anew_gets_no_traffic_before_its_weights(tmp_path: Path) -> None:
    engine = ContractEngine("vllm", extension=False)
    with station([engine], tmp_path) as running:
        running.step()
        engine.restart()
        assert engine.version == 0
        engine.faults["reload_weights"] = "500"
        eventually(lambda: running.get("/health")[0] == 503)
        assert running.complete()[0] == 503 and "started anew" in " ".join(running.lines)
        engine.faults.clear()
        eventually(lambda: running.get("/health")[0] == 200)
        assert running.complete()[1]["choices"][0]["text"] == "1 1 1 1 "


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("extension", [True, False])
def test_an_engine_that_sleeps_is_left_alone_until_it_is_woken(level: int, extension: bool, tmp_path: Path) -> None:
    engine = ContractEngine("vllm", extension=extension)
    with station([engine], tmp_path) as running:
        running.step()
        urllib3.request("POST", f"{engine.url}/sleep?level={level}")
        with pytest.raises(CommitDeferred, match="sleeps"):
            running.step()
        running.sidecar.engine.audit(running.image)  # type: ignore[arg-type]
        assert running.complete()[0] == 503 and "sleeps" in json.loads(running.get("/health")[1])["reason"]
        assert not engine.broken, "neither written nor set to work"
        urllib3.request("POST", f"{engine.url}/wake_up")
        eventually(lambda: running.get("/health")[0] == 200)
        assert running.complete()[1]["choices"][0]["text"] == "1 1 1 1 "
        running.commit(*running.retry)
        assert running.complete()[1]["choices"][0]["text"] == "2 2 2 2 "


def test_an_engine_that_was_left_paused_is_not_taken_for_one_that_sleeps(tmp_path: Path) -> None:
    engine = ContractEngine("vllm")
    with station([engine], tmp_path) as running:
        engine.paused = True  # by a sidecar that died; `/is_sleeping` says true
        running.step()
        assert running.complete()[1]["choices"][0]["text"] == "1 1 1 1 "


def test_a_sleeping_engine_is_found_by_the_watchdog(tmp_path: Path) -> None:
    asleep, awake = ContractEngine("vllm"), ContractEngine("vllm")
    with station([asleep, awake], tmp_path) as running:
        urllib3.request("POST", f"{asleep.url}/sleep?level=1")
        eventually(lambda: any("sleeps" in line for line in running.lines))
        running.step()
        assert {running.complete()[1]["choices"][0]["text"] for _ in range(4)} == {"1 1 1 1 "}
        assert not asleep.broken and asleep.version == 0


def test_a40_before_the_first_catch_up_it_lives_and_says_why(tmp_path: Path) -> None:
    engine = ContractEngine("vllm")
    with engine.serving():
        running = Station([engine], tmp_path)
        try:
            assert running.get("/health/live")[0] == 200
            status, body = running.get("/health")
            assert status == 503 and "not caught up" in json.loads(body)["reason"]
            assert running.complete()[0] == 503 and running.complete(weight_version={"min_version": 0})[0] == 503
            assert json.loads(running.get("/server_info")[1])["ready"] is False
            running.seed()
            assert running.get("/health")[0] == 200 and running.complete()[0] == 200
        finally:
            running.close()


def test_a40_an_engine_that_is_down_at_first_is_the_reason(tmp_path: Path) -> None:
    engine = ContractEngine("vllm")
    engine.server.stop()
    running = Station([engine], tmp_path)
    try:
        with pytest.raises(EngineError):
            running.seed()
        for message in (
            json.loads(running.get("/health")[1])["reason"],
            json.loads(running.get("/server_info")[1])["reason"],
            running.complete()[1]["error"]["message"],
        ):
            assert "does not answer" in message
        running.sidecar.view = lambda: SyncView("error", "The member gpu-2 is silent.")
        assert running.get("/health")[0] == 503
        assert json.loads(running.get("/health")[1])["reason"] == "The member gpu-2 is silent."
        assert running.complete()[1]["error"]["message"] == "The member gpu-2 is silent."
    finally:
        running.close()


def test_a42_an_engine_that_hangs_in_a_commit_is_fenced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ContractEngine("vllm", extension=False)
    with station([engine], tmp_path) as running:
        engine.faults["reload_weights"] = "hang"
        with monkeypatch.context() as patched, pytest.raises(EngineError, match="does not answer"):
            patched.setattr(vllm, "LEASE", 0.5)
            running.step()
        assert running.complete()[0] == 503
        engine.faults.clear()
        running.sidecar.engine.load(running.image, running.applied())  # type: ignore[arg-type]
        assert running.complete()[1]["choices"][0]["text"] == "1 1 1 1 "
    assert control.LEASE == 600


def test_an_engine_whose_server_is_well_has_longer_to_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def look(server: vllm.VllmServer) -> Look:
        nonlocal looks
        looks += 1
        return real(server)

    real = vllm.VllmServer.look
    monkeypatch.setattr(vllm.VllmServer, "look", look)
    monkeypatch.setitem(control.Control.get.__kwdefaults__, "seconds", 0.2)
    assert served.MISSED_WHILE_WELL > served.MISSED
    monkeypatch.setattr(served, "MISSED_WHILE_WELL", 1 << 20)
    engine = ContractEngine("vllm", extension=False)
    with station([engine], tmp_path) as running:
        engine.faults["/weight_info"] = "hang"
        looks = 0
        eventually(lambda: looks > served.MISSED + 1)
        assert running.complete()[0] == 200
        monkeypatch.setattr(served, "MISSED_WHILE_WELL", 1)
        eventually(lambda: running.complete()[0] == 503)
        engine.faults.clear()
        eventually(lambda: running.complete()[0] == 200)


@pytest.mark.parametrize("kind", list(CALLS))
@pytest.mark.parametrize("count", [1, 2])
def test_a_stop_does_not_wait_for_an_engine_that_hangs(
    kind: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "STOP_SECONDS", 0.1)
    engines = [ContractEngine(kind, extension=False) for _ in range(count)]
    reload = next(call for call in CALLS[kind] if "weights" in call)
    with station(engines, tmp_path) as running:
        for engine in engines:
            engine.faults[reload] = "hang"
        before = [engine.calls.count(reload) for engine in engines]
        thread, result = in_background(running.step)
        eventually(lambda: [engine.calls.count(reload) for engine in engines] > before)
        running.stop.set()
        thread.join(30)
        assert isinstance(result[0], EngineError) and "the island stops" in str(result[0])
        assert all(engine.paused for engine in engines), "nobody knows which weights they hold"
        assert running.complete()[0] == 503
        closing, _ = in_background(running.sidecar.close)
        closing.join(30)
        assert not closing.is_alive()
    engine = engines[0]
    engine.faults.clear()
    engine.server = HttpServer("engine", Address("127.0.0.1", 0), grace=1)
    with station([engine], tmp_path / "next start") as running:
        assert running.complete()[1]["choices"][0]["text"] == "0 0 0 0 " and not engine.paused


def test_an_engine_that_was_given_up_is_asked_for_nothing_more() -> None:
    with ContractEngine("vllm").serving() as engine:
        given_up = control.Control(engine.url)
        given_up.abandon()
        with pytest.raises(EngineUnreachable, match="the island stops"):
            given_up.post("/resume")
        assert engine.calls == []


def test_a_stop_does_not_wait_for_requests_that_hold_a_commit_up(tmp_path: Path) -> None:
    with station([ContractEngine("vllm")], tmp_path, drain=600) as running:
        pinned = Stream(running, 200, weight_version={"exact_version": 0})
        thread, result = in_background(running.step)
        eventually(lambda: running.sidecar._door.gate.closed)  # type: ignore[union-attr]
        running.stop.set()
        thread.join(30)
        assert isinstance(result[0], CommitDeferred) and "stops" in str(result[0])
        assert running.engine.version == 0 and not running.engine.paused
        assert json.loads(pinned.rest()[-2])["choices"][0]["finish_reason"] == "stop", "what runs ends by itself"


def test_a42_one_of_two_engines_fails_and_the_other_carries_on(tmp_path: Path) -> None:
    good, bad = ContractEngine("vllm"), ContractEngine("vllm", extension=False)
    with station([good, bad], tmp_path) as running:
        bad.faults["reload_weights"] = "500"
        running.step()
        answers = [running.complete()[1] for _ in range(6)]
        assert {answer["choices"][0]["text"] for answer in answers} == {"1 1 1 1 "}
        bad.faults.clear()
        engines = lambda: json.loads(running.get("/server_info")[1])["engines"]  # noqa: E731
        eventually(lambda: not any(engine["fence"] for engine in engines()))
        assert bad.version == 1 and not bad.paused
        before = len(bad.seen)
        good.unending = bad.unending = 30
        streams = [Stream(running, 30) for _ in range(4)]
        assert len(bad.seen) - before == 2, "the least busy one takes the next request"
        good.unending = bad.unending = math.inf
        for stream in streams:
            stream.rest()


@contextmanager
def process(port: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.engines.contract_engine", "vllm", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "NO_PROXY": "*"}) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline().strip() == b"ready"
            yield child
        finally:
            child.kill()


def test_a42_an_engine_that_is_killed_gets_traffic_again_when_it_holds_the_version(tmp_path: Path) -> None:
    port = free_port()
    engine = ContractEngine("vllm")
    engine.server.stop()
    engine.server.url = f"http://127.0.0.1:{port}"
    with process(port) as first:
        running = Station([engine], tmp_path)
        try:
            running.seed()
            running.step()
            assert running.complete()[1]["choices"][0]["text"] == "1 1 1 1 "
            thread, result = in_background(lambda: running.complete(100_000))
            eventually(lambda: running.sidecar.active)
            first.send_signal(signal.SIGKILL)
            thread.join(PATIENCE)
            assert result[0][0] == 503 and result[0][1]["error"]["type"] == "EngineUnavailable"
            with pytest.raises(CommitDeferred):
                running.step()
            eventually(lambda: running.get("/health")[0] == 503)
            with process(port):
                eventually(lambda: running.get("/health")[0] == 200)
                answer = running.complete()[1]
                assert answer["choices"][0]["text"] == "1 1 1 1 " and answer["weight_version_end"] == 1
        finally:
            running.close()
