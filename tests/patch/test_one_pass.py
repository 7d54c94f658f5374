"""A group in memory is compared and encoded in one pass: the bytes are those of the way in two passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mailboat.checkpoint.inventory import Inventory
from mailboat.checkpoint.source import ArraySource, Bytes, SideFile
from mailboat.patch import build_patch, encoder
from mailboat.patch.classes import classes_of
from mailboat.patch.one_pass import OnePass
from tests.patch.test_contextual import codecs, stepped, weights

ELEMENTS = 3 << 20  # three whole blocks of two bytes
RATE = 2e-7  # a hundredth changes: enough for a sample


class Elsewhere:
    """A source whose bytes have to be read, as from files."""

    def __init__(self, held: ArraySource) -> None:
        self._held = held

    @property
    def inventory(self) -> Inventory:
        return self._held.inventory

    @property
    def side_files(self) -> tuple[SideFile, ...]:
        return ()

    def read(self, index: int, offset: int, out: Bytes) -> None:
        self._held.read(index, offset, out)

    def read_side(self, path: str) -> bytes:
        raise FileNotFoundError(path)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each group that was tried in one pass, whether that was its way."""
    seen: list[bool] = []

    class Watched(OnePass):
        def encode(self, *arguments: Any) -> Any:
            coded = super().encode(*arguments)
            seen.append(coded is not None)
            return coded

    monkeypatch.setattr(encoder, "OnePass", Watched)
    return seen


def arrays(sides: list[tuple[str, np.ndarray]]) -> ArraySource:
    return ArraySource(
        {f"t{i}": bits for i, (_, bits) in enumerate(sides)},
        dtypes={f"t{i}": dtype for i, (dtype, _) in enumerate(sides)},
    )


def both_ways(folder: Path, before: list[tuple[str, np.ndarray]], after: list[np.ndarray]) -> None:
    """Build from memory, on one thread and on three, and from sources that are read: all three are one patch."""
    base = arrays(before)
    target = arrays([(dtype, bits) for (dtype, _), bits in zip(before, after, strict=True)])
    expected = build_patch(Elsewhere(base), Elsewhere(target), folder / "read")
    for threads in (1, 3):
        built = build_patch(base, target, folder / "held", threads=threads)
        assert built.target_state.digest == expected.target_state.digest
        assert (folder / "held").read_bytes() == (folder / "read").read_bytes()


def step_of(dtype: str, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Random bits of a dtype, and the same after steps of a hundredth of them, all in an eighth of the classes."""
    random = np.random.default_rng(width)
    kind = np.dtype(f"u{width}")
    bits = random.integers(0, 256, ELEMENTS * width, np.uint8).view(kind)
    moved, (shift, mask) = bits.copy(), (classes_of(dtype).shift, classes_of(dtype).mask)
    inside = (bits >> kind.type(shift)) & kind.type(mask) < kind.type((mask + 1) // 8)
    moved[inside & (random.random(bits.size) < 0.08)] += kind.type(1)
    return bits, moved


def test_real_steps(tmp_path: Path, ways: list[bool]) -> None:
    bits = weights(ELEMENTS, 1)
    both_ways(tmp_path, [("BF16", bits)], [stepped(bits, 2, RATE)])
    assert codecs(tmp_path / "held") == ("contextual",)
    assert ways == [True, True]


@pytest.mark.parametrize(("dtype", "width"), [("F8_E4M3", 1), ("F16", 2), ("F32", 4), ("F64", 8)])
def test_every_width(tmp_path: Path, ways: list[bool], dtype: str, width: int) -> None:
    bits, moved = step_of(dtype, width)
    both_ways(tmp_path, [(dtype, bits)], [moved])
    assert ways == [True, True]


def test_tensors_of_all_sizes_some_of_which_do_not_change(tmp_path: Path, ways: list[bool]) -> None:
    bits = weights(ELEMENTS + 4 * 70_001 + 64, 3)
    after = stepped(bits, 4, RATE)
    cuts = np.cumsum([1 << 20, 70_004, 4, 2 << 20, 70_000, 64])
    before, moved = np.split(bits, cuts), np.split(after, cuts)
    moved[1], moved[5] = before[1], before[5]  # a whole tensor that stays as it is, first in a row and last
    both_ways(tmp_path, [("BF16", part) for part in before], moved)
    assert ways == [True, True]


def test_changes_at_the_edges_of_chunks_stretches_and_blocks(tmp_path: Path, ways: list[bool]) -> None:
    bits = weights(ELEMENTS, 5)
    after = stepped(bits, 6, RATE)
    after[: 1 << 16] = bits[: 1 << 16]  # a block that begins with much that stays
    edges = np.array([64, 4096, 1 << 17, 1 << 19, 1 << 20, 2 << 20])
    after[np.concatenate([edges - 1, edges])] = bits[np.concatenate([edges - 1, edges])] + 1
    after[-1] = bits[-1] + 1
    both_ways(tmp_path, [("BF16", bits)], [after])
    assert ways == [True, True]


@pytest.mark.parametrize("what", ["regular", "dense", "other dtype", "few", "no multiple of a word", "no step"])
def test_what_goes_the_other_way(tmp_path: Path, ways: list[bool], what: str) -> None:
    bits = weights(ELEMENTS, 7)
    after = stepped(bits, 8, RATE)
    before, moved = [("BF16", bits)], [after]
    if what == "regular":
        after[1 << 20 : 2 << 20][::100] += 1
    elif what == "dense":
        after[1 << 20 : 2 << 20] += np.random.default_rng(1).integers(0, 2, 1 << 20, np.uint16)
    elif what == "other dtype":
        before.append(("F16", bits[:64].copy()))
        moved.append(bits[:64].copy())
    elif what == "few":
        moved[0] = stepped(bits, 8, RATE / 100)
    elif what == "no multiple of a word":
        before.append(("BF16", bits[:63].copy()))
        moved.append(bits[:63] + np.uint16(1))
    else:
        replaced = np.random.default_rng(2).random(ELEMENTS) < 0.01
        after[replaced] ^= np.uint16(0x5A5A)
    both_ways(tmp_path, before, moved)
    assert not any(ways)


def test_random_densities(tmp_path: Path, ways: list[bool]) -> None:
    random = np.random.default_rng(9)
    for number in range(6):
        bits = weights(ELEMENTS // 2, 20 + number)
        both_ways(tmp_path, [("BF16", bits)], [stepped(bits, 40 + number, float(10 ** random.uniform(-8, -5.5)))])
    assert len(set(ways)) == 2
