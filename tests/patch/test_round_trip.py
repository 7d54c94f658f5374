"""Building and applying are exact for every dtype, shape, density and bit pattern."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mailboat.checkpoint.files import Checkpoint
from mailboat.checkpoint.inventory import DTYPE_BITS, Tensor
from mailboat.checkpoint.source import ArraySource
from mailboat.digest import measure
from mailboat.errors import InventoryMismatch, PatchError, WrongBase
from mailboat.patch import PartSpec, PatchFile, apply_patch, build_patch, inspect
from mailboat.patch.format import BLOCK_ELEMENTS, Geometry
from tests.patch.models import built, changed, random_bits, read, same_bytes, source, tensor_bytes, written
from tests.patch.reference import Part, block_sizes

WIDTHS = {dtype: max(1, bits // 8) for dtype, bits in DTYPE_BITS.items()}


def round_trip(folder: Path, base: ArraySource, target: ArraySource) -> None:
    """Build, apply by the product and by the reference, and compare with the target."""
    patch = built(folder, base, target)
    assert patch.base_state.digest == measure(base).digest
    measured = measure(target)
    assert patch.target_state.digest == measured.digest
    assert (patch.target_state.sums == measured.sums).all()
    with Checkpoint.open(written(folder, "base", base)) as before:
        assert apply_patch(before, [patch.path], folder / "out") == measured.digest
    with Checkpoint.open(folder / "out") as after:
        assert same_bytes(after, target)
    result = Part(patch.path.read_bytes()).apply(tensor_bytes(base))
    assert result == dict(enumerate(content for _, content in tensor_bytes(target)))


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
@pytest.mark.parametrize("share", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("step", [3, 0])
def test_every_dtype_at_every_density(tmp_path: Path, dtype: str, share: float, step: int) -> None:
    bits = random_bits(dtype, (48, 40), 1)
    after = changed(bits, WIDTHS[dtype], share, 2, step=step)
    round_trip(tmp_path, source({"t": (dtype, (48, 40), bits)}), source({"t": (dtype, (48, 40), after)}))


@pytest.mark.parametrize("kind", ["next", "negated", "all to one", "shuffled", "zero signs"])
def test_a28_all_bf16_patterns_survive(tmp_path: Path, kind: str) -> None:
    patterns = np.arange(65536, dtype=np.uint16)
    target = {
        "next": patterns + np.uint16(1),
        "negated": patterns ^ np.uint16(0x8000),
        "all to one": np.full(65536, 0x7FC1, np.uint16),
        "shuffled": np.random.default_rng(3).permutation(patterns),
        "zero signs": np.where(patterns == 0, 0x8000, np.where(patterns == 0x8000, 0, patterns)).astype(np.uint16),
    }[kind]
    base = ArraySource({"t": patterns.reshape(256, 256)}, dtypes={"t": "BF16"})
    round_trip(tmp_path, base, ArraySource({"t": target.reshape(256, 256)}, dtypes={"t": "BF16"}))


def test_a28_every_pattern_to_every_kind_of_target_by_steps(tmp_path: Path) -> None:
    """Each of the 65,536 patterns moves by each of many distances, spread so thin that positions are used."""
    patterns = np.arange(65536, dtype=np.uint16)
    for distance in (1, 127, 128, 255, 0x7FFF, 0x8000, 0xFFFF):
        wide = np.zeros((65536, 20), np.uint16)
        place = patterns, np.random.default_rng(distance).integers(0, 20, 65536)  # uneven, else planes are smaller
        wide[place] = patterns
        after = wide.copy()
        after[place] += np.uint16(distance)
        base = ArraySource({"t": wide}, dtypes={"t": "BF16"})
        target = ArraySource({"t": after}, dtypes={"t": "BF16"})
        patch = build_patch(base, target, tmp_path / "patch", encode_for="speed")
        with PatchFile.open(patch.path) as opened:
            assert opened.codecs == ("positional",)
            assert opened.changed == 65536
        with Checkpoint.open(written(tmp_path, f"base-{distance}", base)) as before:
            assert apply_patch(before, [patch.path], tmp_path / "out") == patch.target_state.digest


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (1,), (7,), (4097,), (3, 5, 7), (1, 1, 1), (2, 1023)])
@pytest.mark.parametrize("dtype", ["BF16", "F32", "U8", "F64"])
def test_a29_odd_shapes(tmp_path: Path, shape: tuple[int, ...], dtype: str) -> None:
    bits = random_bits(dtype, shape, 1)
    other = random_bits("BF16", (64, 64), 2)
    base = source({"t": (dtype, shape, bits), "u": ("BF16", (64, 64), other)})
    target = source({"t": (dtype, shape, ~bits), "u": ("BF16", (64, 64), changed(other, 2, 0.02, 3))})
    round_trip(tmp_path, base, target)


@pytest.mark.parametrize(
    ("elements", "row"),
    [(1, 1), (BLOCK_ELEMENTS, 1), (BLOCK_ELEMENTS + 1, 1), (3 * BLOCK_ELEMENTS, BLOCK_ELEMENTS), (7 * 600_000, 600_000),
     (2 * (BLOCK_ELEMENTS + 5), BLOCK_ELEMENTS + 5), (2**31 + 2**20, 2**11), (2**33, 2**33),
     (3 * (2**31 + 1), 2**31 + 1)],
)  # fmt: skip
def test_a29_geometry_beyond_two_to_the_31(elements: int, row: int) -> None:
    geometry = Geometry(elements, row, 2)
    sizes = block_sizes(elements, row)
    assert geometry.blocks == len(sizes)
    start = 0
    for number, size in enumerate(sizes):
        first, count = geometry.block(number)
        assert (first, count) == (start, size)
        assert geometry.block_at(first) == number == geometry.block_at(first + count - 1)
        piece, first_row, word = geometry.piece(first, count)
        assert first_row * row * 2 + word * 8 == first * 2
        assert count * 2 % piece == 0
        start += size
    assert start == elements


def test_a29_two_dimensions_of_zero_rows_and_bytes() -> None:
    assert Geometry.of(Tensor("target", "t", "BF16", (4, 0))).blocks == 0
    assert Geometry.of(Tensor("target", "t", "F4", (3, 2))) == Geometry(3, 1, 1)
    assert Geometry.of(Tensor("target", "t", "F6_E2M3", (4,))) == Geometry(3, 3, 1)


@pytest.mark.parametrize("rows", [(5, 700_000), (1, 2_500_001), (2_200_000, 1)])
def test_blocks_cut_rows_and_rows_fill_blocks(tmp_path: Path, rows: tuple[int, int]) -> None:
    bits = random_bits("U8", rows, 1)
    after = bits.copy()
    for start in range(0, len(after), 350_001):  # some blocks sparse, some dense, some untouched
        after[start : start + start // 100_000] ^= 255
    after[-300_000:] = random_bits("U8", (300_000,), 5)
    base, target = source({"t": ("U8", rows, bits)}), source({"t": ("U8", rows, after)})
    patch = built(tmp_path, base, target)
    assert (patch.target_state.sums == measure(target).sums).all()
    with Checkpoint.open(written(tmp_path, "base", base)) as before:
        assert apply_patch(before, [patch.path], tmp_path / "out") == measure(target).digest


DTYPES = st.sampled_from(sorted(DTYPE_BITS))
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(lambda sizes: (*sizes, 8))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.text(min_size=1, max_size=8), st.tuples(DTYPES, SHAPES), max_size=5),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    st.sampled_from([0, 1, 200]),
)
def test_any_model_round_trips(
    tmp_path: Path, model: dict[str, tuple[str, tuple[int, ...]]], seed: int, share: float, step: int
) -> None:
    model = {name: entry for name, entry in model.items() if name != "__metadata__" and _utf8(name)}
    before = {name: (d, s, random_bits(d, s, seed + i)) for i, (name, (d, s)) in enumerate(model.items())}
    after = {
        name: (d, s, changed(bits, WIDTHS[d], share, seed + 1, step=step if WIDTHS[d] > 1 else min(step, 100)))
        for name, (d, s, bits) in before.items()
    }
    base, target = source(before), source(after)
    patch = built(tmp_path, base, target)
    assert patch.target_state.digest == measure(target).digest
    result = Part(patch.path.read_bytes()).apply(tensor_bytes(base))
    assert result == {i: read(target, i) for i in range(len(target.inventory.tensors))}


def _utf8(name: str) -> bool:
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False


def test_a31_a_dense_step_falls_back_and_stays_exact(tmp_path: Path) -> None:
    bits = random_bits("BF16", (512, 1024), 1)
    steps = source({"t": ("BF16", (512, 1024), changed(bits, 2, 1.0, 2, step=1))})
    other = source({"t": ("BF16", (512, 1024), random_bits("BF16", (512, 1024), 9))})
    base = source({"t": ("BF16", (512, 1024), bits)})
    for target in (steps, other):
        patch = built(tmp_path, base, target)
        assert patch.size < 1.01 * bits.nbytes
        with Checkpoint.open(written(tmp_path, "base", base)) as before:
            assert apply_patch(before, [patch.path], tmp_path / "out") == measure(target).digest
    with PatchFile.open(patch.path) as opened:
        assert set(opened.codecs) <= {"dense", "xor"}


def test_a02_an_empty_patch_is_explicit_and_valid(tmp_path: Path) -> None:
    base = source({"t": ("BF16", (64, 64), random_bits("BF16", (64, 64), 1))}, {"config.json": b"{}"})
    patch = built(tmp_path, base, base)
    assert patch.base_state.digest == patch.target_state.digest
    assert patch.changed == 0
    with PatchFile.open(patch.path) as opened:
        assert opened.codecs == ()
        assert opened.side_files == ()
    with Checkpoint.open(written(tmp_path, "base", base)) as before:
        assert apply_patch(before, [patch.path], tmp_path / "out") == patch.base_state.digest


def test_a_model_without_tensors(tmp_path: Path) -> None:
    patch = built(tmp_path, source({}, {"a.txt": b"1"}), source({}, {"a.txt": b"2"}))
    assert inspect([patch.path])["totals"]["ratio"] == 0
    assert Part(patch.path.read_bytes()).side == {"a.txt": b"2"}


def test_side_files_travel_whole(tmp_path: Path) -> None:
    tensor = {"t": ("BF16", (8, 8), random_bits("BF16", (8, 8), 1))}
    base = source(tensor, {"config.json": b"{}", "gone.txt": b"x", "same.txt": b"y", "sub/a.txt": b"1"})
    target = source(tensor, {"config.json": b'{"a":1}', "new/b.bin": b"", "same.txt": b"y", "sub/a.txt": b"2"})
    patch = built(tmp_path, base, target)
    with PatchFile.open(patch.path) as opened:
        assert [file.path for file in opened.side_files] == ["config.json", "new/b.bin", "sub/a.txt"]
        assert opened.removed == ("gone.txt",)
    with Checkpoint.open(written(tmp_path, "base", base)) as before:
        apply_patch(before, [patch.path], tmp_path / "out")
    with Checkpoint.open(tmp_path / "out") as after:
        assert same_bytes(after, target)


def test_the_bytes_do_not_depend_on_threads_or_on_a_known_base(tmp_path: Path) -> None:
    bits = random_bits("BF16", (3000, 1000), 1)
    base = source({"t": ("BF16", (3000, 1000), bits), "u": ("F32", (1000,), random_bits("F32", (1000,), 2))})
    after = changed(bits, 2, 0.05, 3)
    after[4_000_000:] = random_bits("U8", (2_000_000,), 4)
    target = source({"t": ("BF16", (3000, 1000), after), "u": ("F32", (1000,), random_bits("F32", (1000,), 5))})
    known = measure(base)
    seen = {
        build_patch(base, target, tmp_path / "p", threads=threads, base_state=state).sha256
        for threads in (1, 2, 5)
        for state in (None, known)
    }
    assert len(seen) == 1


def test_parts_apply_in_any_order_and_only_together(tmp_path: Path) -> None:
    before = {f"t{i}": ("BF16", (40, 30), random_bits("BF16", (40, 30), i)) for i in range(7)}
    after = {name: (d, s, changed(bits, 2, 0.05, 9)) for name, (d, s, bits) in before.items()}
    base, target = source(before, {"a.txt": b"1"}), source(after, {"a.txt": b"2"})
    whole = built(tmp_path, base, target, "whole")
    split = [(0, 3), (1, 2, 6), (4, 5)]
    parts = [
        build_patch(base, target, tmp_path / f"part{i}", part=PartSpec(i, 3, indices))
        for i, indices in enumerate(split)
    ]
    assert {part.target_state.digest for part in parts} == {whole.target_state.digest}
    assert sum(part.changed for part in parts) == whole.changed
    paths = [part.path for part in parts]
    with Checkpoint.open(written(tmp_path, "base", base)) as opened:
        for order in ([0, 1, 2], [2, 0, 1]):
            assert apply_patch(opened, [paths[i] for i in order], tmp_path / "out") == whole.target_state.digest
        for wrong in (paths[:2], [paths[0], paths[1], paths[1]], [*paths[:2], whole.path], paths[1:], []):
            with pytest.raises(PatchError):
                apply_patch(opened, wrong, tmp_path / "never")
    found = inspect(paths)
    assert [row["name"] for row in found["tensors"]] == [str(i) for i in range(7)]
    assert found["totals"]["changed"] == whole.changed
    assert not (tmp_path / "never").exists()


def test_a06_a_patch_on_the_wrong_base_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    versions = [source({"t": ("BF16", (64, 64), random_bits("BF16", (64, 64), i))}) for i in range(3)]
    patch = built(tmp_path, versions[1], versions[2])
    with Checkpoint.open(written(tmp_path, "zero", versions[0])) as zero, pytest.raises(WrongBase, match="starts from"):
        apply_patch(zero, [patch.path], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["patch", "zero"]


def test_a25_other_tensors_are_refused_by_name(tmp_path: Path) -> None:
    a, b, c = (random_bits("BF16", (8, 8), seed) for seed in range(3))
    base = source({"a": ("BF16", (8, 8), a), "b": ("BF16", (8, 8), b)})
    wrong = {
        "missing": ({"a": ("BF16", (8, 8), a)}, ["b"]),
        "extra": ({"a": ("BF16", (8, 8), a), "b": ("BF16", (8, 8), b), "c": ("BF16", (8, 8), c)}, ["c"]),
        "renamed": ({"a": ("BF16", (8, 8), a), "bb": ("BF16", (8, 8), b)}, ["b", "bb"]),
        "dtype": ({"a": ("BF16", (8, 8), a), "b": ("F16", (8, 8), b)}, ["b"]),
        "shape": ({"a": ("BF16", (8, 8), a), "b": ("BF16", (4, 16), b)}, ["b"]),
    }
    for tensors, names in wrong.values():
        with pytest.raises(InventoryMismatch) as raised:
            build_patch(base, source(tensors), tmp_path / "patch")
        assert sorted(raised.value.names) == names
        assert all(name in str(raised.value) for name in names)
    assert list(tmp_path.iterdir()) == []


def test_the_base_keeps_its_layout_and_is_never_written(tmp_path: Path) -> None:
    base = source({f"t{i}": ("BF16", (16, 16), random_bits("BF16", (16, 16), i)) for i in range(3)})
    target = source({f"t{i}": ("BF16", (16, 16), random_bits("BF16", (16, 16), i + 7)) for i in range(3)})
    path = written(tmp_path, "base", base)
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.iterdir()}
    patch = built(tmp_path, base, target)
    with Checkpoint.open(path) as opened:
        for _ in range(2):  # the second time replaces what is there
            apply_patch(opened, [patch.path], tmp_path / "out")
        assert opened.layout.shards == Checkpoint.open(tmp_path / "out").layout.shards
    assert {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.iterdir()} == before
