"""The kernels as the CPU backend offers them: NumPy arrays in, NumPy arrays out, computed on a device.

Every function but `quantise` has the name, the arguments and the bits of its namesake among the library's compiled
functions; whatever has no kernel is taken from there. Data crosses to the device and back with each call, so this is
for blocks that come from files; tensors that live on the device use `changes`, `sums` and `refresh` directly.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from . import changes, decode, numbers, refresh, sums

Array = NDArray[Any]
Rows = NDArray[np.int64]
_MODULUS = 1 << 64
# Classes are counted in some chunks of a block (docs/format/contextual.md): in the same ones as on the CPU.
_CHUNK, _STRETCH, _CLASSES = 64, 8192, 256
# So many elements of blocks that follow one another are decoded together, and at least one block.
_AT_ONCE = 1 << 20
# Columns of what `decode_positional` is told of a block.
_ADDRESS, _WORDS, _ELEMENTS, _WIDTH, _ORDER, _CHANGED, _RICE, _CODES, _LITERALS, _PIECE, _ROW, _WORD = range(12)
_GROUPED = {"nvfp4": numbers.NVFP4, "mxfp4": numbers.MXFP4, "int4": numbers.INT4}
# The interpreter can't run two kernels at once, and a GPU gains nothing from it.
_ONE_AT_A_TIME = threading.Lock()


class Arrays:
    """The backend on `device` ("cuda", "cuda:1", "cpu" for the interpreter); `rest` has what no kernel does."""

    def __init__(self, device: str, rest: ModuleType) -> None:
        self.device = device
        self._rest = rest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rest, name)

    def find_changes(self, old: Array, new: Array, width: int, positions: Array) -> int:
        """Positions (uint32, ascending) of the elements that differ between two blocks; returns how many."""
        with _ONE_AT_A_TIME:
            found = changes.diff(self._there(old, width), self._there(new, width)).positions.cpu().numpy()
        positions[: found.size] = found
        return int(found.size)

    def compare(
        self, old: Array, new: Array, width: int, elements: int, piece_bytes: int, row0: int, word0: int, found: int,
        seed_a: int, seed_b: int, shift: int, mask: int, every: int, limit: int, positions: Array, kept: Array,
        counts: Array, out: Array,
    ) -> int:  # fmt: skip
        """All that an encoder asks about two blocks; classes are not counted where nothing changes."""
        seeds, piece = (int(seed_a), int(seed_b)), (piece_bytes, int(row0), int(word0))
        if found >= 0:  # nothing has to be looked for
            return int(
                self._rest.compare(
                    old, new, width, elements, *piece, found, seed_a, seed_b, shift, mask, every, limit, positions,
                    kept, counts, out,
                )
            )  # fmt: skip
        with _ONE_AT_A_TIME:
            before = self._there(old, width, copy=True)[:elements]
            changed = changes.diff(before, self._there(new, width)[:elements])
            count = changed.positions.numel()
            positions[:count] = changed.positions.cpu().numpy()
            if not 0 < count <= limit:
                return count
            if every:
                kept[: count * width] = changed.new.cpu().numpy().view(np.uint8)
                place = int(shift), int(mask)
                chosen, stands_for = _sample(before, every)
                counts[0] += _histogram(chosen, *place).cpu().numpy() * stands_for
                counts[1] += _histogram(changed.old, *place).cpu().numpy()
                sampled = changed.old[changed.positions // _STRETCH % every == 0]
                counts[2] += _histogram(sampled, *place).cpu().numpy() * every
            _add(out, _applied(before, changed.positions, changed.new, seeds, piece))
            return count

    def decode_positional(
        self, blocks: Rows, seeds: Array, codes: Array, values: Array, literals: Array, positions: Array,
        elements: Array, change: Array,
    ) -> int:  # fmt: skip
        """Decode a run of positional blocks; returns 0, or 1 where positions are damaged, 2 where values are."""
        ends = np.cumsum(np.concatenate([np.zeros((1, blocks.shape[1]), np.int64), blocks]), axis=0)
        words = np.concatenate([[0], np.cumsum(blocks[:, _CHANGED] * blocks[:, _WIDTH] + 7 >> 3)])
        for first, end in _batches(blocks):
            (code, past_codes), (change_at, past_changes), (literal, past_literals) = (
                ends[[first, end], column].tolist() for column in (_CODES, _CHANGED, _LITERALS)
            )
            with _ONE_AT_A_TIME:
                status = self._decode(
                    blocks[first:end], seeds[first:end], codes[code:past_codes], values[change_at:past_changes],
                    literals[literal:past_literals], positions[change_at:past_changes],
                    elements[words[first] : words[end]], change[first:end],
                )  # fmt: skip
            if status:
                return status
        return numbers.DECODED

    def _decode(
        self, blocks: Rows, seeds: Array, codes: Array, values: Array, literals: Array, positions: Array,
        elements: Array, change: Array,
    ) -> int:  # fmt: skip
        """The same for blocks of one width and order: old words go to the device, changes come back."""
        width, sizes = int(blocks[0, _WIDTH]), blocks[:, _WORDS]
        words = torch.empty(int(sizes.sum()), dtype=torch.int64, device=self.device)
        starts = np.cumsum(sizes) - sizes
        for address, size, start in zip(blocks[:, _ADDRESS].tolist(), sizes.tolist(), starts.tolist(), strict=True):
            words[start : start + size] = torch.from_numpy(_memory(address, size))
        old, first = words.view(changes.INTEGERS[width]), starts * (8 // width)
        table = np.stack(
            [first, *blocks[:, [_ELEMENTS, _CHANGED, _RICE, _CODES]].T, blocks[:, _LITERALS] // width], axis=1
        )
        there = self._there(codes, 1), self._there(values, 1), self._there(literals, width)
        found = decode.decode_positional(old, *there, table, int(blocks[0, _ORDER]))
        if found.status:
            return found.status
        counts = blocks[:, _CHANGED]
        positions[:] = found.positions.cpu().numpy() - np.repeat(first, counts)
        new, room = found.new.cpu().numpy().view(np.uint8), elements.view(np.uint8)
        word, done = 0, 0
        for number, (at, count) in enumerate(zip(first.tolist(), counts.tolist(), strict=True)):
            room[8 * word : 8 * word + count * width] = new[done * width : (done + count) * width]
            inside, here = slice(done, done + count), old[at : at + int(blocks[number, _ELEMENTS])]
            piece = tuple(int(told) for told in blocks[number, [_PIECE, _ROW, _WORD]])
            seed = int(seeds[number, 0]), int(seeds[number, 1])
            _add(change[number], _applied(here, found.positions[inside] - at, found.new[inside], seed, piece))
            word, done = word + (count * width + 7 >> 3), done + count
        return numbers.DECODED

    def sum_rows(
        self, buffer: Array, piece_bytes: int, row0: int, word0: int, seed_a: int, seed_b: int, out: Array
    ) -> None:
        """Add to out[0:2] the sums of a buffer that holds pieces of consecutive rows."""
        rows = buffer[: buffer.size // piece_bytes * piece_bytes].reshape(-1, piece_bytes)
        with _ONE_AT_A_TIME:
            pair = sums.tensor_sums(self._there(rows, 1), (int(seed_a), int(seed_b)), row0=int(row0), word0=int(word0))
        _add(out, pair)

    def sum_changes(
        self, old: Array, new: Array, positions: Array, width: int, piece_bytes: int, row0: int, word0: int,
        seed_a: int, seed_b: int, out: Array,
    ) -> None:  # fmt: skip
        """Add to out[0:2] what the changes at `positions` do to the sums of a block."""
        values = new.reshape(-1).view(np.uint8).view(f"u{width}")[positions]
        rows = old[: old.size // piece_bytes * piece_bytes].reshape(-1, piece_bytes)
        with _ONE_AT_A_TIME:
            where = torch.from_numpy(positions.astype(np.int64)).to(self.device)
            held, seeds = self._there(rows, width, copy=True), (int(seed_a), int(seed_b))
            _add(out, _applied(held, where, self._there(values, width), seeds, (piece_bytes, int(row0), int(word0))))

    def quantise(self, weights: Array, format: str, group: int, amax: int) -> tuple[Array, Array]:
        """Codes (bytes, a matrix) and scales of a matrix of finite BF16 bits (uint16) in a served format.

        `format`: "fp8-block", "fp8-channel", or "nvfp4", "mxfp4", "int4" with scales for groups of `group`; `amax`: for
        NVFP4 the BF16 bits of the tensor's largest magnitude.
        """
        (rows, columns), kind = weights.shape, _GROUPED.get(format)
        with _ONE_AT_A_TIME:
            master = self._there(weights, 2)
            codes = self._zeros(rows, columns if kind is None else columns // 2, torch.uint8)
            if kind is None:
                block = (numbers.FP8_BLOCK, numbers.FP8_BLOCK) if format == "fp8-block" else (1, columns)
                scales = self._zeros(-(-rows // block[0]), -(-columns // block[1]), torch.float32)
                refresh.refresh_fp8(master, codes, scales, block, expected=codes.numel())
            else:
                scales = self._zeros(rows, columns // group, torch.int16 if kind == numbers.INT4 else torch.uint8)
                whole = self._zeros(1, 1, torch.float32)
                refresh.refresh_groups(master, codes, scales, whole, kind, group, expected=codes.numel(), amax=amax)
            return codes.cpu().numpy(), scales.cpu().numpy()

    def _zeros(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros((rows, columns), dtype=dtype, device=self.device)

    def _there(self, array: Array, width: int, *, copy: bool = False) -> torch.Tensor:
        """The array's bytes on the device as integers of `width` bytes; on the CPU a view unless `copy`."""
        kind = np.uint8 if width == 1 else np.dtype(f"i{width}")
        here = torch.from_numpy(_writable(array.view(np.uint8) if array.ndim > 1 else array).view(kind))
        return here.clone() if copy and self.device == "cpu" else here.to(self.device)


