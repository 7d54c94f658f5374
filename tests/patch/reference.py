"""A decoder in plain Python, written from docs/format/patch.md and contextual.md alone.

Slow, obvious, shares no code with the product.
"""

from __future__ import annotations

import json
import sys

from tests.patch.contextual_reference import WINDOW, Group
from tests.patch.ranks import rank, unrank

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BLOCK = 1 << 20
CHUNK = 1 << 17


class Cursor:
    """Reads little-endian integers off bytes."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def numbers(self, size: int, count: int) -> list[int]:
        """`count` integers of `size` bytes, one after the other."""
        return [self.planes(size, 1)[0] for _ in range(count)]

    def planes(self, size: int, count: int) -> list[int]:
        """A column: all lowest bytes, then the second ones, and so on."""
        raw = self.data[self.at : self.at + size * count]
        assert len(raw) == size * count
        self.at += size * count
        return [sum(raw[plane * count + i] << 8 * plane for plane in range(size)) for i in range(count)]


def rice_parameter(elements: int, changed: int) -> int:
    """Low bits of a gap."""
    q = (elements - changed) * 77 // (80 * changed)
    return max(0, q.bit_length() - 1)


def block_sizes(elements: int, row: int) -> list[int]:
    """Elements of each block."""
    if elements == 0:
        return []
    rows = elements // row
    if row >= BLOCK:
        return [min(BLOCK, row - start) for _ in range(rows) for start in range(0, row, BLOCK)]
    step = BLOCK // row
    return [min(step, rows - first) * row for first in range(0, rows, step)]


def unchunk(data: bytes, sizes: list[int], raw_size: int) -> bytes:
    """A chunked stream, decompressed."""
    out, at = b"", 0
    for number, size in enumerate(sizes):
        expected = min(CHUNK, raw_size - number * CHUNK)
        piece = data[at : at + size]
        at += size
        out += piece if size == expected else piece * expected if size == 1 else zstd.decompress(piece)
    assert at == len(data)
    assert len(out) == raw_size
    return out


def gaps(data: bytes, count: int, r: int) -> list[int]:
    """Rice codes."""
    bits = [(byte >> i) & 1 for byte in data for i in range(8)]
    at, found = 0, []
    for _ in range(count):
        quotient = 0
        while bits[at]:
            quotient, at = quotient + 1, at + 1
        at += 1
        found.append(quotient << r | sum(bits[at + i] << i for i in range(r)))
        at += r
    assert len(bits) - at < 8
    assert not any(bits[at:])
    return found


class Part:
    """One part file, taken apart."""

    def __init__(self, raw: bytes) -> None:
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        self.metadata: dict[str, str] = header.pop("__metadata__")
        data = raw[8 + length :]
        entry = {name: data[slice(*value["data_offsets"])] for name, value in header.items()}
        self.side = {name[5:]: content for name, content in entry.items() if name.startswith("side:")}
        table = Cursor(zstd.decompress(entry["table"]))
        assert len(table.data) == int(self.metadata["table_bytes"])
        n, *chunk_counts = table.numbers(4, 4)
        self.index, last = [], -1
        for skipped in table.planes(4, n):
            last += skipped + 1
            self.index.append(last)
        self.elements, self.row = table.planes(8, n), table.planes(8, n)
        self.width, is_changed = table.planes(1, n), table.planes(1, n)
        self.sizes = [
            block_sizes(e, r) if flag else [] for e, r, flag in zip(self.elements, self.row, is_changed, strict=True)
        ]
        m = sum(map(len, self.sizes))
        self.encoding = table.planes(1, m)
        self.block_changed, slack, self.literal_counts = (table.planes(4, m) for _ in range(3))
        chunks = [table.planes(4, count) for count in chunk_counts]
        self.windows = self._windows()
        words = table.planes(4, len({w for w in self.windows if w is not None}))
        assert table.at == len(table.data)
        contextual = Cursor(entry.get("contextual", b""))
        self.words = [contextual.numbers(4, count) for count in words]
        assert contextual.at == len(contextual.data)
        widths = [w for w, sizes in zip(self.width, self.sizes, strict=True) for _ in sizes]
        flat = [size for sizes in self.sizes for size in sizes]
        self.position_bytes = [
            -(-k * (1 + rice_parameter(size, k)) // 8) + more if kind == 3 else 0
            for size, k, kind, more in zip(flat, self.block_changed, self.encoding, slack, strict=True)
        ]
        raw_sizes = [
            sum(k for k, e in zip(self.block_changed, self.encoding, strict=True) if e == 3),
            sum(count * w for count, w in zip(self.literal_counts, widths, strict=True)),
            sum(size * w for size, w, e in zip(flat, widths, self.encoding, strict=True) if e in {1, 2}),
        ]
        self.values, self.literals, self.dense = (
            unchunk(entry.get(name, b""), sizes, raw_size)
            for name, sizes, raw_size in zip(("values", "literals", "dense"), chunks, raw_sizes, strict=True)
        )
        self.positions = entry.get("positions", b"")

    def _windows(self) -> list[int | None]:
        """The window of each contextual block."""
        found: list[int | None] = []
        before = 0
        for elements, width, sizes in zip(self.elements, self.width, self.sizes, strict=True):
            at = before
            for size in sizes:
                kind = self.encoding[len(found)]
                found.append(at // WINDOW if kind == 4 else None)
                at += size * width
            before += elements * width
        return found

    def apply(self, tensors: list[tuple[str, bytes]]) -> dict[int, bytes]:
        """New bytes of the carried tensors; `tensors` are (dtype, old bytes) in inventory order."""
        at = {"positions": 0, "values": 0, "literals": 0, "dense": 0}

        def take(name: str, size: int) -> bytes:
            data: bytes = getattr(self, name)[at[name] : at[name] + size]
            at[name] += size
            return data

        result, block = {}, 0
        group, window, groups = Group([0]), -1, iter(self.words)
        for index, width, sizes in zip(self.index, self.width, self.sizes, strict=True):
            dtype, old = tensors[index]
            new, start = bytearray(old), 0
            for size in sizes:
                span = slice(start, start + size * width)
                start += size * width
                kind, k = self.encoding[block], self.block_changed[block]
                if kind in {1, 2}:
                    planes = take("dense", size * width)
                    elements = bytes(planes[p * size + i] for i in range(size) for p in range(width))
                    new[span] = (
                        bytes(a ^ b for a, b in zip(elements, old[span], strict=True)) if kind == 2 else elements
                    )
                elif kind == 3:
                    r = rice_parameter(size, k)
                    position = -1
                    for gap in gaps(take("positions", self.position_bytes[block]), k, r):
                        position += gap + 1
                        at_byte = span.start + position * width
                        v = take("values", 1)[0]
                        if v == 0:
                            new[at_byte : at_byte + width] = take("literals", width)
                        else:
                            step = (v + 1) // 2 if v % 2 else -(v // 2)
                            u = int.from_bytes(old[at_byte : at_byte + width], "little")
                            moved = (rank(u, dtype, 8 * width) + step) % (1 << 8 * width)
                            new[at_byte : at_byte + width] = unrank(moved, dtype, 8 * width).to_bytes(width, "little")
                elif kind == 4:
                    if self.windows[block] != window:
                        if window >= 0:
                            group.coder.end()
                        group, window = Group(next(groups)), self.windows[block] or 0
                    before = [int.from_bytes(old[i : i + width], "little") for i in range(span.start, span.stop, width)]
                    for position, u in group.block(index, dtype, before, width, k):
                        at_byte = span.start + position * width
                        new[at_byte : at_byte + width] = u.to_bytes(width, "little")
                block += 1
            result[index] = bytes(new)
        if window >= 0:
            group.coder.end()
        return result
