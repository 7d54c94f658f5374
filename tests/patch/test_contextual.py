"""The contextual encoding: exact for every dtype, the same for any number of threads, never larger, never fooled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mailboat.checkpoint.files import Checkpoint
from mailboat.checkpoint.inventory import DTYPE_BITS
from mailboat.checkpoint.source import ArraySource
from mailboat.errors import MailboatError
from mailboat.image import Image
from mailboat.patch import PatchFile, apply_patch, build_patch, encoder, inspect
from mailboat.patch import table as table_module
from mailboat.patch.format import GROUP_BYTES
from mailboat.patch.streams import compress_table, zstd
from mailboat.patch.table import Table
from tests.patch.models import changed, random_bits, same_bytes, source, tensor_bytes, written
from tests.patch.reference import Part
from tests.patch.test_hostile import put_together, taken_apart

Shaped = tuple[str, list[int]]
DTYPES = ["F4", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "BF16", "F16", "F32", "I32", "F64", "U64"]


def weights(elements: int, seed: int, scale: float = 0.02) -> np.ndarray:
    """BF16 bits of normal numbers."""
    normal = np.random.default_rng(seed).standard_normal(elements, np.float32) * np.float32(scale)
    return (normal.view(np.uint32) >> 16).astype(np.uint16)


def stepped(bits: np.ndarray, seed: int, rate: float = 3e-6) -> np.ndarray:
    """BF16 weights after one step of the same size everywhere: the smaller a weight, the likelier it moves."""
    random = np.random.default_rng(seed)
    gap = np.exp2(((bits >> 7) & 255).astype(np.float64) - 134)
    moved = random.random(bits.size) < rate / gap
    after = bits.copy()
    after[moved] += random.choice(np.array([1, 65535], np.uint16), int(moved.sum()))
    return after


def model(bits: np.ndarray, tensors: int = 3) -> ArraySource:
    """A few BF16 tensors."""
    parts = np.array_split(bits, tensors)
    return ArraySource({f"t{i}": part for i, part in enumerate(parts)}, dtypes=dict.fromkeys(
        [f"t{i}" for i in range(tensors)], "BF16"
    ))  # fmt: skip


def codecs(path: Path) -> tuple[str, ...]:
    with PatchFile.open(path) as patch:
        return patch.codecs


def check(folder: Path, base: ArraySource, target: ArraySource) -> int:
    """Build, apply in both ways, decode with the plain decoder; returns the size."""
    built = build_patch(base, target, folder / "p")
    path = folder / "base"
    if not path.exists():
        written(folder, "base", base)
    with Checkpoint.open(path) as checkpoint:
        assert apply_patch(checkpoint, [built.path], folder / "out") == built.target_state.digest
    new = Part(built.path.read_bytes()).apply(tensor_bytes(base))
    assert [new[i] for i in range(len(new))] == [data for _, data in tensor_bytes(target)]
    return built.size


def test_real_steps_take_half_of_what_positions_take(tmp_path: Path) -> None:
    bits = weights(300_000, 1)
    base, target = model(bits), model(stepped(bits, 2))
    small = build_patch(base, target, tmp_path / "small")
    quick = build_patch(base, target, tmp_path / "quick", encode_for="speed")
    assert codecs(small.path) == ("contextual",)
    assert codecs(quick.path) == ("positional",)
    assert small.size < 0.75 * quick.size
    check(tmp_path, base, target)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 40), min_size=0, max_size=3)),
        min_size=1,
        max_size=5,
    ),
    share=st.sampled_from([0.0, 0.001, 0.02, 0.1, 0.25, 0.6, 1.0]),
    step=st.sampled_from([0, 1, 3, 100]),
    seed=st.integers(0, 999),
)
def test_any_mixture_round_trips(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[Shaped], share: float, step: int, seed: int
) -> None:
    before, after = {}, {}
    for i, (dtype, sizes) in enumerate(shapes):
        shape = tuple(sizes) if DTYPE_BITS[dtype] >= 8 else (*sizes, 2)
        bits = random_bits(dtype, shape, seed + i)
        moved = changed(bits, max(1, DTYPE_BITS[dtype] // 8), share, seed + i + 50, step=step)
        before[str(i)], after[str(i)] = (dtype, shape, bits), (dtype, shape, moved)
    check(tmp_path_factory.mktemp("mix"), source(before), source(after))


def test_classes_far_from_the_others_are_decoded_from_the_page_alone(tmp_path: Path) -> None:
    # Most elements lie within a few classes, which are looked up together; zeros, tiny and huge ones do not.
    bits = weights(150_011, 5)
    bits[[0, 70, 5000, 5001, 150_010]] = 0, 1, 0x7F00, 0xFFFF, 0x8000
    bits[9000:9300] = 0
    after = stepped(bits, 6)
    after[[0, 70, 9100, 150_010]] += 1
    base, target = (ArraySource({"w": side}, dtypes={"w": "BF16"}) for side in (bits, after))
    check(tmp_path, base, target)
    assert codecs(tmp_path / "p") == ("contextual",)


def test_a28_all_patterns_survive(tmp_path: Path) -> None:
    """Each BF16 pattern becomes several others, -0.0 and NaN payloads among them, at a density for contextual."""
    base = np.zeros((65536, 20), np.uint16)
    place = np.arange(65536), np.random.default_rng(2).integers(0, 20, 65536)  # uneven, else planes are smaller
    base[place] = np.arange(65536)
    other = np.random.default_rng(1).permutation(65536).astype(np.uint16)
    used: set[str] = set()
    for column in (base[place] + np.uint16(1), base[place] ^ np.uint16(0x8000), other):
        after = base.copy()
        after[place] = column
        old, new = (ArraySource({"t": bits}, dtypes={"t": "BF16"}) for bits in (base, after))
        built = build_patch(old, new, tmp_path / "p")
        used |= set(codecs(built.path))
        (decoded,) = Part(built.path.read_bytes()).apply(tensor_bytes(old)).values()
        assert decoded == after.tobytes()
    assert "contextual" in used


@pytest.mark.parametrize("rate", [2e-5, 1e-3])
def test_a31_adams_first_step(tmp_path: Path, rate: float) -> None:
    """Several times more changes, and nearly all of them: still exact, in whatever encoding is smallest."""
    bits = weights(200_000, 3)
    base, target = model(bits), model(stepped(bits, 4, rate))
    check(tmp_path, base, target)


def xor_size(base: ArraySource, target: ArraySource) -> int:
    """What XOR and zstd-1 with a 16-byte hash take for each tensor."""
    pairs = zip(tensor_bytes(base), tensor_bytes(target), strict=True)
    return sum(
        16 + len(zstd.compress((np.frombuffer(a, np.uint8) ^ np.frombuffer(b, np.uint8)).tobytes(), level=1))
        for (_, a), (_, b) in pairs
    )


def noise(seed: int) -> np.ndarray:
    """Random bits."""
    return random_bits("BF16", (100_000,), seed).view(np.uint16)


def moved(share: float, *, step: int = 3) -> np.ndarray:
    """Weights of which a share moved, whatever their size."""
    return changed(weights(100_000, 1).view(np.uint8), 2, share, 3, step=step).view(np.uint16)


CASES = {
    "constants": lambda: (np.zeros(100_000, np.uint16), np.full(100_000, 0x3F80, np.uint16)),
    "random bits": lambda: (noise(1), noise(2)),
    "a few random bits": lambda: (weights(100_000, 1), moved(0.01, step=0)),
    "a tenth": lambda: (weights(100_000, 1), moved(0.1)),
    "a quarter": lambda: (weights(100_000, 1), moved(0.24)),
    "tiny": lambda: (weights(5, 1), weights(5, 2)),
    "one of many": lambda: (weights(100_000, 1), np.concatenate([weights(100_000, 1)[:-1], weights(1, 9)])),
    "nothing": lambda: (weights(1000, 1), weights(1000, 1)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_never_larger_than_the_best_other_encoding(tmp_path: Path, case: str) -> None:
    old, new = CASES[case]()
    base, target = model(old), model(new)
    ours = build_patch(base, target, tmp_path / "a").size
    quick = build_patch(base, target, tmp_path / "b", encode_for="speed").size
    header = build_patch(base, base, tmp_path / "c").size
    assert ours <= quick * 1.01 + 64 * 3
    assert ours - header <= xor_size(base, target) * 1.01 + 64 * 3


def test_the_same_bytes_from_any_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are cut small here, so that there are many of them."""
    monkeypatch.setattr(encoder, "GROUP_BYTES", 1 << 16)
    monkeypatch.setattr(table_module, "GROUP_BYTES", 1 << 16)
    bits = weights(400_000, 5)
    base, target = model(bits, 20), model(stepped(bits, 6), 20)
    digests = {build_patch(base, target, tmp_path / "p", threads=threads).sha256 for threads in (1, 2, 3, 7)}
    assert len(digests) == 1
    with PatchFile.open(tmp_path / "p") as patch:
        assert patch.table.groups > 5
    path = written(tmp_path, "base", base)
    for threads in (1, 3):
        with Checkpoint.open(path) as checkpoint:
            apply_patch(checkpoint, [tmp_path / "p"], tmp_path / "out", threads=threads)
        with Checkpoint.open(tmp_path / "out") as out:
            assert same_bytes(out, target)


