"""Calls to engines end in time and in memory, whatever answers them, and only what was carried out counts as done."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress

import pytest

from mailboat.island.engines import control
from mailboat.island.engines.control import Control
from mailboat.island.engines.engine import EngineError, EngineRefused, EngineUnreachable
from mailboat.island.sidecar.serving import ListenError
from tests.engines.contract_engine import ContractEngine
from tests.waiting import PATIENCE

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@contextmanager
def answering(pieces: Iterable[bytes]) -> Iterator[Control]:
    """Calls to an engine that answers the first of them with ``pieces``, for as long as anybody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with suppress(OSError), closing(listener.accept()[0]) as connection:
                while not connection.recv(1 << 16).endswith(b"\r\n\r\n"):
                    pass
                for piece in pieces:
                    connection.sendall(piece)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield Control(f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join(PATIENCE)


def endless(head: bytes, piece: bytes, pause: float = 0) -> Iterator[bytes]:
    yield head
    tick = threading.Event()
    while True:
        yield piece
        tick.wait(pause)


def test_an_answer_that_never_ends_is_given_up_as_one_that_never_comes() -> None:
    with answering(endless(CHUNKED, b"1\r\n \r\n", 0.01)) as engine, pytest.raises(EngineUnreachable) as caught:
        engine.get("/x", seconds=0.2)
    assert caught.value.hung


@pytest.mark.parametrize("head", [OK + b"\r\n", OK + b"Content-Length: 9999999999\r\n\r\n"])
def test_an_answer_beyond_the_limit_is_not_held(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "LARGEST", 1 << 20)
    with answering(endless(head, b" " * 65536)) as engine, pytest.raises(EngineError, match="more than 1 MiB"):
        engine.get("/x")


@pytest.mark.parametrize("cut", [OK + b"Content-Length: 9\r\n\r\n{}", CHUNKED + b"2\r\n{}\r\n", b""])
def test_half_an_answer_is_none(cut: bytes) -> None:
    with answering([cut]) as engine, pytest.raises(EngineUnreachable):
        engine.get("/x")


@pytest.mark.parametrize("code", [301, 307, 308])
def test_who_points_elsewhere_has_done_nothing(code: int) -> None:
    head = b"HTTP/1.1 %d Moved\r\nLocation: /resume/\r\nContent-Length: 0\r\n\r\n" % code
    with answering([head]) as engine, pytest.raises(EngineRefused, match=str(code)):
        engine.post("/resume")


@pytest.mark.parametrize("body", [b"", b"<html>", b"[" * 100_000])
def test_what_is_no_json_says_nothing(body: bytes) -> None:
    with answering([OK + b"\r\n" + body]) as engine:
        assert engine.get("/x") is None


def test_an_engine_on_ipv6_is_called_by_its_url() -> None:
    try:
        engine = ContractEngine("vllm", host="::1")
    except ListenError as no_ipv6:
        pytest.skip(str(no_ipv6))
    with engine.serving():
        assert engine.url.startswith("http://[::1]:")
        assert Control(engine.url).get("/health") == {}


def test_a_name_that_is_none_can_t_be_reached() -> None:
    with pytest.raises(EngineUnreachable, match="does not answer"):
        Control("http://a..b:8000").get("/health")
