"""The table of a patch part: which tensors it carries, and for each block its encoding and sizes.

Columns instead of records, so that half a million tensors stay small. Reading never trusts a count before it has been
compared with the bytes that are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from mailboat.errors import PatchError, UnknownCodec
from mailboat.patch.format import (
    BLOCK_ELEMENTS,
    CHUNK_BYTES,
    CONTEXTUAL,
    CONTEXTUAL_SHARE,
    DENSE,
    ENCODING_NAMES,
    GROUP_BYTES,
    KNOWN_ENCODINGS,
    MAX_GROUP_WORDS,
    MAX_TENSOR_BYTES,
    POSITIONAL,
    SAME,
    XOR,
    Geometry,
    rice_parameters,
)

Column = npt.NDArray[Any]
STREAMS = ("values", "literals", "dense")
# As they stand in the file, each in byte planes: small numbers then give long runs of zeros.
_TENSOR_COLUMNS = (("gap", "<u4"), ("elements", "<u8"), ("row_elements", "<u8"), ("width", "u1"), ("is_changed", "u1"))
_BLOCK_COLUMNS = (("encoding", "u1"), ("block_changed", "<u4"), ("slack", "<u4"), ("literals", "<u4"))


def _refuse(what: str) -> NoReturn:
    raise PatchError(f"The patch's table is damaged ({what}); fetch or build the patch again.")


@dataclass(frozen=True)
class Table:
    """The parsed columns.

    Tensor columns have one entry per carried tensor, block columns one per block of a changed one, and
    `group_words` one per coding group with contextual blocks.
    """

    index: Column
    elements: Column
    row_elements: Column
    width: Column
    changed: Column
    encoding: Column
    block_changed: Column
    position_bytes: Column
    literals: Column
    chunks: dict[str, Column]
    group_words: Column

    def to_bytes(self) -> bytes:
        """The raw table."""
        head = np.array([len(self.index), *(len(self.chunks[name]) for name in STREAMS)], "<u4").tobytes()
        stored = {
            "gap": np.diff(self.index.astype(np.int64), prepend=-1) - 1,
            "is_changed": self.changed > 0,
            "slack": self.position_bytes - self._least_position_bytes(),
        }
        columns = [
            _to_planes(stored[name] if name in stored else getattr(self, name), dtype)
            for name, dtype in (*_TENSOR_COLUMNS, *_BLOCK_COLUMNS)
        ]
        sizes = (*(self.chunks[name] for name in STREAMS), self.group_words)
        return b"".join([head, *columns, *(_to_planes(column, "<u4") for column in sizes)])

    @classmethod
    def from_bytes(cls, raw: bytes, tensors: int) -> Table:
        """Parse and check everything that can be checked without the inventory. Raises PatchError, UnknownCodec."""
        reader = _Reader(raw)
        count, *chunk_counts = (int.from_bytes(reader.bytes(4), "little") for _ in range(4))
        columns = {name: reader.column(dtype, count) for name, dtype in _TENSOR_COLUMNS}
        index = np.cumsum(columns.pop("gap").astype(np.int64) + 1) - 1
        if count and index[-1] >= tensors:
            _refuse("a tensor beyond the inventory")
        is_changed = columns.pop("is_changed")
        if (is_changed > 1).any():
            _refuse("a flag other than 0 and 1")
        blocks = sum(_block_counts(**columns, changed=is_changed))
        columns |= {name: reader.column(dtype, blocks) for name, dtype in _BLOCK_COLUMNS}
        chunks = {name: reader.column("<u4", n) for name, n in zip(STREAMS, chunk_counts, strict=True)}
        group_words = reader.column("<u4", reader.left // 4)
        reader.end()
        slack = columns.pop("slack")
        # Where blocks lie follows from the flags; positions and totals follow from the blocks.
        draft = cls(
            **columns, index=index, changed=is_changed, position_bytes=slack, chunks=chunks, group_words=group_words
        )
        draft._check_blocks()
        draft._check_groups()
        total = np.zeros(count, np.int64)
        np.add.at(total, draft.block_tensor, draft.block_changed.astype(np.int64))
        if ((total > 0) != (is_changed > 0)).any():
            _refuse("a tensor without changes marked as changed")
        least = draft._least_position_bytes()
        table = replace(draft, changed=total, position_bytes=least + slack)
        table._check_position_bytes()
        for name in STREAMS:
            table._check_chunks(name)
        return table

    @cached_property
    def block_start(self) -> Column:
        """For each carried tensor the number of its first block; one more entry holds the total."""
        counts = _block_counts(self.elements, self.row_elements, self.width, self.changed)
        return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)

    @cached_property
    def block_tensor(self) -> Column:
        """For each block the place (not the inventory index) of its tensor."""
        return np.repeat(np.arange(len(self.index), dtype=np.int64), np.diff(self.block_start))

    @cached_property
    def block_elements(self) -> Column:
        """Coding elements of each block."""
        return self._block_places[1]

    @property
    def block_first(self) -> Column:
        """The first coding element of each block, counted in its tensor."""
        return self._block_places[0]

    @cached_property
    def _block_places(self) -> tuple[Column, Column]:
        """For each block its first element and how many it has."""
        place = self.block_tensor
        number = np.arange(len(place), dtype=np.int64) - self.block_start[place]
        row = self.row_elements.astype(np.int64)[place]
        if not len(place):
            return row, row
        long_rows = row >= BLOCK_ELEMENTS
        pieces = np.maximum(-(-row // BLOCK_ELEMENTS), 1)
        column = number % pieces * BLOCK_ELEMENTS
        whole = BLOCK_ELEMENTS // np.maximum(row, 1) * row
        first = np.where(long_rows, number // pieces * row + column, number * whole)
        left = np.where(long_rows, row - column, self.elements.astype(np.int64)[place] - first)
        return first, np.minimum(left, np.where(long_rows, BLOCK_ELEMENTS, whole))

    @cached_property
    def block_group(self) -> Column:
        """For each block the number of its coding group among those with contextual blocks; -1 unless it is contextual.

        Groups are cut where the bytes of the carried tensors, one after the other, cross a multiple of GROUP_BYTES.
        """
        width = self.width.astype(np.uint64)
        tensor_bytes = self.elements * width
        starts = np.cumsum(tensor_bytes, dtype=np.uint64) - tensor_bytes
        place = self.block_tensor
        block_bytes = self.block_elements.astype(np.uint64) * width[place]
        before = np.concatenate([np.zeros(1, np.uint64), np.cumsum(block_bytes, dtype=np.uint64)])
        at = starts[place] + before[:-1] - before[self.block_start[place]]
        groups = np.full(len(place), -1, np.int64)
        contextual = self.contextual_blocks
        windows = at[contextual] // np.uint64(GROUP_BYTES)
        groups[contextual] = np.cumsum(np.concatenate([[0], windows[1:] != windows[:-1]]))[: len(contextual)]
        return groups

    @cached_property
    def contextual_blocks(self) -> Column:
        """The numbers of the contextual blocks, in order."""
        return np.flatnonzero(self.encoding == CONTEXTUAL)

    @cached_property
    def group_blocks(self) -> Column:
        """For each coding group the place of its first block among the contextual ones; one more holds their number."""
        groups = self.block_group[self.contextual_blocks]
        return np.searchsorted(groups, np.arange(self.groups + 1))

    @property
    def groups(self) -> int:
        """How many coding groups have contextual blocks."""
        return int(self.block_group.max(initial=-1)) + 1

    @cached_property
    def group_start(self) -> Column:
        """For each such group the offset of its words in the `contextual` entry, in bytes; one more holds the size."""
        return np.concatenate([[0], np.cumsum(self.group_words.astype(np.int64) * 4)]).astype(np.int64)

    @cached_property
    def starts(self) -> dict[str, Column]:
        """For each stream the raw offset of each block's bytes; one more entry holds the stream's raw size."""
        width = self.width.astype(np.int64)[self.block_tensor]
        positional = self.encoding == POSITIONAL
        planes = (self.encoding == DENSE) | (self.encoding == XOR)
        sizes = {
            "positions": self.position_bytes.astype(np.int64),
            "values": self.block_changed.astype(np.int64) * positional,
            "literals": self.literals.astype(np.int64) * width,
            "dense": self.block_elements * width * planes,
        }
        return {name: np.concatenate([[0], np.cumsum(size)]).astype(np.int64) for name, size in sizes.items()}

    def raw_size(self, stream: str) -> int:
        """Raw bytes of a stream."""
        return int(self.starts[stream][-1])

    def codecs(self) -> tuple[str, ...]:
        """Names of the encodings in use, sorted."""
        return tuple(sorted(ENCODING_NAMES[int(number)] for number in np.unique(self.encoding) if number != SAME))

    def _check_blocks(self) -> None:
        for number in np.unique(self.encoding):
            if number != SAME and number not in KNOWN_ENCODINGS:
                name = ENCODING_NAMES.get(int(number), f"number {number}")
                raise UnknownCodec(
                    f"The patch uses the encoding {name}, which this version of Mailboat cannot read; upgrade it."
                )
        if (self.block_changed > self.block_elements).any():
            _refuse("more changes than a block has elements")
        if ((self.block_changed == 0) != (self.encoding == SAME)).any():
            _refuse("an encoding that does not fit its count")
        if (self.literals > self.block_changed).any() or self.literals[self.encoding != POSITIONAL].any():
            _refuse("more literals than changes")
        if self.position_bytes[self.encoding != POSITIONAL].any():
            _refuse("position bytes that do not fit the encoding")

    def _check_groups(self) -> None:
        contextual = self.encoding == CONTEXTUAL
        if (self.block_changed[contextual] > self.block_elements[contextual] // CONTEXTUAL_SHARE).any():
            _refuse("more contextual changes than a quarter")
        if len(self.group_words) != self.groups:
            _refuse("bytes are left over, or coding groups without a size")
        if (self.group_words == 0).any() or (self.group_words > MAX_GROUP_WORDS).any():
            _refuse("a coding group of a size out of bounds")

    def _least_position_bytes(self) -> Column:
        """For each positional block the bytes of its Rice codes if every quotient were 0; 0 for other blocks."""
        positional = self.encoding == POSITIONAL
        n, k = (
            np.where(positional, column, 1).astype(np.int64) for column in (self.block_elements, self.block_changed)
        )
        return np.where(positional, -(-k * (1 + rice_parameters(n, k)) // 8), 0)

    def _check_position_bytes(self) -> None:
        positional = self.encoding == POSITIONAL
        n, k, size = (
            column[positional].astype(np.int64)
            for column in (self.block_elements, self.block_changed, self.position_bytes)
        )
        r = rice_parameters(n, k)
        if (size * 8 >= ((n - k) >> r) + k * (1 + r) + 8).any():
            _refuse("more position bytes than any positions take")

    def _check_chunks(self, name: str) -> None:
        raw = self.raw_size(name)
        sizes = self.chunks[name].astype(np.int64)
        if len(sizes) != -(-raw // CHUNK_BYTES):
            _refuse(f"chunks of {name} that do not fit its size")
        limits = np.full(len(sizes), CHUNK_BYTES, np.int64)
        if len(sizes):
            limits[-1] = raw - (len(sizes) - 1) * CHUNK_BYTES
        if (sizes < 1).any() or (sizes > limits).any():
            _refuse(f"a chunk of {name} larger than its contents")


class _Reader:
    """Takes columns off a byte string and refuses to go beyond it."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes that no column has taken."""
        return len(self._raw) - self._at

    def bytes(self, size: int) -> bytes:
        if size > len(self._raw) - self._at:
            _refuse("it ends too early")
        self._at += size
        return self._raw[self._at - size : self._at]

    def column(self, dtype: str, count: int) -> Column:
        size = np.dtype(dtype).itemsize
        planes = np.frombuffer(self.bytes(size * count), np.uint8).reshape(size, count)
        return np.ascontiguousarray(planes.T).reshape(-1).view(dtype)

    def end(self) -> None:
        if self._at != len(self._raw):
            _refuse("bytes are left over")


