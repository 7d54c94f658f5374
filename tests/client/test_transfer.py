"""Downloads and uploads over a network that breaks at every possible place."""

from __future__ import annotations

import errno
import random
from pathlib import Path
from typing import Any

import pytest

from mailboat import transfer
from mailboat.client import Api
from mailboat.errors import ApiError, DigestMismatch, DiskFull, NotFound, Unreachable
from mailboat.manifest import BlobRef
from mailboat.transfer import bytes_blob, download, download_bytes, upload_bytes, upload_file
from tests.island.contract_server import PROJECT, RUN, ContractServer, Fault

GET = "GET .*/blobs/.*"
DATA = random.Random(7).randbytes(257)


@pytest.fixture
def api(server: ContractServer) -> Api:
    """A client that does not wait between tries."""
    return Api(server.address, PROJECT, "token", sleep=lambda _seconds: None)


def stored(server: ContractServer, data: bytes = DATA) -> BlobRef:
    """A blob that the server has."""
    server.put(data)
    return bytes_blob(data)


def test_a10_download_resumes_from_every_byte(server: ContractServer, api: Api, tmp_path: Path) -> None:
    blob = stored(server)
    for at in range(len(DATA) + 1):
        server.faults = [Fault(GET, "cut", at)]
        out = tmp_path / f"out-{at}"
        travelled = download(api, RUN, blob, out)
        assert out.read_bytes() == DATA
        assert travelled == len(DATA), "no byte travels twice"
        assert not (tmp_path / f"out-{at}.part").exists()


def test_a10_download_resumes_what_a_killed_process_left(server: ContractServer, api: Api, tmp_path: Path) -> None:
    blob = stored(server)
    for at in range(len(DATA) + 1):
        out = tmp_path / f"out-{at}"
        out.with_name(out.name + ".part").write_bytes(DATA[:at])
        assert download(api, RUN, blob, out) == len(DATA) - at
        assert out.read_bytes() == DATA


def test_a10_connection_that_dies_again_and_again_still_finishes(
    server: ContractServer, api: Api, tmp_path: Path
) -> None:
    blob = stored(server)
    server.faults = [Fault(GET, "cut", 10, times=25)]
    assert download(api, RUN, blob, tmp_path / "out") == len(DATA)
    assert (tmp_path / "out").read_bytes() == DATA


def test_a10_truncated_object_is_refused_at_every_length(server: ContractServer, api: Api, tmp_path: Path) -> None:
    blob = stored(server)
    for at in range(len(DATA)):
        server.faults = [Fault(GET, "short", at, times=99)]
        with pytest.raises(DigestMismatch):
            download(api, RUN, blob, tmp_path / "out")
        assert list(tmp_path.iterdir()) == []


