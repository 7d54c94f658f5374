"""Canonical JSON: the exact bytes of inventories, manifests, heads and lists inside patches.

UTF-8, keys sorted by code point, separators "," and ":", no floats, nothing escaped that JSON lets stand.  A reader
must never accept two spellings of one document: what it parsed is encoded again and has to give the same bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from mailboat.errors import MailboatError

MAX_DEPTH = 16
MAX_INTEGER = 2**63 - 1
_MAX_DIGITS = 20
_DEPTH_COUNTED = 64
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")


def encode(value: object) -> bytes:
    """Return the canonical bytes of `value` (dict with str keys, list, tuple, str, int, bool, None)."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def depth(data: bytes) -> int:
    """Return how deeply JSON bytes nest arrays and objects, without parsing them; beyond 64, or unbalanced, is 65."""
    brackets = _STRING.sub(b"", data).translate(_ONE_KIND, _NOT_BRACKETS)
    levels = 0
    while brackets and levels <= _DEPTH_COUNTED:
        inner = brackets.replace(b"[]", b"")  # takes the innermost level away
        levels = levels + 1 if len(inner) < len(brackets) else _DEPTH_COUNTED + 1
        brackets = inner
    return levels


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
