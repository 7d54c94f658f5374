"""A patch part as a file: a safetensors file written in one way only, and read strictly.

Reading checks every count, size and digest field before anything is decoded, in memory bounded by the file itself. It
never follows a path that a patch names.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import numpy as np

from mailboat import canonical
from mailboat.checkpoint.side_files import MAX_SIDE_BYTES, SideFile, paths_problem
from mailboat.errors import PatchError, UnknownCodec
from mailboat.patch.format import (
    FORMAT,
    KNOWN_CODECS,
    MAX_HEADER_BYTES,
    MAX_PARTS,
    MAX_TABLE_BYTES,
    MAX_TENSORS,
    SIDE_PREFIX,
)
from mailboat.patch.streams import ZSTD_VERSION, ChunkReader, decompress_exactly
from mailboat.patch.table import STREAMS, Table

_ENTRIES = ("table", "positions", *STREAMS, "contextual")
_LENGTH_BYTES = 8
_ALIGN = 8
_NUMBERS = ("changed", "elements", "full_bytes", "part", "parts", "table_bytes", "tensors")
_DIGESTS = ("from", "to", "inventory")
_KEYS = frozenset({"format", "codecs", "zstd", *_NUMBERS, *_DIGESTS})
_HEX64 = re.compile(r"[0-9a-f]{64}")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")
_VERSION = re.compile(r"[0-9]{1,4}(\.[0-9]{1,4}){1,3}")
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a part says about itself. `elements` and `full_bytes` are the whole state's, `changed` this part's."""

    from_digest: str
    to_digest: str
    inventory_digest: str
    codecs: tuple[str, ...]
    part: int
    parts: int
    tensors: int
    elements: int
    full_bytes: int
    changed: int
    removed: tuple[str, ...]
    table_bytes: int
    zstd: str = ZSTD_VERSION

    def to_strings(self) -> dict[str, str]:
        """The header's `__metadata__`."""
        strings = {
            "codecs": ",".join(self.codecs), "format": FORMAT, "from": self.from_digest, "to": self.to_digest,
            "inventory": self.inventory_digest, "zstd": self.zstd,
        } | {name: str(getattr(self, name)) for name in _NUMBERS}  # fmt: skip
        if self.part == 0:
            strings["removed"] = canonical.encode(list(self.removed)).decode()
        return strings


