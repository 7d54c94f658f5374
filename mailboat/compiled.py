"""The compiled code of sums and patches, in one module.

Numba's cache does not notice edits in a callee of another module, so nothing here may call compiled code elsewhere, nor
be called by it (the quantisers' is as self-contained, in `mailboat.quantise.compiled`).  Every
function has an explicit signature (NumPy's promotion of uint64 with int64 to float64 must never happen), releases the
GIL and is cached.  Kernels trust their arguments: callers check sizes, kernels never do.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.core.registry import cpu_target
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
_ONES = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_READ = types.Array(types.uint8, 1, "C", readonly=True)  # bytes that are only read: writable arrays fit too
_TOTALS = types.uint64[::1]
_I64 = types.int64
_tuple: Any = types.Tuple
_pointer_type: Any = types.CPointer
_WORDS_AT = _pointer_type(types.uint64)
_U64 = types.uint64
_PAIR = _tuple((types.uint64,) * 2)


def _load_word(typingctx: Any, buffer: Any, offset: Any) -> Any:  # noqa: ARG001 - numba's protocol
    """Load the 8 bytes at `offset` of a uint8 buffer as a little-endian word, at any alignment."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        address = builder.gep(array.data, [arguments[1]])
        pointer = builder.bitcast(address, ir.IntType(64).as_pointer())
        return builder.load(pointer, align=1)

    return types.uint64(buffer, types.int64), generate


_word: Any = intrinsic(_load_word)


def _store_half(typingctx: Any, buffer: Any, index: Any, number: Any) -> Any:  # noqa: ARG001 - the names are Numba's
    """Store the low 16 bits of a number as item `index` of a uint8 buffer's pairs of bytes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        half = ir.IntType(16)
        address = builder.gep(builder.bitcast(array.data, half.as_pointer()), [arguments[1]])
        builder.store(builder.trunc(arguments[2], half), address, align=1)
        return context.get_dummy_value()

    return types.void(buffer, types.int64, types.uint64), generate


_put_half: Any = intrinsic(_store_half)


def _count_zeros(typingctx: Any, word: Any) -> Any:  # noqa: ARG001 - the names are Numba's
    """How many zero bits a 64-bit word ends with; 64 for 0."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


_trailing_zeros: Any = intrinsic(_count_zeros)


