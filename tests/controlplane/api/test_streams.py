"""Uploads, downloads and the long poll against the real server, where it matters how bytes travel."""

from __future__ import annotations

import hashlib
import http.client
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from django.db import connection

from controlplane.accounts import services as accounts
from controlplane.lane import LOOKERS, THREADS
from controlplane.registry import beside, blobs, services
from controlplane.registry.errors import StorageFull
from controlplane.registry.models import Blob, Channel, Project, Run, Upload
from tests.controlplane.conftest import enrol
from tests.controlplane.making import commit, make_ready, ready
from tests.waiting import PATIENCE

pytestmark = pytest.mark.django_db(transaction=True)
MIB = 1 << 20
SOONER = 50  # seconds; a poll that nobody wakes is answered after 60


class Http:
    """One caller of the live server."""

    def __init__(self, server: str, token: str) -> None:
        self.address = urlsplit(server)
        self.headers = {"Authorization": f"Bearer {token}"}

    def open(self, timeout: float = PATIENCE) -> http.client.HTTPConnection:
        assert self.address.hostname
        return http.client.HTTPConnection(self.address.hostname, self.address.port, timeout=timeout)

    def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        link = self.open()
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            link.request(method, f"/api/v1/projects/harbour/{path}", body, self.headers | named)
            answer = link.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            link.close()


@pytest.fixture
def publisher(server: str, project: Project, run: Run) -> Http:
    return Http(server, accounts.create_token(project, "publisher", "trainer", actor="test")[1])


def begin(run: Run, data: bytes) -> str:
    upload = services.begin_upload(run, hashlib.sha256(data).hexdigest(), len(data))
    assert upload is not None
    return f"runs/minilm/blobs/uploads/{upload.pk}"


# Uploads


def test_an_upload_in_pieces(run: Run, publisher: Http) -> None:
    data = os.urandom(3 * MIB + 17)
    path = begin(run, data)
    status, headers, _ = publisher("PATCH", path, data[:MIB], Upload_Offset="0")
    assert (status, headers["upload-offset"]) == (204, str(MIB))
    assert publisher("HEAD", path)[1]["upload-offset"] == str(MIB)
    status, headers, body = publisher("PATCH", path, data[:MIB], Upload_Offset="0")
    assert (status, headers["upload-offset"]) == (409, str(MIB)) and b"upload_offset" in body
    assert publisher("PATCH", path, data[MIB:], Upload_Offset=str(MIB))[0] == 204
    sha256 = hashlib.sha256(data).hexdigest()
    assert publisher("GET", f"runs/minilm/blobs/{sha256}")[2] == data
    assert services.begin_upload(run, sha256, len(data)) is None
    assert publisher("HEAD", path)[0] == 404
    assert not Upload.objects.exists() and Blob.objects.filter(run=run).count() == 1


def test_a10_a_connection_that_breaks_loses_nothing_that_arrived(run: Run, publisher: Http) -> None:
    data = os.urandom(4 * MIB)
    path = begin(run, data)
    link = publisher.open()
    link.putrequest("PATCH", f"/api/v1/projects/harbour/{path}")
    for name, value in (publisher.headers | {"Upload-Offset": "0", "Content-Length": str(len(data))}).items():
        link.putheader(name, value)
    link.endheaders()
    link.send(data[: 2 * MIB + 5])
    upload = Upload.objects.get()
    wait_for(lambda: blobs.store().upload_offset(run.pk, upload.pk) >= MIB)
    link.close()
    wait_for(lambda: Upload.objects.get().offset >= MIB)
    offset = int(publisher("HEAD", path)[1]["upload-offset"])
    assert MIB <= offset <= 2 * MIB + 5
    assert publisher("PATCH", path, data[offset:], Upload_Offset=str(offset))[0] == 204
    assert Blob.objects.filter(run=run, size=len(data)).exists()


def test_a_wrong_digest_is_refused_and_starts_again(run: Run, publisher: Http) -> None:
    path = begin(run, b"right")
    status, _, body = publisher("PATCH", path, b"wrong", Upload_Offset="0")
    assert status == 422 and b"digest_mismatch" in body
    assert not Blob.objects.exists()
    assert publisher("HEAD", path)[1]["upload-offset"] == "0"
    assert publisher("PATCH", path, b"right", Upload_Offset="0")[0] == 204