def header_bytes(metadata: Mapping[str, str], entries: Sequence[tuple[str, int]]) -> bytes:
    """Length and header of a part whose entries have these sizes, in this order."""
    document: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    at = 0
    for name, size in entries:
        document[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = _dump(document)
    text += b" " * (-len(text) % _ALIGN)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _dump(document: dict[str, Any]) -> bytes:
    # The one place where order matters: __metadata__ first, entries as their data lie.
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _refuse(what: str) -> NoReturn:
    raise PatchError(f"This is not a sound patch file: {what}; fetch or build it again.")


class PatchFile:
    """One part, opened strictly. Its attributes are those of `Metadata`, and `table`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Use `open`."""
        self.path = path
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size
        self._entries, self._data, metadata = self._read_header()
        self.metadata = _metadata(metadata)
        self.from_digest = self.metadata.from_digest
        self.to_digest = self.metadata.to_digest
        self.inventory_digest = self.metadata.inventory_digest
        self.codecs = self.metadata.codecs
        self.part = self.metadata.part
        self.parts = self.metadata.parts
        self.tensors = self.metadata.tensors
        self.elements = self.metadata.elements
        self.full_bytes = self.metadata.full_bytes
        self.changed = self.metadata.changed
        self.removed = self.metadata.removed
        self.table = self._read_table()
        self._side = {
            name.removeprefix(SIDE_PREFIX): span for name, span in self._entries.items() if name.startswith(SIDE_PREFIX)
        }
        self._check_side_files()
        self.side_files = tuple(self._describe(path) for path in self._side)

    @classmethod
    def open(cls, path: Path) -> PatchFile:
        """Open and check a part. Raises PatchError, UnknownCodec."""
        try:
            # Not to wait for the other end of a pipe; on files the flag means nothing.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise PatchError(f"The patch {path} can't be opened: {error.strerror}.") from None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise PatchError(f"The patch {path} is not a file.")
            return cls(Path(path), descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def read_side(self, path: str) -> bytes:
        """The bytes of a carried side file; KeyError when it is not carried."""
        start, end = self._side[path]
        return self.read_at(self._data + start, end - start)

    def stream(self, name: str) -> ChunkReader:
        """A reader of `values`, `literals` or `dense`."""
        start = self._data + self._entries.get(name, (0, 0))[0]
        return ChunkReader(name, self.table.raw_size(name), self.table.chunks[name], self.read_at, start)

    def read_positions(self, start: int, size: int) -> np.ndarray:
        """Bytes of the positions stream, as uint8."""
        return np.frombuffer(self.read_at(self._data + self._entries["positions"][0] + start, size), np.uint8).copy()

    def read_group(self, group: int) -> np.ndarray:
        """The words of a coding group, as uint32."""
        start, end = (int(offset) for offset in self.table.group_start[group : group + 2])
        return np.frombuffer(
            self.read_at(self._data + self._entries["contextual"][0] + start, end - start), "<u4"
        ).copy()

    def read_at(self, offset: int, size: int) -> bytes:
        """Bytes of the file. Raises PatchError when it has become shorter."""
        pieces = []
        while size:
            piece = os.pread(self._descriptor, size, offset)
            if not piece:
                _refuse("it ends too early")
            pieces.append(piece)
            offset += len(piece)
            size -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def entry_size(self, name: str) -> int:
        """Bytes of an entry in the file; 0 when it is absent."""
        start, end = self._entries.get(name, (0, 0))
        return end - start

    def close(self) -> None:
        """Close the file; repeating it is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> PatchFile:
        """Use as a context."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _read_header(self) -> tuple[dict[str, tuple[int, int]], int, dict[str, str]]:
        if self.size < _LENGTH_BYTES:
            _refuse("it is shorter than a header")
        length = int.from_bytes(self.read_at(0, _LENGTH_BYTES), "little")
        if length > min(MAX_HEADER_BYTES, self.size - _LENGTH_BYTES) or length % _ALIGN:
            _refuse("its header's length is out of bounds")
        raw = self.read_at(_LENGTH_BYTES, length)
        document = _parse(raw)
        metadata = document.pop("__metadata__", None)
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            _refuse("it has no metadata")
        if metadata.get("format") != FORMAT:
            _refuse(f"its format is not {FORMAT}")
        sizes = []
        for name, entry in document.items():
            if not isinstance(entry, dict) or not isinstance(entry.get("shape"), list):
                _refuse("an entry is not described")
            size = entry["shape"][0] if len(entry["shape"]) == 1 else None
            if type(size) is not int or size < 0:
                _refuse("an entry's size is out of bounds")
            sizes.append((name, size))
        _check_entries(sizes)
        # One spelling only: whatever differs (order, spaces, offsets, dtypes, duplicate keys) gives other bytes.
        try:
            canonical_form = header_bytes(metadata, sizes)[_LENGTH_BYTES:]
        except UnicodeEncodeError:
            _refuse("its header is not UTF-8")
        if canonical_form != raw:
            _refuse("its header is not canonical")
        data = _LENGTH_BYTES + length
        ends = np.cumsum([size for _, size in sizes], dtype=object).tolist()
        if data + (ends[-1] if ends else 0) != self.size:
            _refuse("its size does not fit its header")
        return {name: (end - size, end) for (name, size), end in zip(sizes, ends, strict=True)}, data, metadata

    def _read_table(self) -> Table:
        start, end = self._entries["table"]
        packed = self.read_at(self._data + start, end - start)
        raw = decompress_exactly(packed, self.metadata.table_bytes, "table")
        table = Table.from_bytes(raw, self.tensors)
        if table.codecs() != self.codecs:
            _refuse("its codecs are not those that it uses")
        if sum(table.changed.tolist()) != self.changed or len(table.index) > self.tensors:
            _refuse("its counts do not add up")
        sizes = {name: int(table.chunks[name].sum(dtype=np.int64)) for name in STREAMS}
        sizes["positions"] = table.raw_size("positions")
        sizes["contextual"] = int(table.group_start[-1])
        if any(self.entry_size(name) != size for name, size in sizes.items()):
            _refuse("its streams do not have the sizes that its table promises")
        return table

    def _check_side_files(self) -> None:
        if self.part and self._side:
            _refuse("a part other than the first carries side files")
        for paths in (list(self._side), list(self.removed)):
            if problem := paths_problem(paths):
                _refuse(f"of its side files, {problem}")
        if set(self.removed) & set(self._side):
            _refuse("a side file is both carried and removed")
        if any(end - start > MAX_SIDE_BYTES for start, end in self._side.values()):
            _refuse("a side file is too large")

    def _describe(self, path: str) -> SideFile:
        start, end = self._side[path]
        digest = hashlib.sha256()
        for at in range(start, end, _PIECE):
            digest.update(self.read_at(self._data + at, min(_PIECE, end - at)))
        return SideFile(path, end - start, digest.hexdigest())


def _parse(raw: bytes) -> dict[str, Any]:
    # Depth, duplicates and odd numbers need no rule here: they raise, or do not survive the comparison with the
    # canonical form.
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        _refuse("its header is not JSON")
    if not isinstance(document, dict):
        _refuse("its header is not an object")
    return document


def _check_entries(entries: Sequence[tuple[str, int]]) -> None:
    names = [name for name, _ in entries]
    fixed = [name for name in _ENTRIES if name in names]
    side = [name for name in names if name.startswith(SIDE_PREFIX)]
    if names != [*fixed, *side] or "table" not in names:
        _refuse("it has unknown entries, or entries out of order")
    if any(size == 0 for name, size in entries if name in _ENTRIES):
        _refuse("it lists an empty entry")


def _metadata(strings: Mapping[str, str]) -> Metadata:
    expected = _KEYS | {"removed"} if strings.get("part") == "0" else _KEYS
    if set(strings) != expected:
        _refuse("its metadata has missing or unknown fields")
    if not all(_HEX64.fullmatch(strings[name]) for name in _DIGESTS):
        _refuse("a digest is not 64 hex digits")
    if not all(_NUMBER.fullmatch(strings[name]) for name in _NUMBERS) or not _VERSION.fullmatch(strings["zstd"]):
        _refuse("a number in its metadata is malformed")
    numbers = {name: int(strings[name]) for name in _NUMBERS}
    if numbers["table_bytes"] > MAX_TABLE_BYTES or numbers["tensors"] > MAX_TENSORS:
        _refuse("its table is too large")
    if not numbers["part"] < numbers["parts"] <= MAX_PARTS or numbers["changed"] > numbers["elements"]:
        _refuse("its counts are out of bounds")
    codecs = tuple(strings["codecs"].split(",")) if strings["codecs"] else ()
    if list(codecs) != sorted(set(codecs)):
        _refuse("its codecs are not sorted")
    if unknown := [name for name in codecs if name not in KNOWN_CODECS]:
        raise UnknownCodec(
            f"The patch needs the codec {unknown[0][:40]!r}, which this version of Mailboat does not know; upgrade it."
        )
    return Metadata(
        from_digest=strings["from"], to_digest=strings["to"], inventory_digest=strings["inventory"], codecs=codecs,
        removed=_removed(strings.get("removed", "[]")), zstd=strings["zstd"], **numbers,
    )  # fmt: skip


def _removed(text: str) -> tuple[str, ...]:
    value = canonical.decode(
        text.encode(), what="The list of removed files", error=PatchError, max_bytes=MAX_HEADER_BYTES, max_depth=1
    )
    if not isinstance(value, list) or not all(isinstance(path, str) for path in value):
        _refuse("its list of removed files is malformed")
    return tuple(value)
