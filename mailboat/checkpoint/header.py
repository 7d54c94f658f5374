"""The header of a safetensors file, parsed strictly.

A header is the first thing that a hostile file gets to say, so nothing is allocated on its word: its length is checked
before it is read, its nesting before it is parsed, and every tensor's range against its dtype, its shape and the file.
Unaligned data is accepted, and an unknown dtype takes its size from its range.  Format: docs/format/checkpoint.md.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mailboat import canonical
from mailboat.checkpoint.inventory import DTYPE_BITS, Inventory, Tensor, tensor_nbytes
from mailboat.errors import CheckpointError

MAX_HEADER = 100_000_000
PREFIX = 8
_METADATA = "__metadata__"
_MAX_DEPTH = 3
_MAX_DTYPE = 64
_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: its bytes are [begin, end) of the data that follows the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """`raw`: the file's bytes before its data, length prefix included.

    `entries`: its tensors in the order of their data.
    """

    raw: bytes
    entries: tuple[Entry, ...]

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.entries[-1].end if self.entries else 0


class _Objects:
    """`object_pairs_hook` that checks objects while they are parsed, so that hostile ones never pile up in memory."""

    def __init__(self) -> None:
        self.plain = 0

    def __call__(self, pairs: list[tuple[str, Any]]) -> Any:
        found = canonical.unique_pairs(pairs)
        if found.keys() == _FIELDS and not all(isinstance(value, str) for value in found.values()):
            return _range(found)
        self.plain += 1
        if self.plain > 2:  # the metadata and the header itself
            raise ValueError("a tensor does not have exactly dtype, shape and data_offsets")
        return found


def _range(found: dict[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
    dtype, shape, offsets = found["dtype"], found["shape"], found["data_offsets"]
    if not isinstance(dtype, str) or not 0 < len(dtype) <= _MAX_DTYPE:
        raise ValueError("a dtype is not a short text")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("a shape or data_offsets is not a list of counts")
    if len(offsets) != 2:
        raise ValueError("data_offsets does not have two numbers")
    return dtype, tuple(shape), offsets[0], offsets[1]


def parse_header(raw: bytes, file_bytes: int, what: str) -> Header:
    """Parse `raw` (length prefix and JSON) of a file of `file_bytes`; raise CheckpointError about `what`."""
    try:
        if raw[PREFIX : PREFIX + 1] != b"{":
            raise ValueError("it does not start with '{'")
        text = raw[PREFIX:]
        if canonical.depth(text) > _MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        parsed = json.loads(
            text.decode(),
            object_pairs_hook=_Objects(),
            parse_int=canonical.bounded_integer,
        )
        entries = tuple(sorted(_entries(parsed), key=lambda entry: (entry.begin, entry.end)))
        _check_ranges(entries, file_bytes - len(raw))
    except (ValueError, RecursionError) as problem:
        reason = str(problem).splitlines()[0][:300]
        raise CheckpointError(f"The header of {what} is not valid: {reason}; fetch or write the file again.") from None
    return Header(raw, entries)


def _entries(parsed: Any) -> list[Entry]:
    if not isinstance(parsed, dict):
        raise ValueError("it is not an object of tensors")
    entries = []
    for name, value in parsed.items():
        name.encode()  # lone surrogates have no UTF-8 and raise ValueError here
        if name == _METADATA:
            if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
                raise ValueError("__metadata__ is not an object of texts")
            continue
        if not isinstance(value, tuple):
            raise ValueError(f"{name[:80]} does not have exactly dtype, shape and data_offsets")
        entries.append(_entry(name, *value))
    return entries


def _entry(name: str, dtype: str, shape: tuple[int, ...], begin: int, end: int) -> Entry:
    dtype.encode()
    try:
        nbytes = tensor_nbytes(dtype, shape)
    except ValueError as problem:
        raise ValueError(f"{name[:80]}: {problem}") from None
    if end < begin or (nbytes is not None and end - begin != nbytes):
        raise ValueError(f"{name[:80]}: its data_offsets do not fit its dtype and shape")
    return Entry(name, dtype, shape, begin, end)


def _check_ranges(entries: tuple[Entry, ...], data_bytes: int) -> None:
    if entries and entries[0].begin != 0:
        raise ValueError(f"there is a hole before {entries[0].name[:80]}")
    for before, after in pairwise(entries):
        if after.begin != before.end:
            kind = "overlap" if after.begin < before.end else "leave a hole"
            raise ValueError(f"{before.name[:80]} and {after.name[:80]} {kind}")
    end = entries[-1].end if entries else 0
    if end != data_bytes:
        raise ValueError(f"its tensors take {end} bytes, but {data_bytes} follow it")


def canonical_header(inventory: Inventory) -> Header:
    """Return the header of one file with all tensors, widest elements first, so that all data is aligned.

    Aliases are not written. The metadata says format "pt", which loaders of the Hugging Face family ask for.
    """
    ordered = sorted(inventory.tensors, key=lambda tensor: (-DTYPE_BITS.get(tensor.dtype, 8), tensor.name))
    fields: dict[str, Any] = {_METADATA: {"format": "pt"}}
    entries, begin = [], 0
    for tensor in ordered:
        entry = _placed(tensor, begin)
        fields[tensor.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [entry.begin, entry.end]}
        entries.append(entry)
        begin = entry.end
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % PREFIX)
    if len(text) > MAX_HEADER:
        raise CheckpointError("There are too many tensors for one safetensors file; use a sharded layout.")
    return Header(len(text).to_bytes(PREFIX, "little") + text, tuple(entries))


def _placed(tensor: Tensor, begin: int) -> Entry:
    if tensor.name == _METADATA:
        raise CheckpointError(f"A tensor can't be called {_METADATA}; rename it.")
    return Entry(tensor.name, tensor.dtype, tensor.shape, begin, begin + tensor.nbytes)
