"""All compiled code of the library, in one module.

Numba's cache does not notice edits in a callee of another module, so nothing compiled may live elsewhere.  Every function has
an explicit signature (NumPy's promotion of uint64 with int64 to float64 must never happen), releases the GIL and is cached.
Kernels trust their arguments: callers check sizes, kernels never do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

# --- Sums (docs/format/digests.md) ------------------------------------------------------------------------------------

ROW_A = np.uint64(0x243F6A8885A308D3)
WORD_A = np.uint64(0x9E3779B97F4A7C15)
FIRST_A = np.uint64(0xBF58476D1CE4E5B9)
SECOND_A = np.uint64(0x94D049BB133111EB)
ROW_B = np.uint64(0x082EFA98EC4E6C89)
WORD_B = np.uint64(0xA4093822299F31D1)
FIRST_B = np.uint64(0xFF51AFD7ED558CCD)
SECOND_B = np.uint64(0xC4CEB9FE1A85EC53)
_S29 = np.uint64(29)
_S32 = np.uint64(32)
_ZERO = np.uint64(0)
_EIGHT = np.uint64(8)


@intrinsic
def _word(typingctx: Any, buffer: Any, offset: Any) -> Any:
    """Load the 8 bytes at `offset` of a uint8 buffer as a little-endian word, at any alignment."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        address = builder.gep(array.data, [arguments[1]])
        pointer = builder.bitcast(address, ir.IntType(64).as_pointer())
        return builder.load(pointer, align=1)

    return types.uint64(buffer, types.int64), generate


@njit("uint64(uint8[::1], int64, int64)", nogil=True, cache=True, inline="always")
def _short_word(buffer, offset, count):  # type: ignore[no-untyped-def]
    """Load `count` < 8 bytes as a little-endian word padded with zeros."""
    word = _ZERO
    for byte in range(count):
        word |= np.uint64(buffer[offset + byte]) << np.uint64(8 * byte)
    return word


@njit("uint64(uint64, uint64, uint64)", nogil=True, cache=True, inline="always")
def _mix(x, first, second):  # type: ignore[no-untyped-def]
    """A bijection of 64 bits: so a change of one word alone always changes the sum."""
    x ^= x >> _S32
    x *= first
    x ^= x >> _S29
    x *= second
    x ^= x >> _S32
    return x


@njit(
    "void(uint8[::1], int64, int64, int64, uint64, uint64, uint64[::1])", nogil=True, cache=True, error_model="numpy"
)
def sum_rows(buffer, piece_bytes, row0, word0, seed_a, seed_b, out):  # type: ignore[no-untyped-def]
    """Add to out[0:2] the sums of a buffer that holds pieces of consecutive rows.

    Piece i (`piece_bytes` long, the buffer holds only whole pieces) belongs to row row0 + i and starts at its word `word0`.
    Only a piece that ends its row may have a length that isn't a multiple of 8.
    """
    words = piece_bytes >> 3
    rest = piece_bytes & 7
    total_a = _ZERO
    total_b = _ZERO
    pieces = buffer.size // piece_bytes
    for piece in range(pieces):
        start = piece * piece_bytes
        row = np.uint64(row0 + piece)
        base_a = seed_a + row * ROW_A + np.uint64(word0) * WORD_A
        base_b = seed_b + row * ROW_B + np.uint64(word0) * WORD_B
        for word in range(words):
            w = _word(buffer, start + word * 8)
            total_a += _mix(w ^ (base_a + np.uint64(word) * WORD_A), FIRST_A, SECOND_A)
            total_b += _mix(w ^ (base_b + np.uint64(word) * WORD_B), FIRST_B, SECOND_B)
        if rest:
            w = _short_word(buffer, start + words * 8, rest)
            total_a += _mix(w ^ (base_a + np.uint64(words) * WORD_A), FIRST_A, SECOND_A)
            total_b += _mix(w ^ (base_b + np.uint64(words) * WORD_B), FIRST_B, SECOND_B)
    out[0] += total_a
    out[1] += total_b


@njit(
    "void(uint8[::1], uint8[::1], uint32[::1], int64, int64, int64, int64, uint64, uint64, uint64[::1])",
    nogil=True,
    cache=True,
    error_model="numpy",
)
def sum_changes(old, new, positions, width, piece_bytes, row0, word0, seed_a, seed_b, out):  # type: ignore[no-untyped-def]
    """Add to out[0:2] (modulo 2^64) what the change from `old` to `new` does to the sums of a block.

    `old` and `new` hold the same pieces as `sum_rows` takes; `positions` lists, strictly ascending, the elements of `width`
    bytes that may differ, counted from the start of the block.  Each word is visited once however many of its elements changed.
    """
    total_a = _ZERO
    total_b = _ZERO
    last = np.int64(-1)
    piece = np.int64(0)
    start = np.int64(0)
    for at in range(positions.size):
        byte = np.int64(positions[at]) * width
        if byte >= start + piece_bytes:
            piece = byte // piece_bytes
            start = piece * piece_bytes
        word = (byte - start) >> 3
        where = start + word * 8
        if where == last:
            continue
        last = where
        rest = start + piece_bytes - where
        if rest >= 8:
            before = _word(old, where)
            after = _word(new, where)
        else:
            before = _short_word(old, where, rest)
            after = _short_word(new, where, rest)
        row = np.uint64(row0 + piece)
        column = np.uint64(word0 + word)
        place_a = seed_a + row * ROW_A + column * WORD_A
        place_b = seed_b + row * ROW_B + column * WORD_B
        total_a += _mix(after ^ place_a, FIRST_A, SECOND_A) - _mix(before ^ place_a, FIRST_A, SECOND_A)
        total_b += _mix(after ^ place_b, FIRST_B, SECOND_B) - _mix(before ^ place_b, FIRST_B, SECOND_B)
    out[0] += total_a
    out[1] += total_b
