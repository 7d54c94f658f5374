"""Blobs that go straight to and from the blob store: what the API says of the parts, whichever store has them."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from controlplane.registry import blobs
from controlplane.registry import services as registry
from controlplane.registry.blobs import Part
from controlplane.registry.local_blobs import LocalBlobs
from controlplane.registry.models import Blob, Run, Upload
from tests.controlplane.api.test_calls import problem
from tests.controlplane.conftest import Api

pytestmark = pytest.mark.django_db

DATA = b"0123456789"
SHA256 = hashlib.sha256(DATA).hexdigest()
SIZE = 4


class PartsInFolder(LocalBlobs):
    """A store with addresses of its own: files in a folder, which a test fills as a client would with PUT."""

    def _part(self, upload: uuid.UUID, index: int) -> Path:
        return self.root / "parts" / str(upload) / str(index)

    def _parts(self, upload: uuid.UUID, length: int) -> list[Part]:
        spans = [(start, min(SIZE, length - start)) for start in range(0, length, SIZE)]
        return [
            Part(index, start, size, self._part(upload, index).as_uri()) for index, (start, size) in enumerate(spans)
        ]

    def _there(self, part: Part) -> bool:
        path = Path(part.url.removeprefix("file://"))
        return path.exists() and path.stat().st_size == part.size

    def presign_get(self, run: uuid.UUID, sha256: str, seconds: int) -> str | None:
        return f"https://store.example/{blobs.key(run, sha256)}?for={seconds}"

    def presign_put_parts(
        self, run: uuid.UUID, upload: uuid.UUID, length: int, seconds: int
    ) -> tuple[Part, ...] | None:
        return tuple(part for part in self._parts(upload, length) if not self._there(part))

    def finish_parts(self, run: uuid.UUID, upload: uuid.UUID, sha256: str, length: int) -> Sequence[int]:
        parts = self._parts(upload, length)
        missing = [part.index for part in parts if not self._there(part)]
        if not missing:
            self.upload_path(run, upload).parent.mkdir(parents=True, exist_ok=True)
            whole = b"".join(Path(part.url.removeprefix("file://")).read_bytes() for part in parts)
            self.upload_path(run, upload).write_bytes(whole)
            self.finish(run, upload, sha256, length)
        return missing


@pytest.fixture
def store(home: Path, monkeypatch: Any) -> PartsInFolder:
    found = PartsInFolder(home / "blobs")
    monkeypatch.setattr(blobs, "store", lambda: found)
    return found


@pytest.fixture
def api(token: Callable[..., Api]) -> Api:
    return token("publisher")


def announce(api: Api, **more: Any) -> Any:
    return api.post("runs/minilm/blobs", {"sha256": SHA256, "size": len(DATA)} | more)


def put(part: dict[str, Any], data: bytes) -> None:
    path = Path(part["url"].removeprefix("file://"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data[part["offset"] : part["offset"] + part["size"]])


def test_parts_go_straight_to_the_store_and_are_joined(run: Run, api: Api, store: PartsInFolder) -> None:
    body = announce(api, direct=True).json()
    assert [(part["index"], part["offset"], part["size"]) for part in body["parts"]] == [
        (0, 0, 4),
        (1, 4, 4),
        (2, 8, 2),
    ]
    for part in body["parts"][:2]:
        put(part, DATA)
    address = f"runs/minilm/blobs/uploads/{body['upload']}/complete"
    assert problem(api.post(address), 409, "parts_missing")["parts"] == [2]
    again = announce(api, direct=True).json()
    assert again["upload"] == body["upload"] and [part["index"] for part in again["parts"]] == [2]
    put(again["parts"][0], DATA)
    done = api.post(address)
    assert (done.status_code, done.json()) == (200, {"exists": True})
    assert announce(api, direct=True).json() == {"exists": True}
    assert store.read(run.pk, SHA256) == DATA
    assert Blob.objects.get(sha256=SHA256).size == len(DATA) and not Upload.objects.exists()
    problem(api.post(address), 404, "not_found")


def test_parts_with_another_digest_are_refused(run: Run, api: Api, store: PartsInFolder) -> None:
    body = announce(api, direct=True).json()
    for part in body["parts"]:
        put(part, b"x" * 10)
    problem(api.post(f"runs/minilm/blobs/uploads/{body['upload']}/complete"), 422, "digest_mismatch")
    assert store.size(run.pk, SHA256) is None and not Blob.objects.exists()


def test_nobody_gets_parts_without_asking(run: Run, api: Api, store: PartsInFolder) -> None:
    assert "parts" not in announce(api).json()


def test_a_store_that_takes_no_parts_takes_bytes(run: Run, api: Api) -> None:
    body = announce(api, direct=True).json()
    assert body["offset"] == 0 and "parts" not in body
    blobs.store().append(run.pk, uuid.UUID(body["upload"]), 0, DATA, len(DATA))
    assert api.post(f"runs/minilm/blobs/uploads/{body['upload']}/complete").status_code == 200


@pytest.mark.parametrize("role", ["viewer", "operator"])
def test_only_publishers_complete(run: Run, api: Api, token: Callable[..., Api], role: str) -> None:
    upload = announce(api).json()["upload"]
    problem(token(role).post(f"runs/minilm/blobs/uploads/{upload}/complete"), 403, "forbidden")


def test_a18_an_upload_of_another_run_is_404(run: Run, other_run: Run, api: Api) -> None:
    upload = announce(api).json()["upload"]
    problem(api.post(f"runs/qwen/blobs/uploads/{upload}/complete"), 404, "not_found")


def test_a_download_is_redirected_only_on_request(run: Run, api: Api, store: PartsInFolder) -> None:
    blob = registry.add_blob(run, DATA)
    address = f"runs/minilm/blobs/{blob.sha256}"
    moved = api.get(f"{address}?direct=1")
    assert moved.status_code == 307 and str(run.pk) in moved["Location"] and moved["Cache-Control"] == "no-store"
    assert api.get(address).status_code == 200
    problem(api.get(f"runs/minilm/blobs/{'a' * 64}?direct=1"), 404, "not_found")


def test_a_store_without_addresses_answers_itself(run: Run, api: Api) -> None:
    blob = registry.add_blob(run, DATA)
    assert api.get(f"runs/minilm/blobs/{blob.sha256}?direct=1").status_code == 200