def _batches(blocks: Rows) -> Iterator[tuple[int, int]]:
    """(first, end) of blocks of one width and order that follow one another, with _AT_ONCE elements at most."""
    first, held = 0, 0
    for number, (elements, *kind) in enumerate(blocks[:, [_ELEMENTS, _WIDTH, _ORDER]].tolist()):
        if number > first and (held + elements > _AT_ONCE or kind != blocks[first, [_WIDTH, _ORDER]].tolist()):
            yield first, number
            first, held = number, 0
        held += elements
    if len(blocks):
        yield first, len(blocks)


def _memory(address: int, words: int) -> NDArray[np.int64]:
    """Words that lie at an address."""
    return np.ctypeslib.as_array((ctypes.c_int64 * words).from_address(address))


def _sample(block: torch.Tensor, every: int) -> tuple[torch.Tensor, int]:
    """The elements of one chunk in a few of one stretch in `every`; how many elements each of them stands for."""
    elements = block.numel()
    thin = 2 if elements >> 15 else 1
    chunks = torch.arange(-(-elements // _CHUNK), device=block.device)
    chosen = chunks[(chunks * _CHUNK // _STRETCH % every == 0) & (chunks % thin == 0)]
    places = (chosen[:, None] * _CHUNK + torch.arange(_CHUNK, device=block.device)).reshape(-1)
    return block[places[places < elements]], every * thin


def _histogram(elements: torch.Tensor, shift: int, mask: int) -> torch.Tensor:
    """How many elements each class has."""
    classes = ((elements >> shift) & mask).long()
    counts = torch.zeros(_CLASSES, dtype=torch.int64, device=elements.device)
    return counts.index_add_(0, classes, torch.ones_like(classes))


def _applied(
    block: torch.Tensor, positions: torch.Tensor, new: torch.Tensor, seeds: tuple[int, int], piece: tuple[int, ...]
) -> tuple[int, int]:
    """What changes do to the sums of a block, which takes them; `piece`: bytes, first row, first word."""
    rows = block.view(-1, piece[0] // block.element_size())
    return sums.apply_with_sums(rows, positions, new, seeds, row0=piece[1], word0=piece[2])


def _writable(array: Array) -> Array:
    """The array, or a copy where it is only lent for reading: torch asks for memory that it could write."""
    if array.flags.writeable:
        return array
    return np.array(array)


def _add(out: Array, pair: tuple[int, int]) -> None:
    for which, value in enumerate(pair):
        out[which] = np.uint64((int(out[which]) + value) % _MODULUS)
