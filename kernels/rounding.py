"""Device functions shared by the kernels: places of changes, and rounding by integer arithmetic.

Formulas: docs/format/quantisers.md; twins: `reference`. Every float operation here is one multiply or one division
rounded to nearest whose result goes on as bits, so nothing can be fused.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import numbers

TINY = tl.constexpr(numbers.TINY)
FP8_MAX = tl.constexpr(numbers.FP8_MAX)
FP16_END = tl.constexpr(numbers.FP16_END)
FP8_MAX_BITS = tl.constexpr(numbers.FP8_MAX_BITS)


@triton.jit
def unsigned(bits):
    """The same bits as an unsigned integer, whatever integer or float type they were loaded as."""
    width: tl.constexpr = bits.dtype.primitive_bitwidth
    if width == 8:
        return bits.to(tl.uint8, bitcast=True)
    elif width == 16:
        return bits.to(tl.uint16, bitcast=True)
    elif width == 32:
        return bits.to(tl.uint32, bitcast=True)
    else:
        return bits.to(tl.uint64, bitcast=True)


@triton.jit
def to_bf16(master):
    """FP32 bits (uint32) to BF16 bits (uint16), ties to even, NaNs quiet with sign and upper payload."""
    rounded = (master + 0x7FFF + ((master >> 16) & 1)) >> 16
    quiet = (master >> 16) | 0x0040
    return tl.where((master & 0x7FFFFFFF) > 0x7F800000, quiet, rounded).to(tl.uint16)


@triton.jit
def wide(loaded):
    """BF16-cast weights as FP32 bits (uint32), from FP32 or BF16 bits."""
    bits = unsigned(loaded)
    if bits.dtype.primitive_bitwidth == 16:
        return bits.to(tl.uint32) << 16
    else:
        return to_bf16(bits).to(tl.uint32) << 16


@triton.jit
def round_code(magnitude, SHIFT: tl.constexpr, FIRST: tl.constexpr):
    """Magnitudes (FP32 bits, uint32) as codes of a small float: see `numbers.Codes`."""
    exponent = (magnitude >> 23).to(tl.int32)
    significand = (magnitude & 0x7FFFFF).to(tl.int32) | tl.where(exponent > 0, 0x800000, 0)
    shift = tl.minimum(tl.maximum(SHIFT + FIRST - exponent, SHIFT), 26)
    half = (1 << (shift - 1)) - 1 + ((significand >> shift) & 1)
    return ((significand + half) >> shift) + (tl.maximum(exponent - FIRST, 0) << (23 - SHIFT))


@triton.jit
def to_fp16(master):
    """FP32 bits (uint32) to FP16 bits (uint16), ties to even, NaNs quiet with sign and upper payload."""
    magnitude = master & 0x7FFFFFFF
    rounded = round_code(tl.minimum(magnitude, FP16_END), 13, 113).to(tl.uint32)
    quiet = 0x7E00 | ((magnitude >> 13) & 0x3FF)
    return (tl.where(magnitude > 0x7F800000, quiet, rounded) | ((master >> 16) & 0x8000)).to(tl.uint16)


@triton.jit
def fp8_code(weights, factor):
    """E4M3 codes (int32) of weights (FP32 bits) times a factor, saturated."""
    scaled = (weights.to(tl.float32, bitcast=True) * factor).to(tl.uint32, bitcast=True)
    magnitude = tl.minimum(scaled & 0x7FFFFFFF, FP8_MAX_BITS)
    return round_code(magnitude, 20, 121) | ((weights >> 24) & 0x80).to(tl.int32)


@triton.jit
def fp8_factor(amax):
    """What weights are multiplied by, for a block whose largest magnitude has the bits `amax`: 448 / amax, or 1."""
    usable = (amax >= TINY) & (amax < 0x7F800000)
    largest = tl.where(usable, amax, FP8_MAX_BITS).to(tl.uint32).to(tl.float32, bitcast=True)
    return tl.div_rn(tl.full(largest.shape, FP8_MAX, tl.float32), largest)


@triton.jit
def reciprocal(x):
    """1 / x, rounded to nearest."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def reserve(changed, total, capacity):
    """(slots of a block's changes, whether they fit): slots are claimed in one addition, in any order of blocks."""
    count = tl.sum(changed.to(tl.int32), axis=0)
    base = tl.atomic_add(total, count.to(tl.int64))
    slots = base + tl.cumsum(changed.to(tl.int32), axis=0) - 1
    # Compared lane by lane: the interpreter can't join a scalar's truth with a block's.
    return slots, tl.zeros(slots.shape, tl.int64) + base + count <= capacity


@triton.jit
def reserve_rows(changed, total, capacity):
    """`reserve` for a block of two dimensions, in row-major order."""
    rows = tl.sum(changed.to(tl.int32), axis=1)
    count = tl.sum(rows, axis=0)
    base = tl.atomic_add(total, count.to(tl.int64))
    before = tl.cumsum(rows, axis=0) - rows
    slots = base + before[:, None] + tl.cumsum(changed.to(tl.int32), axis=1) - 1
    return slots, tl.zeros(slots.shape, tl.int64) + base + count <= capacity
