"""The formats of docs/format in plain, slow Python, written from those pages and sharing nothing with the library."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

from blake3 import blake3

MASK = 2**64 - 1
CONSTANTS = {
    "a": (0x243F6A8885A308D3, 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB),
    "b": (0x082EFA98EC4E6C89, 0xA4093822299F31D1, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53),
}


def canonical(value: Any) -> bytes:
    """Canonical JSON, written out by hand."""
    if value is None or value is True or value is False:
        return {None: b"null", True: b"true", False: b"false"}[value]
    if isinstance(value, int):
        return str(value).encode()
    if isinstance(value, str):
        named = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
        text = "".join(named.get(c) or (f"\\u{ord(c):04x}" if ord(c) < 0x20 else c) for c in value)
        return b'"' + text.encode() + b'"'
    if isinstance(value, dict):
        return b"{" + b",".join(canonical(k) + b":" + canonical(value[k]) for k in sorted(value)) + b"}"
    return b"[" + b",".join(canonical(item) for item in value) + b"]"


def inventory(rows: list[list[Any]], aliases: dict[str, str], quantiser: str | None) -> bytes:
    """The inventory document; rows as in the document, in any order."""
    rows = sorted(rows, key=lambda row: (row[0].encode(), row[1].encode()))
    return canonical({"aliases": aliases, "format": "mailboat-inventory-1", "quantiser": quantiser, "tensors": rows})


def rows_of(shape: list[int], data: bytes) -> list[bytes]:
    """The rows of a tensor."""
    if not data:
        return []
    count = 1
    for size in shape[:-1]:
        count *= size
    if not shape or 0 in shape or len(data) % count:
        return [data]
    size = len(data) // count
    return [data[at : at + size] for at in range(0, len(data), size)]


def seeds(component: str, name: str, dtype: str, shape: list[int]) -> tuple[int, int]:
    """The two seeds of a tensor's sum."""
    text = "\0".join(["mailboat-sum-1", component, name, dtype, ",".join(str(size) for size in shape)])
    raw = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(raw[0:8], "little"), int.from_bytes(raw[8:16], "little")


def mix(which: str, word: int, seed: int, row: int, column: int) -> int:
    """One mixed word."""
    per_row, per_word, first, second = CONSTANTS[which]
    x = word ^ ((seed + row * per_row + column * per_word) & MASK)
    x ^= x >> 32
    x = x * first & MASK
    x ^= x >> 29
    x = x * second & MASK
    return x ^ (x >> 32)


def sums(component: str, name: str, dtype: str, shape: list[int], data: bytes) -> tuple[int, int]:
    """Both sums of a tensor."""
    seed_a, seed_b = seeds(component, name, dtype, shape)
    a = b = 0
    for row, content in enumerate(rows_of(shape, data)):
        for column, at in enumerate(range(0, len(content), 8)):
            word = int.from_bytes(content[at : at + 8], "little")  # short words are padded at the top
            a += mix("a", word, seed_a, row, column)
            b += mix("b", word, seed_b, row, column)
    return a & MASK, b & MASK


def state(document: bytes, tensors: list[bytes], side_files: dict[str, bytes]) -> tuple[bytes, bytes, str]:
    """(all sums as a blob, all strong digests, state digest) of tensors given in inventory order."""
    rows = json.loads(document)["tensors"]
    pairs = [sums(row[0], row[1], row[2], row[3], data) for row, data in zip(rows, tensors, strict=True)]
    strong = b"".join(blake3(data).digest() for data in tensors)
    text = b"mailboat-state-1\n" + hashlib.sha256(document).digest()
    text += len(tensors).to_bytes(8, "little") + strong + len(side_files).to_bytes(8, "little")
    for path, content in sorted(side_files.items(), key=lambda item: item[0].encode()):
        name = path.encode()
        text += len(name).to_bytes(8, "little") + name
        text += len(content).to_bytes(8, "little") + hashlib.sha256(content).digest()
    blob = b"".join(a.to_bytes(8, "little") + b.to_bytes(8, "little") for a, b in pairs)
    return blob, strong, hashlib.sha256(text).hexdigest()


def envelope(kind: str, payload: bytes, signatures: list[tuple[str, bytes]]) -> tuple[bytes, bytes]:
    """(envelope as canonical JSON, pre-authentication encoding)."""
    signed = [{"keyid": key, "sig": base64.b64encode(sig).decode()} for key, sig in signatures]
    text = canonical({"payload": base64.b64encode(payload).decode(), "payloadType": kind, "signatures": signed})
    size = str(len(kind.encode())).encode(), str(len(payload)).encode()
    return text, b"DSSEv1 " + size[0] + b" " + kind.encode() + b" " + size[1] + b" " + payload
