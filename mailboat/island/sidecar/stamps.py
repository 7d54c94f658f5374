"""Which version made an answer: stamped into JSON and event streams without touching anything else of them.

The start is the version at dispatch, the end the one held when the last piece was read from the engine. It must never
say an end that is older than the weights that made the last token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mailboat.island.sidecar.splice import Thing, decoded, edited, objects, parse_object

LONGEST_LINE = 4 << 20  # bytes of one event; a longer one passes unstamped
_ENDINGS = frozenset({"response.completed", "response.incomplete", "response.failed"})


def stamped(data: bytes, start: int, end: int) -> bytes:
    """A whole JSON answer with its stamps: in `meta_info` where an object has one (SGLang), else at its top level.

    Anything that is no object or array of objects is returned as it is.
    """
    text = decoded(data)
    found = None if text is None else objects(text)
    if text is None or found is None:
        return data
    for thing in reversed(list(found)):  # from the back, so that places before stay right
        text = _stamp(text, thing, {"weight_version_start": start, "weight_version_end": end})
    return text.encode()


def _stamp(text: str, thing: Thing, put: dict[str, Any]) -> str:
    meta = next((member for member in reversed(thing.members) if member.key == "meta_info"), None)
    inner = None if meta is None else parse_object(text, meta.at, whole=False)
    return edited(text, inner or thing, put=put)


class EventStamps:
    """Stamps the event of a stream (server-sent events) that carries the finish reason; all else passes at once.

    ``version`` is asked when the event was read.
    """

    def __init__(self, start: int, version: Callable[[], int]) -> None:
        self._start = start
        self._version = version
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """What of ``data`` can go to the client now: whole lines."""
        data = self._rest + data
        whole, newline, self._rest = data.rpartition(b"\n")
        if not newline and len(self._rest) > LONGEST_LINE:
            data, self._rest = self._rest, b""
            return data
        if b'"finish_reason"' not in whole and b'"response.' not in whole:
            return whole + newline
        return b"\n".join([self._line(line) for line in whole.split(b"\n")]) + newline

    def end(self) -> bytes:
        """What is left when the engine closed its stream without a last line feed."""
        rest, self._rest = self._rest, b""
        return self._line(rest)

    def _line(self, line: bytes) -> bytes:
        if not line.startswith(b"data:") or len(line) > LONGEST_LINE:
            return line
        body = line[5:]
        text = decoded(body)
        thing = None if text is None else parse_object(text)
        if text is None or thing is None or not _finishes(thing):
            return line
        put = {"weight_version_start": self._start, "weight_version_end": self._version()}
        return b"data:" + _stamp(text, thing, put).encode()


def _finishes(thing: Thing) -> bool:
    meta, choices = thing.get("meta_info"), thing.get("choices")
    if isinstance(meta, dict) and meta.get("finish_reason") is not None:
        return True
    if isinstance(choices, list):
        return any(isinstance(choice, dict) and choice.get("finish_reason") is not None for choice in choices)
    return thing.get("type") in _ENDINGS
