"""Rows of BF16 weights to codes and scales. Float operations are single multiplications and divisions of binary32.

Shapes: `weights` is a uint16 matrix of BF16 bits with dense rows. Everything is a pure function of it (NVFP4: and of
the tensor's largest magnitude), so any stripe of rows can be made again alone. Formulas: docs/format/quantisers.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mailboat.quantise import compiled

Weights = NDArray[np.uint16]
Floats = NDArray[np.float32]
FP8_BLOCK = 128
INFINITY = 0x7F80
_TINY = 0x0F80  # BF16 bits of 2^-96: a block whose largest magnitude lies below counts as zero
_FP8_MAX, _FP4_MAX, _INT4_HALF_RANGE = np.float32(448), np.float32(6), np.float32(7.5)
_NVFP4_RANGE = np.float32(448 * 6)
_ONE = np.float32(1)


def largest(weights: Weights, group: int) -> Weights:
    """Bits of the largest magnitude in each group of a row: (rows, groups); the last group may be shorter."""
    magnitudes = weights & np.uint16(0x7FFF)
    columns = magnitudes.shape[1]
    if columns % group == 0:
        found: Weights = magnitudes.reshape(len(weights), columns // group, group).max(axis=2)
        return found
    return np.maximum.reduceat(magnitudes, range(0, columns, group), axis=1)


def fp8_scales(weights: Weights, block: tuple[int, int]) -> tuple[Floats, Floats]:
    """(factors of the weights, stored scales = 1 / factor) for each block of rows and columns."""
    by_row = largest(weights, block[1])
    amax = np.maximum.reduceat(by_row, range(0, len(weights), block[0]), axis=0)
    # Blocks that count as zero get a factor of 1.
    factors = _FP8_MAX / _float(np.where(_usable(amax), amax, _bits_of(_FP8_MAX)))
    return factors, _ONE / factors


def fp8_codes(weights: Weights, factors: Floats, block: tuple[int, int]) -> NDArray[np.uint8]:
    """E4M3 codes of weight x factor, as a matrix."""
    rows, columns = weights.shape
    scaled = _float(weights)
    if block[1] >= columns:
        scaled *= np.repeat(factors, block[0], axis=0)[:rows]
    else:
        across = np.repeat(factors, block[1], axis=1)[:, :columns]
        for index, first in enumerate(range(0, rows, block[0])):
            scaled[first : first + block[0]] *= across[index]
    out = np.empty(weights.shape, np.uint8)
    compiled.e4m3_codes(_flat_bits(scaled), weights.reshape(-1), out.reshape(-1))
    return out


def nvfp4_tensor_scale(amax: int) -> np.float32:
    """The scale of a whole tensor whose largest magnitude has the BF16 bits `amax`."""
    bits = np.array([amax], np.uint16)
    return np.float32(_float(bits)[0] / _NVFP4_RANGE) if _usable(bits)[0] else _ONE


def nvfp4_scales(weights: Weights, tensor_scale: np.float32) -> tuple[NDArray[np.uint8], Floats]:
    """(E4M3 codes of the scales, factors of the weights) for groups of 16."""
    amax = largest(weights, 16)
    wanted = _float(np.where(_usable(amax), amax, np.uint16(0))) / (_FP4_MAX * tensor_scale)
    codes = np.empty(amax.shape, np.uint8)
    compiled.e4m3_codes(_flat_bits(wanted), np.zeros(amax.size, np.uint16), codes.reshape(-1))
    codes = np.maximum(codes, np.uint8(1))  # 2^-9: a scale is never zero
    return codes, _ONE / (_E4M3[codes] * tensor_scale)


def mxfp4_scales(weights: Weights) -> NDArray[np.uint8]:
    """E8M0 codes of groups of 32: the largest magnitude's power of two (the next one from 1.75 on), less two."""
    amax = largest(weights, 32)
    exponents = ((amax.astype(np.uint32) + np.uint32(1 << 5)) >> np.uint32(7)) - np.uint32(2)
    return np.where(_usable(amax), exponents, np.uint32(127)).astype(np.uint8)


def int4_scales(weights: Weights, group: int) -> tuple[Weights, Floats]:
    """(BF16 bits of the scales, factors of the weights) for groups of `group`."""
    amax = largest(weights, group)
    wanted = _float(np.where(_usable(amax), amax, _bits_of(_INT4_HALF_RANGE))) / _INT4_HALF_RANGE
    scales = np.empty(amax.shape, np.uint16)
    compiled.cast_bf16(_flat_bits(wanted), scales.reshape(-1))
    return scales, _ONE / _float(scales)


def nvfp4_codes(weights: Weights, factors: Floats) -> NDArray[np.uint8]:
    """Two E2M1 codes a byte, as a matrix of half the columns."""
    return _packed(compiled.e2m1_codes, _scaled(weights, factors), weights)


def mxfp4_codes(weights: Weights, scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two E2M1 codes a byte, as a matrix of half the columns."""
    magnitudes = np.empty(weights.size, np.uint32)
    compiled.divide_by_powers(weights.reshape(-1), scales.reshape(-1), 32, magnitudes)
    return _packed(compiled.e2m1_codes, magnitudes, weights)


def int4_codes(weights: Weights, factors: Floats) -> NDArray[np.uint8]:
    """Two integers a byte, stored plus 8, as a matrix of half the columns."""
    return _packed(compiled.int4_codes, _scaled(weights, factors), weights)


def _scaled(weights: Weights, factors: Floats) -> NDArray[np.uint32]:
    rows, columns = weights.shape
    grouped = _float(weights).reshape(rows, factors.shape[1], columns // factors.shape[1])
    grouped *= factors[:, :, None]
    return _flat_bits(grouped)


def _packed(kernel: Any, scaled: NDArray[np.uint32], weights: Weights) -> NDArray[np.uint8]:
    out = np.empty((weights.shape[0], weights.shape[1] // 2), np.uint8)
    kernel(scaled, weights.reshape(-1), out.reshape(-1))
    return out


def _usable(amax: Weights) -> NDArray[np.bool_]:
    return (amax >= np.uint16(_TINY)) & (amax < np.uint16(INFINITY))


def _float(bits: NDArray[Any]) -> Floats:
    """BF16 bits as binary32 numbers; exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _bits_of(number: np.float32) -> np.uint16:
    """BF16 bits of a number that BF16 holds exactly."""
    return np.uint16(np.array([number], np.float32).view(np.uint32)[0] >> np.uint32(16))


def _flat_bits(floats: Floats) -> NDArray[np.uint32]:
    bits: NDArray[np.uint32] = np.ascontiguousarray(floats).reshape(-1).view(np.uint32)
    return bits


def _e4m3_values() -> Floats:
    """What the codes 0 ... 127 stand for (127 is NaN and never used as a scale)."""
    codes = np.arange(128)
    exponents, mantissas = codes >> 3, codes & 7
    values = np.where(exponents > 0, (8 + mantissas) * 2.0 ** (exponents - 10), mantissas * 2.0**-9)
    return values.astype(np.float32)


_E4M3 = _e4m3_values()
