"""Versions of a real model, a sidecar in front of one engine, and streaming load through it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import urllib3

from mailboat.checkpoint.files import Checkpoint
from mailboat.checkpoint.source import ArraySource
from mailboat.digest import measure
from mailboat.image import Image
from mailboat.island.sidecar.assembly import EngineOptions, Sidecar
from mailboat.island.sidecar.types import Applied
from mailboat.island.stop import Stop
from mailboat.patch.build import build_patch

PROMPTS = [
    "Write about the sea, " * 40 + "and then",  # long enough for whole blocks of the prefix cache
    "The harbour at night " * 40 + "is",
]
TOKENS = list(range(1000, 1200))  # of no text, and no other prompt's beginning


class Rig:
    """An image and its next versions."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        with Checkpoint.open(checkpoint) as opened:
            self.image = Image.create(folder / "image", opened, measure(opened))
        self.number = 0
        self._random = np.random.default_rng(5)

    def applied(self) -> Applied:
        """The version that the image holds."""
        return Applied("engines", "run-of-engines", 0, self.number, self.image.digest)

    def step(self, sidecar: Sidecar, at_commit: Callable[[], object] = lambda: None) -> None:
        """A patch of 0.2 % of all elements, by a few units in the last place, and its commit."""
        arrays, dtypes = {}, {}
        for index, tensor in enumerate(self.image.inventory.tensors):
            data = np.empty(tensor.nbytes, np.uint8)
            self.image.read(index, 0, data)
            array = data.view(np.uint16)
            where = self._random.integers(0, array.size, max(1, array.size // 500))
            array[where] ^= self._random.integers(1, 32, where.size).astype(np.uint16)
            arrays[tensor.name], dtypes[tensor.name] = array.reshape(tensor.shape), tensor.dtype
        side = {file.path: self.image.read_side(file.path) for file in self.image.side_files}
        target = ArraySource(arrays, dtypes=dtypes, side_files=side, aliases=dict(self.image.inventory.aliases))
        patch = self.folder / "next.mbp"
        built = build_patch(self.image, target, patch)
        overlay = self.image.prepare([patch], built.target_state)
        try:
            number = self.number + 1
            applied = Applied("engines", "run-of-engines", 0, number, overlay.target.digest)
            at_commit()
            sidecar.engine.commit(self.image, overlay, applied)
            self.number = number
        finally:
            overlay.close()


def front(url: str, say: Callable[[str], None]) -> Sidecar:
    """A sidecar in front of one vLLM."""
    return Sidecar(EngineOptions("vllm", (url,), "127.0.0.1:0"), stop=Stop(), say=say)


def greedy(url: str) -> list[Any]:
    """Greedy tokens and logprobs of each prompt, one at a time, so that batches do not matter; also on routes of other
    shapes: tokens in and out, and messages.
    """
    plain = {"model": "smol", "max_tokens": 12, "temperature": 0}
    found = [_asked(url, "/v1/completions", plain | {"prompt": prompt, "logprobs": 1}) for prompt in PROMPTS]
    sampling = {"max_tokens": 12, "temperature": 0, "logprobs": 1}
    found.append(_asked(url, "/inference/v1/generate", {"token_ids": TOKENS, "sampling_params": sampling}))
    found.append(_asked(url, "/v1/messages", plain | {"messages": [{"role": "user", "content": PROMPTS[0]}]}))
    return found


def _asked(url: str, path: str, body: dict[str, Any]) -> Any:
    """What was generated, without the labels of versions and the like."""
    answer = urllib3.request("POST", url + path, json=body, timeout=300, retries=False).json()
    found = answer.get("choices") or answer.get("content")
    if not found:
        raise RuntimeError(f"no answer to a greedy request on {path}: {answer}")
    return [found[0].get(key) for key in ("text", "token_ids", "logprobs")]


@dataclass
class Load:
    """Streams that run while versions change; what was lost or stamped wrongly."""

    url: str
    known: Rig
    streams: int = 3
    tokens: int = 16
    finished: int = 0
    lost: int = 0
    misstamped: int = 0
    problems: list[str] = field(default_factory=list)

    def __enter__(self) -> Load:
        """Starts."""
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(self.streams)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Lets what runs end."""
        self._ended.set()
        for thread in self._threads:
            thread.join(300)

    def wait(self, more: int) -> None:
        """Waits until so many more have ended."""
        goal, deadline = self.finished + more, time.monotonic() + 300
        while self.finished < goal and time.monotonic() < deadline:
            time.sleep(0.02)

    def _run(self, number: int) -> None:
        pool, count = urllib3.PoolManager(), 0
        while not self._ended.is_set():
            count += 1
            self.one(pool, f"Story {number} {count}: {PROMPTS[number % 2]}")

    def one(self, pool: urllib3.PoolManager, prompt: str) -> None:
        """One streaming request, judged."""
        before = self.known.number
        body = {"model": "smol", "prompt": prompt, "max_tokens": self.tokens, "ignore_eos": True, "stream": True}
        try:
            answer = pool.request("POST", f"{self.url}/v1/completions", json=body, timeout=300, preload_content=False)
            events = [line[5:].strip() for line in answer if line.startswith(b"data:")]
            whole = answer.status == 200 and bool(events) and events[-1] == b"[DONE]"
            last = json.loads(events[-2]) if whole else {}
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            whole, last = False, {}
            self.problems.append(repr(error))
        self.finished += 1
        if not whole or last["choices"][0]["finish_reason"] != "length":
            self.lost += 1
            return
        start, end = int(answer.headers["Mailboat-Version-Start"]), last["weight_version_end"]
        # A commit is under way for a moment before the rig counts it.
        self.misstamped += not (before <= start <= end <= self.known.number + 1)
