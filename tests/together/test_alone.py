"""The control plane is down: a real island follows the blob store alone, by the same signatures, and reports when the
control plane is back.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from controlplane.embedded.stack import Stack
from mailboat.client import Api
from mailboat.manifest import HEAD_TYPE, Envelope, Head
from mailboat.signing import write_key
from mailboat.trainer import Publisher
from tests import peers
from tests.together.test_backup import open_home
from tests.together.test_managed import CHECKOUT, at, database, manage, row, token
from tests.waiting import PATIENCE, eventually, free_port

__all__ = ["database", "open_home"]  # fixtures


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("MAILBOAT_", "DATABASE_URL"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def island_log(tmp_path: Path) -> Iterator[Path]:
    """What the island says."""
    yield tmp_path / "island.log"


def started(url: str, one_time: str, public: str, folder: Path, blobs: str, log: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", "mailboat.cli", "island", "run", "--server", url, "--project", "harbour",
        "--token", one_time, "--store", str(folder / "store"), "--image", str(folder / "image"),
        "--publisher-key", public, "--blob-url", blobs,
    ]  # fmt: skip
    with log.open("wb") as out:
        return subprocess.Popen(command, cwd=CHECKOUT, stdout=out, stderr=out)


def version_held(folder: Path) -> int:
    return int(json.loads((folder / "store" / "marker.json").read_text())["version"])


def test_a58_an_island_follows_the_blob_store_while_the_control_plane_is_down(
    open_home: Path, tmp_path: Path, island_log: Path
) -> None:
    port = free_port()
    extra = {"MAILBOAT_HEARTBEAT_SECONDS": "1"}
    environment = {**os.environ, **extra, "MAILBOAT_HOME": str(open_home)}
    public = write_key(tmp_path / "trainer.pem")
    arrays = {"a": np.arange(20_000, dtype=np.uint16).reshape(200, 100)}
    store = open_home / "blobs"
    with Stack(open_home, port, extra) as stack:
        stack.wait_ready(PATIENCE)
        manage("create_project", "harbour", environment=environment)
        publisher, operator = (Api(stack.url, "harbour", token(r, environment)) for r in ("publisher", "operator"))
        publisher.create_run("voyage")
        operator.register_key("voyage", public, "trainer")
        with Publisher(
            stack.url, "harbour", "voyage", publisher.token or "", state_dir=tmp_path / "copy",
            signing_key=tmp_path / "trainer.pem",
        ) as trainer:  # fmt: skip
            trainer.publish(arrays, step=0).wait_ready(PATIENCE)
            one_time = str(operator.create_enrolment_token("voyage", "skerry")["token"])
            process = started(stack.url, one_time, public, tmp_path, store.as_uri(), island_log)
            try:
                eventually(lambda: at(operator, "skerry") == 0)
                process.send_signal(signal.SIGSTOP)
                for step in (1, 2):
                    arrays["a"][step] ^= 1
                    trainer.publish(arrays, step=step).wait_ready(PATIENCE)
                stack.stop()
                _follows_the_store_alone(process, store, tmp_path, island_log)
                with Stack(open_home, port, extra) as again:
                    again.wait_ready(PATIENCE)
                    eventually(lambda: at(operator, "skerry") == 2)
                    found = row(operator, "skerry")
                    assert found["trusted_keys"] == [public]
                    eventually(lambda: row(operator, "skerry")["alarm"] is None)
                    arrays["a"][3] ^= 1
                    trainer.publish(arrays, step=3).wait_ready(PATIENCE)
                    eventually(lambda: at(operator, "skerry") == 3)
            finally:
                process.send_signal(signal.SIGCONT)
                process.terminate()
                process.wait(PATIENCE)


def _follows_the_store_alone(process: subprocess.Popen[bytes], store: Path, folder: Path, log: Path) -> None:
    """First past a head that somebody put into the store, then to the one that the control plane signed."""
    (path,) = store.glob("runs/*/channels/latest.json")
    right = path.read_bytes()
    signed = Envelope.from_json(right)
    head = Head.from_bytes(signed.payload)
    assert head.version == 2
    path.write_bytes(Envelope.wrap(HEAD_TYPE, head.to_bytes()).to_json())
    process.send_signal(signal.SIGCONT)
    eventually(lambda: "not signed by the control plane" in log.read_text())
    assert version_held(folder) < 2  # the head of version 1 may have been on its way already
    path.write_bytes(right)
    eventually(lambda: version_held(folder) == 2)


@pytest.mark.parametrize("kind", ["folder", "web", "s3"])
def test_every_kind_of_store_answers_alike(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mailboat.errors import NotFound
    from mailboat.island.bucket import bucket_at

    api = Api("http://127.0.0.1:9", "harbour")
    data = os.urandom(300_000)
    (tmp_path / "store" / "runs").mkdir(parents=True)
    (tmp_path / "store" / "runs" / "blob").write_bytes(data)
    for key, value in peers.KEYS.items():
        monkeypatch.setenv(key, value)

    def compare(url: str) -> None:
        bucket = bucket_at(url, api)
        for start in (0, 1, 299_999):
            response = bucket.open("runs/blob", start)
            whole = kind == "web" or not start  # that server knows no ranges, and transfers live with it
            assert response.read(decode_content=False) == (data if whole else data[start:])
            assert response.status == (200 if whole else 206)
            response.close()
        if kind != "web":
            assert bucket.open("runs/blob", 300_000).status == 416
        with pytest.raises(NotFound):
            bucket.open("runs/absent", 0)

    if kind == "folder":
        compare((tmp_path / "store").as_uri())
    elif kind == "web":
        handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "store"))
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            compare(f"http://127.0.0.1:{server.server_port}")
            server.shutdown()
    else:
        with peers.s3(tmp_path) as endpoint:
            import obstore
            from obstore.store import from_url

            url = f"s3://mailboat/fleet?endpoint={endpoint}&region=us-east-1"
            inside = from_url(
                "s3://mailboat/fleet", config={"endpoint": endpoint, "region": "us-east-1"},
                client_options={"allow_http": True},
            )  # fmt: skip
            obstore.put(inside, "runs/blob", data)
            compare(url)