def test_more_bytes_than_announced_are_refused(run: Run, publisher: Http) -> None:
    status, _, body = publisher("PATCH", begin(run, b"right"), b"right and more", Upload_Offset="0")
    assert status == 422 and b"upload_too_long" in body and not Blob.objects.exists()


def test_an_empty_blob(run: Run, publisher: Http) -> None:
    sha256 = hashlib.sha256(b"").hexdigest()
    assert services.begin_upload(run, sha256, 0) is None
    status, headers, body = publisher("GET", f"runs/minilm/blobs/{sha256}")
    assert (status, headers["content-length"], body) == (200, "0", b"")


@pytest.mark.parametrize("offset", ["", "x", "-1", "1.0", "9" * 30])
def test_a_bad_offset_is_400(run: Run, publisher: Http, offset: str) -> None:
    assert publisher("PATCH", begin(run, b"right"), b"right", Upload_Offset=offset)[0] == 400


def test_uploads_are_the_publishers(run: Run, server: str, publisher: Http, project: Project, foreign: Project) -> None:
    path = begin(run, b"right")
    for role, where, expected in [("viewer", project, 403), ("publisher", foreign, 404)]:
        caller = Http(server, accounts.create_token(where, role, "x", actor="test")[1])
        assert caller("PATCH", path, b"right", Upload_Offset="0")[0] == expected
    assert Http(server, "mb_wrong")("PATCH", path, b"right", Upload_Offset="0")[0] == 401
    assert publisher("PATCH", path.replace("minilm", "other"), b"right", Upload_Offset="0")[0] == 404
    assert publisher("PATCH", path[:-4] + "0000", b"right", Upload_Offset="0")[0] == 404
    assert publisher("PUT", path, b"right")[0] == 405


def test_a09_a_full_disk_is_507_and_keeps_what_was_there(run: Run, publisher: Http, monkeypatch: Any) -> None:
    data = os.urandom(2 * MIB)
    path = begin(run, data)
    assert publisher("PATCH", path, data[:MIB], Upload_Offset="0")[0] == 204
    real, state = os.pwrite, {"full": True}

    def pwrite(handle: int, view: Any, offset: int) -> int:
        if state["full"]:
            real(handle, view[:1000], offset)
            raise OSError(28, "No space left on device")
        return real(handle, view, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    status, _, body = publisher("PATCH", path, data[MIB:], Upload_Offset=str(MIB))
    assert status == 507 and b"storage_full" in body
    assert publisher("HEAD", path)[1]["upload-offset"] == str(MIB)
    state["full"] = False
    assert publisher("PATCH", path, data[MIB:], Upload_Offset=str(MIB))[0] == 204


def test_a09_a_blob_that_can_not_fit_is_refused_before_it_is_sent(run: Run) -> None:
    with pytest.raises(StorageFull):
        services.begin_upload(run, "a" * 64, 1 << 43)


def test_two_feeders_of_one_upload_do_not_mix(run: Run, publisher: Http) -> None:
    data = os.urandom(8 * MIB)
    path = begin(run, data)
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: publisher("PATCH", path, data, Upload_Offset="0")[0], range(2)))
    assert 204 in answers and set(answers) <= {204, 404, 409}
    sha256 = hashlib.sha256(data).hexdigest()
    assert hashlib.sha256(blobs.store().path(run.pk, sha256).read_bytes()).hexdigest() == sha256


# Downloads


@pytest.fixture
def blob(run: Run) -> tuple[str, bytes]:
    data = os.urandom(MIB + 100)
    return f"runs/minilm/blobs/{services.add_blob(run, data).sha256}", data


@pytest.mark.parametrize(
    ("asked", "start", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=10-", 10, MIB + 100),
        ("bytes=-5", MIB + 95, MIB + 100),
        ("bytes=5-99999999", 5, MIB + 100),
        ("bytes=0-", 0, MIB + 100),
        ("bytes=-99999999", 0, MIB + 100),
    ],
)
def test_ranges(publisher: Http, blob: tuple[str, bytes], asked: str, start: int, end: int) -> None:
    path, data = blob
    status, headers, body = publisher("GET", path, Range=asked)
    assert (status, body) == (206, data[start:end])
    assert headers["content-range"] == f"bytes {start}-{end - 1}/{len(data)}"
    assert headers["content-length"] == str(end - start)


