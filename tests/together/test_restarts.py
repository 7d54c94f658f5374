"""Restarts of everything that can restart, while a trainer publishes and an island follows."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psycopg

from controlplane.embedded.postgres import database_url, places
from controlplane.embedded.stack import Stack
from controlplane.jobs.queues import NAMES
from mailboat.client import Api
from mailboat.errors import MailboatError
from mailboat.trainer import Publisher
from tests.together.test_backup import _own_environment, open_home
from tests.together.test_managed import at, island, manage, token
from tests.waiting import PATIENCE, eventually, free_port

__all__ = ["_own_environment", "open_home"]  # fixtures


def test_a50_nothing_is_lost_when_broker_database_and_web_restart(open_home: Path, tmp_path: Path) -> None:
    port = free_port()
    extra = {"MAILBOAT_HEARTBEAT_SECONDS": "1"}
    environment = {**os.environ, **extra, "MAILBOAT_HOME": str(open_home)}
    arrays = {"a": np.arange(20_000, dtype=np.uint16).reshape(200, 100)}
    with Stack(open_home, port, extra) as stack:
        stack.wait_ready(PATIENCE)
        manage("create_project", "harbour", environment=environment)
        publisher, operator_token = token("publisher", environment), token("operator", environment)
        operator = Api(stack.url, "harbour", operator_token)
        with (
            Publisher(stack.url, "harbour", "voyage", publisher, state_dir=tmp_path / "copy") as trainer,
            island_of(stack, trainer, operator, arrays, tmp_path, environment) as name,
        ):
            published, enough = threading.Event(), threading.Event()
            training = threading.Thread(target=train, args=(trainer, arrays, published, enough), daemon=True)
            training.start()
            for blow in (lambda: kill_web(stack), lambda: kill_database(open_home), lambda: lose_messages(open_home)):
                published.clear()
                blow()
                assert published.wait(PATIENCE), "publishing did not go on"
            enough.set()
            training.join(PATIENCE)
            assert not training.is_alive()
            newest = operator.newest_version("voyage")
            assert newest is not None and newest.number >= 3
            eventually(lambda: at(operator, name) == newest.number)


def island_of(stack, trainer, operator, arrays, folder, environment):  # type: ignore[no-untyped-def]
    trainer.publish(arrays, step=0).wait_ready(PATIENCE)
    return island(stack.url, operator, folder, environment)


def train(trainer: Publisher, arrays: Any, published: threading.Event, enough: threading.Event) -> None:
    """Version after version. What was interrupted is published again, which is harmless when it had arrived."""
    for step in itertools.takewhile(lambda _: not enough.is_set(), itertools.count(1)):
        arrays["a"][step % 200] ^= 1
        while True:
            try:
                trainer.publish(arrays, step=step).wait_ready(PATIENCE)
            except MailboatError:
                time.sleep(0.2)  # what restarts needs a moment
                continue
            break
        published.set()


def kill_web(stack: Stack) -> None:
    os.kill(stack.pids()["web"], signal.SIGKILL)


def kill_database(home: Path) -> None:
    os.kill(int((places(home).data / "postmaster.pid").read_text().split()[0]), signal.SIGKILL)


def lose_messages(home: Path) -> None:
    def purge() -> bool:
        try:
            with psycopg.connect(database_url(home)) as connection:
                for queue in NAMES:
                    connection.execute("select pgmq.purge_queue(%s)", [queue])
        except psycopg.OperationalError:
            return False
        return True

    eventually(purge)
