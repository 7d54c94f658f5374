"""The two digests of a state: fast sums that find faults, strong digests that find forgery.

Sums follow the bytes wherever they lie and can be updated from changed words alone; they protect against nobody.
Strong digests are BLAKE3 and decide what a state is.  Formats and formulas: docs/format/digests.md.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from threading import Lock

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mailboat.checkpoint.inventory import Inventory, Tensor
from mailboat.checkpoint.side_files import SideFile
from mailboat.checkpoint.source import Bytes, TensorSource
from mailboat.errors import DigestMismatch

Sums = NDArray[np.uint64]
Strong = NDArray[np.uint8]
Progress = Callable[[int], None]
TILE = 8 << 20
DIGEST_BYTES = 32
SUM_BYTES = 16
_WORD = 8
_MAX_THREADS = 16


@dataclass(frozen=True, eq=False)
class State:
    """A state by its digests: `sums` uint64 (N, 2), `strong` uint8 (N, 32), both in inventory order."""

    inventory: Inventory
    sums: Sums
    strong: Strong
    side_files: tuple[SideFile, ...]

    @cached_property
    def digest(self) -> str:
        """The state digest, 64 hex digits: content only, independent of shards and metadata."""
        return state_digest(self.inventory, self.strong, self.side_files)

    def digests_bytes(self) -> bytes:
        """Return the digests blob: N * 16 bytes of sums, then N * 32 bytes of strong digests."""
        return self.sums.astype("<u8").tobytes() + self.strong.tobytes()

    @classmethod
    def from_parts(cls, inventory: Inventory, digests: bytes, side_files: tuple[SideFile, ...]) -> State:
        """Join what a manifest names; raise DigestMismatch when the blob's size doesn't fit the inventory."""
        count = len(inventory.tensors)
        _require_size(digests, count)
        sums = np.frombuffer(digests, "<u8", count * 2).astype(np.uint64).reshape(count, 2)
        strong = (
            np.frombuffer(digests, np.uint8, count * DIGEST_BYTES, count * SUM_BYTES)
            .reshape(count, DIGEST_BYTES)
            .copy()
        )
        return cls(inventory, sums, strong, side_files)


def state_digest(inventory: Inventory, strong: Strong, side_files: tuple[SideFile, ...]) -> str:
    """Return SHA-256 over inventory digest, strong digests and side files, 64 hex digits."""
    return _state_digest(inventory.digest, len(inventory.tensors), strong, side_files)


def state_digest_of_parts(inventory: str, tensors: int, digests: bytes, side_files: tuple[SideFile, ...]) -> str:
    """The state digest of an inventory of which only the digest and the number of tensors are known.

    Raises DigestMismatch when the digests blob's size doesn't fit the number.
    """
    _require_size(digests, tensors)
    return _state_digest(inventory, tensors, memoryview(digests)[tensors * SUM_BYTES :], side_files)


def _state_digest(inventory: str, tensors: int, strong: Strong | memoryview, side_files: tuple[SideFile, ...]) -> str:
    digest = hashlib.sha256(b"mailboat-state-1\n" + bytes.fromhex(inventory) + tensors.to_bytes(8, "little"))
    digest.update(strong.tobytes())
    digest.update(len(side_files).to_bytes(8, "little"))
    for file in sorted(side_files, key=lambda file: file.path):
        path = file.path.encode()
        digest.update(len(path).to_bytes(8, "little") + path)
        digest.update(file.size.to_bytes(8, "little") + bytes.fromhex(file.sha256))
    return digest.hexdigest()


def _require_size(digests: bytes, tensors: int) -> None:
    needed = tensors * (SUM_BYTES + DIGEST_BYTES)
    if len(digests) != needed:
        raise DigestMismatch(f"The digests blob has {len(digests)} bytes where {tensors} tensors need {needed}.")


def seeds(tensor: Tensor) -> tuple[int, int]:
    """Return the two 64-bit seeds of a tensor's sum."""
    shape = ",".join(map(str, tensor.shape))
    text = f"mailboat-sum-1\0{tensor.component}\0{tensor.name}\0{tensor.dtype}\0{shape}"
    raw = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:16], "little")