def test_a10_object_that_changed_between_two_connections_is_refused(
    server: ContractServer, api: Api, tmp_path: Path
) -> None:
    blob = stored(server)
    server.faults = [Fault(GET, "cut", 100), Fault(GET, "stale", times=99)]
    with pytest.raises(DigestMismatch):
        download(api, RUN, blob, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a24_wrong_bytes_are_fetched_once_more(server: ContractServer, api: Api, tmp_path: Path) -> None:
    blob = stored(server)
    server.faults = [Fault(GET, "flip", 99)]
    assert download(api, RUN, blob, tmp_path / "out") == 2 * len(DATA)
    assert (tmp_path / "out").read_bytes() == DATA


@pytest.mark.parametrize("kind", ["flip", "stale", "short"])
def test_a24_wrong_bytes_twice_fail_closed(server: ContractServer, api: Api, tmp_path: Path, kind: str) -> None:
    blob = stored(server)
    server.faults = [Fault(GET, kind, 5, times=2)]
    with pytest.raises(DigestMismatch) as refused:
        download(api, RUN, blob, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    assert "\n" not in str(refused.value)


def test_a24_wrong_leftover_is_replaced(server: ContractServer, api: Api, tmp_path: Path) -> None:
    blob = stored(server)
    (tmp_path / "out.part").write_bytes(b"\0" * 100)
    download(api, RUN, blob, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == DATA


@pytest.mark.parametrize("kind", ["flip", "stale", "short"])
def test_a24_small_documents_are_verified(server: ContractServer, api: Api, kind: str) -> None:
    blob = stored(server)
    server.faults = [Fault(GET, kind, 5)]
    assert download_bytes(api, RUN, blob.sha256) == DATA
    server.faults = [Fault(GET, kind, 5, times=2)]
    with pytest.raises(DigestMismatch):
        download_bytes(api, RUN, blob.sha256)


def test_whole_file_is_not_fetched_again(server: ContractServer, api: Api, tmp_path: Path) -> None:
    blob = stored(server)
    download(api, RUN, blob, tmp_path / "out")
    assert download(api, RUN, blob, tmp_path / "out") == 0
    assert len(server.calls) == 1


def test_empty_blob(server: ContractServer, api: Api, tmp_path: Path) -> None:
    blob = stored(server, b"")
    assert download(api, RUN, blob, tmp_path / "out") == 0
    assert (tmp_path / "out").read_bytes() == b""


def test_missing_blob_is_said_at_once(server: ContractServer, api: Api, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        download(api, RUN, bytes_blob(b"never stored"), tmp_path / "out")
    assert len(server.calls) == 1


def test_server_in_trouble_is_waited_for(server: ContractServer, api: Api, tmp_path: Path) -> None:
    blob = stored(server)
    server.faults = [Fault(GET, "status", 503, times=3)]
    download(api, RUN, blob, tmp_path / "out")
    server.faults = [Fault(GET, "status", 503, times=99)]
    with pytest.raises(ApiError):
        download(api, RUN, blob, tmp_path / "other")


def test_a09_full_disk_gives_the_space_back_and_later_succeeds(
    server: ContractServer, api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = stored(server)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(transfer.os, "fsync", full)
        with pytest.raises(DiskFull):
            download(api, RUN, blob, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    download(api, RUN, blob, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == DATA


def test_upload_resumes_after_lost_answers_and_connections(
    server: ContractServer, api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "SENT_AT_ONCE", 50)
    path = tmp_path / "file"
    path.write_bytes(DATA)
    blob = transfer.file_blob(path)
    server.faults = [
        Fault("PATCH .*", "drop"),
        Fault("PATCH .*", "refuse", times=2),
        Fault("PATCH .*", "status", 503),
        Fault("POST .*/blobs", "status", 502),
    ]
    upload_file(api, RUN, blob, path)
    assert server.blobs[blob.sha256] == DATA


def test_upload_asks_for_the_true_offset(
    server: ContractServer, api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "SENT_AT_ONCE", 50)
    upload = api.begin_upload(RUN, bytes_blob(DATA).sha256, len(DATA))
    assert api.send_piece(RUN, upload.id, 0, DATA[:30]) == 30
    assert api.send_piece(RUN, upload.id, 0, DATA[:30]) == 30, "409 tells where to go on"
    assert api.upload_offset(RUN, upload.id) == 30
    assert server.blobs.get(upload_bytes(api, RUN, DATA).sha256) == DATA


def test_existing_blob_is_not_sent(server: ContractServer, api: Api) -> None:
    stored(server)
    upload_bytes(api, RUN, DATA)
    assert not [call for call in server.calls if call.startswith("PATCH")]


def test_unreachable_server_is_said_in_one_sentence(tmp_path: Path) -> None:
    api = Api("http://127.0.0.1:9", PROJECT, "secret-token", sleep=lambda _seconds: None)
    with pytest.raises(Unreachable) as raised:
        download(api, RUN, bytes_blob(DATA), tmp_path / "out")
    assert "127.0.0.1:9" in str(raised.value)
    assert "secret-token" not in str(raised.value)
