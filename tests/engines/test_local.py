"""The local engine behind a real sidecar: real tokens, written in place, equal to a model loaded afresh."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import urllib3

from mailboat.checkpoint.files import Checkpoint
from mailboat.checkpoint.source import ArraySource
from mailboat.digest import measure
from mailboat.image import Image
from mailboat.island.engines.local import LocalServer
from mailboat.island.engines.local_batch import Batch, Job, Sample, Sampling, _choose
from mailboat.island.sidecar.assembly import EngineOptions, Sidecar
from mailboat.island.sidecar.types import Applied
from mailboat.island.stop import Stop
from mailboat.patch.build import build_patch
from tests.engines.models import tiny_llama
from tests.sidecar.harness import in_background
from tests.waiting import PATIENCE, eventually


class Bench:
    """A sidecar with the local engine, and versions of a tiny model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tiny_llama(folder / "checkpoint")
        self.sidecar = Sidecar(EngineOptions("local", listen="127.0.0.1:0"), stop=Stop(), say=lambda _line: None)
        with Checkpoint.open(folder / "checkpoint") as checkpoint:
            self.image = Image.create(folder / "image", checkpoint, measure(checkpoint))
        self.random = np.random.default_rng(1)
        self.pool = urllib3.PoolManager(maxsize=16)
        self.number = 0

    def applied(self) -> Applied:
        return Applied("voyage", "id", 0, self.number, self.image.digest)

    def load(self) -> None:
        self.sidecar.engine.load(self.image, self.applied())

    def step(self, share: float = 0.02) -> None:
        """Changes some elements of every tensor, patch and commit."""
        arrays, dtypes = {}, {}
        for index, tensor in enumerate(self.image.inventory.tensors):
            data = np.empty(tensor.nbytes, np.uint8)
            self.image.read(index, 0, data)
            arrays[tensor.name], dtypes[tensor.name] = data.view(np.uint16).reshape(tensor.shape).copy(), tensor.dtype
            flat = arrays[tensor.name].reshape(-1)
            where = self.random.choice(flat.size, max(1, int(flat.size * share)), replace=False)
            flat[where] ^= 0x8000  # another sign: visible in the tokens
        side = {file.path: self.image.read_side(file.path) for file in self.image.side_files}
        aliases = dict(self.image.inventory.aliases)
        target = ArraySource(arrays, dtypes=dtypes, side_files=side, aliases=aliases)
        self.number += 1
        path = self.folder / f"{self.number}.mbp"
        built = build_patch(self.image, target, path)
        overlay = self.image.prepare([path], built.target_state)
        self.sidecar.engine.commit(self.image, overlay, Applied("voyage", "id", 0, self.number, overlay.target.digest))
        overlay.close()

    def post(self, path: str, **body: Any) -> Any:
        answer = self.pool.request("POST", f"{self.sidecar.url}{path}", json=body, timeout=PATIENCE)
        return answer.status, json.loads(answer.data) if answer.data[:1] == b"{" else answer.data

    def greedy(self, tokens: int = 12) -> Any:
        return self.post(
            "/v1/completions", prompt="w1 w2 w3", max_tokens=tokens, temperature=0, logprobs=1, return_token_ids=True
        )[1]


@contextmanager
def bench(folder: Path) -> Iterator[Bench]:
    running = Bench(folder)
    try:
        running.load()
        yield running
    finally:
        running.sidecar.close()
        running.image.close()


def afresh(folder: Path, tokens: int) -> list[int]:
    """What transformers makes of the same folder, loaded its own way."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[1, 2, 3]])
    out = model.generate(
        ids, max_new_tokens=tokens, do_sample=False, attention_mask=torch.ones_like(ids), pad_token_id=0
    )
    return [int(token) for token in out[0, 3:]]


def test_tokens_equal_those_of_a_model_loaded_afresh(tmp_path: Path) -> None:
    with bench(tmp_path) as running:
        seen = set()
        for version in range(3):
            answer = running.greedy()
            tokens = answer["choices"][0]["token_ids"]
            assert tokens == afresh(running.image.folder, 12)
            assert (answer["weight_version_start"], answer["weight_version_end"]) == (version, version)
            seen.add(tuple(tokens))
            running.step()
        assert len(seen) == 3, "the versions can be told apart"
        server = running.sidecar._served._berths[0].server  # type: ignore[union-attr]
        assert np.array_equal(server.live_sums(running.image), running.image.state.sums)


def test_in_place_and_not_a_reload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bench(tmp_path) as running:
        monkeypatch.setattr(LocalServer, "reload", lambda *_: pytest.fail("reloaded"))
        running.step()
        running.step(share=1.0)  # dense blocks
        running.sidecar.engine.audit(running.image)
        assert running.greedy()["weight_version_end"] == 2


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, a pass takes long enough for a test to do something in the middle of an answer."""
    step, event = Batch.step, threading.Event()

    def slow(batch: Batch, model: Any) -> None:
        event.wait(0.1)
        step(batch, model)

    monkeypatch.setattr(Batch, "step", slow)
    return event


