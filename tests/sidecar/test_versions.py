"""Requests that ask for versions, commits under load, and stamps that tell the truth."""

from __future__ import annotations

import http.client
import json
import math
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mailboat.island.sidecar.gate import CommitDeferred
from mailboat.island.sidecar.types import CommitMode
from tests.engines.contract_engine import ContractEngine
from tests.sidecar.harness import Station, Stream, in_background, station
from tests.waiting import PATIENCE, eventually

KINDS = [("vllm", True), ("vllm", False), ("sglang", False)]


def numbers(answer: dict[str, Any]) -> list[int]:
    return [int(word) for word in answer["choices"][0]["text"].split()]


@pytest.mark.parametrize(("kind", "extension"), KINDS)
def test_a34_a35_a_request_across_a_commit_says_both_versions(kind: str, extension: bool, tmp_path: Path) -> None:
    with station([ContractEngine(kind, extension=extension)], tmp_path) as running:
        running.engine.unending = 60
        thread, result = in_background(lambda: running.complete(60))
        eventually(lambda: running.engine.resident)
        running.step()
        running.engine.unending = math.inf
        thread.join(PATIENCE)
        status, answer, headers = result[0]
        assert status == 200 and answer["choices"][0]["finish_reason"] == "stop"
        assert {*numbers(answer)} == {0, 1}
        assert (answer["weight_version_start"], answer["weight_version_end"]) == (0, 1)
        assert (headers["mailboat-version-start"], headers["mailboat-version-end"]) == ("0", "1")
        after = running.complete()[1]
        assert (after["weight_version_start"], after["weight_version_end"]) == (1, 1) and {*numbers(after)} == {1}


def test_sglang_generate_is_stamped_in_its_meta_info(tmp_path: Path) -> None:
    with station([ContractEngine("sglang")], tmp_path) as running:
        answer = running.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 3}})[1]
        meta = answer["meta_info"]
        assert (meta["weight_version_start"], meta["weight_version_end"]) == (0, 0)
        assert meta["weight_version"] == "voyage/weight_v000000" and "weight_version_end" not in answer
        last = Stream(running, 3, path="/generate").rest()[-2]
        assert json.loads(last)["meta_info"]["weight_version_end"] == 0


@pytest.mark.parametrize(("kind", "extension"), KINDS)
def test_a41_a_stream_across_a_commit_stays_whole(kind: str, extension: bool, tmp_path: Path) -> None:
    with station([ContractEngine(kind, extension=extension)], tmp_path) as running:
        running.engine.unending = 60
        stream = Stream(running, 60)
        assert json.loads(stream.one())["choices"][0]["text"] == "0 "
        running.step()
        running.engine.unending = math.inf
        events = stream.rest()
        assert events[-1] == b"[DONE]" and stream.start == 0
        pieces = [json.loads(event) for event in events[:-1]]
        made = [int(piece["choices"][0]["text"]) for piece in pieces if piece["choices"][0]["text"]]
        assert len(made) == 60 and {*made} == {0, 1}
        assert pieces[-1]["weight_version_end"] == 1
        assert not any("weight_version_end" in piece for piece in pieces[:-1])


def test_a41_a_client_that_goes_takes_its_generation_with_it(tmp_path: Path) -> None:
    with station([ContractEngine("vllm")], tmp_path) as running:
        stream = Stream(running, 100_000)
        stream.one()
        assert len(running.engine.resident) == 1
        stream.close()
        eventually(lambda: not running.engine.resident)
        assert running.engine.disconnected == 1 and running.engine.finished == 0
        eventually(lambda: running.sidecar.active == 0)
        # Also while nothing has come back yet.
        running.engine.token_seconds = 1
        connection = http.client.HTTPConnection(running.url.removeprefix("http://"))
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps({"prompt": "x", "max_tokens": 500}),
            {"Content-Type": "application/json"},
        )
        eventually(lambda: running.engine.resident)
        connection.close()
        eventually(lambda: not running.engine.resident)


@pytest.mark.parametrize(("kind", "extension"), KINDS)
def test_a36_no_cache_entry_crosses_versions(kind: str, extension: bool, tmp_path: Path) -> None:
    with station([ContractEngine(kind, extension=extension)], tmp_path) as running:
        for version in range(3):
            assert running.complete()[1]["cached_under"] == version
            assert running.complete(cache_salt="me", extra_key="me")[1]["cached_under"] == version
            running.step()
        assert running.engine.cache, "in_place never flushes"
        assert "/flush_cache" not in running.engine.calls and "/reset_prefix_cache" not in running.engine.calls
        assert json.loads(running.get("/server_info")[1])["prefix_cache"] == "salted"


