"""Decoding positional blocks (docs/format/patch.md, section 5): Rice codes to positions, value codes to elements.

A code begins where the one before it ends, so a stream can't be cut anywhere. But all that a stretch of bits has to
know of what lies before it is how many of its first bits belong to the code before: at most r. So every segment of bits
is walked once for each of these r + 1 states, side by side with all others. One walk per block over its segments, not
over its codes, then tells in which state each one is entered and after how many codes; and each one is decoded for
real. With t the bit of the block where the unary part of code i ends, and L the sum of the low bits of the codes up to
i, its position is i + ((t - i (r + 1)) << r) + L, so no code waits for the position before it.

Nothing is believed: whatever the bits say, nothing outside of a block is read or written, and what the CPU's decoder
refuses is refused here, for the same reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from . import numbers
from .changes import integers
from .place import where_it_lies
from .rounding import unsigned

Numbers = NDArray[np.int64]
SEGMENT_BITS = 256
LANES = 256  # of a program that walks segments in every state
WALKS = 128  # segments of a program that decodes them, blocks of one that walks over their segments
TILE = 1024  # changes of a program that makes elements
_WORD_BYTES = 8
SEGMENT = tl.constexpr(SEGMENT_BITS)
SHORT = tl.constexpr(32)  # so many 1-bits are taken at once
LARGE = tl.constexpr(1 << 62)
SIGNED, FLOAT = tl.constexpr(numbers.SIGNED), tl.constexpr(numbers.FLOAT)
# A block's numbers on the device: those that the caller gives, and where its bits, changes and segments begin.
AT, ELEMENTS, CHANGED, RICE, BITS, LITERALS, BEGIN, BEFORE, SEGMENTS, COLUMNS = (
    tl.constexpr(number) for number in range(10)
)


@dataclass(frozen=True, slots=True)
class Decoded:
    """Changes of blocks: `positions` (int64, within the old elements, block after block and ascending in each), and the
    `new` elements there.

    `status`: numbers.DECODED, or what the first damaged block suffers from; then the rest means nothing.
    """

    positions: torch.Tensor
    new: torch.Tensor
    status: int


# --- Positions --------------------------------------------------------------------------------------------------------


@triton.jit
def _code(words, size, start, begin, bits, r, at, going):
    """Read on from bit `at` of a segment, in the unary part of a code; the segment begins at bit `begin` of its block,
    which begins at bit `start`.

    Returns whether a code ends inside the block, its unary part inside the segment; its low bits; the bit of the
    segment with which its unary part ends; the bits behind it, up to 12; and where to read on: behind it, further on in
    its unary part, or at the segment's end.
    """
    bit = start + begin + at
    word = bit >> 6
    first = tl.load(words + word, mask=going & (word < size), other=0).to(tl.uint64, bitcast=True)
    second = tl.load(words + word + 1, mask=going & (word + 1 < size), other=0).to(tl.uint64, bitcast=True)
    shift = (bit & 63).to(tl.uint64)
    window = (first >> shift) | ((second << 1) << (63 - shift))
    low = window.to(tl.uint32)
    lowest = (low + 1) & (low ^ 0xFFFFFFFF)  # the lowest 0-bit, a power of two: as a float its exponent is exact
    ones = ((lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127).to(tl.int64)
    ones = tl.where(lowest == 0, SHORT, ones)
    stop = at + ones
    ended = lowest != 0
    after = stop + 1 + r
    taken = going & ended & (stop < SEGMENT) & (begin + after <= bits)
    rest = window >> (ones + 1).to(tl.uint64)
    value = (rest & ((1 << r) - 1).to(tl.uint64)).to(tl.int64)
    beyond = tl.where(ended, SEGMENT, tl.minimum(stop, SEGMENT))
    return taken, value, stop, rest >> r.to(tl.uint64), tl.where(going, tl.where(taken, after, beyond), at)


@triton.jit
def _transitions(words, size, blocks, owners, segments, steps, found, STATES: tl.constexpr, LANES: tl.constexpr):
    """For each segment, and each number of its first bits that belong to the code before: how many bits of the next
    segment its last code takes, how many codes end their unary part in it, and the sum of their low bits.
    """
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    segment = lane // STATES
    inside = segment < segments
    row = blocks + tl.load(owners + segment, mask=inside, other=0) * COLUMNS
    r, bits, start = tl.load(row + RICE), tl.load(row + BITS), tl.load(row + BEGIN)
    begin = (segment - tl.load(row + SEGMENTS)) * SEGMENT
    at = lane - segment * STATES
    inside = inside & (at <= r)
    codes = tl.zeros((LANES,), tl.int64)
    total = tl.zeros((LANES,), tl.int64)
    for _ in range(0, steps):
        taken, low, _, _, at = _code(words, size, start, begin, bits, r, at, inside & (at < SEGMENT))
        codes += taken.to(tl.int64)
        total += tl.where(taken, low, 0)
    # What lies behind a block's last change is of no use, and may not have been looked at to its end.
    tl.store(found + lane, tl.maximum(at - SEGMENT, 0) | (codes << 8) | (total << 32), mask=inside)


@triton.jit
def _entries(blocks, count, longest, transitions, entries, status, STATES: tl.constexpr, WALKS: tl.constexpr):
    """For each segment of a block: the state in which it is entered, the codes before it, the sum of their low bits."""
    block = tl.program_id(0).to(tl.int64) * WALKS + tl.arange(0, WALKS)
    inside = block < count
    row = blocks + tl.where(inside, block, 0) * COLUMNS
    segment = tl.load(row + SEGMENTS)
    end = segment + (tl.load(row + BITS) + SEGMENT - 1) // SEGMENT
    state = tl.zeros((WALKS,), tl.int64)
    codes = tl.zeros((WALKS,), tl.int64)
    total = tl.zeros((WALKS,), tl.int64)
    for _ in range(0, longest):
        going = inside & (segment < end)
        tl.store(entries + 3 * segment, state, mask=going)
        tl.store(entries + 3 * segment + 1, codes, mask=going)
        tl.store(entries + 3 * segment + 2, total, mask=going)
        found = tl.load(transitions + segment * STATES + state, mask=going, other=0)
        state = found & 0xFF
        codes += (found >> 8) & 0xFFFFFF
        total += found >> 32
        segment += 1
    # The first damaged block counts, and in it positions before values.
    damaged = inside & (codes < tl.load(row + CHANGED))
    tl.atomic_min(status, tl.min(tl.where(damaged, 2 * block, LARGE), axis=0))


@triton.jit
def _positions(words, size, blocks, owners, segments, steps, entries, positions, status, WALKS: tl.constexpr):
    """Decode segments from where they are entered."""
    segment = tl.program_id(0).to(tl.int64) * WALKS + tl.arange(0, WALKS)
    inside = segment < segments
    block = tl.load(owners + segment, mask=inside, other=0)
    row = blocks + block * COLUMNS
    r, bits, start, changed = tl.load(row + RICE), tl.load(row + BITS), tl.load(row + BEGIN), tl.load(row + CHANGED)
    first, elements, before = tl.load(row + AT), tl.load(row + ELEMENTS), tl.load(row + BEFORE)
    begin = (segment - tl.load(row + SEGMENTS)) * SEGMENT
    at = tl.load(entries + 3 * segment, mask=inside, other=0)
    code = tl.load(entries + 3 * segment + 1, mask=inside, other=0)
    total = tl.load(entries + 3 * segment + 2, mask=inside, other=0)
    damaged = tl.zeros((WALKS,), tl.int32)
    for _ in range(0, steps):
        going = inside & (at < SEGMENT) & (code < changed)
        taken, low, stop, rest, at = _code(words, size, start, begin, bits, r, at, going)
        total += tl.where(taken, low, 0)
        position = code + ((begin + stop - code * (r + 1)) << r) + total
        fits = position < elements
        tl.store(positions + before + code, first + position, mask=taken & fits)
        # Behind the last code lie fewer than 8 bits, zeros.
        left = bits - (begin + stop + 1 + r)
        padding = rest & ((1 << tl.minimum(tl.maximum(left, 0), 7)) - 1).to(tl.uint64)
        ends = (code < changed - 1) | ((left < 8) & (padding == 0))
        damaged += (taken & ((fits & ends) == 0)).to(tl.int32)
        code += taken.to(tl.int64)
    tl.atomic_min(status, tl.min(tl.where(damaged > 0, 2 * block, LARGE), axis=0))


# --- Elements ---------------------------------------------------------------------------------------------------------


@triton.jit
def _rank(bits, ORDER: tl.constexpr, WIDTH: tl.constexpr):
    """Ranks of elements (uint64)."""
    TOP: tl.constexpr = 8 * WIDTH - 1
    sign = tl.full(bits.shape, 1 << TOP, tl.uint64)
    if ORDER == FLOAT:
        return tl.where(bits >> TOP == 1, bits ^ tl.full(bits.shape, (2 << TOP) - 1, tl.uint64), bits ^ sign)
    elif ORDER == SIGNED:
        return bits ^ sign
    else:
        return bits


@triton.jit
def _unrank(rank, ORDER: tl.constexpr, WIDTH: tl.constexpr):
    """Undo `_rank`."""
    TOP: tl.constexpr = 8 * WIDTH - 1
    sign = tl.full(rank.shape, 1 << TOP, tl.uint64)
    if ORDER == FLOAT:
        return tl.where(rank >> TOP == 1, rank ^ sign, rank ^ tl.full(rank.shape, (2 << TOP) - 1, tl.uint64))
    elif ORDER == SIGNED:
        return rank ^ sign
    else:
        return rank


@triton.jit
def _elements(
    old_ptr, positions, values, literals, literals_to, given, blocks, tiles, news, status,
    ORDER: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """New elements from the old ones and the value codes; `literals_to`: how many there are up to each change."""
    program = tl.program_id(0).to(tl.int64)
    block = tl.load(tiles + 2 * program)
    row = blocks + block * COLUMNS
    first, elements, changed = tl.load(row + AT), tl.load(row + ELEMENTS), tl.load(row + CHANGED)
    before = tl.load(row + BEFORE)
    index = tl.load(tiles + 2 * program + 1) + tl.arange(0, TILE)
    inside = index < changed
    change = before + index
    place = tl.load(positions + change, mask=inside, other=0)
    known = inside & (place >= first) & (place < first + elements)
    ONES: tl.constexpr = (1 << (8 * WIDTH)) - 1
    mask = tl.full(place.shape, ONES, tl.uint64)
    rank = _rank(unsigned(tl.load(old_ptr + place, mask=known, other=0)).to(tl.uint64), ORDER, WIDTH)
    value = tl.load(values + change, mask=inside, other=1).to(tl.uint64)
    is_literal = value == 0
    number = tl.load(literals_to + change, mask=inside, other=0) - 1
    readable = inside & is_literal & (number < given)
    literal = unsigned(tl.load(literals + number, mask=readable, other=0)).to(tl.uint64)
    half = (value + 1) >> 1
    stepped = tl.where((value & 1) == 1, rank + half, rank - half) & mask
    new = tl.where(is_literal, literal, _unrank(stepped, ORDER, WIDTH))
    tl.store(news + change, new.to(news.dtype.element_ty), mask=inside)
    # A literal that a step could have said is refused; so is a block with more literals, or fewer, than promised.
    distance = (_rank(literal, ORDER, WIDTH) - rank) & mask
    near = is_literal & ((distance <= 127) | (distance > mask - 127))
    end = tl.load(literals_to + before + changed - 1)
    begin = tl.load(literals_to + before - 1, mask=before > 0, other=0)
    wrong = end - begin != tl.load(row + LITERALS)
    damaged = inside & (near | (value == 255) | wrong)
    tl.atomic_min(status, tl.min(tl.where(damaged, 2 * block + 1, LARGE), axis=0))


# --- A batch of blocks ------------------------------------------------------------------------------------------------


@where_it_lies
def decode_positional(
    old: torch.Tensor, codes: torch.Tensor, values: torch.Tensor, literals: torch.Tensor, blocks: Numbers, order: int
) -> Decoded:
    """Changes of positional blocks of one dtype; writes nothing.

    `old`: dense elements of w bytes, in which the blocks lie. `codes`, `values` (bytes) and `literals` (elements of w
    bytes): those of the blocks, one after the other. `blocks`: int64 on the host, a row for each with the columns
    numbers.BLOCK_COLUMNS; every block has changes. `order`: numbers.UNSIGNED, SIGNED or FLOAT, by which elements rank.

    Reads codes twice, 1 + w bytes and a 32-byte sector of the old elements a change, and writes 8 + w for each; besides
    it writes and reads 8 bytes for each state of each SEGMENT_BITS, and 8 a change for the numbers of literals. One
    wait for the device: whoever goes on must know whether the blocks were sound.
    """
    flat, table = integers(old).view(-1), _laid_out(blocks)
    count = int(blocks[:, numbers.CHANGED].sum())
    width, device = flat.element_size(), flat.device
    positions = torch.zeros(count, dtype=torch.int64, device=device)
    new = torch.empty(count, dtype=flat.dtype, device=device)
    if count == 0:
        return Decoded(positions, new, numbers.DECODED)
    there = torch.from_numpy(table).to(device)
    status = torch.full((1,), LARGE.value, dtype=torch.int64, device=device)
    _decode_positions(codes, blocks, there, positions, status)
    literals_to = torch.cumsum(values == 0, 0)
    tiles = _tiles(blocks[:, numbers.CHANGED], device)
    _elements[(len(tiles),)](
        flat, positions, values, integers(literals), literals_to, literals.numel(), there, tiles, new, status,
        ORDER=order, WIDTH=width, TILE=TILE,
    )  # fmt: skip
    found = int(status)
    return Decoded(positions, new, numbers.DECODED if found == LARGE.value else 1 + found % 2)


def _decode_positions(
    codes: torch.Tensor, blocks: Numbers, there: torch.Tensor, positions: torch.Tensor, status: torch.Tensor
) -> None:
    words = torch.zeros(triton.cdiv(codes.numel(), _WORD_BYTES), dtype=torch.int64, device=codes.device)
    words.view(torch.uint8)[: codes.numel()] = codes
    of_blocks = _segments(blocks)
    segments = int(of_blocks.sum())
    if not segments:
        status.zero_()
        return
    rice, changed = blocks[:, numbers.RICE], blocks[:, numbers.CHANGED]
    states = triton.next_power_of_2(int(rice.max()) + 1)
    # A step goes on by a code, or by SHORT bits of a unary part; nobody needs more codes than there are changes.
    steps = 1 + min(SEGMENT_BITS // (int(rice.min()) + 1), int(changed.max()) + SEGMENT_BITS // SHORT.value)
    owners = torch.from_numpy(np.repeat(np.arange(len(blocks)), of_blocks)).to(codes.device)
    transitions = torch.empty(segments * states, dtype=torch.int64, device=codes.device)
    entries = torch.empty(segments * 3, dtype=torch.int64, device=codes.device)
    _transitions[(triton.cdiv(segments * states, LANES),)](
        words, words.numel(), there, owners, segments, steps, transitions, STATES=states, LANES=LANES
    )
    _entries[(triton.cdiv(len(blocks), WALKS),)](
        there, len(blocks), int(of_blocks.max()), transitions, entries, status, STATES=states, WALKS=WALKS
    )
    _positions[(triton.cdiv(segments, WALKS),)](
        words, words.numel(), there, owners, segments, steps, entries, positions, status, WALKS=WALKS
    )


def _segments(blocks: Numbers) -> Numbers:
    """How many segments each block's codes take."""
    return -(-8 * blocks[:, numbers.CODE_BYTES] // SEGMENT_BITS)


def _laid_out(blocks: Numbers) -> Numbers:
    """The blocks' numbers as the kernels take them."""
    table = np.empty((len(blocks), COLUMNS.value), np.int64)
    table[:, : blocks.shape[1]] = blocks
    bits = table[:, BITS.value] = 8 * blocks[:, numbers.CODE_BYTES]
    parts = bits, blocks[:, numbers.CHANGED], _segments(blocks)
    for column, sizes in zip((BEGIN, BEFORE, SEGMENTS), parts, strict=True):
        table[:, column.value] = np.cumsum(sizes) - sizes
    return table


def _tiles(changed: Numbers, device: Any) -> torch.Tensor:
    """(block, first of its changes) for each program that takes TILE changes of one block."""
    programs = -(-changed // TILE)
    block = np.repeat(np.arange(len(changed)), programs)
    first = (np.arange(len(block)) - np.repeat(np.cumsum(programs) - programs, programs)) * TILE
    return torch.from_numpy(np.stack([block, first], axis=1)).to(device)
