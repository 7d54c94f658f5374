"""The object store keeps the promises of `registry.blobs`, on a real S3 server and on a folder."""

from __future__ import annotations

import asyncio
import hashlib
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane.registry import blobs, object_blobs
from controlplane.registry.blobs import OffsetMismatch
from controlplane.registry.errors import Missing, Refusal, StorageUnavailable, Unacceptable
from controlplane.registry.object_blobs import ObjectBlobs
from tests import peers
from tests.waiting import free_port

RUN, OTHER, UPLOAD = uuid.uuid4(), uuid.uuid4(), uuid.uuid4()


def name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with peers.s3(tmp_path_factory.mktemp("s3")) as address:
        yield address


@pytest.fixture(params=["s3", "file"])
def store(request: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ObjectBlobs:
    if request.param == "file":
        return ObjectBlobs(f"file://{tmp_path}/store")
    for key, value in peers.KEYS.items():
        monkeypatch.setenv(key, value)
    prefix = uuid.uuid4().hex
    return ObjectBlobs(f"s3://mailboat/{prefix}?endpoint={request.getfixturevalue('endpoint')}&region=us-east-1")


def test_blobs_come_back_whole_and_in_ranges(store: ObjectBlobs, tmp_path: Path) -> None:
    data = bytes(range(256)) * 10_000
    assert store.check() == ""
    assert store.size(RUN, name(data)) is None
    assert store.write(RUN, data) == (name(data), len(data))
    assert store.write(RUN, data) == (name(data), len(data))
    assert store.size(RUN, name(data)) == len(data)
    assert store.read(RUN, name(data)) == data
    assert b"".join(store.open(RUN, name(data), 5, 1_500_000)) == data[5:1_500_000]
    assert store.local(RUN, name(data), tmp_path).read_bytes() == data

    async def collect() -> bytes:
        return b"".join([piece async for piece in store.stream(RUN, name(data), 7, len(data))])

    assert asyncio.run(collect()) == data[7:]
    store.remove(RUN, name(data))
    store.remove(RUN, name(data))
    assert store.size(RUN, name(data)) is None


def test_a18_a_blob_of_another_run_is_not_there(store: ObjectBlobs) -> None:
    store.write(RUN, b"weights")
    assert store.size(OTHER, name(b"weights")) is None
    with pytest.raises(Missing):
        store.read(OTHER, name(b"weights"))
    with pytest.raises(Missing):
        store.open(OTHER, name(b"weights"))
    with pytest.raises(Missing):
        blobs.key(RUN, "../../secret")


def test_a_file_larger_than_one_request(store: ObjectBlobs, tmp_path: Path) -> None:
    data = hashlib.sha256(b"seed").digest() * (object_blobs.AT_ONCE // 16)
    source = tmp_path / "large"
    source.write_bytes(data)
    assert store.write_file(RUN, source) == (name(data), len(data))
    assert store.size(RUN, name(data)) == len(data)
    assert hashlib.sha256(b"".join(store.open(RUN, name(data)))).hexdigest() == name(data)


def test_uploads_resume_at_the_true_offset(store: ObjectBlobs) -> None:
    data = b"0123456789"
    assert store.upload_offset(RUN, UPLOAD) == 0
    assert store.append(RUN, UPLOAD, 0, data[:4], 10) == 4
    with pytest.raises(OffsetMismatch) as refused:
        store.append(RUN, UPLOAD, 0, data[:4], 10)
    assert refused.value.offset == 4
    with pytest.raises(Unacceptable):
        store.append(RUN, UPLOAD, 4, data, 10)
    assert store.append(RUN, UPLOAD, 4, data[4:], 10) == 10
    store.finish(RUN, UPLOAD, name(data), 10)
    store.finish(RUN, UPLOAD, name(data), 10)
    assert store.read(RUN, name(data)) == data
    assert store.upload_offset(RUN, UPLOAD) == 0


@pytest.mark.parametrize("size", [10, object_blobs.AT_ONCE + 5])
def test_a22_wrong_bytes_never_get_a_name(store: ObjectBlobs, size: int) -> None:
    store.append(RUN, UPLOAD, 0, b"x" * size, size)
    with pytest.raises(Unacceptable) as refused:
        store.finish(RUN, UPLOAD, name(b"y" * size), size)
    assert refused.value.code == "digest_mismatch"
    assert store.size(RUN, name(b"y" * size)) is None
    assert store.upload_offset(RUN, UPLOAD) == 0


def test_parts_go_straight_into_the_store(store: ObjectBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_blobs, "PART", 4)
    data = b"0123456789"
    parts = store.presign_put_parts(RUN, UPLOAD, len(data), 60)
    if parts is None:  # a folder takes none
        assert store.presign_get(RUN, name(data), 60) is None
        return
    assert [(part.offset, part.size) for part in parts] == [(0, 4), (4, 4), (8, 2)]
    for part in parts[:2]:
        put(part.url, data[part.offset : part.offset + part.size])
    assert store.finish_parts(RUN, UPLOAD, name(data), len(data)) == [2]
    left = store.presign_put_parts(RUN, UPLOAD, len(data), 60)
    assert left is not None
    assert [part.index for part in left] == [2]
    put(left[0].url, data[8:])
    assert not store.finish_parts(RUN, UPLOAD, name(data), len(data))
    assert not store.finish_parts(RUN, UPLOAD, name(data), len(data))
    address = store.presign_get(RUN, name(data), 60)
    assert address is not None
    request = urllib.request.Request(address, headers={"Range": "bytes=2-4"})
    with urllib.request.urlopen(request) as answer:
        assert answer.read() == b"234"


def put(url: str, data: bytes) -> None:
    headers = {"Content-Type": "application/octet-stream"}
    with urllib.request.urlopen(urllib.request.Request(url, data=data, method="PUT", headers=headers)) as answer:
        assert answer.status == 200


def test_a24_damage_is_found_and_mended(store: ObjectBlobs) -> None:
    import obstore

    store.write(RUN, b"weights")
    obstore.put(store._store, blobs.key(RUN, name(b"weights")), b"weighty")
    with pytest.raises(Refusal) as refused:
        store.read(RUN, name(b"weights"))
    assert refused.value.code == "blob_damaged"
    obstore.put(store._store, blobs.key(RUN, name(b"weights")), b"we")
    store.write(RUN, b"weights")
    assert store.read(RUN, name(b"weights")) == b"weights"


def test_documents_are_replaced_listed_and_removed(store: ObjectBlobs) -> None:
    folder = f"runs/{RUN}/versions/"
    assert store.read_document(f"{folder}0.json") is None and store.documents(folder) == frozenset()
    store.write_document(f"{folder}0.json", b"one")
    store.write_document(f"{folder}0.json", b"two")
    store.write_document(f"{folder}deeper/1.json", b"")
    assert store.read_document(f"{folder}0.json") == b"two"
    assert store.documents(folder) == {"0.json"}
    for _ in range(2):
        store.remove_document(f"{folder}0.json")
    assert store.documents(folder) == frozenset()


def test_a_store_that_is_away_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in peers.KEYS.items():
        monkeypatch.setenv(key, value)
    away = ObjectBlobs(f"s3://mailboat/x?endpoint=http://127.0.0.1:{free_port()}&region=us-east-1")
    with pytest.raises(StorageUnavailable) as refused:
        away.size(RUN, name(b"x"))
    assert "127.0.0.1" not in refused.value.detail
