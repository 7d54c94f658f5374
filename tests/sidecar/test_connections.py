"""Connections to engines that end when nobody expects it: who has to know of it, and who must not."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import pytest

from tests.sidecar.harness import bare
from tests.waiting import PATIENCE

GOOD, BROKEN = b"200 OK", b"500 Internal Server Error"
GONE = b""  # the connection ends with the request unanswered
FIRE = b"fire"  # and the engine with it
CUT = b"cut"  # in the middle of the answer


class Scripted:
    """An engine that answers the requests of its first connection, of its second and so on as it is told."""

    def __init__(self, *script: list[bytes]) -> None:
        self.seen = 0
        self._script = script
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Scripted:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE)
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            for answers in self._script:
                connection, _ = self._listener.accept()
                with closing(connection), connection.makefile("rb") as lines:
                    for answer in answers:
                        self._answer(connection, lines, answer)

    def _answer(self, connection: socket.socket, lines: Iterator[bytes], answer: bytes) -> None:
        length = 0
        for line in lines:
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
            if line == b"\r\n":
                break
        else:
            return
        lines.read(length)  # type: ignore[attr-defined]
        self.seen += 1
        if answer == FIRE:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        elif answer == CUT:
            connection.sendall(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 99\r\n\r\ndata: 1\n\n"
            )
        elif answer != GONE:
            connection.sendall(b"HTTP/1.1 %s\r\nContent-Length: 2\r\n\r\n{}" % answer)


@contextmanager
def client(*engines: Scripted) -> Iterator[http.client.HTTPConnection]:
    with (
        bare([engine.url for engine in engines]) as port,
        closing(http.client.HTTPConnection("127.0.0.1", port)) as one,
    ):
        yield one


def ask(one: http.client.HTTPConnection, path: str = "/v1/completions") -> int:
    one.request("POST", path, json.dumps({"prompt": "x"}), {"Content-Type": "application/json"})
    answer = one.getresponse()
    answer.read()
    return answer.status


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_who_comes_after_a_failed_request_does_not_suffer_for_it(path: str) -> None:
    with Scripted([BROKEN, GONE], [GOOD]) as engine, client(engine) as one:
        assert [ask(one, path), ask(one, path)] == [500, 200]
        assert engine.seen == 3


def test_an_engine_that_is_gone_is_passed_by() -> None:
    with Scripted([GOOD, FIRE]) as first, Scripted([GOOD]) as second, client(first, second) as one:
        assert [ask(one), ask(one)] == [200, 200]
        assert (first.seen, second.seen) == (2, 1)


def test_what_may_have_killed_an_engine_is_not_sent_again() -> None:
    with Scripted([GONE], [GOOD]) as engine, client(engine) as one:
        assert ask(one) == 503 and engine.seen == 1
    with Scripted([BROKEN, GONE], [GONE], [GOOD]) as engine, client(engine) as one:
        assert [ask(one), ask(one)] == [500, 503]
        assert engine.seen == 3


def test_an_upload_never_meets_a_connection_that_may_be_closing() -> None:
    with Scripted([BROKEN, GONE], [GOOD]) as engine, client(engine) as one:
        assert [ask(one), ask(one, "/v1/audio/transcriptions")] == [500, 200]
        assert engine.seen == 2


def test_a_stream_that_breaks_off_takes_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("uvicorn.error")
    with Scripted([CUT]) as engine, client(engine) as one:
        log.addHandler(caplog.handler)
        try:
            with pytest.raises(http.client.IncompleteRead):
                ask(one)
        finally:
            log.removeHandler(caplog.handler)
    assert [bool(record.exc_info) for record in caplog.records if record.name == "uvicorn.error"] == [False]
