"""All compiled code of the library, in one module.

Numba's cache does not notice edits in a callee of another module, so nothing compiled may live elsewhere.  Every
function has an explicit signature (NumPy's promotion of uint64 with int64 to float64 must never happen), releases the
GIL and is cached.  Kernels trust their arguments: callers check sizes, kernels never do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
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
_READ = types.Array(types.uint8, 1, "C", readonly=True)  # bytes that are only read: writable arrays fit too
_TOTALS = types.uint64[::1]
_I64 = types.int64
_U64 = types.uint64


def _load_word(typingctx: Any, buffer: Any, offset: Any) -> Any:  # noqa: ARG001 - numba's protocol
    """Load the 8 bytes at `offset` of a uint8 buffer as a little-endian word, at any alignment."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        address = builder.gep(array.data, [arguments[1]])
        pointer = builder.bitcast(address, ir.IntType(64).as_pointer())
        return builder.load(pointer, align=1)

    return types.uint64(buffer, types.int64), generate


_word: Any = intrinsic(_load_word)


@njit(_U64(_READ, _I64, _I64), nogil=True, cache=True, inline="always")
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


@njit(types.void(_READ, _I64, _I64, _I64, _U64, _U64, _TOTALS), nogil=True, cache=True, error_model="numpy")
def sum_rows(buffer, piece_bytes, row0, word0, seed_a, seed_b, out):  # type: ignore[no-untyped-def]
    """Add to out[0:2] the sums of a buffer that holds pieces of consecutive rows.

    Piece i (`piece_bytes` long, the buffer holds only whole pieces) belongs to row row0 + i and starts at its word
    `word0`.  Only a piece that ends its row may have a length that isn't a multiple of 8.
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
    types.void(_READ, _READ, types.uint32[::1], _I64, _I64, _I64, _I64, _U64, _U64, _TOTALS),
    nogil=True,
    cache=True,
    error_model="numpy",
)
def sum_changes(old, new, positions, width, piece_bytes, row0, word0, seed_a, seed_b, out):  # type: ignore[no-untyped-def]
    """Add to out[0:2] (modulo 2^64) what the change from `old` to `new` does to the sums of a block.

    `old` and `new` hold the same pieces as `sum_rows` takes; `positions` lists, strictly ascending, the elements of
    `width` bytes that may differ, counted from the start of the block.  Each word is visited once however many of its
    elements changed.
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


# --- Patches (docs/format/patch.md) -----------------------------------------------------------------------------------
#
# A block comes as little-endian 64-bit words, its last word zero-padded, so that one compiled version serves every
# element width (1, 2, 4, 8 bytes): no element crosses a word. Positions count elements from the block's start.

RICE_OK, RICE_TRUNCATED, RICE_BEYOND, RICE_LEFTOVER = 0, 1, 2, 3
VALUES_OK, VALUES_RESERVED, VALUES_LITERAL = 0, 1, 2
_ONES = np.uint64(0xFFFF_FFFF_FFFF_FFFF)


@njit("int64(uint64[::1], uint64[::1], int64, uint32[::1])", nogil=True, cache=True, error_model="numpy")
def find_changes(old: Any, new: Any, width: Any, positions: Any) -> Any:
    """Positions (ascending) of the elements that differ between two blocks; returns how many.

    `positions` needs room for every element of the block.
    """
    count = np.int64(0)
    per_word = np.int64(8) // width
    bits = np.uint64(8 * width)
    mask = _ONES >> (np.uint64(64) - bits)
    words = old.size
    whole = words - words % 8
    for start in range(0, whole, 8):
        seen = np.uint64(0)
        for i in range(start, start + 8):
            seen |= old[i] ^ new[i]
        if seen != np.uint64(0):
            for i in range(start, start + 8):
                x = old[i] ^ new[i]
                if x != np.uint64(0):
                    for e in range(per_word):
                        if (x >> (np.uint64(e) * bits)) & mask != np.uint64(0):
                            positions[count] = np.uint32(i * per_word + e)
                            count += 1
    for i in range(whole, words):
        x = old[i] ^ new[i]
        if x != np.uint64(0):
            for e in range(per_word):
                if (x >> (np.uint64(e) * bits)) & mask != np.uint64(0):
                    positions[count] = np.uint32(i * per_word + e)
                    count += 1
    return count


@njit("int64(uint32[::1], int64)", nogil=True, cache=True, error_model="numpy")
def rice_bits(positions: Any, r: Any) -> Any:
    """Bits that `rice_encode` needs for these positions with parameter `r`."""
    previous = np.int64(-1)
    total = np.int64(0)
    for i in range(positions.size):
        p = np.int64(positions[i])
        total += ((p - previous - 1) >> r) + 1 + r
        previous = p
    return total


