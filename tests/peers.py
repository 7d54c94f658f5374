"""The servers of a managed deployment that tests talk to. Where one is missing, a test is skipped, but not in CI."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.waiting import PATIENCE, free_port

POSTGRESQL = os.environ.get("MAILBOAT_TEST_POSTGRESQL", "postgresql://root@127.0.0.1:5432/postgres")
RABBITMQ = os.environ.get("MAILBOAT_TEST_RABBITMQ", "amqp://guest:guest@127.0.0.1:5672//")
REDIS = os.environ.get("MAILBOAT_TEST_REDIS", "redis://127.0.0.1:6379/9")
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}


def need(url: str, what: str) -> str:
    """The address, when somebody listens there; else the test ends here."""
    address = urlsplit(url)
    try:
        socket.create_connection((address.hostname or "127.0.0.1", address.port or 0), timeout=5).close()
    except OSError as error:
        absent(f"{what} does not answer at {address.hostname}:{address.port} ({error})")
    return url


def absent(sentence: str) -> None:
    """A skip, or a failure in CI."""
    if os.environ.get("CI") == "true":
        pytest.fail(sentence)
    pytest.skip(sentence)


@contextlib.contextmanager
def s3(folder: Path) -> Iterator[str]:
    """An S3 server with the bucket `mailboat`; its endpoint."""
    import boto3

    port = free_port()
    with (folder / "moto.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            env={**os.environ, **KEYS}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert server.poll() is None and time.monotonic() < deadline, "the S3 server did not start"
            time.sleep(0.1)  # there is nothing to wait on
        endpoint = f"http://127.0.0.1:{port}"
        client = boto3.client(
            "s3", endpoint_url=endpoint, region_name="us-east-1",
            aws_access_key_id="testing", aws_secret_access_key="testing",
        )  # fmt: skip
        client.create_bucket(Bucket="mailboat")
        yield endpoint
    finally:
        server.terminate()
        server.wait(PATIENCE)