@pytest.mark.parametrize("asked", ["bytes=5-4", "bytes=0-1,3-4", "lines=1-2", "bytes=-", "bytes=x-"])
def test_ranges_that_mean_nothing_give_the_whole(publisher: Http, blob: tuple[str, bytes], asked: str) -> None:
    path, data = blob
    status, _, body = publisher("GET", path, Range=asked)
    assert (status, body) == (200, data)


@pytest.mark.parametrize("asked", [f"bytes={MIB + 100}-", "bytes=-0"])
def test_ranges_beyond_the_end_are_416(publisher: Http, blob: tuple[str, bytes], asked: str) -> None:
    status, headers, _ = publisher("GET", blob[0], Range=asked)
    assert (status, headers["content-range"]) == (416, f"bytes */{MIB + 100}")


def test_etags(publisher: Http, blob: tuple[str, bytes]) -> None:
    path, data = blob
    etag = f'"{path[-64:]}"'
    status, headers, body = publisher("HEAD", path)
    assert (status, headers["etag"], headers["content-length"], body) == (200, etag, str(len(data)), b"")
    assert "immutable" in headers["cache-control"]
    assert publisher("GET", path, If_None_Match=etag)[0] == 304
    assert publisher("GET", path, Range="bytes=0-0", If_Range=etag)[0] == 206
    assert publisher("GET", path, Range="bytes=0-0", If_Range='"other"')[0] == 200


def test_a24_a_damaged_blob_is_never_served(run: Run, publisher: Http, blob: tuple[str, bytes]) -> None:
    blobs.store().path(run.pk, blob[0][-64:]).write_bytes(b"short")
    status, _, body = publisher("GET", blob[0])
    assert status == 500 and b"blob_damaged" in body


def test_a18_a_blob_of_another_run_is_404(publisher: Http, other_run: Run) -> None:
    foreign = services.add_blob(other_run, b"theirs")
    assert publisher("GET", f"runs/minilm/blobs/{foreign.sha256}")[0] == 404
    assert publisher("GET", "runs/minilm/blobs/zz")[0] == 404


def test_streaming_costs_little_memory(run: Run, publisher: Http) -> None:
    """256 MiB up and down in under 32 MiB above the idle process (client included)."""
    size = 256 * MIB
    piece = os.urandom(MIB)
    digest = hashlib.sha256()
    for _ in range(256):
        digest.update(piece)
    upload = services.begin_upload(run, digest.hexdigest(), size)
    assert upload is not None
    publisher("HEAD", "runs/minilm/blobs/" + "0" * 64)
    with Peak() as peak:
        link = publisher.open()
        headers = publisher.headers | {"Upload-Offset": "0", "Content-Length": str(size)}
        path = f"/api/v1/projects/harbour/runs/minilm/blobs/uploads/{upload.pk}"
        link.request("PATCH", path, iter([piece] * 256), headers)
        assert link.getresponse().status == 204
        link.close()
        link = publisher.open()
        link.request(
            "GET", f"/api/v1/projects/harbour/runs/minilm/blobs/{digest.hexdigest()}", headers=publisher.headers
        )
        answer, again = link.getresponse(), hashlib.sha256()
        while chunk := answer.read(MIB):
            again.update(chunk)
        link.close()
    assert again.hexdigest() == digest.hexdigest()
    assert peak.grown < 32 * MIB, f"{peak.grown / MIB:.0f} MiB"


class Peak:
    """How far resident memory rises above its start."""

    def __enter__(self) -> Peak:
        self.process, self.done, self.high = psutil.Process(), threading.Event(), 0
        self.start = self.process.memory_info().rss
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while not self.done.wait(0.02):
            self.high = max(self.high, self.process.memory_info().rss)

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()
        self.grown = max(0, self.high - self.start)


# Long poll


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(70) as executor:
        yield executor
        connection.close()


HEAD = "runs/minilm/channels/latest/head"