def test_a41_a_stream_goes_on_through_a_commit(tmp_path: Path, hurry: threading.Event) -> None:
    with bench(tmp_path) as running:
        answer = running.pool.request(
            "POST", f"{running.sidecar.url}/v1/chat/completions", preload_content=False, timeout=PATIENCE,
            json={"messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 300, "temperature": 0,
                  "stream": True},
        )  # fmt: skip
        lines = iter(answer)
        first = next(lines)
        assert b"delta" in first and answer.headers["Mailboat-Version-Start"] == "0"
        running.step()
        hurry.set()
        events = [line[5:] for line in lines if line.startswith(b"data:")]
        last = json.loads(events[-2])
        assert events[-1].strip() == b"[DONE]" and last["choices"][0]["finish_reason"] == "length"
        assert last["weight_version_end"] == 1


def test_requests_run_side_by_side(tmp_path: Path, hurry: threading.Event) -> None:
    before = threading.active_count()
    with bench(tmp_path) as running:
        long, _ = in_background(lambda: running.greedy(400))
        eventually(lambda: running.sidecar.active)
        assert running.greedy(3)["choices"][0]["finish_reason"] == "length"
        assert long.is_alive(), "the short one did not wait for the long one"
        hurry.set()
        long.join(PATIENCE)
        several = running.post("/v1/completions", prompt="w4", max_tokens=5, n=4, seed=7)[1]
        again = running.post("/v1/completions", prompt="w4", max_tokens=5, n=4, seed=7)[1]
        texts = [choice["text"] for choice in several["choices"]]
        assert len(set(texts)) > 1 and texts == [choice["text"] for choice in again["choices"]]
        assert threading.active_count() < before + 40


