"""Surgery on JSON text: members are cut out of an object or put into it, and every other byte stays as it was.

Nothing is ever re-serialised: a client's or an engine's numbers, spaces, escapes and order of keys are their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

_DECODER = json.JSONDecoder()
_SPACE = " \t\n\r"


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an object: text [begin, end) is key, colon and value; the value starts at ``at``."""

    key: str
    value: Any
    begin: int
    at: int
    end: int


@dataclass(frozen=True, slots=True)
class Thing:
    """An object in a text: [begin, end) with its braces, and its members."""

    begin: int
    end: int
    members: tuple[Member, ...]

    def get(self, key: str) -> Any:
        """The value of a member; the last one counts when a key is repeated, as everywhere."""
        return next((member.value for member in reversed(self.members) if member.key == key), None)


def decoded(data: bytes) -> str | None:
    """The text of JSON bytes, or None when it is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def parse_object(text: str, at: int = 0, *, whole: bool = True) -> Thing | None:
    """The object at ``at``, which must be all of the text when ``whole``.

    None for anything else, also for what Python does not read: nesting or integers beyond its limits.
    """
    try:
        thing = _object(text, _skip(text, at))
    except (ValueError, IndexError, RecursionError):
        return None
    return thing if not whole or _skip(text, thing.end) == len(text) else None


def objects(text: str) -> Iterator[Thing] | None:
    """The objects that a text consists of: itself, or the elements of an array of objects; None for anything else."""
    if (single := parse_object(text)) is not None:
        return iter((single,))
    try:
        found, at = [], _skip(text, 0)
        if text[at] != "[":
            return None
        at = _skip(text, at + 1)
        while text[at] != "]":
            found.append(_object(text, at))
            at = _skip(text, found[-1].end)
            if text[at] == ",":
                at = _skip(text, at + 1)
        return iter(found) if _skip(text, at + 1) == len(text) else None
    except (ValueError, IndexError, RecursionError):
        return None


def edited(text: str, thing: Thing, *, cut: frozenset[str] = frozenset(), put: Mapping[str, Any] | None = None) -> str:
    """The text with members cut out of ``thing`` and others put at its end, in place of any of the same name."""
    put = put or {}
    gone = cut | put.keys()
    members = thing.members
    kept = [member for member in members if member.key not in gone]
    if put or len(kept) != len(members):
        pieces: list[str] = []
        at = thing.begin
        for number, member in enumerate(members):
            if member.key in gone:
                pieces.append(text[at : member.begin])
                # With its comma: the one after it, or for the last one the one before, which is dropped below.
                at = members[number + 1].begin if number + 1 < len(members) else member.end
        pieces.append(text[at : thing.end])
        inside = "".join(pieces)[:-1]
        if members and members[-1].key in gone:
            inside = inside.rstrip(_SPACE).removesuffix(",")
        added = ",".join(f"{json.dumps(key)}:{json.dumps(value, separators=(',', ':'))}" for key, value in put.items())
        comma = "," if kept and added else ""
        return f"{text[: thing.begin]}{inside}{comma}{added}}}{text[thing.end :]}"
    return text


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _object(text: str, at: int) -> Thing:
    if text[at] != "{":
        raise ValueError("not an object")
    begin, members = at, []
    at = _skip(text, at + 1)
    while text[at] != "}":
        if text[at] != '"':
            raise ValueError("not a key")
        start = at
        key, at = scanstring(text, at + 1, True)
        at = _skip(text, at)
        if text[at] != ":":
            raise ValueError("no colon")
        value_at = _skip(text, at + 1)
        value, at = _DECODER.raw_decode(text, value_at)
        members.append(Member(key, value, start, value_at, at))
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)
            if text[at] == "}":
                raise ValueError("trailing comma")
        elif text[at] != "}":
            raise ValueError("no comma")
    return Thing(begin, at + 1, tuple(members))