def _multiply_high(typingctx: Any, first: Any, second: Any) -> Any:  # noqa: ARG001 - the names are Numba's
    """The high 64 bits of the product of two words."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(argument, wide) for argument in arguments))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), generate


_high_product: Any = intrinsic(_multiply_high)


def _fetch_ahead(typingctx: Any, words: Any, index: Any) -> Any:  # noqa: ARG001 - the names are Numba's
    """Bring the cache line of a word nearer, which may lie beyond the array: nothing is read."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        address = builder.bitcast(builder.gep(array.data, [arguments[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
        name = "llvm.prefetch.p0"
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        builder.call(function, [address, *(ir.Constant(number, argument) for argument in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(words, types.int64), generate


_prefetch: Any = intrinsic(_fetch_ahead)


def _pointer_to(typingctx: Any, address: Any) -> Any:  # noqa: ARG001 - the names are Numba's
    """An address as a pointer to words."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())

    return _WORDS_AT(types.int64), generate


_pointer: Any = intrinsic(_pointer_to)


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


# Words of changes are mixed so many at a time: in arrays, the compiler mixes several with one instruction.
_BATCH = 64


@njit(types.void(_TOTALS, _I64, _TOTALS), nogil=True, cache=True)
def _sum_batch(batch, count, out):  # type: ignore[no-untyped-def]
    """Add to out[0:2] what `count` words do to the two sums as they change.

    `batch`, _BATCH items each: the words before, the words after, and what their places stand for in either sum.
    """
    total_a = _ZERO
    total_b = _ZERO
    for i in range(count):
        before, after, a, b = batch[i], batch[_BATCH + i], batch[2 * _BATCH + i], batch[3 * _BATCH + i]
        total_a += _mix(after ^ a, FIRST_A, SECOND_A) - _mix(before ^ a, FIRST_A, SECOND_A)
        total_b += _mix(after ^ b, FIRST_B, SECOND_B) - _mix(before ^ b, FIRST_B, SECOND_B)
    out[0] += total_a
    out[1] += total_b


@njit(_U64(_I64), nogil=True, cache=True, inline="always")
def _reciprocal(piece_bytes):  # type: ignore[no-untyped-def]
    """What `_piece_of` multiplies by."""
    return _ONES // np.uint64(piece_bytes) + np.uint64(1)


@njit(_I64(_I64, _I64, _U64), nogil=True, cache=True, inline="always")
def _piece_of(byte, piece_bytes, reciprocal):  # type: ignore[no-untyped-def]
    """byte // piece_bytes, exact where their product is below 2^64: a block's bytes are far from that."""
    return byte if piece_bytes == 1 else np.int64(_high_product(np.uint64(byte), reciprocal))


@njit(
    _tuple((_I64, _I64))(
        _READ, _READ, types.uint32[::1], _I64, _I64, _I64, _I64, _I64, _I64, _U64, _U64, _TOTALS, _I64, _I64, _TOTALS
    ),
    nogil=True,
    cache=True,
    error_model="numpy",
)
def _batch_changes(  # type: ignore[no-untyped-def]
    old, new, positions, first, end, width, piece_bytes, row0, word0, seed_a, seed_b, batch, held, last, out
):
    """As `sum_changes` for positions[first:end]: words wait in `batch`, `held` of them, until they fill it.

    `last`: where the last of them starts, -1 before the first. Returns `held` and `last` as they are afterwards.
    """
    reciprocal = _reciprocal(piece_bytes)
    for at in range(first, end):
        byte = np.int64(positions[np.uint64(at)]) * width
        piece = _piece_of(byte, piece_bytes, reciprocal)
        start = piece * piece_bytes
        word = (byte - start) >> 3
        where = start + word * 8
        if where == last:
            continue
        last = where
        rest = start + piece_bytes - where
        if rest >= 8:
            batch[held] = _word(old, where)
            batch[_BATCH + held] = _word(new, where)
        else:
            batch[held] = _short_word(old, where, rest)
            batch[_BATCH + held] = _short_word(new, where, rest)
        row = np.uint64(row0 + piece)
        column = np.uint64(word0 + word)
        batch[2 * _BATCH + held] = seed_a + row * ROW_A + column * WORD_A
        batch[3 * _BATCH + held] = seed_b + row * ROW_B + column * WORD_B
        held += 1
        if held == _BATCH:
            _sum_batch(batch, held, out)
            held = 0
    return held, last


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
    batch = np.empty(4 * _BATCH, np.uint64)
    held, _ = _batch_changes(
        old, new, positions, 0, positions.size, width, piece_bytes, row0, word0, seed_a, seed_b, batch, 0, -1, out
    )
    _sum_batch(batch, held, out)


@njit(
    types.void(types.uint64[::1], types.uint64[::1], types.uint32[::1], _I64, _I64, _I64, _I64, _U64, _U64, _TOTALS),
    nogil=True,
    cache=True,
    error_model="numpy",
)
def sum_elements(old, elements, positions, width, piece_bytes, row0, word0, seed_a, seed_b, out):  # type: ignore[no-untyped-def]
    """As `sum_changes`, from the old block's words and the new elements at `positions` alone, packed into words."""
    batch = np.empty(4 * _BATCH, np.uint64)
    reciprocal = _reciprocal(piece_bytes)
    block = old.view(np.uint8)
    element_mask = _ONES >> np.uint64(64 - 8 * width)
    count = positions.size
    at = np.int64(0)
    held = 0
    while at < count:
        byte = np.int64(positions[at]) * width
        piece = _piece_of(byte, piece_bytes, reciprocal)
        start = piece * piece_bytes
        word = (byte - start) >> 3
        where = start + word * 8
        rest = start + piece_bytes - where
        before = _word(block, where) if rest >= 8 else _short_word(block, where, rest)
        after = before
        while byte < where + min(rest, 8):
            shift = np.uint64((byte - where) * 8)
            new = (elements[(at * width) >> 3] >> np.uint64(((at * width) & 7) << 3)) & element_mask
            after = (after & ~(element_mask << shift)) | (new << shift)
            at += 1
            if at == count:
                break
            byte = np.int64(positions[at]) * width
        row = np.uint64(row0 + piece)
        column = np.uint64(word0 + word)
        batch[held] = before
        batch[_BATCH + held] = after
        batch[2 * _BATCH + held] = seed_a + row * ROW_A + column * WORD_A
        batch[3 * _BATCH + held] = seed_b + row * ROW_B + column * WORD_B
        held += 1
        if held == _BATCH:
            _sum_batch(batch, held, out)
            held = 0
    _sum_batch(batch, held, out)


# --- Patches (docs/format/patch.md) -----------------------------------------------------------------------------------
#
# A block comes as little-endian 64-bit words, its last word zero-padded, so that one compiled version serves every
# element width (1, 2, 4, 8 bytes): no element crosses a word. Positions count elements from the block's start.

RICE_OK, RICE_TRUNCATED, RICE_BEYOND, RICE_LEFTOVER = 0, 1, 2, 3
VALUES_OK, VALUES_RESERVED, VALUES_LITERAL = 0, 1, 2


def _compare_64(width: int) -> Any:
    """An intrinsic: which of 64 elements of `width` bytes, from word `at` on, differ between two blocks, as bits."""

    def compare(typingctx: Any, old: Any, new: Any, at: Any) -> Any:  # noqa: ARG001 - the names are Numba's
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            elements = ir.VectorType(ir.IntType(8 * width), 64)
            sides = []
            for kind, block in zip(signature.args[:2], arguments[:2], strict=True):
                address = builder.gep(context.make_array(kind)(context, builder, block).data, [arguments[2]])
                sides.append(builder.load(builder.bitcast(address, elements.as_pointer()), align=8))
            return builder.bitcast(builder.icmp_unsigned("!=", *sides), ir.IntType(64))

        return types.uint64(old, new, types.int64), generate

    return intrinsic(compare)


_differ_1, _differ_2, _differ_4, _differ_8 = (_compare_64(width) for width in (1, 2, 4, 8))


@njit("int64(uint64, int64, int64, uint32[::1])", nogil=True, cache=True, inline="always")
def _append_bits(bits, first, count, positions):  # type: ignore[no-untyped-def]
    """Append first + i for each bit i that is set; returns how many there are now."""
    while bits != _ZERO:
        positions[count] = np.uint32(first + _trailing_zeros(bits))
        count += 1
        bits &= bits - np.uint64(1)
    return count


@njit(
    "int64(uint64[::1], uint64[::1], int64, int64, int64, int64, uint32[::1])",
    nogil=True,
    cache=True,
    error_model="numpy",
)
def _find_in(old: Any, new: Any, width: Any, first: Any, end: Any, count: Any, positions: Any) -> Any:
    """As `find_changes` for the words first ... end - 1, after `count` positions; `first` is a multiple of 64."""
    per_word = np.int64(8) // width
    whole = end - (end - first) % (8 * width)
    # One loop per width: 64 elements are compared at once, in as few instructions as the processor has for it.
    if width == 2:
        for at in range(first, whole, 16):
            count = _append_bits(_differ_2(old, new, at), at * 4, count, positions)
    elif width == 1:
        for at in range(first, whole, 8):
            count = _append_bits(_differ_1(old, new, at), at * 8, count, positions)
    elif width == 4:
        for at in range(first, whole, 32):
            count = _append_bits(_differ_4(old, new, at), at * 2, count, positions)
    else:
        for at in range(first, whole, 64):
            count = _append_bits(_differ_8(old, new, at), at, count, positions)
    element_bits = np.uint64(8 * width)
    mask = _ONES >> (np.uint64(64) - element_bits)
    for i in range(whole, end):
        x = old[i] ^ new[i]
        if x != _ZERO:
            for e in range(per_word):
                if (x >> (np.uint64(e) * element_bits)) & mask != _ZERO:
                    positions[count] = np.uint32(i * per_word + e)
                    count += 1
    return count


@njit("int64(uint64[::1], uint64[::1], int64, uint32[::1])", nogil=True, cache=True, error_model="numpy")
def find_changes(old: Any, new: Any, width: Any, positions: Any) -> Any:
    """Positions (ascending) of the elements that differ between two blocks; returns how many.

    `positions` needs room for every element of the block.
    """
    return _find_in(old, new, width, 0, old.size, 0, positions)


# A third of the gaps equal to the one before: of as many changes strewn evenly, at most a seventh are.
REGULAR_FROM, REGULAR_SHARE = 64, 3


@njit("boolean(uint32[::1])", nogil=True, cache=True)
def is_regular(positions: Any) -> Any:
    """Whether so many gaps between positions equal the one before."""
    if positions.size < REGULAR_FROM:
        return False
    count = np.int64(0)
    for i in range(2, positions.size):
        here = positions[np.uint64(i)] - positions[np.uint64(i - 1)]
        count += here == positions[np.uint64(i - 1)] - positions[np.uint64(i - 2)]
    return count * REGULAR_SHARE >= positions.size


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


@njit(_tuple((_U64, _I64, _I64))(types.uint8[::1], _U64, _I64, _I64), nogil=True, cache=True, inline="always")
def _refilled(data, held, bits, at):  # type: ignore[no-untyped-def]
    """Top up a bit buffer to 56 bits or more where there are data; bits above `bits` may hold what comes next."""
    if at + 8 <= data.size:
        held |= _word(data, at) << np.uint64(bits)
        count = (np.int64(63) - bits) >> 3
        return held, bits + count * 8, at + count
    while bits <= 55 and at < data.size:
        held |= np.uint64(data[at]) << np.uint64(bits)
        at += 1
        bits += 8
    return held, bits, at


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
            held, bits, at = _refilled(data, held, bits, at)
            ones = _trailing_zeros(~held)
            if ones < bits:
                break
            if at == size:
                return np.int64(RICE_TRUNCATED)
            quotient += bits
            held >>= np.uint64(bits)
            bits = np.int64(0)
        quotient += ones
        held >>= np.uint64(ones + 1)
        bits -= ones + 1
        held, bits, at = _refilled(data, held, bits, at)
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
    # Old elements lie far apart: fetching a batch of them first lets their cache misses overlap.
    batch = np.empty(_BATCH, np.uint64)
    for i in range(positions.size):
        if i % _BATCH == 0:
            for ahead in range(i, min(i + _BATCH, positions.size)):
                next_one = np.int64(positions[min(ahead + _BATCH, positions.size - 1)])
                _prefetch(old, next_one * width >> 3)
                place = np.int64(positions[ahead]) * width
                batch[ahead - i] = (old[place >> 3] >> np.uint64((place & 7) * 8)) & mask
        rank = _rank(batch[i % _BATCH], flip, floats, top, mask)
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


@njit(
    "int64(int64[:, ::1], uint64[:, ::1], uint8[::1], uint8[::1], uint8[::1], uint32[::1], uint64[::1],"
    " uint64[:, ::1])",
    nogil=True,
    cache=True,
    error_model="numpy",
)
def decode_positional(
    blocks: Any, seeds: Any, codes: Any, values: Any, literals: Any, positions: Any, elements: Any, change: Any
) -> Any:
    """Decode a run of positional blocks; returns 0, or 1 where positions are damaged, 2 where values are.

    `blocks`, a row for each: address of its old words, their number, elements, width, order, changes, Rice parameter,
    bytes of its own in `codes` and in `literals`, and `piece_bytes`, `row0`, `word0` as sums take them. `seeds`: those
    of its tensor's sums. Filled are `positions`, `elements` (whole words for each block), and `change`, which is what
    each block does to the two sums.
    """
    code, literal, at, word = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    for i in range(blocks.shape[0]):
        old = carray(_pointer(blocks[i, 0]), (blocks[i, 1],))
        width, count = blocks[i, 3], blocks[i, 5]
        here = positions[at : at + count]
        new = elements[word : word + ((count * width + 7) >> 3)]
        if rice_decode(codes[code : code + blocks[i, 7]], blocks[i, 6], blocks[i, 2], here):
            return np.int64(1)
        steps, others = values[at : at + count], literals[literal : literal + blocks[i, 8]]
        if decode_values(old, here, width, blocks[i, 4], steps, others, new.view(np.uint8)):
            return np.int64(2)
        sum_elements(
            old, new, here, width, blocks[i, 9], blocks[i, 10], blocks[i, 11], seeds[i, 0], seeds[i, 1], change[i]
        )
        code += blocks[i, 7]
        literal += blocks[i, 8]
        at += count
        word += new.size
    return np.int64(0)


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
        _prefetch(out, np.int64(positions[min(i + _BATCH, positions.size - 1)]) * width - start)
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


# --- The contextual encoding (docs/format/contextual.md) --------------------------------------------------------------
#
# The coder's numbers live in one uint64 array between blocks (CODER_*); inside a kernel they are locals. Every loop is
# bounded by the block, by its promised number of changes or by the width, whatever a stream says.

CHUNK, TILE = 64, 128
UNARY, PREFIXES, LONGEST = 6, 16, 62
CONTEXTS = UNARY + 2 * PREFIXES
HAZARDS = 192
CODER_LOW, CODER_RANGE, CODER_AT, CODER_EVENTS, CODER_EXPOSURE, CODER_SCALE, CODER_NEXT, CODER_SIZE = range(8)
CONTEXTUAL_OK, CONTEXTUAL_FULL, CONTEXTUAL_DAMAGED = 0, 1, 2
PER_EVENT = 6_051_102  # 2^22 / ln 2: hazard over which one event is expected
FIRST_EVENTS, FIRST_LEVEL = 4, 112


def half_power(x: int) -> int:
    """2^(64 - x / 256) for x = 0 ... 256, by integer square roots: the one source of every table here."""
    if x == 256:
        return 1 << 63
    result, root = 1 << 64, 1 << 63
    for bit in (128, 64, 32, 16, 8, 4, 2, 1):
        root = isqrt(root << 64)
        if x & bit:
            result = result * root >> 64
    return result


def hazard_of(level: int, sixteenth: int = 0) -> int:
    """2^(level / 8 + sixteenth / 16) in 2^-32 of the unit of hazards, which is 2^-22 bit."""
    octaves, rest = divmod(32 * level + 16 * sixteenth, 256)
    return half_power(256 - rest) >> 31 << octaves if rest else 1 << (octaves + 32)


HAZARD_TABLE = np.array([hazard_of(level) >> 32 for level in range(HAZARDS)], np.uint32)
NO_EVENT = np.array([(half_power(x) + (1 << 47)) >> 48 for x in range(257)], np.uint64)
# Each of them above 8 bits that say how much less the next one is; twice, for y up to two bits.
STEEP = np.array([int(NO_EVENT[i]) << 8 | int(NO_EVENT[i] - NO_EVENT[i + 1]) for i in range(256)] * 2, np.uint32)
RATES = np.array([131072 // (2 * min(seen, 148) + 3) for seen in range(256)], np.uint64)
_TILE = np.uint64(TILE)
_U1, _U5, _U6, _U8, _U14, _U15, _U16, _U22 = (np.uint64(number) for number in (1, 5, 6, 8, 14, 15, 16, 22))
_LOW_RANGE = np.uint64(1 << 32)
_HALF = np.uint64(32768)
_FF = np.uint64(0xFF)
_FFFF = np.uint64(0xFFFF)
_LEAST, _MOST = np.uint64(32), np.uint64(65504)
_SPLIT = np.uint64(3 << 21)
_PER_EVENT = np.uint64(PER_EVENT)
_SPLIT_LIMIT = np.uint64(((3 << 21) + 1 << 16) - 1)  # over the scale: the most hazard that is not split
_LEAST_SCALE, _MOST_SCALE = np.uint64(1 << 8), np.uint64(1 << 24)
_EXPOSURE_LIMIT, _EVENT_LIMIT = np.uint64(1 << 29), np.uint64(1 << 20)
_CODES = types.uint32[::1]
_STATE3 = _tuple((types.uint64,) * 3)
_STATE4 = _tuple((types.uint64,) * 4)


@njit("uint64(uint64)", nogil=True, cache=True, inline="always")
def _no_event(y):  # type: ignore[no-untyped-def]
    """2^-y in 1/65536, between 1 and 65535; y in units of 2^-22 bit."""
    whole = y >> _U22
    if whole >= _U16:
        return _U1
    steep = np.uint64(STEEP[(y >> _U14) & _FF])
    p = ((steep >> _U8) - (((steep & _FF) * ((y >> _U6) & _FF)) >> _U8)) >> whole
    return max(p - (p >> _U16), _U1)


@njit("uint64(uint64)", nogil=True, cache=True, inline="always")
def _likely_no_event(y):  # type: ignore[no-untyped-def]
    """As `_no_event`, for y below two bits."""
    steep = np.uint64(STEEP[y >> _U14])
    p = ((steep >> _U8) - (((steep & _FF) * ((y >> _U6) & _FF)) >> _U8)) >> (y >> _U22)
    return p - (p >> _U16)  # 65536 is the only one too many, and no processor guesses where it is


@njit(_STATE3(_U64, _U64, _CODES, _U64, _U64), nogil=True, cache=True, inline="always")
def _put(low, at, out, start, size):  # type: ignore[no-untyped-def]
    """Narrow the encoder's interval to [start, start + size) of itself; a carry walks back over the words written."""
    moved = low + start
    if moved < low:
        back = at - _U1
        while True:
            out[back] += np.uint32(1)
            if out[back] != np.uint32(0):
                break
            back -= _U1
    # Whether a word is complete is as good as random: it is always written, and counts when it is.
    out[at] = np.uint32(moved >> _S32)
    full = np.uint64(size < _LOW_RANGE)
    shift = full << _U5
    return moved << shift, size << shift, at + full


@njit(_STATE3(_U64, _U64, _U64, _CODES, _U64, _U64), nogil=True, cache=True, inline="always")
def _put_bit(low, span, at, out, bit, p):  # type: ignore[no-untyped-def]
    """Encode a bit that is 0 with probability p / 65536."""
    zero = (span >> _U16) * p
    chosen = _ZERO - bit
    return _put(low, at, out, zero & chosen, zero ^ ((zero ^ (span - zero)) & chosen))


@njit(_U64(_CODES, _U64, _U64), nogil=True, cache=True, inline="always")
def _learn(contexts, place, bit):  # type: ignore[no-untyped-def]
    """Move an adaptive probability towards `bit`; returns what it was."""
    held = np.uint64(contexts[place])
    p = held >> _U8
    seen = held & _FF
    rate = RATES[seen]
    after = p + (((_FFFF - p) * rate) >> _U16) if bit == _ZERO else p - ((p * rate) >> _U16)
    after = min(max(after, _LEAST), _MOST)
    contexts[place] = np.uint32((after << _U8) | min(seen + _U1, np.uint64(148)))
    return p


@njit(_STATE3(_U64, _U64, _U64, _CODES, _CODES, _U64, _U64), nogil=True, cache=True)
def _put_number(low, span, at, out, contexts, row, number):  # type: ignore[no-untyped-def]
    """Unary up to 5 with adaptive bits, then Exp-Golomb whose prefix and first suffix bit adapt."""
    for t in range(UNARY):
        place = row + np.uint64(t)
        bit = _U1 if number > np.uint64(t) else _ZERO
        low, span, at = _put_bit(low, span, at, out, bit, _learn(contexts, place, bit))
        if bit == _ZERO:
            return low, span, at
    rest = number - np.uint64(UNARY - 1)
    length = _ZERO
    while length < np.uint64(LONGEST) and rest >> (length + _U1) != _ZERO:
        place = row + np.uint64(UNARY) + min(length, np.uint64(PREFIXES - 1))
        low, span, at = _put_bit(low, span, at, out, _U1, _learn(contexts, place, _U1))
        length += _U1
    place = row + np.uint64(UNARY) + min(length, np.uint64(PREFIXES - 1))
    if length < np.uint64(LONGEST):
        low, span, at = _put_bit(low, span, at, out, _ZERO, _learn(contexts, place, _ZERO))
    for step in range(np.int64(length)):
        bit = (rest >> (length - _U1 - np.uint64(step))) & _U1
        p = _HALF
        if step == 0:
            p = _learn(contexts, row + np.uint64(UNARY + PREFIXES) + min(length, np.uint64(PREFIXES - 1)), bit)
        low, span, at = _put_bit(low, span, at, out, bit, p)
    return low, span, at


@njit(_STATE4(_U64, _U64, _U64, _CODES, _U64), nogil=True, cache=True, inline="always")
def _take_bit(code, span, at, data, p):  # type: ignore[no-untyped-def]
    """Decode a bit that is 0 with probability p / 65536; returns it last. Words beyond the end are zero."""
    zero = (span >> _U16) * p
    bit = _ZERO
    if code < zero:
        span = zero
    else:
        code -= zero
        span -= zero
        bit = _U1
    if span < _LOW_RANGE:
        code = code << _S32
        if at < np.uint64(data.size):
            code |= np.uint64(data[at])
        at += _U1
        span = span << _S32
    return code, span, at, bit


@njit(_STATE4(_U64, _U64, _U64, _CODES), nogil=True, cache=True, inline="always")
def _take_sign(code, span, at, data):  # type: ignore[no-untyped-def]
    """Decode an even bit, returned last, without a branch on it."""
    zero = (span >> _U16) * _HALF
    bit = np.uint64(code >= zero)
    chosen = _ZERO - bit
    code -= zero & chosen
    span = zero ^ ((zero ^ (span - zero)) & chosen)
    if span < _LOW_RANGE:
        code = code << _S32
        if at < np.uint64(data.size):
            code |= np.uint64(data[at])
        at += _U1
        span = span << _S32
    return code, span, at, bit


@njit(_STATE4(_U64, _U64, _U64, _CODES, _CODES, _U64, _I64), nogil=True, cache=True)
def _take_number(code, span, at, data, contexts, row, known):  # type: ignore[no-untyped-def]
    """Undo `_put_number`, known to be at least `known`; returns the number last."""
    for t in range(known, UNARY):
        place = row + np.uint64(t)
        code, span, at, bit = _take_bit(code, span, at, data, np.uint64(contexts[place]) >> _U8)
        _learn(contexts, place, bit)
        if bit == _ZERO:
            return code, span, at, np.uint64(t)
    length = _ZERO
    while length < np.uint64(LONGEST):
        place = row + np.uint64(UNARY) + min(length, np.uint64(PREFIXES - 1))
        code, span, at, bit = _take_bit(code, span, at, data, np.uint64(contexts[place]) >> _U8)
        _learn(contexts, place, bit)
        if bit == _ZERO:
            break
        length += _U1
    rest = _U1
    for step in range(np.int64(length)):
        if step == 0:
            place = row + np.uint64(UNARY + PREFIXES) + min(length, np.uint64(PREFIXES - 1))
            code, span, at, bit = _take_bit(code, span, at, data, np.uint64(contexts[place]) >> _U8)
            _learn(contexts, place, bit)
        else:
            code, span, at, bit = _take_bit(code, span, at, data, _HALF)
        rest = (rest << _U1) | bit
    return code, span, at, rest + np.uint64(UNARY - 1)


@njit("uint64(uint64[::1], int64, int64)", nogil=True, cache=True, inline="always")
def _element(words, index, width):  # type: ignore[no-untyped-def]
    """One element of `width` bytes as a number, with what lies above it in its word."""
    byte = np.uint64(index) * np.uint64(width)
    return words[byte >> np.uint64(3)] >> ((byte & np.uint64(7)) << np.uint64(3))


# Where the processor can, the hazards of a chunk are looked up 16 at a time, in a table of WINDOW classes that lie
# together: those of nearly all elements of a block do. A chunk with any other class is marked FAR and takes the loops
# below, and so does everything on other processors, and for other widths. The sums are the same.
WINDOW, LANES, WINDOW_CHUNKS = 32, 16, 16
# So many words of two blocks are compared, and looked at again where they differ while they are in a near cache.
_COMPARED = 1 << 13
ROOM = TILE + WINDOW + CHUNK + 1
WALK_DONE, WALK_CHUNK, WALK_READY, WALK_LOWEST, WALK_SIZE = range(5)
FAR = np.uint32(1 << 31)
_FAR = np.uint64(FAR)
_SUMMED = np.uint64(FAR) - np.uint64(1)
_BEYOND = (1 << 32) - 1
WIDE = {"+avx512f", "+avx512bw"} <= set(cpu_target.target_context.codegen().magic_tuple()[2].split(","))
_I32, _VECTOR, _HALVES = ir.IntType(32), ir.VectorType(ir.IntType(32), LANES), ir.VectorType(ir.IntType(16), 2 * LANES)
_LOOK_UP = "llvm.x86.avx512.vpermi2var.d.512"


def _call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """Call one of LLVM's intrinsics."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, arguments)


def _splat(builder: Any, number: Any, kind: Any) -> Any:
    """A vector full of one number."""
    single = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.Constant(_I32, 0))
    return builder.shuffle_vector(
        single, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(_I32, kind.count), None)
    )


def _data(context: Any, builder: Any, kind: Any, array: Any) -> Any:
    """The address of an array's first item."""
    return context.make_array(kind)(context, builder, array).data


def _chunk_vectors(context: Any, builder: Any, signature: Any, arguments: Any) -> tuple[list[Any], list[Any]]:
    """Of the chunk at word `at` of `words`, elements of 2 bytes: its four vectors of hazards, and its two of elements.

    Arguments: words, at, the window's table, shift. Hazards come as 0, 2 ... 30; 1, 3 ... 31; 32, 34 ...; 33, 35 ....
    """
    words, table = (_data(context, builder, signature.args[k], arguments[k]) for k in (0, 2))
    source = builder.bitcast(builder.gep(words, [arguments[1]]), _VECTOR.as_pointer())
    halves = builder.bitcast(table, _VECTOR.as_pointer())
    low, high = (builder.load(builder.gep(halves, [ir.Constant(_I32, k)]), align=4) for k in range(2))
    even = _splat(builder, builder.trunc(arguments[3], _I32), _VECTOR)
    odd = builder.add(even, ir.Constant(_VECTOR, [16] * LANES))
    held = [builder.load(builder.gep(source, [ir.Constant(_I32, k)]), align=8) for k in range(2)]
    hazards = [
        _call(builder, _LOOK_UP, _VECTOR, [low, builder.lshr(elements, shift), high])
        for elements in held
        for shift in (even, odd)
    ]
    return hazards, held


def _totals(builder: Any, chunks: list[list[Any]]) -> Any:
    """The sums of four chunks' vectors, as a vector of four."""
    sums = [builder.add(builder.add(v[0], v[1]), builder.add(v[2], v[3])) for v in chunks]
    # Halves are added, with those of a neighbour beside them, until each chunk has four numbers left; then one.
    for size in (8, 4):
        low = [lane for lane in range(2 * LANES) if lane % (2 * size) < size]
        high = [lane + size for lane in low]
        sums = [
            builder.add(builder.shuffle_vector(x, y, _places(low)), builder.shuffle_vector(x, y, _places(high)))
            for x, y in zip(sums[::2], sums[1::2], strict=True)
        ]
    (fours,) = sums
    for step in (2, 1):
        moved = [lane ^ step for lane in range(LANES)]
        fours = builder.add(fours, builder.shuffle_vector(fours, fours, _places(moved)))
    return builder.shuffle_vector(fours, fours, ir.Constant(ir.VectorType(_I32, 4), [0, 4, 8, 12]))


def _sum_four(
    typingctx: Any,  # noqa: ARG001
    words: Any,
    at: Any,  # noqa: ARG001
    table: Any,
    shift: Any,  # noqa: ARG001
    base: Any,  # noqa: ARG001
    outside: Any,  # noqa: ARG001
    out: Any,
    first: Any,  # noqa: ARG001
) -> Any:
    """The sums of the hazards of four chunks, to `out` from item `first` on.

    Returns whether ((element - base) & outside) is not 0 for any of their elements.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        from_, mask = (_splat(builder, builder.trunc(arguments[k], ir.IntType(16)), _HALVES) for k in (4, 5))
        chunks, beyond = [], ir.Constant(_HALVES, None)
        for number in range(4):
            at_ = builder.add(arguments[1], ir.Constant(ir.IntType(64), number * CHUNK // 4))
            hazards, held = _chunk_vectors(context, builder, signature, [arguments[0], at_, *arguments[2:]])
            chunks.append(hazards)
            for elements in held:
                moved = builder.sub(builder.bitcast(elements, _HALVES), from_)
                beyond = builder.or_(beyond, builder.and_(moved, mask))
        four = ir.VectorType(_I32, 4)
        address = builder.gep(_data(context, builder, signature.args[6], arguments[6]), [arguments[7]])
        builder.store(_totals(builder, chunks), builder.bitcast(address, four.as_pointer()), align=4)
        unequal = builder.icmp_unsigned("!=", beyond, ir.Constant(_HALVES, None))
        return builder.icmp_unsigned("!=", builder.bitcast(unequal, _I32), ir.Constant(_I32, 0))

    kinds = (words, types.int64, table, types.uint64, types.uint64, types.uint64, out, types.int64)
    return types.boolean(*kinds), generate


def _add_up(typingctx: Any, words: Any, at: Any, table: Any, shift: Any, ends: Any) -> Any:  # noqa: ARG001
    """Where each element of a chunk ends, from the second item of `ends` on: its hazard + 1 after the one before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        hazards, _ = _chunk_vectors(context, builder, signature, arguments)
        zero, ones = ir.Constant(_VECTOR, None), ir.Constant(_VECTOR, [1] * LANES)
        second = builder.gep(_data(context, builder, signature.args[4], arguments[4]), [ir.Constant(_I32, 1)])
        out = builder.bitcast(second, _VECTOR.as_pointer())
        carried: Any = zero
        for number in range(4):
            pair = hazards[2 * (number // 2) :][:2]
            first = LANES // 2 * (number % 2)
            order = [place for lane in range(first, first + LANES // 2) for place in (lane, LANES + lane)]
            sums = builder.add(builder.shuffle_vector(*pair, _places(order)), ones)
            for step in (1, 2, 4, 8):
                moved = [LANES + lane - step if lane >= step else 0 for lane in range(LANES)]
                sums = builder.add(sums, builder.shuffle_vector(zero, sums, _places(moved)))
            sums = builder.add(sums, carried)
            carried = builder.shuffle_vector(sums, sums, _places([LANES - 1] * LANES))
            builder.store(sums, builder.gep(out, [ir.Constant(_I32, number)]), align=4)
        return context.get_dummy_value()

    return types.void(words, types.int64, table, types.uint64, ends), generate


def _ends_passed(typingctx: Any, ends: Any, place: Any) -> Any:  # noqa: ARG001
    """How many of a chunk's elements end at or before `place`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        all_ = ir.VectorType(_I32, 64)
        second = builder.gep(_data(context, builder, signature.args[0], arguments[0]), [ir.Constant(_I32, 1)])
        held = builder.load(builder.bitcast(second, all_.as_pointer()), align=4)
        single = builder.insert_element(
            ir.Constant(all_, ir.Undefined), builder.trunc(arguments[1], _I32), ir.Constant(_I32, 0)
        )
        place_ = builder.shuffle_vector(single, ir.Constant(all_, ir.Undefined), ir.Constant(all_, None))
        passed = builder.bitcast(builder.icmp_unsigned("<=", held, place_), ir.IntType(64))
        return builder.ctpop(passed)

    return types.int64(ends, types.uint64), generate


def _places(lanes: list[int]) -> Any:
    """A shuffle's constant."""
    return ir.Constant(ir.VectorType(_I32, LANES), lanes)


_four_sums: Any = intrinsic(_sum_four)
_chunk_ends: Any = intrinsic(_add_up)
_passed: Any = intrinsic(_ends_passed)


@njit(
    "void(uint64[::1], int64, int64, uint64, uint64, uint32[::1], uint32[::1])",
    nogil=True,
    cache=True,
    error_model="numpy",
)
def chunk_hazards(old: Any, elements: Any, width: Any, shift: Any, mask: Any, hazards: Any, out: Any) -> None:
    """The sum of the hazards of each chunk of 64 elements of a block, given those of the 256 classes."""
    # Loads of whole words and two sums: twice as fast as the vector gathers that the obvious loop compiles to.
    whole = elements // CHUNK
    words = CHUNK * width // 8
    if mask == _ZERO:
        for i in range(whole):
            out[i] = hazards[0] * np.uint32(CHUNK)
    elif width == 2:
        for i in range(whole):
            first = second = np.uint32(0)
            for j in range(16):
                word = old[i * 16 + j] >> shift
                first += hazards[word & mask] + hazards[(word >> _S32) & mask]
                second += hazards[(word >> _U16) & mask] + hazards[(word >> np.uint64(48)) & mask]
            out[i] = first + second
    elif width == 1:
        for i in range(whole):
            first = second = np.uint32(0)
            for j in range(8):
                word = old[i * 8 + j] >> shift
                for byte in range(0, 64, 16):
                    first += hazards[(word >> np.uint64(byte)) & mask]
                    second += hazards[(word >> np.uint64(byte + 8)) & mask]
            out[i] = first + second
    else:
        half = np.uint64(0) if width == 8 else _S32
        for i in range(whole):
            first = second = np.uint32(0)
            for j in range(words):
                word = old[i * words + j] >> shift
                first += hazards[word & mask]
                second += hazards[(word >> half) & mask]
            out[i] = first + second if width == 4 else first
    if whole * CHUNK < elements:
        total = np.uint32(0)
        for j in range(whole * CHUNK, elements):
            total += hazards[(_element(old, j, width) >> shift) & mask]
        out[whole] = total


@njit(_I64(types.int64[::1], _U64, types.uint32[::1], types.uint32[::1]), nogil=True, cache=True, error_model="numpy")
def _window_of(counts, mask, hazards, window):  # type: ignore[no-untyped-def]
    """Fill `window` with the hazards of the WINDOW classes in which most elements of a sample lie; returns the first.

    `counts`: the sample's, by class. The hazard of class c is at c modulo WINDOW.
    """
    inside = np.int64(0)
    for c in range(WINDOW):
        inside += counts[c]
    most, lowest, highest = inside, np.int64(0), np.int64(0)
    for first in range(1, 256 - WINDOW + 1):
        inside += counts[first + WINDOW - 1] - counts[first - 1]
        if inside > most:
            most, lowest = inside, np.int64(first)
        if inside == most:
            highest = np.int64(first)
    # In the middle of those that serve the sample: what is rare lies on both sides of it.
    best = (lowest + highest) >> 1
    for c in range(best, best + WINDOW):
        window[c % WINDOW] = hazards[np.uint64(c) & mask]  # where there is but one class, all are it
    return best


@njit(
    _I64(types.uint64[::1], _I64, _I64, _U64, _U64, types.uint32[::1], types.uint32[::1]),
    nogil=True,
    cache=True,
    error_model="numpy",
)
def _choose_window(old, elements, width, shift, mask, hazards, window):  # type: ignore[no-untyped-def]
    """As `_window_of`, for a sample of a block."""
    counts = np.zeros(256, np.int64)
    # Whole chunks: of elements apart each would cost a fetch from far memory.
    step = max(np.int64(CHUNK), elements // WINDOW_CHUNKS)
    for start in range(0, elements, step):
        for j in range(start, min(elements, start + CHUNK)):
            counts[(_element(old, j, width) >> shift) & mask] += np.uint32(1)
    return _window_of(counts, mask, hazards, window)


@njit(
    "void(uint64[::1], int64, int64, int64, uint64, uint64, uint32[::1], uint32[::1], int64, uint32[::1])",
    nogil=True,
    cache=True,
    error_model="numpy",
)
def _tile_hazards(old, first, elements, width, shift, mask, hazards, window, lowest, out):  # type: ignore[no-untyped-def]
    """As `chunk_hazards`, for the elements from `first` (a chunk's) on; FAR marks what `window` does not serve."""
    done = np.int64(0)
    start = first * width >> 3
    if WIDE and width == 2:
        base = np.uint64(lowest) << shift
        outside = (mask & ~np.uint64(WINDOW - 1)) << shift
        done = elements // CHUNK & ~np.int64(3)
        for i in range(0, done, 4):
            at = start + i * 16
            for line in range(8):
                _prefetch(old, at + TILE * 16 + line * 8)
            if _four_sums(old, at, window, shift, base, outside, out, i):
                chunk_hazards(old[at : at + 64], 4 * CHUNK, width, shift, mask, hazards, out[i : i + 4])
                for k in range(4):
                    out[i + k] |= FAR
    if done * CHUNK < elements:
        rest = elements - done * CHUNK
        chunk_hazards(old[start + done * (CHUNK * width >> 3) :], rest, width, shift, mask, hazards, out[done:])
        for i in range(done, (elements + CHUNK - 1) // CHUNK):
            out[i] |= FAR


@njit("void(uint64[::1], int64, int64, int64, uint64, uint64, uint32[::1], uint32[::1])", nogil=True, cache=True)
def _slow_ends(old, start, end, width, shift, mask, hazards, ends):  # type: ignore[no-untyped-def]
    """As `_chunk_ends` for the elements start ... end - 1, of any width and class."""
    total = _ZERO
    for j in range(start, end):
        total += np.uint64(hazards[(_element(old, j, width) >> shift) & mask]) + _U1
        ends[j - start + 1] = np.uint32(total)
    for j in range(end - start, CHUNK):
        ends[j + 1] = np.uint32(_BEYOND)


# A profile is estimated from a sample: stretches of SAMPLE elements that lie evenly in a block.
SAMPLE = 1 << 13


@njit(_I64(_I64), nogil=True, cache=True)
def sampling(elements: Any) -> Any:
    """One stretch in so many is looked at for what changed in a block of `elements`."""
    return max(np.int64(1), elements >> 15)


@njit(_I64(_I64), nogil=True, cache=True)
def _thinned(elements):  # type: ignore[no-untyped-def]
    """In one chunk in so many of those stretches, all elements are counted."""
    return np.int64(2 if elements >> 15 else 1)


@njit(types.void(types.uint64[::1], _I64, _I64, _I64, _U64, _U64, types.int64[:, ::1]), nogil=True, cache=True)
def _count_classes(old, first, end, width, shift, mask, tables):  # type: ignore[no-untyped-def]
    """Count the classes of the elements first ... end - 1; `first` is a multiple of 4."""
    # Neighbours often have one class: four tables, so that no count waits for the one before it.
    whole = end & ~np.int64(3)
    if width == 2:
        for i in range(first >> 2, whole >> 2):
            word = old[np.uint64(i)] >> shift
            tables[0, word & mask] += 1
            tables[1, (word >> _U16) & mask] += 1
            tables[2, (word >> _S32) & mask] += 1
            tables[3, (word >> np.uint64(48)) & mask] += 1
    else:
        for j in range(first, whole, 4):
            for k in range(4):
                tables[k, (_element(old, j + k, width) >> shift) & mask] += 1
    for j in range(max(first, whole), end):
        tables[0, (_element(old, j, width) >> shift) & mask] += 1


@njit(
    "int64(uint64[::1], uint64[::1], int64, int64, int64, int64, int64, int64, uint64, uint64, uint64, uint64, int64,"
    " int64, uint32[::1], uint8[::1], int64[:, ::1], uint64[::1])",
    nogil=True,
    cache=True,
    error_model="numpy",
)
def compare(
    old: Any, new: Any, width: Any, elements: Any, piece_bytes: Any, row0: Any, word0: Any, found: Any, seed_a: Any,
    seed_b: Any, shift: Any, mask: Any, every: Any, limit: Any, positions: Any, kept: Any, counts: Any, out: Any,
) -> Any:  # fmt: skip
    """All that an encoder asks about two blocks in one pass; returns how many of their `elements` differ, c.

    `positions`: as `find_changes` fills them; where `found` is not negative, that many are given. If c is above
    `limit` nothing more is promised. Else out[0:2] grows as `sum_changes` says, and, where `every` is not 0, `kept` (of
    room for `limit` elements) takes the new elements, counts[1] the classes of the changed ones, and counts[0] and
    counts[2] those of a sample of all and of the changed ones: `sampling` says which, and each counts for what it
    stands for.
    """
    batch = np.empty(4 * _BATCH, np.uint64)
    tables = np.zeros((4, 256), np.int64)
    old_bytes, new_bytes = old.view(np.uint8), new.view(np.uint8)
    held, last = np.int64(0), np.int64(-1)
    count, noted = np.int64(0), np.int64(0)
    whole = elements - elements % CHUNK
    sample, thin = np.int64(0), _thinned(elements)
    words = np.int64(old.size)
    for first in range(0, words, _COMPARED):
        end: Any = min(words, first + _COMPARED)
        if found < 0:
            count = _find_in(old, new, width, first, end, count, positions)
        else:
            while count < found and np.int64(positions[np.uint64(count)]) * width < end * 8:
                count += 1
        if count > limit:
            continue
        held, last = _batch_changes(
            old_bytes, new_bytes, positions, noted, count, width, piece_bytes, row0, word0, seed_a, seed_b, batch, held,
            last, out,
        )  # fmt: skip
        if every == 0:
            noted = count
            continue
        for i in range(noted, count):
            p = np.int64(positions[np.uint64(i)])
            kind = (_element(old, p, width) >> shift) & mask
            counts[1, kind] += 1
            if (p // SAMPLE) % every == 0:
                counts[2, kind] += every
            after = _element(new, p, width)
            if width == 2:
                _put_half(kept, i, after)
            else:
                for b in range(width):
                    kept[i * width + b] = np.uint8((after >> np.uint64(8 * b)) & _FF)
        noted = count
        while sample < whole and (sample + CHUNK) * width <= end * 8:
            _count_classes(old, sample, sample + CHUNK, width, shift, mask, tables)
            sample += CHUNK * thin
            if sample % SAMPLE == 0:
                sample += SAMPLE * (every - 1)
    if count <= limit:
        _sum_batch(batch, held, out)
        if every != 0:
            if whole == sample:
                _count_classes(old, whole, elements, width, shift, mask, tables)
            for c in range(256):
                counts[0, c] += (tables[0, c] + tables[1, c] + tables[2, c] + tables[3, c]) * every * thin
    return count


@njit("void(uint64[::1])", nogil=True, cache=True)
def start_tensor(coder: Any) -> None:
    """Forget the running scale."""
    coder[CODER_EVENTS] = np.uint64(FIRST_EVENTS)
    coder[CODER_EXPOSURE] = np.uint64(FIRST_EVENTS * PER_EVENT)
    coder[CODER_SCALE] = np.uint64(1 << 16)
    coder[CODER_NEXT] = np.uint64(2 * FIRST_EVENTS * PER_EVENT)


@njit(_STATE4(_U64, _U64, _U64, _U64), nogil=True, cache=True, inline="always")
def _rescaled(events, exposure, scale, due):  # type: ignore[no-untyped-def]
    """The running scale, brought up to date once events and exposure have grown by a 32nd."""
    grown = exposure + events * _PER_EVENT
    if grown >= due:
        scale = ((events << _U16) * _PER_EVENT) // exposure
        scale = min(max(scale, _LEAST_SCALE), _MOST_SCALE)
        if exposure > _EXPOSURE_LIMIT or events > _EVENT_LIMIT:
            exposure = (exposure + _U1) >> _U1
            events = (events + _U1) >> _U1
            grown = exposure + events * _PER_EVENT
        due = grown + (grown >> np.uint64(5))
    return events, exposure, scale, due


@njit(_PAIR(_CODES, _U64, _U64, _U64, _U64, _U64), nogil=True, cache=True, inline="always")
def _first_part(ends, here, length, passed, hazard, most):  # type: ignore[no-untyped-def]
    """The first `length` elements from `here` on, halved until their hazard is at most `most` or one is left.

    Returns how many are left and their hazard. All halves are looked at, since no processor guesses how many it takes.
    """
    if hazard <= most:
        return length, hazard
    halvings = np.uint64(length > _U1)
    for k in range(1, 6):
        half = length >> np.uint64(k)
        large = np.uint64(ends[here + half]) - passed - half > most
        halvings += np.uint64(large) & np.uint64(half > _U1)
    length = length >> halvings
    return length, np.uint64(ends[here + length]) - passed - length


@njit(
    "int64(uint64[::1], int64, int64, int64, uint32[::1], int64, int64, uint64[::1], int64, uint64, uint64,"
    " uint32[::1], uint32[::1], uint64[::1], uint32[::1], int64[::1], uint32[::1])",
    nogil=True,
    cache=True,
    error_model="numpy",
)
def _encode_on(  # type: ignore[no-untyped-def]
    old, elements, width, order, positions, count, until, new, in_place, shift, mask, hazards, contexts, coder, out,
    walk, room
):  # fmt: skip
    """Code a block's chunks before `until`, from where `walk` says; returns a CONTEXTUAL_* status.

    `count` positions are known: all in those chunks, and one behind them unless those are all. `new`: the new block,
    or, if not `in_place`, the new elements packed. `walk`, `room`: stay as they are between two calls for a block.
    """
    element_mask = _ONES >> np.uint64(64 - 8 * width)
    top = np.uint64(8 * width - 1)
    flip = _ZERO if order == 0 else _U1 << top
    floats = _ONES if order == 2 else _ZERO
    low, span, at = coder[CODER_LOW], coder[CODER_RANGE], coder[CODER_AT]
    events, exposure, scale, due = (
        coder[CODER_EVENTS], coder[CODER_EXPOSURE], coder[CODER_SCALE], coder[CODER_NEXT],
    )  # fmt: skip
    full, lines = np.uint64(max(out.size - 64, 0)), 8 * width
    done, chunk, ready, lowest = walk[WALK_DONE], walk[WALK_CHUNK], walk[WALK_READY], walk[WALK_LOWEST]
    chunks, window, ends = room[:TILE], room[TILE : TILE + WINDOW], room[TILE + WINDOW :]
    while done < count and chunk < until:
        if chunk == ready:
            # Tile by tile, so that what is looked at closely is still in the nearest cache.
            ahead = min(elements - chunk * CHUNK, TILE * CHUNK)
            _tile_hazards(old, chunk * CHUNK, ahead, width, shift, mask, hazards, window, lowest, chunks)
            ready = chunk + TILE
        position = np.int64(positions[np.uint64(done)])
        # Chunks without a change, and likely so: one bit each.
        quiet = min(ready, position // CHUNK)
        limit = due - events * _PER_EVENT
        while chunk < quiet:
            if in_place:  # what is compared next comes nearer meanwhile
                for line in range(chunk * lines, chunk * lines + lines, 8):
                    _prefetch(old, line + _COMPARED)
                    _prefetch(new, line + _COMPARED)
            part = np.uint64(chunks[np.uint64(chunk) % _TILE]) & _SUMMED
            y = (part * scale) >> _U16
            if y > _SPLIT:
                break
            span = (span >> _U16) * _likely_no_event(y)
            if span < _LOW_RANGE:
                out[at] = np.uint32(low >> _S32)
                low, span, at = low << _S32, span << _S32, at + _U1
                if at >= full:
                    return np.int64(CONTEXTUAL_FULL)
            exposure += part
            chunk += 1
            if exposure >= limit:
                events, exposure, scale, due = _rescaled(events, exposure, scale, due)
                limit = due - events * _PER_EVENT
        if chunk in (ready, until):
            continue
        hazard = np.uint64(chunks[np.uint64(chunk) % _TILE])
        far = hazard & _FAR != _ZERO
        hazard &= _SUMMED
        start = chunk * CHUNK
        end = min(elements, start + CHUNK)
        chunk += 1
        if WIDE and not far:
            _chunk_ends(old, start * width >> 3, window, shift, ends)
        else:
            _slow_ends(old, start, end, width, shift, mask, hazards, ends)
        most = _SPLIT_LIMIT // scale
        j = start
        passed = _ZERO  # where the interval of element j starts
        while j < end and done < count:
            if at >= full:
                return np.int64(CONTEXTUAL_FULL)
            position = np.int64(positions[np.uint64(done)])
            length, part = _first_part(ends, np.uint64(j - start), np.uint64(end - j), passed, hazard, most)
            e = j + np.int64(length)
            none = _no_event((part * scale) >> _U16)
            if position >= e:
                low, span, at = _put_bit(low, span, at, out, _ZERO, none)
                exposure += part
                hazard -= part
                j = e
                passed = np.uint64(ends[np.uint64(j - start)])
                continue
            low, span, at = _put_bit(low, span, at, out, _U1, none)
            first = np.uint64(ends[np.uint64(position - start)]) - passed
            before = first - np.uint64(position - j)
            u = _element(old, position, width)
            kind = (u >> shift) & mask
            own = np.uint64(hazards[kind])
            if length > _U1:
                unit = span // (part + length)
                low, span, at = _put(low, at, out, unit * first, unit * (own + _U1))
            exposure += before + (own >> _U1)
            events += _U1
            hazard -= before + own
            j = position + 1
            passed = np.uint64(ends[np.uint64(j - start)])
            rank = _rank(u & element_mask, flip, floats, top, element_mask)
            after = _rank(
                _element(new, position if in_place else done, width) & element_mask, flip, floats, top, element_mask
            )
            step = (after - rank) & element_mask
            sign = step >> top
            step = ((step ^ (_ZERO - sign)) + sign) & element_mask
            low, span, at = _put_bit(low, span, at, out, sign, _HALF)
            row = kind * np.uint64(CONTEXTS)
            if step == _U1:
                # Nine in ten steps: the number 0, without the call.
                low, span, at = _put_bit(low, span, at, out, _ZERO, _learn(contexts, row, _ZERO))
            else:
                low, span, at = _put_number(low, span, at, out, contexts, row, step - _U1)
            done += 1
        events, exposure, scale, due = _rescaled(events, exposure, scale, due)
    coder[CODER_LOW], coder[CODER_RANGE], coder[CODER_AT] = low, span, at
    coder[CODER_EVENTS], coder[CODER_EXPOSURE], coder[CODER_SCALE], coder[CODER_NEXT] = events, exposure, scale, due
    walk[WALK_DONE], walk[WALK_CHUNK], walk[WALK_READY] = done, chunk, ready
    return np.int64(CONTEXTUAL_OK)


@njit(
    "int64(uint64[::1], int64, int64, int64, uint32[::1], uint64[::1], uint64, uint64, uint32[::1], uint32[::1],"
    " uint64[::1], uint32[::1])",
    nogil=True,
    cache=True,
    error_model="numpy",
)
def encode_contextual(
    old: Any, elements: Any, width: Any, order: Any, positions: Any, new: Any, shift: Any, mask: Any, hazards: Any,
    contexts: Any, coder: Any, out: Any,
) -> Any:  # fmt: skip
    """Append a block to a coding group; returns a CONTEXTUAL_* status.

    `old`: the block's words; `positions`, `new`: its changes, the new elements packed into words; `hazards` of the 256
    classes; `contexts`: 256 rows of CONTEXTS adaptive bits. CONTEXTUAL_FULL: `out` is too small, all is void.
    """
    room = np.zeros(ROOM, np.uint32)
    walk = np.zeros(WALK_SIZE, np.int64)
    walk[WALK_LOWEST] = _choose_window(old, elements, width, shift, mask, hazards, room[TILE : TILE + WINDOW])
    return _encode_on(
        old, elements, width, order, positions, positions.size, elements, new, 0, shift, mask, hazards, contexts,
        coder, out, walk, room,
    )  # fmt: skip


@njit(
    "int64(int64[:, ::1], int64, int64, uint64, uint64, uint32[::1], uint64[::1], uint32[::1], uint32[::1],"
    " uint64[::1], uint32[::1])",
    nogil=True,
    cache=True,
    error_model="numpy",
)
def encode_blocks(
    blocks: Any, width: Any, order: Any, shift: Any, mask: Any, positions: Any, new: Any, hazards: Any, contexts: Any,
    coder: Any, out: Any,
) -> Any:  # fmt: skip
    """As `encode_contextual` for several blocks, whose changes follow one another in `positions` and `new`.

    `blocks`, a row for each: address of its old words, their number, elements, changes, words in `new`, and whether a
    tensor starts with it.
    """
    at, word = np.int64(0), np.int64(0)
    for i in range(blocks.shape[0]):
        if blocks[i, 5]:
            start_tensor(coder)
        old = carray(_pointer(blocks[i, 0]), (blocks[i, 1],))
        here, elements = positions[at : at + blocks[i, 3]], new[word : word + blocks[i, 4]]
        at += blocks[i, 3]
        word += blocks[i, 4]
        if encode_contextual(
            old, blocks[i, 2], width, order, here, elements, shift, mask, hazards, contexts, coder, out
        ):
            return np.int64(CONTEXTUAL_FULL)
    return np.int64(CONTEXTUAL_OK)


@njit(
    "void(int64[:, ::1], int64, uint64, uint64, uint32[::1], int64[:, ::1])",
    nogil=True,
    cache=True,
    error_model="numpy",
)
def sample_classes(blocks: Any, width: Any, shift: Any, mask: Any, positions: Any, counts: Any) -> None:
    """Add to counts[0] the classes of all elements, to counts[1] those of the changed ones, from the sample that
    `compare` takes; of the blocks in whose sample something changed.

    `blocks`, a row for each, begins with the addresses of its old and new words, their number, and its elements.
    """
    tables = np.zeros((5, 256), np.int64)
    for i in range(blocks.shape[0]):
        words, elements = blocks[i, 2], blocks[i, 3]
        old = carray(_pointer(blocks[i, 0]), (words,))
        new = carray(_pointer(blocks[i, 1]), (words,))
        every, thin = sampling(elements), _thinned(elements)
        tables[:] = 0
        changed = np.int64(0)
        for first in range(0, elements, SAMPLE * every):
            end: Any = min(elements, first + SAMPLE)
            found = _find_in(old, new, width, first * width >> 3, (end * width + 7) >> 3, 0, positions)
            for k in range(found):
                tables[4, (_element(old, np.int64(positions[k]), width) >> shift) & mask] += 1
            changed += found
            for start in range(first, end, CHUNK * thin):
                _count_classes(old, start, min(end, start + CHUNK), width, shift, mask, tables)
        if changed:
            for c in range(256):
                counts[0, c] += (tables[0, c] + tables[1, c] + tables[2, c] + tables[3, c]) * every * thin
                counts[1, c] += tables[4, c] * every


CONTEXTUAL_OTHER = 3
ROW_TENSOR = 4
# Where more than one element in so many changes, positions may not be the best: sizes have to be compared.
SPARSE_FROM = 16


@njit(
    "int64(int64[:, ::1], uint64[:, ::1], int64, int64, uint64, uint64, int64[::1], uint32[::1], uint32[::1],"
    " uint64[::1], uint32[::1], uint32[::1], int64[::1], uint64[:, ::1])",
    nogil=True,
    cache=True,
    error_model="numpy",
)
def compare_and_encode(
    blocks: Any, seeds: Any, width: Any, order: Any, shift: Any, mask: Any, counts: Any, hazards: Any, contexts: Any,
    coder: Any, positions: Any, out: Any, found: Any, change: Any,
) -> Any:  # fmt: skip
    """Compare a group's blocks and code their changes in one pass; returns a CONTEXTUAL_* status.

    `blocks`, a row for each: addresses of its old and new words, their number, elements, a number for its tensor, and
    `piece_bytes`, `row0`, `word0` as sums take them; `seeds`: those of its tensor's sums. `counts`: of a sample's
    elements, by class. `positions`: room for a block's. Filled are `found`, the changes of each block, and `change`,
    what they do to the two sums. CONTEXTUAL_OTHER: a block changes too much or too regularly, or there is no room; all
    is void.
    """
    batch = np.empty(4 * _BATCH, np.uint64)
    room = np.zeros(ROOM, np.uint32)
    walk = np.zeros(WALK_SIZE, np.int64)
    walk[WALK_LOWEST] = _window_of(counts, mask, hazards, room[TILE : TILE + WINDOW])
    tensor = np.int64(-1)
    for i in range(blocks.shape[0]):
        words, elements, piece, row0, word0 = blocks[i, 2], blocks[i, 3], blocks[i, 5], blocks[i, 6], blocks[i, 7]
        old = carray(_pointer(blocks[i, 0]), (words,))
        new = carray(_pointer(blocks[i, 1]), (words,))
        old_bytes, new_bytes = old.view(np.uint8), new.view(np.uint8)
        seed_a, seed_b = seeds[i, 0], seeds[i, 1]
        held, last = np.int64(0), np.int64(-1)
        count, noted = np.int64(0), np.int64(0)
        limit = elements // SPARSE_FROM
        for first in range(0, words, _COMPARED):
            end: Any = min(words, first + _COMPARED)
            count = _find_in(old, new, width, first, end, count, positions)
            if count == noted:
                continue
            if count > limit:
                return np.int64(CONTEXTUAL_OTHER)
            held, last = _batch_changes(
                old_bytes, new_bytes, positions, noted, count, width, piece, row0, word0, seed_a, seed_b, batch, held,
                last, change[i],
            )  # fmt: skip
            if noted == 0:
                if blocks[i, 4] != tensor:
                    tensor = blocks[i, 4]
                    start_tensor(coder)
                walk[:WALK_LOWEST] = 0
            noted = count
            until = np.int64(positions[count - 1]) // CHUNK
            if _encode_on(
                old, elements, width, order, positions, count, until, new, 1, shift, mask, hazards, contexts, coder,
                out, walk, room,
            ):  # fmt: skip
                return np.int64(CONTEXTUAL_OTHER)
        found[i] = count
        if count == 0:
            continue
        if is_regular(positions[:count]):
            return np.int64(CONTEXTUAL_OTHER)
        _sum_batch(batch, held, change[i])
        if _encode_on(
            old, elements, width, order, positions, count, elements, new, 1, shift, mask, hazards, contexts, coder, out,
            walk, room,
        ):  # fmt: skip
            return np.int64(CONTEXTUAL_OTHER)
    return np.int64(CONTEXTUAL_OK)


@njit(
    "int64(uint64[::1], int64, int64, int64, uint64, uint64, uint32[::1], uint32[::1], uint64[::1], uint32[::1],"
    " uint32[::1], uint8[::1])",
    nogil=True,
    cache=True,
    error_model="numpy",
)
def decode_contextual(
    old: Any, elements: Any, width: Any, order: Any, shift: Any, mask: Any, hazards: Any, contexts: Any,
    coder: Any, data: Any, positions: Any, new: Any,
) -> Any:  # fmt: skip
    """Undo `encode_contextual`: fill `positions` and `new` (`width` bytes each); returns a CONTEXTUAL_* status."""
    element_mask = _ONES >> np.uint64(64 - 8 * width)
    top = np.uint64(8 * width - 1)
    flip = _ZERO if order == 0 else _U1 << top
    floats = _ONES if order == 2 else _ZERO
    code, span, at = coder[CODER_LOW], coder[CODER_RANGE], coder[CODER_AT]
    events, exposure, scale, due = (
        coder[CODER_EVENTS], coder[CODER_EXPOSURE], coder[CODER_SCALE], coder[CODER_NEXT],
    )  # fmt: skip
    done, count = np.int64(0), np.int64(positions.size)
    chunk, last = np.int64(0), (elements + CHUNK - 1) // CHUNK
    ready = np.int64(0)
    chunks = np.empty(TILE, np.uint32)
    window = np.empty(WINDOW, np.uint32)
    ends = np.zeros(CHUNK + 1, np.uint32)
    lowest = _choose_window(old, elements, width, shift, mask, hazards, window)
    size = np.uint64(data.size)
    while done < count:
        if chunk == last or at > size + _U1:
            return np.int64(CONTEXTUAL_DAMAGED)
        if chunk == ready:
            # Tile by tile, so that what is looked at closely is still in the nearest cache.
            ahead = min(elements - chunk * CHUNK, TILE * CHUNK)
            _tile_hazards(old, chunk * CHUNK, ahead, width, shift, mask, hazards, window, lowest, chunks)
            ready = min(last, chunk + TILE)
        # Chunks without a change, and likely so: one bit each.
        limit = due - events * _PER_EVENT
        while chunk < ready:
            part = np.uint64(chunks[np.uint64(chunk) % _TILE]) & _SUMMED
            y = (part * scale) >> _U16
            if y > _SPLIT:
                break
            zero = (span >> _U16) * _likely_no_event(y)
            if code >= zero:
                break
            span = zero
            if span < _LOW_RANGE:
                code = code << _S32
                if at < size:
                    code |= np.uint64(data[at])
                at += _U1
                span = span << _S32
            exposure += part
            chunk += 1
            if exposure >= limit:
                events, exposure, scale, due = _rescaled(events, exposure, scale, due)
                limit = due - events * _PER_EVENT
        if chunk == ready:
            continue
        hazard = np.uint64(chunks[np.uint64(chunk) % _TILE])
        far = hazard & _FAR != _ZERO
        hazard &= _SUMMED
        start = chunk * CHUNK
        end = min(elements, start + CHUNK)
        chunk += 1
        if WIDE and not far:
            _chunk_ends(old, start * width >> 3, window, shift, ends)
        else:
            _slow_ends(old, start, end, width, shift, mask, hazards, ends)
        most = _SPLIT_LIMIT // scale
        j = start
        passed = _ZERO  # where the interval of element j starts
        while j < end and done < count:
            length, part = _first_part(ends, np.uint64(j - start), np.uint64(end - j), passed, hazard, most)
            e = j + np.int64(length)
            code, span, at, bit = _take_bit(code, span, at, data, _no_event((part * scale) >> _U16))
            if bit == _ZERO:
                exposure += part
                hazard -= part
                j = e
                passed = np.uint64(ends[np.uint64(j - start)])
                continue
            position, before, unit = j, _ZERO, _U1
            if length > _U1:
                unit = span // (part + length)
                place = code // unit
                if place >= part + length:
                    return np.int64(CONTEXTUAL_DAMAGED)
                position = start + _passed(ends, passed + place)
                before = np.uint64(ends[np.uint64(position - start)]) - passed - np.uint64(position - j)
            u = _element(old, position, width)
            kind = (u >> shift) & mask
            own = np.uint64(hazards[kind])
            if length > _U1:
                code -= unit * (before + np.uint64(position - j))
                span = unit * (own + _U1)
                if span < _LOW_RANGE:
                    code = code << _S32
                    if at < size:
                        code |= np.uint64(data[at])
                    at += _U1
                    span = span << _S32
            exposure += before + (own >> _U1)
            events += _U1
            hazard -= before + own
            j = position + 1
            passed = np.uint64(ends[np.uint64(j - start)])
            code, span, at, sign = _take_sign(code, span, at, data)
            row = kind * np.uint64(CONTEXTS)
            # Nine in ten steps are the number 0: only the others take the call.
            code, span, at, number = _take_bit(code, span, at, data, np.uint64(contexts[row]) >> _U8)
            _learn(contexts, row, number)
            if number != _ZERO:
                code, span, at, number = _take_number(code, span, at, data, contexts, row, 1)
            if number >= (element_mask >> _U1) + sign:
                return np.int64(CONTEXTUAL_DAMAGED)
            step = ((number + _U1) ^ (_ZERO - sign)) + sign
            rank = _rank(u & element_mask, flip, floats, top, element_mask)
            after = _unrank((rank + step) & element_mask, flip, floats, top, element_mask)
            if width == 2:
                _put_half(new, done, after)
            else:
                for b in range(width):
                    new[done * width + b] = np.uint8((after >> np.uint64(8 * b)) & _FF)
            positions[done] = np.uint32(position)
            done += 1
        events, exposure, scale, due = _rescaled(events, exposure, scale, due)
    coder[CODER_LOW], coder[CODER_RANGE], coder[CODER_AT] = code, span, at
    coder[CODER_EVENTS], coder[CODER_EXPOSURE], coder[CODER_SCALE], coder[CODER_NEXT] = events, exposure, scale, due
    return np.int64(CONTEXTUAL_OK)


@njit(
    "int64(int64[:, ::1], uint64[:, ::1], int64, int64, uint64, uint64, uint32[::1], uint32[::1], uint64[::1],"
    " uint32[::1], uint32[::1], uint64[::1], uint64[:, ::1])",
    nogil=True,
    cache=True,
    error_model="numpy",
)
def decode_blocks(
    blocks: Any, seeds: Any, width: Any, order: Any, shift: Any, mask: Any, hazards: Any, contexts: Any, coder: Any,
    data: Any, positions: Any, new: Any, change: Any,
) -> Any:  # fmt: skip
    """As `decode_contextual` for several blocks, whose changes follow one another in `positions` and `new` (whole words
    for each block); what each does to the sums goes to `change`.

    `blocks`, a row for each: address of its old words, their number, elements, changes, words in `new`, whether a
    tensor starts with it, and `piece_bytes`, `row0`, `word0` as sums take them. `seeds`: those of its tensor's sums.
    """
    at, word = np.int64(0), np.int64(0)
    for i in range(blocks.shape[0]):
        if blocks[i, 5]:
            start_tensor(coder)
        old = carray(_pointer(blocks[i, 0]), (blocks[i, 1],))
        here, elements = positions[at : at + blocks[i, 3]], new[word : word + blocks[i, 4]]
        at += blocks[i, 3]
        word += blocks[i, 4]
        if decode_contextual(
            old, blocks[i, 2], width, order, shift, mask, hazards, contexts, coder, data, here, elements.view(np.uint8)
        ):
            return np.int64(CONTEXTUAL_DAMAGED)
        sum_elements(
            old, elements, here, width, blocks[i, 6], blocks[i, 7], blocks[i, 8], seeds[i, 0], seeds[i, 1], change[i]
        )
    return np.int64(CONTEXTUAL_OK)


@njit("void(uint8[::1], int64, int64, int64, uint32[::1], uint64[::1], uint32[::1])", nogil=True, cache=True)
def encode_profile(levels: Any, first: Any, last: Any, classes: Any, contexts: Any, coder: Any, out: Any) -> None:
    """Append the levels of the classes first ... last; `out` has room. `contexts`: a row for this only."""
    low, span, at = coder[CODER_LOW], coder[CODER_RANGE], coder[CODER_AT]
    if classes > 1:
        bounds = np.uint64(first) << _U8 | np.uint64(last)
        for step in range(16):
            low, span, at = _put_bit(low, span, at, out, (bounds >> np.uint64(15 - step)) & _U1, _HALF)
    previous = np.int64(FIRST_LEVEL)
    for c in range(first, last + 1):
        moved = np.int64(levels[c]) - previous
        previous = np.int64(levels[c])
        number = np.uint64(2 * moved - 1) if moved > 0 else np.uint64(-2 * moved)
        low, span, at = _put_number(low, span, at, out, contexts, _ZERO, number)
    coder[CODER_LOW], coder[CODER_RANGE], coder[CODER_AT] = low, span, at


@njit("int64(uint32[::1], int64, uint32[::1], uint64[::1], uint32[::1])", nogil=True, cache=True)
def decode_profile(hazards: Any, classes: Any, contexts: Any, coder: Any, data: Any) -> Any:
    """Undo `encode_profile`, straight to the hazards of all 256 classes; returns a CONTEXTUAL_* status."""
    code, span, at = coder[CODER_LOW], coder[CODER_RANGE], coder[CODER_AT]
    bounds = _ZERO
    if classes > 1:
        for _ in range(16):
            code, span, at, bit = _take_bit(code, span, at, data, _HALF)
            bounds = (bounds << _U1) | bit
    first, last = np.int64(bounds >> _U8), np.int64(bounds & _FF)
    if first > last or last >= classes:
        return np.int64(CONTEXTUAL_DAMAGED)
    level = np.int64(FIRST_LEVEL)
    for c in range(256):
        if first <= c <= last:
            code, span, at, number = _take_number(code, span, at, data, contexts, _ZERO, 0)
            if number >= np.uint64(2 * HAZARDS):
                return np.int64(CONTEXTUAL_DAMAGED)
            half = np.int64((number + _U1) >> _U1)
            level += half if number & _U1 else -half
            if level < 0 or level >= HAZARDS:
                return np.int64(CONTEXTUAL_DAMAGED)
            hazards[c] = HAZARD_TABLE[level]
        else:
            hazards[c] = HAZARD_TABLE[0]
    coder[CODER_LOW], coder[CODER_RANGE], coder[CODER_AT] = code, span, at
    return np.int64(CONTEXTUAL_OK)


@njit("int64(uint64[::1], uint32[::1])", nogil=True, cache=True)
def finish_group(coder: Any, out: Any) -> Any:
    """End the encoder's stream: the next multiple of 2^32 lies in every interval. Returns the words written."""
    low, at = coder[CODER_LOW], coder[CODER_AT]
    ends = low + (_LOW_RANGE - _U1)
    if ends < low:
        back = at - _U1
        while True:
            out[back] += np.uint32(1)
            if out[back] != np.uint32(0):
                break
            back -= _U1
    out[at] = np.uint32(ends >> _S32)
    return np.int64(at + _U1)