def test_groups_are_cut_at_32_mib(tmp_path: Path) -> None:
    bits = weights(9 << 20, 7)
    after = bits.copy()
    after[np.random.default_rng(8).integers(0, bits.size, bits.size >> 12)] ^= 1
    base = ArraySource({"a": bits.reshape(9, -1), "b": bits.reshape(-1, 1024)}, dtypes={"a": "BF16", "b": "BF16"})
    target = ArraySource({"a": after.reshape(9, -1), "b": after.reshape(-1, 1024)}, dtypes={"a": "BF16", "b": "BF16"})
    build_patch(base, target, tmp_path / "p")
    with PatchFile.open(tmp_path / "p") as patch:
        assert patch.table.groups == -(-2 * bits.nbytes // GROUP_BYTES)


def test_many_small_changes_to_bytes_in_several_blocks_of_one_group(tmp_path: Path) -> None:
    """A fifth to a quarter of one-byte elements: here positions take more memory than the block, but still win."""
    bits = np.random.default_rng(1).integers(100, 110, 600_000, dtype=np.uint8)
    after = changed(bits, 1, 0.28, 2, step=2)
    names = [f"t{i}" for i in range(3)]
    base, target = (
        ArraySource(dict(zip(names, np.array_split(content, 3), strict=True)), dtypes=dict.fromkeys(names, "F8_E4M3"))
        for content in (bits, after)
    )
    built = build_patch(base, target, tmp_path / "p")
    assert codecs(built.path) == ("contextual",)
    with Checkpoint.open(written(tmp_path, "base", base)) as checkpoint:
        assert apply_patch(checkpoint, [built.path], tmp_path / "out") == built.target_state.digest


def test_inspect_shares_a_groups_bytes_among_its_tensors(tmp_path: Path) -> None:
    bits = weights(100_000, 1)
    built = build_patch(model(bits), model(stepped(bits, 2)), tmp_path / "p")
    rows = inspect([built.path])["tensors"]
    assert {row["encoding"] for row in rows} == {"contextual"}
    with PatchFile.open(built.path) as patch:
        assert abs(sum(row["bytes"] for row in rows) - patch.entry_size("contextual")) <= len(rows)


# -- hostile


class Pair:
    def __init__(self, folder: Path) -> None:
        bits = weights(20_000, 1)
        self.base, self.target = model(bits), model(stepped(bits, 2))
        self.path = written(folder, "base", self.base)
        built = build_patch(self.base, self.target, folder / "p")
        self.raw, self.base_state, self.target_state = built.path.read_bytes(), built.base_state, built.target_state
        self.image = Image.create(folder / "image", self.base, self.base_state)

    def refused(self, raw: bytes, folder: Path) -> None:
        (folder / "hostile").write_bytes(raw)
        with Checkpoint.open(self.path) as base, pytest.raises(MailboatError):
            apply_patch(base, [folder / "hostile"], folder / "out")
        with pytest.raises(MailboatError):
            self.image.prepare([folder / "hostile"], self.target_state, scratch=folder)
        assert not (folder / "out").exists()
        assert self.image.digest == self.base_state.digest


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


def with_words(raw: bytes, words: bytes) -> bytes:
    """The patch with other words in its only group, and a table that fits them."""
    metadata, entries = taken_apart(raw)
    table = Table.from_bytes(zstd.decompress(entries["table"]), int(metadata["tensors"]))
    raw_table = replace(table, group_words=np.array([len(words) // 4], np.uint32)).to_bytes()
    entries |= {"table": compress_table(raw_table), "contextual": words}
    return put_together(metadata | {"table_bytes": str(len(raw_table))}, entries)


def test_the_valid_patch_is_contextual_and_accepted(pair: Pair, tmp_path: Path) -> None:
    metadata, entries = taken_apart(pair.raw)
    assert metadata["codecs"] == "contextual"
    assert with_words(pair.raw, entries["contextual"]) == pair.raw
    (tmp_path / "p").write_bytes(pair.raw)
    pair.image.prepare([tmp_path / "p"], pair.target_state, scratch=tmp_path).close()


@pytest.mark.parametrize(
    "words",
    [
        lambda w: w[:-4], lambda w: w + bytes(4), lambda w: w[4:], lambda w: bytes(len(w)), lambda w: b"\xff" * len(w),
        lambda w: w[:4], lambda w: bytes(4), lambda w: b"\xff" * (1 << 20), lambda w: w + w,
    ],
)  # fmt: skip
def test_a54_words_cut_short_grown_or_replaced(pair: Pair, tmp_path: Path, words: object) -> None:
    entries = taken_apart(pair.raw)[1]
    pair.refused(with_words(pair.raw, words(entries["contextual"])), tmp_path)  # type: ignore[operator]


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a54_any_mutation_of_the_words_is_refused(
    pair: Pair, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    words = bytearray(taken_apart(pair.raw)[1]["contextual"])
    for _ in range(data.draw(st.integers(1, 4))):
        words[data.draw(st.integers(0, len(words) - 1))] ^= data.draw(st.integers(1, 255))
    if bytes(words) != taken_apart(pair.raw)[1]["contextual"]:
        pair.refused(with_words(pair.raw, bytes(words)), tmp_path_factory.mktemp("m"))


@pytest.mark.parametrize(
    ("column", "value"),
    [("block_changed", 0), ("block_changed", 3000), ("block_changed", 1), ("encoding", 3), ("encoding", 1)],
)
def test_a54_counts_beyond_the_shape_and_other_encodings(pair: Pair, tmp_path: Path, column: str, value: int) -> None:
    metadata, entries = taken_apart(pair.raw)
    table = Table.from_bytes(zstd.decompress(entries["table"]), int(metadata["tensors"]))
    array = getattr(table, column).copy()
    array[0] = value
    raw_table = replace(table, **{column: array}).to_bytes()
    entries["table"] = compress_table(raw_table)
    pair.refused(put_together(metadata | {"table_bytes": str(len(raw_table))}, entries), tmp_path)


@pytest.mark.parametrize("words", [[0], [1 << 23], [2**32 - 1], [], [1, 1]])
def test_a54_group_sizes_that_lie(pair: Pair, tmp_path: Path, words: list[int]) -> None:
    metadata, entries = taken_apart(pair.raw)
    table = Table.from_bytes(zstd.decompress(entries["table"]), int(metadata["tensors"]))
    raw_table = replace(table, group_words=np.array(words, np.uint32)).to_bytes()
    entries["table"] = compress_table(raw_table)
    pair.refused(put_together(metadata | {"table_bytes": str(len(raw_table))}, entries), tmp_path)
