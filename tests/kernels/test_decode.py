"""Decoding positional blocks: bit for bit on every side, and what the CPU's decoder refuses every side refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from kernels import numbers
from mailboat import compiled
from mailboat.patch.format import rice_parameter
from tests.kernels.sides import Host, Side

ORDERS = {"unsigned": numbers.UNSIGNED, "signed": numbers.SIGNED, "float": numbers.FLOAT}
WIDTHS = [np.uint8, np.uint16, np.uint32, np.uint64]


@dataclass(frozen=True)
class Block:
    """A block's old and new elements, where they differ, and its bytes of the streams."""

    old: np.ndarray
    new: np.ndarray
    positions: np.ndarray
    order: int
    codes: np.ndarray
    values: np.ndarray
    literals: np.ndarray

    @property
    def row(self) -> list[int]:
        """Its numbers, without where it begins."""
        count = self.values.size
        return [self.old.size, count, rice_parameter(self.old.size, count), self.codes.size, self.literals.size]


def block(old: np.ndarray, new: np.ndarray, order: int) -> Block:
    """Encoded by the library."""
    positions = np.flatnonzero(old != new).astype(np.uint32)
    width = old.itemsize
    r = rice_parameter(old.size, positions.size)
    codes = np.zeros(int(compiled.rice_bits(positions, r)) // 8 + 1, np.uint8)
    codes = codes[: compiled.rice_encode(positions, r, codes)]
    values, literals = np.zeros(positions.size, np.uint8), np.zeros(positions.size * width, np.uint8)
    words = [np.zeros(-(-old.nbytes // 8), np.uint64) for _ in range(2)]
    for held, side in zip(words, (old, new), strict=True):
        held.view(np.uint8)[: old.nbytes] = side.view(np.uint8)
    count = compiled.encode_values(*words, positions, width, order, values, literals)
    return Block(old, new, positions, order, codes, values, literals[: count * width].view(old.dtype))


def moved(elements: int, dtype: type, changed: int, order: int, seed: int = 0, far: float = 0.2) -> Block:
    """Random elements, `changed` of which move, some of them farther than a step says."""
    generator = np.random.default_rng(seed)
    old = generator.integers(0, np.iinfo(dtype).max, elements, dtype=dtype, endpoint=True)
    new = old.copy()
    at = generator.choice(elements, changed, replace=False)
    new[at] += generator.integers(1, 60, changed).astype(dtype)
    distant = generator.random(changed) < far
    new[at[distant]] = ~old[at[distant]]
    return block(old, new, order)


def decoded(side: Side, blocks: Sequence[Block]) -> tuple[np.ndarray, np.ndarray, int]:
    """What a side makes of blocks that lie a few elements apart, in another order than in the streams."""
    places, room = [], 3
    for part in reversed(blocks):
        places.insert(0, room)
        room += part.old.size + 5
    old = np.zeros(room, blocks[0].old.dtype)
    for place, part in zip(places, blocks, strict=True):
        old[place : place + part.old.size] = part.old
    codes, values, literals = (
        np.concatenate([getattr(part, name) for part in blocks]) for name in ("codes", "values", "literals")
    )
    rows = np.array([[place, *part.row] for place, part in zip(places, blocks, strict=True)], np.int64)
    found = side.decode_positional(old, codes, values, literals, rows.view(Host), blocks[0].order)
    starts = np.repeat(places, rows[:, numbers.CHANGED])
    return found.positions - starts if not found.status else found.positions, found.new, found.status


def check(side: Side, blocks: Sequence[Block]) -> None:
    positions, new, status = decoded(side, blocks)
    assert status == numbers.DECODED
    np.testing.assert_array_equal(positions, np.concatenate([part.positions for part in blocks]))
    expected = np.concatenate([part.new[part.positions] for part in blocks])
    np.testing.assert_array_equal(new.view(expected.dtype), expected)


@pytest.mark.parametrize(
    ("dtype", "order"), [*((dtype, "float") for dtype in WIDTHS), (np.uint16, "unsigned"), (np.uint64, "signed")]
)
def test_elements_of_every_width_and_order(side: Side, dtype: type, order: str) -> None:
    check(side, [moved(1201, dtype, 60, ORDERS[order])])


@pytest.mark.parametrize(
    ("elements", "changed"), [(1, 1), (2, 1), (77, 77), (4096, 64), (1000, 480), (70001, 3), (1 << 20, 1)]
)
def test_blocks_of_every_density(side: Side, elements: int, changed: int) -> None:
    check(side, [moved(elements, np.uint8, changed, numbers.UNSIGNED, seed=elements)])


@pytest.mark.parametrize("where", [[*range(60), 9999], [0, *range(9960, 10000)], [*range(0, 10000, 100)]])
def test_gaps_with_unary_parts_longer_than_a_segment(side: Side, where: list[int]) -> None:
    old = np.zeros(10000, np.uint16)
    new = old.copy()
    new[where] = 1
    check(side, [block(old, new, numbers.FLOAT)])


def test_many_blocks_at_once(side: Side) -> None:
    sizes = [(700, 40), (3, 1), (5000, 30), (1, 1), (9001, 300), (64, 64), *[(100 + n, 2 + n) for n in range(40)]]
    check(side, [moved(n, np.uint16, k, numbers.FLOAT, seed=n) for n, k in sizes])


def test_no_blocks(side: Side) -> None:
    nothing = np.zeros(0, np.uint8)
    elements, rows = np.zeros(9, np.uint16), np.zeros((0, 6), np.int64).view(Host)
    found = side.decode_positional(elements, nothing, nothing, elements[:0], rows, numbers.FLOAT)
    assert (found.positions.size, found.new.size, found.status) == (0, 0, numbers.DECODED)


def test_a28_every_bf16_pattern_steps_to_its_neighbours(side: Side) -> None:
    old = np.arange(65536, dtype=np.uint16)
    steps = np.random.default_rng(0).choice([1, 2, 127, -1, -127], old.size)
    rank = np.where(old >> 15, ~old, old | 0x8000).astype(np.uint16) + steps.astype(np.uint16)
    new = np.where(rank >> 15, rank & 0x7FFF, ~rank).astype(np.uint16)
    part = block(old, new, numbers.FLOAT)
    assert not part.literals.size
    check(side, [part])


# --- Hostile bytes ----------------------------------------------------------------------------------------------------


def status_of(part: Block) -> int:
    """What the library's decoder says."""
    positions = np.zeros(part.values.size, np.uint32)
    if compiled.rice_decode(part.codes, part.row[2], part.old.size, positions):
        return numbers.DAMAGED_POSITIONS
    words = np.zeros(-(-part.old.nbytes // 8), np.uint64)
    words.view(np.uint8)[: part.old.nbytes] = part.old.view(np.uint8)
    out = np.zeros(positions.size * part.old.itemsize, np.uint8)
    literals = part.literals.view(np.uint8)
    if compiled.decode_values(words, positions, part.old.itemsize, part.order, part.values, literals, out):
        return numbers.DAMAGED_VALUES
    return numbers.DECODED


@pytest.mark.parametrize("seed", range(2))
def test_damaged_bytes_are_refused_as_the_cpu_refuses_them(side: Side, seed: int) -> None:
    """Between two sound blocks; what happens to be sound still gives the same."""
    generator = np.random.default_rng(seed)
    sound = moved(600, np.uint16, 25, numbers.FLOAT, seed=seed)
    seen = set()
    for _ in range(8):
        codes, values, literals = sound.codes.copy(), sound.values.copy(), sound.literals.copy()
        match generator.integers(7):
            case 0:
                codes[generator.integers(codes.size)] ^= np.uint8(1 << generator.integers(8))
            case 1:
                codes = codes[: generator.integers(codes.size)]
            case 2:
                codes = np.concatenate([codes, generator.integers(0, 2, 1).astype(np.uint8)])
            case 3:
                codes = generator.integers(0, 256, codes.size).astype(np.uint8)
            case 4:
                values[generator.integers(values.size)] = generator.choice([0, 255, 3])
            case 5:
                literals = literals[: generator.integers(literals.size + 1)]
            case 6:
                literals = generator.integers(0, 65536, literals.size).astype(np.uint16)
        part = replace(sound, codes=codes, values=values, literals=literals)
        expected = status_of(part)
        positions, _, status = decoded(side, [sound, part, sound])
        assert status == expected
        seen.add(status)
        if status == numbers.DECODED:
            assert positions.size == 3 * sound.positions.size
    assert len(seen) > 1


STREAMS = {
    "empty": (b"", 9, 1), "endless": (b"\xff" * 90, 9, 1), "endless in a large block": (b"\xff" * 300, 1 << 20, 1),
    "whole": (b"\x00" * 3, 24, 24), "a byte too long": (b"\x00" * 4, 24, 24), "a code short": (b"\x00" * 2, 20, 20),
    "padded": (b"\x00" * 3, 20, 20), "padded with a one": (b"\x00\x00\x10", 20, 20),
    "as many codes as bits": (b"\x00" * 70, 560, 560), "beyond the block": (b"\xfe" * 40 + b"\x01", 300, 290),
}  # fmt: skip


@pytest.mark.parametrize("name", list(STREAMS))
def test_streams_by_hand(side: Side, name: str) -> None:
    codes, elements, changed = STREAMS[name]
    data, values = np.frombuffer(codes, np.uint8).copy(), np.ones(changed, np.uint8)
    old = np.zeros(elements, np.uint16)
    part = Block(old, old, np.zeros(changed, np.uint32), numbers.FLOAT, data, values, np.zeros(0, np.uint16))
    assert decoded(side, [part])[2] == status_of(part)


def test_the_first_damaged_block_is_told(side: Side) -> None:
    sound = moved(600, np.uint16, 25, numbers.FLOAT)
    cut, reserved = replace(sound, codes=sound.codes[:-2]), replace(sound, values=np.full_like(sound.values, 255))
    both = replace(cut, values=reserved.values)
    assert decoded(side, [sound, reserved, cut])[2] == numbers.DAMAGED_VALUES
    assert decoded(side, [sound, cut, reserved])[2] == numbers.DAMAGED_POSITIONS
    assert decoded(side, [both])[2] == numbers.DAMAGED_POSITIONS


@pytest.mark.parametrize("width", [1, 2, 8])
def test_a_literal_is_what_no_step_reaches(side: Side, width: int) -> None:
    dtype = np.dtype(f"u{width}").type
    old = np.full(9, 100, dtype)
    for distance in (0, 1, 127, 128, 129, -127, -128, -129):
        new = np.array([(100 + distance) % (1 << 8 * width)], dtype)
        part = Block(old, old, np.zeros(1, np.uint32), 0, np.zeros(1, np.uint8), np.zeros(1, np.uint8), new)
        part = replace(part, codes=block(old, np.where(np.arange(9) == 4, old + 1, old).astype(dtype), 0).codes)
        assert decoded(side, [part])[2] == status_of(part)
