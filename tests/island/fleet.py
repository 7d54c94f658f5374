"""What island tests share: a trainer that publishes to the contract server, and islands as threads or as real
processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mailboat.checkpoint.files import Checkpoint
from mailboat.checkpoint.source import ArraySource
from mailboat.checkpoint.writing import write_checkpoint
from mailboat.digest import State, measure
from mailboat.image import Image
from mailboat.island.stop import Stop
from mailboat.island.sync import IslandOptions, run_island
from mailboat.trainer import PublishedVersion, Publisher
from tests.island.contract_server import PROJECT, RUN, ContractServer
from tests.waiting import PATIENCE

CONFIG = b'{"model_type": "test"}'


class Trainer:
    """Random BF16 weights that change a little with every step, published with the real Publisher."""

    def __init__(
        self, server: ContractServer, folder: Path, *, seed: int = 1, rows: int = 40, signing_key: Path | None = None
    ) -> None:
        self.random = np.random.default_rng(seed)
        self.weights = {
            "embed.weight": self.random.integers(0, 1 << 16, (rows, 33), np.uint16),
            "layer.weight": self.random.integers(0, 1 << 16, (17, rows), np.uint16),
            "norm.weight": self.random.integers(0, 1 << 16, (rows,), np.uint16),
        }
        self.publisher = Publisher(
            server.address, PROJECT, RUN, "publisher", state_dir=folder / "publisher", signing_key=signing_key
        )
        self.folder = folder
        self.published: list[PublishedVersion] = []

    def __enter__(self) -> Trainer:
        """Returns the trainer."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the publisher."""
        self.publisher.close()

    def step(self, changes: int = 20) -> PublishedVersion:
        """Changes some weights (none before the first version) and publishes."""
        if self.published:
            for name, weight in self.weights.items():
                flat = weight.reshape(-1)
                where = self.random.choice(flat.size, min(changes, flat.size), replace=False)
                flat[where] ^= self.random.integers(1, 1 << 16, where.size, np.uint16)
                self.weights[name] = weight
        return self.publish()

    def source(self) -> ArraySource:
        """The weights as they are."""
        return ArraySource(self.weights, dtypes=dict.fromkeys(self.weights, "BF16"), side_files={"config.json": CONFIG})

    def publish(self) -> PublishedVersion:
        """Publishes the weights as they are, from a checkpoint folder."""
        folder = self.folder / "checkpoint"
        write_checkpoint(self.source(), folder)
        version = self.publisher.publish_checkpoint(folder, step=len(self.published))
        self.published.append(version)
        return version

    def state(self) -> State:
        """The digests of the weights as they are."""
        return measure(self.source())


class RunningIsland:
    """An island in a thread."""

    def __init__(self, server: ContractServer, store: Path, **options: Any) -> None:
        self.stop = Stop()
        self.lines: list[str] = []
        self.error: BaseException | None = None
        options = {"token": "once", "poll_seconds": 5.0, "image": store / "image", **options}
        self.options = IslandOptions(server=server.address, project=PROJECT, store=store, **options)
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            run_island(self.options, stop=self.stop, say=self.lines.append)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self.error = error

    def join(self) -> None:
        """Waits for its end and raises what it raised."""
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive(), self.lines
        if self.error is not None:
            raise self.error


@contextmanager
def island(server: ContractServer, store: Path, **options: Any) -> Iterator[RunningIsland]:
    """An island that runs for the length of a block."""
    running = RunningIsland(server, store, **options)
    running.thread.start()
    try:
        yield running
    finally:
        running.stop.set()
        with server.changed:
            server.released = True
            server.changed.notify_all()
        running.thread.join(PATIENCE)
        server.released = False
        assert not running.thread.is_alive()
    if running.error is not None:
        raise running.error


def held_state(store: Path) -> str:
    """The digest of the bytes in an island's image, measured from outside with a plain reader."""
    with Checkpoint.open(store / "image") as checkpoint:
        return measure(checkpoint).digest


def image_state(store: Path) -> State:
    """The state that an image says it has, measured again."""
    with Image.open(store / "image") as image:
        return image.measure()


def start_process(server: ContractServer, store: Path, *extra: str, off: float = 0) -> subprocess.Popen[bytes]:
    """The real command in a process of its own, whose clock is ``off`` by so many seconds; its log lies beside the
    store.
    """
    store.parent.mkdir(parents=True, exist_ok=True)
    wrong = f"import time; right = time.time; time.time = lambda: right() + {off}; "
    program = ["-c", f"{wrong}from mailboat.cli import main; main()"] if off else ["-m", "mailboat.cli"]
    command = [
        sys.executable, *program, "island", "run", "--server", server.address, "--project", PROJECT,
        "--store", str(store), "--image", str(store / "image"), "--token", "once", *extra,
    ]  # fmt: skip
    with (store.parent / f"{store.name}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "NO_PROXY": "*"})
