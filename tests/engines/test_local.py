"""The local engine behind a real sidecar: real tokens, written in place, equal to a model loaded afresh."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
from mailboat.island.engines.local_batch import Batch, Job, Sample, Sampling
from mailboat.island.sidecar.assembly import EngineOptions, Sidecar
from mailboat.island.sidecar.types import Applied
from mailboat.island.stop import Stop
from mailboat.patch.build import build_patch
from tests.engines.models import tiny_llama
from tests.sidecar.harness import in_background
from tests.waiting import eventually


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
        answer = self.pool.request("POST", f"{self.sidecar.url}{path}", json=body, timeout=60)
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


def test_a41_a_stream_goes_on_through_a_commit(tmp_path: Path) -> None:
    with bench(tmp_path) as running:
        answer = running.pool.request(
            "POST", f"{running.sidecar.url}/v1/chat/completions", preload_content=False, timeout=60,
            json={"messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 300, "temperature": 0,
                  "stream": True},
        )  # fmt: skip
        lines = iter(answer)
        first = next(lines)
        assert b"delta" in first and answer.headers["Mailboat-Version-Start"] == "0"
        running.step()
        events = [line[5:] for line in lines if line.startswith(b"data:")]
        last = json.loads(events[-2])
        assert events[-1].strip() == b"[DONE]" and last["choices"][0]["finish_reason"] == "length"
        assert last["weight_version_end"] == 1


def test_requests_run_side_by_side(tmp_path: Path) -> None:
    with bench(tmp_path) as running:
        long, _ = in_background(lambda: running.greedy(400))
        eventually(lambda: running.sidecar.active)
        assert running.greedy(3)["choices"][0]["finish_reason"] == "length"
        assert long.is_alive(), "the short one did not wait for the long one"
        long.join(60)
        several = running.post("/v1/completions", prompt="w4", max_tokens=5, n=4, seed=7)[1]
        again = running.post("/v1/completions", prompt="w4", max_tokens=5, n=4, seed=7)[1]
        texts = [choice["text"] for choice in several["choices"]]
        assert len(set(texts)) > 1 and texts == [choice["text"] for choice in again["choices"]]
        assert threading.active_count() < 60


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
        together.wait(30)  # nobody goes on before all are there
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
            thread.join(60)
            assert len(answers[0]["choices"][0]["token_ids"]) == 20 + number
    assert max(passes) >= 6 and len(passes) < 60, "not one pass for each token of each, and none for who went away"


def test_a_commit_in_the_middle_of_a_batch_is_stamped_for_all(tmp_path: Path) -> None:
    with bench(tmp_path) as running:
        asked = [in_background(lambda: running.greedy(300)) for _ in range(4)]
        eventually(lambda: running.sidecar.active == 4)
        running.step()
        for thread, answers in asked:
            thread.join(60)
            assert (answers[0]["weight_version_start"], answers[0]["weight_version_end"]) == (0, 1)
            assert len(answers[0]["choices"][0]["token_ids"]) == 300


def test_bad_requests_are_told(tmp_path: Path) -> None:
    bad: list[dict[str, Any]] = [
        {"prompt": 3},
        {"prompt": ["a", "b"]},
        {"prompt": "w1", "max_tokens": "x"},
        {"prompt": "w1", "n": 1000},
        {"prompt": "", "max_tokens": 99999},
    ]
    with bench(tmp_path) as running:
        for body in bad:
            status, answer = running.post("/v1/completions", **body)
            assert status == 400 and answer["error"]["message"].endswith("."), body