@njit("int64(uint32[::1], int64, uint8[::1])", nogil=True, cache=True, error_model="numpy")
def rice_encode(positions: Any, r: Any, out: Any) -> Any:
    """Gaps between positions as Rice codes, first bit lowest.

    Quotient in 1-bits, a 0-bit, `r` low bits. Returns bytes.
    """
    held = np.uint64(0)
    bits = np.uint64(0)
    at = np.int64(0)
    previous = np.int64(-1)
    low_mask = (np.uint64(1) << np.uint64(r)) - np.uint64(1)
    for i in range(positions.size):
        p = np.int64(positions[i])
        gap = p - previous - 1
        previous = p
        quotient = gap >> r
        while quotient > 0:
            take = min(quotient, np.int64(32))
            held |= ((np.uint64(1) << np.uint64(take)) - np.uint64(1)) << bits
            bits += np.uint64(take)
            quotient -= take
            while bits >= np.uint64(8):
                out[at] = np.uint8(held & np.uint64(0xFF))
                at += 1
                held >>= np.uint64(8)
                bits -= np.uint64(8)
        held |= ((np.uint64(gap) & low_mask) << np.uint64(1)) << bits
        bits += np.uint64(1 + r)
        while bits >= np.uint64(8):
            out[at] = np.uint8(held & np.uint64(0xFF))
            at += 1
            held >>= np.uint64(8)
            bits -= np.uint64(8)
    if bits > np.uint64(0):
        out[at] = np.uint8(held & np.uint64(0xFF))
        at += 1
    return at


@njit("int64(uint8[::1], int64, int64, uint32[::1])", nogil=True, cache=True, error_model="numpy")
def rice_decode(data: Any, r: Any, elements: Any, positions: Any) -> Any:
    """Fill `positions` from Rice codes.

    Returns a RICE_* status. Every bit of `data` must be used, padding must be zero.
    """
    held = np.uint64(0)
    bits = np.int64(0)
    at = np.int64(0)
    size = np.int64(data.size)
    previous = np.int64(-1)
    low_mask = (np.uint64(1) << np.uint64(r)) - np.uint64(1)
    for i in range(positions.size):
        quotient = np.int64(0)
        while True:
            if bits == 0:
                while bits <= 48 and at < size:
                    held |= np.uint64(data[at]) << np.uint64(bits)
                    at += 1
                    bits += 8
                if bits == 0:
                    return np.int64(RICE_TRUNCATED)
            bit = held & np.uint64(1)
            held >>= np.uint64(1)
            bits -= 1
            if bit == np.uint64(0):
                break
            quotient += 1
        while bits <= 48 and at < size:
            held |= np.uint64(data[at]) << np.uint64(bits)
            at += 1
            bits += 8
        if bits < r:
            return np.int64(RICE_TRUNCATED)
        position = previous + 1 + (quotient << r) + np.int64(held & low_mask)
        held >>= np.uint64(r)
        bits -= r
        if position >= elements:
            return np.int64(RICE_BEYOND)
        positions[i] = np.uint32(position)
        previous = position
    if at < size or bits >= 8 or held != np.uint64(0):
        return np.int64(RICE_LEFTOVER)
    return np.int64(RICE_OK)


@njit("uint64(uint64, uint64, uint64, uint64, uint64)", nogil=True, cache=True, inline="always")
def _rank(bits: Any, flip: Any, floats: Any, top: Any, mask: Any) -> Any:
    """Rank of a bit pattern: the sign flipped, and for negative floats every bit. No branches: signs look random."""
    negative = np.uint64(0) - (bits >> top)
    return bits ^ ((flip | (negative & floats)) & mask)


@njit("uint64(uint64, uint64, uint64, uint64, uint64)", nogil=True, cache=True, inline="always")
def _unrank(rank: Any, flip: Any, floats: Any, top: Any, mask: Any) -> Any:
    """Undo `_rank`."""
    negative = (rank >> top) - np.uint64(1)
    return rank ^ ((flip | (negative & floats)) & mask)


@njit(
    "int64(uint64[::1], uint64[::1], uint32[::1], int64, int64, uint8[::1], uint8[::1])",
    nogil=True,
    cache=True,
    error_model="numpy",
)
def encode_values(old: Any, new: Any, positions: Any, width: Any, order: Any, values: Any, literals: Any) -> Any:
    """One byte per changed element: its step in rank order, zigzag, or 0 and the element itself in `literals`.

    `order`: 0 unsigned, 1 signed, 2 float. Returns the number of literals. `values` needs room for one byte, `literals`
    for `width` bytes per position.
    """
    element_bits = np.uint64(8 * width)
    mask = _ONES >> (np.uint64(64) - element_bits)
    top = element_bits - np.uint64(1)
    flip = np.uint64(0) if order == 0 else np.uint64(1) << top
    floats = _ONES if order == 2 else np.uint64(0)
    count = np.int64(0)
    for i in range(positions.size):
        byte = np.int64(positions[i]) * width
        word = byte >> 3
        shift = np.uint64((byte & 7) * 8)
        before = (old[word] >> shift) & mask
        after = (new[word] >> shift) & mask
        up = (_rank(after, flip, floats, top, mask) - _rank(before, flip, floats, top, mask)) & mask
        down = (np.uint64(0) - up) & mask
        if up > np.uint64(127) and down > np.uint64(127):
            values[i] = np.uint8(0)
            for b in range(width):
                literals[count * width + b] = np.uint8((after >> np.uint64(8 * b)) & np.uint64(0xFF))
            count += 1
        else:
            values[i] = np.uint8(min(up * np.uint64(2) - np.uint64(1), down * np.uint64(2)))
    return count


