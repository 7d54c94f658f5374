"""Mutations that keep a patch whole enough to be read deeply: a piece is changed, and what describes it follows."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from mailboat.patch.streams import zstd

_INTERESTING = (0, 1, 2, 3, 4, 5, 127, 128, 255, 256, 0xFFFF, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
_MOST = 1 << 20
Mutate = Callable[[bytes, int], bytes]


def mutated(data: bytes, max_size: int, seed: int, plain: Mutate) -> bytes:
    """`data` with one piece changed; `plain` mutates bytes without knowing what they are."""
    chance = random.Random(seed)
    try:
        metadata, entries = _apart(data[1:])
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return plain(data, max_size)
    kind = chance.random()
    if kind < 0.1:
        return plain(data, max_size)
    if kind < 0.2:
        key = chance.choice(sorted(metadata))
        metadata[key] = _other_text(chance, metadata[key], plain)
    else:
        name = chance.choice(["table", "table", *entries])
        entries[name] = _other_entry(chance, name, entries.get(name, b""), metadata, plain)
    try:
        out = data[:1] + _together(metadata, entries)
    except UnicodeEncodeError:
        return plain(data, max_size)
    return out if len(out) <= max_size else data[:max_size]


def _apart(raw: bytes) -> tuple[dict[str, str], dict[str, bytes]]:
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    data = raw[8 + length :]
    metadata = header["__metadata__"]
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()) or not metadata:
        raise ValueError("no metadata")
    return metadata, {
        name: data[slice(*entry["data_offsets"])] for name, entry in header.items() if name != "__metadata__"
    }


def _together(metadata: dict[str, str], entries: dict[str, bytes]) -> bytes:
    document: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    at = 0
    for name, data in entries.items():
        document[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    header = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + b"".join(entries.values())


def _other_text(chance: random.Random, text: str, plain: Mutate) -> str:
    if text.isdigit() and chance.random() < 0.7:
        return str(max(0, int(text) + chance.choice([-1, 1, *_INTERESTING])))
    return plain(text.encode(), len(text) + 16).decode(errors="replace")


def _other_entry(chance: random.Random, name: str, data: bytes, metadata: dict[str, str], plain: Mutate) -> bytes:
    """Another content: of a frame often what it holds, packed again."""
    if name != "table" and chance.random() < 0.4:
        return plain(data, len(data) + 64)
    try:
        size = zstd.get_frame_info(data).decompressed_size
        raw = zstd.decompress(data) if size is not None and size <= _MOST else b""
    except zstd.ZstdError:
        return plain(data, len(data) + 64)
    raw = _other_numbers(chance, raw) if chance.random() < 0.7 else plain(raw, len(raw) + 64)
    if name == "table":
        metadata["table_bytes"] = str(len(raw))
    return bytes(zstd.compress(raw, level=1))


def _other_numbers(chance: random.Random, raw: bytes) -> bytes:
    out = bytearray(raw)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        if out:
            at = chance.randrange(len(out))
            value = chance.choice([out[at] + 1, out[at] - 1, chance.choice(_INTERESTING), chance.randrange(256)])
            out[at] = value & 255
    return bytes(out)
