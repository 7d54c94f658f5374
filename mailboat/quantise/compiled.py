"""The rounding of quantisers, compiled: integer arithmetic on the bits of binary32.

Apart from `mailboat.compiled` so that who only patches does not wait for it. As there, every function has an explicit
signature, and none calls a compiled function of another module (Numba's cache would not see that one change).
Formulas: docs/format/quantisers.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

_BITS = types.Array(types.uint32, 1, "C", readonly=True)
_WEIGHTS = types.Array(types.uint16, 1, "C", readonly=True)
_SCALES = types.Array(types.uint8, 1, "C", readonly=True)
_ROUND = types.int32(types.int32, types.int32, types.int32)
_FP8_MAX = np.int32(0x43E00000)  # 448
_FP4_MAX = np.int32(0x40C00000)  # 6
_FP16_END = np.int32(0x47800000)  # 2^16: that and more is infinite
_EIGHT = np.int32(0x41000000)
_ONE = np.int32(1)
_STRETCH = 1024  # in the nearest cache when it is looked at again


@njit(_ROUND, nogil=True, cache=True, inline="always")
def _shifted(magnitude: Any, least: Any, exponent_of_least: Any) -> Any:
    """The significand shifted right to the place of the codes' last bit, rounded to nearest, ties to even."""
    exponent = magnitude >> np.int32(23)
    hidden = np.int32(0x800000) if exponent > 0 else np.int32(0)
    significand = (magnitude & np.int32(0x7FFFFF)) | hidden
    shift = min(max(least + exponent_of_least - exponent, least), np.int32(26))
    half = (_ONE << (shift - _ONE)) - _ONE + ((significand >> shift) & _ONE)
    return np.int32((significand + half) >> shift)


@njit("uint32(uint32)", nogil=True, cache=True, inline="always")
def _cast(bits: Any) -> Any:
    upper = bits >> np.uint32(16)
    rounded = (bits + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return upper | np.uint32(0x40) if is_nan else rounded


@njit("void(uint32[::1], uint16[::1])", nogil=True, cache=True)
def cast_bf16(wide: Any, out: Any) -> None:
    """FP32 bits to BF16 bits, to nearest, ties to even; NaNs keep sign and upper payload and become quiet."""
    for i in range(wide.size):
        out[i] = np.uint16(_cast(wide[i]))


@njit("uint32(uint32)", nogil=True, cache=True, inline="always")
def _cast_fp16(bits: Any) -> Any:
    magnitude = np.int32(bits & np.uint32(0x7FFFFFFF))
    finite = min(magnitude, _FP16_END)
    exponent = max((finite >> np.int32(23)) - np.int32(113), np.int32(0))
    rounded = _shifted(finite, np.int32(13), np.int32(113)) + (exponent << np.int32(10))
    quiet = np.int32(0x7E00) | ((magnitude >> np.int32(13)) & np.int32(0x3FF))
    chosen = quiet if magnitude > np.int32(0x7F800000) else rounded
    return np.uint32(chosen) | ((bits >> np.uint32(16)) & np.uint32(0x8000))


@njit("int64(uint32[::1], uint16[::1], boolean)", nogil=True, cache=True)
def refresh(wide: Any, served: Any, fp16: Any) -> Any:
    """FP32 bits to BF16 or FP16 bits, to nearest as in `cast_bf16`, into `served`, which holds an earlier cast; returns
    how many elements differed. Stretches in which none does are only read.
    """
    changed = np.int64(0)
    for start in range(0, wide.size, _STRETCH):
        masters, bits = wide[start : start + _STRETCH], served[start : start + _STRETCH]
        differs = np.uint32(0)
        for i in range(masters.size):
            differs |= (_cast_fp16(masters[i]) if fp16 else _cast(masters[i])) ^ np.uint32(bits[i])
        if differs:
            count = np.int32(0)
            for i in range(masters.size):
                new = np.uint16(_cast_fp16(masters[i]) if fp16 else _cast(masters[i]))
                count += np.int32(1) if new != bits[i] else np.int32(0)
                bits[i] = new
            changed += count
    return changed


@njit(types.void(_BITS, _WEIGHTS, types.uint8[::1]), nogil=True, cache=True)
def e4m3_codes(scaled: Any, weights: Any, out: Any) -> None:
    """E4M3 codes of scaled weights (FP32 bits), saturated at 448; signs are those of the BF16 weights."""
    for i in range(scaled.size):
        magnitude = min(np.int32(scaled[i] & np.uint32(0x7FFFFFFF)), _FP8_MAX)
        exponent = max((magnitude >> np.int32(23)) - np.int32(121), np.int32(0))
        code = _shifted(magnitude, np.int32(20), np.int32(121)) + (exponent << np.int32(3))
        out[i] = np.uint8(code) | np.uint8((weights[i] >> np.uint16(8)) & np.uint16(0x80))


@njit(types.void(_BITS, _WEIGHTS, types.uint8[::1]), nogil=True, cache=True)
def e2m1_codes(scaled: Any, weights: Any, out: Any) -> None:
    """Pairs of E2M1 codes, the first one low, of scaled weights (FP32 bits), saturated at 6."""
    for pair in range(out.size):
        packed = np.uint8(0)
        for half in range(2):
            i = 2 * pair + half
            magnitude = min(np.int32(scaled[i] & np.uint32(0x7FFFFFFF)), _FP4_MAX)
            exponent = max((magnitude >> np.int32(23)) - np.int32(127), np.int32(0))
            code = _shifted(magnitude, np.int32(22), np.int32(127)) + (exponent << _ONE)
            code |= np.int32((weights[i] >> np.uint16(12)) & np.uint16(8))
            packed |= np.uint8(code << np.int32(4 * half))
        out[pair] = packed


@njit(types.void(_WEIGHTS, _SCALES, types.int64, types.uint32[::1]), nogil=True, cache=True)
def divide_by_powers(weights: Any, scales: Any, group: Any, out: Any) -> None:
    """Magnitudes of BF16 weights (FP32 bits) over the powers of two of their groups' E8M0 codes.

    It moves the exponents alone, so nothing is rounded; what falls below 2^-126 becomes less than any code.
    """
    for i in range(weights.size):
        exponent = np.int32((weights[i] >> np.uint16(7)) & np.uint16(0xFF))
        moved = exponent - np.int32(scales[i // group]) + np.int32(127)
        moved = np.int32(0) if exponent == 0 or moved < 0 else min(moved, np.int32(255))
        out[i] = (np.uint32(moved) << np.uint32(23)) | (np.uint32(weights[i] & np.uint16(0x7F)) << np.uint32(16))


@njit(types.void(_BITS, _WEIGHTS, types.uint8[::1]), nogil=True, cache=True)
def int4_codes(scaled: Any, weights: Any, out: Any) -> None:
    """Pairs of integers -8 ... 7, stored plus 8, the first one low, of scaled weights (FP32 bits)."""
    for pair in range(out.size):
        packed = np.uint8(0)
        for half in range(2):
            i = 2 * pair + half
            magnitude = min(np.int32(scaled[i] & np.uint32(0x7FFFFFFF)), _EIGHT)
            steps = _shifted(magnitude, np.int32(20), np.int32(130))
            negative = weights[i] >> np.uint16(15) == np.uint16(1)
            code = np.int32(8) - steps if negative else np.int32(8) + min(steps, np.int32(7))
            packed |= np.uint8(code << np.int32(4 * half))
        out[pair] = packed