def _to_planes(column: Column, dtype: str) -> bytes:
    """A column's lowest bytes, then the second ones, and so on."""
    data = np.ascontiguousarray(column.astype(dtype)).view(np.uint8)
    return data.reshape(len(column), np.dtype(dtype).itemsize).T.tobytes()


def _block_counts(elements: Column, row_elements: Column, width: Column, changed: Column) -> list[int]:
    """Blocks of each tensor (none where nothing changed), after checking the shapes that they derive from."""
    if not np.isin(width, (1, 2, 4, 8)).all():
        _refuse("an element width other than 1, 2, 4, 8")
    if (elements > MAX_TENSOR_BYTES // width.astype(np.uint64)).any():
        _refuse("a tensor beyond all bounds")
    if ((row_elements == 0) != (elements == 0)).any() or (elements % np.maximum(row_elements, 1) != 0).any():
        _refuse("rows that do not divide their tensor")
    # As `Geometry.blocks`. As a list, because no sum of what a file says may wrap around.
    row = np.maximum(row_elements, 1).astype(np.int64)
    rows = elements.astype(np.int64) // row
    long_rows = row >= BLOCK_ELEMENTS
    together = np.where(long_rows, 1, BLOCK_ELEMENTS // row)
    each = np.where(long_rows, -(-row // BLOCK_ELEMENTS), 1)
    counts: list[int] = (-(-rows // np.maximum(together, 1)) * each * (changed > 0)).tolist()
    return counts


def table_of(
    tensors: Sequence[tuple[int, Geometry, Sequence[tuple[int, int, int, int]]]],
    chunks: dict[str, list[int]],
    group_words: Sequence[int],
) -> Table:
    """Columns from (inventory index, geometry, blocks as (encoding, changed, position bytes, literals)) per tensor."""
    totals = [sum(block[1] for block in blocks) for _, _, blocks in tensors]
    rows = [block for (_, _, blocks), total in zip(tensors, totals, strict=True) if total for block in blocks]
    by_block = np.array(rows, np.int64).reshape(len(rows), 4)
    return Table(
        index=np.array([index for index, _, _ in tensors], np.uint32),
        elements=np.array([geometry.elements for _, geometry, _ in tensors], np.uint64),
        row_elements=np.array([geometry.row_elements for _, geometry, _ in tensors], np.uint64),
        width=np.array([geometry.width for _, geometry, _ in tensors], np.uint8),
        changed=np.array(totals, np.uint64),
        encoding=by_block[:, 0].astype(np.uint8),
        block_changed=by_block[:, 1].astype(np.uint32),
        position_bytes=by_block[:, 2].astype(np.uint32),
        literals=by_block[:, 3].astype(np.uint32),
        chunks={name: np.array(chunks[name], np.uint32) for name in STREAMS},
        group_words=np.array(group_words, np.uint32),
    )
