"""Tensor sums (docs/format/digests.md), whole and as changes are applied.

Per row r and little-endian 64-bit word c: x = w ^ (seed + r ROW + c WORD), mixed by xor-shifts and odd multiplications,
summed modulo 2^64, twice with independent constants. Additions modulo 2^64 commute, so the order of programs is free.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from . import numbers
from .changes import INTEGERS, integers
from .place import where_it_lies
from .rounding import unsigned

BLOCK = 1024
_SIGNED = 1 << 63
_MODULUS = 1 << 64

ROW_A, ROW_B = (tl.constexpr(value) for value in numbers.ROW)
WORD_A, WORD_B = (tl.constexpr(value) for value in numbers.WORD)
FIRST_A, FIRST_B = (tl.constexpr(value) for value in numbers.FIRST)
SECOND_A, SECOND_B = (tl.constexpr(value) for value in numbers.SECOND)


@triton.jit
def _mix(x, FIRST: tl.constexpr, SECOND: tl.constexpr):
    x ^= x >> 32
    x *= FIRST
    x ^= x >> 29
    x *= SECOND
    x ^= x >> 32
    return x


@triton.jit
def _mix_a(word, seed, row, column):
    return _mix(word ^ (seed + row * ROW_A + column * WORD_A), FIRST_A, SECOND_A)


@triton.jit
def _mix_b(word, seed, row, column):
    return _mix(word ^ (seed + row * ROW_B + column * WORD_B), FIRST_B, SECOND_B)


@triton.jit
def _word(pointer, offset, left, inside, UNIT: tl.constexpr):
    """The 64-bit words at unit `offset` of a row that has `left` units from there on; zeros beyond its end."""
    word = tl.zeros(offset.shape, tl.uint64)
    for unit in tl.static_range(8 // UNIT):
        part = tl.load(pointer + offset + unit, mask=inside & (unit < left), other=0)
        word |= unsigned(part).to(tl.uint64) << (8 * UNIT * unit)
    return word


@triton.jit
def _tensor_sums(
    data, sums, seeds, rows, units, stride, words, row0, word0, UNIT: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    row = index // words
    column = index - row * words
    inside = row < rows
    at = column * (8 // UNIT)
    word = _word(data, row * stride + at, units - at, inside, UNIT)
    r = (row + row0).to(tl.uint64)
    c = (column + word0).to(tl.uint64)
    seed_a = tl.load(seeds).to(tl.uint64, bitcast=True)
    seed_b = tl.load(seeds + 1).to(tl.uint64, bitcast=True)
    zero = tl.zeros(word.shape, tl.uint64)
    a = tl.sum(tl.where(inside, _mix_a(word, seed_a, r, c), zero), axis=0)
    b = tl.sum(tl.where(inside, _mix_b(word, seed_b, r, c), zero), axis=0)
    tl.atomic_add(sums, a.to(tl.int64, bitcast=True))
    tl.atomic_add(sums + 1, b.to(tl.int64, bitcast=True))


@where_it_lies
def tensor_sums(rows: torch.Tensor, seeds: tuple[int, int], *, row0: int = 0, word0: int = 0) -> tuple[int, int]:
    """Both sums of a matrix of any dtype, whose rows (dense, any distance apart) are `row0` ... of a tensor.

    `word0`: the word of the tensor's row with which these rows begin. Reads every byte once; loads are as wide as row
    length, distance and address allow.
    """
    if rows.numel() == 0:
        return 0, 0
    if rows.dim() != 2 or (rows.shape[1] > 1 and rows.stride(1) != 1):
        raise ValueError("sums take a matrix with dense rows")
    width = rows.element_size()
    # torch views memory as wider integers only where the offset in its storage allows it, too.
    begins = rows.data_ptr(), rows.storage_offset() * width
    unit = math.gcd(8, rows.shape[1] * width, rows.stride(0) * width if rows.shape[0] > 1 else 8, *begins)
    units, stride = rows.shape[1] * width // unit, rows.stride(0) * width // unit
    sums, given = _numbers(2, rows), _seeds(seeds, rows)
    words = triton.cdiv(units * unit, 8)
    grid = (triton.cdiv(rows.shape[0] * words, BLOCK),)
    _tensor_sums[grid](
        _as_units(rows, unit), sums, given, rows.shape[0], units, stride, words, row0, word0, UNIT=unit, SIZE=BLOCK
    )
    return _unsigned_pair(sums)


@triton.jit
def _apply_with_sums(
    data, positions, values, sums, seeds, count, columns, first, row0, word0, WIDTH: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    PER: tl.constexpr = 8 // WIDTH
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = index < count
    at = tl.load(positions + index, mask=inside, other=0) - first
    row = at // columns
    word = (at - row * columns) // PER
    # The first change of a word speaks for all of them: it alone reads and writes the word's elements.
    before = tl.load(positions + index - 1, mask=inside & (index > 0), other=0) - first
    before_row = before // columns
    same = (index > 0) & (before_row == row) & ((before - before_row * columns) // PER == word)
    leads = inside & (same == 0)
    start = row * columns + word * PER
    left = columns - word * PER
    old = _word(data, start, left, leads, WIDTH)
    # On a GPU a program is many threads, and the compiler gives the stores below another layout than the loads above
    # (sm_90, bytes: one element a thread, not eight). Another thread could so write an element before the thread that
    # leads its word has read it: the new one would count as the old in the sums. All must have read before one writes.
    # No test sees this: the interpreter runs line by line, and on a GPU other barriers of the compiler may hide it.
    tl.debug_barrier()
    new = old
    ONES: tl.constexpr = (1 << (8 * WIDTH)) - 1
    for step in tl.static_range(PER):
        here = leads & (index + step < count)
        place = tl.load(positions + index + step, mask=here, other=0) - first
        slot = place - start
        here = here & (slot < PER) & (slot < left)
        value = tl.load(values + index + step, mask=here, other=0)
        shift = tl.where(here, slot, 0).to(tl.uint64) * (8 * WIDTH)
        ones = tl.full(new.shape, ONES, tl.uint64)
        replaced = (new & ~(ones << shift)) | (unsigned(value).to(tl.uint64) << shift)
        new = tl.where(here, replaced, new)
        tl.store(data + place, value, mask=here)
    r = (row + row0).to(tl.uint64)
    c = (word + word0).to(tl.uint64)
    seed_a = tl.load(seeds).to(tl.uint64, bitcast=True)
    seed_b = tl.load(seeds + 1).to(tl.uint64, bitcast=True)
    zero = tl.zeros(old.shape, tl.uint64)
    a = tl.where(leads, _mix_a(new, seed_a, r, c) - _mix_a(old, seed_a, r, c), zero)
    b = tl.where(leads, _mix_b(new, seed_b, r, c) - _mix_b(old, seed_b, r, c), zero)
    tl.atomic_add(sums, tl.sum(a, axis=0).to(tl.int64, bitcast=True))
    tl.atomic_add(sums + 1, tl.sum(b, axis=0).to(tl.int64, bitcast=True))


@where_it_lies
def apply_with_sums(
    rows: torch.Tensor, positions: torch.Tensor, values: torch.Tensor, seeds: tuple[int, int],
    *, first: int = 0, row0: int = 0, word0: int = 0,
) -> tuple[int, int]:  # fmt: skip
    """Write `values` at `positions` of a dense matrix and return what that adds to its two sums, modulo 2^64.

    `positions` (int64, strictly ascending) count elements in row-major order from `first`. Absolute values are written.
    A change moves 8 + w bytes, and one read and one write of its 64-bit word: no other byte is touched.
    """
    if rows.dim() != 2 or not rows.is_contiguous():
        raise ValueError("changes are applied to a dense matrix")
    sums = _numbers(2, rows)
    if positions.numel():
        _apply_with_sums[(triton.cdiv(positions.numel(), BLOCK),)](
            integers(rows), positions, integers(values), sums, _seeds(seeds, rows), positions.numel(), rows.shape[1],
            first, row0, word0, WIDTH=rows.element_size(), SIZE=BLOCK,
        )  # fmt: skip
    return _unsigned_pair(sums)


def _as_units(rows: torch.Tensor, unit: int) -> torch.Tensor:
    """The memory from the first row on as integers of `unit` bytes (the kernel knows where rows lie)."""
    width = rows.element_size()
    nbytes = (rows.shape[0] - 1) * rows.stride(0) * width + rows.shape[1] * width
    flat = integers(rows).as_strided((nbytes // width,), (1,))
    return flat.view(INTEGERS[unit])


def _numbers(count: int, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64, device=like.device)


def _seeds(seeds: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
    signed = [seed - _MODULUS if seed >= _SIGNED else seed for seed in seeds]
    return torch.tensor(signed, dtype=torch.int64, device=like.device)


def _unsigned_pair(sums: torch.Tensor) -> tuple[int, int]:
    a, b = sums.tolist()
    return a % _MODULUS, b % _MODULUS