def test_a36_drain_resets_instead_of_salting(tmp_path: Path) -> None:
    with station([ContractEngine("vllm")], tmp_path, mode=CommitMode.DRAIN) as running:
        for version in range(2):
            assert running.complete()[1]["cached_under"] == version
            running.step()
        assert "cache_salt" not in running.engine.seen[0]
        assert "/reset_prefix_cache" in running.engine.calls
        assert json.loads(running.get("/server_info")[1])["prefix_cache"] == "reset"


@pytest.mark.parametrize(("kind", "extension"), KINDS)
def test_a37_a_deep_backlog_survives_a_commit(kind: str, extension: bool, tmp_path: Path) -> None:
    with station([ContractEngine(kind, extension=extension)], tmp_path) as running:
        running.engine.token_seconds = 1  # nobody ends before all are there
        streams = [Stream(running, 40) for _ in range(30)]
        eventually(lambda: len(running.engine.resident) == 30)
        running.engine.token_seconds = 0.004
        running.step()
        for stream in streams:
            assert json.loads(stream.rest()[-2])["choices"][0]["finish_reason"] == "stop"
        assert (running.engine.aborted, running.engine.finished) == (0, 30)


@pytest.mark.parametrize(("kind", "path"), [("sglang", "/flush_cache"), ("vllm", "/reset_prefix_cache")])
def test_a37_a_refused_flush_changes_nothing(kind: str, path: str, tmp_path: Path) -> None:
    with station([ContractEngine(kind)], tmp_path, mode=CommitMode.DRAIN) as running:
        running.engine.faults[path] = "refuse"
        with pytest.raises(CommitDeferred):
            running.step()
        assert running.engine.version == 0 and not running.engine.paused and running.image
        assert running.image.digest != running.versions.state().digest
        answer = running.complete()
        assert (answer[0], answer[1]["weight_version_end"]) == (200, 0)
        running.engine.faults.clear()
        running.commit(*running.retry)
        assert running.complete()[1]["weight_version_start"] == 1


@pytest.mark.parametrize(("kind", "path"), [("sglang", "/pause_generation"), ("vllm", "/pause")])
def test_a37_a_refused_pause_changes_nothing(kind: str, path: str, tmp_path: Path) -> None:
    with station([ContractEngine(kind)], tmp_path) as running:
        stream = Stream(running, 40)
        running.engine.faults[path] = "refuse"
        with pytest.raises(CommitDeferred):
            running.step()
        running.engine.faults.clear()
        assert json.loads(stream.rest()[-2])["weight_version_end"] == 0
        assert running.engine.version == 0 and running.engine.aborted == 0
        running.commit(*running.retry)
        assert running.complete()[1]["weight_version_start"] == 1


@pytest.mark.parametrize(("kind", "extension"), KINDS)
def test_a38_no_call_aborts_by_default(kind: str, extension: bool, tmp_path: Path) -> None:
    with station([ContractEngine(kind, extension=extension)], tmp_path) as running:
        running.engine.unending = 80
        streams = [Stream(running, 80) for _ in range(3)]
        running.step()
        running.sidecar.engine.relabel(running.image, running.applied(version=2))  # type: ignore[arg-type]
        assert running.engine.label == "voyage/weight_v000002"
        running.engine.unending = math.inf
        for stream in streams:
            last = json.loads(stream.rest()[-2])
            assert last["choices"][0]["finish_reason"] == "stop" and last["weight_version_end"] == 2
        assert running.engine.aborted == 0


def test_a43_a_version_that_is_gone_is_refused_with_the_reason(tmp_path: Path) -> None:
    with station([ContractEngine("vllm")], tmp_path) as running:
        running.step()
        status, body, headers = running.complete(weight_version={"exact_version": 0})
        assert (status, body["type"], body["target_version"], body["applied"]) == (409, "WeightVersionNotReady", 0, 1)
        assert "any more" in body["message"] and headers["retry-after"]
        assert not running.sidecar.wake.is_set()
        status, body, _ = running.complete(weight_version={"exact_version": 5})
        assert status == 409 and "not here yet" in body["message"] and running.sidecar.wake.is_set()
        status, body, _ = running.complete(run_id="other")
        assert status == 409 and "voyage" in body["message"]
        assert running.complete(run_id="voyage", weight_version={"min_version": 1})[0] == 200