def test_no_head_yet_is_204(publisher: Http) -> None:
    assert publisher("GET", HEAD)[0] == 204
    assert publisher("GET", HEAD + "?wait=1")[0] == 204


def test_head_with_etag(run: Run, publisher: Http) -> None:
    ready(run, 0)
    status, headers, body = publisher("GET", HEAD)
    assert status == 200 and body == blobs.store().document_path(beside.head_name(run.pk, "latest")).read_bytes()
    assert publisher("GET", HEAD, If_None_Match=headers["etag"])[0] == 304
    assert publisher("GET", HEAD + "?after=1&wait=1", If_None_Match=headers["etag"])[0] == 304
    assert publisher("GET", HEAD + "?after=0&wait=60")[0] == 200
    assert publisher("GET", HEAD + "?wait=61")[0] == 400
    assert publisher("GET", "runs/minilm/channels/stable/head")[0] == 404


def test_a_move_wakes_every_waiter_and_waiters_hold_no_connection(
    run: Run, publisher: Http, pool: ThreadPoolExecutor
) -> None:
    first = ready(run, 0)
    version = commit(run, 1, first)
    waiters = [pool.submit(publisher, "GET", HEAD + "?after=1&wait=60") for _ in range(60)]
    kept = THREADS + LOOKERS  # the server's own, however many wait
    wait_for(lambda: others() <= kept + 2 and listening() == 1, steady=1.0)
    assert not any(waiter.done() for waiter in waiters)
    make_ready(version)
    for waiter in waiters:
        assert waiter.result(SOONER)[0] == 200


def test_a_renewed_expiry_is_answered_after_the_wait(run: Run, publisher: Http) -> None:
    from datetime import timedelta

    from django.db.models.functions import Now

    ready(run, 0)
    _, headers, _ = publisher("GET", HEAD)
    Channel.objects.filter(run=run).update(expires_at=Now())
    time.sleep(1.0)  # heads count in whole seconds
    assert services.renew_heads() == 1
    Channel.objects.filter(run=run).update(expires_at=Now() + timedelta(days=7))
    assert publisher("GET", HEAD + "?after=1&wait=1", If_None_Match=headers["etag"])[0] == 200


def test_a50_listening_comes_back_after_the_database_dropped_it(
    run: Run, publisher: Http, pool: ThreadPoolExecutor
) -> None:
    version = commit(run, 0)
    waiter = pool.submit(publisher, "GET", HEAD + "?wait=60")
    wait_for(lambda: listening() == 1)
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'mailboat heads' AND datname = current_database()"
        )
    make_ready(version)
    assert waiter.result(SOONER)[0] == 200
    again = pool.submit(publisher, "GET", HEAD + "?after=1&wait=60")
    wait_for(lambda: listening() == 1)
    ready(run, 1, version)
    assert again.result(SOONER)[0] == 200


def test_a51_a_credential_revoked_while_it_waits_is_401(
    run: Run, server: str, publisher: Http, pool: ThreadPoolExecutor
) -> None:
    island, credential = enrol(run)
    version = commit(run, 0)
    waiter = pool.submit(Http(server, credential), "GET", HEAD + "?wait=60")
    wait_for(lambda: listening() == 1, steady=0.3)
    assert island.token is not None
    accounts.revoke_token(island.token, actor="owner")
    make_ready(version)
    assert waiter.result(SOONER)[0] == 401


def others() -> int:
    """Connections to this database besides the one that asks."""
    return _count("pid <> pg_backend_pid()")


def listening() -> int:
    """Connections that listen for heads."""
    return _count("application_name = 'mailboat heads' AND query LIKE 'LISTEN%%'")


def _count(condition: str) -> int:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND {condition}", [])
        return int(cursor.fetchone()[0])


def wait_for(condition: Any, *, steady: float = 0.0) -> None:
    """Until the condition holds, for as long as `steady` asks."""
    deadline, since = time.monotonic() + PATIENCE, None
    while time.monotonic() < deadline:
        if condition():
            since = since or time.monotonic()
            if time.monotonic() - since >= steady:
                return
        else:
            since = None
        time.sleep(0.02)
    raise AssertionError("it did not happen in time")
