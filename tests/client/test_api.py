"""The client's manners: retries, typed errors, proxies, certificates; and answers that are not Mailboat's."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mailboat.client import Api
from mailboat.errors import ApiError, Conflict, MailboatError, Misaddressed, NotFound, Unauthorised, Unreachable
from mailboat.patience import pause_before
from tests.island.contract_server import PROJECT, RUN, ContractServer, Fault, Reply


@pytest.fixture
def pauses() -> list[float]:
    """The pauses that the client made."""
    return []


@pytest.fixture
def api(server: ContractServer, pauses: list[float]) -> Api:
    """A client that notes its pauses instead of sleeping."""
    return Api(server.address, PROJECT, "hush-hush", sleep=pauses.append)


@pytest.mark.parametrize(
    ("kind", "at"), [("refuse", 0), ("drop", 0), ("status", 502), ("status", 503), ("status", 504), ("cut", 3)]
)
def test_passing_trouble_is_tried_again(
    server: ContractServer, api: Api, pauses: list[float], kind: str, at: int
) -> None:
    server.faults = [Fault(f"GET runs/{RUN}", kind, at, times=3)]
    assert api.run(RUN).id == server.run_id
    assert len(pauses) == 3
    assert pauses == sorted(pauses)


def test_tries_end(server: ContractServer, api: Api, pauses: list[float]) -> None:
    server.faults = [Fault(f"GET runs/{RUN}", "status", 503, times=99)]
    with pytest.raises(ApiError) as raised:
        api.run(RUN)
    assert raised.value.status == 503
    assert len(pauses) == api.attempts - 1
    assert sum(pauses) < 20


def test_what_is_not_idempotent_is_sent_once(server: ContractServer, api: Api) -> None:
    server.faults = [Fault(".*", "drop", times=99)]
    for call in (
        lambda: api.enrol("once", {}),
        lambda: api.open_epoch(RUN, 0, "restart"),
        lambda: api.create_enrolment_token(RUN, "skerry"),
    ):
        before = len(server.calls)
        with pytest.raises(Unreachable):
            call()
        assert len(server.calls) == before + 1


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, Unauthorised), (403, Unauthorised), (404, NotFound), (409, Conflict), (422, ApiError), (507, ApiError)],
)
def test_problem_documents_become_typed_errors(
    server: ContractServer, api: Api, pauses: list[float], status: int, kind: type[ApiError]
) -> None:
    server.faults = [Fault(".*", "status", status)]
    with pytest.raises(kind) as raised:
        api.run(RUN)
    assert (raised.value.status, raised.value.code, str(raised.value)) == (
        status,
        "on_order",
        "The server says on_order.",
    )
    assert pauses == []


@pytest.mark.parametrize(
    "body", [b"<html>hello</html>", b"[]", b'{"id": 3}', b'{"id": "x", "name": "y"}', b"\xff", b"[" * 100_000, b"null"]
)
def test_answers_of_something_else_are_refused(
    server: ContractServer, api: Api, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "answer", lambda *_: Reply(200, body))
    with pytest.raises(ApiError) as raised:
        api.run(RUN)
    assert raised.value.code == "bad_reply"


def test_plans_that_would_write_elsewhere_are_refused(server: ContractServer, api: Api) -> None:
    for path in ("../x", "/etc/passwd", "a//b", "", "a/../../b", "a\\b", "."):
        file = {"path": path, "sha256": "0" * 64, "size": 1}
        step = {"kind": "anchor", "version": 0, "manifest": "1" * 64, "files": [file]}
        server.plan = lambda *_, step=step: {"from": None, "to": 0, "bytes": 1, "steps": [step]}  # type: ignore[method-assign,misc]
        with pytest.raises(ApiError):
            api.plan(RUN, from_digest=None, to=0)


def test_steps_of_unknown_kinds_are_refused(server: ContractServer, api: Api) -> None:
    plan: dict[str, Any] = {"from": None, "to": 0, "bytes": 1, "steps": [{"kind": "teleport", "manifest": "1" * 64}]}
    server.plan = lambda *_: plan  # type: ignore[method-assign]
    with pytest.raises(ApiError, match="teleport"):
        api.plan(RUN, from_digest=None, to=0)


def test_redirects_are_not_followed_with_the_credential(
    server: ContractServer, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "answer", lambda *_: Reply(302, b"", {"Location": "http://127.0.0.1:9/"}))
    with pytest.raises(ApiError) as raised:
        api.run(RUN)
    assert raised.value.status == 302


def test_proxy_of_the_environment_is_used(server: ContractServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", server.address)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert Api("http://mailboat.invalid", PROJECT, "t").run(RUN).id == server.run_id
    monkeypatch.setenv("no_proxy", "mailboat.invalid")
    with pytest.raises(Unreachable):
        Api("http://mailboat.invalid", PROJECT, "t", attempts=1).run(RUN)


def test_plain_http_is_told_from_a_certificate(server: ContractServer) -> None:
    address = server.address.replace("http:", "https:")
    with pytest.raises(Misaddressed, match="does not speak TLS"):
        Api(address, PROJECT, "t", attempts=1).run(RUN)


def test_the_pause_that_the_server_asks_for_is_read(
    server: ContractServer, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    for said, seconds in (("17", 17.0), ("Wed, 21 Oct 2026 07:28:00 GMT", 0.0), ("-3", 0.0), ("", 0.0)):
        monkeypatch.setattr(server, "answer", lambda *_, said=said: Reply(429, b"{}", {"Retry-After": said}))
        with pytest.raises(ApiError) as raised:
            api.run(RUN)
        assert raised.value.retry_after == seconds


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_own_certificate_authority(server: ContractServer, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
            "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate),
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server._http.socket = context.wrap_socket(server._http.socket, server_side=True)
    address = server.address.replace("http:", "https:")
    assert Api(address, PROJECT, "t", ca_file=certificate).run(RUN).id == server.run_id
    with pytest.raises(Misaddressed, match="is not trusted"):
        Api(address, PROJECT, "t", attempts=1).run(RUN)
    with pytest.raises(MailboatError, match="CA file"):
        Api(address, PROJECT, "t", ca_file=tmp_path / "absent.pem")


@pytest.mark.parametrize("address", ["", "localhost", "ftp://host", "http://", "host:80"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(Unreachable, match="address"):
        Api(address, PROJECT, "t")


def test_names_can_not_leave_their_place(server: ContractServer, api: Api) -> None:
    with pytest.raises(NotFound):
        api.run(f"../{RUN}/versions")
    assert not api.create_run(RUN), "a run that exists is fine"


def test_head_waits_and_knows_what_was_seen(server: ContractServer, api: Api) -> None:
    assert api.head(RUN, "latest", wait=0) is None


def test_pauses_grow_and_stay_bounded() -> None:
    for attempt in range(1, 60):
        assert 0 < pause_before(attempt) <= 5.0
    assert pause_before(1) <= 0.2


def test_credential_is_in_no_error(server: ContractServer, api: Api) -> None:
    server.faults = [Fault(".*", "refuse", times=99)]
    with pytest.raises(Unreachable) as raised:
        api.run(RUN)
    assert "hush-hush" not in str(raised.value)
    assert "hush-hush" not in json.dumps(server.calls)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_ca_file_that_is_not_there_is_said_at_once(scheme: str) -> None:
    with pytest.raises(MailboatError, match=r"/nope"):
        Api(f"{scheme}://127.0.0.1:9", "harbour", ca_file="/nope")