def test_a_version_that_was_taken_back_is_no_version_to_come(tmp_path: Path) -> None:
    with station([ContractEngine("vllm")], tmp_path) as running:
        running.step(version=7)
        running.step(version=3)  # rolled back
        running.sidecar.wake.clear()
        for wanted in ({"exact_version": 7}, {"min_version": 5}):
            status, body, _ = running.complete(weight_version=wanted)
            assert (status, body["applied"]) == (409, 3) and "taken back" in body["message"]
        assert not running.sidecar.wake.is_set()
        assert "not here yet" in running.complete(weight_version={"exact_version": 8})[1]["message"]


def test_pinned_requests_end_before_the_version_changes(tmp_path: Path) -> None:
    with station([ContractEngine("vllm")], tmp_path) as running:
        gate = running.sidecar._door.gate  # type: ignore[union-attr]
        running.engine.unending = 60
        pinned, free = Stream(running, 60, weight_version={"exact_version": 0}), Stream(running, 200)
        thread, result = in_background(running.step)
        eventually(lambda: gate.closed)
        waiting, answered = in_background(lambda: running.complete(weight_version={"min_version": 1}))
        eventually(lambda: gate.queued == 1)
        running.engine.unending = 200
        assert json.loads(pinned.rest()[-2])["weight_version_end"] == 0
        thread.join(PATIENCE)
        waiting.join(PATIENCE)
        assert result == [None]
        running.engine.unending = math.inf
        assert answered[0][0] == 200 and answered[0][1]["weight_version_start"] == 1, (
            "it queued instead of being refused"
        )
        assert json.loads(free.rest()[-2])["weight_version_end"] == 1


def test_at_the_limit_a_commit_is_given_up_and_the_third_time_pinned_requests_go(tmp_path: Path) -> None:
    with station([ContractEngine("vllm")], tmp_path, drain=0.1) as running:
        thread, result = in_background(lambda: running.complete(100_000, weight_version={"exact_version": 0}))
        eventually(lambda: running.engine.resident)
        with pytest.raises(CommitDeferred):
            running.step()
        assert running.complete()[1]["weight_version_end"] == 0, "the gate is open again"
        with pytest.raises(CommitDeferred):
            running.commit(*running.retry)
        running.commit(*running.retry)
        thread.join(PATIENCE)
        status, body, _ = result[0]
        assert (status, body["error"]["type"], body["error"]["retryable"]) == (503, "EngineUnavailable", True)
        metrics = running.get("/metrics")[1].decode()
        assert "mailboat_commits_given_up_total 2.0" in metrics, "the third was applied"
        assert 'mailboat_commits_total{outcome="given_up"} 2.0' in metrics
        assert running.complete()[1]["weight_version_start"] == 1
        eventually(lambda: not running.engine.resident)


def test_another_run_or_epoch_always_drains(tmp_path: Path) -> None:
    with station([ContractEngine("vllm")], tmp_path) as running:
        stream = Stream(running, 80)
        stream.one()
        running.step(epoch=1)
        assert json.loads(stream.rest()[-2])["weight_version_end"] == 0
        assert {json.loads(event)["choices"][0]["text"] for event in stream.events[:-2]} == {"0 "}


def test_the_queue_has_limits(tmp_path: Path) -> None:
    with station([ContractEngine("vllm")], tmp_path, queued=2, drain=PATIENCE) as running:
        pinned = Stream(running, 100_000, weight_version={"exact_version": 0})
        commit, _ = in_background(running.step)
        gate = running.sidecar._door.gate  # type: ignore[union-attr]
        eventually(lambda: gate.closed)
        waiting = [in_background(running.complete) for _ in range(2)]
        eventually(lambda: gate.queued == 2)
        status, body, headers = running.complete()
        assert status == 503 and body["error"]["retryable"] and headers["retry-after"]
        pinned.close()
        commit.join(PATIENCE)
        for thread, result in waiting:
            thread.join(PATIENCE)
            assert result[0][0] == 200 and result[0][1]["weight_version_start"] == 1


