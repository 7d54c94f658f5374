"""An upstream that costs next to nothing, in a process of its own: vLLM's routes as far as a sidecar needs them.

`python bench/stub_engine.py` prints its port. A completion is answered after five milliseconds; a stream sends one
event at once and then, with `"idle": true`, nothing more until its client goes.
"""

from __future__ import annotations

import asyncio
import json

ANSWER = {
    "id": "cmpl-1",
    "object": "text_completion",
    "choices": [{"index": 0, "text": "x " * 20, "finish_reason": "stop"}],
}
EVENT = b'data: {"id":"cmpl-1","choices":[{"index":0,"text":"x ","finish_reason":null}]}\n\n'
END = b'data: {"id":"cmpl-1","choices":[{"index":0,"text":"","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
THINKING = 0.005  # seconds
_label = "none"


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Requests of one connection, one after the other."""
    try:
        while True:
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            last = headers.get("connection", "").lower() == "close"
            await answer(first.split()[1], json.loads(body) if body else {}, (reader, writer), last=last)
            await writer.drain()
            if last:
                break
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def answer(
    path: str, body: dict[str, object], client: tuple[asyncio.StreamReader, asyncio.StreamWriter], *, last: bool
) -> None:
    """One answer."""
    reader, writer = client
    global _label  # noqa: PLW0603 - one engine per process
    if path == "/v1/completions":
        if not body.get("stream"):
            await asyncio.sleep(THINKING)
            reply(writer, ANSWER, last=last)
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(EVENT)
        )
        await writer.drain()
        if body.get("idle"):
            await reader.read()  # returns when the client goes
            return
        await asyncio.sleep(THINKING)
        writer.write(chunk(END) + b"0\r\n\r\n")
    elif path.startswith("/collective_rpc"):
        mine = str(body.get("method")).startswith("mailboat_")
        reply(writer, {"results": [None]}, 500 if mine else 200, last=last)
    elif path == "/update_weight_version":
        _label = str(body["new_version"])
        reply(writer, {}, last=last)
    else:
        reply(writer, {"weight_version": _label}, last=last)


def reply(writer: asyncio.StreamWriter, body: object, status: int = 200, *, last: bool) -> None:
    """A whole JSON answer."""
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    close = "Connection: close\r\n" if last else ""
    writer.write(f"{head}{close}\r\n".encode() + data)


def chunk(data: bytes) -> bytes:
    """A piece of a chunked body."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def main() -> None:
    """Serves until it is killed."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
