"""The size of an inventory without the inventory: half a million tensors pass through one by one.

As strict as `Inventory.from_bytes`, in memory of the document and a small window. For whoever has to accept a document
and needs no tensor of it.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mailboat.canonical import bounded_integer, unique_pairs
from mailboat.checkpoint.inventory import FORMAT, MAX_BYTES, Tensor, tensor_of_row
from mailboat.errors import CheckpointError

_WINDOW = 1 << 18
_LONGEST = 1 << 25  # of one row, or of all aliases together: a value that never ends is not read again and again


def _no_floats(text: str) -> Any:
    raise ValueError(f"the number {text[:40]} is not an integer")


_DECODER = json.JSONDecoder(
    object_pairs_hook=unique_pairs, parse_int=bounded_integer, parse_float=_no_floats, parse_constant=_no_floats
)
_ENCODER = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, slots=True)
class Outline:
    """Number of tensors, and the coding elements and bytes of all of them."""

    tensors: int
    elements: int
    full_bytes: int

    @classmethod
    def of(cls, data: bytes) -> Outline:
        """Reads an inventory document. Raises CheckpointError wherever `Inventory.from_bytes` does."""
        if len(data) > MAX_BYTES:
            raise CheckpointError(f"The inventory has {len(data)} bytes, but at most {MAX_BYTES} are allowed.")
        try:
            return cls(*_read(_Text(data)))
        except (ValueError, TypeError, AttributeError, RecursionError) as problem:
            said = str(problem).splitlines()[0][:200]
            raise CheckpointError(f"The inventory is not valid: {said}.") from None


def _read(text: _Text) -> tuple[int, int, int]:
    text.take('{"aliases":')
    aliases = text.value()
    text.take(f',"format":"{FORMAT}","quantiser":')
    quantiser = text.value()
    if not (quantiser is None or isinstance(quantiser, str)):
        raise ValueError("the quantiser is not text")
    if not isinstance(aliases, dict) or not all(isinstance(name, str) for name in aliases.values()):
        raise ValueError("an alias is not a name")
    text.take(',"tensors":[')
    count = elements = full_bytes = 0
    before: Tensor | None = None
    concerned, present = {*aliases, *aliases.values()}, set()
    for tensor in map(tensor_of_row, text.rest_of_rows()):
        if before is not None and before.key >= tensor.key:
            raise ValueError(f"it lists {tensor.name} twice or out of order")
        if tensor.name in concerned:
            present.add(tensor.name)
        before, count = tensor, count + 1
        elements, full_bytes = elements + tensor.elements, full_bytes + tensor.nbytes
    for alias, name in aliases.items():
        if alias in present or name not in present:
            raise ValueError(f"the alias {alias} of {name} does not fit its tensors")
    return count, elements, full_bytes


class _Text:
    """Canonical JSON, piece by piece; a piece that is spelled in another way is refused."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._read = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._window = ""
        self._at = 0

    def take(self, expected: str) -> None:
        """Passes over exactly this."""
        if not self.starts(expected):
            raise ValueError("it is not canonical, or its fields are not those of mailboat-inventory-1")
        self._at += len(expected)

    def starts(self, expected: str) -> bool:
        """Whether this follows."""
        while len(self._window) - self._at < len(expected) and self._more():
            pass
        return self._window.startswith(expected, self._at)

    def value(self) -> Any:
        """The value that follows."""
        while True:
            try:
                found, end = _DECODER.raw_decode(self._window, self._at)
                # A number or text at the window's very end may go on behind it.
                if end < len(self._window) or not self._more():
                    break
            except json.JSONDecodeError:
                if len(self._window) - self._at > _LONGEST or not self._more():
                    raise
        if _ENCODER.encode(found) != self._window[self._at : end]:
            raise ValueError("it is not canonical")
        self._at = end
        return found

    def rest_of_rows(self) -> Iterator[Any]:
        """The rows of the array that ends the document, a window at a time.

        Between two rows stands `],["`, which can stand nowhere else in a sound document: inside a text the quote would
        be escaped.
        """
        last = False
        while not last:
            last = not self._more()
            end = len(self._window) - 2 if last else self._window.rfind('],["', self._at) + 1
            if last and self._window[max(end, self._at) :] != "]}":
                raise ValueError("it does not end where it should")
            if end <= 0:
                if len(self._window) - self._at > _LONGEST:
                    raise ValueError("a tensor's row is too long")
                continue
            batch = f"[{self._window[self._at : end]}]"
            rows = _DECODER.decode(batch)
            if _ENCODER.encode(rows) != batch:
                raise ValueError("it is not canonical")
            yield from rows
            self._at = end + 1

    def _more(self) -> bool:
        """Widens the window; False at the end of the document."""
        if self._read >= len(self._data):
            return False
        piece = self._data[self._read : self._read + _WINDOW]
        self._read += len(piece)
        self._window = self._window[self._at :] + self._decoder.decode(piece, self._read >= len(self._data))
        self._at = 0
        return True
