"""The main path on servers that somebody else runs: PostgreSQL 15, RabbitMQ or Redis as broker, S3 for blobs.

Publish, follow, publish again, replay, verify: with the processes that `manage.py up` starts, over real sockets.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest

from controlplane.embedded.stack import Stack
from mailboat.client import Api
from mailboat.trainer import Publisher
from tests import peers
from tests.waiting import PATIENCE, eventually, free_port

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("MAILBOAT_", "DATABASE_URL"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A database of its own on the PostgreSQL server that is there."""
    server = peers.need(peers.POSTGRESQL, "PostgreSQL")
    name = f"mailboat_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(server, autocommit=True) as connection:
        if connection.info.server_version < 150000:
            peers.absent("PostgreSQL is older than 15")
        connection.execute(f"create database {name}")
    yield server.rpartition("/")[0] + f"/{name}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"drop database {name} with (force)")


@pytest.fixture
def broker(request: Any) -> Iterator[str]:
    """RabbitMQ or Redis, without our queues afterwards; empty: PostgreSQL is the queue."""
    url = {"rabbitmq": peers.RABBITMQ, "redis": peers.REDIS, "": ""}[request.param]
    if not url:
        yield ""
        return
    peers.need(url, request.param)
    yield url
    from kombu import Connection

    from controlplane.jobs.queues import NAMES

    with Connection(url) as connection:
        for name in NAMES:
            with contextlib.suppress(Exception):
                connection.default_channel.queue_delete(name)


@pytest.fixture
def blob_url(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """S3; empty: a folder."""
    if not request.param:
        yield ""
        return
    for key, value in peers.KEYS.items():
        monkeypatch.setenv(key, value)
    with peers.s3(tmp_path) as endpoint:
        yield f"s3://mailboat/fleet?endpoint={endpoint}&region=us-east-1"


@pytest.mark.parametrize(
    ("broker", "blob_url"),
    [("rabbitmq", ""), ("redis", ""), ("", "s3")],
    indirect=True,
    ids=["rabbitmq", "redis", "s3"],
)
def test_the_main_path_on_managed_servers(database: str, broker: str, blob_url: str, tmp_path: Path) -> None:
    port = free_port()
    extra = {"DATABASE_URL": database, "MAILBOAT_HEARTBEAT_SECONDS": "1"}
    extra |= {"MAILBOAT_BROKER_URL": broker} if broker else {}
    extra |= {"MAILBOAT_BLOB_URL": blob_url} if blob_url else {}
    environment = {**os.environ, **extra, "MAILBOAT_HOME": str(tmp_path / "home")}
    with Stack(tmp_path / "home", port, extra) as stack:
        stack.wait_ready(PATIENCE)
        manage("create_project", "harbour", environment=environment)
        tokens = {role: token(role, environment) for role in ("publisher", "operator")}
        operator = Api(stack.url, "harbour", tokens["operator"])
        rng = np.random.default_rng(1)
        arrays = {"a": rng.integers(0, 1 << 16, (9000, 64), np.uint16), "b": np.arange(77, dtype=np.int16)}
        with Publisher(stack.url, "harbour", "voyage", tokens["publisher"], state_dir=tmp_path / "copy") as trainer:
            trainer.publish(arrays, step=0).wait_ready(PATIENCE)
            with island(stack.url, operator, tmp_path, environment) as name:
                eventually(lambda: at(operator, name) == 0)
                arrays["a"][::7, 3] ^= 1
                trainer.publish(arrays, step=1).wait_ready(PATIENCE)
                eventually(lambda: at(operator, name) == 1)
                replayed = finished(operator, "replay", run="voyage", version=1)
                assert replayed["state"] == "succeeded", replayed
                verified = finished(operator, "verify", island=row(operator, name)["id"])
                assert verified["state"] == "succeeded", verified
        if blob_url:
            assert not list((tmp_path / "home").glob("blobs/runs/*/blobs/*"))
            asked = (tmp_path / "moto.log").read_text()
            assert re.search(r'"PUT /mailboat/\S+/part-00000\?\S*X-Amz-Signature', asked), "the anchor went past us"
            assert re.search(r'"GET /mailboat/\S+/blobs/\S+X-Amz-Signature', asked), "and came so to the island"


@contextlib.contextmanager
def island(url: str, operator: Api, folder: Path, environment: dict[str, str], *extra: str) -> Iterator[str]:
    """A real island process."""
    one_time = str(operator.create_enrolment_token("voyage", "skerry")["token"])
    command = [
        sys.executable, "-m", "mailboat.cli", "island", "run", "--server", url, "--project", "harbour",
        "--token", one_time, "--store", str(folder / "store"), "--image", str(folder / "image"),
        *extra,
    ]  # fmt: skip
    with (folder / "island.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=CHECKOUT, env=environment, stdout=log, stderr=log)
    try:
        yield "skerry"
    finally:
        process.terminate()
        process.wait(PATIENCE)


def manage(*arguments: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=CHECKOUT,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


def token(role: str, environment: dict[str, str]) -> str:
    said = manage("create_token", "--project", "harbour", "--role", role, "--name", role, environment=environment)
    return next(word for word in said.split() if word.startswith("mb_"))


def row(operator: Api, name: str) -> Any:
    return next((row for row in operator.fleet()["islands"] if row["name"] == name), None)


def at(operator: Api, name: str) -> Any:
    found = row(operator, name)
    return found and found["version"]


def finished(operator: Api, kind: str, **params: Any) -> Any:
    job = operator.create_job(kind, **params)
    return eventually(lambda: (found := operator.job(str(job["id"])))["finished_at"] and found)
