"""Diff and scatter: bit for bit on every side."""

from __future__ import annotations

import numpy as np
import pytest

from kernels import reference
from tests.kernels.sides import Side, assert_same, bits

WIDTHS = [np.uint8, np.uint16, np.uint32, np.uint64]
BEYOND = 2**31 - 3


def pair(elements: int, dtype: type, density: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    top = np.iinfo(dtype).max
    old = generator.integers(0, top, elements, dtype=dtype, endpoint=True)
    moved = generator.integers(1, top, elements, dtype=dtype, endpoint=True)
    return old, np.where(generator.random(elements) < density, old ^ moved, old)


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize(("elements", "density"), [(0, 0), (1, 1), (31, 0.5), (4097, 0.01), (9001, 1.0), (5000, 0.0)])
def test_diff(side: Side, dtype: type, elements: int, density: float) -> None:
    old, new = pair(elements, dtype, density)
    found = side.diff(old, new)
    assert_same(found, reference.diff(old, new))
    assert [int(p) for p in found.positions] == [i for i in range(elements) if old[i] != new[i]]


def test_diff_counts_positions_beyond_2_to_the_31(side: Side) -> None:
    old, new = pair(4100, np.uint16, 0.3)
    assert_same(side.diff(old, new, first=BEYOND), reference.diff(old, new, first=BEYOND))
    assert_same(side.diff(old, new, first=2**40 + 1), reference.diff(old, new, first=2**40 + 1))


def test_diff_of_rows_with_distances(side: Side) -> None:
    old, new = (part.reshape(70, 66) for part in pair(70 * 66, np.uint16, 0.1))
    assert_same(side.diff(old[:, :61], new[:, 5:]), reference.diff(old[:, :61], new[:, 5:]))
    assert_same(side.diff(old[::3, :7], new[::3, :7]), reference.diff(old[::3, :7], new[::3, :7]))


@pytest.mark.parametrize("room", [0, 1, 900])
def test_diff_with_less_room_than_changes(side: Side, room: int) -> None:
    if side.name == "reference":
        pytest.skip("the twin needs no room")
    old, new = pair(9000, np.uint8, 0.4)
    assert_same(side.diff(old, new, expected=room), reference.diff(old, new))


def test_diff_lists_no_more_changes_than_asked_for(side: Side) -> None:
    if side.name == "reference":
        pytest.skip("the twin lists all")
    from kernels.changes import TooManyChangesError

    old, new = pair(5000, np.uint16, 0.1)
    expected = reference.diff(old, new)
    count = expected.positions.size
    assert_same(side.diff(old, new, at_most=count, expected=3), expected)
    with pytest.raises(TooManyChangesError):
        side.diff(old, new, at_most=count - 1)


def test_a28_all_bf16_patterns_are_told_apart(side: Side) -> None:
    every = np.arange(65536, dtype=np.uint16)
    for flip in (0x8000, 0x0001, 0x0040):  # the sign of zero, the last bit, a NaN's quiet bit
        found = side.diff(every, every ^ np.uint16(flip))
        assert found.positions.size == 65536
        np.testing.assert_array_equal(bits(found.new), every ^ np.uint16(flip))


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("start", [0, BEYOND, 2**40])
def test_scatter_writes_what_falls_inside(side: Side, dtype: type, start: int) -> None:
    old, new = pair(5000, dtype, 0.1)
    changes = reference.diff(old, new)
    positions = np.concatenate([changes.positions, [-1, 5000, 2**33]]) + start
    values = np.concatenate([changes.new, np.zeros(3, dtype)])
    out = old.copy()
    side.scatter(out, positions, values, start=start)
    np.testing.assert_array_equal(out, new)
    side.scatter(out, positions, values, start=start)
    np.testing.assert_array_equal(out, new)


def test_scatter_of_nothing(side: Side) -> None:
    out = np.arange(5, dtype=np.uint16)
    side.scatter(out, np.empty(0, np.int64), np.empty(0, np.uint16))
    np.testing.assert_array_equal(out, np.arange(5, dtype=np.uint16))
