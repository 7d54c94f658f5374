"""`mailboat island run --engine ...` end to end: a trainer, the real control plane, a sidecar, and clients."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import urllib3

from mailboat.checkpoint.writing import write_checkpoint
from mailboat.island.sidecar.assembly import EngineOptions
from tests.engines.contract_engine import ContractEngine
from tests.island.fleet import RunningIsland, island
from tests.sidecar.harness import Versions
from tests.together.test_real_server import Harbour, harbour
from tests.waiting import PATIENCE, eventually, free_port

__all__ = ["harbour"]  # a fixture


def sidecar_of(running: RunningIsland) -> str:
    """Where an island's sidecar listens."""
    line = eventually(lambda: next((line for line in running.lines if line.startswith("sidecar listens")), None))
    return str(line.split()[3].rstrip(","))


class Clients:
    """Clients that ask all the time; every answer is kept."""

    def __init__(self, url: str, count: int = 4) -> None:
        self.answers: list[tuple[int, Any]] = []
        self._url = url
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]

    def _run(self) -> None:
        pool = urllib3.PoolManager(retries=False)
        while not self._ended.is_set():
            body = {"prompt": "hello", "max_tokens": 12}
            try:
                answer = pool.request("POST", f"{self._url}/v1/completions", json=body, timeout=PATIENCE)
                self.answers.append((answer.status, json.loads(answer.data)))
            except urllib3.exceptions.HTTPError as error:
                self.answers.append((0, str(error)))

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(PATIENCE)


def publish(trainer: Any, versions: Versions, folder: Path) -> None:
    write_checkpoint(versions.source(), folder)
    trainer.publish_checkpoint(folder)


@pytest.mark.parametrize(("kind", "extension"), [("vllm", True), ("sglang", False)])
def test_no_request_is_lost_or_misstamped_across_five_commits(
    harbour: Harbour, tmp_path: Path, kind: str, extension: bool
) -> None:
    versions = Versions(tmp_path)
    with (
        ContractEngine(kind, extension=extension, token_seconds=0.002).serving() as engine,
        harbour.publisher() as trainer,
    ):
        publish(trainer, versions, tmp_path / "checkpoint")
        serving = EngineOptions(kind, (engine.url,), "127.0.0.1:0")
        with island(
            harbour.server, tmp_path / "store", token=harbour.enrol("skerry"), poll_seconds=1, serving=serving
        ) as running:
            url = sidecar_of(running)
            eventually(lambda: harbour.at("skerry") == 0)
            with Clients(url) as clients:
                eventually(lambda: clients.answers)
                for number in range(1, 6):
                    versions.next()
                    publish(trainer, versions, tmp_path / "checkpoint")
                    eventually(lambda n=number: harbour.at("skerry") == n)
                    seen = len(clients.answers)
                    eventually(lambda s=seen: len(clients.answers) > s + 8)
            info = json.loads(urllib3.request("GET", f"{url}/server_info").data)
    assert info["applied"] == "voyage/weight_v000005" and info["metrics"]["skew_versions"] == 0
    assert engine.aborted == 0 and engine.label == "voyage/weight_v000005"
    for status, answer in clients.answers:
        assert status == 200, answer
        made = [int(word) for word in answer["choices"][0]["text"].split()]
        assert len(made) == 12 and answer["choices"][0]["finish_reason"] == "stop"
        assert answer["weight_version_start"] <= made[0] <= made[-1] <= answer["weight_version_end"]
    assert {answer["weight_version_end"] for _, answer in clients.answers} == set(range(6))
    if extension:
        assert engine.calls.count("mailboat_write") == 5 and engine.calls.count("reload_weights") == 1


def test_a08_a42_the_fleet_shows_an_engine_that_fails_and_its_return(harbour: Harbour, tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    with ContractEngine("vllm", extension=False).serving() as engine, harbour.publisher() as trainer:
        publish(trainer, versions, tmp_path / "checkpoint")
        serving = EngineOptions("vllm", (engine.url,), "127.0.0.1:0")
        with island(
            harbour.server, tmp_path / "store", token=harbour.enrol("skerry"), poll_seconds=1, serving=serving
        ) as running:
            url = sidecar_of(running)
            eventually(lambda: harbour.at("skerry") == 0)
            engine.faults["reload_weights"] = "500"
            versions.next()
            publish(trainer, versions, tmp_path / "checkpoint")

            def row() -> dict[str, Any]:
                return next(row for row in harbour.operator.fleet()["islands"] if row["name"] == "skerry")

            eventually(lambda: row()["phase"] in {"fenced", "error"} and "collective_rpc" in json.dumps(row()))
            assert urllib3.request("GET", f"{url}/health").status == 503
            assert harbour.at("skerry") != 1
            engine.faults.clear()
            eventually(lambda: harbour.at("skerry") == 1)
            eventually(lambda: row()["phase"] == "idle")
            answer = json.loads(
                urllib3.request("POST", f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 2}).data
            )
            assert answer["choices"][0]["text"] == "1 1 "
            # An engine that starts by itself: fenced, loaded again by the watchdog, no new version needed.
            engine.restart()
            eventually(lambda: engine.version == 1 and urllib3.request("GET", f"{url}/health").status == 200)


def test_a39_the_island_starts_again_before_its_engine(harbour: Harbour, tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    engine = ContractEngine("vllm", port=free_port())
    with harbour.publisher() as trainer:
        publish(trainer, versions, tmp_path / "checkpoint")
        serving = EngineOptions("vllm", (engine.url,), "127.0.0.1:0")
        engine.server._socket.close()  # nobody answers there yet
        token = harbour.enrol("skerry")
        with island(harbour.server, tmp_path / "store", token=token, poll_seconds=1, serving=serving) as running:
            url = sidecar_of(running)
            eventually(lambda: any("does not answer" in line for line in running.lines))
            assert urllib3.request("GET", f"{url}/health/live").status == 200
            assert urllib3.request("GET", f"{url}/health").status == 503
            assert harbour.at("skerry") is None
            later = ContractEngine("vllm", port=int(engine.url.rpartition(":")[2]))
            with later.serving():
                eventually(lambda: harbour.at("skerry") == 0)
                assert urllib3.request("GET", f"{url}/health").status == 200