def test_rows_of_a_batch_get_what_they_get_alone(tmp_path: Path) -> None:
    """Prompts and answers of many lengths, joining and leaving; in F32, so that no rounding decides."""
    from transformers import AutoModelForCausalLM

    tiny_llama(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()

    def job(number: int) -> Job:
        prompt = [(number * 7 + word) % 60 for word in range(1 + number * 3)]
        samples = [Sample() for _ in range(1 + number % 2)]
        return Job(prompt, Sampling(4 + 5 * number, temperature=0), lambda: None, samples)

    def take(batch: Batch) -> None:
        for row, token in zip(batch.rows, batch.choose()[0], strict=True):
            row.sample.tokens.append(token)
            if len(row.sample.tokens) == row.job.sampling.max_tokens:
                row.sample.reason = "length"
        batch.drop_ended()

    def run(jobs: list[Job]) -> list[list[list[int]]]:
        batch: Batch | None = None
        for one in jobs:  # each joins two steps after the one before
            new = Batch(model, one)
            take(new)
            if batch is not None and batch.rows:
                assert batch.takes(new)
                batch.join(new)
            else:
                batch = new
            for _ in range(2):
                batch.step(model)
                take(batch)
        while batch is not None and batch.rows:
            batch.step(model)
            take(batch)
        return [[sample.tokens for sample in one.samples] for one in jobs]

    with torch.inference_mode():
        together = run([job(number) for number in range(7)])
        assert together == [run([job(number)])[0] for number in range(7)]
        assert len({tuple(tokens) for answers in together for tokens in answers}) == 7


def test_requests_of_different_clients_share_their_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes, step, together = [], Batch.step, threading.Event()

    def counted(batch: Batch, model: Any) -> None:
        together.wait(PATIENCE)  # nobody goes on before all are there
        passes.append(len(batch.jobs))
        step(batch, model)

    with bench(tmp_path) as running:
        monkeypatch.setattr(Batch, "step", counted)
        asked = [in_background(lambda n=number: running.greedy(20 + n)) for number in range(6)]
        stream = {"prompt": "w1", "max_tokens": 400, "stream": True}
        url = f"{running.sidecar.url}/v1/completions"
        gone = running.pool.request("POST", url, json=stream, preload_content=False)
        eventually(lambda: running.sidecar.active == 7)
        gone.close()
        eventually(lambda: running.sidecar.active == 6)
        together.set()
        for number, (thread, answers) in enumerate(asked):
            thread.join(PATIENCE)
            assert len(answers[0]["choices"][0]["token_ids"]) == 20 + number
    assert max(passes) >= 6 and len(passes) < 60, "not one pass for each token of each, and none for who went away"


def test_a_commit_in_the_middle_of_a_batch_is_stamped_for_all(tmp_path: Path, hurry: threading.Event) -> None:
    with bench(tmp_path) as running:
        asked = [in_background(lambda: running.greedy(300)) for _ in range(4)]
        eventually(lambda: running.sidecar.active == 4)
        running.step()
        hurry.set()
        for thread, answers in asked:
            thread.join(PATIENCE)
            assert (answers[0]["weight_version_start"], answers[0]["weight_version_end"]) == (0, 1)
            assert len(answers[0]["choices"][0]["token_ids"]) == 300


BAD_PROMPTS: list[dict[str, Any]] = [
    {"prompt": 3},
    {"prompt": None},
    {"prompt": []},
    {"prompt": ["a", "b"]},
    {"prompt": [999_999_999]},
    {"prompt": [64]},
    {"prompt": [-1]},
    {"prompt": [True]},
    {"prompt": [1.0]},
    {"prompt": "\ud800"},
    {"prompt": "", "max_tokens": 99999},
    {"prompt": "w1", "max_tokens": 600},  # the model has 512 places
    {"prompt": "w1", "max_tokens": "x"},
    {"prompt": "w1", "max_tokens": "5"},
    {"prompt": "w1", "max_tokens": 2.5},
    {"prompt": "w1", "max_tokens": True},
    {"prompt": "w1", "max_tokens": 0},
    {"prompt": "w1", "max_completion_tokens": 0},
    {"prompt": "w1", "n": 1000},
    {"prompt": "w1", "n": 0},
    {"prompt": "w1", "n": "2"},
    {"prompt": "w1", "seed": 1 << 64},
    {"prompt": "w1", "seed": 1.5},
    {"prompt": "w1", "stop": 5},
    {"prompt": "w1", "stop": ""},
    {"prompt": "w1", "stop": [""]},
    {"prompt": "w1", "stop": [{}]},
    {"prompt": "w1", "stop": {}},
    {"prompt": "w1", "temperature": -1},
    {"prompt": "w1", "temperature": 1e-40},
    {"prompt": "w1", "temperature": 9e-38},
    {"prompt": "w1", "temperature": float("nan")},
    {"prompt": "w1", "temperature": float("inf")},
    {"prompt": "w1", "temperature": 10**400},
    {"prompt": "w1", "temperature": "1"},
    {"prompt": "w1", "top_p": 5},
    {"prompt": "w1", "top_p": 0},
    {"prompt": "w1", "logprobs": -1},
    {"prompt": "w1", "logprobs": "yes"},
    {"prompt": "w1", "stream": "yes"},
    {"prompt": "w1", "model": 5},
    {"prompt": "w1", "model": "\udfff"},
]
BAD_MESSAGES: list[Any] = [
    None,
    [],
    "w1",
    [5],
    [{"role": "user"}],
    [{"content": "w1"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": {}}],
    [{"role": ["user"], "content": "w1"}],
    [{"role": "nobody", "content": "w1"}],
    [{"role": "user", "content": "\ud800"}],
    [{"role": "user", "content": [5]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
]


def post(server: LocalServer, path: str, **body: Any) -> Any:
    """What the engine says by itself, without a sidecar before it."""
    answer = urllib3.request("POST", f"{server.url}{path}", body=json.dumps(body).encode(), timeout=PATIENCE)
    return answer.status, json.loads(answer.data)


@contextmanager
def engine(folder: Path, *, template: str = "") -> Iterator[LocalServer]:
    """The engine with a tiny model, without a sidecar; ``template``: another chat template."""
    tiny_llama(folder / "checkpoint")
    if template:
        (folder / "checkpoint/chat_template.jinja").write_text(template)
    with Checkpoint.open(folder / "checkpoint") as checkpoint:
        image = Image.create(folder / "image", checkpoint, measure(checkpoint))
    server = LocalServer()
    try:
        server.reload(image)
        yield server
    finally:
        server.close()
        image.close()


def test_bad_requests_are_told_in_one_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    chats = [{} if messages is None else {"messages": messages} for messages in BAD_MESSAGES]
    with engine(tmp_path) as server:
        for path, bodies in (("/v1/completions", BAD_PROMPTS), ("/v1/chat/completions", chats)):
            for body in bodies:
                status, answer = post(server, path, **body)
                error = answer["error"]
                assert (status, error["type"]) == (400, "BadRequestError"), body
                assert error["message"].endswith(".") and "\n" not in error["message"], body
        for data in (b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"prompt": [' + b"9" * 5000 + b"]}"):
            assert urllib3.request("POST", f"{server.url}/v1/completions", body=data).status == 400, data[:20]
        parts = [{"type": "text", "text": "w1"}, {"type": "text", "text": "w2"}]
        for content in ("w1", parts):
            asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
            assert post(server, "/v1/chat/completions", **asked)[0] == 200
        odd = {"prompt": [0, 63], "seed": -1, "stop": None, "temperature": 1e-4, "top_p": 1e-30, "n": None}
        assert post(server, "/v1/completions", **odd)[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_what_a_chat_template_refuses_is_a_bad_request(tmp_path: Path) -> None:
    with engine(tmp_path, template="{{ raise_exception('Roles must take turns') }}") as server:
        status, answer = post(server, "/v1/chat/completions", messages=[{"role": "user", "content": "w1"}])
    assert status == 400 and "Roles must take turns" in answer["error"]["message"]


def test_trouble_of_the_engine_is_one_line_and_500(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with engine(tmp_path) as server:
        monkeypatch.setattr(server._generator, "encode", lambda text: text.index("no such word"))
        status, answer = post(server, "/v1/completions", prompt="w1")
    assert (status, answer["error"]["type"]) == (500, "InternalServerError")
    assert [record.getMessage() for record in caplog.records] == ["/v1/completions: ValueError: substring not found"]
    assert "Traceback" not in capfd.readouterr().err


def test_a_client_that_goes_away_leaves_no_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with engine(tmp_path) as server:
        answer = urllib3.PoolManager().request(
            "POST", f"{server.url}/v1/completions", json={"prompt": "w1", "max_tokens": 400, "stream": True},
            preload_content=False,
        )  # fmt: skip
        whole = socket.create_connection(
            (urllib3.util.parse_url(server.url).host, urllib3.util.parse_url(server.url).port)
        )
        body = json.dumps({"prompt": "w1", "max_tokens": 400}).encode()
        whole.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        eventually(lambda: len(server._generator._batches) == 1 and len(server._generator._batches[0].rows) == 2)
        whole.close()
        answer.close()
        eventually(lambda: not server._generator._batches)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_row_at_fault_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    """One request's logits are no numbers any more; whoever shares its passes goes on."""
    step, together = Batch.step, threading.Event()

    def spoilt(batch: Batch, model: Any) -> None:
        together.wait(PATIENCE)
        step(batch, model)
        for index, row in enumerate(batch.rows):
            if row.job.sampling.seed == 13:
                batch.logits[index] = float("nan")

    with bench(tmp_path) as running:
        monkeypatch.setattr(Batch, "step", spoilt)

        def ask(seed: int) -> Any:
            return running.post("/v1/completions", prompt="w1", max_tokens=20, temperature=temperature, seed=seed)

        asked = [in_background(partial(ask, seed)) for seed in (12, 13, 14, 15)]
        eventually(lambda: running.sidecar.active == len(asked))
        together.set()
        for thread, _ in asked:
            thread.join(PATIENCE)
        assert [answers[0][0] for _, answers in asked] == [200, 500, 200, 200]


def test_a_temperature_just_above_zero_divides_nothing_to_infinity() -> None:
    logits, random = torch.tensor([[10.0, 50.0, 30.0]]), torch.Generator()
    assert _choose(logits, Sampling(temperature=9e-38), random).tolist() == [[1]]