def test_nobody_waits_in_the_queue_for_ever(tmp_path: Path) -> None:
    with station([ContractEngine("vllm")], tmp_path, wait=0.3, drain=PATIENCE) as running:
        pinned = Stream(running, 100_000, weight_version={"exact_version": 0})
        commit, _ = in_background(running.step)
        eventually(lambda: running.sidecar._door.gate.closed)  # type: ignore[union-attr]
        status, body, _ = running.complete()
        assert status == 503 and "0.3 s" in body["error"]["message"]
        pinned.close()
        commit.join(PATIENCE)
        assert running.complete()[1]["weight_version_start"] == 1


def load(running: Station, until: threading.Event, found: list[Any]) -> None:
    while not until.is_set():
        found.append(running.complete(12))


@pytest.mark.parametrize(("kind", "extension"), KINDS)
def test_nothing_is_lost_or_misstamped_across_five_commits(kind: str, extension: bool, tmp_path: Path) -> None:
    with station([ContractEngine(kind, extension=extension, token_seconds=0.001)], tmp_path) as running:
        until, found = threading.Event(), []
        threads = [threading.Thread(target=load, args=(running, until, found)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for _ in range(5):
            seen = len(found)
            running.step()
            eventually(lambda seen=seen: len(found) > seen + 10)
        until.set()
        for thread in threads:
            thread.join(PATIENCE)
        for status, answer, _ in found:
            assert status == 200
            made = numbers(answer)
            assert len(made) == 12 and made == sorted(made)
            assert answer["weight_version_start"] <= made[0]
            assert made[-1] <= answer["weight_version_end"]
            assert answer["weight_version_end"] - made[-1] <= 1, "an end is never further than what was read meanwhile"
        late = Counter(
            numbers(answer)[-1] for _, answer, _ in found if answer["weight_version_end"] != numbers(answer)[-1]
        )
        assert max(late.values(), default=0) <= len(threads), "at most the one of each client that a commit met"


def test_metrics_and_health(tmp_path: Path) -> None:
    with station([ContractEngine("vllm")], tmp_path) as running:
        running.sidecar.note_head(4)
        running.sidecar.note_bytes(1000)
        running.complete()
        running.step()
        text = running.get("/metrics")[1].decode()
        for line in (
            "mailboat_requests_admitted_total 1.0", "mailboat_received_bytes_total 1000.0",
            "mailboat_skew_versions 3.0", 'mailboat_commits_total{outcome="applied"} 1.0', "mailboat_version 1.0",
            "mailboat_prepare_seconds_count 1.0",
        ):  # fmt: skip
            assert line in text, line
        assert "mailboat_pause_seconds_count 1.0" in text, "the commit, not the load before it"
        named = set(re.findall(r"^# HELP (mailboat_\w+?)(?:_created)? ", text, re.MULTILINE)) | {
            "mailboat_requests_rejected_total"
        }
        table = (Path(__file__).parents[2] / "docs/sidecar.md").read_text()
        assert [name for name in sorted(named) if f"`{name}" not in table] == []
        assert running.get("/health/live")[0] == 200 and running.get("/health")[0] == 200
        running.sidecar.rest("An operator drains this island.")
        assert running.get("/health")[0] == 503 and running.complete()[0] == 503
        running.sidecar.rest(None)
        assert running.complete()[0] == 200
        assert running.post("/wake", {})[0] == 202 and running.sidecar.wake.is_set()


def test_every_kind_of_refusal_is_counted(tmp_path: Path) -> None:
    with station([ContractEngine("vllm")], tmp_path) as running:
        running.complete(weight_version={"exact_version": 5})
        running.complete(weight_version="5")
        running.post("/v1/completions", {}, {"Mailboat-Min-Version": "x"})
        running.post("/pause", {})
        running.post("/generate", {})
        running.sidecar.rest("An operator drains this island.")
        running.complete()
        text = running.get("/metrics")[1].decode()
        for reason, count in {"version": 1, "malformed": 2, "blocked": 2, "unavailable": 1}.items():
            assert f'mailboat_requests_rejected_total{{reason="{reason}"}} {count}.0' in text, reason
        assert json.loads(running.get("/server_info")[1])["metrics"]["rejected"] == 6


def test_a_stop_lets_streams_end(tmp_path: Path) -> None:
    with station([ContractEngine("vllm")], tmp_path) as running:
        stream = Stream(running, 60)
        stream.one()
        closing, _ = in_background(running.sidecar.close)
        assert json.loads(stream.rest()[-2])["choices"][0]["finish_reason"] == "stop"
        closing.join(PATIENCE)
        assert not closing.is_alive()
