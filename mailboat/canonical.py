"""Canonical JSON: the exact bytes of inventories, manifests, heads and lists inside patches.

UTF-8, keys sorted by code point, separators "," and ":", no floats, nothing escaped that JSON lets stand.  A reader
must never accept two spellings of one document: what it parsed is encoded again and has to give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np

from mailboat.errors import MailboatError

MAX_DEPTH = 16
MAX_INTEGER = 2**63 - 1
_MAX_DIGITS = 20
_DEPTH_COUNTED = 64
_QUOTE = ord('"')
_NOT_MARKS = bytes(set(range(256)) - set(b'"[]{}'))
_MARKS_AT_ONCE = 1 << 16
_STEPS = np.zeros(256, np.int64)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1


def encode(value: object) -> bytes:
    """Return the canonical bytes of `value` (dict with str keys, list, tuple, str, int, bool, None)."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def depth(data: bytes) -> int:
    """Return how deeply JSON bytes nest arrays and objects, without parsing them; beyond 64 it stops counting.

    Takes memory of a few times `data` and no more, whatever the bytes are.
    """
    without_escapes = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = np.frombuffer(without_escapes.translate(None, _NOT_MARKS), np.uint8)
    quotes = level = deepest = 0
    for at in range(0, marks.size, _MARKS_AT_ONCE):
        some = marks[at : at + _MARKS_AT_ONCE]
        seen = quotes + np.cumsum(some == _QUOTE)
        levels = level + np.cumsum(np.where(seen & 1, 0, _STEPS[some]))
        quotes, level, deepest = int(seen[-1]), int(levels[-1]), max(deepest, int(levels.max()))
        if deepest > _DEPTH_COUNTED:
            break
    return deepest


def unique_pairs(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict from JSON pairs; raise ValueError when a key comes twice (`object_pairs_hook`)."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key[:80]!r} comes twice")
        result[key] = value
    return result


def bounded_integer(text: str) -> int:
    """Parse a JSON integer of at most 64 bits; raise ValueError beyond (`parse_int`)."""
    if len(text) > _MAX_DIGITS or abs(number := int(text)) > MAX_INTEGER:
        raise ValueError("an integer does not fit in 64 bits")
    return number


def _no_floats(text: str) -> NoReturn:
    raise ValueError(f"the number {text[:40]} is not an integer")


def decode(data: bytes, *, what: str, error: type[MailboatError], max_bytes: int, max_depth: int = MAX_DEPTH) -> Any:
    """Parse canonical JSON strictly, or raise `error` with a sentence about `what`.

    Refused: more than `max_bytes`, deeper than `max_depth`, bad UTF-8, floats, integers beyond 64 bits, duplicate keys
    and every spelling that `encode` would not produce.
    """
    if len(data) > max_bytes:
        raise error(f"{what} has {len(data)} bytes, but at most {max_bytes} are allowed.")
    try:
        if depth(data) > max_depth:
            raise ValueError("it is nested too deeply")
        value = json.loads(
            data.decode(),
            object_pairs_hook=unique_pairs,
            parse_int=bounded_integer,
            parse_float=_no_floats,
            parse_constant=_no_floats,
        )
        same = encode(value) == data
    except (ValueError, RecursionError) as problem:
        raise error(f"{what} can't be read as JSON: {str(problem).splitlines()[0][:200]}.") from None
    if not same:
        raise error(f"{what} is not canonical JSON (sorted keys, no spaces); have it written again by its publisher.")
    return value
