"""NumPy twins of all kernels: slow, plain, and the definition that GPU, interpreter and CPU backend are compared with.

Each function takes and gives the same things as the kernel of the same name, as NumPy arrays of bits (BF16 as uint16,
FP8 and packed codes as uint8), and like it writes into `served` arrays in place. Never used by the product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import numbers
from .numbers import Codes

Array = NDArray[Any]
Bits = NDArray[np.uint32]
_ONE = np.float32(1)


@dataclass(frozen=True, slots=True)
class Changes:
    """Where elements changed: positions ascending (int64, `first` + index), and the elements before and after."""

    positions: NDArray[np.int64]
    old: Array
    new: Array


# --- Changes ----------------------------------------------------------------------------------------------------------


def diff(old: Array, new: Array, *, first: int = 0) -> Changes:
    """Elements whose bits differ."""
    before, after = _elements(old).reshape(-1), _elements(new).reshape(-1)
    where = np.flatnonzero(before != after)
    return Changes(where.astype(np.int64) + first, before[where], after[where])


def scatter(out: Array, positions: Array, values: Array, *, start: int = 0) -> None:
    """out[position - start] = value, for the positions that fall inside."""
    where = positions - start
    inside = (where >= 0) & (where < out.size)
    _elements(out)[where[inside]] = _elements(values)[inside]


def _elements(array: Array) -> Array:
    return array.view(f"u{array.dtype.itemsize}")


# --- Decoding positional blocks ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decoded:
    """Changes of blocks, and numbers.DECODED or what the first damaged block suffers from."""

    positions: NDArray[np.int64]
    new: Array
    status: int


def decode_positional(
    old: Array, codes: Array, values: Array, literals: Array, blocks: NDArray[np.int64], order: int
) -> Decoded:
    """Bit by bit, change by change, straight from docs/format/patch.md."""
    before, width = _elements(old).reshape(-1), old.dtype.itemsize
    positions: list[int] = []
    new: list[int] = []
    byte = change = literal = 0
    for first, elements, changed, rice, size, of_literals in blocks.tolist():
        bits = np.unpackbits(codes[byte : byte + size], bitorder="little").tolist()
        here = _positions(bits, elements, changed, rice)
        if here is None:
            return Decoded(np.zeros(0, np.int64), before[:0], numbers.DAMAGED_POSITIONS)
        given = _elements(literals)[literal : literal + of_literals].tolist()
        ranks = [_rank(int(before[first + place]), order, width) for place in here]
        made = _new_elements(ranks, values[change : change + changed].tolist(), given, order, width)
        if made is None:
            return Decoded(np.zeros(0, np.int64), before[:0], numbers.DAMAGED_VALUES)
        positions += [first + place for place in here]
        new += made
        byte, change, literal = byte + size, change + changed, literal + of_literals
    return Decoded(np.array(positions, np.int64), np.array(new, before.dtype), numbers.DECODED)


def _positions(bits: list[int], elements: int, changed: int, rice: int) -> list[int] | None:
    at, place = 0, -1
    found = []
    for _ in range(changed):
        gap = 0
        while at < len(bits) and bits[at]:
            at, gap = at + 1, gap + 1
        low = bits[at + 1 : at + 1 + rice]
        if at >= len(bits) or len(low) < rice:
            return None
        place += 1 + (gap << rice) + sum(bit << number for number, bit in enumerate(low))
        if place >= elements:
            return None
        at += 1 + rice
        found.append(place)
    return found if len(bits) - at < 8 and not any(bits[at:]) else None


def _new_elements(ranks: list[int], values: list[int], literals: list[int], order: int, width: int) -> list[int] | None:
    size, left, made = 1 << 8 * width, list(literals), []
    for rank, value in zip(ranks, values, strict=True):
        if value == 255 or (value == 0 and not left):
            return None
        if value:
            step = (value + 1) // 2 if value % 2 else -(value // 2)
            made.append(_unrank((rank + step) % size, order, width))
            continue
        made.append(left.pop(0))
        distance = (_rank(made[-1], order, width) - rank) % size
        if min(distance, size - distance) <= 127:
            return None
    return None if left else made


def _rank(bits: int, order: int, width: int) -> int:
    top = 1 << (8 * width - 1)
    if order == numbers.FLOAT and bits & top:
        return bits ^ (2 * top - 1)
    return bits if order == numbers.UNSIGNED else bits ^ top


def _unrank(rank: int, order: int, width: int) -> int:
    top = 1 << (8 * width - 1)
    if order == numbers.FLOAT and not rank & top:
        return rank ^ (2 * top - 1)
    return rank if order == numbers.UNSIGNED else rank ^ top


# --- Sums -------------------------------------------------------------------------------------------------------------


def words_of(rows: Array) -> NDArray[np.uint64]:
    """Rows of bytes (uint8, 2-D) as rows of little-endian 64-bit words, zero-padded."""
    padded = np.zeros((rows.shape[0], -(-rows.shape[1] // 8) * 8), np.uint8)
    padded[:, : rows.shape[1]] = rows
    return padded.view("<u8").astype(np.uint64)


def tensor_sums(rows: Array, seeds: tuple[int, int], *, row0: int = 0, word0: int = 0) -> tuple[int, int]:
    """Both sums of rows of bytes (uint8, 2-D) that are rows `row0` ... of a tensor, from their word `word0` on."""
    words = words_of(rows)
    totals = []
    for which, seed in enumerate(seeds):
        place = _places(words.shape, which, seed, row0, word0)
        totals.append(int(_mix(words ^ place, which).sum(dtype=np.uint64)))
    return totals[0], totals[1]


def apply_with_sums(
    rows: Array,
    positions: Array,
    values: Array,
    seeds: tuple[int, int],
    *,
    first: int = 0,
    row0: int = 0,
    word0: int = 0,
) -> tuple[int, int]:
    """Write `values` at `positions` (counted from `first`) and return what that adds to the two sums, modulo 2^64."""
    flat = _elements(rows)
    view = flat.reshape(flat.shape[0], -1).view(np.uint8)
    before = tensor_sums(view, seeds, row0=row0, word0=word0)
    scatter(flat.reshape(-1), positions, values, start=first)
    after = tensor_sums(view, seeds, row0=row0, word0=word0)
    return (after[0] - before[0]) % 2**64, (after[1] - before[1]) % 2**64


def _places(shape: tuple[int, ...], which: int, seed: int, row0: int, word0: int) -> NDArray[np.uint64]:
    row = np.arange(shape[0], dtype=np.uint64)[:, None] + np.uint64(row0)
    word = np.arange(shape[1], dtype=np.uint64)[None, :] + np.uint64(word0)
    return np.uint64(seed) + row * np.uint64(numbers.ROW[which]) + word * np.uint64(numbers.WORD[which])


def _mix(x: NDArray[np.uint64], which: int) -> NDArray[np.uint64]:
    x = x ^ (x >> np.uint64(32))
    x = x * np.uint64(numbers.FIRST[which])
    x = x ^ (x >> np.uint64(29))
    x = x * np.uint64(numbers.SECOND[which])
    return x ^ (x >> np.uint64(32))


# --- Number formats ---------------------------------------------------------------------------------------------------


def to_bf16(master: Array) -> NDArray[np.uint16]:
    """FP32 to BF16 bits, to nearest, ties to even; NaNs keep sign and upper payload and become quiet. BF16 stays."""
    if master.dtype.itemsize == 2:
        return _elements(master)
    bits = _elements(master)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x0040)
    is_nan = (bits & np.uint32(0x7FFF_FFFF)) > np.uint32(0x7F80_0000)
    return np.where(is_nan, quiet, rounded).astype(np.uint16)


def to_fp16(master: Array) -> NDArray[np.uint16]:
    """FP32 to FP16 bits, to nearest, ties to even; NaNs keep sign and upper payload and become quiet."""
    bits = _elements(master)
    magnitude = bits & np.uint32(0x7FFF_FFFF)
    rounded = round_code(np.minimum(magnitude, np.uint32(numbers.FP16_END)), numbers.FP16)
    quiet = np.uint32(0x7E00) | (magnitude >> np.uint32(13)) & np.uint32(0x3FF)
    sign = bits >> np.uint32(16) & np.uint32(0x8000)
    chosen: Bits = np.where(magnitude > np.uint32(0x7F80_0000), quiet, rounded) | sign
    return chosen.astype(np.uint16)


def round_code(magnitude: Bits, codes: Codes) -> Bits:
    """Magnitudes (binary32 bits) as codes of a small float, to nearest, ties to even; too large ones run on."""
    exponent = (magnitude >> 23).astype(np.int64)
    significand = (magnitude & 0x7F_FFFF).astype(np.int64) | np.where(exponent > 0, 0x80_0000, 0)
    shift = np.clip(codes.shift + codes.first - exponent, codes.shift, 26)
    half = (1 << (shift - 1)) - 1 + ((significand >> shift) & 1)
    return (((significand + half) >> shift) + (np.maximum(exponent - codes.first, 0) << (23 - codes.shift))).astype(
        np.uint32
    )


def e4m3_value(code: Bits) -> NDArray[np.float32]:
    """The number that a positive E4M3 code stands for; exact."""
    normal = (((code >> 3) + np.uint32(120)) << np.uint32(23)) | ((code & np.uint32(7)) << np.uint32(20))
    small = code.astype(np.float32) * np.float32(2.0**-9)
    return np.where(code < 8, small, normal.astype(np.uint32).view(np.float32)).astype(np.float32)


def quantise_fp8(master: Array, block: tuple[int, int]) -> tuple[NDArray[np.uint8], NDArray[np.float32], int]:
    """(E4M3 codes, FP32 scales by block, number of NaNs and infinities)."""
    bits = _wide(master)
    rows, columns = bits.shape
    shape = -(-rows // block[0]), -(-columns // block[1])
    factors, scales = np.empty(shape, np.float32), np.empty(shape, np.float32)
    for i, j in np.ndindex(shape):
        part = bits[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        factors[i, j], scales[i, j] = fp8_scale(np.max(part & np.uint32(0x7FFF_FFFF)))
    factor = np.repeat(np.repeat(factors, block[0], 0)[:rows], block[1], 1)[:, :columns]
    scaled = (bits.view(np.float32) * factor).view(np.uint32)
    magnitude = np.minimum(scaled & np.uint32(0x7FFF_FFFF), np.uint32(numbers.FP8_MAX_BITS))
    sign = (bits >> np.uint32(24)) & np.uint32(0x80)
    return (round_code(magnitude, numbers.E4M3) | sign).astype(np.uint8), scales, _not_finite(bits)


def fp8_scale(amax: Any) -> tuple[np.float32, np.float32]:
    """(factor of the weights, stored scale) for a block whose largest magnitude has the bits `amax`."""
    if not numbers.TINY <= int(amax) < 0x7F80_0000:
        return _ONE, _ONE
    factor = np.float32(numbers.FP8_MAX) / np.uint32(amax).view(np.float32)
    return factor, _ONE / factor


def quantise_groups(master: Array, kind: int, group: int) -> tuple[NDArray[np.uint8], Array, NDArray[np.float32], int]:
    """(packed codes, two a byte and the first one low; scales by group; NVFP4's tensor scale; NaNs and infinities).

    Scales: E4M3 codes (NVFP4), E8M0 codes (MXFP4), BF16 bits as uint16 (INT4).
    """
    bits = _wide(master)
    rows, columns = bits.shape
    grouped = bits.reshape(rows, columns // group, group)
    magnitudes = grouped & np.uint32(0x7FFF_FFFF)
    amax = magnitudes.max(axis=2, initial=0)
    whole = np.uint32(amax.max(initial=0))
    tensor_scale = np.ones(1, np.float32)
    if numbers.TINY <= whole < 0x7F80_0000:
        tensor_scale[0] = whole.view(np.float32) / np.float32(numbers.NVFP4_RANGE)
    scales: Array
    if kind == numbers.MXFP4:
        scales, codes = _mxfp4(grouped, magnitudes, amax)
    else:
        scales, factor = _nvfp4_scales(amax, tensor_scale[0]) if kind == numbers.NVFP4 else _int4_scales(amax)
        scaled = (grouped.view(np.float32) * factor[:, :, None]).view(np.uint32)
        codes = _fp4_codes(scaled, grouped) if kind == numbers.NVFP4 else _int4_codes(scaled, grouped)
    codes = codes.reshape(rows, columns)
    packed = (codes[:, 0::2] | (codes[:, 1::2] << np.uint32(4))).astype(np.uint8)
    return packed, scales, tensor_scale, _not_finite(bits)


def _usable(amax: Bits) -> NDArray[np.bool_]:
    return (amax >= np.uint32(numbers.TINY)) & (amax < np.uint32(0x7F80_0000))


def _nvfp4_scales(amax: Bits, tensor_scale: np.float32) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    usable = _usable(amax)
    largest = np.where(usable, amax, np.uint32(0)).astype(np.uint32).view(np.float32)
    wanted = (largest / (np.float32(numbers.FP4_MAX) * tensor_scale)).astype(np.float32).view(np.uint32)
    code = round_code(np.minimum(wanted, np.uint32(numbers.FP8_MAX_BITS)), numbers.E4M3)
    code = np.maximum(code, np.uint32(numbers.SMALLEST_SCALE)).astype(np.uint32)
    factor = _ONE / (e4m3_value(code) * tensor_scale)
    return code.astype(np.uint8), factor.astype(np.float32)


def _int4_scales(amax: Bits) -> tuple[NDArray[np.uint16], NDArray[np.float32]]:
    ones = np.full(amax.shape, np.float32(numbers.INT4_HALF_RANGE)).view(np.uint32)
    largest = np.where(_usable(amax), amax, ones).astype(np.uint32).view(np.float32)
    scale = to_bf16((largest / np.float32(numbers.INT4_HALF_RANGE)).astype(np.float32))
    return scale, _ONE / (scale.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _mxfp4(grouped: Bits, magnitudes: Bits, amax: Bits) -> tuple[NDArray[np.uint8], Bits]:
    exponent = ((amax + np.uint32(1 << 21)) >> np.uint32(23)).astype(np.int64) - 2
    scale = np.where(_usable(amax), exponent, numbers.UNIT_EXPONENT)
    # Scaling by a power of two moves the exponent alone: no rounding but that of the codes.
    moved = (magnitudes >> np.uint32(23)).astype(np.int64) - (scale[:, :, None] - numbers.UNIT_EXPONENT)
    moved = np.where((magnitudes >> np.uint32(23) == 0) | (moved < 0), 0, np.minimum(moved, 255))
    bits = (moved.astype(np.uint32) << np.uint32(23)) | (magnitudes & np.uint32(0x7F_FFFF))
    return scale.astype(np.uint8), _fp4_codes(bits, grouped)


def _fp4_codes(scaled: Bits, weights: Bits) -> Bits:
    magnitude = np.minimum(scaled & np.uint32(0x7FFF_FFFF), np.uint32(numbers.FP4_MAX_BITS))
    signs: Bits = (weights >> np.uint32(28)) & np.uint32(8)
    return round_code(magnitude, numbers.E2M1) | signs


def _int4_codes(scaled: Bits, weights: Bits) -> Bits:
    magnitude = np.minimum(scaled & np.uint32(0x7FFF_FFFF), np.float32(8).view(np.uint32))
    exponent = (magnitude >> np.uint32(23)).astype(np.int64)
    significand = (magnitude & np.uint32(0x7F_FFFF)).astype(np.int64) | np.where(exponent > 0, 0x80_0000, 0)
    shift = np.clip(150 - exponent, 20, 26)
    steps = (significand + (1 << (shift - 1)) - 1 + ((significand >> shift) & 1)) >> shift
    negative = weights >> np.uint32(31) == 1
    codes: Bits = np.where(negative, 8 - steps, 8 + np.minimum(steps, 7)).astype(np.uint32)
    return codes


def _wide(master: Array) -> Bits:
    """BF16-cast weights as binary32 bits."""
    bits: Bits = to_bf16(master).astype(np.uint32) << np.uint32(16)
    return bits


def _not_finite(bits: Bits) -> int:
    return int(np.count_nonzero((bits & np.uint32(0x7F80_0000)) == np.uint32(0x7F80_0000)))


# --- Master to served, writing only what changed ----------------------------------------------------------------------


def refresh_bf16(master: Array, served: Array, *, first: int = 0) -> Changes:
    """Cast FP32 masters, compare with the served BF16 bits, write what changed."""
    return _write(served, to_bf16(master), first)


def refresh_fp16(master: Array, served: Array, *, first: int = 0) -> Changes:
    """The same to FP16."""
    return _write(served, to_fp16(master), first)


def refresh_fp8(master: Array, codes: Array, scales: Array, block: tuple[int, int]) -> tuple[Changes, Changes, int]:
    """(changes of codes, changes of scales as bits, NaNs and infinities)."""
    new_codes, new_scales, problems = quantise_fp8(master, block)
    return _write(codes, new_codes), _write(scales, new_scales), problems


def refresh_groups(
    master: Array, codes: Array, scales: Array, tensor_scale: Array, kind: int, group: int
) -> tuple[Changes, Changes, Changes, int]:
    """(changes of packed codes as bytes, of scales, of the tensor's scale, NaNs and infinities)."""
    packed, new_scales, new_tensor_scale, problems = quantise_groups(master, kind, group)
    moved = new_tensor_scale if kind == numbers.NVFP4 else tensor_scale
    return _write(codes, packed), _write(scales, new_scales), _write(tensor_scale, moved), problems


def _write(served: Array, new: Array, first: int = 0) -> Changes:
    changes = diff(served, new, first=first)
    _elements(served).reshape(-1)[changes.positions - first] = changes.new
    return changes
