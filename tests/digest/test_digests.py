"""Sums, strong digests and state digest against the committed vectors and the plain twin of docs/format/digests.md."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mailboat.checkpoint.inventory import COMPONENT, DTYPE_BITS, Inventory, Tensor
from mailboat.checkpoint.side_files import SideFile, side_file
from mailboat.checkpoint.source import ArraySource, Bytes
from mailboat.compiled import sum_changes
from mailboat.digest import State, measure, measure_sums, seeds, sum_slice, tiles
from mailboat.errors import DigestMismatch
from tests.vectors import plain

VECTORS = Path(__file__).parent.parent / "vectors"
MASK = 2**64 - 1


def _vectors(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((VECTORS / f"{name}.json").read_text(encoding="utf-8"))
    return found


class _Held:
    """Tensor bytes in inventory order as a source."""

    def __init__(self, inventory: Inventory, tensors: list[bytes], side_files: dict[str, bytes] | None = None) -> None:
        self.inventory = inventory
        self._tensors = [np.frombuffer(data, np.uint8) for data in tensors]
        self._side = side_files or {}
        self.side_files: tuple[SideFile, ...] = tuple(side_file(*item) for item in sorted(self._side.items()))

    def read(self, index: int, offset: int, out: Bytes) -> None:
        out[:] = self._tensors[index][offset : offset + out.size]

    def read_side(self, path: str) -> bytes:
        return self._side[path]


@pytest.mark.parametrize("case", _vectors("sums"), ids=lambda case: case["name"])
def test_sums_are_those_of_the_vectors(case: dict[str, Any]) -> None:
    data = bytes.fromhex(case["data"])
    stored = None if case["dtype"] in DTYPE_BITS else len(data)
    tensor = Tensor(COMPONENT, case["name"], case["dtype"], tuple(case["shape"]), None, stored)
    assert tensor.nbytes == len(data)
    assert [f"{seed:016x}" for seed in seeds(tensor)] == case["seeds"]
    sums = measure_sums(_Held(Inventory.of([tensor], {}), [data]))
    assert [f"{int(total):016x}" for total in sums[0]] == case["sums"]
    assert plain.sums(COMPONENT, case["name"], case["dtype"], case["shape"], data) == tuple(map(int, sums[0]))


@pytest.mark.parametrize("case", _vectors("states"), ids=lambda case: case["title"])
@pytest.mark.parametrize("threads", [1, 3])
def test_states_are_those_of_the_vectors(case: dict[str, Any], threads: int) -> None:
    inventory = Inventory.from_bytes(case["inventory"].encode())
    side = {path: text.encode() for path, text in case["side_files"].items()}
    source = _Held(inventory, [bytes.fromhex(data) for data in case["tensors"]], side)
    state = measure(source, threads=threads)
    assert state.digest == case["state"]
    assert state.digests_bytes().hex() == case["digests"]
    again = State.from_parts(inventory, bytes.fromhex(case["digests"]), source.side_files)
    assert again.digest == case["state"]
    assert np.array_equal(again.sums, state.sums)


def test_a_digests_blob_of_another_size_is_refused() -> None:
    inventory = Inventory.of([Tensor(COMPONENT, "a", "U8", (1,))], {})
    for size in (0, 47, 49, 96):
        with pytest.raises(DigestMismatch, match="48"):
            State.from_parts(inventory, bytes(size), ())


_KNOWN = sorted(dtype for dtype, bits in DTYPE_BITS.items() if bits >= 8)


@st.composite
def _tensors(draw: st.DrawFn) -> tuple[Tensor, bytes]:
    dtype = draw(st.sampled_from(_KNOWN))
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    tensor = Tensor(COMPONENT, draw(st.text(max_size=4)), dtype, shape)
    return tensor, random.Random(draw(st.integers())).randbytes(tensor.nbytes)


def _of(tensor: Tensor, data: bytes) -> tuple[int, int]:
    return plain.sums(tensor.component, tensor.name, tensor.dtype, list(tensor.shape), data)


@settings(deadline=None)
@given(_tensors())
def test_sums_equal_the_twin(case: tuple[Tensor, bytes]) -> None:
    tensor, data = case
    tensor_sums = measure_sums(_Held(Inventory((tensor,), {}), [data]))[0]
    assert (int(tensor_sums[0]), int(tensor_sums[1])) == _of(tensor, data)


@settings(deadline=None)
@given(_tensors(), st.data())
def test_slices_add_up_to_the_sum(case: tuple[Tensor, bytes], draw: st.DataObject) -> None:
    tensor, data = case
    rows, row_bytes = tensor.rows, tensor.row_bytes
    table = np.frombuffer(data, np.uint8).reshape(rows, row_bytes)
    row_cuts = sorted({0, rows, *draw.draw(st.lists(st.integers(0, rows), max_size=3))})
    words = st.integers(0, row_bytes // 8).map(lambda word: word * 8)
    column_cuts = sorted({0, row_bytes, *draw.draw(st.lists(words, max_size=3))})
    a = b = 0
    for top, bottom in pairwise(row_cuts):
        for left, right in pairwise(column_cuts):
            part = np.ascontiguousarray(table[top:bottom, left:right]).reshape(-1)
            more = sum_slice(tensor, part, row0=top, rows=bottom - top, column0=left, column_bytes=right - left)
            a, b = (a + more[0]) & MASK, (b + more[1]) & MASK
    assert (a, b) == _of(tensor, data)


@pytest.mark.parametrize(
    ("column0", "column_bytes"),
    [(4, 8), (0, 4), (8, 4), (0, 24), (-8, 8)],
    ids=["start", "end", "tail", "beyond", "before"],
)
def test_slices_that_cut_a_word_are_refused(column0: int, column_bytes: int) -> None:
    tensor = Tensor(COMPONENT, "w", "BF16", (3, 8))
    with pytest.raises(ValueError, match="slice"):
        sum_slice(tensor, np.zeros(column_bytes, np.uint8), row0=0, rows=1, column0=column0, column_bytes=column_bytes)


@settings(deadline=None)
@given(_tensors(), st.data())
def test_changed_words_move_the_sum_exactly(case: tuple[Tensor, bytes], draw: st.DataObject) -> None:
    tensor, data = case
    if not data:
        return
    old = np.frombuffer(data, np.uint8).copy()
    new = old.copy()
    listed = draw.draw(st.sets(st.integers(0, tensor.elements - 1)))
    for at in listed:  # some of the listed elements stay as they are
        new[at * tensor.width] ^= draw.draw(st.integers(0, 255))
    seed_a, seed_b = (np.uint64(seed) for seed in seeds(tensor))
    moved = np.array(_of(tensor, data), np.uint64)
    positions = np.array(sorted(listed), np.uint32)
    sum_changes(old, new, positions, tensor.width, tensor.row_bytes, 0, 0, seed_a, seed_b, moved)
    assert (int(moved[0]), int(moved[1])) == _of(tensor, new.tobytes())


def test_any_change_of_one_bit_changes_both_sums() -> None:
    tensor = Tensor(COMPONENT, "w", "BF16", (3, 5))
    data = random.Random(5).randbytes(tensor.nbytes)
    before = _of(tensor, data)
    for bit in range(len(data) * 8):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        after = sum_slice(tensor, np.frombuffer(changed, np.uint8), row0=0, rows=3, column_bytes=10)
        assert before[0] != after[0]
        assert before[1] != after[1]


@settings(deadline=None)
@given(_tensors(), st.sampled_from([8, 16, 24, 64]))
def test_tiles_cover_a_tensor_in_whole_words(case: tuple[Tensor, bytes], limit: int) -> None:
    tensor, data = case
    offset = a = b = 0
    for tile in tiles(tensor, limit):
        assert tile.offset == offset
        assert 0 < tile.nbytes <= limit
        offset += tile.nbytes
        part = np.frombuffer(data[tile.offset : offset], np.uint8)
        rows = tile.nbytes // tile.piece_bytes
        more = sum_slice(tensor, part, row0=tile.row, rows=rows, column0=tile.word * 8, column_bytes=tile.piece_bytes)
        a, b = (a + more[0]) & MASK, (b + more[1]) & MASK
    assert offset == len(data)
    assert (a, b) == _of(tensor, data)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("BF16", (3 * 2**30,)), ("U8", (2**31 + 5, 2)), ("F32", (2, 2**31 + 1)), ("F8_E4M3", (2**16, 2**17))],
)
def test_a29_tensors_beyond_4_gib_and_2_31_elements_have_exact_geometry(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = Tensor(COMPONENT, "huge", dtype, shape)
    offset = 0
    for tile in tiles(tensor):
        assert tile.offset == offset == tile.row * tensor.row_bytes + tile.word * 8
        offset += tile.nbytes
    assert offset == tensor.nbytes > 2**31
    seed_a, _ = seeds(tensor)
    data = np.arange(8, dtype=np.uint8)
    last_row, last_word = tensor.rows - 1, (tensor.row_bytes // 8 - 1 if tensor.row_bytes >= 8 else 0)
    if tensor.row_bytes >= 8:
        found = sum_slice(tensor, data, row0=last_row, rows=1, column0=last_word * 8, column_bytes=8)
        word = int.from_bytes(data.tobytes(), "little")
        assert found[0] == plain.mix("a", word, seed_a, last_row, last_word)


def test_a28_all_bf16_patterns_have_their_own_digest() -> None:
    patterns = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    base = measure(ArraySource({"w": patterns}, dtypes={"w": "BF16"}))
    negative_zero = patterns.copy()
    negative_zero[0, 0] = 0x8000  # +0.0 becomes -0.0
    payload = patterns.copy()
    payload[0x7F, 0xC1] = 0x7FC2  # one NaN becomes another
    states = [base, *(measure(ArraySource({"w": w}, dtypes={"w": "BF16"})) for w in (negative_zero, payload))]
    assert len({state.digest for state in states}) == 3
    assert len({tuple(state.sums[0]) for state in states}) == 3
    assert (int(base.sums[0][0]), int(base.sums[0][1])) == plain.sums(
        COMPONENT, "w", "BF16", [256, 256], patterns.tobytes()
    )


def test_progress_counts_every_byte_and_threads_do_not_matter() -> None:
    generator = np.random.default_rng(3)
    arrays = {f"t{i}": generator.integers(0, 256, (i * 7, 13), dtype=np.uint8) for i in range(20)}
    counted: list[int] = []
    states = [measure(ArraySource(arrays), threads=threads, progress=counted.append) for threads in (1, 4)]
    assert sum(counted) == 2 * states[0].inventory.full_bytes
    assert states[0].digests_bytes() == states[1].digests_bytes()


def test_a_failing_read_ends_the_scan_with_its_error() -> None:
    class Failing(_Held):
        def read(self, index: int, offset: int, out: Bytes) -> None:
            raise OSError(5, "gone")

    inventory = Inventory.of([Tensor(COMPONENT, f"t{i}", "U8", (9,)) for i in range(50)], {})
    with pytest.raises(OSError, match="gone"):
        measure(Failing(inventory, []), threads=2)
