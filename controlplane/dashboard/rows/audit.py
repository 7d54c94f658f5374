"""Rows of the audit log: what changed, name by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from controlplane.audit.models import Entry
from controlplane.dashboard import wording

LONGEST = 160
DIGEST = 64


@dataclass(frozen=True, slots=True)
class Change:
    """One name with its value before and after; empty where there was none."""

    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class EntryRow:
    """An entry with its changes."""

    entry: Entry
    changes: tuple[Change, ...]


def entry_rows(entries: Sequence[Entry]) -> list[EntryRow]:
    """Put entries into words."""
    return [EntryRow(entry, changes(entry.before, entry.after)) for entry in entries]


def changes(before: dict[str, Any] | None, after: dict[str, Any] | None) -> tuple[Change, ...]:
    """The names that differ, in the order in which they were written."""
    old, new = before or {}, after or {}
    names = [*old, *(name for name in new if name not in old)]
    return tuple(
        Change(name.replace("_", " "), _text(old, name), _text(new, name))
        for name in names
        if name not in old or name not in new or old[name] != new[name]
    )


def _text(values: dict[str, Any], name: str) -> str:
    value = values.get(name)
    if value is None or value == "":
        return "none" if name in values else ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items())
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) == DIGEST and all(letter in "0123456789abcdef" for letter in text):
        return wording.short(text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}\N{HORIZONTAL ELLIPSIS}"