@njit(
    "int64(uint64[::1], uint32[::1], int64, int64, uint8[::1], uint8[::1], uint8[::1])",
    nogil=True,
    cache=True,
    error_model="numpy",
)
def decode_values(old: Any, positions: Any, width: Any, order: Any, values: Any, literals: Any, out: Any) -> Any:
    """New elements (`width` bytes each) from the old block and the value codes; returns a VALUES_* status.

    A literal that a step could have said is refused, and so is a number of literals that does not fit.
    """
    element_bits = np.uint64(8 * width)
    mask = _ONES >> (np.uint64(64) - element_bits)
    top = element_bits - np.uint64(1)
    flip = np.uint64(0) if order == 0 else np.uint64(1) << top
    floats = _ONES if order == 2 else np.uint64(0)
    at = np.int64(0)
    for i in range(positions.size):
        byte = np.int64(positions[i]) * width
        before = (old[byte >> 3] >> np.uint64((byte & 7) * 8)) & mask
        rank = _rank(before, flip, floats, top, mask)
        code = np.uint64(values[i])
        if code == np.uint64(255):
            return np.int64(VALUES_RESERVED)
        if code == np.uint64(0):
            if at + width > literals.size:
                return np.int64(VALUES_LITERAL)
            after = np.uint64(0)
            for b in range(width):
                after |= np.uint64(literals[at + b]) << np.uint64(8 * b)
            at += width
            up = (_rank(after, flip, floats, top, mask) - rank) & mask
            if up <= np.uint64(127) or ((np.uint64(0) - up) & mask) <= np.uint64(127):
                return np.int64(VALUES_LITERAL)
        else:
            half = (code + np.uint64(1)) >> np.uint64(1)
            odd = np.uint64(0) - (code & np.uint64(1))
            # Odd codes step up, even ones down: half, or its two's complement.
            step = (half & odd) | ((np.uint64(0) - half) & ~odd)
            after = _unrank((rank + step) & mask, flip, floats, top, mask)
        for b in range(width):
            out[i * width + b] = np.uint8((after >> np.uint64(8 * b)) & np.uint64(0xFF))
    if at != literals.size:
        return np.int64(VALUES_LITERAL)
    return np.int64(VALUES_OK)


@njit("void(uint8[::1], int64, uint8[::1])", nogil=True, cache=True, error_model="numpy")
def split_planes(data: Any, width: Any, out: Any) -> None:
    """Byte planes of elements: all lowest bytes, then the next ones, and so on."""
    # A constant stride is what lets the compiler use vectors, hence one loop per width.
    count = data.size // width
    if width == 1:
        out[:] = data
    elif width == 2:
        low, high = out[:count], out[count:]
        for i in range(count):
            low[i] = data[2 * i]
            high[i] = data[2 * i + 1]
    elif width == 4:
        for plane in range(4):
            part = out[plane * count : (plane + 1) * count]
            for i in range(count):
                part[i] = data[4 * i + plane]
    else:
        for plane in range(8):
            part = out[plane * count : (plane + 1) * count]
            for i in range(count):
                part[i] = data[8 * i + plane]


@njit("void(uint8[::1], int64, uint8[::1])", nogil=True, cache=True, error_model="numpy")
def join_planes(planes: Any, width: Any, out: Any) -> None:
    """Undo `split_planes`."""
    count = planes.size // width
    if width == 1:
        out[:] = planes
    elif width == 2:
        low, high = planes[:count], planes[count:]
        for i in range(count):
            out[2 * i] = low[i]
            out[2 * i + 1] = high[i]
    elif width == 4:
        for plane in range(4):
            part = planes[plane * count : (plane + 1) * count]
            for i in range(count):
                out[4 * i + plane] = part[i]
    else:
        for plane in range(8):
            part = planes[plane * count : (plane + 1) * count]
            for i in range(count):
                out[8 * i + plane] = part[i]


@njit("void(uint32[::1], uint8[::1], int64, int64, uint8[::1])", nogil=True, cache=True, error_model="numpy")
def scatter(positions: Any, elements: Any, width: Any, start: Any, out: Any) -> None:
    """Write elements into `out`, whose first byte lies `start` bytes after the block's.

    What falls outside is left out.
    """
    size = np.int64(out.size)
    for i in range(positions.size):
        at = np.int64(positions[i]) * width - start
        if at >= 0 and at + width <= size:
            for b in range(width):
                out[at + b] = elements[i * width + b]
        else:
            for b in range(width):
                if 0 <= at + b < size:
                    out[at + b] = elements[i * width + b]


@njit("void(uint8[::1], uint32[::1], int64, uint8[::1])", nogil=True, cache=True, error_model="numpy")
def gather(block: Any, positions: Any, width: Any, out: Any) -> None:
    """The elements at `positions`, `width` bytes each."""
    for i in range(positions.size):
        at = np.int64(positions[i]) * width
        for b in range(width):
            out[i * width + b] = block[at + b]
