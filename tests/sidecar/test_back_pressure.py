"""Who reads slowly slows the other side down: the sidecar holds a little of what it passes on, not all of it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

from mailboat.island.sidecar.bodies import Bodies
from tests.sidecar.harness import bare
from tests.waiting import PATIENCE, eventually

TOTAL, PIECE, SMALL = 96 << 20, 1 << 16, 1 << 16  # sockets hold a few MiB each, whatever is asked of them


class Flow:
    """Counts what one side could hand over or was given."""

    def __init__(self) -> None:
        self.moved = 0

    def send(self, to: socket.socket) -> None:
        piece = bytes(PIECE)
        while self.moved < TOTAL:
            self.moved += to.send(piece[: TOTAL - self.moved])

    def take(self, out_of: socket.socket, already: int = 0) -> None:
        self.moved = already
        while self.moved < TOTAL and (data := out_of.recv(1 << 20)):
            self.moved += len(data)

    def settled(self) -> int:
        """How much has moved when nothing moves any more."""
        before = -1
        while before != self.moved and self.moved < TOTAL:
            before = self.moved
            time.sleep(0.3)
        return self.moved


def head(of: socket.socket) -> bytes:
    """What came after the header lines, in the same piece or pieces."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += of.recv(1 << 16)
    return data.split(b"\r\n\r\n", 1)[1]


def small(made: socket.socket) -> socket.socket:
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        made.setsockopt(socket.SOL_SOCKET, option, SMALL)
    return made


@contextmanager
def proxied(engine: Callable[[socket.socket], None], bodies: Bodies | None = None) -> Iterator[socket.socket]:
    """A connection to a sidecar whose engine answers one connection as it is told."""
    listener = small(socket.socket())
    listener.bind(("127.0.0.1", 0))
    listener.listen()

    def answer() -> None:
        with suppress(OSError):  # nobody came
            connection, _ = listener.accept()
            with closing(connection):
                engine(connection)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    client = small(socket.socket())
    client.settimeout(PATIENCE)
    try:
        with bare([url], bodies) as port:
            client.connect(("127.0.0.1", port))
            yield client
            client.close()
    finally:
        client.close()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE)
        listener.close()


def test_a_client_that_does_not_read_holds_its_engine_up() -> None:
    sent, taken = Flow(), Flow()

    def engine(connection: socket.socket) -> None:
        head(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % TOTAL)
        sent.send(connection)

    with proxied(engine) as client:
        client.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        already = len(head(client))
        assert sent.settled() < TOTAL // 2
        taken.take(client, already)
        assert taken.moved == TOTAL


def test_an_engine_that_does_not_read_holds_its_client_up() -> None:
    sent, taken, go_on = Flow(), Flow(), threading.Event()

    def engine(connection: socket.socket) -> None:
        already = len(head(connection))
        go_on.wait(PATIENCE)
        taken.take(connection, already)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    with proxied(engine) as client:
        upload = b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % TOTAL
        client.sendall(upload)
        sending = threading.Thread(target=sent.send, args=(client,), daemon=True)
        sending.start()
        assert sent.settled() < TOTAL // 2
        go_on.set()
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert taken.moved == TOTAL


ASK = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


def test_a_body_that_does_not_come_is_waited_for_only_so_long() -> None:
    with proxied(lambda _connection: None, Bodies(patience=0.2)) as client:
        client.sendall(ASK % 100 + b'{"prompt":')
        answer = client.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 408") and b"0.2 s" in answer


def test_bodies_of_all_clients_together_have_a_limit() -> None:
    bodies = Bodies(total=150)
    with proxied(lambda _connection: None, bodies) as first:
        first.sendall(ASK % 200 + bytes(100))
        eventually(lambda: bodies.held == 100)
        with socket.create_connection(first.getpeername(), PATIENCE) as second:
            second.sendall(ASK % 100 + bytes(100))
            answer = second.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 503") and b"retry-after" in answer.lower()
        first.close()
        eventually(lambda: bodies.held == 0)
