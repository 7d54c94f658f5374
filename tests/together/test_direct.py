"""Large blobs past the control plane: the real client, the real server and an S3 server, in parts of a megabyte."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from controlplane.accounts import services as accounts
from controlplane.registry import blobs, joining, object_blobs, services
from controlplane.registry import services as registry
from controlplane.registry.models import Blob, Run, Upload
from controlplane.registry.object_blobs import ObjectBlobs
from mailboat.client import Api
from mailboat.errors import ApiError
from mailboat.manifest import BlobRef
from mailboat.transfer import download, file_blob, upload_file
from tests import peers

MIB = 1 << 20
SIZE = 5 * MIB + 77


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with peers.s3(tmp_path_factory.mktemp("s3")) as address:
        yield address


@pytest.fixture
def store(endpoint: str, server: str, settings: Any, monkeypatch: pytest.MonkeyPatch) -> ObjectBlobs:
    for key, value in peers.KEYS.items():
        monkeypatch.setenv(key, value)
    settings.MAILBOAT_BLOB_URL = f"s3://mailboat/{id(settings)}?endpoint={endpoint}&region=us-east-1"
    monkeypatch.setattr(object_blobs, "PART", MIB)
    monkeypatch.setattr(services, "JOINED_AT_ONCE", 2 * MIB)
    found: Any = blobs.store()
    return found


@pytest.fixture
def run(store: ObjectBlobs) -> Run:
    project = registry.create_project("harbour", "Harbour", actor="test")
    return registry.create_run(project, "minilm", actor="test")


@pytest.fixture
def api(server: str, run: Run) -> Iterator[Api]:
    _, token = accounts.create_token(run.project, "publisher", "trainer", actor="test")
    found = Api(server, "harbour", token, sleep=lambda _seconds: None)
    yield found
    found.close()


@pytest.fixture
def source(tmp_path: Path) -> tuple[Path, BlobRef]:
    path = tmp_path / "source"
    path.write_bytes(bytes(range(251)) * (SIZE // 251 + 1))
    with path.open("r+b") as file:
        file.truncate(SIZE)
    return path, file_blob(path)


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("the bytes went through the control plane")


def test_parts_go_past_the_control_plane_and_continue_where_they_stopped(
    api: Api, run: Run, source: tuple[Path, BlobRef], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, blob = source
    monkeypatch.setattr(ObjectBlobs, "append", never)
    monkeypatch.setattr(ObjectBlobs, "stream", never)
    monkeypatch.setattr(joining, "PATIENCE", 0.0)
    put, sent = api.direct.put, list[int]()

    def broken(part: Any, body: Any) -> None:
        if len(sent) == 3:
            raise KeyboardInterrupt  # the trainer is stopped
        put(part, body)
        sent.append(part.offset)

    monkeypatch.setattr(api.direct, "put", broken)
    with pytest.raises(KeyboardInterrupt):
        upload_file(api, run.name, blob, path)
    monkeypatch.setattr(api.direct, "put", put)
    asked, complete = list[bool](), api.complete_upload
    monkeypatch.setattr(api, "complete_upload", lambda *which: asked.append(complete(*which)) or asked[-1])
    assert upload_file(api, run.name, blob, path) == SIZE - 3 * MIB
    assert asked[0] is False, "a large one is joined beside the request"
    assert upload_file(api, run.name, blob, path) == 0
    assert Blob.objects.get(sha256=blob.sha256).size == SIZE and not Upload.objects.exists()

    out = tmp_path / "out"
    out.with_name("out.part").write_bytes(path.read_bytes()[: 2 * MIB])
    assert download(api, run.name, blob, out) == SIZE - 2 * MIB
    assert out.read_bytes() == path.read_bytes()
    assert api.direct.usable


def test_where_the_store_is_out_of_reach_the_control_plane_carries_the_bytes(
    api: Api, run: Run, source: tuple[Path, BlobRef], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, blob = source
    monkeypatch.setattr(ObjectBlobs, "_sign", lambda *_: "http://127.0.0.1:9/nobody-listens-here?secret=s3cr3t")
    assert upload_file(api, run.name, blob, path) == SIZE
    assert not api.direct.usable, "the next blobs do not try"
    api.direct._rests_until = 0
    assert download(api, run.name, blob, tmp_path / "out") == SIZE
    assert (tmp_path / "out").read_bytes() == path.read_bytes()


def test_parts_with_another_digest_are_refused_and_thrown_away(
    api: Api, run: Run, source: tuple[Path, BlobRef], store: ObjectBlobs
) -> None:
    path, blob = source
    with path.open("r+b") as file:
        file.write(b"other bytes")
    with pytest.raises(ApiError) as refused:
        upload_file(api, run.name, blob, path)
    assert (refused.value.status, refused.value.code) == (422, "digest_mismatch")
    assert store.size(run.pk, blob.sha256) is None and not Blob.objects.exists()
    upload = api.begin_upload(run.name, blob.sha256, blob.size, direct=True)
    assert upload.parts is not None and len(upload.parts) == 6, "all are to be sent again"


class Store(BaseHTTPRequestHandler):
    """Answers with bytes and keeps what it was asked."""

    data = b""
    asked: list[dict[str, str]] = []

    def do_GET(self) -> None:
        """The bytes, whatever was asked for."""
        self.asked.append({name.lower(): value for name, value in self.headers.items()})
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.data)))
        self.send_header("ETag", '"of-its-own"')
        self.end_headers()
        self.wfile.write(self.data)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@pytest.mark.parametrize("right", [True, False])
def test_a24_the_store_never_sees_the_token_and_is_not_believed(
    api: Api, run: Run, source: tuple[Path, BlobRef], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, right: bool
) -> None:
    path, blob = source
    upload_file(api, run.name, blob, path)
    Store.asked.clear()
    Store.data = path.read_bytes() if right else bytes(SIZE)
    listener = ThreadingHTTPServer(("127.0.0.1", 0), Store)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    try:
        elsewhere = f"http://127.0.0.1:{listener.server_port}/blob"
        monkeypatch.setattr(ObjectBlobs, "_sign", lambda *_: elsewhere)
        download(api, run.name, blob, tmp_path / "out")
    finally:
        listener.shutdown()
        listener.server_close()
    assert hashlib.sha256((tmp_path / "out").read_bytes()).hexdigest() == blob.sha256
    assert [request.get("authorization") for request in Store.asked] == [None]
    assert api.direct.usable is right, "wrong bytes: from here on by way of the control plane"