def sum_slice(
    tensor: Tensor, data: Bytes, *, row0: int, rows: int, column0: int = 0, column_bytes: int
) -> tuple[int, int]:
    """Return what a slice of a tensor adds to its two sums: the slices of a partition add up to them modulo 2^64.

    `data`: the bytes [column0, column0 + column_bytes) of the rows [row0, row0 + rows), row after row. `column0` must
    be a multiple of 8, and so must the end unless it is the end of the row; raises ValueError for other cuts, since
    they divide a word and can't be checked in place.
    """
    end = column0 + column_bytes
    if not (row0 >= 0 and rows >= 0 and row0 + rows <= tensor.rows and 0 <= column0 <= end <= tensor.row_bytes):
        raise ValueError(f"the slice does not lie inside {tensor.name}")
    if column0 % _WORD or (end % _WORD and end != tensor.row_bytes):
        raise ValueError(f"the slice of {tensor.name} cuts a 64-bit word; it can't be checked in place")
    if data.size != rows * column_bytes:
        raise ValueError(f"the slice of {tensor.name} has {data.size} bytes, not {rows * column_bytes}")
    out = np.zeros(2, np.uint64)
    if data.size:
        from mailboat.compiled import sum_rows  # whoever only reads digests does not wait for Numba

        seed_a, seed_b = seeds(tensor)
        sum_rows(data, column_bytes, row0, column0 // _WORD, np.uint64(seed_a), np.uint64(seed_b), out)
    return int(out[0]), int(out[1])


@dataclass(frozen=True, slots=True)
class Tile:
    """A run of a tensor's bytes that holds whole rows or a word-aligned piece of one: what one pass reads at a time."""

    offset: int
    nbytes: int
    row: int
    word: int
    piece_bytes: int


def tiles(tensor: Tensor, limit: int = TILE) -> Iterator[Tile]:
    """Cut a tensor into tiles of at most `limit` bytes (a multiple of 8), in the order of its bytes."""
    rows, row_bytes = tensor.rows, tensor.row_bytes
    if 0 < row_bytes <= limit:
        step = limit // row_bytes
        for row in range(0, rows, step):
            count = min(step, rows - row)
            yield Tile(row * row_bytes, count * row_bytes, row, 0, row_bytes)
        return
    for row in range(rows):
        for column in range(0, row_bytes, limit):
            count = min(limit, row_bytes - column)
            yield Tile(row * row_bytes + column, count, row, column // _WORD, count)


def measure(source: TensorSource, *, threads: int | None = None, progress: Progress | None = None) -> State:
    """Read every tensor once and return its sums and strong digests.

    Memory: one tile (8 MiB) per thread. `progress` is called with the bytes of each tile as it is done, one call at a
    time. Raises CheckpointChanged when the source is a checkpoint that changed meanwhile.
    """
    sums, strong = _measure(source, threads, progress, with_strong=True)
    return State(source.inventory, sums, strong, source.side_files)


def measure_sums(source: TensorSource, *, threads: int | None = None, progress: Progress | None = None) -> Sums:
    """Read every tensor once and return its sums, uint64 (N, 2); otherwise as `measure`."""
    return _measure(source, threads, progress, with_strong=False)[0]


def _measure(
    source: TensorSource, threads: int | None, progress: Progress | None, *, with_strong: bool
) -> tuple[Sums, Strong]:
    tensors = source.inventory.tensors
    scan = _Scan(source, progress, with_strong=with_strong)
    count = max(1, min(threads or min(len(os.sched_getaffinity(0)), _MAX_THREADS), len(tensors)))
    if count == 1:
        scan.work()
    else:
        with ThreadPoolExecutor(count, "measure") as pool:
            for done in [pool.submit(scan.work) for _ in range(count)]:
                done.result()
    if check := getattr(source, "check_unchanged", None):
        check()
    return scan.sums, scan.strong


class _Scan:
    """One pass over a source, shared by its threads: each takes the next tensor, the largest first."""

    def __init__(self, source: TensorSource, progress: Progress | None, *, with_strong: bool) -> None:
        self._source = source
        self._progress = progress
        self._with_strong = with_strong
        self._lock = Lock()
        self._failed = False
        tensors = source.inventory.tensors
        self._left = iter(sorted(range(len(tensors)), key=lambda index: -tensors[index].nbytes))
        self.sums: Sums = np.zeros((len(tensors), 2), np.uint64)
        self.strong: Strong = np.zeros((len(tensors), DIGEST_BYTES), np.uint8)

    def work(self) -> None:
        """Measure tensors until none is left or another thread has failed."""
        buffer = np.empty(TILE, np.uint8)
        try:
            while not self._failed:
                with self._lock:
                    index = next(self._left, None)
                if index is None:
                    return
                self._tensor(index, buffer)
        except BaseException:
            self._failed = True
            raise

    def _tensor(self, index: int, buffer: Bytes) -> None:
        from mailboat.compiled import sum_rows

        tensor = self._source.inventory.tensors[index]
        seed_a, seed_b = (np.uint64(seed) for seed in seeds(tensor))
        digest = blake3() if self._with_strong else None
        for tile in tiles(tensor):
            if self._failed:
                return
            data = buffer[: tile.nbytes]
            self._source.read(index, tile.offset, data)
            sum_rows(data, tile.piece_bytes, tile.row, tile.word, seed_a, seed_b, self.sums[index])
            if digest is not None:
                digest.update(data.data)
            if self._progress is not None:
                with self._lock:
                    self._progress(tile.nbytes)
        if digest is not None:
            self.strong[index] = np.frombuffer(digest.digest(), np.uint8)
