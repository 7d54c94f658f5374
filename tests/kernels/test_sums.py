"""Tensor sums and applying changes: bit for bit on every side, and equal to the library's."""

from __future__ import annotations

import numpy as np
import pytest

from kernels import reference
from mailboat import compiled
from tests.kernels.sides import Side

SEEDS = (0xFEDCBA9876543210, 0x0123456789ABCDEF)


def of_library(rows: np.ndarray, row0: int = 0, word0: int = 0) -> tuple[int, int]:
    out = np.zeros(2, np.uint64)
    flat = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
    compiled.sum_rows(flat, rows.shape[1] * rows.itemsize, row0, word0, *(np.uint64(seed) for seed in SEEDS), out)
    return int(out[0]), int(out[1])


def matrix(rows: int, columns: int, dtype: type = np.uint8, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, (rows, columns), dtype=dtype, endpoint=True)


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 8), (1, 9001), (300, 2), (37, 53), (64, 128), (2, 4100)])
@pytest.mark.parametrize("place", [(0, 0), (2**31 - 1, 2**31 + 5), (2**40, 3)])
def test_sums_equal_the_library(side: Side, shape: tuple[int, int], place: tuple[int, int]) -> None:
    rows = matrix(*shape)
    row0, word0 = place
    assert side.tensor_sums(rows, SEEDS, row0=row0, word0=word0) == of_library(rows, row0, word0)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_sums_of_rows_with_distances(side: Side, dtype: type) -> None:
    whole = matrix(40, 50, dtype)
    for rows in (whole[:, :33], whole[::3, :49], whole[:, 1:]):
        expected = reference.tensor_sums(np.ascontiguousarray(rows).view(np.uint8), SEEDS)
        given = np.ascontiguousarray(rows).view(np.uint8) if side.name == "reference" else rows
        assert side.tensor_sums(given, SEEDS) == expected == of_library(rows)


def test_sums_of_rows_in_memory_that_begins_anywhere(side: Side) -> None:
    """Rows on a whole word, in a storage that does not begin on one."""
    if side.name != "interpreter":
        pytest.skip("a device's memory begins on a whole word")
    import torch

    from kernels import sums

    memory = matrix(1, 90).reshape(-1)
    storage = torch.from_numpy(memory[-memory.ctypes.data % 8 + 1 :])
    rows = storage[7 : 7 + 64].view(8, 8)
    assert sums.tensor_sums(rows, SEEDS) == of_library(rows.numpy())


def test_sums_of_nothing(side: Side) -> None:
    assert side.tensor_sums(np.empty((0, 8), np.uint8), SEEDS) == (0, 0)
    assert side.tensor_sums(np.empty((4, 0), np.uint8), SEEDS) == (0, 0)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize(
    ("shape", "density"), [((1, 1), 1), ((9, 53), 0.4), ((64, 64), 0.01), ((50, 61), 1.0), ((3, 2000), 0.2)]
)
def test_apply_writes_and_predicts_the_sums(side: Side, dtype: type, shape: tuple[int, int], density: float) -> None:
    old = matrix(*shape, dtype)
    new = np.where(np.random.default_rng(2).random(shape) < density, matrix(*shape, dtype, seed=3), old)
    changes = reference.diff(old, new)
    for first in (0, 2**31 - 5):
        rows = old.copy()
        delta = side.apply_with_sums(
            rows, changes.positions + first, changes.new, SEEDS, first=first, row0=2**33, word0=7
        )
        np.testing.assert_array_equal(rows, new)
        before, after = of_library(old, 2**33, 7), of_library(new, 2**33, 7)
        assert delta == tuple((a - b) % 2**64 for a, b in zip(after, before, strict=True))
        # Absolute values: once more changes neither bytes nor sums.
        again = side.apply_with_sums(rows, changes.positions + first, changes.new, SEEDS, first=first)
        np.testing.assert_array_equal(rows, new)
        assert again == (0, 0)


def test_apply_of_nothing(side: Side) -> None:
    rows = matrix(3, 5)
    assert side.apply_with_sums(rows, np.empty(0, np.int64), np.empty(0, np.uint8), SEEDS) == (0, 0)
